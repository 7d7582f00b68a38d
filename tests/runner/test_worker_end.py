"""What is said of a worker that ended in the middle: whether its node has anything to do with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from checks.collective.judge import tells_of_peers
from healthd.runner.workers.launch import Launch, command
from healthd.runner.workers.outcome import Outcome, last_line
from healthd.runner.workers.workers import WINDOW_SECONDS, OomKills, WorkerProcess, read_oom_kills
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


def test_a_process_that_was_killed_for_want_of_memory_long_ago_excuses_no_death() -> None:
    at, count = [0.0], [3]
    kills = OomKills(lambda: count[0], lambda: at[0])
    count[0] = 4
    for at[0] in (1.0, WINDOW_SECONDS, WINDOW_SECONDS + 1.0):
        kills.mark()
        assert kills.have_grown(), "the one that was killed may not have ended yet"
    at[0] = 2 * WINDOW_SECONDS
    kills.mark()
    assert not kills.have_grown()
    count[0] = 5
    assert kills.have_grown()


def test_this_kernel_counts_the_processes_that_it_ended_for_want_of_memory() -> None:
    count = read_oom_kills()
    assert count is not None
    assert count >= 0


WATCHDOG = """NCCL INFO Bootstrap: using eth0
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 0] watchdog thread terminated with exception: NCCL error: remote process exited
Last error:
Exception raised from checkForNCCLErrorsInternal (most recent call first):
Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
"""


def test_last_line_of_a_communicator_that_gave_up_tells_of_its_peers() -> None:
    gave_up, aborted = last_line(WATCHDOG), last_line(WATCHDOG.replace("terminate called", "a line"))
    assert gave_up.startswith("Fatal Python error: Aborted: terminate called after")
    assert "NCCL error: remote process exited" in gave_up
    assert [tells_of_peers(line) for line in (gave_up, aborted)] == [True, False]
