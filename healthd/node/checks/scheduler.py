"""
Decides when checks run: passive ones by their intervals, ordered ones as soon as possible, the quick tier by its rule.

One active run at a time, beside the passive rounds. It starts only when the devices were just seen to be free.

Also here:

- runs the passive checks by their intervals, and looks at who holds the devices: one round at a time;
- runs active checks and other uses of the devices, one at a time, from the look at the devices to their release;
- queues ordered runs: accepts or refuses them, joins them to a run under way, cancels them, reports their end.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from checks.contract import Status, Tier
from healthd.core.evidence import untested_devices
from healthd.core.model import CheckResult, OrderReport, OrderStatus
from healthd.core.tasks import LONGEST_SLEEP_SECONDS, Tasks, is_cancelling, wait_for
from healthd.node.checks.active_run import ActiveRun, CheckRunner, DeviceUse, OrderedRun, Report, SchedulerReader
from healthd.node.checks.catalogue import PassiveTimetable, QuickFacts, in_tier, quick_due_at
from healthd.node.clock import Clock
from healthd.node.occupancy.occupancy import Occupancy
from healthd.node.settings import NodeSettings
from healthd.node.state.store import NodeStore, by_name
from healthd.runner.settings import Plan

log = logging.getLogger(__name__)

# How often the host's job schedulers are asked while active checks run: a job that is given the node ends the run.
ALLOCATION_WATCH_SECONDS = 2.0

# Orders that may wait; an aggregator has one or two open for a node.
MAX_QUEUED = 32


class Scheduler:
    """Start `run_passive` and `run_active` as supervised tasks; everything else is called on the event loop."""

    def __init__(
        self,
        store: NodeStore,
        runner: CheckRunner,
        settings: NodeSettings,
        *,
        clock: Clock,
        tasks: Tasks,
        schedulers: SchedulerReader | None = None,
        seed: int | None = None,
    ) -> None:
        """`schedulers` are those of the host; None where there can be none."""
        self._store = store
        self._settings = settings
        self._clock = clock
        chance = random.Random(seed)  # noqa: S311
        phase_ratio = chance.random()
        self._jitter = chance.uniform(-1.0, 1.0)
        self._wake = asyncio.Event()
        self._occupancy = Occupancy(
            store,
            runner,
            clock=clock,
            unprompted=settings.active.unprompted,
            schedulers=schedulers,
            in_use_by_us=lambda: self._active.run_with_devices is not None or self._active.use is not None,
            on_change=self._wake.set,
        )
        self._passive = PassiveRounds(
            store,
            runner,
            settings,
            occupancy=self._occupancy,
            clock=clock,
            phase_ratio=phase_ratio,
        )
        self._active = ActiveRunner(
            store,
            runner,
            self._occupancy,
            executor=settings.executor,
            tasks=tasks,
            on_start=self._note_start,
        )
        self._queue = OrderQueue(store, self._occupancy)
        self._uses: collections.deque[DeviceUse] = collections.deque()
        self._attempted_at: float | None = None
        self._released = False
        self._forced = False
        self._was_allocated = False
        self._devices: set[tuple[str, float | None]] = set()
        store.listen(self._note_release)
        store.listen(self._note_devices)

    # --- orders -------------------------------------------------------------------------------------------------------

    def order(
        self,
        order_id: str,
        tier: Tier,
        checks: Sequence[str],
        report: Report,
        *,
        workload: str | None = None,
        past: str | None = None,
    ) -> None:
        """
        Run a tier, or only `checks` of it, as soon as possible. `report` receives accepted, running, and how it ended.
        It may run although the host's scheduler has given the devices to `workload`, or the gate `past` has a lease, as
        long as no process uses them.

        It joins a run under way as far as that does the same work.
        """
        waits = self._queue.add(
            order_id, tier, checks, report, workload=workload, past=past, under_way=self._active.run_with_devices
        )
        if waits:
            self._wake.set()
            use = self._active.use
            if use is not None and use.idle():
                use.stop("a run was ordered")

    def has_orders(self) -> bool:
        """Whether an ordered run waits."""
        return bool(self._queue)

    def cancel(self, order_id: str, why: str) -> None:
        """Cancel an order; a run that is for no other order is stopped."""
        self._queue.cancel(order_id, why)
        run = self._active.run
        if run is None:
            return
        cancelled = [ordered for ordered in run.orders if ordered.id == order_id]
        for ordered in cancelled:
            run.orders.remove(ordered)
            ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))
        if cancelled and not run.orders:
            run.cancel()

    def use_devices(self, use: DeviceUse) -> None:
        """Start another use of the devices, before any run that waits; an unprompted run makes room for it."""
        if why := self._occupancy.blocked_by([use]):
            use.refuse(why)
            return
        self._uses.append(use)
        self._wake.set()
        run = self._active.run
        if run is not None and not run.orders and self._occupancy.needs_devices(run.checks):
            run.cancel()

    def stop_use(self, use: DeviceUse, why: str) -> None:
        """Stop a use of the devices, or refuse it where it has not begun."""
        if use in self._uses:
            self._uses.remove(use)
            use.refuse(why)
        else:
            use.stop(why)

    async def stop_active(self, why: str) -> None:
        """A job is about to have the devices: cancel all active runs; returns when none is under way."""
        while self._uses:
            self._uses.popleft().refuse(why)
        if self._active.use is not None:
            use = self._active.use
            use.stop(why)
            await use.released.wait()
        self._queue.cancel_active(why)
        run = self._active.run
        if run is not None and self._occupancy.needs_devices(run.checks):
            run.end_orders(OrderStatus.CANCELLED, why)
            run.cancel()
            if run.task is not None:
                await asyncio.wait([run.task])

    # --- surveys and faults -------------------------------------------------------------------------------------------

    async def refresh(self) -> str:
        """Look at the machine now; returns when the result is known: see `Occupancy.refresh`."""
        return await self._occupancy.refresh()

    def set_faults(self, faults: tuple[str, ...]) -> None:
        """
        Replace the faults in force.

        Drops results that earlier faults have changed; the checks whose faults change run at once.
        """
        touched = self._store.set_faults(faults)
        self._passive.force()
        if self._occupancy.needs_devices(touched):
            self._forced = True
            self._wake.set()

    def survey_soon(self) -> None:
        """Look at the machine again soon, because something about it has changed."""
        self._passive.survey_soon()

    def run_soon(self, name: str) -> None:
        """Run this passive check now: what it looks at has changed."""
        self._passive.run_soon(name)

    # --- the loops ----------------------------------------------------------------------------------------------------

    async def run_passive(self) -> None:
        """Run the passive checks, and look at who holds the devices, for ever."""
        await self._passive.run()

    async def run_active(self) -> None:
        """Run what is ordered, and the quick tier when it is due, for ever."""
        while True:
            if self._uses:
                await self._active.use_devices(self._uses.popleft())
                continue
            if self._queue:
                first = self._queue.pop()
                await self._run(ActiveRun(tier=first.tier, checks=first.left, orders=[first]))
                continue
            pause = self._quick_in_seconds()
            if pause <= 0:
                quick = tuple(spec.name for spec in self._store.specs if spec.tier is Tier.QUICK)
                await self._run(ActiveRun(tier=Tier.QUICK, checks=quick, orders=[]))
                continue
            await wait_for(self._wake, min(pause, LONGEST_SLEEP_SECONDS))

    async def _run(self, run: ActiveRun) -> None:
        if await self._active.run_checks(run):
            self._queue.finish(run)

    def _note_start(self) -> None:
        self._attempted_at, self._released, self._forced = self._clock.boot(), False, False

    def _quick_in_seconds(self) -> float:
        """Seconds until the quick tier is due by its rule; suspended while the devices are allocated."""
        if self._store.allocated or self._occupancy.schedulers_unknown:
            return LONGEST_SLEEP_SECONDS  # a release, or the first answer of the schedulers, wakes the loop
        now = self._clock.boot()
        facts = QuickFacts(
            specs=self._store.specs,
            result=self._store.result,
            attempted_at=self._attempted_at,
            released=self._released,
            forced=self._forced,
            untested=any(
                untested_devices(spec, stamped.result, self._store.inventory)
                for spec in self._store.specs
                if spec.tier is Tier.QUICK and (stamped := self._store.result(spec.name)) is not None
            ),
            jitter=self._jitter,
        )
        active = dataclasses.replace(self._settings.active, unprompted=self._occupancy.unprompted)
        return quick_due_at(facts, active, now=now) - now

    def _note_release(self) -> None:
        """Once the devices are free again, the evidence from before is overdue."""
        allocated = self._store.surveyed_at is not None and bool(self._store.allocated)
        if self._was_allocated and not allocated:
            self._released = True
        if not allocated:
            self._wake.set()
        self._was_allocated = allocated

    def _note_devices(self) -> None:
        """A device that appeared, was reset or was swapped is looked at now, not when each passive check is due."""
        inventory = self._store.inventory
        devices = {(device.target, device.since) for device in inventory.devices} if inventory is not None else set()
        if self._devices and devices - self._devices:
            self._passive.force()
        self._devices = devices or self._devices


class PassiveRounds:
    """Start `run` as a supervised task. `wake` makes it look at the clock again."""

    def __init__(
        self,
        store: NodeStore,
        runner: CheckRunner,
        settings: NodeSettings,
        *,
        occupancy: Occupancy,
        clock: Clock,
        phase_ratio: float,
    ) -> None:
        """`phase_ratio` in [0, 1) spreads the rounds of a fleet."""
        self._store = store
        self._runner = runner
        self._settings = settings
        self._occupancy = occupancy
        self._clock = clock
        self._table = PassiveTimetable(store.specs, now=clock.boot(), phase_ratio=phase_ratio)
        self._round_at = -math.inf
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Run rounds for ever."""
        while True:
            now = self._clock.boot()
            due = self._table.due(now)
            survey_at = self._round_at + self._settings.look_seconds
            if due or self._store.surveyed_at is None or now >= survey_at:
                self._round_at = now
                self._table.started(due, now)
                await self._round(due)
            else:
                next_at = min(self._table.next_at(), survey_at)
                await wait_for(self.wake, max(0.0, min(next_at - now, LONGEST_SLEEP_SECONDS)))

    async def _round(self, due: tuple[str, ...]) -> None:
        if not due:
            await self._occupancy.refresh()
            return
        plan = Plan(tier=Tier.PASSIVE, checks=due, executor=self._settings.executor)
        faults, record = self._store.start_run()

        def on_result(result: CheckResult) -> None:
            self._occupancy.note_survey()  # that of the round is known by now
            record(result)

        work = self._runner.run(plan, faults=faults, on_result=on_result)
        await asyncio.gather(work, self._occupancy.ask_schedulers())
        self._occupancy.note_survey()

    def run_soon(self, name: str) -> None:
        """Make this check due now."""
        self._table.force((name,), self._clock.boot())
        self.wake.set()

    def force(self) -> None:
        """Make all passive checks due now."""
        self._table.force(in_tier(self._store.specs, Tier.PASSIVE), self._clock.boot())
        self.wake.set()

    def survey_soon(self) -> None:
        """Look at the machine again soon, because something about it has changed."""
        self._round_at = -math.inf
        self.force()


class ActiveRunner:
    """One caller at a time. `run` and `use` are what is under way, or None."""

    def __init__(
        self,
        store: NodeStore,
        runner: CheckRunner,
        occupancy: Occupancy,
        *,
        executor: str,
        tasks: Tasks,
        on_start: Callable[[], None],
    ) -> None:
        """`on_start` is called when checks that need the devices start."""
        self._store = store
        self._runner = runner
        self._occupancy = occupancy
        self._executor = executor
        self._tasks = tasks
        self._on_start = on_start
        self.run: ActiveRun | None = None
        self.use: DeviceUse | None = None

    @property
    def run_with_devices(self) -> ActiveRun | None:
        """The run under way; None also while it still looks whether the devices are free."""
        return self.run if self.run is not None and self.run.task is not None else None

    async def run_checks(self, run: ActiveRun) -> bool:
        """
        Run active checks; returns whether they started.

        An unforeseen exception does not leave the run half done: the devices are never shared.
        """
        self.run = run
        try:
            return await self._run_checks(run)
        except Exception as error:
            if run.task is not None:
                await _cancel(run.task)
            run.end_orders(OrderStatus.REFUSED, _unforeseen(error))
            self._store.set_running(None)
            raise
        finally:
            self.run = None

    async def _run_checks(self, run: ActiveRun) -> bool:
        needs_devices = self._occupancy.needs_devices(run.checks)
        if needs_devices:
            await self._occupancy.ensure_fresh()
            if run.cancelled:
                return False
            if why := self._occupancy.blocked_by(run.orders):
                run.end_orders(OrderStatus.REFUSED, why)
                return False
            self._on_start()
        order_id = run.orders[0].id if run.orders else None
        self._store.set_running(f"{run.tier.value} (order {order_id})" if order_id else run.tier.value)
        for ordered in run.orders:
            ordered.report(OrderReport(status=OrderStatus.RUNNING))
        plan = Plan(tier=run.tier, checks=run.checks, executor=self._executor, order=order_id)
        faults, record = self._store.start_run()

        def on_result(result: CheckResult) -> None:
            self._occupancy.note_survey()  # that of the run is known by now
            run.count(result, valid=record(result))

        try:
            work = self._runner.run(plan, faults=faults, on_result=on_result)
            run.task = self._tasks.start(f"run of {run.tier.value}", work)
            try:
                await self._watch_allocations(run, run.task)
            except asyncio.CancelledError:
                if not run.task.cancelled() or is_cancelling():
                    raise
                run.cancelled = True
        finally:
            self._store.device_seconds = self._runner.probe_device_seconds
        if needs_devices:
            # A run that ends by itself has looked after the end of its workers; one that is cancelled has not.
            await self._occupancy.wait_until_free(self._store.clock.boot() if run.cancelled else 0.0)
        self.run = None
        self._occupancy.note_survey()
        self._store.set_running(None)
        return True

    async def _watch_allocations(self, run: ActiveRun, task: asyncio.Task[Any]) -> None:
        """Wait for the end of a run, and end it as soon as a job scheduler gives the devices to a job."""
        watch = self._occupancy.has_schedulers and self._occupancy.needs_devices(run.checks)
        while not (await asyncio.wait([task], timeout=ALLOCATION_WATCH_SECONDS if watch else None))[0]:
            await self._occupancy.ask_schedulers()
            why = self._occupancy.reallocated(run.orders)
            if why and not run.cancelled:
                log.info("the run of %s ends: %s", run.tier.value, why)
                run.end_orders(OrderStatus.REFUSED, why)
                run.cancel()
        await task

    async def use_devices(self, use: DeviceUse) -> None:
        """Run another use of the devices, until they are seen to be free again."""
        try:
            await self._occupancy.refresh()
            why = self._occupancy.blocked_by([use])
        except Exception as error:
            if not use.stopping:
                use.refuse(_unforeseen(error))
            use.released.set()
            raise
        if use.stopping:
            return  # it was stopped while we looked
        if why:
            use.refuse(why)
            return
        self.use = use
        self._store.set_running(use.name)
        try:
            use.task = self._tasks.start(use.name, use.work())
            pause = ALLOCATION_WATCH_SECONDS if self._occupancy.has_schedulers else None
            while not (await asyncio.wait([use.task], timeout=pause))[0]:
                await self._occupancy.ask_schedulers()
                if why := self._occupancy.reallocated([use]):
                    use.stop(why)
            if not use.task.cancelled():
                use.task.result()
            await self._occupancy.wait_until_free(self._store.clock.boot())
        except Exception:
            if use.task is not None:
                await _cancel(use.task)
            raise
        finally:
            self._store.device_seconds = self._runner.probe_device_seconds
            self._store.set_running(None)
            self.use = None
            if use.task is None or use.task.done():
                use.refuse("it was stopped before it began")  # a task cancelled before its first step ends nothing
            use.released.set()
        self._occupancy.note_survey()


class OrderQueue:
    """First come, first served; what a run has not done comes before all others."""

    def __init__(self, store: NodeStore, occupancy: Occupancy) -> None:
        self._store = store
        self._occupancy = occupancy
        self._queue: collections.deque[OrderedRun] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def pop(self) -> OrderedRun:
        return self._queue.popleft()

    def add(
        self,
        order_id: str,
        tier: Tier,
        checks: Sequence[str],
        report: Report,
        *,
        workload: str | None,
        past: str | None,
        under_way: ActiveRun | None,
    ) -> bool:
        """Accept a run if it can run, and join it to the run under way if possible; returns whether it waits."""
        specs = by_name(self._store.specs)
        unknown = [name for name in checks if name not in specs]
        if unknown:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"check not enabled here: {unknown[0]!r}"))
            return False
        names = tuple(name for name in in_tier(self._store.specs, tier) if not checks or name in checks)
        if not names:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"no check of tier {tier.value} is enabled here"))
            return False
        if len(self._queue) >= MAX_QUEUED:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"{MAX_QUEUED} runs are waiting already"))
            return False
        ordered = OrderedRun(id=order_id, tier=tier, left=names, report=report, workload=workload, past=past)
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
            report(OrderReport(status=OrderStatus.RUNNING, message="joined a run in progress"))
            return False
        self._queue.append(ordered)
        return True

    def cancel(self, order_id: str, why: str) -> None:
        for ordered in [o for o in self._queue if o.id == order_id]:
            self._queue.remove(ordered)
            ordered.report(OrderReport(status=OrderStatus.CANCELLED, message=why))

    def cancel_active(self, why: str) -> None:
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


def _unforeseen(error: Exception) -> str:
    return f"an internal error of healthd ended the run: {type(error).__name__}; see the log of the node's daemon"


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait until it has ended, in whatever way."""
    task.cancel()
    await asyncio.wait([task])
