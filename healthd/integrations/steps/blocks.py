"""What a node tells of a job's steps for the comparison over nodes: blocks, the same ones on every node. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from healthd.integrations.steps.datagram import StepReport

BLOCK_STEPS = 50
"""As many as the windows of the detector have at least."""
LEAST_SECONDS = 1.0
"""A block that took less is not told: the scatter of steps of a millisecond is the scheduler's."""
LEAST_KNOWN_STEPS = 40
"""Datagrams get lost; of a block with fewer steps too little is known."""
MOST_WAITING = 4
"""Blocks of a job that wait to be told; the oldest go."""
_LATE_STEPS = 10  # a block is closed when the job is so many steps beyond it


@dataclass(frozen=True)
class Block:
    """Own seconds of each step (for each unit of work, where work is told) from `first_step` on; None: not known."""

    first_step: int
    own_seconds: tuple[float | None, ...]
    ranks: tuple[int, ...]


class Blocks:
    """The blocks of one job. `spacing_seconds` is how far apart those are that are told."""

    def __init__(self, spacing_seconds: float) -> None:
        self.waiting: deque[Block] = deque(maxlen=MOST_WAITING)
        self._spacing_seconds = spacing_seconds
        self._open: dict[int, dict[int, tuple[float, float, tuple[int, ...]]]] = {}

    def add(self, number: int, step: Mapping[int, StepReport]) -> None:
        """Take in a step that all ranks of the node have reported."""
        own = statistics.median(one.own_seconds / (one.work or 1.0) for one in step.values())
        whole = max(one.own_seconds + one.wait_seconds for one in step.values())
        newest = max(self._open, default=number // BLOCK_STEPS)
        if number // BLOCK_STEPS < newest - 1:
            self._open.clear()  # the job began again
        self._open.setdefault(number // BLOCK_STEPS, {})[number % BLOCK_STEPS] = (own, whole, tuple(sorted(step)))
        for block in sorted(self._open):
            if number >= (block + 1) * BLOCK_STEPS + _LATE_STEPS:
                self._close(block, self._open.pop(block))

    def _close(self, block: int, steps: Mapping[int, tuple[float, float, tuple[int, ...]]]) -> None:
        ranks = {ranks for _, _, ranks in steps.values()}
        if len(steps) < LEAST_KNOWN_STEPS or len(ranks) != 1:
            return
        seconds = sum(whole for _, whole, _ in steps.values()) * BLOCK_STEPS / len(steps)
        # Every node leaves out the same blocks, also where one is told to take twice the others' stride.
        stride = 1 << max(0, math.ceil(math.log2(self._spacing_seconds / max(seconds, 1e-9))))
        if seconds < LEAST_SECONDS or block % stride:
            return
        own = tuple(float(f"{steps[i][0]:.4g}") if i in steps else None for i in range(BLOCK_STEPS))
        self.waiting.append(Block(first_step=block * BLOCK_STEPS, own_seconds=own, ranks=next(iter(ranks))))
