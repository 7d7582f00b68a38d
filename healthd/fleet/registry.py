"""
The fleet in memory, made of what the nodes say in their syncs; what each node is to be told; who is held waiting.

On the event loop alone. Nothing here decides about jobs (`gate`) or writes (`store`); node keys are enrolled through
`Enrol`, because a name must still belong to the same key after a restart.
"""

from __future__ import annotations

import asyncio
import bisect
import hmac
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from healthd.errors import HealthdError
from healthd.fleet.model import FleetNode
from healthd.fleet.record import Arrival, NodeRecord, check_name
from healthd.model import Health, Order, Quarantine, Reason, SyncAnswer, SyncRequest

log = logging.getLogger(__name__)

Enrol = Callable[[str, str], Awaitable[str]]
"""(node, hash of its key) -> the hash that the store has for this name: the given one if there was none before."""

# A node that was silent for so long gives its place to a new one when the registry is full.
FORGET_AFTER_SECONDS = 86400.0
# Nodes that are asked to send all spread over this many a second, so that a restart is not a stampede.
SEND_ALL_PER_SECOND = 1000
# An earlier incarnation has nothing to say; it may look again after this.
FORMER_RETRY_SECONDS = 5.0


def boottime() -> float:
    """Seconds since boot, sleep of the machine included: evidence grows old while we sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class DuplicateError(HealthdError):
    """Another daemon has this node's name."""


class FullError(HealthdError):
    """No more nodes can be kept."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node for the API: the gate's view of it, and the aggregator's verdict with its reasons."""

    node: FleetNode
    health: Health
    reasons: tuple[Reason, ...]
    orders: tuple[Order, ...] | None


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a node serves its own metrics, as it says; `address` None when it does not."""

    node: str
    address: str | None
    pool: str | None
    instance_type: str | None


class Fleet:
    """
    The registry (see `healthd.fleet.model.Registry`, which this satisfies), and the nodes' side of it: `sync`.

    `issuer` is the identity of our database. `silent_seconds` is how long a node may be silent until nothing is known
    of it. `clock` is CLOCK_BOOTTIME unless a test injects its own. `first_seq` must be above every `SyncAnswer.seq`
    that a former process gave for the same database: nodes drop answers that count less than one they have read.
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
    ) -> None:
        self.issuer = issuer
        self.silent_seconds = silent_seconds
        self.clock = clock
        self.syncs = 0
        self._enrol = enrol
        self._max_nodes = max_nodes
        self._records: dict[str, NodeRecord] = {}
        self._names: list[str] = []
        self._pools: dict[str, list[str]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._enrolling: dict[str, asyncio.Lock] = {}
        self._nonce = secrets.token_hex(4)
        self._answers = 0
        self._first_seq = first_seq
        self._no_room_until = float("-inf")
        self._stopping = False

    # --- the nodes' side ----------------------------------------------------------------------------------------------

    async def sync(self, node: str, key_hash: str, request: SyncRequest, wait_seconds: float) -> SyncAnswer:
        """
        Take in what a node says and answer it, after at most `wait_seconds` if there is nothing to tell it.

        BadInputError for what makes no sense, DuplicateError for a key or an incarnation that is not the node's,
        FullError when there is no room, StoreError when a new key could not be enrolled.
        """
        record = self._records.get(node)
        if record is None or record.key_hash is None:
            record = await self._admit(node, key_hash)
        if record.key_hash is None or not hmac.compare_digest(record.key_hash, key_hash):
            self._refuse_key(record, key_hash)
        now = self.clock()
        before = record.pool
        arrival = record.take(request, now)
        if arrival is Arrival.FORMER:
            return self._answer_former(record, request)
        if arrival is Arrival.DUPLICATE:
            self._notify(node)
            raise DuplicateError(f"{node}: {record.duplicate}; an admin must decide: forget the node, or stop one")
        self.syncs += 1
        send_all = record.digest != request.digest
        if arrival is Arrival.TAKEN:
            pool = request.state.labels.get("pool") if request.state is not None else before
            if pool != before:
                self._index(record, pool)
            self._notify(node)
            if wait_seconds > 0 and not send_all and not self._stopping and record.told(request.last_answer):
                await self._hold(record, wait_seconds)
        return self._answer(record, send_all=send_all and arrival is Arrival.TAKEN)

    async def _admit(self, node: str, key_hash: str) -> NodeRecord:
        """The record of a node that has no key here yet; its key is on disk when this returns."""
        check_name(node)
        if node not in self._records:
            self._make_room()
        async with self._enrolling.setdefault(node, asyncio.Lock()):
            try:
                record = self._records.get(node)
                if record is None or record.key_hash is None:
                    known = await self._enrol(node, key_hash)
                    record = self._record(node)
                    record.key_hash = known
            finally:
                self._enrolling.pop(node, None)
        return record

    def _refuse_key(self, record: NodeRecord, key_hash: str) -> None:
        new = record.refused_key_hash != key_hash or record.duplicate is None
        record.refused_key_hash = key_hash
        record.duplicate = record.duplicate or "another key came under this name"
        if new:
            log.warning(
                "%s: another key came under this name; nothing is admitted there until an admin decides", record.node
            )
            self._notify(record.node)
        raise DuplicateError(
            f"{record.node}: this name belongs to another key; an admin must decide: forget the node, or rekey it"
        )

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

    # --- the engine's side (healthd.fleet.model.Registry) -------------------------------------------------------------

    def node(self, name: str) -> FleetNode | None:
        """The node as of now; None when nobody ever heard of it."""
        record = self._records.get(name)
        return None if record is None else record.view(self.clock())

    def names(self) -> Sequence[str]:
        """All known names, sorted. Not a copy: to be read at once."""
        return self._names

    def pool(self, pool: str) -> Sequence[str]:
        """The names of a pool, sorted. Not a copy: to be read at once."""
        return self._pools.get(pool, [])

    def set_orders(self, node: str, orders: tuple[Order, ...]) -> None:
        """The open orders of the node from now on; see the protocol."""
        record = self._record(node)
        if record.orders != orders:
            record.orders = orders
            record.changed()

    def set_quarantine(self, node: str, quarantine: Quarantine | None) -> None:
        """The aggregator's word on the node from now on."""
        record = self._record(node)
        if record.quarantine != quarantine:
            record.quarantine = quarantine
            record.changed()

    def acknowledge(self, node: str, order_ids: Sequence[str]) -> None:
        """These final reports are on disk."""
        record = self._records.get(node)
        new = frozenset(order_ids) - record.acknowledged if record is not None else frozenset()
        if record is not None and new:
            record.acknowledged |= new
            record.changed()

    def listen(self, callback: Callable[[str], None]) -> None:
        """Call back after every sync that brought something, and when a node became a duplicate."""
        self._listeners.append(callback)

    # --- people's and the API's side ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._names)

    def pools(self) -> dict[str, int]:
        """Pools and how many nodes each has."""
        return {pool: len(names) for pool, names in sorted(self._pools.items())}

    def view(self, name: str) -> NodeView | None:
        """One node with the aggregator's verdict; None when nobody ever heard of it."""
        record = self._records.get(name)
        return None if record is None else self._view(record)

    def views(self, names: Iterable[str]) -> Iterator[NodeView]:
        """The same of many, lazily."""
        return (self._view(self._records[name]) for name in names if name in self._records)

    def health_of(self, name: str) -> Health:
        """The verdict alone, which costs little."""
        record = self._records.get(name)
        return Health.UNKNOWN if record is None else record.health(self.clock(), self.silent_seconds)

    def survey(self) -> Iterator[tuple[Health, float | None, Quarantine | None]]:
        """Of every node its health, the seconds since it was heard, and its quarantine: for counting."""
        now, silent = self.clock(), self.silent_seconds
        for record in self._records.values():
            heard = None if record.heard_at is None else max(0.0, now - record.heard_at)
            yield record.health(now, silent), heard, record.quarantine

    def targets(self) -> Iterator[Target]:
        """Every node that has sent a state, by name, with where it says that it listens."""
        for name in self._names:
            kept = self._records[name].state
            if kept is not None:
                state = kept.open()
                yield Target(
                    node=name,
                    address=state.address,
                    pool=state.labels.get("pool"),
                    instance_type=state.instance_type,
                )

    def label_of(self, name: str, label: str) -> str | None:
        """The value of a label of a node; None where it has none."""
        state = self._records[name].state if name in self._records else None
        return None if state is None else state.open().labels.get(label)

    def load(self, node: str, *, key_hash: str | None, pool: str | None) -> None:
        """A node that the store knows: before the first sync, so that names and pools are known after a restart."""
        record = self._record(node)
        record.key_hash = key_hash
        if pool is not None and record.state is None:
            self._index(record, pool)

    def forget(self, name: str) -> None:
        """Drop all that is known of a node; its next sync is a first one."""
        record = self._records.pop(name, None)
        if record is not None:
            self._index(record, None)
            del self._names[bisect.bisect_left(self._names, name)]
            record.wake()
            self._notify(name)

    def refused_key_hash(self, name: str) -> str | None:
        """The key that came under this name and was not the node's; None where there was none."""
        record = self._records.get(name)
        return None if record is None else record.refused_key_hash

    def rekey(self, name: str, key_hash: str) -> None:
        """Another key is the node's from now on, and whoever has it is a new daemon."""
        record = self._records[name]
        quarantine, orders = record.quarantine, record.orders
        record.wake()
        self._records[name] = NodeRecord(
            node=name, key_hash=key_hash, pool=record.pool, quarantine=quarantine, orders=orders
        )
        self._notify(name)

    def release_all(self) -> None:
        """Answer every held request now and hold none from here on: the aggregator stops."""
        self._stopping = True
        for record in self._records.values():
            record.wake()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _view(self, record: NodeRecord) -> NodeView:
        now = self.clock()
        reasons = record.reasons(now, self.silent_seconds)
        health = record.health(now, self.silent_seconds)
        return NodeView(node=record.view(now), health=health, reasons=reasons, orders=record.orders)

    def _record(self, node: str) -> NodeRecord:
        record = self._records.get(node)
        if record is None:
            record = self._records[node] = NodeRecord(node=node)
            bisect.insort(self._names, node)
        return record

    def _index(self, record: NodeRecord, pool: str | None) -> None:
        if record.pool is not None:
            names = self._pools[record.pool]
            del names[bisect.bisect_left(names, record.node)]
            if not names:
                del self._pools[record.pool]
        record.pool = pool
        if pool is not None:
            bisect.insort(self._pools.setdefault(pool, []), record.node)

    def _make_room(self) -> None:
        """Drop nodes silent for a day that owe nothing; FullError when none is."""
        if len(self._records) < self._max_nodes:
            return
        now = self.clock()
        if now >= self._no_room_until:
            gone = [
                record.node
                for record in self._records.values()
                if (record.heard_at is None or now - record.heard_at > FORGET_AFTER_SECONDS)
                and not record.orders
                and record.quarantine is None
            ]
            for name in gone:
                self.forget(name)
            # Looking at all of them is not done again for every stranger that knocks.
            self._no_room_until = now if gone else now + 10.0
        if len(self._records) >= self._max_nodes:
            raise FullError(f"{self._max_nodes} nodes are kept and none is gone; raise max_nodes or forget some")

    def _notify(self, node: str) -> None:
        for callback in self._listeners:
            callback(node)


def _release(held: asyncio.Future[None]) -> None:
    if not held.done():
        held.set_result(None)
