"""
Why jobs died: collects the notes of a job's nodes, has the nodes check their devices, and keeps the verdict.

Every `healthd run` of a job sends its notes and waits. When all have reported, or after COLLECT_SECONDS, the notes of
all nodes are judged together (`healthd.postmortem.judge`, which is pure). If a probe of the devices can add something,
the members that offer one are asked to run it, and its findings are judged as well. The gate receives the end as its
outcome. Suspected nodes are then checked by their own daemons, and links by collectives, in a gate without a lease: the
findings are evidence for the next gate and for the rules of quarantine.

A bad end releases nothing. The job may continue: its launcher may retry at once, or another `healthd run` of it may be
on the same node. Its leases therefore end as all leases do, and only the checks of its own suspects pass them.

Every answer is on disk before it is sent, so that the next aggregator continues where this one stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from checks.contract import Tier
from healthd.aggregator.engine import Engine
from healthd.aggregator.gate.records import Gate
from healthd.aggregator.jobs.outcome_records import Ended
from healthd.aggregator.jobs.postmortem_records import (
    Postmortem,
    PostmortemPhase,
    PostmortemState,
    Told,
    member_name,
    state_of,
)
from healthd.aggregator.store import FencedError, PutNotes, PutPostmortem, Store, reading
from healthd.core.errors import BadInputError, ConflictError, HealthdError, NotFoundError, StoreError
from healthd.core.model import Decision, GateRequest, Mode
from healthd.core.tasks import wait_for
from healthd.core.threads import in_thread
from healthd.postmortem.catalogue import Kind
from healthd.postmortem.judge import (
    KIND_OF_REASON,
    FailedCheck,
    JobVerdict,
    Measured,
    judge,
    outcome_word,
    wants_devices,
)
from healthd.postmortem.notes import Notes, case_of, unpack

log = logging.getLogger(__name__)

COLLECT_SECONDS = 10.0
"""From the first that tells: the others of a job that died together tell within seconds, and a dead node never does."""
MEASURE_SECONDS = 45.0
"""From the first verdict: with COLLECT_SECONDS it is below the minute that `healthd run` waits."""
MOST_MEMBERS = 4096
MOST_BYTES = 64 << 20
"""Packed notes of one job, which are held in memory while they are judged."""
MOST_OPEN = 200
"""Jobs that end badly at once: a switch or a file system that fails ends all that run."""
RETRY_SECONDS = 2.0
LONGEST_SLEEP_SECONDS = 30.0
TIERS_OF_DEVICES = ("quick", "deep")
ORDER_SECONDS = 900.0
"""How long nodes under suspicion may take to be free for their checks: a pod ends within its grace period."""
MOST_ORDERED = 64
"""Nodes that are checked by order: collectives between all nodes of a larger job would keep them for long."""
GOOD_NODES = 2
"""Nodes of the job that nothing speaks against, for collectives with one under suspicion: pairs need a third."""
FRESH_SECONDS = 1.0
ORDER_PREFIX = "postmortem:"
"""Of the job's name in the gate of an order; the gate of the job that died follows."""


class Postmortems:
    """Make it with the engine and its store, and run `run()` as a task. `on_outcome` hears what the gate was told."""

    def __init__(
        self, engine: Engine, store: Store, *, on_outcome: Callable[[Ended], None], orders: bool = True
    ) -> None:
        """
        `orders` False: no node has a daemon that could check it by order. Who is in `on_final` hears each last word.
        """
        self._engine = engine
        self._store = store
        self._on_outcome = on_outcome
        self._orders = orders
        self.on_final: list[Callable[[Postmortem], None]] = []
        self._open: dict[str, Postmortem] = {}  # those that more is waited for
        self._checked: deque[Gate] = deque(maxlen=MOST_OPEN)  # gates of orders that were decided
        self._changing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._moved = asyncio.Condition()
        self._stopping = False

    async def tell(self, gate_id: str, node: str, packed: bytes, *, measures: bool, wait: float) -> PostmortemState:
        """
        Take in the notes of a node, or of a rank on it, and hold the answer until there is something to say: the last
        word, or that the devices of this node are to be checked. Safe to repeat.

        NotFoundError for an unknown gate, BadInputError for notes that cannot be meant, ConflictError for too many.
        """
        notes = unpack(packed, f"the notes of {node}")
        if notes.code == 0:
            raise BadInputError("these notes report a successful end; report the outcome to the gate instead")
        gate = await self._engine.get(gate_id)
        nodes = () if gate.decision is None else tuple(admitted.node for admitted in gate.decision.nodes)
        if node not in nodes:
            raise BadInputError(
                f"{node[:80]!r} was not admitted by gate {gate_id}; name this process's node with --node"
            )
        member = member_name(node, notes.rank)
        async with self._changing:
            now = self._engine.now()
            before = await self.find(gate_id) or Postmortem(
                gate=gate_id,
                job=gate.request.job,
                attempt=gate.request.attempt,
                phase=PostmortemPhase.COLLECTING,
                first_told_at=now,
                nodes=nodes,
                told={},
            )
            after = with_told(before, member, _told(node, notes, measures=measures, packed_bytes=len(packed)))
            self._check_room(after)
            if after != before:
                kept = PutNotes(gate=gate_id, member=member, node=node, told_at=now, notes=packed)
                await self._store.write([kept, PutPostmortem(postmortem=after)])
                if after.phase is not PostmortemPhase.FINAL:
                    self._open[gate_id] = after
        self._wake.set()
        return state_of(await self.wait(gate_id, member, wait), member)

    async def wait(self, gate_id: str, member: str | None, seconds: float) -> Postmortem:
        """
        What is said of the end of a gate's job, after `seconds` at the latest; before, once it is the last word or this
        member is to check its devices. NotFoundError where nobody has told of a bad end.
        """
        try:
            async with asyncio.timeout(seconds), self._moved:
                await self._moved.wait_for(lambda: self._stopping or self._has_news(gate_id, member))
        except TimeoutError:
            pass
        found = await self.find(gate_id)
        if found is None:
            raise NotFoundError(f"no failure was reported for gate {gate_id[:80]}")
        return found

    async def listed(self, *, limit: int, before: str | None = None, job: str | None = None) -> tuple[Postmortem, ...]:
        """Bad ends of jobs, newest gate first; `before` is the gate to go on from."""
        return await self._store.read(
            lambda connection: reading.read_postmortems(connection, limit=limit, before=before, job=job)
        )

    def gate_decided(self, gate: Gate) -> None:
        """The engine tells of every decision: some are of orders of ours."""
        if gate.request.job.startswith(ORDER_PREFIX):
            self._checked.append(gate)
            self._wake.set()

    async def stop(self) -> None:
        """Hold nobody any longer."""
        self._stopping = True
        async with self._moved:
            self._moved.notify_all()

    async def run(self) -> None:
        """Judge what is due, for ever; one task runs it. It begins with what the aggregator before has left open."""
        for record in await self._store.read(
            lambda connection: reading.read_postmortems(connection, limit=MOST_OPEN, final=False)
        ):
            self._open.setdefault(record.gate, record)
            if record.ordered is not None:
                self._checked.append(await self._engine.get(record.ordered))
        while True:
            now = self._engine.now()
            due = min((due_at(record) for record in self._open.values()), default=math.inf)
            await wait_for(self._wake, max(0.0, min(LONGEST_SLEEP_SECONDS, due - now)))
            try:
                while self._checked:
                    await self._take_in(self._checked[0])
                    self._checked.popleft()
                for gate_id in [gate for gate, one in self._open.items() if due_at(one) <= self._engine.now()]:
                    await self._go_on(gate_id)
            except FencedError:
                raise
            except StoreError as error:
                log.warning("the end of a job could not be stored; it is tried again: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    # --- one record ---------------------------------------------------------------------------------------------------

    async def find(self, gate_id: str) -> Postmortem | None:
        """What is said of the end of a gate's job now; None where nobody has told of a bad end."""
        if gate_id in self._open:
            return self._open[gate_id]
        return await self._store.read(lambda connection: reading.read_postmortem(connection, gate_id))

    def _has_news(self, gate_id: str, member: str | None) -> bool:
        record = self._open.get(gate_id)
        return record is None or member in record.to_measure

    def _check_room(self, record: Postmortem) -> None:
        if len(record.told) > MOST_MEMBERS:
            raise ConflictError(f"{MOST_MEMBERS} processes of this job have already reported its end")
        if sum(each.packed_bytes for each in record.told.values()) > MOST_BYTES:
            raise ConflictError(f"the notes of this job have reached the limit of {MOST_BYTES >> 20} MiB")
        if record.gate not in self._open and len(self._open) >= MOST_OPEN:
            raise StoreError(f"{MOST_OPEN} job failures are being examined already; report again later")

    async def _go_on(self, gate_id: str) -> None:
        """Judge the notes that are there, write down what follows. Who told meanwhile is judged in the next turn."""
        seen = self._open[gate_id]
        rows = await self._store.read(lambda connection: reading.read_notes(connection, gate_id))
        verdict = await in_thread(f"end of job {seen.job}", lambda: judged(rows, seen.by_order))
        async with self._changing:
            if self._open.get(gate_id) != seen:
                return
            after = advanced(seen, verdict, self._engine.now())
            final = after.phase is PostmortemPhase.FINAL
            if final and self._orders and (order := order_of(after, verdict)) is not None:
                after = await self._ordered(after, order)
                final = after.phase is PostmortemPhase.FINAL
            if final:
                await self._tell_outcome(after, verdict)
            await self._store.write([PutPostmortem(postmortem=after)])
            self._open[gate_id] = after
            if final:
                del self._open[gate_id]
        async with self._moved:
            self._moved.notify_all()
        if final:
            for hear in self.on_final:
                hear(after)
            await self._engine.note(f"job:{after.job}", "postmortem", verdict.sentence)
            if verdict.node is not None and verdict.node in after.nodes:
                await self._engine.note(verdict.node, "postmortem", f"job {after.job}: {verdict.sentence}")

    async def _ordered(self, record: Postmortem, order: GateRequest) -> Postmortem:
        """Ask for the checks; they are waited for as long as measurement may take."""
        try:
            gate = await self._engine.ask(order, past=record.gate)
        except HealthdError as error:
            log.warning("job %s: its nodes cannot be checked: %s", record.job, error)
            return record
        in_time = self._engine.now() < (record.judged_at or 0.0) + MEASURE_SECONDS
        phase = PostmortemPhase.MEASURING if in_time else PostmortemPhase.FINAL
        return dataclasses.replace(record, ordered=gate.id, phase=phase)

    async def _take_in(self, gate: Gate) -> None:
        """What came of an order; a record that had its last word is judged once more."""
        gate_id = gate.request.job.removeprefix(ORDER_PREFIX)
        async with self._changing:
            record = await self.find(gate_id)
            if record is None or record.ordered != gate.id or gate.decision is None or record.by_order:
                return
            after = dataclasses.replace(reopened(record), by_order=measured_by(gate.id, gate.decision))
            await self._store.write([PutPostmortem(postmortem=after)])
            self._open[gate_id] = after

    async def _tell_outcome(self, record: Postmortem, verdict: JobVerdict) -> None:
        word = outcome_word(verdict)
        if word is None:
            return
        try:
            ended = await self._engine.outcome(record.gate, word, verdict.sentence)
        except NotFoundError:
            log.info("gate %s was removed before the end of its job was known", record.gate)
            return
        if ended is not None:
            self._on_outcome(ended)


# --- what follows from a record: pure ---------------------------------------------------------------------------------


def with_told(record: Postmortem, member: str, told: Told) -> Postmortem:
    """The record with what a member told. Where it was the last word already, it is judged once more."""
    if record.told.get(member) == told:
        return record
    return dataclasses.replace(reopened(record), told={**record.told, member: told})


def reopened(record: Postmortem) -> Postmortem:
    """The record, to be judged once more where it had its last word."""
    final = record.phase is PostmortemPhase.FINAL
    return dataclasses.replace(record, phase=PostmortemPhase.COLLECTING) if final else record


def due_at(record: Postmortem) -> float:
    """When it is judged, in seconds since the epoch; -inf for at once."""
    if record.phase is PostmortemPhase.COLLECTING:
        return -math.inf if record.complete else record.first_told_at + COLLECT_SECONDS
    waits = record.to_measure or (record.ordered is not None and not record.by_order)
    if record.phase is PostmortemPhase.MEASURING and record.judged_at is not None and waits:
        return record.judged_at + MEASURE_SECONDS
    return -math.inf


def advanced(record: Postmortem, verdict: JobVerdict, now: float) -> Postmortem:
    """The record after it was judged: the last word, or the devices are checked first."""
    after = dataclasses.replace(record, verdict=verdict, judged_at=record.judged_at or now)
    if record.phase is PostmortemPhase.COLLECTING and wants_devices(verdict):
        measuring = dataclasses.replace(after, phase=PostmortemPhase.MEASURING)
        if measuring.to_measure:
            return measuring
    return dataclasses.replace(after, phase=PostmortemPhase.FINAL)


def order_of(record: Postmortem, verdict: JobVerdict) -> GateRequest | None:
    """
    The checks that the nodes under suspicion are to run by order; None where nobody is, or they have been ordered.

    Where the suspicion is on a link, collectives between these nodes and good ones of the job; where ranks waited and
    nobody can say for whom, between all.
    """
    if record.ordered is not None:
        return None
    heard = [node for node in record.nodes if node not in record.missing]
    named = [node for node in record.nodes if node in (verdict.node, *verdict.bad)]
    link = verdict.kind is Kind.NETWORK or (verdict.kind is Kind.UNKNOWN and bool(verdict.waited))
    if link and not named:
        named = heard[:MOST_ORDERED]
    elif link:
        named += [node for node in heard if node not in named][:GOOD_NODES]
    elif verdict.kind not in (Kind.HARDWARE, Kind.HOST) and not verdict.bad:
        return None
    if not named:
        return None
    return GateRequest(
        job=f"{ORDER_PREFIX}{record.gate}",
        nodes=tuple(named[:MOST_ORDERED]),
        tier=Tier.QUICK,
        max_age_seconds=FRESH_SECONDS,
        wait_seconds=ORDER_SECONDS,
        mode=Mode.ENFORCE,
        collective=link and len(named) > 1,
        lease=False,
    )


def measured_by(gate: str, decision: Decision) -> tuple[Measured, ...]:
    """What the checks and collectives of an order came to, by node."""
    note = f"by order, gate {gate}"
    passed = [*(each.node for each in decision.nodes), *(each.node for each in decision.well)]
    found = [Measured(node=node, tier="quick", status="pass", note=note) for node in passed]
    for each in decision.excluded:
        problems = tuple(
            FailedCheck(reason=why.code, target=why.target or "node", message=why.message)
            for why in each.reasons
            if why.code in KIND_OF_REASON
        )
        why = next((why.message for why in each.reasons), "no cause was found")
        status = "fail" if problems else "unknown"
        found.append(Measured(node=each.node, tier="quick", status=status, problems=problems, note=why))
    return tuple(found)


def judged(rows: Iterable[PutNotes], by_order: tuple[Measured, ...] = ()) -> JobVerdict:
    """The verdict over the notes of all members, and over what was measured by order."""
    case = case_of(list(_read(rows)))
    return judge(dataclasses.replace(case, measured=(*case.measured, *by_order)))


def _read(rows: Iterable[PutNotes]) -> Iterator[Notes]:
    for row in rows:
        try:
            notes = unpack(row.notes, f"notes of {row.member}")
        except BadInputError as error:  # of another version of healthd
            log.warning("gate %s: %s", row.gate, error)
            continue
        # The node by its name in the fleet, which its machine need not know.
        measured = tuple(dataclasses.replace(each, node=row.node) for each in notes.measured)
        yield dataclasses.replace(notes, host=row.node, measured=measured)


def _told(node: str, notes: Notes, *, measures: bool, packed_bytes: int) -> Told:
    return Told(
        node=node,
        rank=notes.rank,
        code=notes.code,
        signal=notes.signal,
        ended_at=notes.ended,
        world_size=notes.world_size,
        measures=measures,
        measured=any(each.tier in TIERS_OF_DEVICES for each in notes.measured),
        packed_bytes=packed_bytes,
    )
