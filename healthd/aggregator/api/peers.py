"""
The paths that compare nodes with their peers: slow devices, differing digests, slow ranks in running jobs; and the
samples from which `healthd baseline` learns limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request

from healthd.aggregator.api.handling import READ, ApiRoute, parts_of
from healthd.aggregator.fleet import DigestComparison, Standing
from healthd.aggregator.fleet.job_records import SlowNodeRow, SteppingJob
from healthd.aggregator.fleet.slow import Suspect
from healthd.baselines import SampleSeries

MOST_LISTED = 1000

router = APIRouter(prefix="/v1/fleet", route_class=ApiRoute, tags=["peers"], dependencies=[READ])


@dataclass(frozen=True, kw_only=True)
class StragglerList:
    """
    Who is slow among its peers: `confirmed` by two runs; `suspects` of one, which accuse nobody yet. `nodes` were
    compared: where they are 0 nothing is known.
    """

    nodes: int
    confirmed: tuple[Suspect, ...]
    suspects: tuple[Suspect, ...]


@dataclass(frozen=True, kw_only=True)
class SampleList:
    """
    What the devices of healthy, idle nodes measured last, by kind of machine and name of the limits.

    `devices` is how many devices measured it; `values` are at most 256 of theirs, drawn by chance.
    """

    series: tuple[SampleSeries, ...]


@dataclass(frozen=True, kw_only=True)
class DifferingNode:
    """A node whose digests differ from those of its peers; `message` is the first sentence about it."""

    node: str
    message: str


@dataclass(frozen=True, kw_only=True)
class DigestList:
    """
    Whose digests of fixed work differ: `accused` from those of most nodes like them; `suspects` from others, and no
    majority says which are wrong. `nodes` have given digests, and `compared` of them have others to be compared with.
    Of each list the first thousand.
    """

    nodes: int
    compared: int
    accused: tuple[DifferingNode, ...]
    suspects: tuple[DifferingNode, ...]


@dataclass(frozen=True, kw_only=True)
class StepList:
    """The jobs that tell their steps, and who is slow in them; of each list the first thousand."""

    jobs: tuple[SteppingJob, ...]
    slow: tuple[SlowNodeRow, ...]


@router.get("/stragglers")
async def stragglers(request: Request) -> StragglerList:
    """
    Devices that are slow compared with their peers: `confirmed` by two runs, or `suspects` of one, which are not
    accused yet.
    """
    peers = parts_of(request).stragglers.peers
    await peers.search()
    found = peers.suspects
    return StragglerList(
        nodes=peers.compared,
        confirmed=tuple(one for one in found if one.confirmed),
        suspects=tuple(one for one in found if not one.confirmed),
    )


@router.get("/samples")
async def samples(request: Request) -> SampleList:
    """The latest measurements of the fleet's devices, from which `healthd baseline` learns limits."""
    return SampleList(series=await parts_of(request).stragglers.peers.series())


@router.get("/digests")
async def digests(request: Request) -> DigestList:
    """Nodes whose training-step digest differs from nodes like them: `accused` ones, and `suspects`."""
    found = parts_of(request).fleet.peers.digests
    return DigestList(
        nodes=len(found),
        compared=found.compared(),
        accused=_differing(found, Standing.MINORITY),
        suspects=_differing(found, Standing.UNDECIDED),
    )


@router.get("/steps")
async def steps(request: Request) -> StepList:
    """Running jobs by the times of their steps, and the nodes that are slow in them by their own time."""
    jobs, slow = parts_of(request).fleet.peers.jobs.shown(MOST_LISTED)
    return StepList(jobs=jobs, slow=slow)


def _differing(found: DigestComparison, standing: Standing) -> tuple[DifferingNode, ...]:
    some = sorted((one for one in found.differing.values() if one.standing is standing), key=lambda one: one.node)
    return tuple(DifferingNode(node=one.node, message=one.message) for one in some[:MOST_LISTED])
