"""The decisions of a gate, and their sentences. Pure: `gate` decides, and this module writes the decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import SEVERITY, Blame, Status
from healthd.aggregator.gate.eligibility import Assessment, Eligibility
from healthd.aggregator.gate.records import Closing, Decided, Effect, Gate, Grant, GrantLease, LeaseRow, RevokeLease
from healthd.aggregator.gate.reservation import StepContext
from healthd.aggregator.gate.transitions import Event, move
from healthd.aggregator.policy import Policy
from healthd.aggregator.validation import consequence
from healthd.core.evidence import reason
from healthd.core.model import AdmittedNode, Decision, ExcludedNode, Mode, Reason, Verdict, WellNode

MOST_REASONS = 32
"""Reasons at the top of a decision: enough for people, bounded for the wire. `excluded` has them all."""

MOST_NAMED = 5
"""Nodes that a sentence names."""

MOST_EXCLUDED = 256
"""Excluded and well nodes that a decision lists for a pool, of each; a named node is always listed."""


def admit(context: StepContext, notes: Sequence[Reason] = ()) -> None:
    """
    Admit the job: every node has stored its lease, or is ready where no leases were asked for.

    `notes` are warnings for people.
    """
    gate, assessments = context.gate, context.assessments
    chosen = tuple(name for name in gate.reserved if name in gate.granted or not gate.request.lease)
    nodes = tuple(_admitted(gate, name, assessments.get(name)) for name in chosen)
    rest = _rest(gate, assessments, set(chosen))
    would = Verdict.ADMIT if gate.terms.mode is Mode.OBSERVE else None
    observed = reason("Observed", "enforce mode would also have admitted", status=Status.PASS)
    why = (observed, *notes) if would else tuple(notes)
    decision = _decision(context.now, gate, context.policy, Verdict.ADMIT, why, nodes, rest, would=would)
    _answer(context, decision, gate.granted)


def admit_as_held(context: StepContext, ready: Sequence[LeaseRow], held: Sequence[LeaseRow]) -> None:
    """
    Admit the job on the nodes that are `ready`, which hold its leases from before; of more than it asked for, on those
    that came last. All that are `held` stay leased to it.
    """
    gate = context.gate
    newest = sorted(ready, key=lambda row: (-row.granted_at, row.node))[: gate.terms.wanted]
    order = {name: place for place, name in enumerate(gate.request.nodes)}
    newest.sort(key=lambda row: (order.get(row.node, len(order)), row.node))
    nodes = tuple(_admitted(gate, row.node, context.assess(row.node)) for row in newest)
    notes = [
        reason(
            "Recovering",
            f"{row.node} still holds the lease of job {gate.request.job} attempt {gate.request.attempt} from before "
            "this copy of the database was restored",
            node=row.node,
            status=Status.WARN,
        )
        for row in newest
        if row.adopted
    ]
    would = Verdict.ADMIT if gate.terms.mode is Mode.OBSERVE else None
    reasons = tuple(notes[:MOST_REASONS])
    decision = _decision(context.now, gate, context.policy, Verdict.ADMIT, reasons, nodes, would=would)
    _answer_as_held(context, decision, held, {row.node: row for row in held})


def reject_as_held(context: StepContext, why: tuple[Reason, ...], held: Sequence[LeaseRow]) -> None:
    """Reject the job and leave the leases of it that nodes hold: the job may run there."""
    decision = _decision(context.now, context.gate, context.policy, Verdict.REJECT, why, retryable=True)
    _answer_as_held(context, decision, held, {})


def _answer_as_held(
    context: StepContext, decision: Decision, held: Sequence[LeaseRow], kept: Mapping[str, LeaseRow]
) -> None:
    """End the gate, and take back what it has granted beside the leases that are held."""
    ids = {row.lease.id for row in held}
    others = {name: grant for name, grant in context.gate.granted.items() if grant.lease_id not in ids}
    _revoke(context, others, f"gate {context.gate.id} continues with the leases that its nodes hold")
    granted = {node: Grant(lease_id=row.lease.id, granted_at=row.granted_at) for node, row in kept.items()}
    _answer(context, decision, granted)


def reject(context: StepContext, why: Sequence[Reason], *, retryable: bool, would: Verdict = Verdict.REJECT) -> None:
    """
    Reject the job; `why` comes first. In observe mode the job is admitted all the same where there are nodes to start
    on; `would` is then what enforce mode says.
    """
    gate = context.gate
    if gate.terms.mode is Mode.OBSERVE and can_admit_regardless(context):
        text = f"observe mode admits; enforce mode would have decided {would.value}"
        admit_regardless(context, (reason("Observed", text, status=Status.WARN), *why), would)
        return
    rest = _rest(gate, context.assessments, set())
    decision = _decision(context.now, gate, context.policy, Verdict.REJECT, tuple(why), rest=rest, retryable=retryable)
    _revoke(context, gate.granted, f"gate {gate.id} was not admitted")
    _answer(context, decision, {})


def admit_regardless(context: StepContext, why: Sequence[Reason], would: Verdict) -> None:
    """
    Admit the job whatever the evidence is, for observe mode or an override, without waiting for acknowledgements.

    Nodes that are free get a lease, so that no other run of checks disturbs the job. A node that another job has is
    included without a lease: two leases on one node would be worse than none.
    """
    gate, snapshot, assessments = context.gate, context.snapshot, context.assessments
    chosen = _chosen(context)
    grants = dict(gate.granted)
    for name in chosen:
        claim = snapshot.claims.get(name)
        held = name in grants or (claim is not None and claim.gate != gate.id)
        if not held and name in snapshot.nodes and gate.request.lease:
            lease_id = f"{gate.id}:lease:{gate.grants + 1}:{name}"
            context.effects.append(GrantLease(node=name, lease_id=lease_id))
            grants[name] = Grant(lease_id=lease_id, granted_at=context.now)
    others = {name: grant for name, grant in grants.items() if name not in chosen}
    _revoke(context, others, f"gate {gate.id} chose other nodes")
    nodes = tuple(_admitted(gate, name, assessments.get(name)) for name in chosen)
    rest = _rest(gate, assessments, set(chosen))
    reasons = tuple(why)[:MOST_REASONS]
    decision = _decision(context.now, gate, context.policy, Verdict.ADMIT, reasons, nodes, rest, would=would)
    _answer(context, decision, {name: grant for name, grant in grants.items() if name in chosen})


def close(now: float, gate: Gate, policy: Policy, closing: Closing, text: str) -> tuple[Gate, tuple[Effect, ...]]:
    """End an open gate from outside; what it had reserved and granted is given back. A decided gate stays as it is."""
    if gate.decision is not None:
        return gate, ()
    why = (reason(closing.value, text),)
    decision = _decision(now, gate, policy, Verdict.REJECT, why, retryable=True)
    effects = tuple(RevokeLease(node=name, lease_id=grant.lease_id, why=text) for name, grant in gate.granted.items())
    after, _ = move(_finished(gate), Event.CLOSED, Decided(decision=decision))
    return after, effects


def current_decision(now: float, gate: Gate, policy: Policy) -> Decision:
    """The decision of a gate, or a hold that says what the gate waits for."""
    if gate.decision is not None:
        return gate.decision
    waiting = gate.waiting or (reason("NotYetRun", "the gate was just requested"),)
    nodes = tuple(_admitted(gate, name, None) for name in gate.reserved)
    return _decision(now, gate, policy, Verdict.HOLD, waiting, nodes, retryable=True)


def worst_reason(assessment: Assessment) -> Reason | None:
    """The worst reason of a node as one sentence that begins with the name of the node."""
    if not assessment.reasons:
        return None
    worst = assessment.reasons[0]
    if assessment.node in worst.message:
        return worst
    return dataclasses.replace(worst, message=f"{assessment.node}: {worst.message}")


def worst_reasons(assessments: Iterable[Assessment]) -> tuple[Reason, ...]:
    """The worst reason of each node, bounded. Faults of nodes come before missing evidence, then by name."""
    found = [line for line in map(worst_reason, assessments) if line is not None]
    found.sort(key=lambda line: (-SEVERITY[line.status], line.blame is not Blame.NODE, line.node or "", line.code))
    if len(found) > MOST_REASONS:
        rest = len(found) - MOST_REASONS + 1
        found = [
            *found[: MOST_REASONS - 1],
            dataclasses.replace(found[MOST_REASONS - 1], node=None, message=f"and {rest} more nodes"),
        ]
    return tuple(found)


def _chosen(context: StepContext) -> tuple[str, ...]:
    """The nodes to admit regardless: all named ones; of a pool the free ones, best first."""
    gate, snapshot, assessments = context.gate, context.snapshot, context.assessments
    if gate.request.pool is None:
        return gate.request.nodes
    pool = snapshot.pools.get(gate.request.pool, ())
    free = [name for name in pool if name not in snapshot.claims or snapshot.claims[name].gate == gate.id]
    rank = {eligibility: index for index, eligibility in enumerate(Eligibility)}

    def worth(name: str) -> tuple[bool, int]:
        return (name not in gate.granted, rank[assessments[name].eligibility] if name in assessments else len(rank))

    return tuple(sorted(free, key=worth)[: gate.terms.wanted])


def can_admit_regardless(context: StepContext) -> bool:
    """Whether there are nodes to admit so: of a pool as many as are needed; named nodes are admitted as they are."""
    least = 1 if context.gate.request.pool is None else context.gate.terms.needed
    return len(_chosen(context)) >= least


def _admitted(gate: Gate, name: str, assessments: Assessment | None) -> AdmittedNode:
    asked = gate.asked.get(name)
    if assessments is None:
        return AdmittedNode(node=name, evidence_age_seconds=None, asked=asked)
    return AdmittedNode(
        node=name, evidence_age_seconds=assessments.age_seconds, address=assessments.address, asked=asked
    )


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The nodes that a decision does not include: those that nothing speaks against, and those that are left out."""

    well: tuple[WellNode, ...] = ()
    excluded: tuple[ExcludedNode, ...] = ()


def _rest(gate: Gate, assessments: Mapping[str, Assessment], included: set[str]) -> Rest:
    """
    Every named node that is not included. Of a pool: those excluded and those replaced; if the job gets none, those fit
    too.
    """
    if gate.request.nodes:
        # Of a group also the ranks that never joined, which have no node.
        names: Iterable[str] = (*gate.request.nodes, *(n for n in gate.failed if n not in gate.request.nodes))
        most = len(gate.request.nodes) + len(gate.failed)
    else:
        looked_at = {
            name
            for name, one in assessments.items()
            if one.eligibility is Eligibility.EXCLUDED or (one.eligibility is Eligibility.READY and not included)
        }
        names, most = sorted(looked_at | set(gate.failed) | set(gate.replaced)), MOST_EXCLUDED
    uncleared = _uncleared(gate)
    well, excluded = list[WellNode](), list[ExcludedNode]()
    for name in names:
        if name in included:
            continue
        found, asked = assessments.get(name), gate.asked.get(name)
        if name in gate.replaced and (found is None or found.eligibility is not Eligibility.EXCLUDED):
            excluded.append(ExcludedNode(node=name, reasons=gate.replaced[name], asked=asked))
        elif found is None or found.eligibility is not Eligibility.READY:
            why = gate.failed.get(name, ()) if found is None else found.reasons
            if why or found is None:
                excluded.append(ExcludedNode(node=name, reasons=why, asked=asked))
        elif name in uncleared:
            excluded.append(ExcludedNode(node=name, reasons=(uncleared[name],), asked=asked))
        else:
            # It may have reasons too: warnings, which stop no job.
            well.append(WellNode(node=name, evidence_age_seconds=found.age_seconds, asked=asked))
    return Rest(well=tuple(well[:most]), excluded=tuple(excluded[:most]))


def _uncleared(gate: Gate) -> Mapping[str, Reason]:
    """The members of collectives that ended without clearing them, and a sentence for each: nobody accuses them."""
    found: dict[str, Reason] = {}
    for validation in gate.validations:
        cleared = consequence(validation).cleared if validation.verdict is not None else ()
        what = "did not end" if validation.verdict is None else "did not clear it"
        for name in validation.members:
            found.pop(name, None)
            if name not in cleared:
                text = f"{name}: its own evidence is good, but the collectives with it {what}"
                found[name] = reason("Undecided", text, node=name)
    return found


def _decision(
    now: float,
    gate: Gate,
    policy: Policy,
    verdict: Verdict,
    reasons: tuple[Reason, ...],
    nodes: tuple[AdmittedNode, ...] = (),
    rest: Rest | None = None,
    *,
    retryable: bool = False,
    would: Verdict | None = None,
) -> Decision:
    terms, rest = gate.terms, rest or Rest()
    return Decision(
        id=gate.id,
        decision=verdict,
        reasons=reasons,
        nodes=nodes,
        excluded=rest.excluded,
        policy={
            "mode": terms.mode.value,
            "tier": terms.tier.value,
            "max_age_seconds": terms.max_age_seconds,
            "wait_seconds": terms.wait_seconds,
            "runtime_seconds": terms.runtime_seconds,
            "lease_seconds": terms.lease_seconds if gate.request.lease else 0.0,
            "wanted": terms.wanted,
            "needed": terms.needed,
            "collective": terms.collective,
            "require": list(policy.require),
            "admit_degraded": policy.admit_degraded,
        },
        retryable=retryable,
        decided_at=now,
        duration_seconds=max(0.0, now - gate.created_at),
        would=would,
        request=gate.as_asked,
        well=rest.well,
    )


def _revoke(context: StepContext, grants: Mapping[str, Grant], why: str) -> None:
    context.effects += [RevokeLease(node=name, lease_id=grant.lease_id, why=why) for name, grant in grants.items()]


def _answer(context: StepContext, decision: Decision, granted: Mapping[str, Grant]) -> None:
    """End the gate with this decision and these leases of the job."""
    context.gate = _finished(context.gate)
    context.move(Event.ANSWERED, Decided(decision=decision, granted=granted))


def _finished(gate: Gate) -> Gate:
    """The gate without what it waits for; a validation in progress ends as it is."""
    return dataclasses.replace(gate, waiting=(), ended=gate.validations)
