"""
The gate: `step(gate, snapshot, policy) -> (gate', effects)`. Pure, total and deterministic.

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
from dataclasses import dataclass
from typing import NamedTuple

from healthd.aggregator.gate import decisions, name_resolution, rendezvous
from healthd.aggregator.gate.eligibility import Eligibility
from healthd.aggregator.gate.reservation import (
    USABLE,
    StepContext,
    close_run,
    deadline_of,
    drop_unready,
    extra_nodes_until,
    reserve,
    return_nodes,
)
from healthd.aggregator.gate.transitions import Event, Move
from healthd.aggregator.gate.validating import stop_validation_of_others, validate
from healthd.aggregator.model import (
    Effect,
    Gate,
    Grant,
    Granting,
    GrantLease,
    OrderedRun,
    OrderRun,
    Snapshot,
    WakeAt,
)
from healthd.aggregator.model.policy import Policy
from healthd.core.evidence import reason
from healthd.core.model import FINAL_STATUSES, Mode, OrderStatus, Reason, Verdict


class Step(NamedTuple):
    """What a step came to: the gate after it, what is to be done once that is on disk, and how it went there."""

    gate: Gate
    effects: tuple[Effect, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Hold:
    """Not yet: what the gate waits for, and when to look again if nothing is heard."""

    waiting: tuple[Reason, ...]
    wake_at: float = math.inf


@dataclass(frozen=True)
class Reject:
    """The job may not start. `retryable`: trying again, here or elsewhere, can help."""

    why: tuple[Reason, ...]
    retryable: bool = True


@dataclass(frozen=True)
class Admit:
    """The job may start. `notes` are what people should know all the same."""

    notes: tuple[Reason, ...] = ()


def step(gate: Gate, snapshot: Snapshot, policy: Policy) -> Step:
    """
    Take the gate as far as it can go.

    A decided gate is left as it is. Stepping again with the same snapshot changes nothing and asks for nothing new.
    """
    if gate.decision is not None:
        return Step(gate, (), ())
    gate = name_resolution.resolve_names(gate, snapshot)
    override = snapshot.overrides.get(gate.request.job)
    if override is not None and override.until > snapshot.now:
        context = _step_with_override(gate, snapshot, policy)
    else:
        context = StepContext(gate, snapshot, policy)
        _step(context)
    return Step(context.gate, tuple(context.effects), tuple(context.moves))


def _step_with_override(gate: Gate, snapshot: Snapshot, policy: Policy) -> StepContext:
    override = snapshot.overrides[gate.request.job]
    gate = rendezvous.with_members_so_far(gate)
    enforced = StepContext(
        dataclasses.replace(gate, terms=dataclasses.replace(gate.terms, mode=Mode.ENFORCE)), snapshot, policy
    )
    _step(enforced)
    context = StepContext(gate, snapshot, policy, assessments=enforced.assessments)
    if not decisions.can_admit_regardless(context):
        context.assessments = {}
        _step(context)
        return context
    decision = enforced.gate.decision
    would = decision.decision if decision is not None else Verdict.HOLD
    text = f"{override.owner} admits job {override.job} by hand: {override.reason}"
    found = decision.reasons if decision is not None else enforced.gate.waiting
    decisions.admit_regardless(context, (reason("Override", text), *found), would)
    return context


def _step(context: StepContext) -> None:
    _conclude(context, _advance(context))


def _advance(context: StepContext) -> Hold | Reject | Admit:
    """Take the gate through as many phases as it can go now, and say how the step ends."""
    if context.snapshot.recovering is not None:
        return Hold((reason("Recovering", context.snapshot.recovering),))
    pending = rendezvous.collect_members(context)
    if pending is not None:
        return Reject(pending.failed) if pending.failed else Hold(pending.waiting)
    impossible = _never_possible(context)
    if impossible:
        return Reject(impossible, retryable=False)
    _update_reserved(context)
    if not reserve(context):
        return Reject(
            decisions.worst_reasons(
                one for one in context.assessments.values() if one.eligibility is Eligibility.EXCLUDED
            )
        )
    if not context.gate.reserved:
        return Hold(_waiting_for(context))
    stop_validation_of_others(context)
    _order_runs(context)
    if not drop_unready(context):
        return Hold(_waiting_for(context))
    proof = validate(context)
    if proof.failed:
        return Reject(proof.failed)
    if proof.waiting:
        return Hold((*proof.waiting, *_waiting_for(context)), wake_at=proof.wake_at)
    if context.gate.request.lease:
        _grant(context)
    if not context.gate.request.lease or _all_acknowledged(context):
        return Admit(proof.notes)
    return Hold(_waiting_for(context))


def _conclude(context: StepContext, end: Hold | Reject | Admit) -> None:
    """
    Carry out how a step ends. A hold whose time is up is a reject; a reject that waiting could change is a hold where
    the job is to be admitted whatever the evidence is.
    """
    if isinstance(end, Admit):
        decisions.admit(context, end.notes)
        return
    must_wait, would = _must_wait(context), Verdict.REJECT
    if isinstance(end, Hold) and context.now >= deadline_of(context) and not must_wait:
        waited = min(context.now, context.gate.deadline) - context.gate.since
        text = f"not admitted within {waited:.0f} s; it waited for: " + "; ".join(r.message for r in end.waiting[:8])
        would = Verdict.HOLD if context.now < context.gate.deadline else Verdict.REJECT
        end = Reject((reason("Expired", text), *end.waiting))
    if isinstance(end, Reject) and end.retryable and must_wait:
        end = Hold(end.why)
    if isinstance(end, Reject):
        decisions.reject(context, end.why, retryable=end.retryable, would=would)
        return
    times = [
        deadline_of(context),
        context.gate.deadline,
        extra_nodes_until(context),
        end.wake_at,
        rendezvous.wake_at(context),
    ]
    times += [found.wake_at for found in context.assessments.values()]
    times += [grant.granted_at + context.policy.lease_ack_seconds for grant in context.gate.granted.values()]
    # A bound that must be passed, not only reached, is passed a millisecond later.
    at = min((time for time in times if time > context.now), default=math.inf) + 0.001
    context.gate = dataclasses.replace(context.gate, waiting=end.waiting)
    context.effects.append(WakeAt(at=at))


def _never_possible(context: StepContext) -> tuple[Reason, ...]:
    """Reasons why no waiting could help; never while nodes may still be about to report."""
    request, snapshot = context.gate.request, context.snapshot
    if snapshot.settling is not None:
        return ()
    if request.pool is not None:
        there = len(snapshot.pools.get(request.pool, ()))
        if not there:
            return (reason("UnknownPool", f"no node has ever reported pool {request.pool}"),)
        if there < context.gate.terms.needed:
            text = f"{context.gate.terms.needed} nodes of pool {request.pool} are asked for, there are {there}"
            return (reason("TooFewNodes", text),)
        return ()
    unheard = [
        name
        for name in request.nodes
        if name not in snapshot.nodes and context.assess(name).eligibility is Eligibility.EXCLUDED
    ]
    if len(request.nodes) - len(unheard) < context.gate.terms.needed:
        return name_resolution.unknown_node_reasons(context.gate, snapshot, unheard)
    return ()


def _update_reserved(context: StepContext) -> None:
    """Take in what changed on the reserved nodes: runs that ended, acknowledgements, nodes that are lost."""
    for name in context.gate.reserved:
        found = context.assess(name)
        run = context.gate.ordered.get(name)
        if found.run_over and run is not None:
            close_run(context, name, run)
        if found.eligibility is Eligibility.EXCLUDED and found.final and name not in context.gate.failed:
            context.fail(name, found.reasons)
    for name, grant in context.gate.granted.items():
        why = _lease_refused(context, name, grant)
        if why is not None and context.assessments[name].eligibility is not Eligibility.EXCLUDED:
            context.fail(name, (why,))
    lost = tuple(name for name in context.gate.reserved if context.assessments[name].eligibility not in USABLE)
    return_nodes(context, lost, "the node is no longer fit")


def _lease_refused(context: StepContext, name: str, grant: Grant) -> Reason | None:
    """Why the lease of this node will not be acknowledged; None when it is or still may be."""
    node = context.snapshot.nodes.get(name)
    report = None if node is None else node.orders.get(grant.lease_id)
    if report is not None and report.status in FINAL_STATUSES:
        text = f"{name} did not keep its lease ({report.status}): {report.message or 'no reason given'}"
        return reason("LeaseNotAcknowledged", text, node=name)
    within = context.policy.lease_ack_seconds
    if context.now >= grant.granted_at + within and not _acknowledged(context, name, grant):
        return reason("LeaseNotAcknowledged", f"{name} did not confirm its lease within {within:.0f} s", node=name)
    return None


def _acknowledged(context: StepContext, name: str, grant: Grant) -> bool:
    """Stored by the node: it says so, and its state shows the lease."""
    node = context.snapshot.nodes.get(name)
    if node is None or node.state is None:
        return False
    report = node.orders.get(grant.lease_id)
    accepted = report is not None and report.status == OrderStatus.ACCEPTED  # "running" is: about to be stored
    return accepted and any(lease.id == grant.lease_id for lease in node.state.leases)


def _order_runs(context: StepContext) -> None:
    """Order the tier on every reserved node whose evidence must be renewed."""
    tier, ordered = context.gate.terms.tier, dict(context.gate.ordered)
    for name in context.gate.reserved:
        found = context.assessments[name]
        if found.eligibility is not Eligibility.NEEDS_RUN:
            continue
        node = context.snapshot.nodes.get(name)
        bound = context.policy.run_seconds[tier] + (node.compile_seconds if node is not None else 0.0)
        turn = ordered[name].round + 1 if name in ordered else 1
        order_id = f"{context.gate.tag}:run:{turn}:{name}"
        ordered[name] = OrderedRun(order_id=order_id, round=turn, ordered_at=context.now, deadline_seconds=bound)
        context.effects.append(OrderRun(node=name, order_id=order_id, tier=tier, deadline_seconds=bound))
        context.assessments[name] = dataclasses.replace(
            found, eligibility=Eligibility.RUNNING, wake_at=context.now + bound
        )
    context.gate = dataclasses.replace(context.gate, ordered=ordered)


def _grant(context: StepContext) -> None:
    """Lease the nodes that have none yet; all are ready."""
    fresh = [name for name in context.gate.reserved if name not in context.gate.granted]
    if not fresh:
        return
    turn = context.gate.grants + 1
    granted = dict(context.gate.granted)
    for name in fresh:
        lease_id = f"{context.gate.id}:lease:{turn}:{name}"
        granted[name] = Grant(lease_id=lease_id, granted_at=context.now)
        context.effects.append(GrantLease(node=name, lease_id=lease_id))
    if isinstance(context.gate.progress, Granting):
        context.update(granted=granted)
    else:
        context.move(Event.GRANTED, Granting(reserved=context.gate.reserved, granted=granted))
    context.gate = dataclasses.replace(context.gate, grants=turn)


def _all_acknowledged(context: StepContext) -> bool:
    gate = context.gate
    if len(gate.granted) < gate.terms.needed or set(gate.granted) != set(gate.reserved):
        return False
    return all(
        context.assessments[name].eligibility is Eligibility.READY and _acknowledged(context, name, grant)
        for name, grant in gate.granted.items()
    )


def _waiting_for(context: StepContext) -> tuple[Reason, ...]:
    """What keeps the gate, a sentence for each node."""
    found = []
    for name in context.gate.reserved:
        assessments = context.assessments[name]
        if assessments.eligibility is not Eligibility.READY:
            found.append(assessments)
        elif name in context.gate.granted and not _acknowledged(context, name, context.gate.granted[name]):
            why = reason("LeaseNotAcknowledged", f"{name} has not confirmed its lease yet", node=name)
            found.append(dataclasses.replace(assessments, reasons=(why,)))
    if not context.gate.reserved:
        found = [
            assessments
            for assessments in context.assessments.values()
            if assessments.eligibility is not Eligibility.READY
        ]
        pool = context.snapshot.pools.get(context.gate.request.pool or "", ())
        claimed = sum(name in context.snapshot.claims for name in pool)
        if claimed:
            text = f"{claimed} of {len(pool)} nodes of pool {context.gate.request.pool} are taken by other jobs"
            return (reason("Reserved", text), *decisions.worst_reasons(found)[: decisions.MOST_REASONS - 1])
        if context.gate.request.pool is not None and not found:
            text = (
                f"pool {context.gate.request.pool} has {len(pool)} nodes so far, {context.gate.terms.needed} are needed"
            )
            return (reason("TooFewNodes", f"{text}; {context.snapshot.settling or 'waiting for more'}"),)
    return decisions.worst_reasons(found)


def _must_wait(context: StepContext) -> bool:
    """What would be admitted whatever its evidence is waits for nodes to start on, as long as it may."""
    override = context.snapshot.overrides.get(context.gate.request.job)
    by_hand = override is not None and override.until > context.now
    if not (by_hand or context.gate.terms.mode is Mode.OBSERVE) or context.now >= context.gate.deadline:
        return False
    return not decisions.can_admit_regardless(context)
