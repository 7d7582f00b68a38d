"""What the tests of detector, and those beside them, are made with."""

from __future__ import annotations

import random
from collections.abc import Callable

from healthd.integrations.steps.detector import WINDOW_STEPS

STEP_SECONDS = 0.2


Own = Callable[[int, int], float]  # (step, rank) -> own seconds


def noisy(chance: random.Random, scatter: float = 0.01) -> Own:
    return lambda step, rank: STEP_SECONDS * chance.lognormvariate(0, scatter)


def by_length(chance: random.Random, ranks: int) -> Own:
    """Sequences of any length: each step of each rank takes from half to twice the time."""
    return lambda step, rank: STEP_SECONDS * chance.uniform(0.5, 2)


def by_blocks(chance: random.Random, ranks: int) -> Own:
    """For some dozens of steps one rank has the long data, then another one."""
    turns: list[int] = []

    def own(step: int, rank: int) -> float:
        while len(turns) <= step:
            turns.extend([chance.randrange(ranks)] * chance.randint(5, 60))
        return STEP_SECONDS * (1.3 if turns[step] == rank else 1) * chance.lognormvariate(0, 0.02)

    return own


def by_turns(chance: random.Random, ranks: int) -> Own:
    """The same, strictly in turns of one window or so."""
    length = chance.randint(WINDOW_STEPS // 2, 2 * WINDOW_STEPS)
    return lambda step, rank: STEP_SECONDS * (1.2 if step // length % ranks == rank else 1) * chance.uniform(0.99, 1.01)


def by_drift(chance: random.Random, ranks: int) -> Own:
    """Each rank's share wanders around the mean."""
    state = [0.0] * ranks

    def own(step: int, rank: int) -> float:
        state[rank] = 0.9 * state[rank] + chance.gauss(0, 0.05)
        return STEP_SECONDS * max(0.2, 1 + state[rank])

    return own
