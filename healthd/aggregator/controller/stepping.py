"""
Chooses the gates to step in a pass of the loop, steps them, and applies the steps to the fleet state.

A gate whose step fails in an unforeseen way is held alone: nothing of the step is applied, its reason is
`InternalError`, it is tried again later, and it ends at its deadline as any other gate.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping

from healthd.aggregator.controller import admission
from healthd.aggregator.controller.bulkheads import Bulkheads, ContainedError, Fault, Where, contained
from healthd.aggregator.controller.state.batch import Batch
from healthd.aggregator.controller.state.fleet_state import FleetState
from healthd.aggregator.controller.state.lease_reconciler import LeaseReconciler
from healthd.aggregator.controller.state.quarantines import Quarantines
from healthd.aggregator.gate import decisions, members, name_resolution
from healthd.aggregator.gate.machine import resume, step
from healthd.aggregator.gate.reservation import StepContext, deadline_of
from healthd.aggregator.gate.snapshot import ReadOnce
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.model.effects import Effect, WakeAt
from healthd.aggregator.model.gates import Gate, Phase
from healthd.aggregator.model.nodes import FleetNode, Snapshot
from healthd.aggregator.model.policy import Policy
from healthd.aggregator.model.validations import NO_CHANCE_SEEN, ChanceSeen
from healthd.aggregator.validation.chance_seen import add
from healthd.core.evidence import reason
from healthd.core.model import NodeState, Reason

log = logging.getLogger(__name__)


class Stepper:
    """
    Steps the open gates. Those in `dirty` are stepped in the next pass; `due` is when a gate is stepped if nothing
    happens.
    """

    def __init__(
        self,
        fleet_state: FleetState,
        registry: Fleet,
        policy: Policy,
        *,
        reconciler: LeaseReconciler,
        rules: Quarantines,
        bulkheads: Bulkheads,
    ) -> None:
        self.dirty: set[str] = set(fleet_state.gates)
        self.due: dict[str, float] = {}
        self._fleet_state = fleet_state
        self._registry = registry
        self._policy = policy
        self._reconciler = reconciler
        self._rules = rules
        self._bulkheads = bulkheads
        self._chance: dict[str | None, ChanceSeen] = {}  # by pool: another has another network; None: nodes by name

    def next_due(self) -> float:
        """When the next gate is due."""
        return min((at for gate_id, at in self.due.items() if gate_id in self._fleet_state.gates), default=math.inf)

    def decided(self, gate_id: str) -> None:
        """Forget a gate whose decision is on disk."""
        self.due.pop(gate_id, None)

    def step_all(self, batch: Batch, heard: set[str], nodes: Mapping[str, FleetNode]) -> bool:
        """
        Step every gate that something happened to; gates that a step has made room for are stepped in the next pass.

        Returns whether there are such gates. ContainedError names a gate that failed after its step had changed the
        batch.
        """
        dirty = self._gates_to_step(batch, heard)
        if not dirty:
            return False
        now = batch.now
        snapshot = Snapshot(
            now=now,
            nodes=ReadOnce(lambda name: self._as_of_this_pass(nodes.get(name)), self._registry.names),
            pools=ReadOnce(lambda pool: tuple(self._registry.pool(pool))),
            called=ReadOnce(self._registry.called),
            claims={},
            overrides=dict(self._fleet_state.overrides),
            recovering=self._reconciler.recovering(now),
            settling=self._reconciler.settling(now),
        )
        failing = self.set_executors(now)
        dirty |= failing.keys()
        freed_before = len(batch.freed)
        for gate_id in sorted(dirty):
            with contained(Where.GATE, gate_id):
                gate = self._fleet_state.gates[gate_id]
                seen = dataclasses.replace(
                    snapshot,
                    claims=self._fleet_state.current_claims(),
                    doubted=self._rules.doubted() | {one.node for one in batch.accused},
                    chance=self._chance.get(gate.request.pool, NO_CHANCE_SEEN),
                )
                self._step(batch, gate, seen, failing.get(gate_id))
        made_room = len(batch.freed) > freed_before
        if made_room:
            self.dirty.update(self._waiting())
        return made_room

    def _as_of_this_pass(self, node: FleetNode | None) -> FleetNode | None:
        """The node with its quarantine as it is now: the registry has it once it is on disk."""
        kept = None if node is None else self._fleet_state.quarantines.get(node.node)
        return node if node is None or node.quarantine == kept else dataclasses.replace(node, quarantine=kept)

    def _gates_to_step(self, batch: Batch, heard: set[str]) -> set[str]:
        """The open gates that something happened to, without those that rest after a fault."""
        now = batch.now
        due = {gate_id for gate_id, at in self.due.items() if at <= now}
        concerned = {gate.id for gate in self._fleet_state.gates.values() if gate.id not in self.due}
        changed, resting = heard | batch.freed, self._bulkheads.resting(Where.GATE, now)
        self.due.update((gate_id, at) for gate_id, at in resting.items() if gate_id in self._fleet_state.gates)
        for gate in self._fleet_state.gates.values():
            if gate.id in resting:
                continue
            with contained(Where.GATE, gate.id):
                named = (*gate.request.nodes, *gate.held)
                if not changed.isdisjoint(named) or name_resolution.names_found(gate, self._registry.called, heard):
                    concerned.add(gate.id)
        if batch.freed:
            concerned |= self._waiting()
        concerned |= self._fleet_state.gates_with_proven_leases()
        dirty, self.dirty = (self.dirty | due | concerned) & set(self._fleet_state.gates), set()
        return dirty - resting.keys()

    def set_executors(self, now: float) -> Mapping[str, Fault]:
        """Tell the registry which hooks run the checks of their nodes. Returns the gates that failed in it, by id."""
        found: dict[str, str] = {}
        failing: dict[str, Fault] = {}
        resting = self._bulkheads.resting(Where.GATE, now)
        for gate in self._fleet_state.gates.values():
            if gate.request.join is None or gate.id in resting:
                continue
            try:
                with contained(Where.GATE, gate.id):
                    found.update(members.executors(gate))
            except ContainedError as stopped:
                failing[gate.id] = self._bulkheads.failed(Where.GATE, gate.id, stopped.error, now)
        self._registry.set_executors(found)
        return failing

    def _waiting(self) -> set[str]:
        """Gates that could reserve nodes if there were any."""
        return {gate.id for gate in self._fleet_state.gates.values() if gate.phase is Phase.WAITING}

    def _step(self, batch: Batch, gate: Gate, snapshot: Snapshot, fault: Fault | None) -> None:
        """Step one gate. With a `fault`, which it had earlier in this pass, it is held without a step."""
        states: tuple[NodeState, ...] = ()
        if fault is None:
            try:
                with contained(Where.GATE, gate.id):
                    if held := self._fleet_state.leases_from_before(gate):
                        after, effects, moves = resume(gate, snapshot, self._policy, held)
                    else:
                        after, effects, moves = step(gate, snapshot, self._policy)
                    states = _states_of(after, snapshot)
                self._bulkheads.passed(Where.GATE, gate.id)
                for one in moves:
                    log.debug("gate %s: %s, %s", gate.id, one.event.value, one.after.value)
            except ContainedError as stopped:
                fault = self._bulkheads.failed(Where.GATE, gate.id, stopped.error, batch.now)
        if fault is not None:
            after, effects = self._hold_faulty(gate, snapshot, fault)
            states = ()
        for ended in after.ended[len(gate.ended) :]:
            pool = gate.request.pool
            self._chance[pool] = add(self._chance.get(pool, NO_CHANCE_SEEN), ended)
        at = next((effect.at for effect in effects if isinstance(effect, WakeAt)), math.inf)
        if after.phase is Phase.WAITING and after.request.pool is not None:
            # Any node of a pool may concern this gate, so it looks now and then; the more gates wait, the less often.
            crowd = sum(other.phase is Phase.WAITING for other in self._fleet_state.gates.values())
            at = min(at, batch.now + self._policy.pool_recheck_seconds * max(1.0, crowd / 4))
        self.due[gate.id] = at
        durable = [effect for effect in effects if not isinstance(effect, WakeAt)]
        if not durable and admission.stored_part(after) == admission.stored_part(gate):
            self._fleet_state.gates[gate.id] = after
            return
        self._fleet_state.carry_out(batch, after, durable, states)

    def show_fault(self, fault: Fault) -> None:
        """Show on an open gate that an internal error holds it. This is not written to disk."""
        gate = self._fleet_state.gates.get(fault.name)
        if gate is not None:
            self._fleet_state.gates[gate.id] = dataclasses.replace(gate, waiting=(_reason(fault),))
            self.due[gate.id] = fault.retry_at

    def _hold_faulty(self, gate: Gate, snapshot: Snapshot, fault: Fault) -> tuple[Gate, tuple[Effect, ...]]:
        """The gate without a step; rejected when its time is up."""
        context = StepContext(
            gate, dataclasses.replace(snapshot, nodes={}), self._policy
        )  # one of them may be what failed
        if context.now >= deadline_of(context):
            decisions.reject(context, (_reason(fault),), retryable=True)
            return context.gate, tuple(context.effects)
        return dataclasses.replace(gate, waiting=(_reason(fault),)), (WakeAt(at=fault.retry_at),)


def _states_of(gate: Gate, snapshot: Snapshot) -> tuple[NodeState, ...]:
    """The states that the decision is based on; empty while there is none."""
    if gate.decision is None:
        return ()
    names = [n.node for n in gate.decision.nodes] + [n.node for n in gate.decision.well]
    names += [n.node for n in gate.decision.excluded]
    found = [snapshot.nodes.get(name) for name in names]
    return tuple(s for s in (node.current() for node in found if node is not None) if s is not None)


def _reason(fault: Fault) -> Reason:
    text = "the aggregator failed on this gate in an unforeseen way and tries again; its log has the traceback"
    return reason("InternalError", f"{text} ({fault.message})")
