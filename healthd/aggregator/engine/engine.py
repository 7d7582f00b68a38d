"""
The engine: everything that can be asked of gates, nodes, leases, quarantines and overrides, and the loop behind it.

Requests and reports of nodes wait for a pass of the loop. A pass works out on memory (`Memory`) what follows from them
and from the time, steps the gates that are concerned (`Stepper`), commits all of it in one transaction, and then tells
nodes and clients. What a gate's step decides is in `gate`, which rows there are in `store`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection

from checks.contract import Tier
from healthd.aggregator.backlog import no_longer_urgent
from healthd.aggregator.engine import admission
from healthd.aggregator.engine.bulkheads import Bulkheads, ContainedError, Fault, Where, contained
from healthd.aggregator.engine.leases import LeaseReconciler
from healthd.aggregator.engine.memory import MOST_MESSAGE, Batch, FleetState
from healthd.aggregator.engine.quarantines import Quarantines
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate import StepContext, deadline_of, decisions, eligibility, rendezvous, resume, step
from healthd.aggregator.gate.records import (
    Accuse,
    Closing,
    Effect,
    Gate,
    LeaseRow,
    LeaseState,
    Override,
    PassTimes,
    Phase,
    Snapshot,
    WakeAt,
)
from healthd.aggregator.jobs.calibration import counts_of, word_of
from healthd.aggregator.jobs.outcome_records import Counts, Ended
from healthd.aggregator.policy import HISTORY_DAYS, Policy
from healthd.aggregator.quarantine.records import Breaker, RuleRecord
from healthd.aggregator.quarantine.repair_records import Repair, RepairDecision
from healthd.aggregator.store import (
    ANSWER_SECONDS,
    LONG_SECONDS,
    Change,
    FencedError,
    HistoryEvent,
    Kind,
    Loaded,
    PutEvent,
    PutOutcome,
    PutRecord,
    RefusedWorkError,
    Store,
    UnsureError,
    apply_changes,
    reading,
    rows,
)
from healthd.aggregator.validation import add
from healthd.aggregator.validation.records import NO_CHANCE_SEEN, ChanceSeen
from healthd.core.backoff import Backoff
from healthd.core.errors import ConflictError, HealthdError, NotFoundError, StoreError
from healthd.core.evidence import reason
from healthd.core.model import Decision, GateRequest, Lease, NodeState, Order, Quarantine, Reason, Verdict
from healthd.core.text import ago, plain

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_FAULTS_A_PASS = 20
"""Gates, nodes and requests that may fail in one pass before the others wait for the next: each costs one rebuild."""
MOST_LOOK_UPS, MOST_LOOKED_UP = 32, 1000
"""Leases are looked up by so many in a statement, and so many times in a pass: 16 of each of 2,000 nodes."""
LONGEST_SLEEP_SECONDS = 30.0
"""The engine's clock counts a suspended machine's sleep and the event loop's does not: look again at least so often."""
REPORTS_SECONDS = 0.01
"""A pass costs as much as two syncs: what is heard within so long of the last one is taken in together."""
RELEASED = "released by the caller"
"""Why a lease ended that its job gave back."""
POOL_RECHECK_SECONDS = 1.0
"""A gate that waits for nodes of a pool looks at the pool at most so often. Keeps a large pool from costing."""
BACKOFF = Backoff(1.0, 8.0)
"""The pauses after failed commits: each failure costs a rebuild of memory."""
MOST_REFUSED = 3
"""Passes in a row whose rows the database may refuse before that is a fault: the first may be one request's."""
DAY_SECONDS = 86400.0

Result = tuple[asyncio.Future[Any], Any]
"""What a request returned, told once it is on disk."""
_Request = tuple[Callable[[Batch], Any], asyncio.Future[Any]]


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
    before and that their nodes still hold. `at` is the time of the first release.
    """

    gate: Gate | None
    leases: tuple[LeaseRow, ...]
    at: float


@dataclass(frozen=True, kw_only=True)
class Gone:
    """What went with a node that was forgotten: its quarantine, what the rules remembered, leases that were ending."""

    quarantine: Quarantine | None
    rules: RuleRecord | None
    leases: tuple[LeaseRow, ...]


class Engine:
    """
    Make it with a store and a registry and run `run()` as a task. All on one event loop.

    Methods that change something return once the change is on disk, and raise StoreError when it could not be written.
    """

    def __init__(
        self,
        *,
        store: Store,
        registry: Fleet,
        policy: Policy,
        clock: Callable[[], float] | None = None,
        proof: Tier = Tier.DEEP,
    ) -> None:
        self.policy = policy
        self._proof = proof  # the tier that a repaired node has to pass
        self._store = store
        self._registry = registry
        self._clock = clock or steady_clock()
        # Told of a gate when its first leases are on disk, with what the pass took; and when it is decided.
        self.on_ready: list[Callable[[Gate, PassTimes], None]] = []
        self.on_decided: list[Callable[[Gate], None]] = []
        # The nodes that a gate's reject has taken out of the scheduler's way, with until when.
        self.removed: Callable[[], Mapping[str, str]] = dict
        # Told when quarantines that were set or lifted are on disk.
        self.on_quarantined: list[Callable[[], None]] = []
        # Told of repairs whose end is on disk.
        self.on_repaired: list[Callable[[Repair], None]] = []
        self._bulkheads = Bulkheads()
        self._requests = Requests()
        self._changed_nodes: set[str] = set()
        self._started_at = self._clock()
        self._stale = False  # memory may differ from what is on disk
        self._load(store.load())
        self._wake = asyncio.Event()
        self._passed_at = -math.inf
        self._gathering: asyncio.TimerHandle | None = None
        self._one_at_a_time = asyncio.Lock()
        self._followers = Followers()
        self._retries = Retries()
        self._pruning = Pruning(self._clock(), policy.tuning.prune_seconds)
        registry.listen(self._on_report, quiet=self._on_quiet)

    # --- gates --------------------------------------------------------------------------------------------------------

    async def ask(
        self,
        request: GateRequest,
        *,
        rights: admission.Rights = admission.EVERY_RIGHT,
        asker: str | None = None,
        past: str | None = None,
    ) -> Gate:
        """
        Open a gate, or return the one that this job and attempt already has, as it is on disk now.

        `rights` tell what of earlier attempts ends by it. `asker` and `past` as in `Gate`.

        BadInputError for a request that is not valid, ConflictError for a different request under the same key or for
        one whose admission is over, LimitError where the asker has too many open ones, StoreError when it cannot be
        written.
        """
        admission.check_request(request)
        if request.join is not None:
            return await self._ask_to_join(request, rights, asker)
        known = self._memory.fleet_state.keys.get((request.job, request.attempt))
        if known is not None and known not in self._memory.fleet_state.gates:
            gate = await self.get(known)
            admission.check_same_request(gate, request, self._memory.fleet_state)
            return gate
        gate = await self.submit(
            lambda batch: admission.open_gate(
                batch, self._memory.fleet_state, self.policy, request, rights=rights, asker=asker, past=past
            )
        )
        return self._newest(gate)

    async def confirm(self, gate: Gate, seconds: float) -> Decision | None:
        """
        Have the nodes of an admission that is asked for again say now that they hold its leases.

        Its hook may never have heard of it, and a machine that was started again since has no evidence and holds no
        lease. None where there is nothing to confirm or they do hold them; a hold where one has said nothing within
        `seconds`; ConflictError where a lease is over.
        """
        decision, fleet_state = gate.decision, self._memory.fleet_state
        if decision is None or decision.decision is not Verdict.ADMIT or decision.would is not None or gate.group:
            return None
        leases = (fleet_state.leases.get(grant.lease_id) for grant in gate.granted.values())
        nodes = sorted({row.node for row in leases if row is not None})
        late = await self._registry.hear_anew(nodes, seconds)

        def act(batch: Batch) -> None:
            for node in nodes:
                self._memory.reconciler.catch_up(batch, node)

        await self.submit(act)
        admission.check_leases_stand(gate, self._memory.fleet_state)
        if not late:
            return None
        named = ", ".join(late[: decisions.MOST_NAMED])
        text = f"the job was admitted and asks again; {named} still have to confirm its leases"
        why = reason("Silent", text, node=late[0] if len(late) == 1 else None)
        return dataclasses.replace(decision, decision=Verdict.HOLD, reasons=(why,), retryable=True)

    async def leave(self, gate_id: str, member: str) -> Gate:
        """Remove a member that ends without starting the job. Safe to repeat; NotFoundError."""
        gate = await self.get(gate_id)

        def act(batch: Batch) -> Gate:
            self._memory.stepper.dirty.add(gate_id)
            return admission.remove_member(batch, self._memory.fleet_state, gate, member)

        return self._newest(await self.submit(act))

    async def get(self, gate_id: str) -> Gate:
        """A gate, open or decided; NotFoundError."""
        gate = self._memory.fleet_state.known(gate_id)
        if gate is None and gate_id in self._memory.fleet_state.gate_ids:
            gate = await self._store.read(lambda connection: reading.read_gate(connection, gate_id))
        if gate is None:
            raise NotFoundError(f"no gate {gate_id}; it may be too old")
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

    async def release(self, gate_id: str, nodes: Collection[str] = ()) -> GivenBack:
        """
        Withdraw an open gate, or end the leases of a decided one; adopted ones of the same job and attempt too. With
        `nodes` the leases of these nodes alone, and an open gate stays.

        Safe to repeat. NotFoundError where there is nothing to give back and no release did so before.
        """
        if gate_id not in self._memory.fleet_state.gate_ids and (
            adopted := self._leases(lambda row: row.lease.gate == gate_id and (not nodes or row.node in nodes))
        ):
            return await self._give_back(adopted)
        gate = await self.get(gate_id)

        def act(batch: Batch) -> GivenBack:
            fleet_state = self._memory.fleet_state
            current = fleet_state.gates.get(gate_id)
            held = fleet_state.leases_of_job(current or gate)
            held = tuple(row for row in held if not nodes or row.node in nodes)
            after = current or gate
            if current is not None and not nodes:
                text = "the caller withdrew it; ask with the next attempt"
                after, effects = decisions.close(batch.now, current, self.policy, Closing.RELEASED, text)
                fleet_state.carry_out(batch, after, effects, ())
            elif not held:
                verdict = "not decided" if gate.decision is None else gate.decision.decision.value
                raise NotFoundError(
                    f"job {gate.request.job} attempt {gate.request.attempt} has no lease, so there is nothing to "
                    f"return: its gate {gate_id} was decided ({verdict}), and its leases have ended or never existed"
                )
            self._end(batch, held, RELEASED)
            return GivenBack(gate=after, leases=held, at=_first_release(held, batch.now))

        try:
            done = await self.submit(act)
        except NotFoundError:
            if (at := await self._released_at(gate)) is None:
                raise
            return GivenBack(gate=gate, leases=(), at=at)
        return done if done.gate is None else dataclasses.replace(done, gate=self._newest(done.gate))

    async def _released_at(self, gate: Gate) -> float | None:
        """When a decided gate without leases was released first; None where it was not."""
        if gate.decision is not None and Closing.RELEASED.value in {reason.code for reason in gate.decision.reasons}:
            return gate.decision.decided_at
        granted = [grant.lease_id for grant in gate.granted.values()]
        rows = await self._store.read(lambda connection: reading.read_leases(connection, granted))
        return min((row.ended_at for row in rows if row.why == RELEASED and row.ended_at is not None), default=None)

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
            f"no gate and no lease of job {job[:80]!r} attempt {attempt}, or a later attempt has replaced it"
        )

    async def outcome(self, gate_id: str, status: str, message: str) -> Ended | None:
        """
        Record how the job of a gate ended. Its leases stay until they are released or its nodes see the job gone.

        Returns how it is counted; None when the same was recorded before, or no facts are kept of the gate.
        NotFoundError also where the gate was dropped from the database meanwhile.
        """
        gate = await self.get(gate_id)
        facts, before = await self._store.read(
            lambda connection: (
                reading.read_facts(connection, gate_id),
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
            raise NotFoundError(f"no gate {gate_id!r}; it was removed because it is old")
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

    async def history(
        self,
        subject: str | None,
        *,
        limit: int,
        before: int | None = None,
        days: float | None = None,
        text: str = "",
        kind: str = "",
    ) -> tuple[HistoryEvent, ...]:
        """
        Events of a node or job (None: of all), newest first; `before` is the id to go on from.

        None older than `days`, where that is not None; with `text` those alone that have each word of it, with `kind`
        those of that kind.
        """
        since = 0.0 if days is None else self._clock() - days * 86400.0
        return await self._store.read(
            lambda connection: reading.read_history(
                connection, subject, limit=limit, before=before, since=since, text=text, kind=kind
            )
        )

    async def kinds(self) -> tuple[str, ...]:
        """The kinds of events that there have been lately."""
        return await self._store.read(reading.read_kinds)

    async def counts(self, since: float) -> Counts:
        """What was counted of gates that were decided from `since` (seconds since the epoch) on."""
        return await self._store.read(lambda connection: counts_of(reading.read_facts_since(connection, since)))

    def trouble(self) -> str | None:
        """Why nothing can be written to the database now, in a line; None where it can."""
        return self._store.trouble()

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

    # --- nodes and their leases ---------------------------------------------------------------------------------------

    def leases(self) -> tuple[LeaseRow, ...]:
        """All leases that are not closed."""
        return tuple(self._memory.fleet_state.leases.values())

    def leases_on(self, node: str) -> tuple[Lease, ...]:
        """The leases of a node that are not closed."""
        fleet_state = self._memory.fleet_state
        return tuple(fleet_state.leases[one].lease for one in fleet_state.leases_of.get(node, ()))

    async def release_node(self, node: str, owner: str) -> tuple[LeaseRow, ...]:
        """End every lease on a node, no matter which gate gave it: those that end now, and those still held there."""

        def act(batch: Batch) -> tuple[LeaseRow, ...]:
            self._memory.reconciler.catch_up(batch, node)
            held = self._leases(lambda row: row.node == node)
            self._end(batch, held, f"released by {owner}")
            return held

        return await self.submit(act)

    async def forget(self, node: str, owner: str) -> Gone:
        """
        Forget a node that is gone for good: its quarantine ends, and its key is free. Returns what went with it.

        ConflictError while a job has it, and while it is quarantined and syncs: it would come back without quarantine.
        """

        def act(batch: Batch) -> Gone:
            self._memory.reconciler.catch_up(batch, node)
            held = self._leases(lambda row: row.node == node and row.state is not LeaseState.ENDING)
            if held:
                job = held[0].lease.job
                raise ConflictError(
                    f"{node} is leased to job {job!r}; end that lease first: healthd fleet release-lease {node}"
                )
            kept = self._memory.fleet_state.quarantines.get(node)
            found = self._registry.node(node)
            heard = math.inf if found is None or found.heard_seconds is None else found.heard_seconds
            if kept is not None and heard <= self.policy.silent_seconds:
                raise ConflictError(
                    f"{node} is quarantined by {kept.owner} ({kept.reason}) and still reports (last report "
                    f"{ago(heard)}): it would come back without the quarantine; release it: healthd fleet release "
                    f"{node}; or stop its daemon and wait {self.policy.silent_seconds:g} s"
                )
            gone = Gone(
                quarantine=kept,
                rules=self._memory.rules.remembered(node),
                leases=self._leases(lambda row: row.node == node),
            )
            self._memory.rules.forget(batch, node)
            self._memory.reconciler.forget(batch, node, owner)
            return gone

        return await self.submit(act)

    async def rekey(self, node: str, owner: str, key_hash: str | None = None) -> None:
        """
        Another key is the node's from now on: for a machine that was replaced and kept its name. None: the one that was
        refused last.

        ConflictError where no other key came under the name.
        """

        def act(batch: Batch) -> str:
            key = key_hash or self._registry.refused_key_hash(node)
            if key is None:
                raise ConflictError(
                    f"no other key is waiting under the name {node}; forget the node to accept the next key"
                )
            batch.changes.append(rows.PutKey(node=node, key_hash=key, seen_at=batch.now))
            batch.changes.append(rows.PutDuplicate(node=node, duplicate=None))
            batch.event(node, "rekeyed", f"by {owner}")
            return key

        self._registry.rekey(node, await self.submit(act))

    def present(self, node: str) -> bool:
        """Whether the node was heard within a day."""
        return self._memory.reconciler.present(node, self._clock())

    def pool_of(self, node: str) -> str | None:
        """The pool of a node as it said last; None for one without, or never heard of."""
        return self._memory.reconciler.pool_of(node)

    # --- quarantines and the rules that set them ----------------------------------------------------------------------

    async def quarantine(self, node: str, quarantine: Quarantine | None, *, why: str = "") -> Quarantine | None:
        """
        Keep a node out of admissions from now on. Gates that have it see it at once.

        None lifts the quarantine, and the rules drop all that they hold against the node; `why` is for people. Returns
        it with its number.
        """

        def act(batch: Batch) -> Quarantine | None:
            stored = None
            if quarantine is None:
                self._memory.rules.release(batch, node, why)
            if quarantine is not None or node in self._memory.fleet_state.quarantines:
                stored = self._memory.fleet_state.put_quarantine(batch, node, quarantine, why=why)
            self._memory.rules.look_again(batch, node)
            return stored

        return await self.submit(act)

    def quarantines(self) -> Mapping[str, Quarantine]:
        """All quarantines, by node; those whose time is over may still be among them."""
        return dict(self._memory.fleet_state.quarantines)

    def remembered(self, node: str) -> RuleRecord | None:
        """What the rules remember of a node; None where nothing is."""
        return self._memory.rules.remembered(node)

    def rule_words(self) -> Mapping[tuple[str, str], int]:
        """How often each rule reached a verdict, and what came of it, since the start."""
        return dict(self._memory.rules.counted)

    def breakers(self) -> Mapping[str, Breaker]:
        """The tripped breakers of the rules, by pool ("": nodes without one)."""
        return self._memory.rules.breakers.all()

    async def reset_breaker(self, owner: str, pool: str | None) -> tuple[str, ...]:
        """Let the rules quarantine again where their breaker has tripped; the pools where it had ("": no pool)."""
        return await self.submit(lambda batch: self._memory.rules.breakers.reset(batch, owner, pool))

    # --- repairs ------------------------------------------------------------------------------------------------------

    def repairs(self) -> tuple[Repair, ...]:
        """The open repairs, the oldest finding first."""
        return self._memory.rules.open_repairs()

    async def closed_repairs(self, *, limit: int) -> tuple[Repair, ...]:
        """Repairs that are closed, the newest first."""
        return await self._store.read(functools.partial(reading.read_closed_repairs, limit=limit))

    async def decide_repair(
        self, node: str, decision: RepairDecision, *, device: str | None, by: str, why: str
    ) -> tuple[Repair, ...]:
        """
        A person decides about the open repairs of a node, or of one device; returns the open repairs of the node.

        A node whose repair is done has to pass the deep tier before it is admitted. NotFoundError where no repair is
        open; ConflictError for one that is done already.
        """

        def act(batch: Batch) -> tuple[Repair, ...]:
            return self._memory.rules.decide_repair(batch, node, decision, device, by=by, why=why)

        return await self.submit(act)

    # --- screenings ---------------------------------------------------------------------------------------------------

    def is_idle(self, node: str) -> bool:
        """Whether nobody has the node and nobody waits for it: no job, gate, quarantine or rule, nor the scheduler."""
        return self._memory.fleet_state.is_idle(node) and not self._memory.is_named(node) and node not in self.removed()

    def pools_wanted(self) -> frozenset[str]:
        """The pools of which an open gate waits for nodes."""
        gates = self._memory.fleet_state.gates.values()
        return frozenset(one.request.pool for one in gates if one.request.pool and one.phase is Phase.WAITING)

    def screenings(self) -> Mapping[str, tuple[Order, ...]]:
        """What free nodes run for their screening. A node that is not among them any more was wanted meanwhile."""
        return self._memory.fleet_state.screenings

    async def screen(
        self,
        orders: Mapping[str, tuple[Order, ...] | None],
        events: Sequence[PutEvent] = (),
        accused: Sequence[Accuse] = (),
    ) -> None:
        """
        Let free nodes run these from now on, in the place of what they ran for a screening; None ends it. Who is not
        free is left out. `accused` and `events` are what screenings have found.
        """

        def act(batch: Batch) -> None:
            fleet_state = self._memory.fleet_state
            for node, some in orders.items():
                if some is None:
                    fleet_state.end_screening(node)
                elif not self._memory.is_named(node):
                    fleet_state.put_screening(batch, node, some)
            for one in accused:
                batch.accused.append(one)
                batch.event(one.node, "accused", f"screening: {one.reason.message}")
            batch.changes.extend(events)

        await self.submit(act)

    def quarantined_times(self, node: str) -> int:
        """How many quarantines the node has had."""
        return self._memory.fleet_state.last_quarantine(node)

    # --- overrides, history -------------------------------------------------------------------------------------------

    async def override(self, job: str, override: Override | None) -> None:
        """Admit a job whatever its nodes are; None ends that. It is written into the audit trail."""

        def act(batch: Batch) -> None:
            self._memory.fleet_state.put_override(batch, job, override)
            self._memory.stepper.dirty.update(
                gate.id for gate in self._memory.fleet_state.gates.values() if gate.request.job == job
            )

        await self.submit(act)

    def overrides(self) -> tuple[Override, ...]:
        """The overrides in force."""
        now = self._clock()
        return tuple(override for override in self._memory.fleet_state.overrides.values() if override.until > now)

    async def note(self, subject: str, kind: str, message: str) -> None:
        """Add a line to the history of a node or job."""
        await self.submit(lambda batch: batch.event(subject, kind, message))

    # --- how the engine is --------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the epoch by the clock that gates, quarantines and overrides go by; see `steady_clock`."""
        return self._clock()

    def recovering(self) -> str | None:
        """Why nothing is admitted at all; None in good days."""
        if self._stale:
            return "a write failed, and the database could not be read since"
        return self._memory.reconciler.recovering(self._clock())

    async def recover(self, owner: str) -> bool:
        """End the recovery because a person says so. False when there was none."""
        return await self.submit(lambda batch: self._memory.reconciler.recover(batch, owner))

    def unsure(self) -> bool:
        """Whether nodes may be out for reasons that are not known here, or not yet."""
        return self._stale or self._memory.reconciler.unsure(self._clock())

    def faults(self) -> tuple[Fault, ...]:
        """
        What internal errors stop, the newest first: gates, nodes, or the loop and everything with it. Each is tried
        again.
        """
        return self._bulkheads.faults()

    def internal_errors(self) -> Mapping[str, int]:
        """Unforeseen exceptions since the start, by what they stopped."""
        return dict(self._bulkheads.counted)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Loop for ever. One task runs it. It ends by cancellation, or with FencedError: memory is out of date then."""
        self._wake.set()
        while True:
            pause = min(self._next_due() - self._clock(), LONGEST_SLEEP_SECONDS)
            try:
                # Not wait_for: in Python 3.11 it may swallow the cancellation that ends this task.
                async with asyncio.timeout(max(0.0, pause)):
                    await self._wake.wait()
            except TimeoutError:
                log.debug("gate timeouts")
            self._wake.clear()
            try:
                with contained(Where.TURN, "engine"):
                    went_through = await self.run_once()
                    if self._clock() >= self._pruning.due_at:
                        await self._prune()
                if went_through:
                    self._bulkheads.passed(Where.TURN, "engine")
            except ContainedError as stopped:
                self._rebuild_after(stopped)

    def stop(self) -> None:
        """Wake everybody who waits for a gate, because the aggregator ends. The gates stay open on disk."""
        self._followers.stop()

    async def run_once(self) -> bool:
        """
        One pass; only one runs at a time. A StoreError goes to the requests that wait for it.

        Returns whether the pass went through: false during the pause after a failure, and when it failed again.
        """
        async with self._one_at_a_time:
            self._requests.begin()
            try:
                return await self._run_once()
            except Exception:
                self._requests.fail_pass(_internal_error())
                raise
            finally:
                self._passed_at = self._clock()

    async def submit(self, action: Callable[[Batch], T]) -> T:
        """
        Apply `action` in the next pass; what it returned, once that is on disk. StoreError after `ANSWER_SECONDS` at
        most.
        """
        future = self._requests.add(action)
        self._wake.set()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                result = await future
            no_longer_urgent()
            return result
        except TimeoutError:
            why = self._store.trouble() or "the aggregator is too busy"
            raise StoreError(f"it could not be written within {ANSWER_SECONDS:g} s: {why}") from None

    # --- what requests share ------------------------------------------------------------------------------------------

    async def _ask_to_join(self, request: GateRequest, rights: admission.Rights, asker: str | None) -> Gate:
        """The gate of the group; it is stepped again, because a member was heard."""
        newest = self._memory.fleet_state.newest.get(request.job)
        known = self._memory.fleet_state.keys.get((request.job, newest)) if newest is not None else None
        decided = await self.get(known) if known is not None and known not in self._memory.fleet_state.gates else None

        def act(batch: Batch) -> Gate:
            fleet_state = self._memory.fleet_state
            gate = admission.open_gate(batch, fleet_state, self.policy, request, decided, rights=rights, asker=asker)
            self._memory.stepper.dirty.add(gate.id)
            join = request.join
            executes = join is not None and join.execute and gate.decision is None
            if join is not None and executes and not self._registry.has_daemon(join.node):
                admission.end_leases_for_executor(batch, self._memory.fleet_state, gate, join.node)
            return gate

        return self._newest(await self.submit(act))

    def _newest(self, gate: Gate) -> Gate:
        """The gate as it is now: one that was asked for may have gone further in the same pass."""
        return self._memory.fleet_state.known(gate.id) or gate

    def _leases(self, wanted: Callable[[LeaseRow], bool]) -> tuple[LeaseRow, ...]:
        return tuple(row for row in self._memory.fleet_state.leases.values() if wanted(row))

    def _end(self, batch: Batch, rows: Sequence[LeaseRow], why: str) -> None:
        for row in rows:
            self._memory.fleet_state.end_lease(batch, row.lease.id, why)

    async def _give_back(self, rows: tuple[LeaseRow, ...]) -> GivenBack:
        def act(batch: Batch) -> GivenBack:
            self._end(batch, rows, RELEASED)
            return GivenBack(gate=None, leases=rows, at=_first_release(rows, batch.now))

        return await self.submit(act)

    # --- one pass -----------------------------------------------------------------------------------------------------

    async def _run_once(self) -> bool:
        now = self._clock()
        if now < self._retries.at and not self._requests:
            return False
        began = time.perf_counter()
        computed = await self._compute()
        if computed is None:
            return False
        results, done = computed
        computed_at = time.perf_counter()
        try:
            if done.batch.changes:
                await self._store.write(done.batch.changes)
        except StoreError as error:
            self._stale = True
            if not isinstance(error, FencedError):
                await self._rebuild()
            self._fail_requests(error)
            if isinstance(error, FencedError):
                raise
            return False
        self._retries.succeeded()
        self._bulkheads.passed(Where.TURN, "commit")
        self._memory.rules.committed()
        try:
            with contained(Where.TURN, "answers"):
                self._publish(done, PassTimes(began=began, computed=computed_at, stored=time.perf_counter()))
            self._bulkheads.passed(Where.TURN, "answers")
        except ContainedError as stopped:
            self._rebuild_after(stopped)
        if done.accused:
            # Gates that look at these nodes see the quarantine in the next pass.
            self._changed_nodes |= done.accused
            self._wake.set()
        for future, result in results:
            if not future.done():
                future.set_result(result)
        return True

    async def _compute(self) -> tuple[list[Result], Pass] | None:
        """
        All that this pass changes. What fails in an unforeseen way is left out, and the rest is computed again on
        rebuilt memory; None when too much fails at once, or memory cannot be rebuilt.
        """
        for _ in range(MOST_FAULTS_A_PASS):
            if self._stale and not await self._rebuild():
                return None
            try:
                if not await self._look_up_leases():
                    return None
            except ContainedError as stopped:
                self._contain(stopped)
                continue
            expiring = self._pruning.expiring
            try:
                self._requests.take()
                return self._compute_once(self._clock())
            except ContainedError as stopped:
                self._stale, self._pruning.expiring = True, expiring
                self._contain(stopped)
                self._requests.put_back()
        self._retries.soon(self._clock())
        await self._rebuild()
        return None

    def _compute_once(self, now: float) -> tuple[list[Result], Pass]:
        """One try at the pass; ContainedError names what failed."""
        batch = Batch(now=now)
        heard, self._changed_nodes = self._changed_nodes | self._bulkheads.due(Where.NODE, now), set()
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        results = self._requests.apply(batch)
        self._pruning.expire(batch, self._memory, self.policy, self._bulkheads.resting(Where.NODE, now))
        done = self._memory.compute(batch, heard)
        if done.made_room:
            self._wake.set()
        return results, done

    async def _look_up_leases(self) -> bool:
        """
        Read from the store whether leases have ended that nodes hold and memory does not know. False when that fails;
        waiting requests are told.

        What is heard meanwhile is looked up too. A node that names other leases all the time stops nobody: what was not
        looked up is adopted by its node.
        """
        for _ in range(MOST_LOOK_UPS):
            now = self._clock()
            heard = self._changed_nodes | self._bulkheads.due(Where.NODE, now)
            heard -= self._bulkheads.resting(Where.NODE, now).keys()
            unknown = self._memory.reconciler.look_up(heard)[:MOST_LOOKED_UP]
            if not unknown:
                break
            try:
                found = await self._store.read(functools.partial(reading.read_leases, lease_ids=unknown))
            except HealthdError as error:
                self._retries.soon(self._clock())
                self._requests.fail_waiting(error)
                if isinstance(error, FencedError):
                    raise
                return False
            self._memory.fleet_state.note_looked_up(unknown, found)
        return True

    def _publish(self, done: Pass, times: PassTimes) -> None:
        """Everything is on disk: tell the metrics, the nodes and the clients."""
        for gate in done.batch.ready:
            for tell_ready in self.on_ready:
                tell_ready(gate, times)
        self._memory.publish(done)
        for gate in done.batch.decided:
            self._followers.wake(gate.id)
        for gate in done.batch.decided:
            for tell_decided in self.on_decided:
                tell_decided(gate)
        for repair in done.batch.repaired:
            for tell_repaired in self.on_repaired:
                tell_repaired(repair)
        if done.batch.quarantined:
            for tell_quarantined in self.on_quarantined:
                tell_quarantined()

    def _next_due(self) -> float:
        """When the next pass is due if nothing happens."""
        now = self._clock()
        if self._retries.at > now:
            return self._retries.at
        if self._requests or (self._changed_nodes and self._gathering is None):
            return now
        return min(self._memory.next_due(now), self._pruning.due_at)

    def _on_report(self, node: str) -> None:
        """A pass at once where there was none lately, else one for all that is heard until then."""
        self._changed_nodes.add(node)
        if self._gathering is not None:
            return
        pause = self._passed_at + REPORTS_SECONDS - self._clock()
        if pause <= 0:
            self._wake.set()
        else:
            self._gathering = asyncio.get_running_loop().call_later(min(pause, REPORTS_SECONDS), self._gathered)

    def _on_quiet(self, node: str) -> None:
        """Nothing is new about the node: no pass, unless something waits for it to report."""
        if self._memory.is_at_rest(node, self._clock()):
            self._memory.reconciler.note_heard(node, self._clock())
        else:
            self._on_report(node)

    def _gathered(self) -> None:
        self._gathering = None
        self._wake.set()

    # --- memory, and what failed --------------------------------------------------------------------------------------

    def _load(self, loaded: Loaded) -> None:
        """Make memory from what is on disk."""
        self._memory = Memory(
            loaded,
            store_id=self._store.store_id,
            registry=self._registry,
            policy=self.policy,
            bulkheads=self._bulkheads,
            started_at=self._started_at,
            removed=lambda: self.removed(),
            proof=self._proof,
        )

    async def _rebuild(self) -> bool:
        """Rebuild memory from what is on disk, as at the start. False when that fails; waiting requests are told."""
        try:
            loaded = await self._store.read(reading.load, seconds=LONG_SECONDS)
        except HealthdError as error:
            self._retries.soon(self._clock())
            self._requests.fail_waiting(error)
            if isinstance(error, FencedError):
                raise
            return False
        before = self._memory
        self._load(loaded)
        self._memory.go_on_from(before, self._clock())
        self._changed_nodes.update(self._registry.names())
        self._followers.keep(self._memory.fleet_state.gates)
        self._stale = False
        return True

    def _rebuild_after(self, stopped: ContainedError) -> None:
        """
        Rebuild memory before the next pass: it may be half changed, or committed and published to nobody knows whom.

        FencedError is raised again: it is no fault, and ends the engine.
        """
        if isinstance(stopped.error, FencedError):
            raise stopped.error
        fault = self._bulkheads.failed(stopped.where, stopped.name, stopped.error, self._clock())
        self._stale, self._retries.at = True, fault.retry_at

    def _contain(self, stopped: ContainedError) -> None:
        """Record the fault, and tell the request that has failed."""
        if stopped.where is not Where.REQUEST:
            self._bulkheads.failed(stopped.where, stopped.name, stopped.error, self._clock())
            return
        self._bulkheads.count(stopped.where, stopped.name, stopped.error)
        self._requests.fail(int(stopped.name), _internal_error())

    def _fail_requests(self, error: StoreError) -> None:
        """Tell the requests of a failed transaction, or try them one by one where only one of them may be refused."""
        self._retries.failed(self._clock())
        if not isinstance(error, RefusedWorkError):
            self._requests.fail_pass(error)
            return
        if self._retries.refused():  # in several passes, so no single request is at fault
            self._retries.at = self._bulkheads.failed(Where.TURN, "commit", error, self._clock()).retry_at
        self._requests.separate(error)
        if self._requests:
            self._wake.set()

    async def _prune(self) -> None:
        try:
            await self._pruning.run(self._store, self._memory, self.policy, self._clock())
        except FencedError:
            raise
        except StoreError as error:
            self._stale = self._stale or isinstance(error, UnsureError)
            log.warning("nothing was pruned: %s", error)
            return
        self._wake.set()


def steady_clock(open_gates: Iterable[Gate] = ()) -> Callable[[], float]:
    """
    Seconds since the epoch as of now, from here on by CLOCK_BOOTTIME: no jump of the clock moves a deadline.

    It begins no earlier than the newest time in a gate that is open: a clock that was set back since then, or that of
    another host, moves no deadline either. A clock that was ahead is followed no longer than its last gate is open.
    """
    newest = [at for gate in open_gates for at in (gate.since, *(one.granted_at for one in gate.granted.values()))]
    start, boot = max([time.time(), *newest]), time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: start + time.clock_gettime(time.CLOCK_BOOTTIME) - boot


def _internal_error() -> HealthdError:
    return HealthdError("internal error; see the aggregator's log")


def _first_release(rows: Iterable[LeaseRow], now: float) -> float:
    return min((row.ended_at for row in rows if row.why == RELEASED and row.ended_at is not None), default=now)


# --- what waits for the loop ------------------------------------------------------------------------------------------


class Requests:
    """A queue; each request is answered exactly once, with its result or with the error that stopped it."""

    def __init__(self) -> None:
        self._waiting: deque[_Request] = deque()
        self._current: list[_Request] = []
        self._one_by_one = 0  # so many get a pass of their own each

    def __bool__(self) -> bool:
        """Whether requests wait for a pass."""
        return bool(self._waiting)

    def add(self, action: Callable[[Batch], T]) -> asyncio.Future[T]:
        """Queue a request; the future of its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((action, future))
        return future

    def begin(self) -> None:
        """Begin a pass, with no request yet."""
        self._current = []

    def take(self) -> None:
        """Make the requests that wait those of this pass."""
        most, self._one_by_one = (1 if self._one_by_one else len(self._waiting)), max(0, self._one_by_one - 1)
        self._current = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def apply(self, batch: Batch) -> list[Result]:
        """Run the requests of this pass. ContainedError names, by its place, one that fails in an unforeseen way."""
        results: list[Result] = []
        for index, (action, future) in enumerate(self._current):
            if future.done():
                continue  # it was answered already
            try:
                with contained(Where.REQUEST, str(index)):
                    results.append((future, action(batch)))
            except ContainedError as stopped:
                if not isinstance(stopped.error, HealthdError):
                    raise
                future.set_exception(stopped.error)
        return results

    def put_back(self) -> None:
        """Let the requests of this pass wait again, before all others."""
        self._waiting.extendleft(reversed(self._current))

    def fail(self, index: int, error: Exception) -> None:
        """Fail one request of this pass, by its place."""
        _, future = self._current.pop(index)
        _fail(future, error)

    def fail_pass(self, error: Exception) -> None:
        """Fail the requests of this pass that have no answer yet."""
        for _, future in self._current:
            _fail(future, error)

    def fail_waiting(self, error: Exception) -> None:
        """Fail the requests that wait for a pass."""
        while self._waiting:
            _, future = self._waiting.popleft()
            _fail(future, error)

    def separate(self, error: Exception) -> None:
        """
        Give each request of this pass that has no answer a pass of its own, because the database may refuse only one
        of them. Where there is only one, it fails.
        """
        unanswered = [request for request in self._current if not request[1].done()]
        if len(unanswered) < 2:
            self.fail_pass(error)
            return
        self._waiting.extendleft(reversed(unanswered))
        self._one_by_one = len(unanswered)


class Followers:
    """An event for each gate that somebody waits for. On the event loop alone."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}
        self._stopping = False

    async def wait(self, gate_id: str, seconds: float) -> None:
        """Until the gate is decided or gone, the aggregator stops, or the time is up: TimeoutError."""
        if self._stopping or seconds <= 0:
            return
        async with asyncio.timeout(seconds):
            await self._events.setdefault(gate_id, asyncio.Event()).wait()

    def wake(self, gate_id: str) -> None:
        """The gate is decided."""
        if (event := self._events.pop(gate_id, None)) is not None:
            event.set()

    def keep(self, open_gates: Container[str]) -> None:
        """Wake those whose gate is open no more."""
        for gate_id in [one for one in self._events if one not in open_gates]:
            self.wake(gate_id)

    def stop(self) -> None:
        """Wake everybody, and let nobody wait from now on."""
        self._stopping = True
        for event in self._events.values():
            event.set()


class Retries:
    """`at` is when the next pass may begin; -inf in good days."""

    def __init__(self) -> None:
        self.at = -math.inf
        self._failures = 0
        self._refused = 0

    def succeeded(self) -> None:
        """A pass is on disk."""
        self.at, self._failures, self._refused = -math.inf, 0, 0

    def failed(self, now: float) -> None:
        """A commit failed: pause, longer each time in a row."""
        self._failures += 1
        self.at = now + BACKOFF.after(self._failures)

    def soon(self, now: float) -> None:
        """Nothing was committed: try again after the shortest pause."""
        self.at = now + BACKOFF.first_seconds

    def refused(self) -> bool:
        """Count a pass whose rows were refused; whether there were too many in a row."""
        self._refused += 1
        return self._refused >= MOST_REFUSED


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Fail the future, unless it has a result already."""
    if not future.done():
        future.set_exception(error)


# --- a pass -----------------------------------------------------------------------------------------------------------


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
    """What the engine knows, made of what is on disk. `started_at` is when this aggregator started to hear nodes."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        store_id: str,
        registry: Fleet,
        policy: Policy,
        bulkheads: Bulkheads,
        started_at: float,
        removed: Callable[[], Mapping[str, str]],
        proof: Tier,
    ) -> None:
        self._registry, self._bulkheads = registry, bulkheads
        self._next_end = math.inf  # of a quarantine; each pass finds it anew
        self._named_of: tuple[str, ...] = ()
        self._named: frozenset[str] = frozenset()
        self.fleet_state = FleetState(loaded, store_id=store_id, policy=policy)
        self.reconciler = LeaseReconciler(self.fleet_state, registry, policy, loaded, started_at=started_at)
        self.rules = Quarantines(
            self.fleet_state,
            registry,
            policy,
            loaded,
            pool_of=self.reconciler.pool_of,
            present=self.reconciler.present,
            proof=proof,
        )
        self.stepper = Stepper(
            self.fleet_state,
            registry,
            policy,
            reconciler=self.reconciler,
            rules=self.rules,
            bulkheads=bulkheads,
            removed=removed,
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

    def is_at_rest(self, node: str, now: float) -> bool:
        """Whether a pass would have nothing to do for a node that reports no change."""
        return (
            self.reconciler.is_at_rest(node, now)
            and self.rules.is_at_rest(node)
            and node not in self.fleet_state.quarantines
            and node not in self.fleet_state.reserved
            and not self.is_named(node)
        )

    def is_named(self, node: str) -> bool:
        """Whether an open gate asks for the node by name."""
        return node in self._named_by_gates()

    def _named_by_gates(self) -> Set[str]:
        """The nodes that open gates ask for by name."""
        gates = tuple(self.fleet_state.gates)
        if gates != self._named_of:
            self._named_of = gates
            self._named = frozenset(name for one in self.fleet_state.gates.values() for name in one.request.nodes)
        return self._named

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
        batch.touched |= self.fleet_state.yielded()
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
                    self.fleet_state.put_quarantine(batch, node, None, why=f"the quarantine by {kept.owner} expired")


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
        removed: Callable[[], Mapping[str, str]],
    ) -> None:
        self.dirty: set[str] = set(fleet_state.gates)
        self.due: dict[str, float] = {}
        self._fleet_state = fleet_state
        self._registry = registry
        self._policy = policy
        self._reconciler = reconciler
        self._rules = rules
        self._bulkheads = bulkheads
        self._removed = removed
        self._chance: dict[str | None, ChanceSeen] = {}  # by pool: another has another network; None: nodes by name

    def next_due(self) -> float:
        """When the next gate is due."""
        return min((at for gate_id, at in self.due.items() if gate_id in self._fleet_state.gates), default=math.inf)

    def decided(self, gate_id: str) -> None:
        """Forget a gate whose decision is on disk, and step those that wait for its end."""
        self.due.pop(gate_id, None)
        self.dirty.update(gate.id for gate in self._fleet_state.gates.values() if gate_id in gate.unfinished)

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
            pools=ReadOnce(lambda pool: tuple(self._registry.pool(pool)), lambda: tuple(self._registry.pools())),
            called=ReadOnce(self._registry.called),
            claims={},
            overrides=dict(self._fleet_state.overrides),
            recovering=self._reconciler.recovering(now),
            settling=self._reconciler.settling(now),
            leases=self._fleet_state.leases,
            gates=self._fleet_state.gates,
            removed=self._removed(),
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
                if not changed.isdisjoint(named) or eligibility.names_found(gate, self._registry.called, heard):
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
                    found.update(rendezvous.executors(gate))
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
            at = min(at, batch.now + POOL_RECHECK_SECONDS * max(1.0, crowd / 4))
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


class ReadOnce(Mapping[str, T]):
    """
    A read-only mapping. A value is read when it is first needed and stays the same from then on; `read` gives None for
    an unknown key. `keys` gives the keys to iterate over.
    """

    def __init__(self, read: Callable[[str], T | None], keys: Callable[[], Sequence[str]] = tuple) -> None:
        self._read = read
        self._keys = keys
        self._known: dict[str, T | None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        """As of a mapping."""
        if key not in self._known:
            self._known[key] = self._read(key)
        found = self._known[key]
        return default if found is None else found

    def __getitem__(self, key: str) -> T:
        found: T | None = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())


class Pruning:
    """
    When it is time, and the two halves of it: `run` between two passes of the loop, then `expire` in the next one.

    `expiring` is whether the second is still to be done.
    """

    def __init__(self, now: float, every_seconds: float) -> None:
        self.due_at = now + every_seconds
        self.expiring = False

    async def run(self, store: Store, memory: Memory, policy: Policy, now: float) -> None:
        """
        Drop gates and events beyond their bounds and write down which nodes were there, in one transaction.

        StoreError, and memory stays; it is tried again after the usual time.
        """
        self.due_at = now + policy.tuning.prune_seconds
        before, history = now - policy.keep_days * DAY_SECONDS, now - HISTORY_DAYS * DAY_SECONDS
        forgotten, times = memory.rules.old(now), memory.reconciler.unwritten_times()
        written: list[Change] = [*(PutRecord(kind=Kind.RULES, key=node, record=None) for node in forgotten), *times]

        def work(connection: Connection) -> tuple[str, ...]:
            dropped = reading.prune(
                connection,
                before=before,
                most_gates=policy.keep_gates,
                most_events=policy.tuning.keep_events,
                history_before=history,
            )
            apply_changes(connection, written)
            return dropped

        memory.fleet_state.drop(await store.run(work, seconds=LONG_SECONDS))
        memory.rules.drop(forgotten)
        memory.reconciler.mark_written(times)
        self.expiring = True

    def expire(self, batch: Batch, memory: Memory, policy: Policy, resting: Container[str]) -> None:
        """
        After `run`: end overrides whose time is over, and drop nodes that were silent for so long that they do not come
        back, quarantined by rule or not. One that a person keeps out or a job has stays: only they can say that it is
        over.

        ContainedError names a node that failed; those of `resting` are left for the next time.
        """
        if not self.expiring:
            return
        self.expiring = False  # first, because what fails here must not fail every pass
        fleet_state, rules, reconciler = memory.fleet_state, memory.rules, memory.reconciler
        for job, override in list(fleet_state.overrides.items()):
            if override.until <= batch.now:
                fleet_state.put_override(batch, job, None)
        for name in reconciler.silent(batch.now, policy.forget_days * DAY_SECONDS):
            kept = fleet_state.quarantines.get(name)
            by_person = kept is not None and kept.owner_kind != "rule"
            if by_person or name in resting or name in fleet_state.leases_of or name in fleet_state.reserved:
                continue
            with contained(Where.NODE, name):
                rules.forget(batch, name)
                reconciler.forget(batch, name, f"the aggregator: no report for {policy.forget_days:g} days")


def _states_of(gate: Gate, snapshot: Snapshot) -> tuple[NodeState, ...]:
    """The states that the decision is based on; empty while there is none."""
    if gate.decision is None:
        return ()
    names = [n.node for n in gate.decision.nodes] + [n.node for n in gate.decision.well]
    names += [n.node for n in gate.decision.excluded]
    found = [snapshot.nodes.get(name) for name in names]
    return tuple(s for s in (node.kept() for node in found if node is not None) if s is not None)


def _reason(fault: Fault) -> Reason:
    text = "the aggregator hit an unexpected internal error on this gate and tries again; its log has the traceback"
    return reason("InternalError", f"{text} ({fault.message})")
