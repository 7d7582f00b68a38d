"""
Starts a program whose whole process tree can be waited for and killed: for rounds over several nodes.

What it prints goes to a file of its folder: the end of a pipe that a grandchild holds is never waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from checks.collective.nccom.environment import FOLDER_PREFIX, environment_of
from checks.host import guard

MAX_OUTPUT_BYTES = 1 << 20
# The guard ends what is left at once, but for what the kernel holds.
_END_SECONDS = 3.0


class Tree:
    """Made by `start_tree`. It ends with this process as well."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def running(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self._process.returncode is None

    async def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, as a shell would say it; None when it did not end in time. It goes on then."""
        try:
            async with asyncio.timeout(seconds):
                code = await self._process.wait()
                return 128 - code if code < 0 else code
        except TimeoutError:
            return None

    async def end(self) -> None:
        """Returns when nothing of it is left, or known to be stuck in the kernel."""
        if not self.running:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        if await self.wait(_END_SECONDS) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self.wait(_END_SECONDS)

    def output(self) -> str:
        """What it has printed on both streams, its first megabyte."""
        return read_text(self._output)


async def start_tree(argv: Sequence[str], environment: Mapping[str, str], folder: Path, name: str) -> Tree:
    """
    Start a program in `folder`, in a session of its own; `name` is that of the file with what it prints.

    Call it in the main thread: it ends with the thread that started it. OSError when nothing can be started at all; a
    program that is not there ends with 127.
    """
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "-1", str(folder), "--", *argv]
    output = folder / name
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=environment_of(os.environ, environment),
            cwd=folder,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    return Tree(process, output)


def make_folder() -> Path:
    """
    A folder for one round that no other user can read. Its name is short, because those of Unix sockets are bounded.
    """
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))


def drop_folder(folder: Path) -> None:
    """With all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def read_text(path: Path) -> str:
    """The first megabyte of a file of ours; empty where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
