"""The paths of baselines and stragglers: what was learned, what people decide about it, who is slow among its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Request
from msgspec import Meta

from healthd.aggregator.api.auth import Caller
from healthd.aggregator.api.handling import READ, Admin, Answer, ApiRoute, Body, parts_of, problems
from healthd.aggregator.api.records import DifferingNode, DigestList, SlowNodeRow, StepList, SteppingJob
from healthd.aggregator.baselines.service import Learner
from healthd.aggregator.baselines.stragglers import Suspect
from healthd.aggregator.inventory.digest_comparison import DigestComparison
from healthd.aggregator.inventory.digest_votes import Standing
from healthd.baselines import files
from healthd.baselines.model import LEAST_SAMPLES, LEAST_SOURCES, Series, State
from healthd.core.errors import BadInputError
from healthd.core.model import Reason

MOST_NAMES = 1000
MOST_DIFFERING = 1000

router = APIRouter(prefix="/v1", route_class=ApiRoute, tags=["baselines"])


@dataclass(frozen=True, kw_only=True)
class Decide:
    """What becomes of baselines, by names or ids; none: all that it can be said of. `owner` is who says so."""

    state: State
    names: Annotated[tuple[str, ...], Meta(max_length=MOST_NAMES)] = ()
    owner: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


@dataclass(frozen=True, kw_only=True)
class Learning:
    """A measurement of which there are too few samples yet; `sources` counts the devices that they are of."""

    id: str
    name: str
    kind: str
    samples: int
    sources: int


@dataclass(frozen=True, kw_only=True)
class Least:
    """What it takes to learn."""

    samples: int
    sources: int


@dataclass(frozen=True, kw_only=True)
class BaselineList:
    """
    All that is learned: `format` and `baseline` are a file of baselines, candidates too.

    `learning`: where there are too few samples yet. `revoked` were in force and judge no more. `drifts` are warnings
    about the fleet as a whole. `comparisons` is how many numbers one run of the whole fleet judges.
    """

    format: int
    baseline: tuple[files.Entry, ...]
    learning: tuple[Learning, ...]
    revoked: tuple[str, ...]
    drifts: tuple[Reason, ...]
    comparisons: int
    least: Least


@dataclass(frozen=True, kw_only=True)
class BaselinesChanged:
    """The baselines that are another now, as in a file."""

    changed: tuple[files.Entry, ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class BaselinesTaken:
    """How many baselines of a file were taken."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """
    A value out of line with `count` others of `median`; `limit` is where the line is, `message` the sentence.

    `peers` are the machines of this kind. `runs` are the measurements that said so.
    """

    peers: str
    name: str
    node: str
    target: str
    value: float
    median: float
    limit: float
    count: int
    runs: tuple[str, ...]
    message: str


@dataclass(frozen=True, kw_only=True)
class StragglerList:
    """Who is slow among its peers: `confirmed` by two runs; `suspects` of one, which accuse nobody yet."""

    confirmed: tuple[Straggler, ...]
    suspects: tuple[Straggler, ...]


@router.get("/baselines", dependencies=[READ])
async def baselines(request: Request) -> Answer[BaselineList]:
    """
    All that is learned, in the format of files, candidates too; `learning`: where there are too few samples yet.

    `revoked` were in force and judge no more, `drifts` are warnings about the fleet as a whole.
    """
    learner = await _learner(request)
    series = learner.book.all()
    nothing_yet = (one for one in series if one.in_force is None and one.candidate is None)
    return Answer(
        BaselineList(
            format=files.FORMAT,
            baseline=files.entries_of(series, candidates=True),
            learning=tuple(_learning(learner, one) for one in nothing_yet),
            revoked=tuple(one.id for one in series if one.in_force and one.in_force.state is State.REVOKED),
            drifts=learner.book.drifts(),
            comparisons=learner.book.comparisons(),
            least=Least(samples=LEAST_SAMPLES, sources=LEAST_SOURCES),
        )
    )


@router.post("/baselines/learn")
async def learn(request: Request, _caller: Admin) -> Answer[BaselinesChanged]:
    """Look at all nodes and learn now; which changed."""
    learner = await _learner(request)
    changed = files.entries_of(await learner.learn(), candidates=True)
    return Answer(BaselinesChanged(changed=changed, count=len(changed)))


@router.post("/baselines/decide", responses=problems(404))
async def decide(request: Request, caller: Admin, body: Body[Decide]) -> Answer[BaselinesChanged]:
    """Approve, freeze or revoke."""
    if body.state is State.CANDIDATE:
        raise BadInputError("'state' is approved, frozen or revoked")
    if body.state is State.REVOKED and not body.names:
        raise BadInputError("name what is to be revoked")
    learner = await _learner(request)
    changed = await learner.decide(body.names, body.state, by=_owner(body.owner, caller))
    return Answer(BaselinesChanged(changed=files.entries_of(changed), count=len(changed)))


@router.post("/baselines/import", responses=problems(409))
async def take(request: Request, caller: Admin, body: Body[files.File]) -> Answer[BaselinesTaken]:
    """Baselines of a file: what is approved in it judges from now on."""
    learner = await _learner(request)
    changed = await learner.take(files.checked(body, what="body"), by=_owner(None, caller))
    return Answer(BaselinesTaken(count=len(changed)))


@router.get("/fleet/stragglers", dependencies=[READ])
async def stragglers(request: Request) -> Answer[StragglerList]:
    """Who is slow among its peers: `confirmed` by two runs, or `suspects` of one, which accuse nobody yet."""
    learner = await _learner(request)
    await learner.peers.search()
    found = learner.peers.suspects
    return Answer(
        StragglerList(
            confirmed=tuple(_straggler(one) for one in found if one.confirmed),
            suspects=tuple(_straggler(one) for one in found if not one.confirmed),
        )
    )


@router.get("/fleet/digests", dependencies=[READ])
async def digests(request: Request) -> Answer[DigestList]:
    """Nodes whose training step gives other bits than that of nodes like them: `accused` ones, and `suspects`."""
    found = parts_of(request).fleet.peers.digests
    return Answer(
        DigestList(
            nodes=len(found),
            accused=_differing(found, Standing.MINORITY),
            suspects=_differing(found, Standing.UNDECIDED),
        )
    )


@router.get("/fleet/steps", dependencies=[READ])
async def steps(request: Request) -> Answer[StepList]:
    """Running jobs by the times of their steps, and the nodes that are slow in them by their own time."""
    found = parts_of(request).fleet.peers.jobs
    return Answer(
        StepList(
            jobs=tuple(
                SteppingJob(job=name, nodes=len(job.ranks), ranks=job.size, step_seconds=job.step_seconds)
                for name, job in sorted(found.jobs.items())[:MOST_DIFFERING]
            ),
            slow=tuple(
                SlowNodeRow(
                    job=one.job,
                    node=one.node,
                    ranks=one.ranks,
                    own_seconds=one.slow.own_seconds,
                    peers_seconds=one.slow.peers_seconds,
                    message=one.message,
                )
                for one in found.slow[:MOST_DIFFERING]
            ),
        )
    )


def _differing(found: DigestComparison, standing: Standing) -> tuple[DifferingNode, ...]:
    some = sorted((one for one in found.differing.values() if one.standing is standing), key=lambda one: one.node)
    return tuple(DifferingNode(node=one.node, message=one.message) for one in some[:MOST_DIFFERING])


async def _learner(request: Request) -> Learner:
    learner = parts_of(request).learner
    await learner.ready()
    return learner


def _straggler(one: Suspect) -> Straggler:
    return Straggler(
        peers=one.peers,
        name=one.name,
        node=one.node,
        target=one.target,
        value=one.value,
        median=one.median,
        limit=one.limit,
        count=one.count,
        runs=one.runs,
        message=one.sentence,
    )


def _learning(learner: Learner, series: Series) -> Learning:
    samples = learner.book.samples(series.id)
    sources = {(one.node, one.target) for one in samples}
    return Learning(id=series.id, name=series.name, kind=str(series.kind), samples=len(samples), sources=len(sources))


def _owner(owner: str | None, caller: Caller) -> str:
    if owner is None or owner == caller.name:
        return caller.name
    if not owner.isprintable():
        raise BadInputError("'owner' must be a name of 1 to 64 printable characters")
    return owner if caller.name == "loopback" else f"{owner} (token {caller.name})"
