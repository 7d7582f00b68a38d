"""The worker is told apart from the guard that the runner starts: waits and the pid in messages are the worker's."""

from __future__ import annotations

import os
import sys

from checks.host.descendants import first_child, parent_of
from healthd.runner.collective.node_collective import signs_of_life
from healthd.runner.workers.launch import Launch, command
from healthd.runner.workers.worker_lane import WorkerLane
from healthd.runner.workers.workers import Unreaped, WorkerProcess, Workers
from tests.node.node_kit import eventually
from tests.runner.runner_kit import make_runner


async def started() -> WorkerProcess:
    child = WorkerProcess(Launch(command(sys.executable, alone=True), {}))
    await eventually(lambda: child.worker_pid != child.pid, 60)
    return child


async def test_pid_of_a_worker_is_not_that_of_its_guard() -> None:
    child = await started()
    try:
        worker = child.worker_pid
        assert worker != child.pid
        assert parent_of(worker) == child.pid
        assert first_child(child.pid, known=os.getpid()) == worker  # a pid that another process has now
        workers = Workers(make_runner().settings, unreaped := Unreaped(), {}, None)
        lane = WorkerLane(workers, "cpu:0")
        lane.process = child
        # That it waited for a processor counts, not that its guard did.
        _, waited = signs_of_life([lane])
        assert worker in waited
        assert child.pid not in waited
        unreaped.add("cpu:0", child)
        stuck = workers.stuck("cpu:0")
        assert stuck is not None
        assert f"(pid {worker})" in stuck.message
    finally:
        child.kill()
        assert await child.wait_gone(60)
    assert child.worker_pid == child.pid  # nothing is left under this guard
