"""What the scheduler deals in: runs that were ordered, the run under way, and the runner as it needs it."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checks.contract import Status, Tier
from checks.worker.faults import Fault
from healthd.core.model import CheckResult, OrderReport
from healthd.node.occupancy import Scheduled
from healthd.runner import OnResult, Plan, Survey

Report = Callable[[OrderReport], None]


class Allotters(Protocol):
    """What the daemon needs of the readers of the host's job schedulers."""

    async def look(self) -> Scheduled:
        """What they have given away; never raises, and a look of a moment ago is used again."""


class Probes(Protocol):
    """What the daemon needs of the runner."""

    @property
    def latest(self) -> Survey | None:
        """The last look at the machine; every run takes one first, and one after active checks."""

    @property
    def probe_device_seconds(self) -> float:
        """What active runs took of the devices since the start."""

    async def survey(self) -> Survey:
        """Look at the machine; never raises."""

    async def run(
        self, plan: Plan, *, faults: Sequence[Fault] = (), on_result: OnResult | None = None
    ) -> tuple[CheckResult, ...]:
        """Run a plan; raises nothing but CancelledError."""


@dataclass(eq=False)
class Ordered:
    """
    A run that somebody ordered, for a `workload` or for none. `left` are the checks that have not run for it yet.

    `joined` a run that was under way already: what that had measured before is not for it. `void` are checks whose
    result counts for nobody, because a fault was set or cleared meanwhile.
    """

    id: str
    tier: Tier
    left: tuple[str, ...]
    report: Report
    workload: str | None = None
    seen: collections.Counter[Status] = field(default_factory=collections.Counter)
    busy: str = ""
    joined: bool = False
    void: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Flight:
    """
    A run under way, or about to be: `task` is None until then. `ordered` are those it is for; empty when nobody asked.
    A `cancelled` one is not joined, and not started where it has not been yet.
    """

    tier: Tier
    checks: tuple[str, ...]
    ordered: list[Ordered]
    task: asyncio.Task[tuple[CheckResult, ...]] | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Stop it, once: a second time would disturb the cleaning up after it."""
        if self.cancelled:
            return
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()
