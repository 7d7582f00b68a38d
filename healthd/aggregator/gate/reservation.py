"""
Which nodes a gate takes, and how it gives them back: pure, a part of `gate.step`.

All that a gate needs or nothing, so that no two gates ever hold what the other waits for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from healthd.aggregator.gate.eligibility import Assessment, Standing, assess
from healthd.aggregator.model import Effect, FleetView, Gate, OrderedRun, Reserve, RevokeLease, RunStatus, Unreserve
from healthd.aggregator.model.policy import Policy
from healthd.core.model import Mode, Reason

USABLE = (Standing.READY, Standing.RUN, Standing.PENDING, Standing.ABSENT)
FIRST_LOOK = 64
"""Nodes of a pool beyond four times the need that are looked at before runs are preferred to looking further."""


@dataclass
class Work:
    """One step under way: what it sees, what it has found out, what it wants done."""

    now: float
    gate: Gate
    view: FleetView
    policy: Policy
    seen: dict[str, Assessment] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def look(self, name: str) -> Assessment:
        found = self.seen.get(name)
        if found is None:
            found = self.seen[name] = assess(self.now, self.gate, self.view, self.policy, name)
        return found

    def fail(self, name: str, why: tuple[Reason, ...]) -> None:
        """The gate is done with this node."""
        self.gate = dataclasses.replace(self.gate, failed={**self.gate.failed, name: why})
        self.seen[name] = Assessment(node=name, standing=Standing.OUT, reasons=why, final=True)


def take(work: Work) -> bool:
    """
    Reserve what is missing, all at once or nothing; False when even waiting could not give enough.

    Afterwards the gate has at least what it needs reserved, or nothing.
    """
    terms = work.gate.terms
    missing = terms.wanted - len(work.gate.reserved)
    more, maybe = _candidates(work, missing) if missing > 0 else ((), 0)
    held = len(work.gate.reserved) + len(more)
    if held >= terms.needed and not (_own_earlier(work) and work.now < patience(work)):
        if more:
            reserved = (*work.gate.reserved, *more)
            if work.gate.request.nodes:
                # Ranks follow the order in which the nodes were named, whoever was fit first.
                taken = set(reserved)
                reserved = tuple(name for name in work.gate.request.nodes if name in taken)
            work.gate = dataclasses.replace(work.gate, reserved=reserved)
            work.effects.append(Reserve(nodes=more))
        return True
    give_back(work, work.gate.reserved, "too few nodes are left")
    return held + maybe >= terms.needed


def _candidates(work: Work, missing: int) -> tuple[tuple[str, ...], int]:
    """Free nodes to reserve, best first and at most `missing`; and how many more there might be later."""
    request, reserved = work.gate.request, set(work.gate.reserved)
    if request.nodes:
        rest = [work.look(name) for name in request.nodes if name not in reserved]
        usable = [found.node for found in rest if found.standing in USABLE]
        return tuple(usable), sum(found.standing is Standing.BUSY for found in rest)
    ready: list[str] = []
    run: list[str] = []
    # While nodes may still be about to report, nobody can say how many there will be.
    maybe = work.gate.terms.needed if work.view.settling is not None else 0
    examined, claims = 0, work.view.claims
    for name in work.view.pool(request.pool or ""):
        if name in reserved:
            continue
        claim = claims.get(name)
        if claim is not None and claim.gate != work.gate.id:
            maybe += 1
            continue
        examined += 1
        found = work.look(name)
        if found.standing is Standing.READY:
            ready.append(name)
        elif found.standing is Standing.RUN:
            run.append(name)
        elif found.standing is not Standing.OUT:
            maybe += 1
        enough = len(ready) >= missing
        if enough or (examined >= 4 * missing + FIRST_LOOK and len(ready) + len(run) >= missing):
            break
    chosen = [*ready, *run]
    return tuple(chosen[:missing]), maybe + max(0, len(chosen) - missing)


def settle(work: Work) -> bool:
    """
    Whether the gate goes on with the nodes that are ready: enough are, and the rest is not worth waiting for.

    Then the rest is given back.
    """
    terms = work.gate.terms
    ready = [name for name in work.gate.reserved if work.seen[name].standing is Standing.READY]
    pending = tuple(name for name in work.gate.reserved if work.seen[name].standing is not Standing.READY)
    if len(ready) < terms.needed or (pending and work.now < patience(work)):
        return False
    give_back(work, pending, "the job does not wait for it any longer")
    return True


def _own_earlier(work: Work) -> bool:
    """A named node is still with an earlier attempt of the same job: it is being given back, so wait for it."""
    return any(work.seen[name].own for name in work.gate.request.nodes if name in work.seen)


def close_run(work: Work, name: str, run: OrderedRun) -> None:
    closed = dataclasses.replace(run, status=RunStatus.CLOSED)
    work.gate = dataclasses.replace(work.gate, ordered={**work.gate.ordered, name: closed})


def give_back(work: Work, names: tuple[str, ...], why: str) -> None:
    """Unreserve nodes, call off their runs and revoke their leases."""
    if not names:
        return
    for name in names:
        run = work.gate.ordered.get(name)
        if run is not None and run.status is RunStatus.OPEN:
            close_run(work, name, run)
        grant = work.gate.granted.get(name)
        if grant is not None:
            work.effects.append(RevokeLease(node=name, lease_id=grant.lease_id, why=why))
    gone = set(names)
    work.gate = dataclasses.replace(
        work.gate,
        reserved=tuple(name for name in work.gate.reserved if name not in gone),
        granted={name: grant for name, grant in work.gate.granted.items() if name not in gone},
    )
    work.effects.append(Unreserve(nodes=names))


def deadline_of(work: Work) -> float:
    """When the gate ends; observe mode must not hold up a job for as long as enforce may."""
    if work.gate.terms.mode is Mode.OBSERVE:
        return min(work.gate.deadline, work.gate.since + work.policy.observe_seconds)
    return work.gate.deadline


def patience(work: Work) -> float:
    """Until when nodes beyond those needed are waited for: leases need time before the deadline."""
    end = deadline_of(work)
    half = (work.gate.since + end) / 2
    return max(half, end - work.policy.lease_ack_seconds)
