"""
What is kept of each decided gate so that it can be held against how its job ended: pure.

The record of a gate is large and its evidence larger; the figures of a month must not need to read them. So the few
facts that figures are made of are written beside them, in the same transaction as the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from checks.contract import Status, Tier
from healthd.aggregator.model.calibration import STARTED, Fault, GateEnding, GateFacts
from healthd.aggregator.model.gates import Closing, Gate
from healthd.aggregator.validation.verdicts import consequence
from healthd.core.evidence import judge_tier
from healthd.core.model import Decision, Mode, NodeState, Reason, Verdict

MOST_FAULTS = 512
"""Faults kept of one gate: a pool that fails as a whole need not be written down node by node."""

MOST_DEVICES = 1024
"""Of a node, as far as its costs go."""

# Somebody else has the node: that is not a word about its health, and in a busy fleet it would drown all others.
_TAKEN = frozenset({"Reserved", "Allocated"})


def facts_of(gate: Gate, states: Iterable[NodeState]) -> GateFacts | None:
    """
    The facts of a gate; None of one that is open, or that asked for an answer and no nodes: no job will end there.

    `states` are those that the decision went by.
    """
    decision = gate.decision
    if decision is None or not gate.request.lease:
        return None
    way = way_of(gate, decision)
    would = decision.would or decision.decision
    known = {state.node: state for state in states}
    faults = dict.fromkeys(_left_out(decision))
    if way in (GateEnding.OBSERVED, GateEnding.OVERRIDDEN) and would is not Verdict.ADMIT:
        faults.update(dict.fromkeys(_run_on(gate, decision, known)))
    alarmed = any(not fault.out for fault in faults)
    kept = sorted(faults, key=lambda fault: fault.out)[:MOST_FAULTS]
    return GateFacts(
        gate=gate.id,
        decided_at=decision.decided_at,
        way=way,
        would=would,
        alarmed=alarmed,
        clean=way in STARTED and would is Verdict.ADMIT and not alarmed,
        wait_seconds=max(0.0, decision.duration_seconds),
        device_seconds=device_seconds(gate, known),
        faults=tuple(kept),
    )


def way_of(gate: Gate, decision: Decision) -> GateEnding:
    """How it ended."""
    codes = {reason.code for reason in decision.reasons[:1]}
    if decision.decision is not Verdict.ADMIT:
        return GateEnding.WITHDRAWN if codes & {closing.value for closing in Closing} else GateEnding.REJECTED
    if "Override" in codes:
        return GateEnding.OVERRIDDEN
    return GateEnding.OBSERVED if gate.terms.mode is Mode.OBSERVE else GateEnding.ADMITTED


def _left_out(decision: Decision) -> Iterator[Fault]:
    for excluded in decision.excluded:
        for why in excluded.reasons[:4]:
            if why.code not in _TAKEN:
                yield Fault(node=excluded.node, check=why.check or "", code=why.code, out=True)


def _run_on(gate: Gate, decision: Decision, states: Mapping[str, NodeState]) -> Iterator[Fault]:
    """What had failed on the nodes that the job was given all the same, of the evidence that the gate asks for."""
    given = {node.node for node in decision.nodes}
    found: list[Reason] = []
    for name in sorted(given & states.keys()):
        state = states[name]
        if any(result.status is Status.FAIL for result in state.results):
            found.extend(judge_tier(state, gate.terms.tier, gate.terms.max_age_seconds)[1])
    for validation in gate.validations:
        if validation.verdict is not None:
            found.extend(consequence(validation).out.values())
    for why in found:
        if why.status is Status.FAIL and why.node in given:
            yield Fault(node=why.node, check=why.check or "collectives", code=why.code, out=False)


# --- what it cost -----------------------------------------------------------------------------------------------------


def device_seconds(gate: Gate, states: Mapping[str, NodeState]) -> float:
    """Seconds of devices that the gate's runs and collectives have taken, as far as the nodes' states tell."""
    runs = sum(run_seconds(gate, name, states[name]) for name in gate.ordered if name in states)
    return runs + sum(
        tested.seconds * sum(validation.ranks.get(name, 0) for name in tested.members)
        for validation in gate.validations
        for tested in validation.history
    )


def run_seconds(gate: Gate, name: str, state: NodeState) -> float:
    """Of the active checks that a node has run since the gate ordered it to; `state` has ages as of the decision."""
    if gate.decision is None or name not in gate.ordered:
        return 0.0
    since = gate.decision.decided_at - gate.ordered[name].ordered_at
    active = {spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE}
    devices = (state.inventory.device_count if state.inventory is not None else None) or 1
    # Numbers of a node's own, which go into sums that are kept: none is more than it can be.
    return min(max(1, devices), MOST_DEVICES) * sum(
        min(max(0.0, result.duration_seconds), since)
        for result in state.results
        if result.check in active and result.age_seconds <= since
    )
