"""One node before the rules, over time: what `Rules` does with records and latches, without engine or disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from checks.contract import Action, Tier
from checks.reasons import action_of
from healthd.aggregator.policy import Policy
from healthd.aggregator.quarantine.judge import judge, released
from healthd.aggregator.quarantine.records import (
    Effect,
    Facts,
    Fault,
    HistoryNote,
    Latch,
    LiftQuarantine,
    OpenBreaker,
    Outcome,
    PoolLimit,
    RuleRecord,
    RuleVerdict,
    SetQuarantine,
)
from healthd.core.model import Quarantine
from tests.aggregator.world import NOW

POLICY = Policy()
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
ROOM = PoolLimit(pool="a", size=100, kept=0, most=10, open=False)


def fault(code: str, *, device: str | None = None, injected: bool = False, action: Action | None = None) -> Fault:
    return Fault(
        code=code,
        check="matmul",
        target=device or "node",
        message="12 GFLOP/s, at least 20 are asked",
        action=action or action_of(code),
        device=device,
        injected=injected,
    )


def outcome(at: float, *faults: Fault, check: str = "matmul", tier: Tier = Tier.QUICK, known: bool = True) -> Outcome:
    return Outcome(
        check=check,
        tier=tier,
        active=tier is not Tier.PASSIVE,
        interval_seconds=60.0,
        passed=(not faults) if known else None,
        faults=tuple(dataclasses.replace(one, check=check) for one in faults),
        measured_at=at,
        started_at=at,
    )


@dataclasses.dataclass
class Case:
    """`latches` are those of the whole fleet; `quarantine` is what the ledger would hold."""

    policy: Policy = POLICY
    now: float = NOW
    node: str = "n1"
    identity: str = "instance:i-1"
    boot_id: str | None = "b1"
    serials: dict[str, str | None] = dataclasses.field(default_factory=lambda: {"dev:0": "S0", "dev:1": "S1"})
    injected: tuple[str, ...] = ()
    person: bool = False
    allocated: bool = False
    room: PoolLimit = ROOM
    record: RuleRecord = dataclasses.field(default_factory=lambda: RuleRecord(node="n1"))
    latches: dict[str, tuple[Latch, ...]] = dataclasses.field(default_factory=dict)
    quarantine: Quarantine | None = None
    effects: list[Effect] = dataclasses.field(default_factory=list)
    probe_status: str = ""
    last: Facts | None = None

    def facts(self, *outcomes: Outcome, **more: object) -> Facts:
        return Facts(
            **{
                "node": self.node,
                "identity": self.identity,
                "boot_id": self.boot_id,
                "serials": self.serials,
                "outcomes": outcomes,
                "quick_at": None,
                "deep_at": None,
                "injected": self.injected,
                "allocated": self.allocated,
                "person": self.person,
                "kept": self.quarantine is not None,
                "room": self.room,
                "probe_status": self.probe_status,
                **more,
            }  # type: ignore[arg-type]
        )

    def look(self, *outcomes: Outcome, **more: object) -> Sequence[Effect]:
        """Show the rules these results, and do what they want done."""
        return self.take(self.facts(*outcomes, **more))

    def take(self, facts: Facts) -> Sequence[Effect]:
        self.last = facts
        identities = dict.fromkeys((*facts.identities, *(seat.identity for seat in self.record.seats)))
        latches = tuple(one for identity in identities for one in self.latches.get(identity, ()))
        after, effects = judge(self.now, dataclasses.replace(self.record, latches=latches), facts, self.policy)
        for identity in facts.identities:
            self.latches[identity] = tuple(one for one in after.latches if one.identity == identity)
        self.record = dataclasses.replace(after, latches=())
        for effect in effects:
            if isinstance(effect, SetQuarantine):
                self.quarantine = effect.quarantine
            elif isinstance(effect, LiftQuarantine):
                self.quarantine = None
        self.effects.extend(effects)
        return effects

    def result(self, *faults: Fault, after: float = MINUTE, **more: object) -> Sequence[Effect]:
        """A new result of matmul, `after` seconds later."""
        self.now += after
        return self.look(outcome(self.now - 1.0, *faults), **more)

    def wait(self, seconds: float) -> Sequence[Effect]:
        """Time passes and nothing new is measured."""
        self.now += seconds
        return self.take(dataclasses.replace(self.last or self.facts(), kept=self.quarantine is not None))

    def release(self) -> None:
        """A person lets the node in."""
        identities = {seat.identity for seat in self.record.seats}
        self.latches = {key: one for key, one in self.latches.items() if key not in identities}
        self.record, self.quarantine = released(self.record), None

    @property
    def owner(self) -> str | None:
        return None if self.quarantine is None else self.quarantine.owner

    def modes(self) -> list[str]:
        return [effect.mode.value for effect in self.effects if isinstance(effect, RuleVerdict)]

    def trips(self) -> list[OpenBreaker]:
        return [effect for effect in self.effects if isinstance(effect, OpenBreaker)]

    def notes(self) -> list[str]:
        return [effect.kind for effect in self.effects if isinstance(effect, HistoryNote)]
