"""
The turns of what is active: the quick tier by its rule, and what was ordered, which goes first.

One run at a time, beside the passive rounds. None starts unless the devices were seen to be free a moment before.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import random
from collections.abc import Sequence
from typing import Any

from checks.contract import Tier
from healthd.core.model import CheckResult, OrderReport, OrderStatus
from healthd.core.tasks import LONGEST_SLEEP_SECONDS, Tasks, is_cancelling, wait_for
from healthd.node.checks.active_run import Allotters, Flight, Probes, Report
from healthd.node.checks.passive import PassiveRounds
from healthd.node.checks.recording import Recorder
from healthd.node.checks.timetable import QuickFacts, quick_due_at
from healthd.node.clock import Clock
from healthd.node.occupancy.watch import Claims
from healthd.node.orders.device_use import Stay
from healthd.node.orders.order_queue import OrderQueue
from healthd.node.settings import ActiveSettings, NodeSettings
from healthd.node.state.store import NodeBook
from healthd.runner import Plan

log = logging.getLogger(__name__)

# How often the host's job schedulers are asked while active checks run: a job that is given the node ends the run.
GUARD_SECONDS = 2.0


class Scheduler:
    """Start `run_passive` and `run_active` as supervised tasks; everything else is called on the event loop."""

    def __init__(
        self,
        book: NodeBook,
        probes: Probes,
        settings: NodeSettings,
        *,
        clock: Clock,
        tasks: Tasks,
        schedulers: Allotters | None = None,
        seed: int | None = None,
    ) -> None:
        """`schedulers` are those of the host; None where none can be on it."""
        self._book = book
        self._probes = probes
        self._settings = settings
        self._clock = clock
        self._tasks = tasks
        chance = random.Random(seed)  # noqa: S311
        phase_ratio = chance.random()
        self._jitter = chance.uniform(-1.0, 1.0)
        self._active_wake = asyncio.Event()
        self._claims = Claims(
            book,
            probes,
            clock=clock,
            unprompted=settings.active.unprompted,
            schedulers=schedulers,
            ours=lambda: self._under_way() is not None or self._stay is not None,
            on_news=self._active_wake.set,
        )
        self._recorder = Recorder(book, self._claims.take_look)
        self._passive = PassiveRounds(
            book,
            probes,
            settings,
            claims=self._claims,
            recorder=self._recorder,
            clock=clock,
            phase_ratio=phase_ratio,
        )
        self._queue = OrderQueue(book, self._claims)
        self._flight: Flight | None = None
        self._stays: collections.deque[Stay] = collections.deque()
        self._stay: Stay | None = None
        self._attempted_at: float | None = None
        self._released = False
        self._forced = False
        self._was_taken = False
        book.listen(self._see_release)

    # --- asked from outside -------------------------------------------------------------------------------------------

    def order(
        self, order_id: str, tier: Tier, checks: Sequence[str], report: Report, *, workload: str | None = None
    ) -> None:
        """
        Run a tier, or only `checks` of it, as soon as possible. `report` is told accepted, running, and how it ended.
        It may run although the host's scheduler has given the devices to `workload`, as long as nobody uses them.

        Joins a run under way as far as that does the same work.
        """
        waits = self._queue.take(order_id, tier, checks, report, workload=workload, flight=self._under_way())
        if waits:
            self._active_wake.set()
            if self._stay is not None and self._stay.idle():
                self._stay.leave("a run was ordered")

    def has_orders(self) -> bool:
        """Whether an ordered run waits for its turn."""
        return bool(self._queue)

    def cancel(self, order_id: str, why: str) -> None:
        """Call an order off; a run that is for nobody else is stopped."""
        self._queue.cancel(order_id, why)
        flight = self._flight
        if flight is None:
            return
        mine = [o for o in flight.ordered if o.id == order_id]
        for ordered in mine:
            flight.ordered.remove(ordered)
            ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))
        if mine and not flight.ordered:
            flight.cancel()

    def host(self, stay: Stay) -> None:
        """Let somebody have the devices, before any run that waits; a run that nobody ordered makes room."""
        if why := self._claims.taken([stay]):
            stay.refuse(why)
            return
        self._stays.append(stay)
        self._active_wake.set()
        if self._flight is not None and not self._flight.ordered and self._claims.needs_devices(self._flight.checks):
            self._flight.cancel()

    def turn_out(self, stay: Stay, why: str) -> None:
        """End a stay, or forget it where it has not begun."""
        if stay in self._stays:
            self._stays.remove(stay)
            stay.refuse(why)
        else:
            stay.leave(why)

    async def stand_down(self, why: str) -> None:
        """A job is about to have the devices: call off all active runs; returns when none is under way."""
        while self._stays:
            self._stays.popleft().refuse(why)
        if self._stay is not None:
            self._stay.leave(why)
            await self._stay.gone.wait()
        self._queue.stand_down(why)
        flight = self._flight
        if flight is not None and self._claims.needs_devices(flight.checks):
            for ordered in flight.ordered:
                ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))
            flight.ordered.clear()
            flight.cancel()
            if flight.task is not None:
                await asyncio.wait([flight.task])

    async def refresh(self) -> None:
        """Look at the machine now, and return when that is known."""
        await self._claims.refresh()

    def set_faults(self, faults: tuple[str, ...]) -> None:
        """These faults are in force from now on. Drops what earlier ones latched; what is touched runs at once."""
        touched = self._recorder.set_faults(faults)
        self._passive.force()
        if self._claims.needs_devices(touched):
            self._forced = True
            self._active_wake.set()

    def look(self) -> None:
        """Look at the machine again now, because something about it has changed."""
        self._passive.look()

    async def run_passive(self) -> None:
        """The eternal round of the passive checks, and of the look at who holds the devices."""
        await self._passive.run()

    # --- active -------------------------------------------------------------------------------------------------------

    async def run_active(self) -> None:
        """The eternal turn of ordered runs and of the quick tier."""
        while True:
            if self._stays:
                await self._host(self._stays.popleft())
                continue
            if self._queue:
                first = self._queue.pop()
                await self._fly(Flight(tier=first.tier, checks=first.left, ordered=[first]))
                continue
            pause = self._quick_in()
            if pause <= 0:
                specs = self._book.specs
                quick = tuple(spec.name for spec in specs if spec.tier is Tier.QUICK)
                await self._fly(Flight(tier=Tier.QUICK, checks=quick, ordered=[]))
                continue
            await wait_for(self._active_wake, min(pause, LONGEST_SLEEP_SECONDS))

    def _under_way(self) -> Flight | None:
        """The run that has the devices; None also while one is still looking whether they are free."""
        return self._flight if self._flight is not None and self._flight.task is not None else None

    def _quick_in(self) -> float:
        """Seconds until the quick tier is due by itself; suspended while somebody has the devices."""
        if self._book.allocated or self._claims.unheard:
            return LONGEST_SLEEP_SECONDS  # a release wakes us, or the first word of the schedulers
        now = self._clock.boot()
        facts = QuickFacts(
            specs=self._book.specs,
            result=self._book.result,
            attempted_at=self._attempted_at,
            released=self._released,
            forced=self._forced,
            jitter=self._jitter,
        )
        return quick_due_at(facts, self._active(), now=now) - now

    def _active(self) -> ActiveSettings:
        """The settings with the rule that is in force now."""
        return dataclasses.replace(self._settings.active, unprompted=self._claims.unprompted)

    async def _fly(self, flight: Flight) -> None:
        """One active run. Should anything unforeseen be raised, it is not left half done: devices are never shared."""
        try:
            await self._run_flight(flight)
        except Exception as error:
            if flight.task is not None:
                await _ended(flight.task)
            why = _unforeseen(error)
            for ordered in flight.ordered:
                ordered.report(OrderReport(status=OrderStatus.REFUSED, message=why))
            self._flight = None
            self._book.set_running(None)
            raise

    async def _run_flight(self, flight: Flight) -> None:
        """One active run from the look at the devices to the last report."""
        needs_devices = self._claims.needs_devices(flight.checks)
        self._flight = flight
        if needs_devices:
            await self._claims.freshen()
            if flight.cancelled:
                self._flight = None
                return
            if why := self._claims.taken(flight.ordered):
                for ordered in flight.ordered:
                    ordered.report(OrderReport(status=OrderStatus.REFUSED, message=why))
                self._flight = None
                return
            self._attempted_at, self._released, self._forced = self._clock.boot(), False, False
        order_id = flight.ordered[0].id if flight.ordered else None
        self._book.set_running(f"{flight.tier.value} (order {order_id})" if order_id else flight.tier.value)
        for ordered in flight.ordered:
            ordered.report(OrderReport(status=OrderStatus.RUNNING))
        plan = Plan(tier=flight.tier, checks=flight.checks, executor=self._settings.executor, order=order_id)
        try:
            on_result = self._recorder.start(flight.ordered)
            work = self._probes.run(plan, faults=self._recorder.faults(), on_result=on_result)
            flight.task = self._tasks.start(f"run of {flight.tier.value}", work)
            try:
                await self._guarded(flight, flight.task)
            except asyncio.CancelledError:
                if not flight.task.cancelled() or is_cancelling():
                    raise
                flight.cancelled = True
        finally:
            self._book.spent(self._probes.probe_device_seconds)
        if needs_devices:
            await self._claims.settle()
        self._flight = None
        self._claims.take_look()
        self._book.set_running(None)
        self._queue.land(flight)

    async def _host(self, stay: Stay) -> None:
        """A stay from the look at the devices until they are seen to be free again."""
        try:
            await self._claims.refresh()
        except Exception as error:
            if not stay.leaving:
                stay.refuse(_unforeseen(error))
            stay.gone.set()
            raise
        if stay.leaving:
            return  # it was turned out while we looked
        if why := self._claims.taken([stay]):
            stay.refuse(why)
            return
        self._stay = stay
        self._book.set_running(stay.name)
        try:
            stay.task = self._tasks.start(stay.name, stay.work())
            pause = GUARD_SECONDS if self._claims.scheduled_here else None
            while not (await asyncio.wait([stay.task], timeout=pause))[0]:
                await self._claims.ask_schedulers()
                if why := self._claims.given_away([stay]):
                    stay.leave(why)
            if not stay.task.cancelled():
                stay.task.result()
            await self._claims.settle()
        except Exception:
            if stay.task is not None:
                await _ended(stay.task)
            raise
        finally:
            self._book.spent(self._probes.probe_device_seconds)
            self._book.set_running(None)
            self._stay = None
            stay.gone.set()
        self._claims.take_look()

    async def _guarded(self, flight: Flight, task: asyncio.Task[tuple[CheckResult, ...]]) -> None:
        """Wait for the end of a run; as soon as a scheduler gives the devices away, that is now."""
        while not (await asyncio.wait([task], timeout=self._guard_seconds(flight)))[0]:
            await self._claims.ask_schedulers()
            why = self._claims.given_away(flight.ordered)
            if why and not flight.cancelled:
                log.info("the run of %s ends: %s", flight.tier.value, why)
                for ordered in flight.ordered:
                    ordered.report(OrderReport(status=OrderStatus.REFUSED, message=why))
                flight.ordered.clear()
                flight.cancel()
        await task

    def _guard_seconds(self, flight: Flight) -> float | None:
        """How long to wait between two looks at the schedulers; None for ever."""
        return GUARD_SECONDS if self._claims.scheduled_here and self._claims.needs_devices(flight.checks) else None

    def _see_release(self) -> None:
        """Once the devices are free again, the evidence of the time before is overdue."""
        taken = self._book.surveyed_at is not None and bool(self._book.allocated)
        if self._was_taken and not taken:
            self._released = True
            self._active_wake.set()
        elif not taken:
            self._active_wake.set()
        self._was_taken = taken


def _unforeseen(error: Exception) -> str:
    return f"an error of healthd's own ended the run: {type(error).__name__}; see the log of the node's daemon"


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait until it has ended; how does not matter."""
    task.cancel()
    await asyncio.wait([task])
