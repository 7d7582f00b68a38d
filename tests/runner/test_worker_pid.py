"""The worker is told apart from the guard that we started: waits and corpses are the worker's."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from checks.host.guard import parent_of
from healthd.runner.collective.group import Collective
from healthd.runner.workers.child import Child
from healthd.runner.workers.worker_lane import Lane
from healthd.runner.workers.worker_pid import find_worker
from healthd.runner.workers.workers import WORKER, Corpses, Workers
from tests.node.node_kit import eventually
from tests.runner.runner_kit import make_runner


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
            workers = Workers(make_runner().settings, corpses := Corpses(), {}, None)
            lane = Lane(workers, "cpu:0")
            lane.child = child
            # That it waited for a processor counts, not that its guard did.
            _, waited = Collective(workers, [lane], Path("/nowhere"))._signs_of_life()
            assert worker in waited
            assert child.pid not in waited
            corpses.add("cpu:0", child)
            stuck = workers.stuck("cpu:0")
            assert stuck is not None
            assert f"(pid {worker})" in stuck.message
        finally:
            child.kill()
            assert await child.gone(60)
        assert child.worker_pid == child.pid  # nothing is left under this guard

    asyncio.run(look())
