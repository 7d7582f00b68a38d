"""
Decides when checks run: passive ones by their intervals, ordered ones as soon as possible, the quick tier by its rule.

One active run at a time, beside the passive rounds. It starts only when the devices were just seen to be free.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
from collections.abc import Sequence

from checks.contract import Tier
from healthd.core.evidence import untested_devices
from healthd.core.model import OrderReport, OrderStatus
from healthd.core.tasks import LONGEST_SLEEP_SECONDS, Tasks, wait_for
from healthd.node.checks.active_run import ActiveRun, CheckRunner, DeviceUse, Report, SchedulerReader
from healthd.node.checks.active_runner import ActiveRunner
from healthd.node.checks.passive import PassiveRounds
from healthd.node.checks.timetable import QuickFacts, quick_due_at
from healthd.node.clock import Clock
from healthd.node.occupancy.occupancy import Occupancy
from healthd.node.orders.order_queue import OrderQueue
from healthd.node.settings import NodeSettings
from healthd.node.state.store import NodeStore


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
        self, order_id: str, tier: Tier, checks: Sequence[str], report: Report, *, workload: str | None = None
    ) -> None:
        """
        Run a tier, or only `checks` of it, as soon as possible. `report` receives accepted, running, and how it ended.
        It may run although the host's scheduler has given the devices to `workload`, as long as no process uses them.

        It joins a run under way as far as that does the same work.
        """
        waits = self._queue.add(
            order_id, tier, checks, report, workload=workload, under_way=self._active.run_with_devices
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
