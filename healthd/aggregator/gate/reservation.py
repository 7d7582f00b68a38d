"""
Reserves nodes for a gate and gives them back. Pure, a part of `machine.step`.

A gate reserves all the nodes that it needs or none, so no two gates ever hold what the other waits for.

Also here:

- grants leases on the reserved nodes of a gate, and follows them until each node has stored its own.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from healthd.aggregator.gate.eligibility import Assessment, Eligibility, assess
from healthd.aggregator.gate.records import (
    Checking,
    Effect,
    Gate,
    Grant,
    Granting,
    GrantLease,
    OrderedRun,
    Progress,
    RevokeLease,
    RunStatus,
    Snapshot,
    Validating,
    Waiting,
)
from healthd.aggregator.gate.transitions import Event, Move, move
from healthd.aggregator.policy import Policy
from healthd.aggregator.validation.records import Validation
from healthd.core.evidence import reason
from healthd.core.model import FINAL_STATUSES, Mode, OrderStatus, Reason

USABLE = (Eligibility.READY, Eligibility.NEEDS_RUN, Eligibility.RUNNING, Eligibility.UNHEARD)
OBSERVE_SECONDS = 60.0
"""In observe mode the answer comes after so long at the latest, where there are nodes to start on: watching must not
hold up a job."""
MOST_REPLACED = 256
"""Nodes of a pool that were given back and of which a gate remembers why: as many as a decision lists."""
FIRST_LOOK = 64
"""Nodes of a pool beyond four times the need that are looked at before runs are preferred to looking further."""


@dataclass(frozen=True)
class Hold:
    """The job has to wait: what the gate waits for, and when to look again if nothing is heard."""

    waiting: tuple[Reason, ...]
    wake_at: float = math.inf


@dataclass(frozen=True)
class Reject:
    """The job may not start. `retryable`: trying again, here or elsewhere, can help."""

    why: tuple[Reason, ...]
    retryable: bool = True


@dataclass(frozen=True)
class Admit:
    """The job may start. `notes` are warnings for people."""

    notes: tuple[Reason, ...] = ()


def reserve(context: StepContext) -> bool:
    """
    Reserve the missing nodes, all at once or none; false when waiting cannot bring enough either.

    Afterwards the gate has reserved at least what it needs, or nothing.
    """
    terms = context.gate.terms
    missing = terms.wanted - len(context.gate.reserved)
    more, maybe = _candidates(context, missing) if missing > 0 else ((), 0)
    held = len(context.gate.reserved) + len(more)
    if held >= terms.needed and not (_earlier_attempt_has_node(context) and context.now < extra_nodes_until(context)):
        if more:
            reserved = (*context.gate.reserved, *more)
            if context.gate.request.nodes:
                # Ranks follow the order in which the nodes were named, whoever was fit first.
                together = set(reserved)
                reserved = tuple(name for name in context.gate.request.nodes if name in together)
            if isinstance(context.gate.progress, Waiting):
                context.move(Event.RESERVED, Checking(reserved=reserved))
            else:
                context.update(reserved=reserved)
        return True
    return_nodes(context, context.gate.reserved, "too few nodes are left")
    return held + maybe >= terms.needed


def drop_unready(context: StepContext) -> bool:
    """
    Give back the reserved nodes that are not ready, once enough are ready and the others need not be waited for.

    Returns whether the gate can go on.
    """
    terms = context.gate.terms
    ready = [name for name in context.gate.reserved if context.assessments[name].eligibility is Eligibility.READY]
    pending = tuple(
        name for name in context.gate.reserved if context.assessments[name].eligibility is not Eligibility.READY
    )
    if len(ready) < terms.needed or (pending and context.now < extra_nodes_until(context)):
        return False
    return_nodes(context, pending, "the job no longer waits for it")
    return True


def return_nodes(context: StepContext, names: tuple[str, ...], why: str) -> None:
    """Give nodes back: unreserve them, call off their runs and revoke their leases."""
    if not names:
        return
    everybody = set(names) >= set(context.gate.reserved)
    for name in names:
        run = context.gate.ordered.get(name)
        if run is not None:
            # A run that is called off because of its own node still counts, or it would be ordered for ever.
            found = context.assessments.get(name)
            lost = found is not None and found.eligibility is Eligibility.EXCLUDED
            if run.status is RunStatus.CLOSED or (everybody and not lost):
                run = dataclasses.replace(run, earlier_rounds=run.round)
            close_run(context, name, run)
        grant = context.gate.granted.get(name)
        if grant is not None:
            context.effects.append(RevokeLease(node=name, lease_id=grant.lease_id, why=why))
    if context.gate.request.pool is not None:
        _note_replaced(context, names)
    returned = set(names)
    times = {**context.gate.returned, **dict.fromkeys(names, context.now)}
    context.gate = dataclasses.replace(context.gate, returned=times)
    reserved = tuple(name for name in context.gate.reserved if name not in returned)
    granted = {name: grant for name, grant in context.gate.granted.items() if name not in returned}
    if not reserved:
        stop_validation(context)
        context.move(Event.RETURNED, Waiting())
    elif isinstance(context.gate.progress, Granting) and not granted:
        context.move(Event.REVOKED, Checking(reserved=reserved))
    elif isinstance(context.gate.progress, Granting):
        context.update(reserved=reserved, granted=granted)
    else:
        context.update(reserved=reserved)


def close_run(context: StepContext, name: str, run: OrderedRun) -> None:
    """Call off an ordered run, or note that it is over."""
    closed = dataclasses.replace(run, status=RunStatus.CLOSED)
    context.gate = dataclasses.replace(context.gate, ordered={**context.gate.ordered, name: closed})


def stop_validation(context: StepContext) -> None:
    """End the validation in progress without a verdict: call off its orders and release its partners."""
    progress = context.gate.progress
    if not isinstance(progress, Validating):
        return
    ended = dataclasses.replace(progress.validation, groups=(), partners=(), ended_at=context.now)
    end_validation(context, ended)


def end_validation(context: StepContext, validation: Validation) -> None:
    """Record that the validation in progress is over, in the form given here."""
    context.move(Event.VALIDATION_ENDED, Checking(reserved=context.gate.reserved))
    context.gate = dataclasses.replace(context.gate, ended=(*context.gate.ended, validation))


def extra_nodes_until(context: StepContext) -> float:
    """Until when the gate waits for nodes beyond those that it needs: leases take time before the deadline."""
    end = deadline_of(context)
    half = (context.gate.since + end) / 2
    return max(half, end - context.policy.tuning.lease_ack_seconds)


def deadline_of(context: StepContext) -> float:
    """When the gate ends. In observe mode a gate may not hold up a job for as long as in enforce mode."""
    if context.gate.terms.mode is Mode.OBSERVE:
        return min(context.gate.deadline, context.gate.since + OBSERVE_SECONDS)
    return context.gate.deadline


def lease_refused(context: StepContext, name: str, grant: Grant) -> Reason | None:
    """Why the node will not acknowledge its lease; None when it has, or still may."""
    node = context.snapshot.nodes.get(name)
    report = None if node is None else node.orders.get(grant.lease_id)
    if report is not None and report.status in FINAL_STATUSES:
        text = f"{name} did not keep its lease ({report.status}): {report.message or 'no reason given'}"
        return reason("LeaseNotAcknowledged", text, node=name)
    within = context.policy.tuning.lease_ack_seconds
    if context.now >= grant.granted_at + within and not acknowledged(context, name, grant):
        return reason("LeaseNotAcknowledged", f"{name} did not confirm its lease within {within:.0f} s", node=name)
    return None


def grant_leases(context: StepContext) -> None:
    """Grant a lease on each reserved node that has none yet. All of them are ready."""
    fresh = [name for name in context.gate.reserved if name not in context.gate.granted]
    if not fresh:
        return
    round_number = context.gate.grants + 1
    granted = dict(context.gate.granted)
    for name in fresh:
        lease_id = f"{context.gate.id}:lease:{round_number}:{name}"
        granted[name] = Grant(lease_id=lease_id, granted_at=context.now)
        context.effects.append(GrantLease(node=name, lease_id=lease_id))
    if isinstance(context.gate.progress, Granting):
        context.update(granted=granted)
    else:
        context.move(Event.GRANTED, Granting(reserved=context.gate.reserved, granted=granted))
    context.gate = dataclasses.replace(context.gate, grants=round_number)


def all_acknowledged(context: StepContext) -> bool:
    """Whether every reserved node is ready and has stored its lease."""
    gate = context.gate
    if len(gate.granted) < gate.terms.needed or set(gate.granted) != set(gate.reserved):
        return False
    return all(
        context.assessments[name].eligibility is Eligibility.READY and acknowledged(context, name, grant)
        for name, grant in gate.granted.items()
    )


def acknowledged(context: StepContext, name: str, grant: Grant) -> bool:
    """Whether the node has stored the lease that it was granted."""
    return stored(context, name, grant.lease_id)


def stored(context: StepContext, name: str, lease_id: str) -> bool:
    """Whether the node has stored a lease: it reports so, and its state shows the lease."""
    node = context.snapshot.nodes.get(name)
    if node is None or node.state is None:
        return False
    report = node.orders.get(lease_id)
    accepted = report is not None and report.status == OrderStatus.ACCEPTED  # "running" means: about to be stored
    return accepted and any(lease.id == lease_id for lease in node.state.leases)


@dataclass
class StepContext:
    """One step in progress: the gate as it is now, what the step sees, and what it has found out and done so far."""

    gate: Gate
    snapshot: Snapshot
    policy: Policy
    assessments: dict[str, Assessment] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.snapshot.now

    def assess(self, name: str) -> Assessment:
        """The assessment of a node, made once in a step."""
        found = self.assessments.get(name)
        if found is None:
            found = self.assessments[name] = assess(self.gate, self.snapshot, self.policy, name)
        return found

    def move(self, event: Event, progress: Progress) -> None:
        """Take the gate into another phase."""
        self.gate, made = move(self.gate, event, progress)
        self.moves.append(made)

    def update(self, **changes: Any) -> None:
        """Change fields of the phase that the gate is in."""
        self.gate = dataclasses.replace(self.gate, progress=msgspec.structs.replace(self.gate.progress, **changes))

    def fail(self, name: str, why: tuple[Reason, ...]) -> None:
        """Exclude the node from this gate for good."""
        self.gate = dataclasses.replace(self.gate, failed={**self.gate.failed, name: why})
        self.assessments[name] = Assessment(node=name, eligibility=Eligibility.EXCLUDED, reasons=why, final=True)


def _candidates(context: StepContext, missing: int) -> tuple[tuple[str, ...], int]:
    """The free nodes to reserve, best first and at most `missing`, and how many more there may be later."""
    request, reserved = context.gate.request, set(context.gate.reserved)
    if request.nodes:
        rest = [context.assess(name) for name in request.nodes if name not in reserved]
        usable = [found.node for found in rest if found.eligibility in USABLE]
        return tuple(usable), sum(found.eligibility is Eligibility.BUSY for found in rest)
    ready: list[str] = []
    run: list[str] = []
    # While nodes may still be about to report, nobody can say how many there will be.
    maybe = context.gate.terms.needed if context.snapshot.settling is not None else 0
    examined, claims = 0, context.snapshot.claims
    for name in context.snapshot.pools.get(request.pool or "", ()):
        if name in reserved:
            continue
        claim = claims.get(name)
        if claim is not None and claim.gate != context.gate.id:
            maybe += 1
            continue
        examined += 1
        found = context.assess(name)
        if found.eligibility is Eligibility.READY:
            ready.append(name)
        elif found.eligibility is Eligibility.NEEDS_RUN:
            run.append(name)
        elif found.eligibility is not Eligibility.EXCLUDED:
            maybe += 1
        enough = len(ready) >= missing
        if enough or (examined >= 4 * missing + FIRST_LOOK and len(ready) + len(run) >= missing):
            break
    chosen = [*ready, *run]
    return tuple(chosen[:missing]), maybe + max(0, len(chosen) - missing)


def _earlier_attempt_has_node(context: StepContext) -> bool:
    """Whether an earlier attempt of the same job still has a named node. It is giving it back."""
    return any(context.assessments[name].own for name in context.gate.request.nodes if name in context.assessments)


def _note_replaced(context: StepContext, names: tuple[str, ...]) -> None:
    """Remember why nodes of a pool are given back that are unfit: others take their places."""
    replaced = dict(context.gate.replaced)
    for name in names:
        found = context.assessments.get(name)
        if found is not None and found.eligibility is Eligibility.EXCLUDED and len(replaced) < MOST_REPLACED:
            replaced[name] = found.reasons
    if replaced != context.gate.replaced:
        context.gate = dataclasses.replace(context.gate, replaced=replaced)
