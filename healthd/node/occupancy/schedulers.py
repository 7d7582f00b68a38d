"""
Asks the job schedulers of this host for their allocations: finds them anew each time, asks all, in bounded time.

    schedulers = Schedulers(settings.allocations, host_root, clock=clock)
    scheduled = await schedulers.look()         # never raises

Each reader is a pure parser with little around it, and runs in a thread that is not waited for beyond its time limit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from healthd.core.threads import in_thread
from healthd.node.clock import Clock
from healthd.node.occupancy import ecs, kubelet, slurm
from healthd.node.occupancy.model import NO_SCHEDULERS, Reading, Scheduled, Workload
from healthd.node.occupancy.own import own_jobs
from healthd.node.occupancy.present import Present, find_schedulers
from healthd.node.occupancy.processes import Process, read_processes
from healthd.node.settings import AllocationSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

# Time beyond a reader's own before it counts as stuck: a thread may have to wait for its turn.
SLACK_SECONDS = 1.0


class Schedulers:
    """The job schedulers of one host, on the event loop alone."""

    def __init__(
        self,
        settings: AllocationSettings,
        host_root: Path | None,
        *,
        clock: Clock,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self._root = host_root or Path("/")
        self._clock = clock
        self._environ = dict(environ)
        self._own_containers = ecs.own_containers(Path("/proc"), self._environ.get("HOSTNAME"))
        self._own = kubelet.own_pods(Path("/"), self._environ) | own_jobs(Path("/proc"), self._environ)
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
            "files", lambda: find_schedulers(self._root, processes or (), self._environ), timeout
        )
        if processes is None or present is None:
            before = self._latest or NO_SCHEDULERS
            unseen = Reading(
                scheduler="", workloads=None, unseen="the host's /proc does not answer; look at the kernel log"
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
        name = present.scheduler
        if not self._settings.read:
            why = f"{present.why}, and node.allocations.read is false"
            return Reading(scheduler=name, workloads=None, unseen=why)
        timeout = self._settings.timeout_seconds
        read: dict[str, Callable[[], Reading]] = {
            kubelet.SCHEDULER: lambda: kubelet.read(self._root, self._settings.kubelet_socket, timeout),
            ecs.SCHEDULER: lambda: ecs.read(self._settings.ecs_url, self._own_containers, timeout),
            slurm.SCHEDULER: lambda: slurm.read(self._root, processes),
        }
        reading = await self._bounded(name, read[name], timeout + SLACK_SECONDS)
        if reading is None:
            why = f"{name} does not answer within {timeout:g} s"
            return Reading(scheduler=name, workloads=None, unseen=why)
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
            log.info("%s", f"allocations cannot all be seen: {text}" if text else "all allocations can be seen again")
        self._logged = text


def _unanswered(before: Reading, unseen: str) -> Reading:
    """The reading of a scheduler that does not answer now and answered `before`."""
    remembered = before.remembered if before.workloads is None else before.workloads
    return Reading(scheduler=before.scheduler, workloads=None, unseen=unseen, remembered=remembered)


def _complain(name: str, future: asyncio.Future[Any]) -> None:
    """Log the exception of a reader, which must raise none; its scheduler counts as not answering."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("look at %s: %s: %s", name, type(error).__name__, error, exc_info=error)
