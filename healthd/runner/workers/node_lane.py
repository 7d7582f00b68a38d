"""The lane of the node: its worker surveys the machine, runs the node's checks, and judges what devices measured."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from checks.contract import CheckInfo, Missing
from checks.worker.protocol import from_evidence
from healthd.runner.run_record import RunRecord
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, WorkerLane
from healthd.runner.workers.workers import WorkerProcess, Workers

# Ways in which a worker ends that no other process brought about.
_SPONTANEOUS = frozenset({"Crashed", "Garbage", "DeviceLost"})


class NodeLane(WorkerLane):
    """The lane of the node in one run."""

    def __init__(self, workers: Workers, record: RunRecord) -> None:
        super().__init__(workers, None)
        self._record = record

    def survey(self) -> asyncio.Future[Outcome]:
        """Ask for devices and holders; later commands of the worker use what it found."""

        def finish(outcome: Outcome) -> None:
            if outcome.answers:
                self._workers.note_survey(outcome.answers[0])
                self._record.surveyed = tuple(device["target"] for device in self._workers.inventory["devices"])
            self._record.request.on_survey(outcome)

        if (lost := _stuck(self._workers, "survey")) is not None:
            finish(lost)
            answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            answer.set_result(lost)
            return answer
        timeout_seconds = self._workers.settings.survey_timeout_seconds
        return self.ask(Job(check="survey", command={"kind": "survey"}, timeout_seconds=timeout_seconds, finish=finish))

    def submit_check(self, info: CheckInfo) -> None:
        """Run a check of the node, and publish its result."""
        if (stuck := self._workers.stuck(f"node/{info.name}")) is not None:
            self._record.publish(self._record.compose(info, [Outcome(target="node").fail("Stuck", stuck.message)]))
            return

        def finish(outcome: Outcome) -> None:
            complete = outcome.missing is None and bool(outcome.evidence)
            if complete:
                boot_id = self._workers.boot_id
                self._record.request.on_evidence(info.name, tuple(outcome.evidence), boot_id, outcome.began)
            if info.judged and complete:
                self.submit_judge(info, [outcome])
            else:
                self._record.publish(self._record.compose(info, [outcome]))

        self.submit(self._record.job(info, self._record.command(info, ("node",), None), finish))

    def submit_judge(self, info: CheckInfo, outcomes: Sequence[Outcome]) -> None:
        """Let the worker compare what was measured, and publish the result."""
        self.judge(info, outcomes, lambda said: self._record.publish(self._record.compose(info, outcomes, said)))

    def judge(
        self, info: CheckInfo, outcomes: Sequence[Outcome], finish: Callable[[Outcome], None] = lambda _: None
    ) -> asyncio.Future[Outcome]:
        """Let the worker compare what was measured; its outcome."""
        command: dict[str, Any] = {
            "kind": "judge",
            "evidence": [from_evidence(item) for outcome in outcomes for item in outcome.evidence],
            "missing": [dataclasses.asdict(item) for item in in_order_of_end(outcomes)],
        }
        return self.ask(
            Job(
                check=info.name,
                command=command,
                timeout_seconds=self._workers.settings.judge_timeout_seconds,
                finish=finish,
                retry=False,  # pure arithmetic that crashes once crashes again
            )
        )


async def ask_node(workers: Workers, kind: str, timeout_seconds: float) -> Outcome:
    """The outcome of one command to a worker of the node of its own, which ends with it."""
    if (lost := _stuck(workers, kind)) is not None:
        return lost
    lane = WorkerLane(workers, None)
    answer = lane.ask(Job(check=kind, command={"kind": kind}, timeout_seconds=timeout_seconds))
    lane.close()
    await lane.serve()
    return answer.result()


def _stuck(workers: Workers, kind: str) -> Outcome | None:
    """
    Why a command is not begun: an earlier worker of it could not be killed. None when it can.

    What hangs in the kernel hangs again, and would leave one more process each time.
    """
    stuck = workers.stuck(f"node/{kind}")
    return None if stuck is None else Outcome(target="node").fail(stuck.reason, stuck.message)


async def ask_prestarted(process: WorkerProcess, kind: str, timeout_seconds: float) -> Outcome:
    """The outcome of one command to a worker of the node without a lane; it is killed when it does not answer."""
    process.send(json.dumps({"kind": kind, "id": 0}).encode() + b"\n")
    return await Outcome(target="node").read(process, 0, timeout_seconds)


def in_order_of_end(outcomes: Iterable[Outcome]) -> list[Missing]:
    """
    The ranks without an outcome, numbered in the order in which they ended spontaneously.

    A death is seen a moment later than its effect on the other ranks, which then raise: a rank that raised came first
    only when it did so clearly earlier.
    """
    lost = [(outcome, outcome.missing) for outcome in outcomes if outcome.missing is not None]
    first = [(o, m) for o, m in lost if m.reason in _SPONTANEOUS or not o.worker_lost]
    first.sort(key=lambda item: item[0].ended - (0.25 if item[1].reason in _SPONTANEOUS else 0.0))
    order = {id(outcome): number for number, (outcome, _) in enumerate(first)}
    return [dataclasses.replace(missing, order=order.get(id(outcome))) for outcome, missing in lost]
