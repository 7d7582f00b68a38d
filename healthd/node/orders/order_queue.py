"""Runs that were ordered and wait for their turn: taken on, joined to a run under way, called off, told the end."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from checks.contract import Status, Tier
from healthd.core.model import OrderReport, OrderStatus
from healthd.node.checks.active_run import Flight, Ordered, Report
from healthd.node.checks.catalogue import in_tier
from healthd.node.occupancy.watch import Claims
from healthd.node.state.results import by_name
from healthd.node.state.store import NodeBook

# Orders that may wait for their turn; an aggregator has one or two open for a node.
MAX_QUEUED = 32


class OrderQueue:
    """First come, first served; what a run has left undone comes before all others."""

    def __init__(self, book: NodeBook, claims: Claims) -> None:
        self._book = book
        self._claims = claims
        self._queue: collections.deque[Ordered] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def pop(self) -> Ordered:
        """The next one, whose turn has come."""
        return self._queue.popleft()

    def take(
        self,
        order_id: str,
        tier: Tier,
        checks: Sequence[str],
        report: Report,
        *,
        workload: str | None,
        flight: Flight | None,
    ) -> bool:
        """Take a run on, if it may be, or join it to the `flight` under way; whether it waits for a turn of its own."""
        specs = by_name(self._book.specs)
        unknown = [name for name in checks if name not in specs]
        if unknown:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"no such check is enabled here: {unknown[0]!r}"))
            return False
        names = tuple(name for name in in_tier(self._book.specs, tier) if not checks or name in checks)
        if not names:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"no check of tier {tier.value} is enabled here"))
            return False
        if len(self._queue) >= MAX_QUEUED:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"{MAX_QUEUED} runs are waiting already"))
            return False
        ordered = Ordered(id=order_id, tier=tier, left=names, report=report, workload=workload)
        if self._claims.needs_devices(names) and (why := self._claims.taken([ordered])):
            report(OrderReport(status=OrderStatus.REFUSED, message=why))
            return False
        report(OrderReport(status=OrderStatus.ACCEPTED))
        if (
            flight is not None
            and not flight.cancelled
            and tier.rank <= flight.tier.rank
            and self._claims.needs_devices(set(names) & set(flight.checks))
        ):
            ordered.joined = True
            flight.ordered.append(ordered)
            report(OrderReport(status=OrderStatus.RUNNING, message="joined the run that was under way"))
            return False
        self._queue.append(ordered)
        return True

    def cancel(self, order_id: str, why: str) -> None:
        """Call one off that waits."""
        for ordered in [o for o in self._queue if o.id == order_id]:
            self._queue.remove(ordered)
            ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))

    def stand_down(self, why: str) -> None:
        """Call off all that need the devices."""
        for ordered in [o for o in self._queue if self._claims.needs_devices(o.left)]:
            self._queue.remove(ordered)
            ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))

    def land(self, flight: Flight) -> None:
        """Tell those it was for; what joined late gets the rest in a run of its own, and all after a cancelled one."""
        for ordered in flight.ordered:
            if not flight.cancelled and not ordered.joined:
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
