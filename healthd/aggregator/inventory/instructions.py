"""What each node is to be told: orders, its quarantine, which reports are on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from healthd.aggregator.inventory import executors
from healthd.aggregator.inventory.node_record import NodeRecord
from healthd.aggregator.inventory.roster import Roster
from healthd.core.model import Order, Quarantine

log = logging.getLogger(__name__)


class Instructions(Roster):
    """
    The controller's side of the registry. A node that is held is answered as soon as there is something new for it.

    Until `set_orders` was called for a node in this process, no statement is made (`SyncAnswer.orders` None), so that
    nothing is cancelled by an aggregator that does not know yet.
    """

    def __init__(self, *, silent_seconds: float, max_nodes: int, clock: Callable[[], float]) -> None:
        super().__init__(silent_seconds=silent_seconds, max_nodes=max_nodes, clock=clock)
        self._executing: set[str] = set()
        self._unheld: list[str] = []

    def set_orders(self, node: str, orders: tuple[Order, ...]) -> None:
        """The open orders of the node from now on, all of them; also of a node that is not known yet."""
        record = self._record(node)
        record.all_orders = orders
        self._share(record)
        self._list(record)

    def _share(self, record: NodeRecord) -> None:
        """Tell daemon and executor what is for each; the same again changes nothing."""
        own, hooks = executors.shared(
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
            text = "%s and %d others: hooks cannot run their checks, because %d hooks are to come already"
            log.warning(text, unheld[0], len(unheld) - 1, self._max_nodes)
        self._unheld = unheld
        self._executing = set(members)

    def has_daemon(self, node: str) -> bool:
        """Whether a daemon of this name was ever heard of, here or by the store."""
        record = self._records.get(node)
        return record is not None and (record.incarnation is not None or record.key_hash is not None)

    def set_quarantine(self, node: str, quarantine: Quarantine | None) -> None:
        """The aggregator's word on the node from now on; who keeps one out that is not known yet makes it a member."""
        if quarantine is None and node not in self._records:
            return
        record = self._record(node)
        if record.quarantine != quarantine:
            record.quarantine = quarantine
            record.changed()
        self._list(record)

    def acknowledge(self, node: str, order_ids: Sequence[str]) -> None:
        """These final reports are on disk: the node need not repeat them, and `FleetNode.orders` forgets them."""
        record = self._records.get(node)
        new = frozenset(order_ids) - record.acknowledged if record is not None else frozenset()
        if record is not None and new:
            for one in (record, record.executor):
                if one is not None:
                    one.acknowledged |= new
                    one.changed()
