"""
The gate: `step(now, gate, view, policy) -> (gate', effects)`. Pure, total and deterministic.

A step looks at every node of the gate anew and takes the gate as far as it can go now. Reservation is atomic: a gate
takes all the nodes it needs or none, and one that falls below what it needs gives all back, so that two gates can
never wait for each other. Gates are stepped in the order in which they were asked, so of two that could take the same
free nodes the earlier does; a gate that cannot go on yet keeps nobody else from nodes that it has not reserved.

Decisions: a node with a fault of its own is out at once; one whose evidence is old or missing runs the tier once per
round and is out if it is unknown after that; `admit` needs every lease stored by its node. Observe mode takes the same
way, answers after `Policy.observe_seconds` at the latest, admits whatever it found and leases what is free, so that
probes keep off the job. An override admits at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from healthd.fleet import answers
from healthd.fleet.model import (
    Effect,
    FleetView,
    Gate,
    Grant,
    GrantLease,
    OrderedRun,
    OrderRun,
    Phase,
    Reserve,
    RevokeLease,
    RunStatus,
    Unreserve,
    WakeAt,
)
from healthd.fleet.policy import Policy
from healthd.fleet.standing import Assessment, Standing, assess, reason
from healthd.model import Mode, Reason, Verdict

USABLE = (Standing.READY, Standing.RUN, Standing.PENDING, Standing.ABSENT)
FIRST_LOOK = 64
"""Nodes of a pool beyond four times the need that are looked at before runs are preferred to looking further."""


@dataclass
class _Work:
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


def step(now: float, gate: Gate, view: FleetView, policy: Policy) -> tuple[Gate, tuple[Effect, ...]]:
    """
    Take the gate as far as it can go: the gate after it, and what is to be done once that is on disk.

    A decided gate is left as it is. Stepping again with the same view changes nothing and asks for nothing new.
    """
    if gate.phase is Phase.DECIDED:
        return gate, ()
    override = view.overrides.get(gate.request.job)
    if override is not None and override.until > now:
        return _overridden(now, gate, view, policy)
    return _step(_Work(now, gate, view, policy))


def _overridden(now: float, gate: Gate, view: FleetView, policy: Policy) -> tuple[Gate, tuple[Effect, ...]]:
    override = view.overrides[gate.request.job]
    enforced = dataclasses.replace(gate, terms=dataclasses.replace(gate.terms, mode=Mode.ENFORCE))
    work = _Work(now, enforced, view, policy)
    after, _ = _step(work)
    would = after.decision.decision if after.decision is not None else Verdict.HOLD
    text = f"{override.owner} admits job {override.job} by hand: {override.reason}"
    found = after.decision.reasons if after.decision is not None else after.waiting
    return answers.anyway(now, gate, policy, view, work.seen, (reason("Override", text), *found), would)


def _step(work: _Work) -> tuple[Gate, tuple[Effect, ...]]:
    if work.view.recovering is not None:
        return _hold(work, (reason("Recovering", work.view.recovering),))
    impossible = _impossible_as_asked(work)
    if impossible:
        return _reject(work, impossible, retryable=False)
    _absorb(work)
    verdict = _take(work)
    if verdict is not None:
        return verdict
    if not work.gate.reserved:
        return _hold(work, _waiting_for(work))
    _order_runs(work)
    _grant(work)
    if _all_acknowledged(work):
        admitted, effects = answers.admit(work.now, work.gate, work.policy, work.seen)
        return admitted, (*work.effects, *effects)
    return _hold(work, _waiting_for(work))


def _impossible_as_asked(work: _Work) -> tuple[Reason, ...]:
    """Reasons why no waiting could help; never while nodes may still be about to report."""
    request, view = work.gate.request, work.view
    if view.settling is not None:
        return ()
    if request.pool is not None:
        there = len(view.pool(request.pool))
        if not there:
            return (reason("UnknownPool", f"no node has ever reported pool {request.pool}"),)
        if there < work.gate.terms.needed:
            text = f"{work.gate.terms.needed} nodes of pool {request.pool} are asked for, there are {there}"
            return (reason("TooFewNodes", text),)
        return ()
    unheard = [name for name in request.nodes if name not in view.nodes and work.look(name).standing is Standing.OUT]
    if len(request.nodes) - len(unheard) < work.gate.terms.needed:
        return answers.unknown_nodes(view, unheard)
    return ()


def _absorb(work: _Work) -> None:
    """Take in what changed on the reserved nodes: runs that ended, acknowledgements, nodes that are lost."""
    for name in work.gate.reserved:
        found = work.look(name)
        run = work.gate.ordered.get(name)
        if found.run_over and run is not None:
            _close_run(work, name, run)
        if found.standing is Standing.OUT and found.final and name not in work.gate.failed:
            work.fail(name, found.reasons)
    for name, grant in work.gate.granted.items():
        why = _lease_refused(work, name, grant)
        if why is not None and work.seen[name].standing is not Standing.OUT:
            work.fail(name, (why,))
    lost = tuple(name for name in work.gate.reserved if work.seen[name].standing not in USABLE)
    _give_back(work, lost, "the node is no longer fit")


def _close_run(work: _Work, name: str, run: OrderedRun) -> None:
    closed = dataclasses.replace(run, status=RunStatus.CLOSED)
    work.gate = dataclasses.replace(work.gate, ordered={**work.gate.ordered, name: closed})


def _lease_refused(work: _Work, name: str, grant: Grant) -> Reason | None:
    """Why the lease of this node will not be acknowledged; None when it is or still may be."""
    node = work.view.nodes.get(name)
    report = None if node is None else node.orders.get(grant.lease_id)
    if report is not None and report.status in ("refused", "done", "cancelled"):
        text = f"{name} did not keep its lease ({report.status}): {report.message or 'no reason given'}"
        return reason("LeaseNotAcknowledged", text, node=name)
    within = work.policy.lease_ack_seconds
    if work.now >= grant.granted_at + within and not _acknowledged(work, name, grant):
        return reason("LeaseNotAcknowledged", f"{name} did not confirm its lease within {within:.0f} s", node=name)
    return None


def _acknowledged(work: _Work, name: str, grant: Grant) -> bool:
    """Stored by the node: it says so, and its state shows the lease."""
    node = work.view.nodes.get(name)
    if node is None or node.state is None:
        return False
    report = node.orders.get(grant.lease_id)
    accepted = report is not None and report.status in ("accepted", "running")
    return accepted and any(lease.id == grant.lease_id for lease in node.state.leases)


def _give_back(work: _Work, names: tuple[str, ...], why: str) -> None:
    """Unreserve nodes, call off their runs and revoke their leases."""
    if not names:
        return
    for name in names:
        run = work.gate.ordered.get(name)
        if run is not None and run.status is RunStatus.OPEN:
            _close_run(work, name, run)
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


def _take(work: _Work) -> tuple[Gate, tuple[Effect, ...]] | None:
    """
    Reserve what is missing, all at once or nothing; an answer when even waiting could not give enough.

    Afterwards the gate has at least what it needs reserved, or nothing.
    """
    terms = work.gate.terms
    missing = terms.wanted - len(work.gate.reserved)
    more, maybe = _candidates(work, missing) if missing > 0 else ((), 0)
    held = len(work.gate.reserved) + len(more)
    if held >= terms.needed and not (_own_earlier(work) and work.now < _patience(work)):
        if more:
            work.gate = dataclasses.replace(work.gate, reserved=(*work.gate.reserved, *more))
            work.effects.append(Reserve(nodes=more))
        return None
    _give_back(work, work.gate.reserved, "too few nodes are left")
    if held + maybe >= terms.needed:
        return None
    out = [found for found in work.seen.values() if found.standing is Standing.OUT]
    return _reject(work, answers.headlines(sorted(out, key=lambda found: found.node)), retryable=True)


def _candidates(work: _Work, missing: int) -> tuple[tuple[str, ...], int]:
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


def _own_earlier(work: _Work) -> bool:
    """A named node is still with an earlier attempt of the same job: it is being given back, so wait for it."""
    return any(work.seen[name].own for name in work.gate.request.nodes if name in work.seen)


def _order_runs(work: _Work) -> None:
    """Order the tier on every reserved node whose evidence must be renewed."""
    tier, ordered = work.gate.terms.tier, dict(work.gate.ordered)
    bound = work.policy.run_seconds[tier]
    for name in work.gate.reserved:
        found = work.seen[name]
        if found.standing is not Standing.RUN:
            continue
        turn = ordered[name].round + 1 if name in ordered else 1
        order_id = f"{work.gate.id}:run:{turn}:{name}"
        ordered[name] = OrderedRun(order_id=order_id, round=turn, ordered_at=work.now, deadline_seconds=bound)
        work.effects.append(OrderRun(node=name, order_id=order_id, tier=tier, deadline_seconds=bound))
        work.seen[name] = dataclasses.replace(found, standing=Standing.PENDING, wake_at=work.now + bound)
    phase = Phase.GRANTING if work.gate.granted else Phase.CHECKING
    work.gate = dataclasses.replace(work.gate, ordered=ordered, phase=phase)


def _grant(work: _Work) -> None:
    """Lease the ready nodes once nobody of the rest is worth waiting for any longer."""
    terms = work.gate.terms
    ready = [name for name in work.gate.reserved if work.seen[name].standing is Standing.READY]
    pending = tuple(name for name in work.gate.reserved if work.seen[name].standing is not Standing.READY)
    if len(ready) < terms.needed or (pending and work.now < _patience(work)):
        return
    _give_back(work, pending, "the job does not wait for it any longer")
    fresh = [name for name in ready if name not in work.gate.granted]
    if not fresh:
        return
    turn = work.gate.grants + 1
    granted = dict(work.gate.granted)
    for name in fresh:
        lease_id = f"{work.gate.id}:lease:{turn}:{name}"
        granted[name] = Grant(lease_id=lease_id, granted_at=work.now)
        work.effects.append(GrantLease(node=name, lease_id=lease_id))
    ready_at = work.now if work.gate.ready_at is None else work.gate.ready_at
    work.gate = dataclasses.replace(work.gate, granted=granted, grants=turn, phase=Phase.GRANTING, ready_at=ready_at)


def _all_acknowledged(work: _Work) -> bool:
    gate = work.gate
    if len(gate.granted) < gate.terms.needed or set(gate.granted) != set(gate.reserved):
        return False
    return all(
        work.seen[name].standing is Standing.READY and _acknowledged(work, name, grant)
        for name, grant in gate.granted.items()
    )


def _deadline(work: _Work) -> float:
    """When the gate ends; observe mode must not hold up a job for as long as enforce may."""
    if work.gate.terms.mode is Mode.OBSERVE:
        return min(work.gate.deadline, work.gate.created_at + work.policy.observe_seconds)
    return work.gate.deadline


def _patience(work: _Work) -> float:
    """Until when nodes beyond those needed are waited for: leases need time before the deadline."""
    end = _deadline(work)
    half = (work.gate.created_at + end) / 2
    return max(half, end - work.policy.lease_ack_seconds)


def _waiting_for(work: _Work) -> tuple[Reason, ...]:
    """What keeps the gate, a sentence for each node."""
    found = []
    for name in work.gate.reserved:
        seen = work.seen[name]
        if seen.standing is not Standing.READY:
            found.append(seen)
        elif name in work.gate.granted and not _acknowledged(work, name, work.gate.granted[name]):
            why = reason("LeaseNotAcknowledged", f"{name} has not confirmed its lease yet", node=name)
            found.append(dataclasses.replace(seen, reasons=(why,)))
    if not work.gate.reserved:
        found = [seen for seen in work.seen.values() if seen.standing is not Standing.READY]
        pool = work.view.pool(work.gate.request.pool or "")
        claimed = sum(name in work.view.claims for name in pool)
        if claimed:
            text = f"{claimed} of {len(pool)} nodes of pool {work.gate.request.pool} are taken by other jobs"
            return (reason("Reserved", text), *answers.headlines(found)[: answers.MOST_REASONS - 1])
        if work.gate.request.pool is not None and not found:
            text = f"pool {work.gate.request.pool} has {len(pool)} nodes so far, {work.gate.terms.needed} are needed"
            return (reason("TooFewNodes", f"{text}; {work.view.settling or 'waiting for more'}"),)
    return answers.headlines(found)


def _hold(work: _Work, waiting: tuple[Reason, ...]) -> tuple[Gate, tuple[Effect, ...]]:
    """Not yet: wake when time alone could change something, or end it when its time is up."""
    if work.now >= _deadline(work):
        waited = _deadline(work) - work.gate.created_at
        text = f"not admitted within {waited:.0f} s; it waited for: " + "; ".join(r.message for r in waiting[:8])
        would = Verdict.HOLD if work.now < work.gate.deadline else Verdict.REJECT
        return _reject(work, (reason("Expired", text), *waiting), retryable=True, would=would)
    phase = work.gate.phase if work.gate.reserved else Phase.WAITING
    times = [_deadline(work), _patience(work)]
    times += [found.wake_at for found in work.seen.values()]
    times += [grant.granted_at + work.policy.lease_ack_seconds for grant in work.gate.granted.values()]
    # A bound that must be passed, not only reached, is passed a millisecond later.
    at = min((time for time in times if time > work.now), default=math.inf) + 0.001
    gate = dataclasses.replace(work.gate, phase=phase, waiting=waiting)
    return gate, (*work.effects, WakeAt(at=at))


def _reject(
    work: _Work, why: tuple[Reason, ...], *, retryable: bool, would: Verdict = Verdict.REJECT
) -> tuple[Gate, tuple[Effect, ...]]:
    gate, effects = answers.reject(
        work.now, work.gate, work.policy, work.view, work.seen, why, retryable=retryable, would=would
    )
    return gate, (*work.effects, *effects)
