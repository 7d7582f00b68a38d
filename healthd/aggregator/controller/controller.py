"""The engine: everything that can be asked of gates, leases, quarantines and overrides. `loop` has its loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from healthd.aggregator.calibration.report import word_of
from healthd.aggregator.controller import admission as requests
from healthd.aggregator.controller.bulkheads import Fault
from healthd.aggregator.controller.fleet_state import MOST_MESSAGE, Batch
from healthd.aggregator.controller.loop import Loop, steady_clock
from healthd.aggregator.gate import decisions
from healthd.aggregator.model import Closing, Gate, LeaseRow, Override
from healthd.aggregator.model.calibration import Ended
from healthd.aggregator.model.quarantines import Breaker, RuleRecord
from healthd.aggregator.store import calibration_rows, changes
from healthd.aggregator.store.changes import PutOutcome
from healthd.core.errors import NotFoundError
from healthd.core.model import Decision, GateRequest, NodeState, Quarantine
from healthd.core.text import plain

log = logging.getLogger(__name__)

__all__ = ["Engine", "Explanation", "steady_clock"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A gate with all that is stored of it: the states that its decision is based on, and how its job ended."""

    gate: Gate
    states: tuple[NodeState, ...]
    leases: tuple[LeaseRow, ...]
    outcome: PutOutcome | None


class Engine(Loop):
    """
    Make it with a store and a registry and run `run()` as a task. All on one event loop.

    Methods that change something return once the change is on disk, and raise StoreError when it could not be written.
    """

    async def ask(self, request: GateRequest) -> Gate:
        """
        Open a gate, or return the one that this job and attempt already has, as it is on disk now.

        BadInputError for a request that is not valid, ConflictError for a different request under the same key or for
        one whose admission is over, StoreError when it cannot be written.
        """
        requests.check_request(request, self.policy)
        if request.join is not None:
            return await self._ask_to_join(request)
        known = self._fleet_state.keys.get((request.job, request.attempt))
        if known is not None and known not in self._fleet_state.gates:
            gate = await self.get(known)
            requests.check_same_request(gate, request, self._fleet_state)
            return gate
        return await self.submit(lambda batch: requests.open_gate(batch, self._fleet_state, self.policy, request))

    async def _ask_to_join(self, request: GateRequest) -> Gate:
        """The gate of the group; it is stepped again, because a member was heard."""
        newest = self._fleet_state.newest.get(request.job)
        known = self._fleet_state.keys.get((request.job, newest)) if newest is not None else None
        decided = await self.get(known) if known is not None and known not in self._fleet_state.gates else None

        def act(batch: Batch) -> Gate:
            gate = requests.open_gate(batch, self._fleet_state, self.policy, request, decided)
            self._stepper.dirty.add(gate.id)
            join = request.join
            executes = join is not None and join.execute and gate.decision is None
            if join is not None and executes and not self._registry.has_daemon(join.node):
                requests.end_leases_for_executor(batch, self._fleet_state, gate, join.node)
            return gate

        return await self.submit(act)

    async def leave(self, gate_id: str, member: str) -> Gate:
        """Remove a member that ends without starting the job. Safe to repeat; NotFoundError."""
        gate = await self.get(gate_id)

        def act(batch: Batch) -> Gate:
            self._stepper.dirty.add(gate_id)
            return requests.remove_member(batch, self._fleet_state, gate, member)

        return await self.submit(act)

    async def get(self, gate_id: str) -> Gate:
        """A gate, open or decided; NotFoundError."""
        gate = self._fleet_state.gates.get(gate_id) or self._fleet_state.decided.get(gate_id)
        if gate is None and gate_id in self._fleet_state.gate_ids:
            gate = await self._store.read(lambda connection: changes.read_gate(connection, gate_id))
        if gate is None:
            raise NotFoundError(f"no gate {gate_id}; it may have been long ago")
        return gate

    async def wait(self, gate_id: str, seconds: float) -> Decision:
        """
        The decision of a gate; a hold after `seconds`, or when the aggregator stops.

        An earlier decision is confirmed by the database: another aggregator may have taken over since.
        """
        gate = await self.get(gate_id)
        if gate.decision is not None:
            await self._store.confirm()
        if gate.decision is None and seconds > 0 and not self._stopping:
            follower = self._followers.setdefault(gate_id, asyncio.Event())
            try:
                async with asyncio.timeout(seconds):
                    await follower.wait()
            except TimeoutError:
                log.debug("gate %s: still held after %.0f s", gate_id, seconds)
            gate = await self.get(gate_id)
        return self.answer(gate)

    def answer(self, gate: Gate) -> Decision:
        """The decision of a gate, or a hold."""
        return decisions.current_decision(self._clock(), gate, self.policy)

    async def release(self, gate_id: str) -> Gate | None:
        """
        Withdraw an open gate, or end the leases of a decided one. Safe to repeat; NotFoundError.

        None for a gate of a database that was lost, whose leases were adopted.
        """
        if gate_id not in self._fleet_state.gate_ids and (
            adopted := self._leases(lambda row: row.lease.gate == gate_id)
        ):
            await self.submit(lambda batch: self._end(batch, adopted, "released by the one who asked"))
            return None
        gate = await self.get(gate_id)

        def act(batch: Batch) -> Gate:
            current = self._fleet_state.gates.get(gate_id)
            if current is not None:
                text = "the one who asked withdrew it; ask with the next attempt"
                after, effects = decisions.close(batch.now, current, self.policy, Closing.RELEASED, text)
                self._fleet_state.carry_out(batch, after, effects, ())
                return after
            for grant in gate.granted.values():
                self._fleet_state.end_lease(batch, grant.lease_id, "released by the one who asked")
            return gate

        return await self.submit(act)

    async def release_node(self, node: str, owner: str) -> tuple[LeaseRow, ...]:
        """End every lease on a node, whoever gave it; those that end now, or did before and the node still holds."""
        held = self._leases(lambda row: row.node == node)
        await self.submit(lambda batch: self._end(batch, held, f"released by {owner}"))
        return held

    def _leases(self, wanted: Callable[[LeaseRow], bool]) -> tuple[LeaseRow, ...]:
        return tuple(row for row in self._fleet_state.leases.values() if wanted(row))

    def _end(self, batch: Batch, rows: Sequence[LeaseRow], why: str) -> None:
        for row in rows:
            self._fleet_state.end_lease(batch, row.lease.id, why)

    async def outcome(self, gate_id: str, status: str, message: str) -> Ended | None:
        """
        Record how the job of a gate ended. Its leases stay until they are released or its nodes see the job gone.

        Returns how it is counted; None when the same was recorded before, or no facts are kept of the gate.
        NotFoundError also where the gate was dropped from the database meanwhile.
        """
        gate = await self.get(gate_id)
        facts, before = await self._store.read(
            lambda connection: (
                calibration_rows.read_facts(connection, gate_id),
                changes.read_outcome(connection, gate_id),
            )
        )
        told = PutOutcome(
            gate=gate_id,
            job=gate.request.job,
            attempt=gate.request.attempt,
            status=plain(status, 64),
            message=plain(message, MOST_MESSAGE),
            told_at=self._clock(),
        )
        await self.submit(lambda batch: batch.changes.append(told))
        if await self._store.read(lambda connection: changes.read_outcome(connection, gate_id)) is None:
            raise NotFoundError(f"no gate {gate_id!r}; it was dropped because it is old")
        if facts is None or (before is not None and before.status == status):
            return None
        return Ended(outcome=word_of(status), way=facts.way, alarmed=facts.alarmed, clean=facts.clean)

    async def quarantine(self, node: str, quarantine: Quarantine | None, *, why: str = "") -> None:
        """
        Keep a node out of admissions from now on. Gates that have it see it at once.

        None lifts the quarantine, and the rules drop all that they hold against the node; `why` is for people.
        """

        def act(batch: Batch) -> None:
            if quarantine is None:
                self._rules.release(batch, node)
            if quarantine is not None or node in self._fleet_state.quarantines:
                self._fleet_state.put_quarantine(batch, node, quarantine, why=why)

        await self.submit(act)

    async def override(self, job: str, override: Override | None) -> None:
        """Admit a job whatever its nodes are; None ends that. It is written into the audit trail."""

        def act(batch: Batch) -> None:
            self._fleet_state.put_override(batch, job, override)
            self._stepper.dirty.update(gate.id for gate in self._fleet_state.gates.values() if gate.request.job == job)

        await self.submit(act)

    async def recover(self, owner: str) -> bool:
        """End the recovery because a person says so. False when there was none."""
        return await self.submit(lambda batch: self._reconciler.recover(batch, owner))

    async def explain(self, gate_id: str) -> Explanation:
        """A gate with its stored evidence; NotFoundError."""
        gate = await self.get(gate_id)
        states, outcome = await self._store.read(
            lambda connection: (changes.read_evidence(connection, gate_id), changes.read_outcome(connection, gate_id))
        )
        leases = self._leases(lambda row: row.lease.gate == gate_id)
        return Explanation(gate=gate, states=states, leases=leases, outcome=outcome)

    async def gates(self, *, limit: int, before: str | None = None, job: str | None = None) -> tuple[Gate, ...]:
        """Gates, newest first, open ones with what holds them now; `before` is the id to go on from."""
        stored = await self._store.read(
            lambda connection: changes.read_gates(connection, limit=limit, before=before, job=job)
        )
        return tuple(self._fleet_state.gates.get(gate.id, gate) for gate in stored)

    async def forget(self, node: str, owner: str) -> None:
        """Forget a node that is gone for good: its leases and its quarantine end, and its key is free."""

        def act(batch: Batch) -> None:
            self._rules.forget(batch, node)
            self._reconciler.forget(batch, node, owner)

        await self.submit(act)

    async def reset_breaker(self, owner: str, pool: str | None) -> tuple[str, ...]:
        """Let the rules quarantine again where their breaker has tripped; the pools where it had ("": no pool)."""
        return await self.submit(lambda batch: self._rules.reset_breaker(batch, owner, pool))

    def breakers(self) -> Mapping[str, Breaker]:
        """The tripped breakers of the rules, by pool ("": nodes without one)."""
        return self._rules.breakers()

    def faults(self) -> tuple[Fault, ...]:
        """
        What internal errors stop, the newest first: gates, nodes, or the loop and everything with it. Each is tried
        again.
        """
        return self._bulkheads.faults()

    def internal_errors(self) -> Mapping[str, int]:
        """Unforeseen exceptions since the start, by what they stopped."""
        return dict(self._bulkheads.counted)

    def quarantines(self) -> Mapping[str, Quarantine]:
        """All quarantines, by node; those whose time is over may still be among them."""
        return dict(self._fleet_state.quarantines)

    def pool_of(self, node: str) -> str | None:
        """The pool of a node as it said last; None for one without, or never heard of."""
        return self._reconciler.pool_of(node)

    async def note(self, subject: str, kind: str, message: str) -> None:
        """Add a line to the history of a node or job."""
        await self.submit(lambda batch: batch.event(subject, kind, message))

    def remembered(self, node: str) -> RuleRecord | None:
        """What the rules remember of a node; None where nothing is."""
        return self._rules.remembered(node)

    def rule_words(self) -> Mapping[tuple[str, str], int]:
        """How often each rule reached a verdict, and what came of it, since the start."""
        return dict(self._rules.counted)

    def open_gates(self) -> tuple[Gate, ...]:
        """All gates that are not decided, oldest first."""
        return tuple(sorted(self._fleet_state.gates.values(), key=lambda gate: gate.id))

    def waits(self) -> tuple[float, ...]:
        """How many seconds each open gate has waited."""
        now = self._clock()
        return tuple(max(0.0, now - gate.created_at) for gate in self._fleet_state.gates.values())

    def leases(self) -> tuple[LeaseRow, ...]:
        """All leases that are not closed."""
        return tuple(self._fleet_state.leases.values())

    def overrides(self) -> tuple[Override, ...]:
        """The overrides in force."""
        now = self._clock()
        return tuple(override for override in self._fleet_state.overrides.values() if override.until > now)

    def now(self) -> float:
        """Seconds since the epoch by the clock that gates, quarantines and overrides go by; see `steady_clock`."""
        return self._clock()

    def present(self, node: str) -> bool:
        """Whether the node was heard within a day."""
        return self._reconciler.present(node, self._clock())

    def unsure(self) -> bool:
        """Whether nodes may be out for reasons that are not known here, or not yet."""
        return self._stale or self._reconciler.unsure(self._clock())

    def recovering(self) -> str | None:
        """Why nothing is admitted at all; None in good days."""
        if self._stale:
            return "a write failed, and what is on disk could not be read since"
        return self._reconciler.recovering(self._clock())
