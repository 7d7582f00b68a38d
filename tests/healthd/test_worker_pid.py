"""The worker is told apart from the guard that we started: waits and corpses are the worker's."""

from __future__ import annotations

import asyncio
import os
import sys

from checks.guard import parent_of
from healthd.runner.child import Child
from healthd.runner.shown_times import waited_seconds
from healthd.runner.worker_pid import find_worker
from healthd.runner.workers import WORKER
from tests.healthd.node_kit import eventually


async def started() -> Child:
    child = Child([sys.executable, "-I", "-S", WORKER], {})
    await eventually(lambda: child.worker_pid != child.pid, 60)
    return child


def test_pid_of_a_worker_is_not_that_of_its_guard() -> None:
    async def look() -> None:
        child = await started()
        try:
            worker = child.worker_pid
            assert worker != child.pid
            assert parent_of(worker) == child.pid
            assert find_worker(child.pid, known=os.getpid()) == worker  # a pid that another process has now
            # What the ranks are asked for: how long the worker waited for a processor.
            assert waited_seconds([worker]).keys() == {int(name) for name in os.listdir(f"/proc/{worker}/task")}
        finally:
            child.kill()
            assert await child.gone(60)
        assert child.worker_pid == child.pid  # nothing is left under this guard

    asyncio.run(look())
