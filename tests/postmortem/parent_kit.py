"""What the tests of parent, and those beside them, are made with."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.patience import PATIENCE


def end(process: subprocess.Popen[bytes]) -> None:
    """End a parent and its command, which would outlive it."""
    both = children(process.pid) if process.poll() is None else []
    for pid in (process.pid, *both):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_until(descriptor: int, text: bytes) -> bytes:
    """What is read up to a text."""
    read = b""
    deadline = time.monotonic() + 20 * PATIENCE
    while text not in read:
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], read
        data = os.read(descriptor, 65536)
        assert data, read
        read += data
    return read


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
