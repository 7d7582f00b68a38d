"""What is said of a worker that ended in the middle: whether its node has anything to do with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from healthd.runner.workers.launch import Launch, command
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.process import WorkerProcess, read_oom_kills
from tests.node.node_kit import eventually


@pytest.mark.parametrize(
    ("counts", "reason", "message"),
    [
        ((3, 4), "CannotAllocate", "killed by SIGKILL when memory ran out"),
        ((3, 3), "Crashed", "killed by SIGKILL"),
        ((None, None), "Crashed", "killed by SIGKILL"),
        ((None, 4), "Crashed", "killed by SIGKILL"),
    ],
)
def test_worker_that_the_kernel_ended_for_want_of_memory_did_not_crash(
    counts: tuple[int | None, int | None], reason: str, message: str
) -> None:
    async def outcome() -> Outcome:
        left = list(counts)
        child = WorkerProcess(Launch(command(sys.executable, alone=True), {}), oom_kills=lambda: left.pop(0))
        await eventually(lambda: child.worker_pid != child.pid, 60)
        os.kill(child.worker_pid, signal.SIGKILL)
        found = await Outcome(target="cpu:0").read(child, 1, 60.0)
        assert await child.wait_gone(60)
        return found

    found = asyncio.run(outcome())
    assert found.missing is not None
    assert (found.missing.reason, found.missing.message) == (reason, message)
    assert found.crashed, "another attempt may have the memory"


def test_this_kernel_counts_the_processes_that_it_ended_for_want_of_memory() -> None:
    count = read_oom_kills()
    assert count is not None
    assert count >= 0
