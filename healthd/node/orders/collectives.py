"""
Handles orders to be ranks: one session of the runner for all orders of a validation, which has the devices meanwhile.

The session ends when no order has come for a while, when an order of another validation comes, when a job gets the
node, and with the daemon.

Also here:

- runs the collectives of one validation, one after the other, in one session of the runner.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checks.worker.faults import Fault, parse_fault
from healthd.core.model import CollectiveOrder, OrderReport, OrderStatus, RankReport
from healthd.core.tasks import Tasks, is_cancelling, wait_for
from healthd.node.checks.active_run import DeviceUse, Report
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.interfaces import interface_to
from healthd.node.nccom import NccomRound, RoundProgress, RoundSettings
from healthd.node.state.store import NodeStore
from healthd.runner.collective.ranks import OnReport, RefusedError

log = logging.getLogger(__name__)

# Orders of one validation that may wait; an aggregator has one or two open for a node.
MAX_WAITING = 8

# A validation plans its next round within a second of the last one; ranks without an order keep a job out.
IDLE_SECONDS = 20.0


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
            self._scheduler.stop_use(use, f"validation {collective.validation} began")
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
            past=collective.past,
        )
        self._current = session, use
        self._scheduler.use_devices(use)

    def cancel(self, order_id: str, why: str) -> None:
        if self._current is not None:
            self._current[0].cancel(order_id, why)

    def _session(self) -> RankSession:
        return self._open_session([parse_fault(text) for text in self._store.faults])


class CollectiveSession:
    """The orders of one validation, run one after the other in one session of the runner."""

    def __init__(
        self,
        validation: str,
        session: Callable[[], RankSession],
        *,
        interface: str | None,
        idle_seconds: float,
        others_wait: Callable[[], bool],
        clock: Clock,
        tasks: Tasks,
        rounds: RoundSettings | None = None,
    ) -> None:
        self.validation = validation
        self._rounds = rounds
        self._others_wait = others_wait
        self.open = True
        self.why = "the node's daemon is stopping"
        self._interface = interface
        self._idle_seconds = idle_seconds
        self._make_session = session
        self._clock = clock
        self._tasks = tasks
        self._waiting: collections.deque[PendingCollective] = collections.deque()
        self._added = asyncio.Event()
        self._running: tuple[PendingCollective, asyncio.Task[tuple[RankReport, ...]]] | None = None

    def add(self, order_id: str, collective: CollectiveOrder, due_at: float, report: Report) -> None:
        """Accept one more order."""
        pending = PendingCollective(id=order_id, collective=collective, due_at=due_at, report=report)
        if len(self._waiting) >= MAX_WAITING:
            pending.end(OrderStatus.REFUSED, f"{MAX_WAITING} collectives are waiting already")
            return
        pending.report(OrderReport(status=OrderStatus.ACCEPTED))
        self._waiting.append(pending)
        self._added.set()

    def cancel(self, order_id: str, why: str) -> None:
        """Cancel one order; its ranks are killed, and the session stays open."""
        for pending in [one for one in self._waiting if one.id == order_id]:
            self._waiting.remove(pending)
            pending.end(OrderStatus.CANCELLED, why)
        if self._running is not None and self._running[0].id == order_id and not self._running[0].why:
            self._running[0].why = why
            self._running[1].cancel()

    def refuse(self, why: str, status: OrderStatus = OrderStatus.REFUSED) -> None:
        """End all orders that wait, and accept no others."""
        self.open = False
        while self._waiting:
            self._waiting.popleft().end(status, why)

    def note_stop(self, why: str) -> None:
        """The session is about to be cancelled, for this reason."""
        self.open, self.why = False, why

    def idle(self) -> bool:
        """Whether no order waits or is under way."""
        return self._running is None and not self._waiting

    async def work(self) -> None:
        """Run all orders, from the first to the last. Raises nothing but CancelledError."""
        session: RankSession | None = None
        try:
            if self._waiting:
                session = self._make_session()
                await session.open()
                while (pending := await self._next()) is not None:
                    await self._join(session, pending)
        except RefusedError as error:
            self.refuse(str(error))
        except Exception as error:
            log.exception("the ranks of validation %s", self.validation)
            self.refuse(f"internal error of healthd: {type(error).__name__}: {error}")
        finally:
            self.refuse(self.why, OrderStatus.CANCELLED)
            if session is not None:
                await _to_its_end(self._tasks.start(f"end of validation {self.validation}", session.close()))

    async def _next(self) -> PendingCollective | None:
        if not self._waiting:
            self._added.clear()
            if self._others_wait() or not await wait_for(self._added, self._idle_seconds):
                self.open = False
                return None
        return self._waiting.popleft() if self._waiting else await self._next()

    async def _join(self, session: RankSession, pending: PendingCollective) -> None:
        # Nothing is awaited before it is the order under way: it could neither be cancelled nor be ended meanwhile.
        order = pending.collective
        pending.report(OrderReport(status=OrderStatus.RUNNING))
        work = self._run_ranks if order.nccom is None else self._run_round
        task = self._tasks.start(f"ranks of {order.group}", work(session, pending))
        self._running = pending, task
        try:
            await _wait_ended(task)
            pending.ranks = task.result()
        except asyncio.CancelledError:
            # Either this order was cancelled, or the whole session, in which case the ranks are gone as well.
            pending.end(OrderStatus.CANCELLED, pending.why or self.why)
            if is_cancelling():
                raise
        except RefusedError as error:
            pending.end(OrderStatus.REFUSED, str(error))
        except Exception as error:
            log.exception("the ranks of group %s", order.group)
            pending.end(OrderStatus.CANCELLED, f"internal error of healthd: {type(error).__name__}: {error}")
            raise
        else:
            gone = sum(report.reason is not None for report in pending.ranks)
            pending.end(OrderStatus.DONE, f"{gone} of {len(pending.ranks)} ranks returned nothing" if gone else "")
        finally:
            self._running = None
        if order.nccom is None:
            await session.warm()

    def _seconds_left(self, pending: PendingCollective) -> float:
        return max(0.0, pending.due_at - self._clock.boot())

    async def _run_ranks(self, session: RankSession, pending: PendingCollective) -> tuple[RankReport, ...]:
        def on_report(ranks: tuple[RankReport, ...]) -> None:
            pending.ranks = ranks
            pending.report(OrderReport(status=OrderStatus.RUNNING, ranks=ranks))

        order = pending.collective
        interface = self._interface or await asyncio.to_thread(interface_to, order.main)
        return await session.join(order, on_report, interface=interface, deadline_seconds=self._seconds_left(pending))

    async def _run_round(self, session: RankSession, pending: PendingCollective) -> tuple[RankReport, ...]:
        """A round of nccom-test: the devices are claimed, and were seen to be free a moment before."""

        def on_progress(progress: RoundProgress) -> None:
            pending.progress = progress
            pending.report(
                OrderReport(status=OrderStatus.RUNNING, message=progress.message, findings=progress.findings)
            )

        if self._rounds is None:
            raise RefusedError("nccom-test does not run over several nodes here")
        await session.check_free()
        seconds = self._seconds_left(pending)
        pending.progress = await NccomRound(pending.collective, self._rounds, on_progress, seconds=seconds).run()
        return ()


class RankSession(Protocol):
    """What is needed of `healthd.runner.collective.ranks.Session`."""

    async def open(self) -> None:
        """Claim the devices. Raises RefusedError."""

    async def join(
        self, order: CollectiveOrder, on_report: OnReport, *, interface: str | None, deadline_seconds: float
    ) -> tuple[RankReport, ...]:
        """Run the ranks of an order. Raises RefusedError; on cancellation `on_report` has got their last reports."""

    async def check_free(self) -> None:
        """See that no other process uses the devices, which are claimed. Raises RefusedError."""

    async def warm(self) -> None:
        """Start ranks for the next order."""

    async def close(self) -> None:
        """End the ranks and release the devices."""


@dataclass(eq=False)
class PendingCollective:
    """An order that was accepted."""

    id: str
    """The id of the order."""
    collective: CollectiveOrder
    """What the order asks for."""
    due_at: float
    """Its deadline (CLOCK_BOOTTIME)."""
    report: Report
    """Receives the reports on the order."""
    ranks: tuple[RankReport, ...] = ()
    """The last reports of its ranks."""
    progress: RoundProgress = field(default_factory=RoundProgress)
    """The last progress of its round of nccom-test."""
    why: str = ""
    """Why it was cancelled; empty when it was not."""

    def end(self, status: OrderStatus, message: str = "") -> None:
        """Report its end, with everything that is known."""
        text = message or self.progress.message
        self.report(OrderReport(status=status, message=text, ranks=self.ranks, findings=self.progress.findings))


async def _wait_ended(task: asyncio.Task[tuple[RankReport, ...]]) -> None:
    """
    Wait for the end of a task; on cancellation cancel it, and wait for its end after that.

    It is cancelled once: a second time would disturb the cleaning up after the first.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        if not task.cancelling():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s: %s", task.get_name(), type(error).__name__, error)
        raise


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task that takes seconds, also when the waiting is cancelled meanwhile."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
    finally:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s: %s", task.get_name(), type(error).__name__, error)


OpenSession = Callable[[Sequence[Fault]], RankSession]
