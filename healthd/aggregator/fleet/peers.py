"""
What nodes show of each other: by digests of fixed work (`digests`), and by the steps of the jobs that they run. It
becomes findings on their records, and lines of their history.

On the event loop alone. Devices that are slow when they are tested are found in `slow`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from checks.contract import Finding, Measurement, Status
from checks.limits import quantity
from healthd.aggregator.fleet.digests import MOST_NEWS, MOST_OF_NODE, DigestComparison
from healthd.aggregator.fleet.node_record import NodeRecord
from healthd.core.model import NodeState, StepBlock
from healthd.steps import MAX_JOB_CHARACTERS, Block, JobOverNodes, SlowRank, are_bounded

log = logging.getLogger(__name__)

CHECK = "job_steps"
MOST_JOBS = 4096
MOST_JOBS_OF_NODE = 4
"""Of those that a node tells, the latest: no node can take the room of all."""
MOST_BLOCKS = 16
"""Of one sync: four jobs with four blocks each."""
MOST_AT_ONCE = 64
"""Nodes of a block that is judged on the event loop."""
FORGET_SECONDS = 600.0
"""A job of which nothing was told for so long is over."""

AT_ONCE = 200
"""Records that are changed before the node is answered; each takes some tens of microseconds."""
TURN_SECONDS = 0.1
SWEEP_SECONDS = 60.0
SILENT_SECONDS = 86400.0
"""A node that was silent for so long, such as a terminated machine, has no vote. It has one again when it speaks."""


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


@dataclass
class _Job:
    """A running job: when it was told of last, by which nodes, and which of them are slow in it."""

    steps: JobOverNodes
    heard_at: float
    nodes: set[str] = field(default_factory=set)
    slow: dict[str, SlowNode] = field(default_factory=dict)


class JobComparison:
    """The jobs whose steps nodes tell. `news` holds (node, message) of what has changed lately; empty: slow no more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.news: deque[tuple[str, str]] = deque(maxlen=MOST_NEWS)
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._told: dict[str, dict[str, None]] = {}
        """The jobs of each node, the latest last."""
        self._due: dict[str, None] = {}
        self._ended: set[str] = set()
        """Nodes of which something else is to be said because a job was dropped."""
        self.left_out = 0
        """Blocks that were not taken in for want of room, since the start."""

    @property
    def jobs(self) -> Mapping[str, JobOverNodes]:
        """By name."""
        return {name: job.steps for name, job in self._jobs.items()}

    @property
    def slow(self) -> tuple[SlowNode, ...]:
        """Who is slow now, by job and node."""
        found = (one for job in self._jobs.values() for one in job.slow.values())
        return tuple(sorted(found, key=lambda one: (one.job, one.node)))

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
            job.heard_at = self._clock()
            block = Block(first_step=one.first_step, own_seconds=one.own_seconds, ranks=one.ranks)
            if job.steps.put(node, block, one.size):
                self._due[one.job] = None

    def _joined(self, node: str, block: StepBlock) -> _Job | None:
        """The job of a block, with the node among those that tell it; None where there is no room for another job."""
        told = self._told.get(node, {})
        if block.job not in told and len(told) >= MOST_JOBS_OF_NODE:
            self._ended |= self._leave(node, next(iter(told)))
        job = self._jobs.get(block.job)
        if job is None:
            if len(self._jobs) >= MOST_JOBS:
                return None
            job = self._jobs[block.job] = _Job(JobOverNodes(block.size), self._clock())
        told = self._told.setdefault(node, {})
        told.pop(block.job, None)
        told[block.job] = None
        job.nodes.add(node)
        return job

    def keep(self, node: str, jobs: Collection[str]) -> set[str]:
        """A node says which jobs it has: it leaves all others. Returns as `judge`."""
        left = [one for one in self._told.get(node, ()) if one not in jobs]
        return {name for job in left for name in self._leave(node, job)}

    def _leave(self, node: str, name: str) -> set[str]:
        job = self._jobs[name]
        if job.nodes == {node}:
            return self._end(name)
        self._forget(node, name)
        job.nodes.discard(node)
        return self._replace(job, {who: one for who, one in job.slow.items() if who != node})

    def _end(self, name: str) -> set[str]:
        job = self._jobs.pop(name)
        for node in job.nodes:
            self._forget(node, name)
        self._due.pop(name, None)
        return self._replace(job, {})

    def _forget(self, node: str, name: str) -> None:
        del self._told[node][name]
        if not self._told[node]:
            del self._told[node]

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
        while job is not None and (due := job.steps.take()) is not None:
            # A block over a thousand nodes takes a tenth of a second.
            judged = await asyncio.to_thread(due.judge) if len(due.nodes) > MOST_AT_ONCE else due.judge()
            job.steps.store(due, judged)
            await asyncio.sleep(0)  # others have their turn between two blocks
        if job is None or self._jobs.get(name) is not job:
            return set()  # it is over
        ranks = job.steps.ranks
        slow = {
            node: SlowNode(job=name, node=node, ranks=ranks[node], slow=one, nodes=len(ranks))
            for node, one in job.steps.slow.items()
            if node in job.nodes
        }
        return self._replace(job, slow)

    def _replace(self, job: _Job, slow: dict[str, SlowNode]) -> set[str]:
        before, job.slow = job.slow, slow
        self.news.extend((node, one.message) for node, one in slow.items() if node not in before)
        self.news.extend((node, "") for node in before if node not in slow)
        return before.keys() | slow.keys()

    def forget_old(self) -> set[str]:
        """Drop jobs that are over. Returns as `judge`."""
        now = self._clock()
        old = [name for name, job in self._jobs.items() if now - job.heard_at > FORGET_SECONDS]
        return {node for name in old for node in self._end(name)}

    def findings(self, node: str, devices: Callable[[], Sequence[str]]) -> Mapping[str, tuple[Finding, ...]]:
        """What is to be said of a node, by check; `devices` gives what its ranks run on."""
        jobs = (self._jobs[name] for name in self._told.get(node, ()))
        slow = [job.slow[node] for job in jobs if node in job.slow]
        return {CHECK: tuple(one.finding(devices()) for one in slow)} if slow else {}


class PeerFindings:
    """See the module. `records` are those of the roster, `notify` says that a node's evidence is another."""

    def __init__(
        self, records: Mapping[str, NodeRecord], notify: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.digests = DigestComparison()
        self.jobs = JobComparison(clock)
        self._records = records
        self._notify = notify
        self._clock = clock
        self._pending: dict[str, None] = {}
        self._swept_at = clock()
        self._left_out = (0, 0)

    def take(self, node: str, state: NodeState) -> None:
        """Take in the new state of a node's daemon, which is on its record already."""
        if node not in self.digests.votes and not any(result.digests for result in state.results):
            return  # most checks give none
        changed = self.digests.put(node, state)
        if node in changed or node in self.digests.differing:
            self._apply(node)
        self._apply_soon(changed - {node})

    def take_executor(self, node: str) -> None:
        """
        A hook's executor has sent its state, which is on its line already.

        Its digests have no vote: the libraries of a job's image may give other bits under the same versions. What is
        known of the node by its daemon's digests is shown on the executor's line too.
        """
        if node in self.digests.differing:
            self._apply(node)

    def take_steps(self, node: str, blocks: tuple[StepBlock, ...]) -> None:
        """Take in the steps of running jobs that a node tells; they are judged a moment later."""
        self.jobs.put(node, blocks)

    def keep_jobs(self, node: str, jobs: tuple[str, ...]) -> None:
        """These jobs report their steps on a node; every other one is over there."""
        self._apply_soon(self.jobs.keep(node, jobs))

    def forget(self, node: str) -> None:
        """The node is gone."""
        changed = self.digests.forget(node)
        self.digests.judge(node)
        self._apply_soon(changed)

    def _apply_soon(self, nodes: set[str]) -> None:
        self._pending.update(dict.fromkeys(sorted(nodes)))
        self._work()

    def _work(self) -> None:
        for _ in range(min(AT_ONCE, len(self._pending))):
            node = next(iter(self._pending))
            del self._pending[node]
            if self._apply(node):
                self._notify(node)

    def _apply(self, node: str) -> bool:
        record = self._records.get(node)
        findings = {**self.digests.judge(node), **self.jobs.findings(node, lambda: _devices(record))}
        lines = () if record is None else (record, record.executor)
        return max((line.amend(findings) for line in lines if line is not None), default=False)  # all of them

    async def run(self) -> None:
        """Deal with what was put off, and drop the votes of nodes that are gone; for ever. Ends by cancellation."""
        while True:
            await asyncio.sleep(TURN_SECONDS)
            self._apply_soon(await self.jobs.judge())
            if self._clock() - self._swept_at >= SWEEP_SECONDS:
                self._swept_at = self._clock()
                self.sweep()
                self._apply_soon(self.jobs.forget_old())
                self._say_left_out()

    def _say_left_out(self) -> None:
        left_out = self.digests.left_out, self.jobs.left_out
        if left_out != self._left_out:
            self._left_out = left_out
            log.warning(
                "not compared between nodes since the start for lack of room: %d digests, %d blocks of steps; a node "
                "may report %d digests and %d jobs",
                *left_out,
                MOST_OF_NODE,
                MOST_JOBS_OF_NODE,
            )

    def sweep(self) -> None:
        """Drop the votes of nodes that have been silent for a day."""
        now = self._clock()
        for node in tuple(self.digests.votes):
            record = self._records.get(node)
            heard = None if record is None else record.heard_at  # the vote is the daemon's
            if heard is None or now - heard > SILENT_SECONDS:
                self._apply_soon(self.digests.forget(node) | {node})


def _devices(record: NodeRecord | None) -> tuple[str, ...]:
    """What the ranks of a node run on; empty where that is not known."""
    inventory = None if record is None or record.state is None else record.state.open().inventory
    return () if inventory is None else inventory.rank_targets
