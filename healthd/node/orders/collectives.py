"""
Orders to be ranks: one session of the runner for all orders of a validation, which has the devices meanwhile.

The session ends when no order has come for a while, when another validation's comes, when a job gets the node, and with
the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checks.worker.faults import Fault, parse_fault
from healthd.core.model import CollectiveOrder, LaunchOrder, OrderReport, OrderStatus
from healthd.core.tasks import Tasks
from healthd.node.checks.active_run import Report
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.nccom.round import RoundSettings
from healthd.node.orders.collective_session import RankSession, Visit, Wanted
from healthd.node.orders.device_use import Stay
from healthd.node.state.store import NodeBook

# A validation plans its next round within a second of the last one; ranks that nobody wants keep a job out.
IDLE_SECONDS = 20.0

OpenSession = Callable[[Sequence[Fault]], RankSession]


class Collectives:
    """All calls come on the event loop. `order` reports refused, accepted, running and how it ended, with ranks."""

    def __init__(
        self,
        book: NodeBook,
        scheduler: Scheduler,
        open_session: OpenSession,
        *,
        interface: str | None,
        clock: Clock,
        tasks: Tasks,
        idle_seconds: float = IDLE_SECONDS,
        rounds: RoundSettings | None = None,
    ) -> None:
        """`rounds` None: this node runs no nccom-test with others."""
        self._book = book
        self._rounds = rounds
        self._scheduler = scheduler
        self._open_session = open_session
        self._interface = interface
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._tasks = tasks
        self._visit: tuple[Visit, Stay] | None = None

    def order(self, order_id: str, collective: CollectiveOrder, due_at: float, report: Report) -> None:
        """Be the ranks of an order as soon as the devices are ours, in the session of its validation."""
        wanted = Wanted(id=order_id, collective=collective, due_at=due_at, report=report)
        if self._visit is not None:
            visit, stay = self._visit
            if visit.open and not stay.leaving and visit.validation == collective.validation:
                visit.add(wanted)
                return
            self._scheduler.turn_out(stay, f"validation {collective.validation} came")
        visit = Visit(
            collective.validation,
            self._session,
            interface=self._interface,
            idle_seconds=self._idle_seconds,
            others_wait=self._scheduler.has_orders,
            clock=self._clock,
            tasks=self._tasks,
            rounds=self._rounds,
        )
        visit.add(wanted)
        stay = Stay(
            name=f"collective (validation {collective.validation})",
            work=visit.work,
            refuse=visit.refuse,
            tell=visit.leave,
            idle=visit.idle,
            workload=collective.workload,
        )
        self._visit = visit, stay
        self._scheduler.host(stay)

    def cancel(self, order_id: str, why: str) -> None:
        """Call an order off."""
        if self._visit is not None:
            self._visit[0].cancel(order_id, why)

    def launch(self, order_id: str, order: LaunchOrder, report: Report) -> None:
        """Start what mpirun of a group's main node wants here, while the devices are ours for that validation."""
        visit = self._visit[0] if self._visit is not None and not self._visit[1].leaving else None
        if visit is None or visit.validation != order.validation:
            text = f"the devices are not held for validation {order.validation[:64]!r} now"
            report(OrderReport(status=OrderStatus.REFUSED, message=text))
            return
        visit.launch(order_id, order, report)

    def cancel_launch(self, order_id: str, why: str) -> None:
        """End what a launch started."""
        if self._visit is not None:
            self._tasks.start(f"end of launch {order_id}", self._visit[0].cancel_launch(order_id, why))

    def _session(self) -> RankSession:
        return self._open_session([parse_fault(text) for text in self._book.faults])
