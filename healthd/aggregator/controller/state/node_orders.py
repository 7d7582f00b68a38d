"""What a node is to do now: pure, from what is on disk of its gate, its probe and its leases."""

from __future__ import annotations

from healthd.aggregator.controller.state.fleet_state import FleetState
from healthd.aggregator.model.gates import RunStatus
from healthd.aggregator.validation.groups import orders_of
from healthd.core.model import Order, OrderKind, RunOrder


def orders_for(fleet: FleetState, node: str) -> tuple[Order, ...]:
    """All open orders of a node. They follow from what is on disk, so they are the same after a restart."""
    found = []
    gate = fleet.gates.get(fleet.reserved.get(node, ""))
    run = gate.ordered.get(node) if gate is not None else None
    if gate is not None and run is not None and run.status is RunStatus.OPEN:
        work = RunOrder(tier=gate.terms.tier, workload=gate.asker_on(node))
        found.append(Order(id=run.order_id, kind=OrderKind.RUN, deadline_seconds=run.deadline_seconds, run=work))
    if gate is not None and gate.validation is not None:
        found.extend(orders_of(gate.validation, node, fleet.policy, workload=gate.asker_on(node)))
    if node in fleet.probes:
        found.append(fleet.probes[node])
    within = fleet.policy.lease_ack_seconds
    for lease_id in fleet.leases_of.get(node, ()):
        # A node keeps a lease until it is told with its id that it is over.
        row, ended = fleet.leases[lease_id], not fleet.lease_stands(lease_id)
        order = Order(id=lease_id, kind=OrderKind.LEASE, deadline_seconds=within, withdrawn=ended, lease=row.lease)
        found.append(order)
    return tuple(found)
