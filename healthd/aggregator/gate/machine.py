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

Also here:

- runs collectives over the nodes of a gate before they are admitted. Pure, a part of `step`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from checks.contract import Blame, Status
from healthd.aggregator.gate import decisions, eligibility, rendezvous, reservation
from healthd.aggregator.gate.eligibility import Assessment, Eligibility
from healthd.aggregator.gate.records import (
    Accuse,
    Checking,
    Effect,
    Gate,
    LeaseRow,
    OrderedRun,
    RevokeLease,
    Snapshot,
    Validating,
    WakeAt,
)
from healthd.aggregator.gate.reservation import (
    USABLE,
    Admit,
    Hold,
    Reject,
    StepContext,
    close_run,
    deadline_of,
    drop_unready,
    end_validation,
    extra_nodes_until,
    reserve,
    return_nodes,
    stop_validation,
)
from healthd.aggregator.gate.transitions import Event, Move
from healthd.aggregator.policy import Policy
from healthd.aggregator.validation import advance, begin, consequence, lacking, sentence
from healthd.aggregator.validation.records import Tested, Validation
from healthd.core.evidence import reason
from healthd.core.model import Health, Mode, NodeState, Reason, Verdict
from healthd.core.text import counted
from healthd.localize import Outcome

MOST_LOOKED_AT = 512
"""Idle nodes looked at in search of partners."""

MOST_VALIDATIONS = 3
"""How often one gate validates anew, with other nodes in the place of culprits. Then it says what it knows."""
TO_ANSWER_SECONDS = 5.0
"""What is left of the gate's time when a search must end: leases have to be stored."""

NO_TORCH = "No module named 'torch'"
"""What Python says in a rank of a daemon that only reads."""

AT_ONCE_SECONDS = 0.01
"""A step that has to go on with what it changed itself: what is not later than now wakes nobody."""


def validate(context: StepContext) -> Hold | Reject | Admit:
    """Take the validation of the reserved nodes, all ready, as far as it can go. Admit: they may be leased."""
    stop_validation_of_others(context)
    if not context.gate.terms.collective:
        return Admit()
    for _ in range(4 * MOST_VALIDATIONS + 4):
        validation = context.gate.validation
        if len(context.gate.reserved) < 2 and validation is None:
            alone = _proven(context) or _alone(context)
            if isinstance(alone, Admit) or not _has_company(context):
                return alone
        if validation is not None:
            proof: Hold | Reject | Admit | None = _under_way(context, validation)
        else:
            proof = _proven(context) or _revoke_leases(context) or _start_validation(context)
        if proof is not None:
            return proof
    raise AssertionError("each turn of the loop ends a validation, and their number is bounded")


def step(gate: Gate, snapshot: Snapshot, policy: Policy) -> Step:
    """
    Take the gate as far as it can go.

    A decided gate stays as it is. A second step with the same snapshot changes nothing and has no new effects.
    """
    if gate.decision is not None:
        return Step(gate, (), ())
    gate = eligibility.resolve_names(gate, snapshot)
    override = snapshot.overrides.get(gate.request.job)
    if override is not None and override.until > snapshot.now:
        context = _step_with_override(gate, snapshot, policy)
    else:
        context = StepContext(gate, snapshot, policy)
        _step(context)
    return Step(context.gate, tuple(context.effects), tuple(context.moves))


def stop_validation_of_others(context: StepContext) -> None:
    """Stop a validation whose members are no longer the reserved nodes; those are validated anew."""
    validation = context.gate.validation
    if validation is not None and set(validation.members) != set(context.gate.reserved):
        stop_validation(context)


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
    context = StepContext(eligibility.resolve_names(gate, snapshot), snapshot, policy)
    terms, job = context.gate.terms, f"job {gate.request.job} attempt {gate.request.attempt}"
    # One that has not confirmed an answer may show evidence of any age, or be heard before it is looked at again.
    found = {row.node: _under_lease(context, row) for row in held}
    ready = [
        row
        for row in held
        if reservation.stored(context, row.node, row.lease.id)
        and found[row.node].eligibility is not Eligibility.UNHEARD
    ]
    unfit = [found[row.node] for row in ready if found[row.node].eligibility is Eligibility.EXCLUDED]
    names = ", ".join(row.node for row in held[: decisions.MOST_NAMED])
    why = reason(
        "Recovering",
        f"{job} was granted {names} before the aggregator restarted; {len(ready)} of the {terms.needed} nodes it "
        "needs have confirmed its leases",
    )
    enough = terms.wanted if snapshot.settling is not None or len(ready) < len(held) else terms.needed
    if not unfit and len(ready) >= max(1, enough):
        decisions.admit_as_held(context, ready, held)
    elif unfit or len(held) < terms.needed or context.now >= deadline_of(context):
        stay = reason(
            "Recovering", f"{why.message}; these leases stay until the job ends or its next attempt is requested"
        )
        decisions.reject_as_held(context, (*decisions.worst_reasons(unfit), stay), held)
    else:
        _conclude(context, Hold((why,), wake_at=deadline_of(context)))
    return Step(context.gate, tuple(context.effects), tuple(context.moves))


class Step(NamedTuple):
    """
    What a step gives: the gate after it, what to do once that gate is on disk, and the phases that it went through.
    """

    gate: Gate
    effects: tuple[Effect, ...]
    moves: tuple[Move, ...]


def _alone(context: StepContext) -> Reject | Admit:
    """
    One node runs no collectives, and needs none. But one that is left of several whose collectives failed in the middle
    may have been the cause, unless it has passed with another one since: idle nodes are borrowed for that.
    """
    for name in context.gate.reserved:
        tests = [one for ended in context.gate.ended for one in ended.history if name in one.members]
        last = next((one for one in reversed(tests) if _says_of(name, one)), None)
        if last is not None and last.outcome is not Outcome.PASS:
            others = ", ".join(sorted({*last.ended_within, *last.accused.keys() & {name}}))
            text = f"{name} is left out: its collectives failed midway on {others}, so it has not passed any"
            return Reject((reason("Undecided", text), *last.accused.values(), *last.unfit.values()))
    return Admit()


def _has_company(context: StepContext) -> bool:
    """Whether idle nodes can show what one that is left alone is worth; that is tried once."""
    alone = context.gate.reserved
    return all(one.members != alone for one in context.gate.ended) and bool(_partners(context, 1))


def _says_of(name: str, tested: Tested) -> bool:
    """Whether the test says of a member that it passed or failed, or that it may have been why another one failed."""
    return tested.outcome is Outcome.PASS or name in tested.accused or bool(tested.ended_within)


def _proven(context: StepContext) -> Admit | None:
    """The proof where exactly the reserved nodes passed together and none was given back since; None otherwise."""
    last = context.gate.ended[-1] if context.gate.ended else None
    if last is None or last.verdict is None or last.ended_at is None:
        return None
    found = consequence(last)
    if not found.cleared or set(found.cleared) != set(context.gate.reserved) or len(last.verdict.rest) < 2:
        return None  # one alone has passed once, with anybody, and may have failed since
    if any(context.gate.returned.get(name, -math.inf) >= last.ended_at for name in found.cleared):
        return None
    return Admit(tuple(one for one in found.reasons if one.status is Status.WARN))


def _under_way(context: StepContext, validation: Validation) -> Hold | Reject | None:
    """Continue the validation in progress; None when it has ended."""
    step = advance(
        context.now, validation, context.snapshot.nodes, context.policy, lambda count: _partners(context, count)
    )
    after = step.validation
    context.update(validation=after)
    if after.verdict is None:
        waiting = reason("NotYetRun", step.waiting)
        return Hold((waiting,), wake_at=min(step.wake_at, after.deadline))
    return _conclude_validation(context, after)


def _conclude_validation(context: StepContext, validation: Validation) -> Hold | Reject | None:
    """
    Apply the verdict: exclude the nodes that it names. None when the gate may go on, with the same nodes or with
    others.
    """
    end_validation(context, validation)
    found = consequence(validation)
    for node, why in found.out.items():
        if node in context.gate.reserved or context.gate.request.pool is not None:
            context.fail(node, (why,))  # a borrowed partner too, which would otherwise be the next to be reserved
        if why.blame is Blame.NODE and why.status is Status.FAIL:
            context.effects.append(Accuse(node=node, reason=why))
    return_nodes(
        context, tuple(node for node in context.gate.reserved if node in found.out), "the collectives failed with it"
    )
    if not found.out and not found.cleared:
        return Reject((*_without_torch(validation), *found.reasons))
    if not reserve(context):
        return Reject((*_without_torch(validation), *found.reasons))
    unready = [name for name in context.gate.reserved if context.assess(name).eligibility is not Eligibility.READY]
    if not context.gate.reserved or unready:
        waiting = found.reasons or (reason("NotYetRun", "other nodes replace those that failed"),)
        return Hold(waiting, wake_at=context.now + AT_ONCE_SECONDS)
    return None


def _without_torch(validation: Validation) -> tuple[Reason, ...]:
    """What to do where members could not run the collectives because their probes' interpreter has no torch."""
    lacking = {
        node
        for tested in validation.history
        for node, why in tested.unfit.items()
        if why.code == "StartFailed" and NO_TORCH in why.message
    }
    if not lacking:
        return ()
    names = ", ".join(sorted(lacking)[: decisions.MOST_NAMED])
    text = (
        f"{names} cannot run collectives: their daemons have no torch, as in the profile observe; use the profile "
        "active, let hooks run them (--execute), or set policy.tier = passive and policy.collective = false"
    )
    return (reason("StartFailed", text),)


def _revoke_leases(context: StepContext) -> Hold | None:
    """
    A node was lost after leases were granted: take back the leases of the others. None once no node has one.

    A node runs nothing under a lease, and stores the next one only when its ranks have left the devices.
    """
    why = "a node was lost before the job could start; the others run together again"
    for name, grant in context.gate.granted.items():
        context.effects.append(RevokeLease(node=name, lease_id=grant.lease_id, why=why))
    if context.gate.granted:
        context.move(Event.REVOKED, Checking(reserved=context.gate.reserved))
    states = {name: _state(context, name) for name in context.gate.reserved}
    holding = [n for n, state in states.items() if state and any(le.gate == context.gate.id for le in state.leases)]
    if not holding:
        return None
    text = f"{', '.join(holding[:8])}: the lease is revoked, because {why}"
    return Hold((reason("NotYetRun", text),))


def _start_validation(context: StepContext) -> Reject | None:
    """Validate the nodes that are reserved now; a Reject only when too many have failed, or no check can be run."""
    gate = context.gate
    # Stopped validations do not count, nor those of nodes that passed and were given back: nodes that fall silent do
    # so one by one, and each may cause one.
    ended = [one for one in gate.ended if one.verdict is not None and consequence(one).out]
    if len(ended) >= MOST_VALIDATIONS:
        last = consequence(ended[-1]).reasons
        text = f"{len(ended)} validations with different nodes found no group that passes together"
        return Reject((reason("Undecided", text), *last))
    nodes, wanted = context.snapshot.nodes, gate.terms.checks
    unknown = lacking(wanted, gate.reserved, nodes, context.policy)
    checks = tuple(name for name in wanted if name not in unknown)
    left_out = tuple(itertools.starmap(sentence, unknown.items()))
    if left_out and not checks:
        return Reject(tuple(reason("CheckUnknown", text) for text in left_out))
    validation = begin(
        context.now,
        f"{gate.tag}:c{len(gate.ended)}",
        gate.reserved,
        nodes,
        context.policy,
        deadline=max(context.now, deadline_of(context) - TO_ANSWER_SECONDS),
        checks=checks,
        left_out=left_out,
        chance=context.snapshot.chance,
    )
    context.move(Event.VALIDATION_STARTED, Validating(reserved=gate.reserved, validation=validation))
    return None


def _partners(context: StepContext, count: int) -> tuple[str, ...]:
    """Idle nodes that may join the search: fresh evidence, the same accelerator, not claimed and not in doubt."""
    kinds = {_accelerator(context, name) for name in context.gate.reserved}
    validation, nodes = context.gate.validation, context.snapshot.nodes
    checks = validation.checks if validation is not None else ()
    ready = (
        name
        for name in itertools.islice(_possible_partners(context), MOST_LOOKED_AT)
        if name not in context.gate.reserved
        and name not in context.gate.failed
        and name not in context.snapshot.claims
        and name not in context.snapshot.doubted
        and _accelerator(context, name) in kinds - {None}
        and not lacking(checks, [name], nodes, context.policy)
        and context.assess(name).eligibility is Eligibility.READY
    )
    return tuple(itertools.islice(ready, count))


def _possible_partners(context: StepContext) -> Iterator[str]:
    """The other nodes of the pools of the reserved nodes; nodes without a pool count as one pool."""
    if context.gate.request.pool is not None:
        return iter(context.snapshot.pools.get(context.gate.request.pool, ()))
    pools = {_label(context, name) for name in context.gate.reserved}
    named: Iterable[str] = itertools.chain.from_iterable(
        context.snapshot.pools.get(pool, ()) for pool in sorted(p for p in pools if p)
    )
    unnamed = (name for name in context.snapshot.nodes if _label(context, name) is None) if None in pools else ()
    return itertools.chain(named, unnamed)


def _state(context: StepContext, name: str) -> NodeState | None:
    node = context.snapshot.nodes.get(name)
    return None if node is None else node.state


def _label(context: StepContext, name: str) -> str | None:
    state = _state(context, name)
    return None if state is None else state.labels.get("pool")


def _accelerator(context: StepContext, name: str) -> str | None:
    state = _state(context, name)
    return None if state is None or state.inventory is None else state.inventory.accelerator


def _under_lease(context: StepContext, row: LeaseRow) -> Assessment:
    """
    The node as its lease says, whichever database granted that: its evidence need be no fresher than it was then, but
    it must stand for the devices that the node has now.
    """
    found, node, terms = context.assess(row.node), context.snapshot.nodes.get(row.node), context.gate.terms
    if found.eligibility in (Eligibility.EXCLUDED, Eligibility.UNHEARD) or node is None:
        return found
    max_age = terms.max_age_seconds + max(0.0, context.now - row.granted_at)
    judged = eligibility.judge(node, terms.tier, max_age, context.policy.require)
    if judged.health not in (Health.UNKNOWN, Health.UNHEALTHY):
        return found
    return dataclasses.replace(found, eligibility=Eligibility.EXCLUDED, reasons=judged.reasons)


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
    pending = rendezvous.collect_members(context) if context.gate.request.join is not None else None
    if pending is not None:
        return pending
    impossible = _never_possible(context)
    if impossible:
        return Reject(impossible, retryable=False)
    if earlier := _earlier_attempts(context):
        return_nodes(context, context.gate.reserved, "an earlier attempt of the job has not ended")
        return earlier
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
        reservation.grant_leases(context)
    if not context.gate.request.lease or reservation.all_acknowledged(context):
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
        text = f"not admitted within {waited:.0f} s; waiting for: " + "; ".join(r.message for r in end.waiting[:8])
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
    ]
    if context.gate.request.join is not None:
        times.append(rendezvous.wake_at(context))
    times += [found.wake_at for found in context.assessments.values()]
    times += [grant.granted_at + context.policy.tuning.lease_ack_seconds for grant in context.gate.granted.values()]
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
            return (reason("UnknownPool", _unknown_pool(context)),)
        if there < context.gate.terms.needed:
            text = f"pool {request.pool} has {counted(there, 'node')}, {context.gate.terms.needed} were requested"
            return (reason("TooFewNodes", text),)
        return ()
    unheard = [
        name
        for name in request.nodes
        if name not in snapshot.nodes and context.assess(name).eligibility is Eligibility.EXCLUDED
    ]
    if len(request.nodes) - len(unheard) < context.gate.terms.needed:
        return eligibility.unknown_node_reasons(context.gate, snapshot, unheard)
    return ()


def _earlier_attempts(context: StepContext) -> Hold | None:
    """
    What earlier attempts of the job still have that no caller of this gate may end: a lease ends with its workload, an
    open gate with its decision.

    A node that is silent is not waited for: its lease stays, so that no job is admitted there.
    """
    found: list[Reason] = []
    wake_at, bound = math.inf, context.policy.silent_seconds
    starting = context.snapshot.settling is not None
    unfinished, leases = context.gate.unfinished, context.snapshot.leases
    for gate_id in unfinished:
        if (other := context.snapshot.gates.get(gate_id)) is not None:
            text = f"waiting for attempt {other.request.attempt} of job {other.request.job} (gate {gate_id}) to end"
            found.append(reason("Allocated", text))
    rows = [leases[lease_id] for lease_id in unfinished if lease_id in leases]
    if gates := {gate_id for gate_id, node in unfinished.items() if not node} - context.snapshot.gates.keys():
        rows += [row for row in leases.values() if row.lease.gate in gates]
    for row in rows:
        node = context.snapshot.nodes.get(row.node)
        heard = None if node is None else node.heard_seconds
        until = bound + (context.gate.since if heard is None else context.now - heard)
        if until > context.now or starting:
            text = f"waiting for attempt {row.lease.attempt} of job {row.lease.job} on {row.node} to end"
            found.append(reason("Allocated", text, node=row.node))
            wake_at = min(wake_at, until)
    return Hold(tuple(found[: decisions.MOST_REASONS]), wake_at=wake_at) if found else None


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
        why = reservation.lease_refused(context, name, grant)
        if why is not None and context.assessments[name].eligibility is not Eligibility.EXCLUDED:
            context.fail(name, (why,))
    lost = tuple(name for name in context.gate.reserved if context.assessments[name].eligibility not in USABLE)
    return_nodes(context, lost, "the node is no longer eligible")


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
        elif name in context.gate.granted and not reservation.acknowledged(context, name, context.gate.granted[name]):
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
            text = f"{claimed} of {len(pool)} nodes of pool {context.gate.request.pool} are in use by other jobs"
            return (reason("Reserved", text), *decisions.worst_reasons(found)[: decisions.MOST_REASONS - 1])
        if context.gate.request.pool is not None and not found:
            if not pool:
                text = f"{_unknown_pool(context)}; {context.snapshot.settling or 'waiting for nodes'}"
                return (reason("UnknownPool", text),)
            there, needed = counted(len(pool), "node"), context.gate.terms.needed
            text = (
                f"pool {context.gate.request.pool} has {there} so far, {needed} {'is' if needed == 1 else 'are'} needed"
            )
            return (
                reason(
                    "TooFewNodes",
                    f"{text}; {context.snapshot.settling or 'waiting for more'}",
                ),
            )
    return decisions.worst_reasons(found)


def _unknown_pool(context: StepContext) -> str:
    """That no node is in the pool that was asked for, and which pools there are."""
    pools = ", ".join(sorted(context.snapshot.pools)[: decisions.MOST_NAMED]) or "none"
    return f"there is no pool `{context.gate.request.pool}`; pools: {pools}"


def _must_wait(context: StepContext) -> bool:
    """Whether a gate that admits whatever the evidence is has to wait for nodes to start on, as long as it may."""
    override = context.snapshot.overrides.get(context.gate.request.job)
    by_hand = override is not None and override.until > context.now
    if not (by_hand or context.gate.terms.mode is Mode.OBSERVE) or context.now >= context.gate.deadline:
        return False
    return not decisions.can_admit_regardless(context)
