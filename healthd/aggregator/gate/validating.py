"""
Runs collectives over the nodes of a gate before they are admitted. Pure, a part of `gate.step`.

A node that the verdict names is excluded like one that failed its own checks. Other nodes of the pool may replace it,
and then all of them are validated again. Idle nodes that are borrowed for the search are reserved until it ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from checks.contract import Blame, Status
from healthd.aggregator.gate.eligibility import Eligibility
from healthd.aggregator.gate.reservation import (
    Admit,
    Hold,
    Reject,
    StepContext,
    deadline_of,
    end_validation,
    reserve,
    return_nodes,
    stop_validation,
)
from healthd.aggregator.gate.transitions import Event
from healthd.aggregator.model.effects import Accuse, RevokeLease
from healthd.aggregator.model.gates import Checking, Validating
from healthd.aggregator.model.validations import Tested, Validation
from healthd.aggregator.validation.known_checks import lacking, sentence
from healthd.aggregator.validation.plan import advance, begin
from healthd.aggregator.validation.verdicts import consequence
from healthd.core.evidence import reason
from healthd.core.model import NodeState
from healthd.localize.model import Outcome

MOST_LOOKED_AT = 512
"""Idle nodes looked at in search of partners."""

TO_ANSWER_SECONDS = 5.0
"""What is left of the gate's time when a search must end: leases have to be stored."""


AT_ONCE_SECONDS = 0.01
"""A step that has to go on with what it changed itself: what is not later than now wakes nobody."""


def validate(context: StepContext) -> Hold | Reject | Admit:
    """Take the validation of the reserved nodes, all ready, as far as it can go. Admit: they may be leased."""
    stop_validation_of_others(context)
    if not context.gate.terms.collective:
        return Admit()
    for _ in range(4 * context.policy.most_validations + 4):
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
            text = f"{name} is left alone after collectives that failed in the middle on {others}: it has passed none"
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
    return _conclude(context, after)


def _conclude(context: StepContext, validation: Validation) -> Hold | Reject | None:
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
        return Reject(found.reasons)
    if not reserve(context):
        return Reject(found.reasons)
    unready = [name for name in context.gate.reserved if context.assess(name).eligibility is not Eligibility.READY]
    if not context.gate.reserved or unready:
        waiting = found.reasons or (reason("NotYetRun", "other nodes take the place of those that failed"),)
        return Hold(waiting, wake_at=context.now + AT_ONCE_SECONDS)
    return None


def _revoke_leases(context: StepContext) -> Hold | None:
    """
    A node was lost after leases were granted: take back the leases of the others. None once no node has one.

    A node runs nothing under a lease, and stores the next one only when its ranks have left the devices.
    """
    why = "a node was lost before the job could start; the others run together once more"
    for name, grant in context.gate.granted.items():
        context.effects.append(RevokeLease(node=name, lease_id=grant.lease_id, why=why))
    if context.gate.granted:
        context.move(Event.REVOKED, Checking(reserved=context.gate.reserved))
    states = {name: _state(context, name) for name in context.gate.reserved}
    holding = [n for n, state in states.items() if state and any(le.gate == context.gate.id for le in state.leases)]
    if not holding:
        return None
    text = f"{', '.join(holding[:8])}: the lease is taken back, because {why}"
    return Hold((reason("NotYetRun", text),))


def _start_validation(context: StepContext) -> Reject | None:
    """Validate the nodes that are reserved now; a Reject only when too many have failed, or no check can be run."""
    gate = context.gate
    # Stopped validations do not count, nor those of nodes that passed and were given back: nodes that fall silent do
    # so one by one, and each may cause one.
    ended = [one for one in gate.ended if one.verdict is not None and consequence(one).out]
    if len(ended) >= context.policy.most_validations:
        last = consequence(ended[-1]).reasons
        text = f"{len(ended)} validations with different nodes did not end with nodes that pass together"
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


def stop_validation_of_others(context: StepContext) -> None:
    """Stop a validation whose members are no longer the reserved nodes; those are validated anew."""
    validation = context.gate.validation
    if validation is not None and set(validation.members) != set(context.gate.reserved):
        stop_validation(context)


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
