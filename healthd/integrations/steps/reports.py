"""
The Unix socket that ranks of jobs report their steps to, and the jobs by these reports.

Any process of the host may write there: so all is bounded, and what it leads to is a warning at most. What is known of
the jobs is written to a file in the run directory, which the check `job_steps` reads.

A job is over when all of its ranks on this node have ended: their processes, by what the kernel says of them, or their
reports, by what they say. Where neither is to be seen (a killed rank in a container of its own) it is over when it has
been silent for `FORGET_SECONDS`. What was known of it goes then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from checks.atomic_file import write_atomically
from healthd.core.model import StepBlock
from healthd.integrations.steps.datagram import MAX_BYTES, RankEnd, parse, parse_end
from healthd.integrations.steps.detector import JobSteps
from healthd.integrations.steps.settings import StepSettings
from healthd.node.clock import Clock
from healthd.node.settings import NodeSettings

log = logging.getLogger(__name__)

SOCKET, FILE = "steps.sock", "steps.json"
MAX_JOBS = 4
MAX_RANKS = 64
"""Of a job on this node: a node of 32 logical cores has as many ranks."""
FORGET_SECONDS = 300.0
"""A job that has said nothing for so long is over; the check takes it for over after as long."""
SPACING_SECONDS = 25.0
WRITE_SECONDS = 5.0
"""The file is written at most this often."""
MAX_RANK_SERIES = 8  # of all jobs together: a node of 32 cores has 500 series at most
_BURST = 256  # datagrams read at once, before others have their turn
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group; process 0 is in no namespace that we see


class StepReports:
    """The jobs that report to this node; used on the event loop alone."""

    def __init__(
        self,
        run_dir: Path,
        *,
        boot_seconds: Callable[[], float],
        spacing_seconds: float = SPACING_SECONDS,
        on: bool = True,
    ) -> None:
        """
        `boot_seconds` is CLOCK_BOOTTIME; `spacing_seconds` is how often the aggregator gets a block of a job's steps.
        """
        self._spacing_seconds = spacing_seconds
        self._on = on
        self._sizes: dict[str, int] = {}
        self.path = run_dir / SOCKET
        self._file = run_dir / FILE
        self._boot_seconds = boot_seconds
        self._jobs: dict[str, JobSteps] = {}
        self._heard: dict[str, float] = {}
        self._ranks: dict[str, set[int]] = {}
        self._senders: dict[str, set[tuple[int, int]]] = {}
        """(process, rank) of each job; process 0: not known."""
        self._processes: dict[int, int] = {}
        """The descriptor by which the end of a process is seen."""
        self._gone: set[int] = set()
        self._news = asyncio.Event()
        self._written_at = -WRITE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self.refused = 0
        """Datagrams that are no report, or of more jobs or ranks than are followed."""

    @property
    def on(self) -> bool:
        """Whether jobs may report."""
        return self._on

    @property
    def jobs(self) -> Mapping[str, JobSteps]:
        """By name."""
        return self._jobs

    def take(self, data: bytes, process: int = 0) -> bool:
        """
        Take in one datagram; whether it changes what is known of a job that is followed.

        `process` sent it; 0: not known.
        """
        report = parse(data)
        if report is None and (end := parse_end(data)) is not None:
            return self._end_rank(end, process)
        if report is None:
            self.refused += 1
            return False
        now = self._boot_seconds()
        if report.job not in self._jobs:
            self._forget(now)
            if len(self._jobs) >= MAX_JOBS:
                self.refused += 1
                return False
            self._jobs[report.job], self._ranks[report.job] = JobSteps(self._spacing_seconds), set()
            self._senders[report.job] = set()
        ranks = self._ranks[report.job]
        if report.rank not in ranks and len(ranks) >= MAX_RANKS:
            ranks &= self._jobs[report.job].ranks  # those of an earlier placement of the job are gone
        if report.rank not in ranks and len(ranks) >= MAX_RANKS:
            self.refused += 1
            return False
        ranks.add(report.rank)
        self._heard[report.job], self._sizes[report.job] = now, report.size
        self._jobs[report.job].add(report)
        senders = self._senders[report.job]
        if len(senders) < MAX_RANKS:  # more are not followed: their job may end before them, and then begins anew
            senders.add((process, report.rank))
        return True

    # --- the end of a job ---------------------------------------------------------------------------------------------

    def _end_rank(self, end: RankEnd, process: int) -> bool:
        """A rank says that it is done: only its own process can say so."""
        if (process, end.rank) not in self._senders.get(end.job, ()):
            return False
        return self._end_senders(end.job, {(process, end.rank)})

    def _end_process(self, process: int) -> bool:
        """A process has ended. Whether a job has ended with it."""
        os.close(self._processes.pop(process))
        ended = [
            self._end_senders(job, {one for one in senders if one[0] == process})
            for job, senders in list(self._senders.items())
        ]
        return any(ended)

    def _end_senders(self, job: str, ended: set[tuple[int, int]]) -> bool:
        self._senders[job] -= ended
        over = bool(ended) and not self._senders[job]
        if over:
            self._drop(job)
        return over

    def _forget(self, now: float) -> None:
        for job in [job for job, heard in self._heard.items() if now - heard > FORGET_SECONDS]:
            self._drop(job)

    def _drop(self, job: str) -> None:
        del self._jobs[job], self._heard[job], self._ranks[job], self._sizes[job], self._senders[job]
        self._unfollow()

    def _follow(self, process: int) -> None:
        """See the end of a process that reports for a job."""
        if process == 0 or process in self._processes:
            return
        try:
            descriptor = os.pidfd_open(process)
        except OSError:  # it has ended already, or there are no descriptors: its silence tells
            return
        self._processes[process] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._see_end, process)

    def _see_end(self, process: int) -> None:
        asyncio.get_running_loop().remove_reader(self._processes[process])
        self._gone.add(process)  # what it has sent before is read first
        self._news.set()

    def _unfollow(self) -> None:
        """Look no longer at processes that report for no job any more."""
        wanted = {process for senders in self._senders.values() for process, _ in senders}
        for process in [one for one in self._processes if one not in wanted]:
            asyncio.get_running_loop().remove_reader(self._processes[process])
            os.close(self._processes.pop(process))
            self._gone.discard(process)

    # --- for the comparison over nodes --------------------------------------------------------------------------------

    def waiting(self) -> tuple[StepBlock, ...]:
        """The blocks of steps that the aggregator has not been told."""
        return tuple(
            StepBlock(
                job=job,
                size=self._sizes[job],
                ranks=block.ranks,
                first_step=block.first_step,
                own_seconds=block.own_seconds,
            )
            for job, steps in self._jobs.items()
            for block in steps.blocks.waiting
        )

    def told(self, blocks: tuple[StepBlock, ...]) -> None:
        """The aggregator has been told these."""
        for one in blocks:
            waiting = self._jobs[one.job].blocks.waiting if one.job in self._jobs else ()
            for block in [block for block in waiting if block.first_step == one.first_step]:
                self._jobs[one.job].blocks.waiting.remove(block)

    def metrics(self) -> Iterator[Metric]:
        """The time of each job's steps, and that of the first ranks, as many as have series."""
        step = GaugeMetricFamily(
            "healthd_job_step_seconds", "Median time of a job's step in the last window.", labels=["job"]
        )
        own = GaugeMetricFamily(
            "healthd_job_rank_own_seconds",
            "Median of a rank's own time in a step in the last window, without waiting.",
            labels=["job", "rank"],
        )
        left = MAX_RANK_SERIES
        for job, steps in sorted(self._jobs.items()):
            if steps.windows:
                last = steps.windows[-1]
                step.add_metric([job], last.step_seconds)
                shown = sorted(last.own_seconds.items())[:left]
                left -= len(shown)
                for rank, seconds in shown:
                    own.add_metric([job, str(rank)], seconds)
        yield from (step, own)

    # --- the tasks ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read reports for ever, and write what they come to."""
        with self._bound() as bound:
            if bound is None:
                await asyncio.Event().wait()  # the reason has been logged; the node does without
                return
            loop = asyncio.get_running_loop()
            loop.add_reader(bound, self._news.set)
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FORGET_SECONDS if self._jobs else None):
                        await self._news.wait()
                silent = not self._news.is_set()
                self._news.clear()
                changed = self._read(bound)
                while self._gone:
                    changed = self._end_process(self._gone.pop()) or changed
                if silent:
                    self.write()  # no job reports any more
                elif changed:
                    self._write_soon(loop)
                await asyncio.sleep(0)

    def _read(self, bound: socket.socket) -> bool:
        """Read what has come, up to a bound. Whether it changes what is known of a job."""
        changed = False
        for _ in range(_BURST):
            try:
                data, ancillary, _, _ = bound.recvmsg(MAX_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            process = next(
                (
                    _CREDENTIALS.unpack(told)[0]
                    for level, kind, told in ancillary
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
                ),
                0,
            )
            if self.take(data, process):
                changed = True
                self._follow(process)
        return changed

    def _write_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write the file now, or where it was written just now, a little later."""
        if self._timer is None:
            pause = self._written_at + WRITE_SECONDS - self._boot_seconds()
            self._timer = loop.call_later(max(0.0, pause), self.write)

    def write(self) -> None:
        """Write the file."""
        self._timer = None
        now = self._written_at = self._boot_seconds()
        self._forget(now)
        text = json.dumps({"boot_seconds": now, "jobs": [self._shown(job, now) for job in sorted(self._jobs)]})
        try:
            write_atomically(self._file, text.encode())
        except OSError as error:
            log.warning("%s: the steps of jobs cannot be recorded there: %s", self._file, error.strerror or error)

    def _shown(self, job: str, now: float) -> dict[str, Any]:
        steps = self._jobs[job]
        last = steps.windows[-1] if steps.windows else None
        return {
            "job": job,
            "heard_seconds": now - self._heard[job],
            "step": last.last_step if last else None,
            "step_seconds": last.step_seconds if last else None,
            "own_seconds": {str(rank): value for rank, value in sorted(last.own_seconds.items())} if last else {},
            "wait_seconds": {str(rank): value for rank, value in sorted(last.wait_seconds.items())} if last else {},
            "slow": [
                {
                    "rank": one.rank,
                    "own_seconds": one.own_seconds,
                    "peers_seconds": one.peers_seconds,
                    "excess_ratio": one.excess_ratio,
                    "windows": one.windows,
                    "of_windows": one.of_windows,
                    "since_step": one.since_step,
                }
                for one in steps.slow
            ],
        }

    @contextlib.contextmanager
    def _bound(self) -> Iterator[socket.socket | None]:
        """The socket, which any user of the host may write to; None where it cannot be made."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.path.unlink(missing_ok=True)  # the control socket has made sure that no other daemon is here
            sock.bind(str(self.path))
            os.chmod(self.path, 0o666)  # noqa: S103  the jobs of all users
        except OSError as error:
            sock.close()
            log.warning("%s: jobs cannot report their steps: %s", self.path, error)
            yield None
            return
        try:
            yield sock
        finally:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
            for senders in self._senders.values():
                senders.clear()
            self._unfollow()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for path in (self.path, self._file):
                path.unlink(missing_ok=True)


def source(settings: NodeSettings, clock: Clock) -> StepReports:
    """The reports to a daemon."""
    return StepReports(
        settings.run_dir,
        boot_seconds=clock.boot,
        spacing_seconds=settings.sync.wait_seconds,
        on=settings.of("step", StepSettings).reports,
    )


def check_params(settings: NodeSettings) -> Mapping[str, Mapping[str, Any]]:
    """Where the check `job_steps` finds what this daemon has written."""
    return {"job_steps": {"file": str(settings.run_dir.absolute() / FILE)}}
