"""
What the engine knows, made of what is on disk, and what one pass of its loop works out on it.

Nothing here waits or writes. When a pass fails, the whole of it is dropped and made anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from healthd.aggregator.controller.bulkheads import Bulkheads, Where, contained
from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.controller.state.fleet_state import FleetState
from healthd.aggregator.controller.state.lease_reconciler import LeaseReconciler
from healthd.aggregator.controller.state.quarantines import Quarantines
from healthd.aggregator.controller.stepping import Stepper
from healthd.aggregator.gate.snapshot import ReadOnce
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.model.nodes import FleetNode
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.store.reading import Loaded


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What a pass has worked out, before it is on disk."""

    batch: Batch
    changed: set[str]
    """Nodes that something was heard of, without those that rest after a fault."""
    nodes: Mapping[str, FleetNode]
    """The nodes as this pass saw them."""
    accused: set[str]
    """Nodes that are quarantined for what a validation said."""
    made_room: bool
    """Whether other gates may be able to reserve nodes in the next pass."""


class Memory:
    """See the module. `started_at` is when this aggregator started to hear nodes."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        store_id: str,
        registry: Fleet,
        policy: Policy,
        bulkheads: Bulkheads,
        started_at: float,
    ) -> None:
        self._registry, self._bulkheads = registry, bulkheads
        self._next_end = math.inf  # of a quarantine; each pass finds it anew
        self.fleet_state = FleetState(loaded, store_id=store_id, policy=policy)
        self.reconciler = LeaseReconciler(self.fleet_state, registry, policy, loaded, started_at=started_at)
        self.rules = Quarantines(
            self.fleet_state,
            registry,
            policy,
            loaded,
            pool_of=self.reconciler.pool_of,
            present=self.reconciler.present,
        )
        self.stepper = Stepper(
            self.fleet_state, registry, policy, reconciler=self.reconciler, rules=self.rules, bulkheads=bulkheads
        )
        for node, quarantine in self.fleet_state.quarantines.items():
            registry.set_quarantine(node, quarantine)

    def go_on_from(self, before: Memory, now: float) -> None:
        """Take from former memory what is not on disk, and tell the registry what is no longer so."""
        self.rules.counted = before.rules.counted
        self.fleet_state.go_on_from(before.fleet_state, now)
        self.reconciler.go_on_from(before.reconciler)
        for node in before.fleet_state.quarantines.keys() - self.fleet_state.quarantines.keys():
            self._registry.set_quarantine(node, None)
        self.stepper.set_executors(now)

    def compute(self, batch: Batch, heard: set[str]) -> Pass:
        """Everything that follows from what was heard and from the time; ContainedError names what failed."""
        resting = self._bulkheads.resting(Where.NODE, batch.now)
        changed = heard - resting.keys()
        nodes = ReadOnce(lambda name: self._registry.node(name, batch.now), self._registry.names)
        self.reconciler.reconcile(batch, changed, nodes)
        self.rules.take_in(batch, changed, nodes, resting)
        self._end_quarantines(batch, resting)
        self._bulkheads.keep(Where.NODE, resting)
        made_room = self.stepper.step_all(batch, changed, nodes)
        accused = self.rules.accuse(batch, nodes, resting)
        self._bulkheads.keep(Where.GATE, self.fleet_state.gates)
        for fault in self._bulkheads.faults():
            if fault.where is Where.GATE:
                self.stepper.show_fault(fault)
        return Pass(batch=batch, changed=changed, nodes=nodes, accused=accused, made_room=made_room)

    def publish(self, done: Pass) -> None:
        """The pass is on disk: tell the nodes their orders, and remember the gates that it has decided."""
        self.reconciler.publish(done.batch, done.changed, done.nodes)
        for name in done.batch.forgotten:
            self._registry.forget(name)
        if any(gate.request.join is not None for gate in done.batch.decided):
            self.stepper.set_executors(done.batch.now)
        for gate in done.batch.decided:
            self.fleet_state.remember(gate)
            self.stepper.decided(gate.id)

    def next_due(self, now: float) -> float:
        """When the next pass is due if nothing happens."""
        if self.stepper.dirty:
            return now
        rest = self._bulkheads.resting(Where.NODE, now)
        times = (self.stepper.next_due(), self.reconciler.next_due(now), self.rules.next_due(rest))
        return min(*times, self._bulkheads.next_due(now), self._next_end)

    def _end_quarantines(self, batch: Batch, resting: Collection[str]) -> None:
        """End those whose time is over, unless the rules have just put one of theirs in the place."""
        self._next_end = math.inf
        for node, kept in list(self.fleet_state.quarantines.items()):
            if kept.until is None or node in resting:
                continue
            with contained(Where.NODE, node):
                if kept.until > batch.now:
                    self._next_end = min(self._next_end, kept.until)
                else:
                    self.fleet_state.put_quarantine(batch, node, None, why=f"the time that {kept.owner} said is over")
