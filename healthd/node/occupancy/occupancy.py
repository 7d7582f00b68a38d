"""
Decides whether active checks may use the devices, by surveys of the machine and by the host's job schedulers.

What they say is recorded in the store. The job that a run was ordered for may have the devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from checks.contract import Tier
from healthd.core.model import Allocation
from healthd.node.checks.active_run import CheckRunner, DeviceUse, OrderedRun, SchedulerReader
from healthd.node.checks.catalogue import under_rule, unprompted_by
from healthd.node.clock import Clock
from healthd.node.occupancy.model import NO_SCHEDULERS, describe, foreign
from healthd.node.settings import Unprompted
from healthd.node.state.store import NodeStore
from healthd.runner.settings import Survey

log = logging.getLogger(__name__)

# A survey that is older than this is repeated before an active run.
FRESH_SURVEY_SECONDS = 1.0

# Pauses between surveys after an active run, until one shows free devices.
SETTLE_PAUSES_SECONDS = (0.05, 0.2, 0.5, 1.0)


class Occupancy:
    """Who has the devices, as far as active checks need to know."""

    def __init__(
        self,
        store: NodeStore,
        runner: CheckRunner,
        *,
        clock: Clock,
        unprompted: Unprompted | None,
        schedulers: SchedulerReader | None,
        in_use_by_us: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """
        `unprompted` None: by the host's rule. `schedulers` None: none can be on the host.

        `in_use_by_us` tells whether an active run or another use of ours is under way; `on_change` is called when an
        active run may have become due.
        """
        self._store = store
        self._runner = runner
        self._clock = clock
        self._unprompted = unprompted
        self._schedulers = schedulers
        self._in_use_by_us = in_use_by_us
        self._on_change = on_change
        self._last_survey: Survey | None = None
        self._rule: Unprompted | None = None

    @property
    def unprompted(self) -> Unprompted | None:
        """The rule by which active checks run unprompted now; None until the host's rule is known."""
        return self._unprompted or self._rule

    @property
    def has_schedulers(self) -> bool:
        """Whether there may be job schedulers on the host."""
        return self._schedulers is not None

    @property
    def schedulers_unknown(self) -> bool:
        """Whether the host's schedulers have not answered yet for the first time."""
        return self.has_schedulers and self._store.scheduled is NO_SCHEDULERS

    # --- surveys ------------------------------------------------------------------------------------------------------

    async def refresh(self) -> str:
        """Look at the machine and ask the schedulers now. Why the look failed; empty when it did not."""
        survey, _ = await asyncio.gather(self._runner.survey(), self.ask_schedulers())
        self.note_survey()
        return survey.failed

    async def ensure_fresh(self) -> None:
        """Ask the schedulers now, and look at the devices unless that was done a moment ago."""
        surveyed_at = self._store.surveyed_at
        if surveyed_at is None or self._clock.boot() - surveyed_at > FRESH_SURVEY_SECONDS:
            await self.refresh()
        else:
            await self.ask_schedulers()

    async def ask_schedulers(self) -> None:
        """Record their allocations, and the rule by which active checks run unprompted then."""
        if self._schedulers is None:
            return
        scheduled = await self._schedulers.look()
        if self._store.scheduled is NO_SCHEDULERS:
            self._on_change()
        self._store.set_scheduled(scheduled)
        rule, why = unprompted_by(scheduled)
        if self._unprompted is None and rule is not self._rule:
            log.info("active checks run unprompted by the rule %r: %s", rule.value, why)
            self._rule = rule
            self._store.set_specs(under_rule(self._store.specs, rule))
            self._on_change()

    def note_survey(self) -> None:
        """Record the survey of the last run, which every run makes first."""
        survey = self._runner.latest
        if survey is None or survey is self._last_survey or (survey.holders is None and self._in_use_by_us()):
            return  # a worker of ours that is ending cannot be distinguished from an unseen job
        self._last_survey = survey
        self._store.set_survey(survey)

    async def wait_until_free(self, since: float) -> None:
        """
        Wait until a look that began at `since` (CLOCK_BOOTTIME) or later shows the devices free of our own workers.

        A process that was just killed has its files open for a moment after it is gone; that must not look like a job.
        """
        for pause in SETTLE_PAUSES_SECONDS:
            latest = self._runner.latest
            if latest is not None and latest.holders == () and latest.looked_at >= since:
                break
            await asyncio.sleep(pause)
            await self._runner.survey()

    # --- decisions ----------------------------------------------------------------------------------------------------

    def needs_devices(self, names: Sequence[str] | set[str]) -> bool:
        """Whether any of these checks is active."""
        specs: Mapping[str, Tier] = {spec.name: spec.tier for spec in self._store.specs}
        return any(specs.get(name, Tier.PASSIVE) is not Tier.PASSIVE for name in names)

    def blocked_by(self, uses: Sequence[OrderedRun | DeviceUse] = ()) -> str:
        """Why nothing active may run now; empty when the devices are free, except for the jobs of these uses."""
        claims = self._foreign(uses)
        if self._store.surveyed_at is None:
            claims = tuple(claim for claim in claims if claim.by != "unseen")  # they are surveyed before the run
        return f"the devices are taken: {describe(claims)}" if claims else ""

    def reallocated(self, uses: Sequence[OrderedRun | DeviceUse]) -> str:
        """Why a run must end: a scheduler has given the devices to another job than its own; empty when none has."""
        given = self._foreign(uses, by="scheduler")
        return f"the devices were given away: {describe(given)}" if given else ""

    def _foreign(self, uses: Sequence[OrderedRun | DeviceUse], by: str | None = None) -> tuple[Allocation, ...]:
        """The allocations of the devices, of one kind or of all, without those of the jobs of these uses."""
        asking = {one.workload for one in uses}
        claims = foreign(self._store.allocated, self._store.scheduled.workloads, asking)
        return tuple(claim for claim in claims if by in (None, claim.by))
