"""The part of the engine that answers for gates: opening, following, releasing and explaining them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from healthd.aggregator.calibration.report import word_of
from healthd.aggregator.controller import admission as requests
from healthd.aggregator.controller.loop import Loop
from healthd.aggregator.controller.request_rules import check_request
from healthd.aggregator.controller.state.batch import MOST_MESSAGE, Batch
from healthd.aggregator.gate import decisions
from healthd.aggregator.model.calibration import Ended
from healthd.aggregator.model.claims import LeaseRow
from healthd.aggregator.model.gates import Closing, Gate
from healthd.aggregator.store import calibration_rows, reading
from healthd.aggregator.store.changes import PutOutcome
from healthd.core.errors import NotFoundError
from healthd.core.model import Decision, GateRequest, NodeState
from healthd.core.text import plain

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A gate with all that is stored of it: the states that its decision is based on, and how its job ended."""

    gate: Gate
    states: tuple[NodeState, ...]
    leases: tuple[LeaseRow, ...]
    outcome: PutOutcome | None


@dataclass(frozen=True, kw_only=True)
class GivenBack:
    """
    What a release came to: the gate, None for one of a database that was lost, and the leases that end now or did
    before and that their nodes still hold.
    """

    gate: Gate | None
    leases: tuple[LeaseRow, ...]


class Gates(Loop):
    """
    The base of `Engine`.

    Methods that change something return once the change is on disk, and raise StoreError when it could not be written.
    """

    async def ask(self, request: GateRequest) -> Gate:
        """
        Open a gate, or return the one that this job and attempt already has, as it is on disk now.

        BadInputError for a request that is not valid, ConflictError for a different request under the same key or for
        one whose admission is over, StoreError when it cannot be written.
        """
        check_request(request, self.policy)
        if request.join is not None:
            return await self._ask_to_join(request)
        known = self._memory.fleet_state.keys.get((request.job, request.attempt))
        if known is not None and known not in self._memory.fleet_state.gates:
            gate = await self.get(known)
            requests.check_same_request(gate, request, self._memory.fleet_state)
            return gate
        gate = await self.submit(
            lambda batch: requests.open_gate(batch, self._memory.fleet_state, self.policy, request)
        )
        return self._newest(gate)

    async def _ask_to_join(self, request: GateRequest) -> Gate:
        """The gate of the group; it is stepped again, because a member was heard."""
        newest = self._memory.fleet_state.newest.get(request.job)
        known = self._memory.fleet_state.keys.get((request.job, newest)) if newest is not None else None
        decided = await self.get(known) if known is not None and known not in self._memory.fleet_state.gates else None

        def act(batch: Batch) -> Gate:
            gate = requests.open_gate(batch, self._memory.fleet_state, self.policy, request, decided)
            self._memory.stepper.dirty.add(gate.id)
            join = request.join
            executes = join is not None and join.execute and gate.decision is None
            if join is not None and executes and not self._registry.has_daemon(join.node):
                requests.end_leases_for_executor(batch, self._memory.fleet_state, gate, join.node)
            return gate

        return self._newest(await self.submit(act))

    async def leave(self, gate_id: str, member: str) -> Gate:
        """Remove a member that ends without starting the job. Safe to repeat; NotFoundError."""
        gate = await self.get(gate_id)

        def act(batch: Batch) -> Gate:
            self._memory.stepper.dirty.add(gate_id)
            return requests.remove_member(batch, self._memory.fleet_state, gate, member)

        return self._newest(await self.submit(act))

    async def get(self, gate_id: str) -> Gate:
        """A gate, open or decided; NotFoundError."""
        gate = self._memory.fleet_state.known(gate_id)
        if gate is None and gate_id in self._memory.fleet_state.gate_ids:
            gate = await self._store.read(lambda connection: reading.read_gate(connection, gate_id))
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
        if gate.decision is None:
            try:
                await self._followers.wait(gate_id, seconds)
            except TimeoutError:
                log.debug("gate %s: still held after %.0f s", gate_id, seconds)
            gate = await self.get(gate_id)
        return self.answer(gate)

    def answer(self, gate: Gate) -> Decision:
        """The decision of a gate, or a hold."""
        return decisions.current_decision(self._clock(), gate, self.policy)

    async def release(self, gate_id: str) -> GivenBack:
        """
        Withdraw an open gate, or end the leases of a decided one; adopted ones of the same job and attempt too.

        Safe to repeat until the leases have ended on their nodes. NotFoundError where there is nothing to give back.
        """
        if gate_id not in self._memory.fleet_state.gate_ids and (
            adopted := self._leases(lambda row: row.lease.gate == gate_id)
        ):
            return await self._give_back(adopted)
        gate = await self.get(gate_id)

        def act(batch: Batch) -> GivenBack:
            fleet_state = self._memory.fleet_state
            current = fleet_state.gates.get(gate_id)
            held = fleet_state.leases_of_job(current or gate)
            after = current or gate
            if current is not None:
                text = "the one who asked withdrew it; ask with the next attempt"
                after, effects = decisions.close(batch.now, current, self.policy, Closing.RELEASED, text)
                fleet_state.carry_out(batch, after, effects, ())
            elif not held:
                verdict = "not decided" if gate.decision is None else gate.decision.decision.value
                raise NotFoundError(
                    f"job {gate.request.job} attempt {gate.request.attempt} has no lease, so that nothing is given "
                    f"back: its gate {gate_id} was decided ({verdict}) and its leases have ended, or it got none"
                )
            self._end(batch, held, "released by the one who asked")
            return GivenBack(gate=after, leases=held)

        done = await self.submit(act)
        return done if done.gate is None else dataclasses.replace(done, gate=self._newest(done.gate))

    async def release_job(self, job: str, attempt: int) -> GivenBack:
        """
        As `release`, of the newest gate of a job if it was asked for this attempt, else of the leases of this job and
        attempt that were adopted after the loss of the database.
        """
        for gate in await self.gates(limit=1, job=job):
            if attempt == (gate.request.attempt if gate.group is None else gate.group.asked_attempt):
                return await self.release(gate.id)
        if adopted := self._leases(lambda row: row.adopted and (row.lease.job, row.lease.attempt) == (job, attempt)):
            return await self._give_back(adopted)
        raise NotFoundError(
            f"no gate and no lease of job {job[:80]!r} attempt {attempt} is known, or a later attempt has superseded it"
        )

    async def _give_back(self, rows: tuple[LeaseRow, ...]) -> GivenBack:
        await self.submit(lambda batch: self._end(batch, rows, "released by the one who asked"))
        return GivenBack(gate=None, leases=rows)

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
                reading.read_outcome(connection, gate_id),
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
        if await self._store.read(lambda connection: reading.read_outcome(connection, gate_id)) is None:
            raise NotFoundError(f"no gate {gate_id!r}; it was dropped because it is old")
        if facts is None or (before is not None and before.status == status):
            return None
        return Ended(outcome=word_of(status), way=facts.way, alarmed=facts.alarmed, clean=facts.clean)

    async def explain(self, gate_id: str) -> Explanation:
        """A gate with its stored evidence; NotFoundError."""
        gate = await self.get(gate_id)
        states, outcome = await self._store.read(
            lambda connection: (reading.read_evidence(connection, gate_id), reading.read_outcome(connection, gate_id))
        )
        leases = self._leases(lambda row: row.lease.gate == gate_id)
        return Explanation(gate=gate, states=states, leases=leases, outcome=outcome)

    async def gates(self, *, limit: int, before: str | None = None, job: str | None = None) -> tuple[Gate, ...]:
        """Gates, newest first, open ones with what holds them now; `before` is the id to go on from."""
        stored = await self._store.read(
            lambda connection: reading.read_gates(connection, limit=limit, before=before, job=job)
        )
        return tuple(self._memory.fleet_state.gates.get(gate.id, gate) for gate in stored)

    def open_gates(self) -> tuple[Gate, ...]:
        """All gates that are not decided, oldest first."""
        return tuple(sorted(self._memory.fleet_state.gates.values(), key=lambda gate: gate.id))

    def waits(self) -> tuple[float, ...]:
        """How many seconds each open gate has waited."""
        now = self._clock()
        return tuple(max(0.0, now - gate.created_at) for gate in self._memory.fleet_state.gates.values())

    def _newest(self, gate: Gate) -> Gate:
        """The gate as it is now: one that was asked for may have gone further in the same pass."""
        return self._memory.fleet_state.known(gate.id) or gate

    def _leases(self, wanted: Callable[[LeaseRow], bool]) -> tuple[LeaseRow, ...]:
        return tuple(row for row in self._memory.fleet_state.leases.values() if wanted(row))

    def _end(self, batch: Batch, rows: Sequence[LeaseRow], why: str) -> None:
        for row in rows:
            self._memory.fleet_state.end_lease(batch, row.lease.id, why)
