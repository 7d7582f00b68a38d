"""A line in the kernel log that may be a fault has the check run at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from healthd.node.checks.kernel_watch import PAUSE_SECONDS, KernelWatch
from tests.node.node_kit import eventually

XID = b"3,100,98765432,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
QUIET = b"6,101,98765433,-;eth0: link becomes ready\n"


@contextmanager
def kernel(path: Path) -> Iterator[int]:
    """A log that is written to like the kernel's: a pipe, of which each reader sees what comes after it opened."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@asynccontextmanager
async def watched(path: Path, params: Mapping[str, Any] | None = None) -> AsyncIterator[list[float]]:
    """When the check was asked for."""
    looks: list[float] = []
    task = asyncio.create_task(KernelWatch(str(path), params or {}, lambda: looks.append(time.monotonic())).run())
    await asyncio.sleep(0)
    try:
        yield looks
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_fault_is_looked_at_at_once_and_an_ordinary_line_is_not(tmp_path: Path) -> None:
    with kernel(tmp_path / "kmsg") as log:
        async with watched(tmp_path / "kmsg") as looks:
            os.write(log, QUIET)
            os.write(log, XID)
            await eventually(lambda: len(looks) == 1, 10)


async def test_a_flood_of_faults_is_one_run_a_second(tmp_path: Path) -> None:
    with kernel(tmp_path / "kmsg") as log:
        async with watched(tmp_path / "kmsg") as looks:

            def write_and_count() -> int:
                os.write(log, XID * 20)
                return len(looks)

            await eventually(lambda: write_and_count() >= 3, 30)
            assert min(later - former for former, later in pairwise(looks)) > 0.99 * PAUSE_SECONDS


async def test_lines_of_the_operator_count_and_benign_ones_do_not(tmp_path: Path) -> None:
    own = {"patterns": {"fan": {"pattern": "fan 3 stopped"}}, "benign": ["pid=1, GPU has fallen"]}
    with kernel(tmp_path / "kmsg") as log:
        async with watched(tmp_path / "kmsg", own) as looks:
            os.write(log, XID)
            os.write(log, QUIET)
            await eventually(lambda: not pending(log), 10)
            assert looks == []
            os.write(log, b"4,102,98765434,-;bmc: fan 3 stopped\n")
            await eventually(lambda: len(looks) == 1, 10)


def pending(descriptor: int) -> bool:
    """Whether something is in the pipe that was not read."""
    import fcntl
    import termios

    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), "little") > 0


async def test_a_log_that_cannot_be_read_or_ends_is_left_to_the_interval(tmp_path: Path) -> None:
    async with watched(tmp_path / "none") as looks:
        assert looks == []
    with kernel(tmp_path / "kmsg"):
        watch = watched(tmp_path / "kmsg")
        looks = await watch.__aenter__()
    (tmp_path / "plain").write_bytes(XID)
    descriptors = len(os.listdir("/proc/self/fd"))
    task = asyncio.create_task(KernelWatch(str(tmp_path / "plain"), {}, lambda: None).run())
    await asyncio.sleep(0)
    assert (task.done(), len(os.listdir("/proc/self/fd"))) == (False, descriptors), "it is no device"
    task.cancel()
    await eventually(lambda: len(looks) == 1, 10)  # its end: what came last may have been a fault
    await watch.__aexit__(None, None, None)
