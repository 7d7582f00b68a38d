"""The running jobs of the fleet by the steps that their nodes tell, and who is slow in them by its own time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from checks.contract import Finding, Measurement, Status
from checks.limits import quantity
from healthd.aggregator.fleet.job_records import SlowNodeRow, SteppingJob
from healthd.core.model import StepBlock
from healthd.integrations.steps.blocks import Block
from healthd.integrations.steps.datagram import MAX_JOB_CHARACTERS
from healthd.integrations.steps.detector import SlowRank
from healthd.integrations.steps.over_nodes import JobOverNodes, are_bounded

log = logging.getLogger(__name__)

CHECK = "job_steps"
MOST_NEWS = 1000
MOST_JOBS = 4096
MOST_JOBS_OF_NODE = 4
"""Of those that a node tells, the latest: no node can take the room of all."""
MOST_BLOCKS = 16
"""Of one sync: four jobs with four blocks each."""
MOST_AT_ONCE = 64
"""Nodes of a block that is judged on the event loop."""
FORGET_SECONDS = 600.0
"""A job of which nothing was told for so long is over."""


@dataclass(frozen=True, kw_only=True)
class SlowNode:
    """A node that is slow in a job by its own time; `ranks` are those of the job that it has."""

    job: str
    node: str
    ranks: tuple[int, ...]
    slow: SlowRank
    nodes: int

    @property
    def message(self) -> str:
        """For people."""
        found = self.slow
        many = f"s {self.ranks[0]} to {self.ranks[-1]}" if len(self.ranks) > 1 else f" {self.ranks[0]}"
        own = f"the median of its rank{many} works" if len(self.ranks) > 1 else f"its rank{many} works"
        since = "for as long as it has been observed" if found.since_step is None else f"since step {found.since_step}"
        return (
            f"job {self.job}: {own} {quantity('x_seconds', found.own_seconds)} in each step (own time), the other "
            f"nodes {quantity('x_seconds', found.peers_seconds)}: {100 * found.excess_ratio:.3g} % longer in "
            f"{found.windows} of the last {found.of_windows} windows over {self.nodes} nodes, {since}"
        )

    @property
    def row(self) -> SlowNodeRow:
        """As the API lists it."""
        return SlowNodeRow(
            job=self.job,
            node=self.node,
            ranks=self.ranks,
            own_seconds=self.slow.own_seconds,
            peers_seconds=self.slow.peers_seconds,
            message=self.message,
        )

    def finding(self, devices: Sequence[str]) -> Finding:
        """As a finding of the check `job_steps`; `devices` are what ranks run on there, as far as that is known."""
        on = f", on {devices[0]}" if len(devices) == len(self.ranks) == 1 else ""
        own = self.slow.own_seconds
        measured = Measurement(name="job_rank_own_seconds", value=own, lower=None, upper=None, origin="none")
        return Finding(
            status=Status.WARN,
            reason="SlowRank",
            message=self.message + on,
            target=f"rank:{self.ranks[0]}" if len(self.ranks) == 1 else "node",
            measurements=(measured,),
        )


class JobComparison:
    """A `healthd.aggregator.fleet.running_jobs.JobComparison`."""

    most_of_node = MOST_JOBS_OF_NODE

    def __init__(self, clock: Callable[[], float]) -> None:
        self.news: deque[tuple[str, str]] = deque(maxlen=MOST_NEWS)
        self._clock = clock
        self._jobs: dict[str, JobOverNodes] = {}
        self._heard: dict[str, float] = {}
        self._due: dict[str, None] = {}
        self._slow: dict[str, dict[str, SlowNode]] = {}
        self._told: dict[str, dict[str, None]] = {}
        """The jobs of each node, the latest last."""
        self._tellers: dict[str, set[str]] = {}
        """The nodes of each job."""
        self._ended: set[str] = set()
        """Nodes of which something else is to be said because a job was dropped."""
        self.left_out = 0
        """Blocks that were not taken in for want of room, since the start."""

    @property
    def jobs(self) -> Mapping[str, JobOverNodes]:
        """By name."""
        return self._jobs

    @property
    def slow(self) -> tuple[SlowNode, ...]:
        """Who is slow now, by job and node."""
        return tuple(sorted((x for one in self._slow.values() for x in one.values()), key=lambda x: (x.job, x.node)))

    @property
    def slow_nodes(self) -> frozenset[str]:
        """The nodes that are slow in a job now."""
        return frozenset(node for some in self._slow.values() for node in some)

    def shown(self, most: int) -> tuple[tuple[SteppingJob, ...], tuple[SlowNodeRow, ...]]:
        """The first jobs and the first slow nodes, by name."""
        jobs = tuple(
            SteppingJob(job=name, nodes=len(job.ranks), ranks=job.size, step_seconds=job.step_seconds)
            for name, job in sorted(self._jobs.items())[:most]
        )
        return jobs, tuple(one.row for one in self.slow[:most])

    def put(self, node: str, blocks: tuple[StepBlock, ...]) -> None:
        """Take in what a node tells; what is no block of steps, or of a job too many, is left out."""
        self.left_out += max(0, len(blocks) - MOST_BLOCKS)
        for one in blocks[:MOST_BLOCKS]:
            named = 0 < len(one.job) <= MAX_JOB_CHARACTERS and one.job.isprintable() and one.job.isascii()
            if not named or not are_bounded(one.own_seconds, one.ranks) or not 0 <= one.first_step < 1 << 62:
                continue
            job = self._joined(node, one)
            if job is None:
                self.left_out += 1
                continue
            self._heard[one.job] = self._clock()
            block = Block(first_step=one.first_step, own_seconds=one.own_seconds, ranks=one.ranks)
            if job.put(node, block, one.size):
                self._due[one.job] = None

    def _joined(self, node: str, block: StepBlock) -> JobOverNodes | None:
        """The job of a block, with the node among those that tell it; None where there is no room for another job."""
        told = self._told.get(node, {})
        if block.job not in told and len(told) >= MOST_JOBS_OF_NODE:
            oldest = next(iter(told))
            self._ended |= self._leave(node, oldest)
        job = self._jobs.get(block.job)
        if job is None:
            if len(self._jobs) >= MOST_JOBS:
                return None
            job = self._jobs[block.job] = JobOverNodes(block.size)
            self._tellers[block.job] = set()
        told = self._told.setdefault(node, {})
        told.pop(block.job, None)
        told[block.job] = None
        self._tellers[block.job].add(node)
        return job

    def keep(self, node: str, jobs: Collection[str]) -> set[str]:
        """A node says which jobs it has: it leaves all others. Returns as `judge`."""
        changed = set[str]()
        for job in [one for one in self._told.get(node, ()) if one not in jobs]:
            changed |= self._leave(node, job)
        return changed

    def _leave(self, node: str, job: str) -> set[str]:
        if self._tellers[job] == {node}:
            return self._end(job)
        self._tellers[job].discard(node)
        del self._told[node][job]
        if not self._told[node]:
            del self._told[node]
        return self._replace(job, {who: one for who, one in self._slow.get(job, {}).items() if who != node})

    def _end(self, job: str) -> set[str]:
        for node in self._tellers.pop(job):
            del self._told[node][job]
            if not self._told[node]:
                del self._told[node]
        del self._jobs[job], self._heard[job]
        self._due.pop(job, None)
        return self._replace(job, {})

    async def judge(self) -> set[str]:
        """Judge what is due. Returns the nodes of which something else is to be said now."""
        changed, self._ended = self._ended, set()
        due, self._due = list(self._due), {}
        for name in due:
            try:
                changed |= await self._judge(name)
            except Exception:  # the other jobs, and what comes after this one, are not to suffer
                log.exception("the steps of job %s could not be compared", name)
        return changed

    async def _judge(self, name: str) -> set[str]:
        job = self._jobs.get(name)
        while job is not None and (due := job.take()) is not None:
            # A block over a thousand nodes takes a tenth of a second.
            judged = await asyncio.to_thread(due.judge) if len(due.nodes) > MOST_AT_ONCE else due.judge()
            job.store(due, judged)
            await asyncio.sleep(0)  # others have their turn between two blocks
        if job is None or self._jobs.get(name) is not job:
            return set()  # it is over
        slow = {
            node: SlowNode(job=name, node=node, ranks=job.ranks[node], slow=one, nodes=len(job.ranks))
            for node, one in job.slow.items()
            if node in self._tellers[name]
        }
        return self._replace(name, slow)

    def _replace(self, job: str, slow: dict[str, SlowNode]) -> set[str]:
        before = self._slow.pop(job, {})
        if slow:
            self._slow[job] = slow
        self.news.extend((node, one.message) for node, one in slow.items() if node not in before)
        self.news.extend((node, "") for node in before if node not in slow)
        return before.keys() | slow.keys()

    def forget_old(self) -> set[str]:
        """Drop jobs that are over. Returns as `judge`."""
        now, changed = self._clock(), set[str]()
        for job in [job for job, heard in self._heard.items() if now - heard > FORGET_SECONDS]:
            changed |= self._end(job)
        return changed

    def findings(self, node: str, devices: Callable[[], Sequence[str]]) -> Mapping[str, tuple[Finding, ...]]:
        """What is to be said of a node, by check; `devices` gives what its ranks run on."""
        slow = [some[node] for some in self._slow.values() if node in some]
        return {CHECK: tuple(one.finding(devices()) for one in slow)} if slow else {}
