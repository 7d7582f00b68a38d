"""
The fleet in memory, built from the syncs of the nodes: members, names, pools, the answers to each node, and the syncs
that wait for an answer.

On the event loop only. Nothing here decides about jobs (`gate`) or writes (`store`); node keys are enrolled through
`Enrol`, because a name must still belong to the same key after a restart.
"""

from __future__ import annotations

import asyncio
import bisect
import difflib
import hmac
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from healthd.aggregator.backlog import Backlog
from healthd.aggregator.fleet import node_record
from healthd.aggregator.fleet.node_record import Arrival, NodeRecord
from healthd.aggregator.fleet.peers import PeerFindings
from healthd.aggregator.fleet.records import Duplicate, FleetNode
from healthd.core.errors import ConflictError, HealthdError
from healthd.core.model import Health, NodeState, Order, Quarantine, Reason, SyncAnswer, SyncRequest
from healthd.core.node_name import alike, check_name, names_of, short

log = logging.getLogger(__name__)

Enrol = Callable[[str, str], Awaitable[str]]
"""(node, hash of its key) -> the hash that the store has for this name: the given one if there was none before."""

KeepDuplicate = Callable[[str, Duplicate], Awaitable[None]]
"""(node, why) -> once it is on disk that two daemons claim the node's name; StoreError when it cannot be."""

Rekey = Callable[[str, str, str], Awaitable[None]]
"""(node, hash of its new key, by whose word) -> once that key is on disk and the node's (`Fleet.rekey`); StoreError."""

FORGET_AFTER_SECONDS = 86400.0
"""A node that was silent for so long gives its place to a new one when the fleet is full."""
SYNCS_PER_SECOND = 200.0
"""So many syncs a second a fleet at rest should make: larger ones are held for longer, as far as they may be."""
LEAST_HOLD_SECONDS = 25.0
HOLD_JITTER = 0.1
"""By this part some holds are shorter, so that nodes which came together spread out."""
SEND_ALL_PER_SECOND = 1000
"""Nodes that are asked to send all spread over this many a second, so that a restart is not a stampede."""
REPLACED_SECONDS = 10.0
"""A node whose key was replaced by its platform's word gets no other one so soon: two daemons must not take turns."""
MOST_FORMER_PODS = 4
FORMER_RETRY_SECONDS = 5.0
"""An earlier incarnation has nothing to say; it may look again after this."""
MOST_NEAR = 3
"""Names that are proposed for one that no node has."""


class FullError(HealthdError):
    """No more nodes can be kept."""


class DuplicateError(HealthdError):
    """Another daemon has this node's name."""


class NotVouchedError(HealthdError):
    """The platform vouches for the daemon that has this node's name, and for none with this key."""


class NotExecutorError(HealthdError):
    """A hook speaks for a node, and no open gate has it as the executor there."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """
    What is known of who speaks as a node, beside its key.

    `speaks_for` says which names its credential covers: of the other names that a node tells, these alone count, or it
    could make another node's name ambiguous. None: all of them. `vouched` is the pod or instance that is this very node
    by the word of its platform, `vouched_id` what no other has; None: nobody vouches for it. `launched` is set where
    that word can be copied: when the instance started that it is of. It lets in no other key, but for a later start.
    """

    speaks_for: Callable[[str], bool] | None = None
    vouched: str | None = None
    vouched_id: str | None = None
    launched: str | None = None


ANYBODY = Speaker()


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node for the API: the gate's view of it, and the aggregator's verdict with its reasons."""

    node: FleetNode
    health: Health
    reasons: tuple[Reason, ...]
    orders: tuple[Order, ...] | None


def boottime() -> float:
    """Seconds since boot, sleep of the machine included: evidence grows old while we sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def hold_seconds(nodes: int, most: float) -> float:
    """How long the syncs of a fleet of so many nodes are held; `most` is the longest that may be."""
    return min(max(nodes / SYNCS_PER_SECOND, LEAST_HOLD_SECONDS), most)


class Fleet:
    """
    The nodes that are known, with the nodes' side (`sync`) and the controller's. Only syncs wait.

    `issuer` is the identity of our database. `silent_seconds` is how long a node may be silent until nothing is known
    of it. `clock` is CLOCK_BOOTTIME unless a test injects its own. `first_seq` must be above every `SyncAnswer.seq`
    that a former process gave for the same database: nodes drop answers that count less than one they have read.
    `keep_duplicate` None: duplicates are forgotten with this process. `replace_key` None: who its platform vouches for
    gets its key in memory alone.

    Until `set_orders` was called for a node in this process, no statement is made (`SyncAnswer.orders` None), so that
    nothing is cancelled by an aggregator that does not know yet. A node that is held is answered as soon as there is
    something new for it.
    """

    def __init__(
        self,
        *,
        issuer: str,
        enrol: Enrol,
        silent_seconds: float,
        max_nodes: int,
        hold_max_seconds: float = LEAST_HOLD_SECONDS,
        clock: Callable[[], float] = boottime,
        first_seq: int = 0,
        keep_duplicate: KeepDuplicate | None = None,
        replace_key: Rekey | None = None,
    ) -> None:
        self.issuer = issuer
        self.silent_seconds = silent_seconds
        self.clock = clock
        self.syncs = 0
        self.accused: Callable[[str], Reason | None] = lambda _node: None
        """The accusation by a validation that stands against a node, which its next sync carries."""
        self._max_nodes = max_nodes
        self.hold_max_seconds = hold_max_seconds
        self._records: dict[str, NodeRecord] = {}
        self._names: list[str] = []
        self._known_as = Names()
        self._pools: dict[str, list[str]] = {}
        self._by_key: dict[str, set[str]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._quiet_listeners: list[Callable[[str], None]] = []
        self.peers = PeerFindings(self._records, self._notify, clock)
        self._no_room_until = float("-inf")
        self._executing: set[str] = set()
        self._unheld: list[str] = []
        self._enrol = enrol
        self._keep_duplicate = keep_duplicate
        self._replace_key = replace_key
        self._enrolling: dict[str, asyncio.Lock] = {}
        self._nonce = secrets.token_hex(4)
        self._answers = 0
        self._first_seq = first_seq
        self._hearing: set[asyncio.Event] = set()
        self.backlog = Backlog()
        self._stopping = False

    # --- what nodes say, and the answer -------------------------------------------------------------------------------

    async def sync(
        self,
        node: str,
        key_hash: str,
        request: SyncRequest,
        wait_seconds: float,
        *,
        speaker: Speaker = ANYBODY,
    ) -> SyncAnswer:
        """
        Take in what a node says and answer it, after at most `wait_seconds` if there is nothing to tell it.

        Another key under a node's name is let in where the platform vouches for who has it: the machine, or its disk,
        was replaced. BadInputError for what makes no sense, DuplicateError for a key or an incarnation that is not the
        node's, NotVouchedError for a key under a name whose daemon has its platform's word, ConflictError for a daemon
        that was replaced, FullError when there is no room, StoreError when a new key or a duplicate could not be kept.
        """
        record = self._records.get(node)
        if record is None or record.key_hash is None:
            record = await self._admit(node, key_hash)
        own = record.key_hash is not None and hmac.compare_digest(record.key_hash, key_hash)
        if not own or speaker.vouched_id is not None:
            record = await self._vouched(record, key_hash, speaker, own=own)
        return await self._exchange(node, record, request, wait_seconds, speaker.speaks_for)

    def sync_at_once(
        self,
        node: str,
        key_hash: str,
        request: SyncRequest,
        wait_seconds: float,
        respond: Callable[[SyncAnswer], None],
        *,
        speaker: Speaker = ANYBODY,
    ) -> Callable[[], None] | None:
        """
        As `sync`, of a node whose key is known, without a task: `respond` gets the answer, now or when there is one.

        Returns what forgets the request when its peer is gone; None where it takes `sync`, and nothing was changed. The
        errors of `sync` that need no database.
        """
        record = self._records.get(node)
        if record is None or record.key_hash is None or not hmac.compare_digest(record.key_hash, key_hash):
            return None
        if speaker.vouched_id is not None:
            if speaker.vouched is None or record.refused_key_hash is not None:
                return None
            self._note_vouched(record, speaker, speaker.vouched_id)
        taken = self._take(node, record, request, speaker.speaks_for)
        if taken is Arrival.DUPLICATE:
            return None  # the same again: it is to be kept first
        if taken is Arrival.FORMER:
            respond(self._answer_former(record, request))
            return _nothing
        if not self._may_hold(record, request, taken, wait_seconds):
            respond(self._answer(record, send_all=self._wants_all(record, request, taken)))
            return _nothing
        held = HeldSync(record, lambda: respond(self._answer(record, send_all=False)), self.backlog)
        held.begin(wait_seconds)
        return held.drop

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
            raise DuplicateError(f"{node}: member {member[:80]!r} used another key; a member is one process")
        if not record.listed:
            self._make_room()
        self._synced(node)
        return await self._exchange(node, inner, request, wait_seconds)

    async def hear_anew(self, names: Collection[str], seconds: float) -> tuple[str, ...]:
        """
        Have nodes read an answer that is given from now on and speak after it: what they say then is no older than this
        call. Returns those that have not within `seconds`, or before the aggregator stops.
        """
        wanted: dict[str, tuple[NodeRecord | None, int]] = {}
        for name in names:
            record = self._records.get(name)
            if record is not None:
                record.changed()
            # A node says that a lease is over once an answer lists it, and this aggregator may make no statement yet.
            wanted[name] = (record, 0 if record is None else record.revision + (record.orders is None))
        heard = asyncio.Event()

        def late() -> tuple[str, ...]:
            return tuple(name for name, (one, revision) in wanted.items() if one is None or one.read < revision)

        def on_sync(node: str) -> None:
            if node in wanted:
                heard.set()

        self._listeners.append(on_sync)
        self._quiet_listeners.append(on_sync)
        self._hearing.add(heard)
        try:
            async with asyncio.timeout(seconds):
                while late() and not self._stopping:
                    heard.clear()
                    await heard.wait()
        except TimeoutError:
            pass
        finally:
            self._listeners.remove(on_sync)
            self._quiet_listeners.remove(on_sync)
            self._hearing.discard(heard)
        return late()

    def release_all(self) -> None:
        """Answer every held request now and hold none from here on: the aggregator stops."""
        self._stopping = True
        self.wake_all()
        for waiting in self._hearing:
            waiting.set()

    def wake_all(self) -> None:
        """Answer every held request now."""
        for record in self._records.values():
            record.wake()
            if record.executor is not None:
                record.executor.wake()

    def listen(self, callback: Callable[[str], None], *, quiet: Callable[[str], None] | None = None) -> None:
        """
        Call back after every sync that brought something, before its answer, and when a node became a duplicate.

        `quiet` is called instead for a sync that only shows that the node is there, unchanged.
        """
        self._listeners.append(callback)
        if quiet is not None:
            self._quiet_listeners.append(quiet)

    # --- who is in the fleet ------------------------------------------------------------------------------------------

    def node(self, name: str, now: float | None = None) -> FleetNode | None:
        """The node as of `now` by this clock (None: this moment); None when nobody ever heard of it."""
        record = self._records.get(name)
        return None if record is None else self._joined(record, self.clock() if now is None else now)

    def view(self, name: str) -> NodeView | None:
        """One member with the aggregator's verdict; None for a name that is none."""
        record = self._records.get(name)
        if record is None or not record.listed:
            return None
        now = self.clock()
        reasons = record.shown.reasons(now, self.silent_seconds)
        health = record.shown.health(now, self.silent_seconds)
        return NodeView(node=self._joined(record, now), health=health, reasons=reasons, orders=record.orders)

    def health_of(self, name: str) -> Health:
        """The verdict alone, which costs little."""
        record = self._records.get(name)
        return Health.UNKNOWN if record is None else record.shown.health(self.clock(), self.silent_seconds)

    def survey(self) -> Iterator[tuple[Health, float | None, Quarantine | None, bool]]:
        """
        Of every member its health, the seconds since it was heard, its quarantine, and whether faults are injected
        there: for counting.
        """
        now, silent = self.clock(), self.silent_seconds
        for record in (one.shown for one in self._records.values() if one.listed):
            heard = None if record.heard_at is None else max(0.0, now - record.heard_at)
            drill = record.state is not None and record.state.drill
            yield record.health(now, silent), heard, record.quarantine, drill

    def version(self, name: str) -> int | None:
        """A number that changes with the node's state; None for an unknown node."""
        record = self._records.get(name)
        return None if record is None else record.version

    def states(self) -> Iterator[NodeState]:
        """What every node says of itself, by name, of those that have."""
        for name in self._names:
            if (kept := self._records[name].state) is not None:
                yield kept.open()

    def names(self) -> Sequence[str]:
        """The names of all members, sorted. Not a copy: to be read at once."""
        return self._names

    def __len__(self) -> int:
        return len(self._names)

    def called(self, name: str) -> tuple[str, ...]:
        """The nodes that are known by this name, their own or another; see `Names`."""
        return self._known_as.called(name)

    def near(self, name: str) -> str:
        """What may have been meant by a name that no node has, as the end of a sentence; may be empty."""
        return self._known_as.near(name)

    def pool(self, pool: str) -> Sequence[str]:
        """The names of a pool, sorted. Not a copy: to be read at once."""
        return self._pools.get(pool, [])

    def pools(self) -> dict[str, int]:
        """Pools and how many nodes each has."""
        return {pool: len(names) for pool, names in sorted(self._pools.items())}

    def label_of(self, name: str, label: str) -> str | None:
        """The value of a label of a node; None where it has none."""
        state = self._records[name].state if name in self._records else None
        return None if state is None else state.open().labels.get(label)

    def lease_ids(self, name: str) -> tuple[str, ...]:
        """The leases that a node says it holds, in the words of its daemon or of a hook that runs its checks."""
        record = self._records.get(name)
        lines = () if record is None else (record, record.executor)
        return tuple(
            lease.id for line in lines if line and line.state is not None for lease in line.state.open().leases
        )

    def former_names(self, name: str) -> tuple[str, ...]:
        """Names under which the machine of this node spoke before it started again as this one, by its key."""
        record = self._records.get(name)
        names = self._by_key.get(record.key_hash or "", ()) if record is not None else ()
        return tuple(sorted(one for one in names if self._records[one].moved_to == name))

    def refused_key_hash(self, name: str) -> str | None:
        """The key that came under this name and was not the node's; None where there was none."""
        record = self._records.get(name)
        return None if record is None else record.refused_key_hash

    def has_daemon(self, node: str) -> bool:
        """Whether a daemon of this name was ever heard of, here or by the store."""
        record = self._records.get(node)
        return record is not None and (record.incarnation is not None or record.key_hash is not None)

    # --- what the controller tells nodes ------------------------------------------------------------------------------

    def set_orders(self, node: str, orders: tuple[Order, ...]) -> None:
        """The open orders of the node from now on, all of them; also of a node that is not known yet."""
        record = self._record(node)
        record.all_orders = orders
        self._share(record)
        self._list(record)

    def set_executors(self, members: Mapping[str, str]) -> None:
        """
        Which member runs the checks of which node from now on, instead of its daemon. Its name makes no member of the
        fleet: a node is one once that hook syncs.
        """
        unheld = []
        for name in sorted(self._executing | members.keys()):
            if name not in self._records and len(self._records) - len(self._names) >= self._max_nodes:
                unheld.append(name)
                continue
            record = self._record(name)
            if record.expected != members.get(name):
                record.expected = members.get(name)
                self._share(record)
            self._list(record)
        if unheld and unheld != self._unheld:
            text = "%s and %d others: hooks cannot run their checks, because %d hooks are already expected"
            log.warning(text, unheld[0], len(unheld) - 1, self._max_nodes)
        self._unheld = unheld
        self._executing = set(members)

    def set_quarantine(self, node: str, quarantine: Quarantine | None) -> None:
        """The aggregator's word on the node from now on; who keeps one out that is not known yet makes it a member."""
        if quarantine is None and node not in self._records:
            return
        record = self._record(node)
        if record.quarantine != quarantine:
            record.quarantine = quarantine
            record.changed()
        self._list(record)

    def accusation_changed(self, node: str) -> None:
        """`accused` of a node has changed: its held sync is answered at once."""
        if (record := self._records.get(node)) is not None:
            record.changed()

    def acknowledge(self, node: str, order_ids: Sequence[str]) -> None:
        """These final reports are on disk: the node need not repeat them, and `FleetNode.orders` forgets them."""
        record = self._records.get(node)
        new = frozenset(order_ids) - record.acknowledged if record is not None else frozenset()
        if record is not None and new:
            for one in (record, record.executor):
                if one is not None:
                    one.acknowledged |= new
                    one.changed()

    # --- members that are loaded, forgotten, or get another key -------------------------------------------------------

    def load(self, node: str, *, key_hash: str | None, pool: str | None, duplicate: Duplicate | None = None) -> None:
        """A node that the store knows: before the first sync, so that names and pools are known after a restart."""
        record = self._synced(node)
        self._set_key(record, key_hash)
        if duplicate is not None:
            record.duplicate, record.refused_key_hash = duplicate.why, duplicate.refused_key_hash
            record.kept_duplicate = duplicate
        if pool is not None and record.state is None:
            self._index(record, pool)

    def forget(self, name: str) -> None:
        """Drop all that is known of a node; its next sync is a first one."""
        record = self._records.pop(name, None)
        if record is not None:
            self._unlist(record)
            self._set_key(record, None)
            self.peers.forget(name)
            record.wake()
            self._notify(name)

    def rekey(self, name: str, key_hash: str) -> None:
        """Another key is the node's from now on, also of one forgotten; whoever has it is a new daemon."""
        record = self._synced(name)
        record.wake()
        self._set_key(record, None)
        renewed = self._records[name] = NodeRecord(
            node=name,
            pool=record.pool,
            synced=True,
            listed=True,
            quarantine=record.quarantine,
            orders=record.orders,
            all_orders=record.all_orders,
        )
        self._set_key(renewed, key_hash)
        self._known_as.put(name)
        self._notify(name)

    # --- a sync -------------------------------------------------------------------------------------------------------

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

    async def _vouched(self, record: NodeRecord, key_hash: str, speaker: Speaker, *, own: bool) -> NodeRecord:
        """
        The record of the daemon that speaks, by its key and its platform's word; the errors of `sync` where it is not
        let in. `own`: the key is the node's.
        """
        vouched_id = speaker.vouched_id
        if speaker.vouched is None or vouched_id is None:
            if record.vouched_id is not None:
                raise NotVouchedError(
                    f"{record.node}: this name belongs to {record.vouched} according to its platform; this token is "
                    "not bound to that node; use the node's own token"
                )
            await self._refuse_key(record, key_hash)
        elif not own and speaker.vouched_id in record.former_pods and self._heard_lately(record):
            raise ConflictError(
                f"{record.node}: {speaker.vouched} was replaced by {record.vouched}, which reports; stop one of the two"
            )
        elif not own and speaker.launched is not None and speaker.launched <= (record.launched or speaker.launched):
            raise NotVouchedError(
                f"{record.node}: {speaker.vouched} has a different key since it started, and its identity document "
                f"can be copied; if its disk was replaced: healthd fleet rekey {record.node}"
            )
        elif not own or record.refused_key_hash is not None:
            record = await self._replace(record, key_hash, speaker.vouched)
        self._note_vouched(record, speaker, vouched_id)
        return record

    def _note_vouched(self, record: NodeRecord, speaker: Speaker, vouched_id: str) -> None:
        """Who is the node from now on, by its platform's word."""
        if record.vouched_id not in (None, vouched_id):
            record.former_pods = (*record.former_pods, record.vouched_id or "")[-MOST_FORMER_PODS:]
        record.vouched, record.vouched_id = speaker.vouched, vouched_id
        record.launched = max(filter(None, (record.launched, speaker.launched)), default=None)

    def _heard_lately(self, record: NodeRecord) -> bool:
        return record.heard_at is not None and self.clock() - record.heard_at <= self.silent_seconds

    async def _replace(self, record: NodeRecord, key_hash: str, vouched: str) -> NodeRecord:
        """The node's record with another key, which is on disk: who has it is the node by its platform's word."""
        node = record.node
        async with self._enrolling.setdefault(node, asyncio.Lock()):
            try:
                now, record = self.clock(), self._records.get(node, record)
                if record.key_hash == key_hash and record.refused_key_hash is None:
                    return record  # by another request meanwhile
                if now - record.replaced_at < REPLACED_SECONDS:
                    raise ConflictError(f"{node}: its key was replaced just now, for {record.vouched}; try again soon")
                log.info("%s: a new key was presented for this name by %s and now belongs to the node", node, vouched)
                if self._replace_key is None:
                    self.rekey(node, key_hash)
                else:
                    await self._replace_key(node, key_hash, vouched)
                renewed = self._synced(node)
                renewed.replaced_at = now
                renewed.vouched, renewed.vouched_id = record.vouched, record.vouched_id
                renewed.former_pods, renewed.launched = record.former_pods, record.launched
            finally:
                self._enrolling.pop(node, None)
        return renewed

    async def _refuse_key(self, record: NodeRecord, key_hash: str) -> NoReturn:
        new = record.refused_key_hash != key_hash or record.duplicate is None
        record.refused_key_hash = key_hash
        record.duplicate = record.duplicate or "another key was presented for this name"
        if new:
            log.warning(
                "%s: another key was presented for this name; no job is admitted until an admin decides",
                record.node,
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

    async def _exchange(
        self,
        node: str,
        record: NodeRecord,
        request: SyncRequest,
        wait_seconds: float,
        speaks_for: Callable[[str], bool] | None = None,
    ) -> SyncAnswer:
        """Take in what a line says, hold it, and answer."""
        taken = self._take(node, record, request, speaks_for)
        if taken is Arrival.FORMER:
            return self._answer_former(record, request)
        if taken is Arrival.DUPLICATE:
            self._notify(node)
            await self._remember(record)
            raise DuplicateError(f"{node}: {record.duplicate}; an admin must decide: forget the node, or stop one")
        if self._may_hold(record, request, taken, wait_seconds):
            await self._hold(record, wait_seconds)
        return self._answer(record, send_all=self._wants_all(record, request, taken))

    def _take(
        self, node: str, record: NodeRecord, request: SyncRequest, speaks_for: Callable[[str], bool] | None
    ) -> Arrival:
        """Take in what a line says, and tell those who listen."""
        now = self.clock()
        incarnation = record.incarnation
        quiet = record.is_as_before(request, now, self.silent_seconds)
        arrival = record.take(request, now)
        if arrival in (Arrival.FORMER, Arrival.DUPLICATE):
            return arrival
        self.syncs += 1
        if arrival is Arrival.TAKEN:
            if record.member is None:
                self._spoke(record, started=record.incarnation != incarnation)
                if incarnation is None and record.executor is not None:
                    self._share(record)  # a daemon is there now: leases are its own
            self._follow(node, record, request, speaks_for)
            if quiet and record.confirmed:
                for callback in self._quiet_listeners:
                    callback(node)
            else:
                self._notify(node)
        return arrival

    def _wants_all(self, record: NodeRecord, request: SyncRequest, arrival: Arrival) -> bool:
        """Whether the node is to send its whole state, because this is not what we have of it."""
        return arrival is Arrival.TAKEN and record.digest != request.digest

    def _may_hold(self, record: NodeRecord, request: SyncRequest, arrival: Arrival, wait_seconds: float) -> bool:
        """Whether there is nothing to tell the node, so that its request waits."""
        return (
            arrival is Arrival.TAKEN
            and wait_seconds > 0
            and record.digest == request.digest
            and not self._stopping
            and record.told(request.last_answer)
        )

    def _follow(
        self, node: str, record: NodeRecord, request: SyncRequest, speaks_for: Callable[[str], bool] | None
    ) -> None:
        """What a sync changes beside the record: the pool, the names, what nodes show of each other."""
        if (shared := self._records.get(node)) is not None and shared.expected is not None:
            self._share(shared)  # what each has taken decides what the other gets
        if request.state is not None and record.member is None:
            if (pool := request.state.labels.get("pool")) != record.pool:
                self._index(record, pool)
            others = names_of(request.state)
            self._known_as.put(node, others if speaks_for is None else filter(speaks_for, others))
            self.peers.take(node, request.state)
        elif request.state is not None:
            self.peers.take_executor(node)
        if request.step_jobs is not None:
            self.peers.keep_jobs(node, request.step_jobs)
        if request.steps:
            self.peers.take_steps(node, request.steps)

    async def _hold(self, record: NodeRecord, wait_seconds: float) -> None:
        """Until there is something new to tell the node, a newer request takes this one's place, or time is up."""
        ended = asyncio.get_running_loop().create_future()
        held = HeldSync(record, lambda: _release(ended), self.backlog)
        held.begin(wait_seconds)
        try:
            await ended
        finally:
            held.drop()

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
            accused=self.accused(record.node),
            hold_seconds=hold_seconds(len(self._names), self.hold_max_seconds) * random.uniform(1 - HOLD_JITTER, 1.0),  # noqa: S311
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

    # --- records and their indexes ------------------------------------------------------------------------------------

    def _joined(self, record: NodeRecord, now: float) -> FleetNode:
        """The daemon's word, that of the hook that runs the checks meanwhile, or both."""
        own = record.view(now)
        if record.expected is not None:
            return node_record.joined(own, record.executor.view(now) if record.executor and record.executing else None)
        if record.shown is record:
            return own
        return node_record.joined(own, record.shown.view(now))

    def _share(self, record: NodeRecord) -> None:
        """Tell daemon and executor what is for each; the same again changes nothing."""
        own, hooks = node_record.shared(
            record.all_orders,
            executing=record.expected is not None,
            has_daemon=record.incarnation is not None,
            own=record.reports,
            hooks={} if record.executor is None else record.executor.reports,
        )
        for one, orders in ((record, own), (record.executor, hooks)):
            if one is not None and one.orders != orders:
                one.orders = orders
                one.changed()

    def _record(self, node: str) -> NodeRecord:
        """The record of a name, a new one where there is none; `_list` says whether it makes a member."""
        record = self._records.get(node)
        if record is None:
            record = self._records[node] = NodeRecord(node=node)
        return record

    def _synced(self, node: str) -> NodeRecord:
        """The record of a node that speaks, or has spoken: a member from now on."""
        record = self._record(node)
        record.synced = True
        self._list(record)
        return record

    def _list(self, record: NodeRecord) -> None:
        """List the record while it is a member's; drop it where nothing is left to be remembered of the name."""
        if record.fleet_member and not record.listed:
            record.listed = True
            bisect.insort(self._names, record.node)
            self._known_as.put(record.node)
        elif not record.fleet_member:
            if record.listed:
                self._unlist(record)
                self._notify(record.node)
            if record.expected is None and not record.all_orders:
                self._records.pop(record.node, None)

    def _unlist(self, record: NodeRecord) -> None:
        if record.listed:
            record.listed = False
            self._index(record, None)
            del self._names[bisect.bisect_left(self._names, record.node)]
            self._known_as.drop(record.node)

    def _set_key(self, record: NodeRecord, key_hash: str | None) -> None:
        if record.key_hash is not None:
            names = self._by_key.get(record.key_hash, set())
            names.discard(record.node)
            if not names:
                self._by_key.pop(record.key_hash, None)
        record.key_hash = key_hash
        if key_hash is not None:
            self._by_key.setdefault(key_hash, set()).add(record.node)

    def _spoke(self, record: NodeRecord, *, started: bool) -> None:
        """A daemon spoke under this name; `started`: it is a new one, so other names with its key are former ones."""
        record.moved_to = None
        if not started or record.key_hash is None:
            return
        for name in self._by_key.get(record.key_hash, set()) - {record.node}:
            if self._records[name].moved_to != record.node:
                self._records[name].moved_to = record.node
                self._notify(name)

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
        if len(self._names) < self._max_nodes:
            return
        now = self.clock()
        if now >= self._no_room_until:
            gone = [
                record.node
                for record in self._records.values()
                if record.listed
                and (record.heard_at is None or now - record.heard_at > FORGET_AFTER_SECONDS)
                and not record.orders
                and record.quarantine is None
            ]
            for name in gone:
                self.forget(name)
            # Looking at all of them is not done again for every stranger that knocks.
            self._no_room_until = now if gone else now + 10.0
        if len(self._names) >= self._max_nodes:
            raise FullError(f"{self._max_nodes} nodes are stored and none has left; raise max_nodes or forget some")

    def _notify(self, node: str) -> None:
        for callback in self._listeners:
            callback(node)


class HeldSync:
    """
    A request that waits for something to tell its node; `answer` is called once, in its turn, unless it is dropped.

    It waits until the record is woken, a newer request of the node takes its place, or its time is up.
    """

    __slots__ = ("_answer", "_backlog", "_record", "_timer")

    def __init__(self, record: NodeRecord, answer: Callable[[], None], backlog: Backlog) -> None:
        self._record, self._backlog = record, backlog
        self._answer: Callable[[], None] | None = answer
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Wait from now on; the request that waited before is answered."""
        self._record.wake()
        self._record.held = self.end
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def end(self) -> None:
        """There is something to tell: answer it, in its turn."""
        if self._leave():
            self._backlog.do(self._respond, prior=True)

    def _expire(self) -> None:
        if self._leave():
            self._backlog.do(self._respond)

    def drop(self) -> None:
        """Its peer is gone: answer nobody. Safe to repeat, also after the end."""
        self._leave()
        self._answer = None

    def _leave(self) -> bool:
        """Wait no longer; whether it did."""
        if self._timer is None:
            return False
        self._timer.cancel()
        self._timer = None
        if self._record.held == self.end:
            self._record.held = None
        return True

    def _respond(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer()


def _release(held: asyncio.Future[None]) -> None:
    if not held.done():
        held.set_result(None)


def _nothing() -> None:
    """There is nothing to forget."""


class Names:
    """
    Who is known by which name: a scheduler may call a node otherwise than its daemon does. Own names come first: they
    belong to a key, and the others are only said.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, ...]] = {}
        self._by_name: dict[str, set[str]] = {}
        self._by_short: dict[str, set[str]] = {}

    def put(self, node: str, names: Iterable[str] = ()) -> None:
        """A node and all its other names from now on."""
        after = (node, *names)
        if self._of.get(node) == after:
            return
        self.drop(node)
        self._of[node] = after
        for name in after:
            self._by_name.setdefault(name, set()).add(node)
            self._by_short.setdefault(short(name), set()).add(node)

    def drop(self, node: str) -> None:
        """A node that is gone."""
        for name in self._of.pop(node, ()):
            for index, key in ((self._by_name, name), (self._by_short, short(name))):
                if node in index.get(key, ()):
                    index[key].discard(node)
                    if not index[key]:
                        del index[key]

    def called(self, name: str) -> tuple[str, ...]:
        """The nodes that are known by this name, sorted; the name's owner alone where a node is called so itself."""
        if name in self._of:
            return (name,)
        found = self._by_name.get(name) or {
            node for node in self._by_short.get(short(name), ()) if any(alike(name, one) for one in self._of[node])
        }
        return tuple(sorted(node for node in found if not self._elsewhere(node, name)))

    def _elsewhere(self, node: str, name: str) -> bool:
        """Whether the node's own words place it in another domain than the name does."""
        names = self._of[node]
        return name not in names and "." in name and any("." in one and short(one) == short(name) for one in names)

    def near(self, name: str) -> str:
        """The end of a sentence on a name that no node has: `; did you mean ...?`, or nothing."""
        known = self.called(name)
        if known:
            return f"; {' and '.join(known)} {'is' if len(known) == 1 else 'are'} also known as {name!r}"
        near = difflib.get_close_matches(name, self._of, n=MOST_NEAR)
        return f"; did you mean {' or '.join(near)}?" if near else ""
