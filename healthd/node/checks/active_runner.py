"""Runs active checks and other uses of the devices, one at a time, from the look at the devices to their release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from healthd.core.model import CheckResult, OrderReport, OrderStatus
from healthd.core.tasks import Tasks, is_cancelling
from healthd.node.checks.active_run import ActiveRun, CheckRunner, DeviceUse
from healthd.node.occupancy.occupancy import Occupancy
from healthd.node.state.store import NodeStore
from healthd.runner.settings import Plan

log = logging.getLogger(__name__)

# How often the host's job schedulers are asked while active checks run: a job that is given the node ends the run.
ALLOCATION_WATCH_SECONDS = 2.0


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
                use.refuse("it was ended before it began")  # a task cancelled before its first step ends nothing
            use.released.set()
        self._occupancy.note_survey()


def _unforeseen(error: Exception) -> str:
    return f"an error of healthd's own ended the run: {type(error).__name__}; see the log of the node's daemon"


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait until it has ended, in whatever way."""
    task.cancel()
    await asyncio.wait([task])
