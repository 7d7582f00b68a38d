"""
The lock file of an accelerator: whoever runs active checks on it holds the lock, daemon, `check` and `preflight` alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

_RETRY_SECONDS = 0.05


class LockBusyError(Exception):
    """Another process holds it; the message names it."""


class DeviceLock:
    """
    `async with DeviceLock(path, wait_seconds)`: held inside.

    Raises LockBusyError after `wait_seconds`, OSError when the file cannot be made. `waited` tells whether it was free.
    """

    def __init__(self, path: Path, wait_seconds: float) -> None:
        self.path = path
        self.waited = False
        self._wait_seconds = wait_seconds
        self._descriptor = -1

    async def __aenter__(self) -> DeviceLock:
        descriptor = _open(self.path)
        deadline = time.monotonic() + self._wait_seconds
        try:
            while not _taken(descriptor):
                self.waited = True
                if time.monotonic() >= deadline:
                    holder = _holder(descriptor)
                    raise LockBusyError(f"another healthd ({holder}) is running active checks")
                await asyncio.sleep(_RETRY_SECONDS)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        # Closing releases it; the file stays, because removing it would let two hold "the" lock.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    return f"pid {pid}" if pid.isdigit() else "of unknown pid"
