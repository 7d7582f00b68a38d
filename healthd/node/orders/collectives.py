"""
Handles orders to be ranks: one session of the runner for all orders of a validation, which has the devices meanwhile.

The session ends when no order has come for a while, when an order of another validation comes, when a job gets the
node, and with the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checks.worker.faults import Fault, parse_fault
from healthd.core.model import CollectiveOrder
from healthd.core.tasks import Tasks
from healthd.node.checks.active_run import DeviceUse, Report
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.nccom import RoundSettings
from healthd.node.orders.collective_session import CollectiveSession, RankSession
from healthd.node.state.store import NodeStore

# A validation plans its next round within a second of the last one; ranks without an order keep a job out.
IDLE_SECONDS = 20.0

OpenSession = Callable[[Sequence[Fault]], RankSession]


class Collectives:
    """Called on the event loop. `order` reports refused, accepted, running and how it ended, with its ranks."""

    def __init__(
        self,
        store: NodeStore,
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
        self._store = store
        self._rounds = rounds
        self._scheduler = scheduler
        self._open_session = open_session
        self._interface = interface
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._tasks = tasks
        self._current: tuple[CollectiveSession, DeviceUse] | None = None

    def order(self, order_id: str, collective: CollectiveOrder, due_at: float, report: Report) -> None:
        """Run the ranks of an order as soon as the devices are free, in the session of its validation."""
        if self._current is not None:
            session, use = self._current
            if session.open and not use.stopping and session.validation == collective.validation:
                session.add(order_id, collective, due_at, report)
                return
            self._scheduler.stop_use(use, f"validation {collective.validation} came")
        session = CollectiveSession(
            collective.validation,
            self._session,
            interface=self._interface,
            idle_seconds=self._idle_seconds,
            others_wait=self._scheduler.has_orders,
            clock=self._clock,
            tasks=self._tasks,
            rounds=self._rounds,
        )
        session.add(order_id, collective, due_at, report)
        use = DeviceUse(
            name=f"collective (validation {collective.validation})",
            work=session.work,
            refuse=session.refuse,
            on_stop=session.note_stop,
            idle=session.idle,
            workload=collective.workload,
        )
        self._current = session, use
        self._scheduler.use_devices(use)

    def cancel(self, order_id: str, why: str) -> None:
        """Cancel an order."""
        if self._current is not None:
            self._current[0].cancel(order_id, why)

    def _session(self) -> RankSession:
        return self._open_session([parse_fault(text) for text in self._store.faults])
