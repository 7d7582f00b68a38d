"""
What nodes show of each other: by digests of fixed work (`digests`), and by the steps of the jobs that they run (an
integration). It becomes findings on their records.

On the event loop alone. Devices that are slow when they are tested are found in `slow`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from healthd.aggregator.fleet.digests import MOST_OF_NODE, DigestComparison
from healthd.aggregator.fleet.node_record import NodeRecord
from healthd.aggregator.fleet.running_jobs import job_comparison
from healthd.core.model import NodeState, StepBlock

log = logging.getLogger(__name__)

AT_ONCE = 200
"""Records that are changed before the node is answered; each takes some tens of microseconds."""
TURN_SECONDS = 0.1
SWEEP_SECONDS = 60.0
SILENT_SECONDS = 86400.0
"""A node that was silent for so long, such as a terminated machine, has no vote. It has one again when it speaks."""


class PeerFindings:
    """See the module. `records` are those of the roster, `notify` says that a node's evidence is another."""

    def __init__(
        self, records: Mapping[str, NodeRecord], notify: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.digests = DigestComparison()
        self.jobs = job_comparison(clock)
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
                self.jobs.most_of_node,
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
