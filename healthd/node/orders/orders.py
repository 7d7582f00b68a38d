"""
Orders of the aggregator: each is done once, whatever is lost or repeated on the way; it ends when no longer listed.

A lease is reported as accepted only once it is on disk and no probe of ours uses the devices any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from healthd.core.model import FINAL_STATUSES, Lease, Order, OrderKind, OrderReport, OrderStatus
from healthd.core.tasks import Tasks, wait_for
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.occupancy.allocation import describe, foreign
from healthd.node.orders.collectives import Collectives
from healthd.node.orders.leases import Ledger, Sight, by_id, fate, process_of, process_start
from healthd.node.settings import NodeSettings
from healthd.node.state.store import NodeBook

log = logging.getLogger(__name__)

# While nothing is open the watch only wakes up when something is.
IDLE_WATCH_SECONDS = 3600.0


@dataclasses.dataclass(eq=False)
class Open:
    """An order that has not ended. `due_at` is its deadline by CLOCK_BOOTTIME."""

    order: Order
    issuer: str
    due_at: float
    report: OrderReport


class Orders:
    """Start `watch` as a supervised task; `changed` is called after every change of a report."""

    def __init__(
        self,
        book: NodeBook,
        scheduler: Scheduler,
        ledger: Ledger,
        settings: NodeSettings,
        *,
        clock: Clock,
        tasks: Tasks,
        collectives: Collectives | None = None,
    ) -> None:
        """`collectives` None: none are run here."""
        self._book = book
        self._scheduler = scheduler
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._tasks = tasks
        self._collectives = collectives
        self._open: dict[str, Open] = {}
        self._untold: dict[str, OrderReport] = {}
        self._listed: tuple[str, ...] | None = None
        self._wake = asyncio.Event()
        self.changed: Callable[[], None] = lambda: None
        book.set_leases(ledger.stamped())
        # Without an aggregator nobody gives leases, and nobody could ever list them.
        book.set_doubt(ledger.doubt if settings.sync.aggregators else "")

    def reports(self) -> dict[str, OrderReport]:
        """How far all orders are: the open ones, the leases in force, and ends that were not acknowledged yet."""
        accepted = {held.lease.id: OrderReport(status=OrderStatus.ACCEPTED) for held in self._ledger.held}
        return {**accepted, **{key: one.report for key, one in self._open.items()}, **self._untold}

    def apply(
        self,
        orders: tuple[Order, ...] | None,
        *,
        issuer: str,
        acknowledged: tuple[str, ...],
        carried: Mapping[str, OrderReport],
    ) -> None:
        """
        Take in an answer: all open orders, or None for no statement. `carried` are the reports that it answers.
        """
        for order_id in acknowledged:
            self._untold.pop(order_id, None)
        if orders is None:
            return
        listed = {order.id for order in orders}
        leases = [order.lease.id for order in orders if order.lease is not None]
        # An end that was told and is no longer asked for needs no repeating.
        for order_id in [key for key, report in self._untold.items() if carried.get(key) == report]:
            if order_id not in listed:
                del self._untold[order_id]
        self._cancel_absent(listed | set(leases), issuer)
        self._ledger.listed(leases, issuer)
        self._listed = tuple(leases)
        self._end_doubt()
        for order in orders:
            self._take(order, issuer=issuer, acknowledged=order.id in acknowledged)
        self._wake.set()

    def _take(self, order: Order, *, issuer: str, acknowledged: bool) -> None:
        """One listed order: begun once, called off when it is withdrawn, its end told until that is `acknowledged`."""
        held = next((one.lease for one in self._ledger.held if one.lease.id == order.id), None)
        if held is not None and order.withdrawn:
            self._end_lease(held, OrderReport(status=OrderStatus.CANCELLED, message="the aggregator released it"))
        elif order.id in self._open:
            if order.withdrawn:
                self._cancel(self._open[order.id], "the aggregator called it off")
        elif (ended := self._ledger.fate(order.id)) is not None:
            if not acknowledged:
                self._untold.setdefault(order.id, ended)  # it may say more than what was kept of it
        elif order.withdrawn:
            never = OrderReport(status=OrderStatus.CANCELLED, message="called off before it was begun")
            self._untold[order.id] = never
            self._ledger.settle(order.id, never)
            self.changed()
        elif held is None or order.lease is None:
            self._begin_or_refuse(order, issuer)

    def _end_doubt(self) -> None:
        """Once the leases that an aggregator listed are all here or over, the node knows who has it."""
        if not self._ledger.doubt or self._listed is None:
            return
        known = by_id(self._ledger.held)
        if all((key in known and key not in self._open) or self._ledger.fate(key) is not None for key in self._listed):
            log.info("the leases of the node are known again: %s", ", ".join(known) or "there is none")
            self._ledger.certain()
            self._book.set_doubt("")

    def _cancel_absent(self, listed: set[str], issuer: str) -> None:
        for order_id, one in list(self._open.items()):
            if one.issuer == issuer and order_id not in listed:
                self._cancel(one, "the aggregator called it off")
        for held in self._ledger.held:
            if held.issuer == issuer and held.lease.id not in listed:
                self._end_lease(
                    held.lease, OrderReport(status=OrderStatus.CANCELLED, message="the aggregator released it")
                )

    def _cancel(self, one: Open, why: str) -> None:
        """Call off what can be called off."""
        if one.order.kind == OrderKind.RUN:
            self._scheduler.cancel(one.order.id, why)
        elif one.order.kind == OrderKind.COLLECTIVE and self._collectives is not None:
            self._collectives.cancel(one.order.id, why)
        elif one.order.kind == OrderKind.LAUNCH and self._collectives is not None:
            self._collectives.cancel_launch(one.order.id, why)

    def _begin_or_refuse(self, order: Order, issuer: str) -> None:
        """An order that makes our own code raise is refused; those beside it, a lease perhaps, go their way."""
        try:
            self._begin(order, issuer)
        except Exception as error:  # the one place where an order can hit something unforeseen
            log.exception("order %s could not be begun", order.id)
            self._report(order.id, _unforeseen(error))

    def _begin(self, order: Order, issuer: str) -> None:
        due_at = self._clock.boot() + max(0.0, order.deadline_seconds)
        self._open[order.id] = Open(
            order=order, issuer=issuer, due_at=due_at, report=OrderReport(status=OrderStatus.ACCEPTED)
        )
        if order.kind == OrderKind.RUN and order.run is not None:
            self._scheduler.order(
                order.id,
                order.run.tier,
                order.run.checks,
                lambda report: self._report(order.id, report),
                workload=order.run.workload,
            )
        elif order.kind == OrderKind.COLLECTIVE and order.collective is not None and self._collectives is not None:
            self._collectives.order(order.id, order.collective, due_at, lambda report: self._report(order.id, report))
        elif order.kind == OrderKind.LAUNCH and order.launch is not None and self._collectives is not None:
            self._collectives.launch(order.id, order.launch, lambda report: self._report(order.id, report))
        elif order.kind == OrderKind.LEASE and order.lease is not None:
            # Nothing is said of it before it is stored.
            self._open[order.id].report = OrderReport(status=OrderStatus.RUNNING, message="about to be stored")
            self._tasks.start(f"lease {order.lease.id}", self._take_lease(order, order.lease, issuer))
        else:
            self._report(
                order.id, OrderReport(status=OrderStatus.REFUSED, message=f"no such kind of order here: {order.kind!r}")
            )

    def _report(self, order_id: str, report: OrderReport) -> None:
        one = self._open.get(order_id)
        if one is None or one.report.status in FINAL_STATUSES:
            return
        one.report = report
        if report.status in FINAL_STATUSES:
            del self._open[order_id]
            self._untold[order_id] = report
            # What ranks have measured is of no use to an aggregator that asks again after a restart of this daemon.
            self._ledger.settle(order_id, dataclasses.replace(report, ranks=(), launches=(), findings={}))
            log.info("order %s: %s%s", order_id, report.status, f" ({report.message})" if report.message else "")
        self.changed()

    # --- leases -------------------------------------------------------------------------------------------------------

    async def _take_lease(self, order: Order, lease: Lease, issuer: str) -> None:
        try:
            report = await self._stored(lease, issuer)
        except Exception as error:  # whatever it is: the order must not stay open for ever, nor the lease in force
            known = isinstance(error, OSError)
            log.error("lease %s of job %s: cannot be stored: %s", lease.id, lease.job, error, exc_info=not known)
            if self._ledger.doubt:
                # It may be one that we had: a refusal would end it. It is tried again with the next answer.
                self._open.pop(order.id, None)
                return
            report = _unforeseen(error)
            if isinstance(error, OSError):
                report = OrderReport(
                    status=OrderStatus.REFUSED, message=f"the lease cannot be stored: {error.strerror}"
                )
            self._ledger.release(lease.id, report)
            self._book.set_leases(self._ledger.stamped())
        if report.status == OrderStatus.ACCEPTED:
            self._open.pop(order.id, None)
            if all(held.lease.id != lease.id for held in self._ledger.held):
                return  # it was cancelled meanwhile, and that was told
            log.info("lease %s: job %s attempt %d has the node", lease.id, lease.job, lease.attempt)
            self._wake.set()
            self._end_doubt()
            self.changed()
        else:
            self._report(order.id, report)
            self._end_doubt()

    async def _stored(self, lease: Lease, issuer: str) -> OrderReport:
        """Take the devices for the lease: first the claim, so that no probe starts, then a look at who has them."""
        if other := [held.lease for held in self._ledger.held]:
            return OrderReport(status=OrderStatus.REFUSED, message=f"job {other[0].job} has a lease on the node")
        self._ledger.take(lease, issuer)
        self._book.set_leases(self._ledger.stamped())
        await self._scheduler.stand_down(f"job {lease.job} gets the node")
        await self._scheduler.refresh()
        if self._ledger.doubt:
            return OrderReport(status=OrderStatus.ACCEPTED)  # it may be ours from before, and its job at work
        own = process_of(lease.workload)
        claims = foreign(self._book.allocated, self._book.scheduled.workloads, {lease.workload, lease.job})
        others = [
            claim
            for claim in claims
            if claim.by in ("process", "scheduler") and f"pid {own} " not in f"{claim.holder} "
        ]
        if others:
            report = OrderReport(status=OrderStatus.REFUSED, message=f"the devices are taken: {describe(others)}")
            self._ledger.release(lease.id, report)
            self._book.set_leases(self._ledger.stamped())
            return report
        return OrderReport(status=OrderStatus.ACCEPTED)

    def _end_lease(self, lease: Lease, report: OrderReport) -> None:
        self._ledger.release(lease.id, report)
        self._untold[lease.id] = report
        self._book.set_leases(self._ledger.stamped())
        self._scheduler.look()
        log.info("lease %s of job %s: %s (%s)", lease.id, lease.job, report.status, report.message)
        self.changed()

    # --- what time brings ---------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """The eternal look at deadlines and workloads; sleeps while there is neither."""
        while True:
            busy = bool(self._open or self._ledger.held)
            await wait_for(self._wake, self._settings.lease.watch_seconds if busy else IDLE_WATCH_SECONDS)
            self.tick()

    def tick(self) -> None:
        """Call off runs past their deadline, and end leases whose workload is gone."""
        now = self._clock.boot()
        for one in list(self._open.values()):
            if now >= one.due_at:
                self._cancel(one, f"not done within {one.order.deadline_seconds:.0f} s")
        if not self._ledger.held or self._book.surveyed_at is None:
            return
        proc = (self._settings.host_root or Path("/")) / "proc"
        sight = Sight(
            start_of=lambda pid: process_start(proc, pid),
            holders=self._book.holders,
            looked_at=self._book.surveyed_at,
            jobs_hold=self._book.accelerator != "cpu",
            scheduled=self._book.scheduled,
        )
        for held in self._ledger.held:
            end = fate(held, sight, now=now, settle_seconds=self._settings.lease.settle_seconds)
            if end.ended:
                self._end_lease(held.lease, OrderReport(status=OrderStatus.DONE, message=end.ended))
            elif end.seen:
                self._ledger.seen(held.lease.id, process_start=end.process_start)


def _unforeseen(error: Exception) -> OrderReport:
    why = f"an error of healthd's own: {type(error).__name__}; see the log of the node's daemon"
    return OrderReport(status=OrderStatus.REFUSED, message=why)
