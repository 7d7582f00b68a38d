"""The comparison of the nodes of running jobs, which an integration makes from what the nodes tell of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from checks.contract import Finding
from healthd.aggregator.fleet.job_records import SlowNodeRow, SteppingJob
from healthd.core.config import record_at
from healthd.core.model import StepBlock
from healthd.integrations import INTEGRATIONS


class JobComparison(Protocol):
    """
    Which nodes are slow in a job. On the event loop alone; methods that return a set give the nodes of which
    something else is to be said now.
    """

    most_of_node: int
    """Jobs that one node may tell."""
    news: deque[tuple[str, str]]
    """(node, message) of what has changed lately; an empty message: slow no more."""
    left_out: int
    """Blocks that were not taken in for want of room, since the start."""

    @property
    def jobs(self) -> Collection[str]:
        """The jobs that are compared."""

    @property
    def slow_nodes(self) -> Collection[str]:
        """The nodes that are slow in a job now."""

    def shown(self, most: int) -> tuple[tuple[SteppingJob, ...], tuple[SlowNodeRow, ...]]:
        """The first jobs and the first slow nodes, by name."""

    def put(self, node: str, blocks: tuple[StepBlock, ...]) -> None:
        """Take in what a node tells; what is no block of steps, or of a job too many, is left out."""

    def keep(self, node: str, jobs: Collection[str]) -> set[str]:
        """A node says which jobs it has: it leaves all others."""

    async def judge(self) -> set[str]:
        """Judge what is due."""

    def forget_old(self) -> set[str]:
        """Drop jobs that are over."""

    def findings(self, node: str, devices: Callable[[], Sequence[str]]) -> Mapping[str, tuple[Finding, ...]]:
        """What is to be said of a node, by check; `devices` gives what its ranks run on."""


class NoComparison:
    """Where no integration compares running jobs."""

    jobs: Collection[str] = ()
    slow_nodes: Collection[str] = ()
    most_of_node = left_out = 0

    def __init__(self) -> None:
        self.news: deque[tuple[str, str]] = deque()

    def shown(self, most: int) -> tuple[tuple[SteppingJob, ...], tuple[SlowNodeRow, ...]]:
        return (), ()

    def put(self, node: str, blocks: tuple[StepBlock, ...]) -> None:
        return

    def keep(self, node: str, jobs: Collection[str]) -> set[str]:
        return set()

    async def judge(self) -> set[str]:
        return set()

    def forget_old(self) -> set[str]:
        return set()

    def findings(self, node: str, devices: Callable[[], Sequence[str]]) -> Mapping[str, tuple[Finding, ...]]:
        return {}


def job_comparison(clock: Callable[[], float]) -> JobComparison:
    """The comparison of an aggregator."""
    for one in INTEGRATIONS:
        if one.job_comparison is not None:
            make: Callable[[Callable[[], float]], JobComparison] = record_at(one.job_comparison)
            return make(clock)
    return NoComparison()
