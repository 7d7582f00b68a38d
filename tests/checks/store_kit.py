"""Real file systems for tests of stores: tmpfs, ext4 on a loop device, bind mounts, and a FUSE server with faults."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.hosts.temporary import memory_folder

FUSE = Path(__file__).parents[1] / "fakes/fuse_store.py"


@contextlib.contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    """Whatever mount(8) mounts with these arguments, at a new directory."""
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", *arguments, str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@contextlib.contextmanager
def tmpfs(point: Path, options: str) -> Iterator[Path]:
    with mounted(point, "-t", "tmpfs", "-o", options, "tmpfs") as found:
        yield found


@contextlib.contextmanager
def ext4(point: Path, megabytes: int) -> Iterator[Path]:
    """On a loop device over a file in memory."""
    image = (memory_folder() or point.parent) / f"{point.name}-{id(point)}.img"
    try:
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        with mounted(point, "-o", "loop", str(image)) as found:
            yield found
    finally:
        image.unlink(missing_ok=True)


@contextlib.contextmanager
def fuse(point: Path, faults: dict[str, object]) -> Iterator[subprocess.Popen[str]]:
    """A FUSE server with faults; its process. What waits for it is let go at the end."""
    point.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, str(FUSE), str(point), json.dumps(faults)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout
            assert server.stdout.readline() == "mounted\n"
            yield server
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
            subprocess.run(["umount", "-l", str(point)], check=False)
