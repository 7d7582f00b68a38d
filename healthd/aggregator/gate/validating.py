"""
The gate's nodes run collectives together before they are admitted: pure, a part of `gate.step`.

A culprit is out like a node that failed its own checks; others of the pool may take its place, and then the new whole
is validated again. Nodes borrowed for the search are reserved meanwhile, so nobody else gets them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from checks.contract import Blame, Status
from healthd.aggregator.gate.eligibility import Standing
from healthd.aggregator.gate.reservation import Work, deadline_of, give_back, take
from healthd.aggregator.model import Accuse, Phase, Reserve, RevokeLease, StartGroups, Unreserve
from healthd.aggregator.model.validations import Validation
from healthd.aggregator.validation.plan import advance, begin
from healthd.aggregator.validation.verdicts import consequence
from healthd.core.evidence import reason
from healthd.core.model import NodeState, Reason

MOST_LOOKED_AT = 512
"""Idle nodes looked at in search of partners."""

TO_ANSWER_SECONDS = 5.0
"""What is left of the gate's time when a search must end: leases have to be stored."""


AT_ONCE_SECONDS = 0.01
"""A step that has to go on with what it changed itself: what is not later than now wakes nobody."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """
    How far the validation of the reserved nodes is: `failed` why the job cannot start, `waiting` what is under way.

    Neither: the reserved nodes may be leased, and `notes` are what people should know all the same.
    """

    failed: tuple[Reason, ...] = ()
    waiting: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    wake_at: float = math.inf


def validate(work: Work) -> Proof:
    """Take the validation of the reserved nodes as far as it can go now. All of them are ready."""
    if not work.gate.terms.collective or len(work.gate.reserved) < 2:
        return Proof()
    for _ in range(4 * work.policy.most_validations + 4):
        validation = work.gate.validation
        if validation is not None and validation.verdict is None:
            proof = _under_way(work, validation)
        else:
            proof = _proved(work) or _taken_back(work) or _begin_another(work)
        if proof is not None:
            return proof
    raise AssertionError("each turn of the loop ends a validation, and their number is bounded")


def _proved(work: Work) -> Proof | None:
    """The reserved nodes are those that passed together; None when that is not known yet."""
    validation = work.gate.validation
    if validation is None or validation.verdict is None:
        return None
    found = consequence(validation)
    if not found.cleared or set(found.cleared) != set(work.gate.reserved):
        return None
    return Proof(notes=tuple(one for one in found.reasons if one.status is Status.WARN))


def _under_way(work: Work, validation: Validation) -> Proof | None:
    """Go on with a validation that has no verdict yet; None when it has ended."""
    if set(validation.members) != set(work.gate.reserved):
        close_validation(work, validation)  # a member was lost to something else; who remains is validated anew
        return None
    step = advance(work.now, validation, work.view.nodes, work.policy, lambda count: _partners(work, count))
    after = step.validation
    _keep(work, validation, after)
    if after.verdict is None:
        waiting = reason("NotYetRun", step.waiting)
        return Proof(waiting=(waiting,), wake_at=min(step.wake_at, after.deadline))
    return _conclude(work, after)


def _conclude(work: Work, validation: Validation) -> Proof | None:
    """The verdict is in: culprits go. None when the gate may go on, with the same nodes or with others."""
    if validation.partners:
        work.effects.append(Unreserve(nodes=validation.partners))
    found = consequence(validation)
    for node, why in found.out.items():
        if node in work.gate.reserved or work.gate.request.pool is not None:
            work.fail(node, (why,))  # a borrowed partner too, which would be the next spare
        if why.blame is Blame.NODE and why.status is Status.FAIL:
            work.effects.append(Accuse(node=node, reason=why))
    give_back(work, tuple(node for node in work.gate.reserved if node in found.out), "the collectives failed with it")
    if not found.out and not found.cleared:
        return Proof(failed=found.reasons)
    if not take(work):
        return Proof(failed=found.reasons)
    unready = [name for name in work.gate.reserved if work.look(name).standing is not Standing.READY]
    if not work.gate.reserved or unready:
        waiting = found.reasons or (reason("NotYetRun", "other nodes take the place of those that failed"),)
        return Proof(waiting=waiting, wake_at=work.now + AT_ONCE_SECONDS)
    return None


def _taken_back(work: Work) -> Proof | None:
    """
    Somebody was lost after leases were granted: those of the others end first; None once no node has one.

    Under a lease a node runs nothing, and the next one is stored only when its ranks are off the devices again.
    """
    why = "a node was lost before the job could start; the others run together once more"
    for name, grant in work.gate.granted.items():
        work.effects.append(RevokeLease(node=name, lease_id=grant.lease_id, why=why))
    if work.gate.granted:
        work.gate = dataclasses.replace(work.gate, granted={})
    states = {name: _state(work, name) for name in work.gate.reserved}
    holding = [n for n, state in states.items() if state and any(le.gate == work.gate.id for le in state.leases)]
    if not holding:
        return None
    text = f"{', '.join(holding[:8])}: the lease is taken back, because {why}"
    return Proof(waiting=(reason("NotYetRun", text),))


def _begin_another(work: Work) -> Proof | None:
    """Start over with the nodes that are reserved now; a Proof only when that was done too often."""
    gate = work.gate
    past = gate.past if gate.validation is None else (*gate.past, gate.validation)
    # One that was stopped because its members changed has not been in vain: nodes that fall silent do so one by one.
    ended = [one for one in past if one.verdict is not None]
    if len(ended) >= work.policy.most_validations:
        last = consequence(ended[-1]).reasons
        text = f"{len(ended)} validations with different nodes did not end with nodes that pass together"
        return Proof(failed=(reason("Undecided", text), *last))
    validation = begin(
        work.now,
        f"{gate.tag}:c{len(past)}",
        gate.reserved,
        work.view.nodes,
        work.policy,
        deadline=max(work.now, deadline_of(work) - TO_ANSWER_SECONDS),
    )
    work.gate = dataclasses.replace(gate, past=past, validation=validation, phase=Phase.VALIDATING)
    return None


def close_validation(work: Work, validation: Validation) -> None:
    """Stop it without a verdict; its orders are called off and its partners are free."""
    members = tuple(name for group in validation.groups for name in group.members)
    if members:
        work.effects.append(StartGroups(nodes=members))
    if validation.partners:
        work.effects.append(Unreserve(nodes=validation.partners))
    stopped = dataclasses.replace(validation, groups=(), partners=(), ended_at=work.now)
    work.gate = dataclasses.replace(work.gate, validation=None, past=(*work.gate.past, stopped))


def _keep(work: Work, before: Validation, after: Validation) -> None:
    """Take in how the validation went on, with what nodes must be told for it."""
    fresh = tuple(name for name in after.partners if name not in before.partners)
    if fresh:
        work.effects.append(Reserve(nodes=fresh))
    if after.groups != before.groups:
        told = {name for one in (before, after) for group in one.groups for name in group.members}
        work.effects.append(StartGroups(nodes=tuple(sorted(told))))
    work.gate = dataclasses.replace(work.gate, validation=after, phase=Phase.VALIDATING)


def _partners(work: Work, count: int) -> tuple[str, ...]:
    """Idle nodes with fresh evidence, the same kind of devices and no doubt about them, that nobody has claimed."""
    kinds = {_kind(work, name) for name in work.gate.reserved}
    ready = (
        name
        for name in itertools.islice(_neighbours(work), MOST_LOOKED_AT)
        if name not in work.gate.reserved
        and name not in work.gate.failed
        and name not in work.view.claims
        and not work.view.doubted(name)
        and _kind(work, name) in kinds - {None}
        and work.look(name).standing is Standing.READY
    )
    return tuple(itertools.islice(ready, count))


def _neighbours(work: Work) -> Iterator[str]:
    """The rest of the pools that the reserved nodes are in; those without a pool count as one."""
    if work.gate.request.pool is not None:
        return iter(work.view.pool(work.gate.request.pool))
    pools = {_label(work, name) for name in work.gate.reserved}
    named: Iterable[str] = itertools.chain.from_iterable(work.view.pool(pool) for pool in sorted(p for p in pools if p))
    unnamed = (name for name in work.view.nodes if _label(work, name) is None) if None in pools else ()
    return itertools.chain(named, unnamed)


def _state(work: Work, name: str) -> NodeState | None:
    node = work.view.nodes.get(name)
    return None if node is None else node.state


def _label(work: Work, name: str) -> str | None:
    state = _state(work, name)
    return None if state is None else state.labels.get("pool")


def _kind(work: Work, name: str) -> str | None:
    state = _state(work, name)
    return None if state is None or state.inventory is None else state.inventory.accelerator
