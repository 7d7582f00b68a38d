"""Ordered runs, active runs and other uses of the devices: their records."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from checks.contract import Status, Tier
from checks.worker.faults import Fault
from healthd.core.model import CheckResult, OrderReport, OrderStatus
from healthd.node.occupancy.model import Scheduled
from healthd.node.state.store import is_busy
from healthd.runner.settings import OnResult, Plan, Survey

Report = Callable[[OrderReport], None]


class SchedulerReader(Protocol):
    """What the daemon needs of the readers of the host's job schedulers."""

    async def look(self) -> Scheduled:
        """The allocations of the schedulers. Never raises; a look of a moment ago is used again."""


class CheckRunner(Protocol):
    """What the daemon needs of the runner."""

    @property
    def latest(self) -> Survey | None:
        """The last survey; every run makes one first, and one after active checks."""

    @property
    def probe_device_seconds(self) -> float:
        """How long active runs have had the devices since the start."""

    async def survey(self) -> Survey:
        """Look at the machine; never raises."""

    async def run(
        self, plan: Plan, *, faults: Sequence[Fault] = (), on_result: OnResult | None = None
    ) -> tuple[CheckResult, ...]:
        """Run a plan; raises nothing but CancelledError."""


@dataclass(eq=False)
class OrderedRun:
    """A run that the aggregator or an operator has ordered."""

    id: str
    """The id of the order."""
    tier: Tier
    """The tier that was ordered."""
    left: tuple[str, ...]
    """The checks that have not run for it yet."""
    report: Report
    """Receives the reports on the order."""
    workload: str | None = None
    """The job that it is for, which the host's scheduler may have given the devices; None for no job."""
    past: str | None = None
    """The gate of a job that has died, whose lease is no obstacle."""
    seen: collections.Counter[Status] = field(default_factory=collections.Counter)
    """The statuses of its results."""
    busy: str = ""
    """Why a check measured nothing; empty when none found the devices busy."""
    joined: bool = False
    """It joined a run that was under way: earlier results of that run are not for it."""
    void: set[str] = field(default_factory=set)
    """Checks whose result does not count, because a fault was set or cleared meanwhile."""


@dataclass(eq=False)
class ActiveRun:
    """A run of active checks that is under way, or about to start."""

    tier: Tier
    checks: tuple[str, ...]
    orders: list[OrderedRun]
    """The orders that it is for; empty for an unprompted run."""
    task: asyncio.Task[tuple[CheckResult, ...]] | None = None
    """None until it has started."""
    cancelled: bool = False
    """No order joins it any more, and it does not start if it has not yet."""

    def cancel(self) -> None:
        """Stop it, once: a second time would disturb the cleaning up after it."""
        if self.cancelled:
            return
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    def count(self, result: CheckResult, *, valid: bool) -> None:
        """Count a result for its orders; a check whose result is not valid must run for them again."""
        for ordered in self.orders:
            if not valid:
                ordered.void.add(result.check)
                continue
            ordered.seen[result.status] += 1
            if ordered.joined:
                ordered.left = tuple(name for name in ordered.left if name != result.check)
            if is_busy(result):
                ordered.busy = result.findings[0].message

    def end_orders(self, status: OrderStatus, why: str) -> None:
        for ordered in self.orders:
            ordered.report(OrderReport(status=status, message=why))
        self.orders.clear()


@dataclass(eq=False)
class DeviceUse:
    """An exclusive use of the devices other than a run of checks, such as the ranks of a validation."""

    name: str
    """Shown as what is running."""
    work: Callable[[], Coroutine[Any, Any, None]]
    """Starts when the devices are free. It ends by itself or when it is cancelled, and raises nothing else."""
    refuse: Callable[[str], None]
    """Called with the reason when it never starts, and again after its end, where nothing may wait any more."""
    on_stop: Callable[[str], None]
    """Called with the reason when it must end early."""
    idle: Callable[[], bool] = lambda: False
    """Whether it has nothing to do at the moment: then it makes room for an ordered run."""
    workload: str | None = None
    """The job that it is for, which the host's scheduler may have given the devices; None for no job."""
    past: str | None = None
    """The gate of a job that has died, whose lease is no obstacle."""
    task: asyncio.Task[None] | None = None
    """None until it has started."""
    stopping: bool = False
    """It was told to stop."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the devices are seen to be free again."""

    def stop(self, why: str) -> None:
        """Stop it, once: a second time would disturb the cleaning up after it. If it has not begun, it never does."""
        if self.stopping:
            return
        self.stopping = True
        self.on_stop(why)
        if self.task is None:
            self.refuse(why)
        else:
            self.task.cancel()
