"""Grants leases on the reserved nodes of a gate, and follows them until each node has stored its own. Pure."""

from __future__ import annotations

import dataclasses

from healthd.aggregator.gate.eligibility import Eligibility
from healthd.aggregator.gate.reservation import StepContext
from healthd.aggregator.gate.transitions import Event
from healthd.aggregator.model.effects import GrantLease
from healthd.aggregator.model.gates import Grant, Granting
from healthd.core.evidence import reason
from healthd.core.model import FINAL_STATUSES, OrderStatus, Reason


def lease_refused(context: StepContext, name: str, grant: Grant) -> Reason | None:
    """Why the node will not acknowledge its lease; None when it has, or still may."""
    node = context.snapshot.nodes.get(name)
    report = None if node is None else node.orders.get(grant.lease_id)
    if report is not None and report.status in FINAL_STATUSES:
        text = f"{name} did not keep its lease ({report.status}): {report.message or 'no reason given'}"
        return reason("LeaseNotAcknowledged", text, node=name)
    within = context.policy.lease_ack_seconds
    if context.now >= grant.granted_at + within and not acknowledged(context, name, grant):
        return reason("LeaseNotAcknowledged", f"{name} did not confirm its lease within {within:.0f} s", node=name)
    return None


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
