"""The judge of each collective, by name: for callers that compare ranks of several nodes without knowing the check."""

from __future__ import annotations

import functools

from checks.collective.judge import judge_ranks
from checks.collective.training.judge import judge_data_parallel
from checks.contract import Judge
from checks.discover import builtin_checks


@functools.cache
def judge_of(name: str) -> Judge:
    """The check's own; one that does not come with healthd is judged as all_reduce is."""
    found = builtin_checks(("checks.collective",)).get(name)
    return found.judge if found is not None and found.judge is not None else functools.partial(judge_ranks, name)


def judges_training(name: str) -> bool:
    """Whether the check's ranks tell of training steps besides."""
    judge = judge_of(name)
    return isinstance(judge, functools.partial) and judge.func is judge_data_parallel
