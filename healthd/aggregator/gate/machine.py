"""
The gate: `step(now, gate, view, policy) -> (gate', effects)`. Pure, total and deterministic.

A step looks at every node of the gate anew and takes the gate as far as it can go now. Reservation is atomic: a gate
takes all the nodes it needs or none, and one that falls below what it needs gives all back, so that two gates can
never wait for each other. Gates are stepped in the order in which they were asked, so of two that could take the same
free nodes the earlier does; a gate that cannot go on yet keeps nobody else from nodes that it has not reserved.

Decisions: a node with a fault of its own is out at once; one whose evidence is old or missing runs the tier once per
round and is out if it is unknown after that; `admit` needs every lease stored by its node. Observe mode takes the same
way, answers after `Policy.observe_seconds` at the latest, admits whatever it found and leases what is free, so that
probes keep off the job. An override admits at once. Neither makes nodes: while a pool has fewer free ones than are
needed, the gate holds until its own deadline.
"""

from __future__ import annotations

import dataclasses
import math

from healthd.aggregator.gate import decisions, name_resolution, rendezvous
from healthd.aggregator.gate.eligibility import Standing
from healthd.aggregator.gate.reservation import USABLE, Work, close_run, deadline_of, give_back, patience, settle, take
from healthd.aggregator.gate.validating import validate
from healthd.aggregator.model import (
    Effect,
    FleetView,
    Gate,
    Grant,
    GrantLease,
    OrderedRun,
    OrderRun,
    Phase,
    WakeAt,
)
from healthd.aggregator.model.policy import Policy
from healthd.core.evidence import reason
from healthd.core.model import Mode, Reason, Verdict


def step(now: float, gate: Gate, view: FleetView, policy: Policy) -> tuple[Gate, tuple[Effect, ...]]:
    """
    Take the gate as far as it can go: the gate after it, and what is to be done once that is on disk.

    A decided gate is left as it is. Stepping again with the same view changes nothing and asks for nothing new.
    """
    if gate.phase is Phase.DECIDED:
        return gate, ()
    gate = name_resolution.by_own_names(gate, view)
    override = view.overrides.get(gate.request.job)
    if override is not None and override.until > now:
        return _overridden(now, gate, view, policy)
    return _step(Work(now, gate, view, policy))


def _overridden(now: float, gate: Gate, view: FleetView, policy: Policy) -> tuple[Gate, tuple[Effect, ...]]:
    override = view.overrides[gate.request.job]
    gate = rendezvous.as_they_are(gate)
    enforced = dataclasses.replace(gate, terms=dataclasses.replace(gate.terms, mode=Mode.ENFORCE))
    work = Work(now, enforced, view, policy)
    after, _ = _step(work)
    if not decisions.startable(gate, view, work.seen):
        return _step(Work(now, gate, view, policy))
    would = after.decision.decision if after.decision is not None else Verdict.HOLD
    text = f"{override.owner} admits job {override.job} by hand: {override.reason}"
    found = after.decision.reasons if after.decision is not None else after.waiting
    return decisions.anyway(now, gate, policy, view, work.seen, (reason("Override", text), *found), would)


def _step(work: Work) -> tuple[Gate, tuple[Effect, ...]]:
    if work.view.recovering is not None:
        return _hold(work, (reason("Recovering", work.view.recovering),))
    pending = rendezvous.collect(work)
    if pending is not None:
        return _reject(work, pending.failed, retryable=True) if pending.failed else _hold(work, pending.waiting)
    impossible = _impossible_as_asked(work)
    if impossible:
        return _reject(work, impossible, retryable=False)
    _absorb(work)
    if not take(work):
        out = [found for found in work.seen.values() if found.standing is Standing.OUT]
        return _reject(work, decisions.headlines(out), retryable=True)
    if not work.gate.reserved:
        return _hold(work, _waiting_for(work))
    _order_runs(work)
    if not settle(work):
        return _hold(work, _waiting_for(work))
    proof = validate(work)
    if proof.failed:
        return _reject(work, proof.failed, retryable=True)
    if proof.waiting:
        return _hold(work, (*proof.waiting, *_waiting_for(work)), wake_at=proof.wake_at)
    if work.gate.request.lease:
        _grant(work)
    if not work.gate.request.lease or _all_acknowledged(work):
        admitted, effects = decisions.admit(work.now, work.gate, work.policy, work.seen, proof.notes)
        return admitted, (*work.effects, *effects)
    return _hold(work, _waiting_for(work))


def _impossible_as_asked(work: Work) -> tuple[Reason, ...]:
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
        return name_resolution.unknown_nodes(work.gate, view, unheard)
    return ()


def _absorb(work: Work) -> None:
    """Take in what changed on the reserved nodes: runs that ended, acknowledgements, nodes that are lost."""
    for name in work.gate.reserved:
        found = work.look(name)
        run = work.gate.ordered.get(name)
        if found.run_over and run is not None:
            close_run(work, name, run)
        if found.standing is Standing.OUT and found.final and name not in work.gate.failed:
            work.fail(name, found.reasons)
    for name, grant in work.gate.granted.items():
        why = _lease_refused(work, name, grant)
        if why is not None and work.seen[name].standing is not Standing.OUT:
            work.fail(name, (why,))
    lost = tuple(name for name in work.gate.reserved if work.seen[name].standing not in USABLE)
    give_back(work, lost, "the node is no longer fit")


def _lease_refused(work: Work, name: str, grant: Grant) -> Reason | None:
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


def _acknowledged(work: Work, name: str, grant: Grant) -> bool:
    """Stored by the node: it says so, and its state shows the lease."""
    node = work.view.nodes.get(name)
    if node is None or node.state is None:
        return False
    report = node.orders.get(grant.lease_id)
    accepted = report is not None and report.status == "accepted"  # "running" is: about to be stored
    return accepted and any(lease.id == grant.lease_id for lease in node.state.leases)


def _order_runs(work: Work) -> None:
    """Order the tier on every reserved node whose evidence must be renewed."""
    tier, ordered = work.gate.terms.tier, dict(work.gate.ordered)
    for name in work.gate.reserved:
        found = work.seen[name]
        if found.standing is not Standing.RUN:
            continue
        node = work.view.nodes.get(name)
        bound = work.policy.run_seconds[tier] + (node.compile_seconds if node is not None else 0.0)
        turn = ordered[name].round + 1 if name in ordered else 1
        order_id = f"{work.gate.tag}:run:{turn}:{name}"
        ordered[name] = OrderedRun(order_id=order_id, round=turn, ordered_at=work.now, deadline_seconds=bound)
        work.effects.append(OrderRun(node=name, order_id=order_id, tier=tier, deadline_seconds=bound))
        work.seen[name] = dataclasses.replace(found, standing=Standing.PENDING, wake_at=work.now + bound)
    phase = Phase.GRANTING if work.gate.granted else Phase.CHECKING  # `validate` may say VALIDATING
    work.gate = dataclasses.replace(work.gate, ordered=ordered, phase=phase)


def _grant(work: Work) -> None:
    """Lease the nodes that have none yet; all are ready."""
    fresh = [name for name in work.gate.reserved if name not in work.gate.granted]
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


def _all_acknowledged(work: Work) -> bool:
    gate = work.gate
    if len(gate.granted) < gate.terms.needed or set(gate.granted) != set(gate.reserved):
        return False
    return all(
        work.seen[name].standing is Standing.READY and _acknowledged(work, name, grant)
        for name, grant in gate.granted.items()
    )


def _waiting_for(work: Work) -> tuple[Reason, ...]:
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
            return (reason("Reserved", text), *decisions.headlines(found)[: decisions.MOST_REASONS - 1])
        if work.gate.request.pool is not None and not found:
            text = f"pool {work.gate.request.pool} has {len(pool)} nodes so far, {work.gate.terms.needed} are needed"
            return (reason("TooFewNodes", f"{text}; {work.view.settling or 'waiting for more'}"),)
    return decisions.headlines(found)


def _hold(work: Work, waiting: tuple[Reason, ...], *, wake_at: float = math.inf) -> tuple[Gate, tuple[Effect, ...]]:
    """Not yet: wake when time alone could change something, or end it when its time is up."""
    if work.now >= deadline_of(work) and not _must_wait(work):
        waited = min(work.now, work.gate.deadline) - work.gate.since
        text = f"not admitted within {waited:.0f} s; it waited for: " + "; ".join(r.message for r in waiting[:8])
        would = Verdict.HOLD if work.now < work.gate.deadline else Verdict.REJECT
        return _reject(work, (reason("Expired", text), *waiting), retryable=True, would=would)
    phase = work.gate.phase if work.gate.reserved else Phase.WAITING
    if work.gate.collecting:
        phase = Phase.COLLECTING
    times = [deadline_of(work), work.gate.deadline, patience(work), wake_at, rendezvous.wake_at(work)]
    times += [found.wake_at for found in work.seen.values()]
    times += [grant.granted_at + work.policy.lease_ack_seconds for grant in work.gate.granted.values()]
    # A bound that must be passed, not only reached, is passed a millisecond later.
    at = min((time for time in times if time > work.now), default=math.inf) + 0.001
    gate = dataclasses.replace(work.gate, phase=phase, waiting=waiting)
    return gate, (*work.effects, WakeAt(at=at))


def _must_wait(work: Work) -> bool:
    """What would be admitted whatever its evidence is waits for nodes to start on, as long as it may."""
    override = work.view.overrides.get(work.gate.request.job)
    by_hand = override is not None and override.until > work.now
    if not (by_hand or work.gate.terms.mode is Mode.OBSERVE) or work.now >= work.gate.deadline:
        return False
    return not decisions.startable(work.gate, work.view, work.seen)


def _reject(
    work: Work, why: tuple[Reason, ...], *, retryable: bool, would: Verdict = Verdict.REJECT
) -> tuple[Gate, tuple[Effect, ...]]:
    if retryable and _must_wait(work):
        return _hold(work, why)
    gate, effects = decisions.reject(
        work.now, work.gate, work.policy, work.view, work.seen, why, retryable=retryable, would=would
    )
    return gate, (*work.effects, *effects)
