"""
Decides whether active checks may use the devices, by surveys of the machine and by the host's job schedulers.

What they say is recorded in the store. The job that a run was ordered for may have the devices.

Also here:

- finds the job schedulers of this host by their processes, their files, or the variables of their containers;
- asks the job schedulers of this host for their allocations: finds them anew each time, asks all, in bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from checks.contract import Tier
from healthd.core.model import Allocation
from healthd.core.threads import in_thread
from healthd.node.checks.active_run import CheckRunner, DeviceUse, OrderedRun, SchedulerReader
from healthd.node.checks.catalogue import under_rule, unprompted_by
from healthd.node.clock import Clock
from healthd.node.occupancy.model import (
    NO_SCHEDULERS,
    JobScheduler,
    Look,
    Process,
    Reading,
    Scheduled,
    Workload,
    describe,
    foreign,
    read_processes,
)
from healthd.node.occupancy.own import job_schedulers, own_jobs
from healthd.node.settings import AllocationSettings, Unprompted
from healthd.node.state.store import NodeStore
from healthd.runner.settings import Survey

log = logging.getLogger(__name__)

# A survey that is older than this is repeated before an active run.
FRESH_SURVEY_SECONDS = 1.0

# Pauses between surveys after an active run, until one shows free devices.
SETTLE_PAUSES_SECONDS = (0.05, 0.2, 0.5, 1.0)

T = TypeVar("T")

# Time beyond a reader's own before it counts as stuck: a thread may have to wait for its turn.
SLACK_SECONDS = 1.0


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
        return f"the devices are allocated to a job: {describe(given)}" if given else ""

    def _foreign(self, uses: Sequence[OrderedRun | DeviceUse], by: str | None = None) -> tuple[Allocation, ...]:
        """The allocations of the devices, of one kind or of all, without those of the jobs of these uses."""
        asking, past = {one.workload for one in uses}, {one.past for one in uses}
        # A run that is also for another job may not pass the lease.
        over = past if len(past) == 1 else ()
        claims = foreign(self._store.allocated, self._store.scheduled.workloads, asking, over)
        return tuple(claim for claim in claims if by in (None, claim.by))


class Schedulers:
    """The job schedulers of one host, on the event loop alone."""

    def __init__(
        self,
        settings: AllocationSettings,
        host_root: Path | None,
        *,
        clock: Clock,
        environ: Mapping[str, str] = os.environ,
        known: Sequence[JobScheduler] | None = None,
    ) -> None:
        """`known` None: those of all integrations."""
        self._settings = settings
        self._known = job_schedulers() if known is None else known
        self._root = host_root or Path("/")
        self._clock = clock
        self._environ = dict(environ)
        self._own = own_jobs(self._known, self._environ)
        self._latest: Scheduled | None = None
        self._turn = asyncio.Lock()
        self._under_way: dict[str, asyncio.Future[Any]] = {}
        self._logged = ""

    @property
    def latest(self) -> Scheduled | None:
        """The last look; None before the first."""
        return self._latest

    async def look(self) -> Scheduled:
        """Ask all schedulers of the host. Never raises; a look of a moment ago is used again."""
        async with self._turn:
            return await self._look()

    async def _look(self) -> Scheduled:
        latest = self._latest
        if latest is not None and 0 <= self._clock.boot() - latest.read_at < self._settings.pause_seconds:
            return latest
        at = self._clock.boot()
        timeout = self._settings.timeout_seconds + SLACK_SECONDS
        processes = await self._bounded("the process table", lambda: read_processes(self._root / "proc"), timeout)
        present = await self._bounded(
            "files", lambda: find_schedulers(self._root, processes or (), self._environ, self._known), timeout
        )
        if processes is None or present is None:
            before = self._latest or NO_SCHEDULERS
            unseen = Reading(
                scheduler="", workloads=None, unseen="the host's /proc does not respond; see the kernel log"
            )
            readings = tuple(_unanswered(reading, unseen.unseen) for reading in before.readings) or (unseen,)
        else:
            found = await asyncio.gather(*(self._ask(one, processes) for one in present))
            readings = tuple(self._settled(reading) for reading in found)
        self._latest = Scheduled(readings=readings, read_at=at)
        self._log_changes()
        return self._latest

    async def _ask(self, present: Present, processes: tuple[Process, ...]) -> Reading:
        """One scheduler. A reader that is still stuck is not started a second time."""
        name = present.scheduler.name
        if not self._settings.read:
            why = f"{present.why}, and node.allocations.read is false"
            return Reading(scheduler=name, kind=present.scheduler.kind, workloads=None, unseen=why)
        look = Look(root=self._root, processes=processes, environ=self._environ, settings=self._settings)
        timeout = self._settings.timeout_seconds
        reading = await self._bounded(name, lambda: present.scheduler.read(look), timeout + SLACK_SECONDS)
        if reading is None:
            why = f"{name} does not respond within {timeout:g} s"
            return Reading(scheduler=name, kind=present.scheduler.kind, workloads=None, unseen=why)
        return reading

    async def _bounded(self, name: str, work: Callable[[], T], seconds: float) -> T | None:
        """What `work` gives, in a thread; None when it is not done in time, and while an earlier one is not done."""
        earlier = self._under_way.get(name)
        if earlier is not None and not earlier.done():
            return None
        future = in_thread(f"look at {name}", work)
        self._under_way[name] = future
        future.add_done_callback(lambda done: _complain(name, done))
        done, _ = await asyncio.wait([future], timeout=seconds)
        return future.result() if done and future.exception() is None else None

    def _settled(self, reading: Reading) -> Reading:
        """
        Drop our own workloads and those to be ignored. Where a scheduler does not answer, its last workloads stay.
        """
        if reading.workloads is not None:
            counted = tuple(one for one in reading.workloads if not self._is_ignored(one))
            return dataclasses.replace(reading, workloads=counted)
        before = next(
            (one for one in (self._latest or NO_SCHEDULERS).readings if one.scheduler == reading.scheduler), None
        )
        return reading if before is None else _unanswered(before, reading.unseen)

    def _is_ignored(self, workload: Workload) -> bool:
        return not self._own.isdisjoint(workload.names) or any(
            fnmatch.fnmatchcase(name, pattern) for name in workload.names for pattern in self._settings.ignore
        )

    def _log_changes(self) -> None:
        """One line whenever it becomes another one."""
        text = self._latest.unseen if self._latest is not None else ""
        if text != self._logged:
            log.info("%s", f"some allocations cannot be seen: {text}" if text else "all allocations can be seen again")
        self._logged = text


def find_schedulers(
    root: Path, processes: Sequence[Process], environ: Mapping[str, str], known: Sequence[JobScheduler]
) -> tuple[Present, ...]:
    """Those of the known job schedulers that are on this host."""
    signs = ((one, next(_signs(one, root, processes, environ), None)) for one in known)
    return tuple(
        Present(scheduler=one, why=f"{one.name} is on this host: {sign}") for one, sign in signs if sign is not None
    )


@dataclass(frozen=True, kw_only=True)
class Present:
    """A job scheduler that is on this host, and what tells so."""

    scheduler: JobScheduler
    why: str


def _signs(
    scheduler: JobScheduler, root: Path, processes: Sequence[Process], environ: Mapping[str, str]
) -> Iterator[str]:
    """What tells that a scheduler is here."""
    for process in processes:
        if process.name in scheduler.processes and not process.zombie:
            yield f"process {process.pid} ({process.name})"
    for path in scheduler.paths:
        with contextlib.suppress(OSError):
            (root / path).lstat()
            yield f"/{path}"
    yield from (f"the variable {name}" for name in scheduler.variables if environ.get(name))


def _unanswered(before: Reading, unseen: str) -> Reading:
    """The reading of a scheduler that does not answer now and answered `before`."""
    remembered = before.remembered if before.workloads is None else before.workloads
    return dataclasses.replace(before, workloads=None, unseen=unseen, remembered=remembered, ended=())


def _complain(name: str, future: asyncio.Future[Any]) -> None:
    """Log the exception of a reader, which must raise none; its scheduler counts as not answering."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("look at %s: %s: %s", name, type(error).__name__, error, exc_info=error)
