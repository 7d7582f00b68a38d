"""
Who is in the fleet: records by name, pools, the aggregator's verdict. What nodes say and are told is in `registry`.

Members are nodes that have synced, and those that are kept out before they have. A name that only a gate gives has a
record while a hook is to run its checks there, and is no member.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from healthd.aggregator.inventory import executors
from healthd.aggregator.inventory.known_names import Names
from healthd.aggregator.inventory.node_record import NodeRecord
from healthd.aggregator.inventory.peer_findings import PeerFindings
from healthd.aggregator.model.nodes import Duplicate, FleetNode
from healthd.core.errors import HealthdError
from healthd.core.model import Health, NodeState, Order, Quarantine, Reason

# A node that was silent for so long gives its place to a new one when the roster is full.
FORGET_AFTER_SECONDS = 86400.0


class FullError(HealthdError):
    """No more nodes can be kept."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node for the API: the gate's view of it, and the aggregator's verdict with its reasons."""

    node: FleetNode
    health: Health
    reasons: tuple[Reason, ...]
    orders: tuple[Order, ...] | None


class Roster:
    """
    The nodes that are known, on the event loop alone. For the parameters see
    `healthd.aggregator.inventory.registry.Fleet`.
    """

    def __init__(self, *, silent_seconds: float, max_nodes: int, clock: Callable[[], float]) -> None:
        self.silent_seconds = silent_seconds
        self.clock = clock
        self._max_nodes = max_nodes
        self._records: dict[str, NodeRecord] = {}
        self._names: list[str] = []
        self._known_as = Names()
        self._pools: dict[str, list[str]] = {}
        self._by_key: dict[str, set[str]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self.peers = PeerFindings(self._records, self._notify, clock)
        self._no_room_until = float("-inf")

    def node(self, name: str, now: float | None = None) -> FleetNode | None:
        """The node as of `now` by this clock (None: this moment); None when nobody ever heard of it."""
        record = self._records.get(name)
        return None if record is None else self._joined(record, self.clock() if now is None else now)

    def _joined(self, record: NodeRecord, now: float) -> FleetNode:
        """The daemon's word, that of the hook that runs the checks meanwhile, or both."""
        own = record.view(now)
        if record.expected is not None:
            return executors.joined(own, record.executor.view(now) if record.executor and record.executing else None)
        if record.shown is record:
            return own
        return executors.joined(own, record.shown.view(now))

    def names(self) -> Sequence[str]:
        """The names of all members, sorted. Not a copy: to be read at once."""
        return self._names

    def called(self, name: str) -> tuple[str, ...]:
        """The nodes that are known by this name, their own or another; see `known_names`."""
        return self._known_as.called(name)

    def near(self, name: str) -> str:
        """What may have been meant by a name that no node has, as the end of a sentence; may be empty."""
        return self._known_as.near(name)

    def pool(self, pool: str) -> Sequence[str]:
        """The names of a pool, sorted. Not a copy: to be read at once."""
        return self._pools.get(pool, [])

    def listen(self, callback: Callable[[str], None]) -> None:
        """Call back after every sync that brought something, before its answer, and when a node became a duplicate."""
        self._listeners.append(callback)

    def __len__(self) -> int:
        return len(self._names)

    def pools(self) -> dict[str, int]:
        """Pools and how many nodes each has."""
        return {pool: len(names) for pool, names in sorted(self._pools.items())}

    def view(self, name: str) -> NodeView | None:
        """One member with the aggregator's verdict; None for a name that is none."""
        record = self._records.get(name)
        return None if record is None or not record.listed else self._view(record)

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

    def states(self) -> Iterator[NodeState]:
        """What every node says of itself, by name, of those that have."""
        for name in self._names:
            if (kept := self._records[name].state) is not None:
                yield kept.open()

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

    def label_of(self, name: str, label: str) -> str | None:
        """The value of a label of a node; None where it has none."""
        state = self._records[name].state if name in self._records else None
        return None if state is None else state.open().labels.get(label)

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

    def refused_key_hash(self, name: str) -> str | None:
        """The key that came under this name and was not the node's; None where there was none."""
        record = self._records.get(name)
        return None if record is None else record.refused_key_hash

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

    # --- inside -------------------------------------------------------------------------------------------------------

    def _view(self, record: NodeRecord) -> NodeView:
        now = self.clock()
        reasons = record.shown.reasons(now, self.silent_seconds)
        health = record.shown.health(now, self.silent_seconds)
        return NodeView(node=self._joined(record, now), health=health, reasons=reasons, orders=record.orders)

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
            raise FullError(f"{self._max_nodes} nodes are kept and none is gone; raise max_nodes or forget some")

    def _notify(self, node: str) -> None:
        for callback in self._listeners:
            callback(node)
