"""
Runs what is due: passive checks by their ticks, the quick tier by its rule, and what was ordered, which goes first.

One passive and one active run at a time. Nothing active starts unless the devices were seen to be free a moment before.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import math
import random
from collections.abc import Mapping, Sequence

from checks.contract import Status, Tier
from checks.faults import Fault, parse_fault
from healthd.model import Allocation, CheckResult, OrderReport
from healthd.node.allocation import describe, foreign
from healthd.node.allocations import NONE_THERE
from healthd.node.catalogue import in_tier, under_rule
from healthd.node.clock import Clock
from healthd.node.flight import Allotters, Flight, Ordered, Probes, Report
from healthd.node.hosting import unprompted_by
from healthd.node.results import by_name, is_busy
from healthd.node.settings import ActiveSettings, NodeSettings, Unprompted
from healthd.node.state import NodeBook
from healthd.node.stay import Stay
from healthd.node.tasks import Tasks, is_cancelling, wait_for
from healthd.node.timetable import PassiveTimetable, QuickFacts, quick_due_at
from healthd.runner import OnResult, Plan, Survey

log = logging.getLogger(__name__)

# Longest sleep: timers count CLOCK_MONOTONIC, which stands still while the machine sleeps.
LONGEST_SLEEP_SECONDS = 60.0
# Orders that may wait for their turn; an aggregator has one or two open for a node.
MAX_QUEUED = 32
# A look at the devices that is older than this is repeated before an active run.
FRESH_LOOK_SECONDS = 1.0

# How often the host's job schedulers are asked while active checks run: a job that is given the node ends the run.
GUARD_SECONDS = 2.0

# How long a look after an active run is repeated until it shows free devices.
SETTLE_PAUSES_SECONDS = (0.05, 0.2, 0.5, 1.0)


class Scheduler:
    """Start `run_passive` and `run_active` as eternal tasks; everything else is called on the event loop."""

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
        self._schedulers = schedulers
        self._settings = settings
        self._clock = clock
        self._tasks = tasks
        chance = random.Random(seed)  # noqa: S311
        self._table = PassiveTimetable(book.specs, now=clock.boot(), phase_ratio=chance.random())
        self._jitter = chance.uniform(-1.0, 1.0)
        self._passive_wake = asyncio.Event()
        self._active_wake = asyncio.Event()
        self._queue: collections.deque[Ordered] = collections.deque()
        self._flight: Flight | None = None
        self._stays: collections.deque[Stay] = collections.deque()
        self._stay: Stay | None = None
        self._attempted_at: float | None = None
        self._released = False
        self._forced = False
        self._was_taken = False
        self._rounded_at = -math.inf
        self._fault_epoch = 0
        self._changed: dict[str, int] = {}  # the epoch in which the faults of a check last changed
        self._last_look: Survey | None = None
        self._rule: Unprompted | None = None
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
        specs = by_name(self._book.specs)
        unknown = [name for name in checks if name not in specs]
        if unknown:
            report(OrderReport(status="refused", message=f"no such check is enabled here: {unknown[0]!r}"))
            return
        names = tuple(name for name in in_tier(self._book.specs, tier) if not checks or name in checks)
        if not names:
            report(OrderReport(status="refused", message=f"no check of tier {tier.value} is enabled here"))
            return
        if len(self._queue) >= MAX_QUEUED:
            report(OrderReport(status="refused", message=f"{MAX_QUEUED} runs are waiting already"))
            return
        ordered = Ordered(id=order_id, tier=tier, left=names, report=report, workload=workload)
        if self._needs_devices(names) and (why := self._taken([ordered])):
            report(OrderReport(status="refused", message=why))
            return
        report(OrderReport(status="accepted"))
        flight = self._flight
        if (
            flight is not None
            and not flight.cancelled
            and tier.rank <= flight.tier.rank
            and self._needs_devices(set(names) & set(flight.checks))
        ):
            ordered.joined = True
            flight.ordered.append(ordered)
            report(OrderReport(status="running", message="joined the run that was under way"))
        else:
            self._queue.append(ordered)
            self._active_wake.set()
            if self._stay is not None and self._stay.idle():
                self._stay.leave("a run was ordered")

    def has_orders(self) -> bool:
        """Whether an ordered run waits for its turn."""
        return bool(self._queue)

    def cancel(self, order_id: str, why: str) -> None:
        """Call an order off; a run that is for nobody else is stopped."""
        for ordered in [o for o in self._queue if o.id == order_id]:
            self._queue.remove(ordered)
            ordered.report(OrderReport(status="cancelled", message=why))
        flight = self._flight
        if flight is None:
            return
        mine = [o for o in flight.ordered if o.id == order_id]
        for ordered in mine:
            flight.ordered.remove(ordered)
            ordered.report(OrderReport(status="cancelled", message=why))
        if mine and not flight.ordered:
            flight.cancel()

    def host(self, stay: Stay) -> None:
        """Let somebody have the devices, before any run that waits; a run that nobody ordered makes room."""
        if why := self._taken([stay]):
            stay.refuse(why)
            return
        self._stays.append(stay)
        self._active_wake.set()
        if self._flight is not None and not self._flight.ordered and self._needs_devices(self._flight.checks):
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
        for ordered in [o for o in self._queue if self._needs_devices(o.left)]:
            self._queue.remove(ordered)
            ordered.report(OrderReport(status="cancelled", message=why))
        flight = self._flight
        if flight is not None and flight.task is not None and self._needs_devices(flight.checks):
            for ordered in flight.ordered:
                ordered.report(OrderReport(status="cancelled", message=why))
            flight.ordered.clear()
            flight.cancel()
            await asyncio.wait([flight.task])

    async def refresh(self) -> None:
        """Look at the machine now, and return when that is known."""
        await asyncio.gather(self._probes.survey(), self._ask_schedulers())
        self._take_look()

    async def _ask_schedulers(self) -> None:
        """What they have given away, and by which rule active checks run unprompted then."""
        if self._schedulers is None:
            return
        scheduled = await self._schedulers.look()
        if self._book.scheduled is NONE_THERE:
            self._active_wake.set()
        self._book.set_scheduled(scheduled)
        rule, why = unprompted_by(scheduled)
        if self._settings.active.unprompted is None and rule is not self._rule:
            log.info("active checks run unprompted by the rule %r: %s", rule.value, why)
            self._rule = rule
            self._book.set_specs(under_rule(self._book.specs, rule))
            self._active_wake.set()

    def set_faults(self, faults: tuple[str, ...]) -> None:
        """These faults are in force from now on. Drops what earlier ones latched; what is touched runs at once."""
        touched = {text.partition("=")[0].partition("@")[0] for text in {*faults} ^ {*self._book.faults}}
        self._fault_epoch += 1
        self._changed.update(dict.fromkeys(touched, self._fault_epoch))
        self._book.set_faults(faults)
        self._book.drop_injected()
        self._table.force(in_tier(self._book.specs, Tier.PASSIVE), self._clock.boot())
        self._passive_wake.set()
        if self._needs_devices(touched):
            self._forced = True
            self._active_wake.set()

    def look(self) -> None:
        """Look at the machine again now, because something about it has changed."""
        self._table.force(in_tier(self._book.specs, Tier.PASSIVE), self._clock.boot())
        self._rounded_at = -math.inf
        self._passive_wake.set()

    # --- passive ------------------------------------------------------------------------------------------------------

    async def run_passive(self) -> None:
        """The eternal round of the passive checks, and of the look at who holds the devices."""
        while True:
            now = self._clock.boot()
            due = self._table.due(now)
            look_at = self._rounded_at + self._settings.look_seconds
            if due or self._book.surveyed_at is None or now >= look_at:
                self._rounded_at = now
                self._table.started(due, now)
                await self._passive_round(due)
            else:
                next_at = min(self._table.next_at(), look_at)
                await wait_for(self._passive_wake, max(0.0, min(next_at - now, LONGEST_SLEEP_SECONDS)))

    async def _passive_round(self, due: tuple[str, ...]) -> None:
        if not due:
            await self.refresh()
            return
        plan = Plan(tier=Tier.PASSIVE, checks=due, executor=self._settings.executor)
        work = self._probes.run(plan, faults=self._faults(), on_result=self._recorder(()))
        await asyncio.gather(work, self._ask_schedulers())
        self._take_look()

    def _take_look(self) -> None:
        """Every run looks at the machine first, so what it saw costs nothing more."""
        look = self._probes.latest
        if look is None or look is self._last_look or (look.holders is None and (self._flight or self._stay)):
            return  # a worker of ours that is ending cannot be told from an unseen job
        self._last_look = look
        self._book.survey(look)

    def _faults(self) -> tuple[Fault, ...]:
        return tuple(parse_fault(text) for text in self._book.faults)

    # --- active -------------------------------------------------------------------------------------------------------

    async def run_active(self) -> None:
        """The eternal turn of ordered runs and of the quick tier."""
        while True:
            if self._stays:
                await self._host(self._stays.popleft())
                continue
            if self._queue:
                first = self._queue.popleft()
                await self._fly(Flight(tier=first.tier, checks=first.left, ordered=[first]))
                continue
            pause = self._quick_in()
            if pause <= 0:
                specs = self._book.specs
                quick = tuple(spec.name for spec in specs if spec.tier is Tier.QUICK)
                await self._fly(Flight(tier=Tier.QUICK, checks=quick, ordered=[]))
                continue
            await wait_for(self._active_wake, min(pause, LONGEST_SLEEP_SECONDS))

    def _quick_in(self) -> float:
        """Seconds until the quick tier is due by itself; suspended while somebody has the devices."""
        if self._book.allocated or (self._schedulers is not None and self._book.scheduled is NONE_THERE):
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
        return dataclasses.replace(self._settings.active, unprompted=self._settings.active.unprompted or self._rule)

    async def _fly(self, flight: Flight) -> None:
        """One active run from the look at the devices to the last report."""
        needs_devices = self._needs_devices(flight.checks)
        if needs_devices:
            looked_at = self._book.surveyed_at
            if looked_at is None or self._clock.boot() - looked_at > FRESH_LOOK_SECONDS:
                await self.refresh()
            else:
                await self._ask_schedulers()
            if why := self._taken(flight.ordered):
                for ordered in flight.ordered:
                    ordered.report(OrderReport(status="refused", message=why))
                return
            self._attempted_at, self._released, self._forced = self._clock.boot(), False, False
        self._flight = flight
        order_id = flight.ordered[0].id if flight.ordered else None
        self._book.set_running(f"{flight.tier.value} (order {order_id})" if order_id else flight.tier.value)
        for ordered in flight.ordered:
            ordered.report(OrderReport(status="running"))
        plan = Plan(tier=flight.tier, checks=flight.checks, executor=self._settings.executor, order=order_id)
        try:
            work = self._probes.run(plan, faults=self._faults(), on_result=self._recorder(flight.ordered))
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
            await self._settle()
        self._flight = None
        self._take_look()
        self._book.set_running(None)
        self._land(flight)

    async def _host(self, stay: Stay) -> None:
        """A stay from the look at the devices until they are seen to be free again."""
        await self.refresh()
        if stay.leaving:
            return  # it was turned out while we looked
        if why := self._taken([stay]):
            stay.refuse(why)
            return
        self._stay = stay
        self._book.set_running(stay.name)
        try:
            stay.task = self._tasks.start(stay.name, stay.work())
            pause = GUARD_SECONDS if self._schedulers is not None else None
            while not (await asyncio.wait([stay.task], timeout=pause))[0]:
                await self._ask_schedulers()
                if given := self._foreign([stay], by="scheduler"):
                    stay.leave(f"the devices were given away: {describe(given)}")
            if not stay.task.cancelled():
                stay.task.result()
            await self._settle()
        finally:
            self._book.spent(self._probes.probe_device_seconds)
            self._stay = None
            stay.gone.set()
        self._take_look()
        self._book.set_running(None)

    async def _guarded(self, flight: Flight, task: asyncio.Task[tuple[CheckResult, ...]]) -> None:
        """Wait for the end of a run; as soon as a scheduler gives the devices away, that is now."""
        while not (await asyncio.wait([task], timeout=self._guard_seconds(flight)))[0]:
            await self._ask_schedulers()
            given = self._foreign(flight.ordered, by="scheduler")
            if given and not flight.cancelled:
                why = f"the devices were given away: {describe(given)}"
                log.info("the run of %s ends: %s", flight.tier.value, why)
                for ordered in flight.ordered:
                    ordered.report(OrderReport(status="refused", message=why))
                flight.ordered.clear()
                flight.cancel()
        await task

    def _guard_seconds(self, flight: Flight) -> float | None:
        """How long to wait between two looks at the schedulers; None for ever."""
        return GUARD_SECONDS if self._schedulers is not None and self._needs_devices(flight.checks) else None

    async def _settle(self) -> None:
        """
        Look until the devices are seen to be free of our own workers: a process that was just killed has its files
        open for a moment after it has vanished, and that must not look like a job.
        """
        for pause in SETTLE_PAUSES_SECONDS:
            latest = self._probes.latest
            if latest is not None and latest.holders == ():
                break
            await asyncio.sleep(pause)
            await self._probes.survey()

    def _land(self, flight: Flight) -> None:
        """Tell those it was for; what joined late gets the rest in a run of its own, and all after a cancelled one."""
        for ordered in flight.ordered:
            if not flight.cancelled and not ordered.joined:
                ordered.left = tuple(name for name in ordered.left if name in ordered.void)
            ordered.joined, ordered.void = False, set()
            if ordered.left:
                self._queue.appendleft(ordered)
            elif ordered.busy:
                ordered.report(OrderReport(status="refused", message=ordered.busy))
            else:
                counts = ", ".join(
                    f"{ordered.seen[status]} {status.value}" for status in Status if ordered.seen[status]
                )
                ordered.report(OrderReport(status="done", message=f"{ordered.tier.value}: {counts or 'nothing ran'}"))

    def _recorder(self, ordered: Sequence[Ordered]) -> OnResult:
        """Takes in results of a run that starts now; of checks whose faults change meanwhile none is kept."""
        epoch = self._fault_epoch

        def record(result: CheckResult) -> None:
            self._take_look()
            kept = epoch >= self._changed.get(result.check, 0)
            for one in ordered:
                if not kept:
                    one.void.add(result.check)
                    continue
                one.seen[result.status] += 1
                if one.joined:
                    one.left = tuple(name for name in one.left if name != result.check)
                if is_busy(result):
                    one.busy = result.findings[0].message
            if kept:
                self._book.record(result)

        return record

    # --- who has the devices ------------------------------------------------------------------------------------------

    def _needs_devices(self, names: Sequence[str] | set[str]) -> bool:
        specs: Mapping[str, Tier] = {spec.name: spec.tier for spec in self._book.specs}
        return any(specs.get(name, Tier.PASSIVE) is not Tier.PASSIVE for name in names)

    def _taken(self, ordered: Sequence[Ordered | Stay] = ()) -> str:
        """Why nothing active may run now; empty when the devices are free, but for the jobs it was ordered for."""
        claims = self._foreign(ordered)
        if self._book.surveyed_at is None:
            claims = tuple(claim for claim in claims if claim.by != "unseen")  # looked at before the run
        return f"the devices are taken: {describe(claims)}" if claims else ""

    def _foreign(self, ordered: Sequence[Ordered | Stay], by: str | None = None) -> tuple[Allocation, ...]:
        """The claims on the devices, of one kind or of all, without those of the jobs that runs were ordered for."""
        asking = {one.workload for one in ordered}
        claims = foreign(self._book.allocated, self._book.scheduled.workloads, asking)
        return tuple(claim for claim in claims if by in (None, claim.by))

    def _see_release(self) -> None:
        """Once the devices are free again, the evidence of the time before is overdue."""
        taken = self._book.surveyed_at is not None and bool(self._book.allocated)
        if self._was_taken and not taken:
            self._released = True
            self._active_wake.set()
        elif not taken:
            self._active_wake.set()
        self._was_taken = taken
