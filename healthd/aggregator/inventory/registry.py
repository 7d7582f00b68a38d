"""
The fleet in memory, made of what the nodes say in their syncs; who is held waiting for an answer.

On the event loop alone. Nothing here decides about jobs (`gate`) or writes (`store`); node keys are enrolled through
`Enrol`, because a name must still belong to the same key after a restart.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable

from healthd.aggregator.inventory.instructions import Instructions
from healthd.aggregator.inventory.node_record import Arrival, NodeRecord
from healthd.aggregator.model.nodes import Duplicate
from healthd.core.errors import HealthdError
from healthd.core.model import SyncAnswer, SyncRequest
from healthd.core.node_name import check_name, names_of

log = logging.getLogger(__name__)

Enrol = Callable[[str, str], Awaitable[str]]
"""(node, hash of its key) -> the hash that the store has for this name: the given one if there was none before."""

KeepDuplicate = Callable[[str, Duplicate], Awaitable[None]]
"""(node, why) -> once it is on disk that two daemons claim the node's name; StoreError when it cannot be."""

# Nodes that are asked to send all spread over this many a second, so that a restart is not a stampede.
SEND_ALL_PER_SECOND = 1000
# An earlier incarnation has nothing to say; it may look again after this.
FORMER_RETRY_SECONDS = 5.0


def boottime() -> float:
    """Seconds since boot, sleep of the machine included: evidence grows old while we sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class NotExecutorError(HealthdError):
    """A hook speaks for a node, and no open gate has it as the executor there."""


class DuplicateError(HealthdError):
    """Another daemon has this node's name."""


class Fleet(Instructions):
    """
    The registry, with the nodes' side of it, `sync`. All calls are made on the event loop; only syncs wait.

    `issuer` is the identity of our database. `silent_seconds` is how long a node may be silent until nothing is known
    of it. `clock` is CLOCK_BOOTTIME unless a test injects its own. `first_seq` must be above every `SyncAnswer.seq`
    that a former process gave for the same database: nodes drop answers that count less than one they have read.
    `keep_duplicate` None: duplicates are forgotten with this process.
    """

    def __init__(
        self,
        *,
        issuer: str,
        enrol: Enrol,
        silent_seconds: float,
        max_nodes: int,
        clock: Callable[[], float] = boottime,
        first_seq: int = 0,
        keep_duplicate: KeepDuplicate | None = None,
    ) -> None:
        super().__init__(silent_seconds=silent_seconds, max_nodes=max_nodes, clock=clock)
        self.issuer = issuer
        self.syncs = 0
        self._enrol = enrol
        self._keep_duplicate = keep_duplicate
        self._enrolling: dict[str, asyncio.Lock] = {}
        self._nonce = secrets.token_hex(4)
        self._answers = 0
        self._first_seq = first_seq
        self._stopping = False

    async def sync(self, node: str, key_hash: str, request: SyncRequest, wait_seconds: float) -> SyncAnswer:
        """
        Take in what a node says and answer it, after at most `wait_seconds` if there is nothing to tell it.

        BadInputError for what makes no sense, DuplicateError for a key or an incarnation that is not the node's,
        FullError (of `roster`) when there is no room, StoreError when a new key or a duplicate could not be kept.
        """
        record = self._records.get(node)
        if record is None or record.key_hash is None:
            record = await self._admit(node, key_hash)
        if record.key_hash is None or not hmac.compare_digest(record.key_hash, key_hash):
            await self._refuse_key(record, key_hash)
        known = record.incarnation is not None
        answer = await self._exchange(node, record, request, wait_seconds)
        if not known and record.executor is not None:
            self._share(record)  # a daemon is there now: leases are its own
        return answer

    async def sync_executor(
        self, node: str, member: str, key_hash: str, request: SyncRequest, wait_seconds: float
    ) -> SyncAnswer:
        """
        As `sync`, of the hook that runs the checks of the node while its gate is open: a line beside the daemon's.

        NotExecutorError for any other. The daemon's key and incarnation are not touched.
        """
        record = self._records.get(node)
        if record is None or record.expected != member:
            raise NotExecutorError(f"{node}: no open gate has member {member[:80]!r} as its executor (yet)")
        inner = record.executor
        if inner is None or inner.member != member:
            inner = record.executor = NodeRecord(node=node, key_hash=key_hash, member=member)
            self._share(record)
        elif inner.key_hash is None or not hmac.compare_digest(inner.key_hash, key_hash):
            raise DuplicateError(f"{node}: member {member[:80]!r} came with another key; a member is one process")
        if not record.listed:
            self._make_room()
        self._synced(node)
        return await self._exchange(node, inner, request, wait_seconds)

    async def _exchange(self, node: str, record: NodeRecord, request: SyncRequest, wait_seconds: float) -> SyncAnswer:
        """Take in what a line says, hold it, and answer."""
        now = self.clock()
        before, incarnation = record.pool, record.incarnation
        arrival = record.take(request, now)
        if arrival is Arrival.FORMER:
            return self._answer_former(record, request)
        if arrival is Arrival.DUPLICATE:
            self._notify(node)
            await self._remember(record)
            raise DuplicateError(f"{node}: {record.duplicate}; an admin must decide: forget the node, or stop one")
        self.syncs += 1
        send_all = record.digest != request.digest
        if arrival is Arrival.TAKEN:
            if record.member is None:
                self._spoke(record, started=record.incarnation != incarnation)
            pool = request.state.labels.get("pool") if request.state is not None else before
            if pool != before and record.member is None:
                self._index(record, pool)
            if (shared := self._records.get(node)) is not None and shared.expected is not None:
                self._share(shared)  # what each has taken decides what the other gets
            if request.state is not None and record.member is None:
                self._known_as.put(node, names_of(request.state))
                self.peers.take(node, request.state)
            elif request.state is not None:
                self.peers.take_executor(node)
            if request.step_jobs is not None:
                self.peers.keep_jobs(node, request.step_jobs)
            if request.steps:
                self.peers.take_steps(node, request.steps)
            self._notify(node)
            if wait_seconds > 0 and not send_all and not self._stopping and record.told(request.last_answer):
                await self._hold(record, wait_seconds)
        return self._answer(record, send_all=send_all and arrival is Arrival.TAKEN)

    async def _admit(self, node: str, key_hash: str) -> NodeRecord:
        """The record of a node that has no key here yet; its key is on disk when this returns."""
        check_name(node)
        if (known := self._records.get(node)) is None or not known.listed:
            self._make_room()
        async with self._enrolling.setdefault(node, asyncio.Lock()):
            try:
                record = self._records.get(node)
                if record is None or record.key_hash is None:
                    enrolled = await self._enrol(node, key_hash)
                    record = self._synced(node)
                    self._set_key(record, enrolled)
            finally:
                self._enrolling.pop(node, None)
        return record

    async def _refuse_key(self, record: NodeRecord, key_hash: str) -> None:
        new = record.refused_key_hash != key_hash or record.duplicate is None
        record.refused_key_hash = key_hash
        record.duplicate = record.duplicate or "another key came under this name"
        if new:
            log.warning(
                "%s: another key came under this name; nothing is admitted there until an admin decides", record.node
            )
            self._notify(record.node)
        await self._remember(record)
        raise DuplicateError(
            f"{record.node}: this name belongs to another key; an admin must decide: forget the node, or rekey it"
        )

    async def _remember(self, record: NodeRecord) -> None:
        """Have it on disk that two daemons claim a node's name; the members of a gate have no names to claim."""
        if self._keep_duplicate is None or record.duplicate is None or record.member is not None:
            return
        found = Duplicate(why=record.duplicate, refused_key_hash=record.refused_key_hash)
        if record.kept_duplicate != found:
            await self._keep_duplicate(record.node, found)
            record.kept_duplicate = found

    async def _hold(self, record: NodeRecord, wait_seconds: float) -> None:
        """Until there is something new to tell the node, a newer request takes this one's place, or time is up."""
        record.wake()
        loop = asyncio.get_running_loop()
        held: asyncio.Future[None] = loop.create_future()
        record.held = held
        timer = loop.call_later(wait_seconds, _release, held)
        try:
            await held
        finally:
            timer.cancel()
            if record.held is held:
                record.held = None

    def _answer(self, record: NodeRecord, *, send_all: bool) -> SyncAnswer:
        name = self._next_answer()
        record.remember_answer(name, self.clock())
        jitter = random.uniform(0.0, len(self._records) / SEND_ALL_PER_SECOND) if send_all else 0.0  # noqa: S311
        return SyncAnswer(
            answer=name,
            seq=self._next_seq(),
            issuer=self.issuer,
            orders=record.orders,
            acknowledged=tuple(sorted(record.acknowledged)),
            send_all=send_all,
            retry_after_seconds=min(jitter, 10.0),
            quarantine=record.quarantine,
        )

    def _answer_former(self, record: NodeRecord, request: SyncRequest) -> SyncAnswer:
        """Tell it nothing; that it shows this answer later proves that it is alive."""
        name = self._next_answer()
        record.former[request.incarnation] = name
        return SyncAnswer(
            answer=name,
            seq=self._next_seq(),
            issuer=self.issuer,
            orders=None,
            acknowledged=(),
            send_all=False,
            retry_after_seconds=FORMER_RETRY_SECONDS,
            quarantine=record.quarantine,
        )

    def _next_answer(self) -> str:
        self._answers += 1
        return f"{self._nonce}-{self._answers}"

    def _next_seq(self) -> int:
        """One count for all nodes: what matters is that it grows, for each of them and over our restarts."""
        return self._first_seq + self._answers

    def release_all(self) -> None:
        """Answer every held request now and hold none from here on: the aggregator stops."""
        self._stopping = True
        for record in self._records.values():
            record.wake()
            if record.executor is not None:
                record.executor.wake()


def _release(held: asyncio.Future[None]) -> None:
    if not held.done():
        held.set_result(None)
