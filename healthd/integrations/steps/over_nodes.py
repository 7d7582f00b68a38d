"""The nodes of one job compared by the detector of ranks: which is slow by its own time. Pure but for its memory."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from healthd.integrations.steps.blocks import BLOCK_STEPS, LEAST_KNOWN_STEPS, Block
from healthd.integrations.steps.datagram import StepReport
from healthd.integrations.steps.detector import TURNS_WINDOWS, SlowRank, Window, find_slow, judge_window

MOST_OPEN = 4
"""Blocks that wait for nodes which have not told theirs yet."""
MOST_NODES = 4096
"""Of one job; more are not compared."""
_BEGAN_AGAIN_STEPS = 8 * BLOCK_STEPS


class JobOverNodes:
    """
    One job. On one thread, but for `Due.judge`, which may be done in another: it reads nothing that `put` changes.

    `slow` are those that are slow by the last block that was judged, by node.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        """Ranks of the job: the most that a node has told since it began."""
        self.slow: Mapping[str, SlowRank] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}
        """Of each node that was judged last."""
        self.step_seconds: float | None = None
        """What a step took of the slowest node's own time, in the last block; None before the first."""
        self._windows: deque[Window] = deque(maxlen=TURNS_WINDOWS)
        self._open: dict[int, dict[str, Block]] = {}
        self._judged = -1
        self._beginnings = 0

    @property
    def windows(self) -> int:
        """How many blocks are remembered."""
        return len(self._windows)

    def put(self, node: str, block: Block, size: int = 0) -> bool:
        """Take in what a node tells, of the job and of its `size`; whether there is a block to be judged."""
        if block.first_step <= self._judged:
            if self._judged - block.first_step < _BEGAN_AGAIN_STEPS:
                return False  # told twice, or too late
            self._windows.clear()
            self._open.clear()
            self.slow, self._judged, self.size = {}, -1, size or self.size
            self._beginnings += 1
        self.size = max(self.size, size)
        nodes = self._open.setdefault(block.first_step, {})
        if len(self._open) > 2 * MOST_OPEN:
            del self._open[min(self._open)]  # whoever judges is too busy for all of them
        if node in nodes or len(nodes) < MOST_NODES:
            nodes[node] = block
        return self._next() is not None

    def _next(self) -> int | None:
        """The oldest block that all ranks have told, or that the others have left behind."""
        for first in sorted(self._open):
            told = sum(len(block.ranks) for block in self._open[first].values())
            if told >= self.size or len(self._open) > MOST_OPEN:
                return first
        return None

    def judge(self) -> bool:
        """Judge the next block, if there is one; whether there was."""
        due = self.take()
        if due is not None:
            self.store(due, due.judge())
        return due is not None

    def take(self) -> Due | None:
        """The next block that can be judged, which is no longer here then; None: there is none."""
        first = self._next()
        if first is None:
            return None
        nodes = self._open.pop(first)
        for older in [one for one in self._open if one < first]:
            del self._open[older]
        self._judged = first
        return Due(nodes, tuple(self._windows), self._beginnings)

    def store(self, due: Due, judged: Judged | None) -> None:
        """Keep what came of a block; nothing where the job has begun again since it was taken."""
        if due.beginnings != self._beginnings:
            return
        if judged is None:
            if due.nodes.keys() != self.ranks.keys():
                self.slow = {}  # found in comparison with nodes that are not in the job any more
            return
        self.ranks = {node: due.nodes[node].ranks for node in sorted(due.nodes)}
        self.step_seconds = judged.windows[-1].step_seconds
        self._windows = deque(judged.windows, maxlen=TURNS_WINDOWS)
        self.slow = judged.slow


@dataclass(frozen=True)
class Due:
    """A block of a job that can be judged: what each node has told, and the windows before it."""

    nodes: Mapping[str, Block]
    before: tuple[Window, ...]
    beginnings: int
    """How often the job had begun again when it was taken."""

    def judge(self) -> Judged | None:
        """Who is slow; None where too little is known. It takes 0.15 ms a node."""
        window = _window_of(self.nodes)
        if window is None:
            return None
        before = self.before
        if before and before[-1].own_seconds.keys() != window.own_seconds.keys():
            before = ()  # other nodes: what was compared before was compared with others
        windows = (*before, window)[-TURNS_WINDOWS:]
        by_first_rank = {block.ranks[0]: node for node, block in self.nodes.items()}
        return Judged(windows, {by_first_rank[one.rank]: one for one in find_slow(list(windows))})


@dataclass(frozen=True)
class Judged:
    """What came of a block: the windows with its own, and who is slow by node."""

    windows: tuple[Window, ...]
    slow: Mapping[str, SlowRank]


def _window_of(nodes: Mapping[str, Block]) -> Window | None:
    """The window of a block, each node by its first rank; None where too few steps are known of two nodes at least."""
    blocks = {block.ranks[0]: block for block in nodes.values()}
    if len(blocks) < 2 or len(blocks) < len(nodes):  # or several claim one rank
        return None
    steps: list[dict[int, StepReport]] = []
    for i in range(BLOCK_STEPS):
        step: dict[int, StepReport] = {}
        for rank, block in blocks.items():
            own = block.own_seconds[i]
            if own is None:
                break
            step[rank] = StepReport("", rank, 0, block.first_step + i, own, 0.0, None)
        else:
            steps.append(step)
    if len(steps) < LEAST_KNOWN_STEPS // 2:
        return None
    return dataclasses.replace(judge_window(steps), wait_seconds={})


def are_bounded(own_seconds: Sequence[float | None], ranks: Sequence[int]) -> bool:
    """Whether a block that came from elsewhere is one."""
    return (
        len(own_seconds) == BLOCK_STEPS
        and 0 < len(ranks) <= 64
        and all(0 <= rank < 1 << 20 for rank in ranks)
        and all(own is None or 0 <= own <= 86400.0 for own in own_seconds)
    )
