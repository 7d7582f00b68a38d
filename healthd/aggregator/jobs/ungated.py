"""
Jobs that run on nodes of this fleet although the hook of their scheduler asked no gate for them: it could not run, or
not ask.

A hook that cannot run says nothing to anybody, and in observe mode its exit code changes nothing: what shows it is the
job that the nodes see, and that this aggregator was never asked about.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from healthd.core.config import record_at
from healthd.core.errors import HealthdError
from healthd.core.model import NodeState
from healthd.integrations import INTEGRATIONS

UNGATED = (
    "Slurm jobs that nodes observed and for which no gate was requested within a minute: their hook did not run or "
    "could not ask."
)
"""The metric `healthd_jobs_ungated`."""
MOST_REMEMBERED = 50_000
"""Jobs that are not looked for again; more than a large cluster starts in a day."""
MOST_WAITING = 1000
MOST_EXAMPLES = 5
RETRY_SECONDS = 5.0
GRACE_SECONDS = 60.0
"""A node may see a job before its hook has asked, or before the gate is on disk: only later is its absence a fact."""


@dataclass(frozen=True, kw_only=True)
class UngatedFigure:
    """How many such jobs were seen since `since` (seconds since the epoch: the aggregator's start), and the newest."""

    jobs: int
    since: float
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HookedJob:
    """A job for which the hook of its scheduler asks a gate; `gate` is what that one is called."""

    id: str
    gate: str


Hooked = Callable[[str], HookedJob | None]
"""The job that a workload is; None where no hook asks a gate for it."""


@functools.cache
def _integrated() -> tuple[Hooked, ...]:
    return tuple(record_at(one.hooked_job) for one in INTEGRATIONS if one.hooked_job is not None)


def hooked_job(workload: str) -> HookedJob | None:
    """By the integrations."""
    return next((job for one in _integrated() if (job := one(workload)) is not None), None)


def without_lease(state: NodeState, hooked: Hooked = hooked_job) -> tuple[HookedJob, ...]:
    """The jobs on a node that its leases do not name: those that may have had no gate."""
    leased = {lease.workload for lease in state.leases}
    seen = (claim.holder for claim in state.allocated if claim.by == "scheduler" and claim.holder not in leased)
    return tuple(job for job in map(hooked, seen) if job is not None)


class UngatedJobs:
    """
    Counts them. `gated` says whether a gate was ever asked under a name; HealthdError where that cannot be told.

    A job is looked up once, when `grace_seconds` have passed by `clock` since a node first told of it.
    """

    def __init__(
        self,
        gated: Callable[[str], Awaitable[bool]],
        *,
        clock: Callable[[], float],
        grace_seconds: float = GRACE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        hooked: Hooked = hooked_job,
    ) -> None:
        self._gated = gated
        self._hooked = hooked
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._retry_seconds = retry_seconds
        self._since = clock()
        self._jobs = 0
        self._examples: deque[str] = deque(maxlen=MOST_EXAMPLES)
        self._judged: OrderedDict[HookedJob, None] = OrderedDict()
        self._waiting: OrderedDict[HookedJob, float] = OrderedDict()  # since when, the oldest first
        self._news = asyncio.Event()

    @property
    def figure(self) -> UngatedFigure:
        """What was counted up to now."""
        return UngatedFigure(jobs=self._jobs, since=self._since, examples=tuple(reversed(self._examples)))

    def see(self, state: NodeState) -> None:
        """Take in what a node says; whether its jobs had a gate is looked up by `run`."""
        for job in without_lease(state, self._hooked):
            if job not in self._judged and job not in self._waiting and len(self._waiting) < MOST_WAITING:
                self._waiting[job] = self._clock()
                self._news.set()

    async def run(self) -> None:
        """Look up each job once, for ever. May be started again."""
        while True:
            while self._waiting:
                job, since = next(iter(self._waiting.items()))
                if (left := since + self._grace_seconds - self._clock()) > 0:
                    await asyncio.sleep(min(left, self._retry_seconds))
                    continue
                try:
                    gated = await self._gated(job.gate)
                except HealthdError:
                    await asyncio.sleep(self._retry_seconds)  # the store has said already what is wrong with it
                    continue
                except Exception:
                    del self._waiting[job]  # the others go on after the restart; the node tells of this one again
                    raise
                del self._waiting[job]
                self._judged[job] = None
                while len(self._judged) > MOST_REMEMBERED:
                    self._judged.popitem(last=False)
                if not gated:
                    self._jobs += 1
                    self._examples.append(job.id)
            await self._news.wait()
            self._news.clear()
