"""
The last state of a node in compact form: the evidence as bytes, the rest as objects.

Ten thousand states as objects are millions of objects, and the garbage collector would stop the aggregator for more
than a second each time. Most readers of a node need its leases, labels or health; the evidence is decoded for those who
read it.

What other nodes show of this one (`amend`) is added to its own results, so that all who read them judge by it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from checks.contract import Finding, Status, Tier, worst
from healthd.aggregator.inventory.machine_identity import EVENTS_CHECK, failing, machine_of, scheduled_event
from healthd.aggregator.model.nodes import ScheduledEvent, Verdicts
from healthd.core.evidence import health_of, judge_tier, reason_of, sorted_reasons
from healthd.core.model import CheckResult, Health, Lease, NodeState, Reason
from healthd.core.wire import decode, encode

R = TypeVar("R", CheckResult, Lease)

# Most of a state, and rarely read.
EVIDENCE = ("inventory", "reasons", "checks", "results")


AMENDED = ("job_steps",)
"""Checks whose results may be amended beside those that have digests."""
_HEALTH_RANK: Mapping[Health, int] = {health: rank for rank, health in enumerate(Health)}


class CompactState:
    """
    A state whose ages are as of `at`, by the clock of the registry.

    `stale_at` is when the first result expires if nothing more is heard. `judged` is the memory of verdicts on this
    evidence, see `FleetNode`.
    """

    __slots__ = (
        "_added",
        "_ages",
        "_amendable",
        "_bytes",
        "_counted",
        "_event",
        "_event_age",
        "_expiring",
        "_oldest_seconds",
        "_own",
        "_received_at",
        "_rest",
        "at",
        "drill",
        "failing",
        "health",
        "judged",
        "machine",
        "stale_at",
    )

    def __init__(self, state: NodeState, at: float) -> None:
        # Digests are kept by who compares them.
        bare = tuple(dataclasses.replace(r, digests=()) if r.digests else r for r in state.results)
        self._bytes = encode(dataclasses.replace(state, results=bare))
        self._rest = {name: value for name, value in vars(state).items() if name not in EVIDENCE}
        self._ages: Mapping[str, float] = {}
        self._received_at = self.at = at
        self.health = state.health
        self.machine = machine_of(state)
        self.failing = failing(state)
        self.drill = bool(state.faults)
        bounds = {
            spec.name: spec.expires_seconds
            for spec in state.checks
            if spec.expires_seconds is not None and not (state.allocated and spec.tier is not Tier.PASSIVE)
        }
        # Results that expire: check, age when sent, bound.
        self._expiring = tuple(
            (sys.intern(r.check), r.age_seconds, bounds[r.check]) for r in state.results if r.check in bounds
        )
        self._counted = tuple((sys.intern(r.check), r.age_seconds) for r in state.results)
        # Judged now, while the state is decoded, for the tier that gates ask for most.
        self.judged: Verdicts = {(Tier.QUICK, ()): judge_tier(state, Tier.QUICK, math.inf)}
        self.stale_at = self._stale_at()
        self._oldest_seconds: float | None = None
        checks = {spec.name for spec in state.checks}
        self._amendable = {  # whether a fault was injected, by check
            sys.intern(r.check): r.injected
            for r in state.results
            if r.check in checks and (r.digests or r.check in AMENDED)
        }
        self._event = scheduled_event(state)
        self._event_age = next((r.age_seconds for r in state.results if r.check == EVENTS_CHECK), 0.0)
        self._own = (self.health, self.failing)
        self._added: Mapping[str, tuple[Finding, ...]] = {}

    def amend(self, findings: Mapping[str, tuple[Finding, ...]]) -> bool:
        """
        Add findings to results, by check, in the place of those that were added before; whether anything is another.

        A check without a result here is left out: then there is nothing that could be taken for a pass.
        """
        added = {check: some for check, some in findings.items() if check in self._amendable and some}
        if added == self._added:
            return False
        self._added = added
        self.judged = {}  # another one: who was given the former judges by the former evidence
        health, failing = self._own
        self.health = max(health, health_of(self._reasons()), key=_HEALTH_RANK.__getitem__)
        self.failing = failing or any(one.status is Status.FAIL for some in added.values() for one in some)
        return True

    def event(self, now: float) -> ScheduledEvent | None:
        """What AWS has scheduled for the machine first, as of `now`; None where there is nothing."""
        found = self._event
        if found is None or found.seconds is None:
            return found
        aged_since, age = self.at, self._ages.get(EVENTS_CHECK)
        if age is None:
            aged_since, age = self._received_at, self._event_age
        return dataclasses.replace(found, seconds=found.seconds - age - (now - aged_since))

    def _reasons(self) -> tuple[Reason, ...]:
        """What was added, as reasons."""
        node = self._rest["node"]
        return tuple(
            reason_of(node, check, one, one.status, injected=self._amendable[check])
            for check, some in self._added.items()
            for one in some
        )

    @property
    def oldest_seconds(self) -> float:
        """
        The age of the oldest result as of `at`: infinite where one has no age, 0 without results. Computed once a sync.
        """
        if self._oldest_seconds is not None:
            return self._oldest_seconds
        ages, moved = self._ages, self.at - self._received_at
        oldest = 0.0
        for check, age in self._counted:
            now = ages.get(check, age + moved)
            if not now <= oldest:  # NaN is older than everything
                oldest = now if now == now else math.inf
        self._oldest_seconds = oldest
        return oldest

    def refresh(self, ages: Mapping[str, float], at: float) -> None:
        """Set newer ages of the same state; results that are not among them grow older."""
        self._ages, self.at = ages, at
        self._oldest_seconds = None
        self.stale_at = self._stale_at()

    def open(self) -> NodeState:
        """The state, with ages as of `at`; a later `refresh` does not change it."""
        body, ages, moved = self._bytes, self._ages, self.at - self._received_at
        added, reasons = self._added, self._reasons()

        def evidence() -> Mapping[str, Any]:
            full = decode(body, NodeState, what="kept state")
            aged = (_with_age(r, ages.get(r.check, r.age_seconds + moved)) for r in full.results)
            return {
                "inventory": full.inventory,
                "reasons": sorted_reasons((*reasons, *full.reasons)) if added else full.reasons,
                "checks": full.checks,
                "results": tuple(_amended(r, added.get(r.check)) for r in aged) if added else tuple(aged),
            }

        return _lazy_state(
            {**self._rest, "health": self.health},
            tuple(_with_age(lease, lease.age_seconds + moved) for lease in self._rest["leases"]),
            evidence,
        )

    def _stale_at(self) -> float:
        ages, at, taken_at = self._ages, self.at, self._received_at
        return min(
            (bound + (at - ages[c] if c in ages else taken_at - age) for c, age, bound in self._expiring),
            default=math.inf,
        )


def _amended(result: CheckResult, added: tuple[Finding, ...] | None) -> CheckResult:
    if not added:
        return result
    status = worst((result.status, *(one.status for one in added)))
    return dataclasses.replace(result, status=status, findings=(*result.findings, *added))


class _LazyState(NodeState):
    """A NodeState whose evidence is decoded when it is first read."""

    def __getattr__(self, name: str) -> Any:
        if name not in EVIDENCE or "_evidence" not in self.__dict__:
            raise AttributeError(name)
        self.__dict__.update(self.__dict__.pop("_evidence")())
        return self.__dict__[name]


def _lazy_state(
    rest: Mapping[str, Any], leases: tuple[Lease, ...], evidence: Callable[[], Mapping[str, Any]]
) -> NodeState:
    state = object.__new__(_LazyState)
    state.__dict__.update(rest, leases=leases, _evidence=evidence)
    return state


def _with_age(record: R, age_seconds: float) -> R:
    """A copy with another age, at a fifth of the cost of dataclasses.replace, because every look-up makes some."""
    copy: R = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, age_seconds=age_seconds)
    return copy
