"""Runs the check of the kernel log as soon as the kernel logs a line that may be a fault."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from healthd.core.tasks import wait_for

log = logging.getLogger(__name__)

CHECK = "kernel_log"
PAUSE_SECONDS = 1.0
"""From one run to the next, however much the kernel logs."""
_RECORD_BYTES = 8192  # the kernel's own bound of one record
_RECORDS_AT_ONCE = 256  # then other work has its turn


class KernelWatch:
    """
    Start `run` as a supervised task.

    It reads new lines of the log and leaves the verdict to the check: a line is only a reason to run it.
    """

    def __init__(self, path: str, params: Mapping[str, Any], look: Callable[[], None]) -> None:
        """`path` is that of the kernel's log, `params` are those of the check. `look` has the check run now."""
        self._path = path
        self._params = params
        self._look = look
        self._found = asyncio.Event()
        self._may_be_fault: Callable[[str], bool] | None = None

    async def run(self) -> None:
        """Watch for ever. If the log cannot be read, or no longer, the check runs by its interval only."""
        loop = asyncio.get_running_loop()
        if (descriptor := _open_at_end(self._path)) is not None:
            ended = asyncio.Event()
            try:
                loop.add_reader(descriptor, self._read, descriptor, ended)
                await self._look_until(ended)
            except PermissionError:  # a plain file in its place, which cannot be waited for
                log.debug("the kernel log is not watched: %s is not a device", self._path)
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        await loop.create_future()  # a supervised task that returns is started again

    async def _look_until(self, ended: asyncio.Event) -> None:
        while True:
            await self._found.wait()
            self._found.clear()
            self._look()
            if await wait_for(ended, PAUSE_SECONDS):
                return

    def _read(self, descriptor: int, ended: asyncio.Event) -> None:
        for _ in range(_RECORDS_AT_ONCE):
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # lines were overwritten before they were read: any may be a fault
                    self._found.set()
                    continue
                log.warning("the kernel log can no longer be watched: %s; %s runs by its interval", error, CHECK)
                record = b""
            if not record:
                asyncio.get_running_loop().remove_reader(descriptor)
                ended.set()
                self._found.set()
                return
            if not self._found.is_set() and self._judge()(record.decode("utf-8", "replace")):
                self._found.set()

    def _judge(self) -> Callable[[str], bool]:
        if self._may_be_fault is None:
            from checks.system.kernel_log import watched_for  # megabytes, which a quiet node does not need

            self._may_be_fault = watched_for(self._params)
        return self._may_be_fault


def _open_at_end(path: str) -> int | None:
    """The kernel log from here on, without what is in it; None where it cannot be read, as without the right to."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        log.debug("the kernel log is not watched: %s", error)
        return None
    with contextlib.suppress(OSError):
        os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor
