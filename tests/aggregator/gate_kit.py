"""What the tests of gate, and those beside them, are made with."""

from __future__ import annotations

import dataclasses

from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.records import Gate
from healthd.core.model import Decision, OrderReport
from tests.aggregator.world import NOW, POLICY, lease, step, view


def decided(after: Gate) -> Decision:
    assert after.decision is not None, after.waiting
    return after.decision


def acknowledged(fleet_node: FleetNode, after: Gate) -> FleetNode:
    """The node as it is once it has stored the lease that the gate granted it."""
    lease_id = after.granted[fleet_node.node].lease_id
    assert fleet_node.state is not None
    stored = dataclasses.replace(fleet_node.state, leases=(lease(lease_id, gate_id=after.id),))
    return dataclasses.replace(fleet_node, state=stored, orders={lease_id: OrderReport(status="accepted")})


def admit(after: Gate, *nodes: FleetNode, now: float = NOW) -> Decision:
    """Let every granted node acknowledge; the gate must admit."""
    stored = [acknowledged(n, after) if n.node in after.granted else n for n in nodes]
    end, _ = step(now + 1, after, view(*stored), POLICY)
    return decided(end)
