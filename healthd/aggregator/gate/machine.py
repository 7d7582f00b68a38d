"""
The gate: `step(gate, snapshot, policy)` gives the gate after it, its effects and its moves. Pure, total and
deterministic.

A step assesses every node of the gate anew and takes the gate through as many phases as it can (`transitions` has the
phases). A reservation is atomic: a gate reserves all the nodes that it needs or none, and gives all of them back when
too few are left, so two gates never wait for each other. Gates are stepped in the order in which they were asked: where
two could reserve the same free nodes, the earlier one does. A gate that has to wait keeps no other gate from nodes that
it has not reserved.

A node with a fault of its own is excluded at once. A node whose evidence is old or missing runs the tier once in each
round, and is excluded if it is unknown after the last one; the rounds begin anew when it is given back, unless a run
was called off then because of the node itself. A job is admitted when every node has stored its lease. In observe mode
a gate takes the same steps, answers after `Policy.observe_seconds` at the latest, admits whatever it found, and leases
the nodes that are free, so that no other run of checks disturbs the job. An override admits at once. Both need nodes:
while a pool has fewer free ones than are needed, the gate holds until its deadline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from healthd.aggregator.gate import decisions, granting, name_resolution, rendezvous
from healthd.aggregator.gate.eligibility import Eligibility
from healthd.aggregator.gate.reservation import (
    USABLE,
    Admit,
    Hold,
    Reject,
    StepContext,
    close_run,
    deadline_of,
    drop_unready,
    extra_nodes_until,
    reserve,
    return_nodes,
)
from healthd.aggregator.gate.transitions import Move
from healthd.aggregator.gate.validating import stop_validation_of_others, validate
from healthd.aggregator.model.claims import LeaseRow
from healthd.aggregator.model.effects import Effect, WakeAt
from healthd.aggregator.model.gates import Gate, OrderedRun
from healthd.aggregator.model.nodes import Snapshot
from healthd.aggregator.model.policy import Policy
from healthd.core.evidence import reason
from healthd.core.model import Mode, Reason, Verdict
from healthd.core.text import counted


class Step(NamedTuple):
    """
    What a step gives: the gate after it, what to do once that gate is on disk, and the phases that it went through.
    """

    gate: Gate
    effects: tuple[Effect, ...]
    moves: tuple[Move, ...]


def step(gate: Gate, snapshot: Snapshot, policy: Policy) -> Step:
    """
    Take the gate as far as it can go.

    A decided gate stays as it is. A second step with the same snapshot changes nothing and has no new effects.
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


def resume(gate: Gate, snapshot: Snapshot, policy: Policy, held: Sequence[LeaseRow]) -> Step:
    """
    Take up a gate with leases (`held`) from before this aggregator started.

    Its hook may still wait for the answer. Or the job runs: where the database is a copy, it does not know what was
    answered. So the leases are never taken back here, and no other nodes are taken. The job is admitted on the nodes
    that hold its leases, as soon as these are all that it asked for, or as many as it needs once nodes had time to
    report. It is rejected when one of these nodes is not fit, when too few can be left, or at its deadline; then the
    leases stay until the job ends, its next attempt is asked, or a person ends them.
    """
    if gate.decision is not None:
        return Step(gate, (), ())
    context = StepContext(name_resolution.resolve_names(gate, snapshot), snapshot, policy)
    terms, job = context.gate.terms, f"job {gate.request.job} attempt {gate.request.attempt}"
    ready = [row for row in held if granting.stored(context, row.node, row.lease.id)]
    unfit = [found for row in ready if (found := context.assess(row.node)).eligibility is Eligibility.EXCLUDED]
    names = ", ".join(row.node for row in held[: decisions.MOST_NAMED])
    why = reason(
        "Recovering",
        f"{job} was granted {names} before the aggregator started; {len(ready)} of {terms.needed} nodes that it needs "
        "have confirmed that they hold its leases",
    )
    enough = terms.wanted if snapshot.settling is not None or len(ready) < len(held) else terms.needed
    if not unfit and len(ready) >= max(1, enough):
        decisions.admit_as_held(context, ready, held)
    elif unfit or len(held) < terms.needed or context.now >= deadline_of(context):
        stay = reason("Recovering", f"{why.message}; these leases stay until the job ends or its next attempt is asked")
        decisions.reject_as_held(context, (*decisions.worst_reasons(unfit), stay), held)
    else:
        _conclude(context, Hold((why,), wake_at=deadline_of(context)))
    return Step(context.gate, tuple(context.effects), tuple(context.moves))


def _step_with_override(gate: Gate, snapshot: Snapshot, policy: Policy) -> StepContext:
    """The step of a gate whose job a person has overridden: it admits, and says what it would have decided."""
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
    """Take the gate through as many phases as it can, and say how the step ends."""
    if context.snapshot.recovering is not None:
        return Hold((reason("Recovering", context.snapshot.recovering),))
    pending = rendezvous.collect_members(context)
    if pending is not None:
        return pending
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
    if isinstance(proof, Hold):
        return Hold((*proof.waiting, *_waiting_for(context)), wake_at=proof.wake_at)
    if isinstance(proof, Reject):
        return proof
    if context.gate.request.lease:
        granting.grant_leases(context)
    if not context.gate.request.lease or granting.all_acknowledged(context):
        return proof
    return Hold(_waiting_for(context))


def _conclude(context: StepContext, end: Hold | Reject | Admit) -> None:
    """
    Apply how a step ends. A hold whose time is up becomes a reject. A reject that time could change becomes a hold
    where the job is to be admitted whatever the evidence is.
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
        for name in context.gate.request.nodes:
            context.assess(name)  # the answer says of each what is known of it
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
    # A millisecond later, because some bounds must be passed and not only reached.
    at = min((time for time in times if time > context.now), default=math.inf) + 0.001
    context.gate = dataclasses.replace(context.gate, waiting=end.waiting)
    context.effects.append(WakeAt(at=at))


def _never_possible(context: StepContext) -> tuple[Reason, ...]:
    """Why waiting cannot help; empty while nodes may still be about to report."""
    request, snapshot = context.gate.request, context.snapshot
    if snapshot.settling is not None:
        return ()
    if request.pool is not None:
        there = len(snapshot.pools.get(request.pool, ()))
        if not there:
            return (reason("UnknownPool", f"no node has ever reported pool {request.pool}"),)
        if there < context.gate.terms.needed:
            text = f"pool {request.pool} has {counted(there, 'node')}, {context.gate.terms.needed} are asked for"
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
    """Apply what changed on the reserved nodes: runs that ended, leases that were refused, nodes that are lost."""
    for name in context.gate.reserved:
        found = context.assess(name)
        run = context.gate.ordered.get(name)
        if found.run_over and run is not None:
            close_run(context, name, run)
        if found.eligibility is Eligibility.EXCLUDED and found.final and name not in context.gate.failed:
            context.fail(name, found.reasons)
    for name, grant in context.gate.granted.items():
        why = granting.lease_refused(context, name, grant)
        if why is not None and context.assessments[name].eligibility is not Eligibility.EXCLUDED:
            context.fail(name, (why,))
    lost = tuple(name for name in context.gate.reserved if context.assessments[name].eligibility not in USABLE)
    return_nodes(context, lost, "the node is no longer fit")


def _order_runs(context: StepContext) -> None:
    """Order the tier on every reserved node whose evidence must be renewed."""
    tier, ordered = context.gate.terms.tier, dict(context.gate.ordered)
    for name in context.gate.reserved:
        found = context.assessments[name]
        if found.eligibility is not Eligibility.NEEDS_RUN:
            continue
        node = context.snapshot.nodes.get(name)
        bound = context.policy.run_seconds[tier] + (node.compile_seconds if node is not None else 0.0)
        last = ordered.get(name)
        round_number = 1 if last is None else last.round + 1
        ordered[name] = OrderedRun(
            order_id=f"{context.gate.tag}:run:{round_number}:{name}",
            round=round_number,
            ordered_at=context.now,
            deadline_seconds=bound,
            earlier_rounds=0 if last is None else last.earlier_rounds,
        )
        context.assessments[name] = dataclasses.replace(
            found, eligibility=Eligibility.RUNNING, wake_at=context.now + bound
        )
    context.gate = dataclasses.replace(context.gate, ordered=ordered)


def _waiting_for(context: StepContext) -> tuple[Reason, ...]:
    """What the gate waits for, a sentence for each node."""
    found = []
    for name in context.gate.reserved:
        assessments = context.assessments[name]
        if assessments.eligibility is not Eligibility.READY:
            found.append(assessments)
        elif name in context.gate.granted and not granting.acknowledged(context, name, context.gate.granted[name]):
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
            there, needed = counted(len(pool), "node"), context.gate.terms.needed
            text = (
                f"pool {context.gate.request.pool} has {there} so far, {needed} {'is' if needed == 1 else 'are'} needed"
            )
            return (reason("TooFewNodes", f"{text}; {context.snapshot.settling or 'waiting for more'}"),)
    return decisions.worst_reasons(found)


def _must_wait(context: StepContext) -> bool:
    """Whether a gate that admits whatever the evidence is has to wait for nodes to start on, as long as it may."""
    override = context.snapshot.overrides.get(context.gate.request.job)
    by_hand = override is not None and override.until > context.now
    if not (by_hand or context.gate.terms.mode is Mode.OBSERVE) or context.now >= context.gate.deadline:
        return False
    return not decisions.can_admit_regardless(context)
