"""
Handles the orders of the aggregator: each is done once, whatever is lost or repeated on the way.

A lease is reported as accepted only once it is on disk, no probe of ours uses the devices any more, and nobody else was
seen to have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from checks.accelerators import find_descriptor
from healthd.core import wire
from healthd.core.model import FINAL_STATUSES, Lease, Order, OrderKind, OrderReport, OrderStatus
from healthd.core.tasks import Tasks, wait_for
from healthd.node.checks.scheduler import Scheduler
from healthd.node.clock import Clock
from healthd.node.occupancy.watching import WorkloadWatch, unknown_fate
from healthd.node.orders.collectives import Collectives
from healthd.node.orders.leases import LeaseStore, Observations, ProcessFinder, claim_devices, judge_lease
from healthd.node.settings import NodeSettings
from healthd.node.state import files
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

# While nothing is open, the watch sleeps until something is.
IDLE_WATCH_SECONDS = 3600.0
END_SECONDS = 60.0  # beyond its deadline an order is reported as cancelled although it has not ended
ACCEPTED = OrderReport(status=OrderStatus.ACCEPTED)
CLAIMING = OrderReport(status=OrderStatus.RUNNING, message="stored; holders of the devices are still to be checked")
RELEASED = OrderReport(status=OrderStatus.CANCELLED, message="the aggregator released it")


@dataclasses.dataclass(eq=False)
class OpenOrder:
    """An order that has not ended. `due_at` is its deadline by CLOCK_BOOTTIME."""

    order: Order
    issuer: str
    due_at: float
    report: OrderReport


class Orders:
    """Start `watch` as a supervised task; `on_change` is called after every change of a report."""

    def __init__(
        self,
        store: NodeStore,
        scheduler: Scheduler,
        leases: LeaseStore,
        settings: NodeSettings,
        *,
        clock: Clock,
        tasks: Tasks,
        collectives: Collectives | None = None,
        pods: WorkloadWatch | None = None,
    ) -> None:
        """`collectives` None: none are run here. `pods` None: no pod is seen."""
        self._store = store
        self._scheduler = scheduler
        self._leases = leases
        self._settings = settings
        self._clock = clock
        self._tasks = tasks
        self._collectives = collectives
        self._pods = pods
        self._processes = ProcessFinder((settings.host_root or Path("/")) / "proc")
        self._open: dict[str, OpenOrder] = {}
        self._unacknowledged: dict[str, OrderReport] = {}
        self._listed: tuple[str, ...] | None = None
        self._wake = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        if pods is not None:
            pods.on_change = self._wake.set
        store.set_leases(leases.with_stamps())
        # Without an aggregator there are no leases, and nothing could ever list them.
        store.set_doubt(leases.doubt if settings.sync.aggregators else "")

    def reports(self) -> dict[str, OrderReport]:
        """The reports on all open orders, on the leases in force, and final ones that are not acknowledged yet."""
        leases = {held.lease.id: ACCEPTED if held.claimed else CLAIMING for held in self._leases.held}
        return {**leases, **{key: one.report for key, one in self._open.items()}, **self._unacknowledged}

    def apply(
        self,
        orders: tuple[Order, ...] | None,
        *,
        issuer: str,
        acknowledged: tuple[str, ...],
        carried: Mapping[str, OrderReport],
    ) -> None:
        """
        Handle the orders of an answer: all that are open, or None where it makes no statement.

        Work that is no longer listed is cancelled. A lease is not: it ends when its order is withdrawn, or with its
        workload. `carried` are the reports in the request that it answers.
        """
        for order_id in acknowledged:
            self._unacknowledged.pop(order_id, None)
        if orders is None:
            return
        listed = {order.id for order in orders}
        leases = [order.lease.id for order in orders if order.lease is not None]
        # A final report that was sent, of an order that is no longer listed, needs no repeating.
        for order_id in [key for key, report in self._unacknowledged.items() if carried.get(key) == report]:
            if order_id not in listed:
                del self._unacknowledged[order_id]
        for order_id, one in list(self._open.items()):
            if one.issuer == issuer and order_id not in listed:
                self._cancel(one, "the aggregator cancelled it")
        self._listed = tuple(leases)
        self._clear_doubt()
        for order in orders:
            self._handle(order, issuer=issuer, acknowledged=order.id in acknowledged)
        self._wake.set()

    def _handle(self, order: Order, *, issuer: str, acknowledged: bool) -> None:
        """Begin a listed order once, cancel it when it is withdrawn, report its end until that is `acknowledged`."""
        held = next((one for one in self._leases.held if one.lease.id == order.id), None)
        if held is not None and order.withdrawn:
            self._end_lease(held.lease, RELEASED)
        elif order.id in self._open:
            if order.withdrawn:
                self._cancel(self._open[order.id], "the aggregator cancelled it")
        elif (ended := self._leases.final_report(order.id)) is not None:
            if not acknowledged:
                self._unacknowledged.setdefault(order.id, ended)  # it may say more than what was stored of it
        elif order.withdrawn:
            never = OrderReport(status=OrderStatus.CANCELLED, message="cancelled before it began")
            self._unacknowledged[order.id] = never
            self._leases.add_final_report(order.id, never)
            self.on_change()
        elif held is None or not held.claimed or order.lease is None:
            self._begin_or_refuse(order, issuer)

    def _clear_doubt(self) -> None:
        """Once all leases that an aggregator has listed are stored or over, the node knows its leases."""
        if not self._leases.doubt or self._listed is None:
            return
        known = [held.lease.id for held in self._leases.held if held.claimed]
        final = self._leases.final_report
        if all((key in known and key not in self._open) or final(key) is not None for key in self._listed):
            log.info("the leases of the node are known again: %s", ", ".join(known) or "no leases")
            self._leases.clear_doubt()
            self._store.set_doubt("")

    def _cancel(self, one: OpenOrder, why: str) -> None:
        """Cancel an order that can be cancelled; a lease cannot."""
        if one.order.kind == OrderKind.RUN:
            self._scheduler.cancel(one.order.id, why)
        elif one.order.kind == OrderKind.COLLECTIVE and self._collectives is not None:
            self._collectives.cancel(one.order.id, why)

    def _begin_or_refuse(self, order: Order, issuer: str) -> None:
        """Begin an order. An unforeseen exception refuses that order alone, and not those beside it."""
        try:
            self._begin(order, issuer)
        except Exception as error:  # the only place where an order can raise something unforeseen
            log.exception("order %s could not be started", order.id)
            self._report(order.id, _unforeseen(error))

    def _begin(self, order: Order, issuer: str) -> None:
        due_at = self._clock.boot() + max(0.0, order.deadline_seconds)
        self._open[order.id] = OpenOrder(
            order=order, issuer=issuer, due_at=due_at, report=OrderReport(status=OrderStatus.ACCEPTED)
        )
        if order.kind == OrderKind.RUN and order.run is not None:
            self._scheduler.order(
                order.id,
                order.run.tier,
                order.run.checks,
                lambda report: self._report(order.id, report),
                workload=order.run.workload,
                past=order.run.past,
            )
        elif order.kind == OrderKind.COLLECTIVE and order.collective is not None and self._collectives is not None:
            self._collectives.order(order.id, order.collective, due_at, lambda report: self._report(order.id, report))
        elif order.kind == OrderKind.LEASE and order.lease is not None:
            # It is reported as accepted once it is stored.
            self._open[order.id].report = OrderReport(status=OrderStatus.RUNNING, message="about to be stored")
            self._tasks.start(f"lease {order.lease.id}", self._store_lease(order, order.lease))
        else:
            self._report(order.id, _refusal(f"unknown kind of order: {order.kind!r}"))

    def _report(self, order_id: str, report: OrderReport) -> None:
        one = self._open.get(order_id)
        if one is None or one.report.status in FINAL_STATUSES:
            return
        one.report = report
        if report.status in FINAL_STATUSES:
            del self._open[order_id]
            report = self._unacknowledged[order_id] = self._store_end(order_id, report)
            log.info("order %s: %s%s", order_id, report.status, f" ({report.message})" if report.message else "")
        self.on_change()

    def _store_end(self, order_id: str, report: OrderReport) -> OrderReport:
        """Store a final report; returns it, or one without its content where that cannot be written."""
        try:
            wire.encode(report)  # all of it is to be sent
            # An aggregator that asks again after a restart of this daemon does not need what ranks have measured.
            self._leases.add_final_report(order_id, dataclasses.replace(report, ranks=(), findings={}))
        except Exception as error:
            log.exception("order %s: its report cannot be stored", order_id)
            why = f"its report ({report.status.value}) cannot be stored: {type(error).__name__}"
            report = OrderReport(status=OrderStatus.CANCELLED, message=why)
            with contextlib.suppress(Exception):  # it is logged; the order has ended all the same
                self._leases.add_final_report(order_id, report)
        return report

    # --- leases -------------------------------------------------------------------------------------------------------

    async def _store_lease(self, order: Order, lease: Lease) -> None:
        try:
            report = await claim_devices(lease, leases=self._leases, store=self._store, scheduler=self._scheduler)
        except Exception as error:  # in any case the order must not stay open for ever, nor the lease in force
            known = isinstance(error, OSError)
            log.error("lease %s of job %s: cannot be stored: %s", lease.id, lease.job, error, exc_info=not known)
            if self._leases.doubt:
                # It may be one from before the damage: a refusal would end it. It is tried again with the next answer.
                self._open.pop(order.id, None)
                return
            if known:
                unwritable = files.unstorable(self._settings.state_dir, error)
                self._store.set_unwritable(unwritable)
                report = _refusal(unwritable)
            else:
                report = _unforeseen(error)
            self._leases.release(lease.id, report)
            self._store.set_leases(self._leases.with_stamps())
        if report.status == OrderStatus.ACCEPTED:
            self._open.pop(order.id, None)
            if all(held.lease.id != lease.id for held in self._leases.held):
                return  # it was cancelled meanwhile, and that was reported
            log.info("lease %s: job %s attempt %d has the node", lease.id, lease.job, lease.attempt)
            self._wake.set()
            self.on_change()
        else:
            self._report(order.id, report)
        self._clear_doubt()

    def _end_lease(self, lease: Lease, report: OrderReport) -> None:
        self._leases.release(lease.id, report)
        self._unacknowledged[lease.id] = report
        self._store.set_leases(self._leases.with_stamps())
        self._scheduler.survey_soon()
        log.info("lease %s of job %s: %s (%s)", lease.id, lease.job, report.status, report.message)
        self.on_change()

    # --- deadlines and workloads --------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Watch deadlines and workloads for ever; sleeps while there is neither."""
        while True:
            busy = bool(self._open or self._leases.held)
            await wait_for(self._wake, self._settings.lease.watch_seconds if busy else IDLE_WATCH_SECONDS)
            self.tick()

    def tick(self) -> None:
        """Cancel orders past their deadline, report those that do not end then, end leases whose workload is gone."""
        now = self._clock.boot()
        for one in list(self._open.values()):
            if now >= one.due_at:
                why = f"not finished within {one.order.deadline_seconds:.0f} s"
                self._cancel(one, why)
                if now >= one.due_at + END_SECONDS and one.order.kind != OrderKind.LEASE:
                    ended = dataclasses.replace(one.report, status=OrderStatus.CANCELLED)
                    self._report(one.order.id, dataclasses.replace(ended, message=f"{why}, and it does not stop"))
        self._end_leases(now)
        if self._pods is not None:
            self._pods.follow(tuple(held.pod for held in self._leases.held if held.pod is not None))

    def _end_leases(self, now: float) -> None:
        """End the leases whose workload is gone."""
        if not self._leases.held or self._store.surveyed_at is None:
            return
        described = find_descriptor(self._store.accelerator)
        observations = Observations(
            start_of=self._processes.start_of,
            holders=self._store.holders,
            surveyed_at=self._store.surveyed_at,
            jobs_hold=described is None or described.jobs_open_devices,
            scheduled=self._store.scheduled,
            fate_of=unknown_fate if self._pods is None else self._pods.fate,
        )
        for held in self._leases.held:
            end = judge_lease(held, observations, now=now, settle_seconds=self._settings.lease.settle_seconds)
            if end.ended:
                self._end_lease(held.lease, OrderReport(status=OrderStatus.DONE, message=end.ended))
            elif end.seen:
                self._leases.note_seen(held.lease.id, end)


def _refusal(why: str) -> OrderReport:
    return OrderReport(status=OrderStatus.REFUSED, message=why)


def _unforeseen(error: Exception) -> OrderReport:
    return _refusal(f"an internal error of healthd: {type(error).__name__}; see the log of the node's daemon")
