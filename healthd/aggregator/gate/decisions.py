"""
Decisions of a gate and their sentences: pure. What was decided is `gate`'s; how it is said is said here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from checks.contract import SEVERITY, Blame, Status
from healthd.aggregator.gate.eligibility import Assessment, Standing
from healthd.aggregator.model import (
    Answer,
    Closing,
    Effect,
    FleetView,
    Gate,
    Grant,
    GrantLease,
    Phase,
    RevokeLease,
    Unreserve,
)
from healthd.aggregator.model.policy import Policy
from healthd.core.evidence import reason
from healthd.core.model import AdmittedNode, Decision, ExcludedNode, Mode, Reason, Verdict

MOST_REASONS = 32
"""Reasons at the top of a decision: enough for people, bounded for the wire. `excluded` has them all."""

MOST_EXCLUDED = 256
"""Excluded nodes that a decision lists for a pool; a named node is always listed."""


def admit(
    now: float, gate: Gate, policy: Policy, seen: Mapping[str, Assessment], notes: Sequence[Reason] = ()
) -> tuple[Gate, tuple[Effect, ...]]:
    """
    Every node of `gate.granted` has acknowledged its lease: say so. Without leases: every reserved node is fit.

    `notes` are what people should know all the same.
    """
    chosen = tuple(name for name in gate.reserved if name in gate.granted or not gate.request.lease)
    nodes = tuple(_admitted(gate, name, seen.get(name)) for name in chosen)
    excluded = _excluded(gate, seen, set(chosen))
    would = Verdict.ADMIT if gate.terms.mode is Mode.OBSERVE else None
    observed = reason("Observed", "observe mode: enforce would have admitted too", status=Status.PASS)
    why = (observed, *notes) if would else tuple(notes)
    decision = _decision(now, gate, policy, Verdict.ADMIT, why, nodes, excluded, retryable=False, would=would)
    return _answered(gate, decision, [Unreserve(nodes=gate.held)])


def reject(
    now: float,
    gate: Gate,
    policy: Policy,
    view: FleetView,
    seen: Mapping[str, Assessment],
    why: Sequence[Reason],
    *,
    retryable: bool,
    would: Verdict = Verdict.REJECT,
) -> tuple[Gate, tuple[Effect, ...]]:
    """
    Not admitted, `why` first. In observe mode the job is admitted all the same where there are nodes to start on, and
    `would` is what enforce says.
    """
    if gate.terms.mode is Mode.OBSERVE and startable(gate, view, seen):
        text = f"observe mode admits; enforce would have said {would.value}"
        first = reason("Observed", text, status=Status.WARN)
        return anyway(now, gate, policy, view, seen, (first, *why), would)
    excluded = _excluded(gate, seen, set())
    decision = _decision(now, gate, policy, Verdict.REJECT, tuple(why), (), excluded, retryable=retryable, would=None)
    effects: list[Effect] = [
        RevokeLease(node=name, lease_id=grant.lease_id, why=f"gate {gate.id} was not admitted")
        for name, grant in gate.granted.items()
    ]
    return _answered(dataclasses.replace(gate, granted={}), decision, [*effects, Unreserve(nodes=gate.held)])


def anyway(
    now: float,
    gate: Gate,
    policy: Policy,
    view: FleetView,
    seen: Mapping[str, Assessment],
    why: Sequence[Reason],
    would: Verdict,
) -> tuple[Gate, tuple[Effect, ...]]:
    """
    Admit whatever the evidence is (observe mode, or a person's override) without waiting for acknowledgements.

    Nodes that nobody else has get their lease all the same, so that probes keep off the job; a node that somebody else
    has is included without one: two leases on a node would be worse than none.
    """
    chosen = _chosen(gate, view, seen)
    grants = dict(gate.granted)
    effects: list[Effect] = []
    for name in chosen:
        claim = view.claims.get(name)
        held = name in grants or (claim is not None and claim.gate != gate.id)
        if not held and name in view.nodes and gate.request.lease:
            lease_id = f"{gate.id}:lease:{gate.grants + 1}:{name}"
            effects.append(GrantLease(node=name, lease_id=lease_id))
            grants[name] = Grant(lease_id=lease_id, granted_at=now)
    for name in [name for name in grants if name not in chosen]:
        grant = grants.pop(name)
        effects.append(RevokeLease(node=name, lease_id=grant.lease_id, why=f"gate {gate.id} chose other nodes"))
    nodes = tuple(_admitted(gate, name, seen.get(name)) for name in chosen)
    excluded = _excluded(gate, seen, set(chosen))
    decision = _decision(
        now, gate, policy, Verdict.ADMIT, tuple(why)[:MOST_REASONS], nodes, excluded, retryable=False, would=would
    )
    after = dataclasses.replace(gate, granted=grants, ready_at=gate.ready_at or now)
    return _answered(after, decision, [*effects, Unreserve(nodes=gate.held)])


def close(now: float, gate: Gate, policy: Policy, closing: Closing, text: str) -> tuple[Gate, tuple[Effect, ...]]:
    """End an open gate from outside; what it had reserved and granted is given back. A decided gate stays as it is."""
    if gate.phase is Phase.DECIDED:
        return gate, ()
    why = (reason(closing.value, text),)
    decision = _decision(now, gate, policy, Verdict.REJECT, why, (), (), retryable=True, would=None)
    effects: list[Effect] = [
        RevokeLease(node=name, lease_id=grant.lease_id, why=text) for name, grant in gate.granted.items()
    ]
    return _answered(dataclasses.replace(gate, granted={}), decision, [*effects, Unreserve(nodes=gate.held)])


def answer_of(now: float, gate: Gate, policy: Policy) -> Decision:
    """What to tell who asks for the gate now: its decision, or a hold that says what it waits for."""
    if gate.decision is not None:
        return gate.decision
    waiting = gate.waiting or (reason("NotYetRun", "the gate has just been asked"),)
    nodes = tuple(_admitted(gate, name, None) for name in gate.reserved)
    return _decision(now, gate, policy, Verdict.HOLD, waiting, nodes, (), retryable=True, would=None)


def headline(assessment: Assessment) -> Reason | None:
    """The worst reason of a node as one sentence that begins with its name."""
    if not assessment.reasons:
        return None
    worst = assessment.reasons[0]
    if assessment.node in worst.message:
        return worst
    return dataclasses.replace(worst, message=f"{assessment.node}: {worst.message}")


def headlines(assessments: Iterable[Assessment]) -> tuple[Reason, ...]:
    """The worst reason of each node, bounded; a node's own fault before what is only not known, then by name."""
    found = [line for line in map(headline, assessments) if line is not None]
    found.sort(key=lambda line: (-SEVERITY[line.status], line.blame is not Blame.NODE, line.node or "", line.code))
    if len(found) > MOST_REASONS:
        rest = len(found) - MOST_REASONS + 1
        found = [
            *found[: MOST_REASONS - 1],
            dataclasses.replace(found[MOST_REASONS - 1], message=f"and {rest} nodes more"),
        ]
    return tuple(found)


def _chosen(gate: Gate, view: FleetView, seen: Mapping[str, Assessment]) -> tuple[str, ...]:
    """Whom to admit anyway: all that were named; of a pool the best that nobody else has, best first."""
    if gate.request.pool is None:
        return gate.request.nodes
    pool = view.pool(gate.request.pool)
    free = [name for name in pool if name not in view.claims or view.claims[name].gate == gate.id]
    rank = {standing: index for index, standing in enumerate(Standing)}

    def worth(name: str) -> tuple[bool, int]:
        return (name not in gate.granted, rank[seen[name].standing] if name in seen else len(rank))

    return tuple(sorted(free, key=worth)[: gate.terms.wanted])


def startable(gate: Gate, view: FleetView, seen: Mapping[str, Assessment]) -> bool:
    """Whether there are nodes to admit `anyway`: of a pool as many as are needed; named ones are taken as they are."""
    least = 1 if gate.request.pool is None else gate.terms.needed
    return len(_chosen(gate, view, seen)) >= least


def _admitted(gate: Gate, name: str, seen: Assessment | None) -> AdmittedNode:
    asked = gate.asked.get(name)
    if seen is None:
        return AdmittedNode(node=name, evidence_age_seconds=None, asked=asked)
    return AdmittedNode(node=name, evidence_age_seconds=seen.age_seconds, address=seen.address, asked=asked)


def _excluded(gate: Gate, seen: Mapping[str, Assessment], included: set[str]) -> tuple[ExcludedNode, ...]:
    """Every named node that is not included, and of a pool those that were found wanting."""
    if gate.request.nodes:
        # Of a join also the ranks that never came, which have no node.
        names: Iterable[str] = (*gate.request.nodes, *(n for n in gate.failed if n not in gate.request.nodes))
    else:
        out = {name for name, a in seen.items() if a.standing is Standing.OUT}
        names = sorted(out | set(gate.failed))[:MOST_EXCLUDED]
    found = []
    for name in names:
        why = seen[name].reasons if name in seen else gate.failed.get(name, ())
        if name not in included and (why or name not in seen):
            found.append(ExcludedNode(node=name, reasons=why, asked=gate.asked.get(name)))
    return tuple(found)


def _decision(
    now: float,
    gate: Gate,
    policy: Policy,
    verdict: Verdict,
    reasons: tuple[Reason, ...],
    nodes: tuple[AdmittedNode, ...],
    excluded: tuple[ExcludedNode, ...],
    *,
    retryable: bool,
    would: Verdict | None,
) -> Decision:
    terms = gate.terms
    return Decision(
        id=gate.id,
        decision=verdict,
        reasons=reasons,
        nodes=nodes,
        excluded=excluded,
        policy={
            "mode": terms.mode.value,
            "tier": terms.tier.value,
            "max_age_seconds": terms.max_age_seconds,
            "wait_seconds": terms.wait_seconds,
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
    )


def _answered(gate: Gate, decision: Decision, effects: list[Effect]) -> tuple[Gate, tuple[Effect, ...]]:
    """The gate as it ends. A reservation that was empty needs no effect."""
    after = dataclasses.replace(gate, phase=Phase.DECIDED, reserved=(), waiting=(), decision=decision)
    kept = [effect for effect in effects if not (isinstance(effect, Unreserve) and not effect.nodes)]
    return after, (*kept, Answer(decision=decision))
