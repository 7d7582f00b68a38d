"""Every long-lived task of the aggregator is supervised: what fails is started again, or ends the service."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from healthd.aggregator.drain.plan import ActuatorError, Observed, RejectedNode
from healthd.aggregator.jobs.ungated import HookedJob, UngatedJobs
from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.errors import HealthdError, StoreError
from healthd.core.model import Allocation
from healthd.core.tasks import OnEnd, Tasks
from tests.aggregator.actuators_kit import Scene, Scheduler
from tests.node.node_kit import eventually
from tests.node.node_kit import state as state_of
from tests.patience import PATIENCE


async def test_tasks_of_an_aggregator_are_supervised_and_their_failures_are_shown(tmp_path: Path) -> None:
    async def fails() -> None:
        raise ZeroDivisionError("planted")

    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path)
    async with (
        aggregator(settings, Policy()) as (address, tasks),
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, verify=False) as client,
    ):
        names = {"engine", "leadership", "stragglers", "count of jobs without a gate"}
        assert names < tasks.errors.keys()
        assert (await client.get("/readyz?verbose")).text == "leader\n"
        tasks.supervise("planted", fails)
        await eventually(lambda: tasks.errors["planted"] > 0)
        plain, verbose = await client.get("/readyz"), await client.get("/readyz?verbose")
        assert plain.status_code == 200
        assert "not restarted yet: planted" in plain.text
        assert "task planted restarts soon after 1 failures; the last: ZeroDivisionError" in verbose.text
        metrics = (await client.get("/metrics")).text
        assert 'healthd_task_errors_total{task="planted"} 1.0' in metrics
        assert 'healthd_task_errors_total{task="stragglers"} 0.0' in metrics


async def test_what_failed_in_an_earlier_lead_is_not_shown_as_down_once_it_runs_in_the_next() -> None:
    whole = Tasks()
    first, next_one = Tasks(within=whole), Tasks(within=whole)
    first.supervise("engine", raises, OnEnd.FATAL)
    with pytest.raises(HealthdError):
        await first.failure()
    assert [(one.task, one.running) for one in whole.failures()] == [("engine", False)]
    next_one.supervise("engine", asyncio.Event().wait, OnEnd.FATAL)  # type: ignore[arg-type]
    assert [(one.task, one.running, one.times) for one in whole.failures()] == [("engine", True, 1)]
    await next_one.stop(1.0)


async def returns() -> None:
    """What must run for ever, and does not."""


async def raises() -> None:
    raise KeyError("nobody thought of this")


async def is_cancelled_by_chance() -> None:
    waited_for = asyncio.get_running_loop().create_future()
    waited_for.cancel()
    await waited_for


async def is_told() -> None:
    raise StoreError("another one has the database")


@pytest.mark.parametrize(
    ("work", "said", "traceback"),
    [
        (returns, "engine has ended unexpectedly, and the service cannot run without it", False),
        (raises, "engine has failed (KeyError: 'nobody thought of this'); the log has the traceback", True),
        (is_cancelled_by_chance, "engine has failed (RuntimeError: something that it waited for was cancelled)", True),
        (is_told, "another one has the database", False),
    ],
)
def test_end_of_a_fatal_task_ends_the_work_beside_it_with_one_line(
    work: object, said: str, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        tasks = Tasks()
        tasks.supervise("engine", work, OnEnd.FATAL)  # type: ignore[arg-type]
        with pytest.raises(HealthdError, match="^" + said.replace("(", r"\(").replace(")", r"\)")):
            await asyncio.wait_for(tasks.first(asyncio.Event().wait()), PATIENCE)
        assert tasks.errors == {"engine": 1}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert ("Traceback" in caplog.text) is traceback


def test_result_comes_through_while_no_fatal_task_ends() -> None:
    async def main() -> int:
        tasks = Tasks()
        tasks.supervise("engine", asyncio.Event().wait, OnEnd.FATAL)  # type: ignore[arg-type]
        try:
            return await tasks.first(asyncio.sleep(0, 7))
        finally:
            await tasks.stop(1.0)

    assert asyncio.run(main()) == 7


class Blinded(Scene):
    """A scene whose fleet cannot be looked at, for a reason that nobody foresaw."""

    blind = True

    def _look(self, told: Mapping[str, RejectedNode]) -> Observed:
        if self.blind:
            raise ZeroDivisionError("planted in the look")
        return super()._look(told)


async def test_actuator_that_failed_in_an_unforeseen_way_takes_nodes_out_again() -> None:
    scheduler = Scheduler()
    scene = Blinded(scheduler)
    tasks = Tasks(first_restart_seconds=0.001)
    scene.quarantine("n1")
    tasks.supervise("actuator", scene.hand.run)
    await eventually(lambda: tasks.errors["actuator"] > 1)
    scene.blind = False
    await eventually(lambda: "n1" in scheduler.marks)
    await tasks.stop(1.0)


class Erring(Scheduler):
    """Its calls about `nodes`, or all of one kind, raise what nobody foresaw."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.calls = set(calls)

    def _call(self, what: str, node: str = "") -> None:
        super()._call(what, node)
        if self.calls & {what, f"{what} {node}"}:
            raise ZeroDivisionError(f"planted in {what}")


async def test_unforeseen_exception_in_one_actuator_call_is_a_failed_call_and_tried_again() -> None:
    scheduler = Erring("marked")
    scene = Scene(scheduler)
    scene.quarantine("n1", "n2")
    with pytest.raises(ActuatorError, match="internal error: planted in marked"):
        await scene.hand.turn()
    scheduler.calls = {"remove n1"}
    await scene.hand.turn()
    assert scheduler.marks.keys() == {"n2"}
    assert scene.hand.failures == {"list": 1, "remove": 1}
    scheduler.calls = {"restore n2"}
    scene.suspects.clear()
    await scene.hand.turn()
    assert scheduler.marks.keys() == {"n2"}
    scheduler.calls = set()
    scene.now += 60
    await scene.hand.turn()
    assert scheduler.marks == {}
    assert scene.hand.overdue == 0


async def test_job_that_cannot_be_looked_up_keeps_no_other_from_being_counted() -> None:
    async def gated(job: str) -> bool:
        if job == "1":
            raise ZeroDivisionError("planted")
        return False

    def hooked(job: str) -> HookedJob:
        return HookedJob(id=job, gate=job)

    tasks = Tasks(first_restart_seconds=0.001)
    ungated = UngatedJobs(gated, clock=lambda: 1.0, grace_seconds=0.0, hooked=hooked)
    claims = tuple(Allocation(by="scheduler", holder=job) for job in ("1", "2"))
    ungated.see(dataclasses.replace(state_of(), allocated=claims))
    tasks.supervise("count", ungated.run)
    await eventually(lambda: ungated.figure.examples == ("2",))
    assert tasks.errors == {"count": 1}
    await tasks.stop(1.0)
