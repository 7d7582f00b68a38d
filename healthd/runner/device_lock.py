"""
The lock file of an accelerator: whoever runs active checks on it holds the lock, daemon, `check` and `preflight` alike.

Beside it the node daemon keeps a file that says which jobs have the node, for the others to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from checks.worker.protocol import shorten

_RETRY_SECONDS = 0.05
_LEASED = "leased"  # first the boot id, then what has the node
_LEASED_BYTES = 4096


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


def write_leased(run_dir: Path, boot_id: str | None, jobs: Sequence[str]) -> None:
    """
    Say which jobs have the node, in words; no file where none has. Raises OSError.

    The file outlives its daemon on purpose: a lease goes on while the daemon is away. It ends with the boot.
    """
    path = run_dir / _LEASED
    if not jobs:
        path.unlink(missing_ok=True)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{_LEASED}.new")
    text = shorten(" ".join(", ".join(jobs).split()))
    new.write_text(f"{boot_id or ''}\n{text}\n", encoding="utf-8", errors="replace")
    new.chmod(0o644)  # whoever may run checks may know it
    new.replace(path)


def read_leased(run_dir: Path, boot_id: str | None) -> str | None:
    """Why the node is a job's by what its daemon wrote; None when it is not. What cannot be told counts as a job."""
    path = run_dir / _LEASED
    try:
        with path.open("rb") as file:
            text = file.read(_LEASED_BYTES).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"whether the node is leased cannot be seen: {path}: {error.strerror}"
    boot, _, jobs = text.partition("\n")
    if not text.strip() or (boot and boot_id is not None and boot != boot_id):
        return None
    return f"leased to {jobs.strip() or 'a job'} ({path})"
