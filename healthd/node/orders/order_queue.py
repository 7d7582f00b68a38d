"""Queues ordered runs: accepts or refuses them, joins them to a run under way, cancels them, reports their end."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from checks.contract import Status, Tier
from healthd.core.model import OrderReport, OrderStatus
from healthd.node.checks.active_run import ActiveRun, OrderedRun, Report
from healthd.node.checks.catalogue import in_tier
from healthd.node.occupancy.occupancy import Occupancy
from healthd.node.state.results import by_name
from healthd.node.state.store import NodeStore

# Orders that may wait; an aggregator has one or two open for a node.
MAX_QUEUED = 32


class OrderQueue:
    """First come, first served; what a run has not done comes before all others."""

    def __init__(self, store: NodeStore, occupancy: Occupancy) -> None:
        self._store = store
        self._occupancy = occupancy
        self._queue: collections.deque[OrderedRun] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def pop(self) -> OrderedRun:
        """Remove the next one."""
        return self._queue.popleft()

    def add(
        self,
        order_id: str,
        tier: Tier,
        checks: Sequence[str],
        report: Report,
        *,
        workload: str | None,
        under_way: ActiveRun | None,
    ) -> bool:
        """Accept a run if it can run, and join it to the run under way if possible; returns whether it waits."""
        specs = by_name(self._store.specs)
        unknown = [name for name in checks if name not in specs]
        if unknown:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"no such check is enabled here: {unknown[0]!r}"))
            return False
        names = tuple(name for name in in_tier(self._store.specs, tier) if not checks or name in checks)
        if not names:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"no check of tier {tier.value} is enabled here"))
            return False
        if len(self._queue) >= MAX_QUEUED:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"{MAX_QUEUED} runs are waiting already"))
            return False
        ordered = OrderedRun(id=order_id, tier=tier, left=names, report=report, workload=workload)
        if self._occupancy.needs_devices(names) and (why := self._occupancy.blocked_by([ordered])):
            report(OrderReport(status=OrderStatus.REFUSED, message=why))
            return False
        report(OrderReport(status=OrderStatus.ACCEPTED))
        if (
            under_way is not None
            and not under_way.cancelled
            and tier.rank <= under_way.tier.rank
            and self._occupancy.needs_devices(set(names) & set(under_way.checks))
        ):
            ordered.joined = True
            under_way.orders.append(ordered)
            report(OrderReport(status=OrderStatus.RUNNING, message="joined the run that was under way"))
            return False
        self._queue.append(ordered)
        return True

    def cancel(self, order_id: str, why: str) -> None:
        """Cancel an order that waits."""
        for ordered in [o for o in self._queue if o.id == order_id]:
            self._queue.remove(ordered)
            ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))

    def cancel_active(self, why: str) -> None:
        """Cancel all orders that need the devices."""
        for ordered in [o for o in self._queue if self._occupancy.needs_devices(o.left)]:
            self._queue.remove(ordered)
            ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))

    def finish(self, run: ActiveRun) -> None:
        """
        Report the end of a run to its orders. Those that joined late get the rest in another run, as all do after a
        cancelled one.
        """
        for ordered in run.orders:
            if not run.cancelled and not ordered.joined:
                ordered.left = tuple(name for name in ordered.left if name in ordered.void)
            ordered.joined, ordered.void = False, set()
            if ordered.left:
                self._queue.appendleft(ordered)
            elif ordered.busy:
                ordered.report(OrderReport(status=OrderStatus.REFUSED, message=ordered.busy))
            else:
                counts = ", ".join(
                    f"{ordered.seen[status]} {status.value}" for status in Status if ordered.seen[status]
                )
                ordered.report(
                    OrderReport(status=OrderStatus.DONE, message=f"{ordered.tier.value}: {counts or 'nothing ran'}")
                )
