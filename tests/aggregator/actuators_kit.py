"""What the tests of actuators, and those beside them, are made with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

from checks.contract import Status
from healthd.aggregator.drain.controller import DrainController
from healthd.aggregator.drain.plan import (
    ActuatorError,
    Candidate,
    Done,
    Observed,
    Outcome,
    PoolSize,
    RejectedNode,
    Removal,
    Why,
)
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.gate.records import Decided
from healthd.aggregator.policy import Policy
from healthd.core.errors import HealthdError, StoreError
from healthd.core.evidence import reason
from healthd.core.model import Decision, ExcludedNode, NodeState, Quarantine, Reason, Verdict
from tests.aggregator.world import NOW, gate

ACT = ActuatorSettings(kind="kubernetes", mode="act", answer_seconds=5.0, look_seconds=0.05)


def kept(owner: str = "rule:hard", *, since: float = NOW - 60, until: float | None = None) -> Quarantine:
    kind = "rule" if owner.startswith("rule") else "person"
    return Quarantine(reason="EccErrors on neuron:3", owner=owner, owner_kind=kind, since=since, until=until)


def suspect(name: str, quarantine: Quarantine | None = None, **changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "node": name,
        "aliases": (),
        "instance_id": None,
        "pool": "a",
        "quarantine": quarantine,
        "rejected": None,
        "faults": False,
        "allocated": False,
    }
    return Candidate(**{**values, **changes})


def fleet_of(*suspects: Candidate, size: int = 40, breakers: frozenset[str] = frozenset()) -> Observed:
    return Observed(
        suspects=suspects,
        pools=dict.fromkeys(("a", ""), PoolSize(size, Policy().most_out(size))),
        breakers=breakers,
        unsure=False,
    )


def fault(code: str = "WrongResult", status: Status = Status.FAIL) -> Reason:
    return reason(code, f"{code} on neuron:3", node="n1", status=status)


def decided(
    *excluded: tuple[str, *tuple[Reason, ...]],
    verdict: Verdict = Verdict.REJECT,
    retryable: bool = True,
    gate_id: str = "g-1",
) -> Decision:
    return Decision(
        id=gate_id,
        decision=verdict,
        reasons=(),
        nodes=(),
        excluded=tuple(ExcludedNode(node=name, reasons=tuple(reasons)) for name, *reasons in excluded),
        policy={},
        retryable=retryable,
        decided_at=NOW,
        duration_seconds=1.0,
    )


class Scheduler:
    """Keeps marks; `away` makes every call fail, `slow` makes it hang."""

    name = "scheduler"

    def __init__(self, *, marks: Mapping[str, str] | None = None) -> None:
        self.marks = dict(marks or {})
        self.away: str | None = None
        self.refuses: set[str] = set()
        self.asked: list[str] = []

    def _call(self, what: str, node: str = "") -> None:
        self.asked.append(f"{what} {node}".strip())
        if self.away is not None:
            raise ActuatorError(self.away)

    async def marked(self) -> Mapping[str, str]:
        self._call("marked")
        return dict(self.marks)

    async def remove(self, removal: Removal) -> Outcome:
        self._call("remove", removal.node)
        if removal.node in self.refuses:
            raise ActuatorError(f"{removal.node}: refused")
        if removal.node.startswith("stranger"):
            return Outcome(done=Done.LEFT, note=f"{removal.node} is not known")
        self.marks[removal.node] = removal.reason
        return Outcome(done=Done.OUT, note="drained")

    async def restore(self, node: str) -> Outcome:
        self._call("restore", node)
        del self.marks[node]
        return Outcome(done=Done.BACK, note="resumed")


class Scene:
    """A hand over a fleet whose suspects a test sets; its clock moves by hand."""

    def __init__(self, scheduler: Any, settings: ActuatorSettings = ACT) -> None:
        self.suspects: dict[str, Candidate] = {}
        self.history: list[tuple[str, str, str]] = []
        self.now = 1000.0
        self.wall = NOW
        self.disk_full = False
        self.no_note: HealthdError = StoreError("disk full")
        self.unsure = False
        self.refuted: frozenset[str] = frozenset()
        self.states: dict[str, NodeState] = {}
        self.hand = DrainController(
            scheduler, settings, look=self._look, note=self._note, clock=lambda: self.now, wall=lambda: self.wall
        )

    def quarantine(self, *names: str, owner: str = "rule:hard") -> None:
        self.suspects.update({name: suspect(name, kept(owner)) for name in names})

    def _look(self, told: Mapping[str, RejectedNode]) -> Observed:
        found = {name: suspect(name, rejected=why) for name, why in told.items()}
        for name, one in self.suspects.items():
            found[name] = dataclasses.replace(one, rejected=told.get(name, one.rejected))
        by_state = {
            name for name, state in self.states.items() if name in told and told[name].refuted_by(state, self.wall)
        }
        refuted = self.refuted | by_state
        for name in refuted & found.keys():
            found[name] = dataclasses.replace(found[name], rejected=None)
        return dataclasses.replace(fleet_of(*found.values()), unsure=self.unsure, refuted=refuted)

    async def _note(self, name: str, kind: str, message: str) -> None:
        if self.disk_full:
            raise self.no_note
        self.history.append((name, kind, message))

    def reject(self, gate_id: str, *names: str, code: str = "WrongResult") -> Decision:
        answer = decided(*((name, fault(code)) for name in names), gate_id=gate_id)
        self.decide(answer)
        return answer

    def decide(self, answer: Decision) -> None:
        names = tuple(one.node for one in answer.excluded)
        self.hand.gate_decided(dataclasses.replace(gate(nodes=names), id=answer.id, progress=Decided(decision=answer)))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.hand.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


def removal(name: str = "n1", **changes: Any) -> Removal:
    values: dict[str, Any] = {
        "node": name,
        "aliases": (),
        "instance_id": None,
        "why": Why.QUARANTINE,
        "reason": "rule:hard: EccErrors on neuron:3",
        "by_person": False,
        "injected": False,
        "allocated": True,
        "since": NOW,
    }
    return Removal(**{**values, **changes})
