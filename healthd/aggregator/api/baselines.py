"""The paths of baselines: what was learned, and what people decide about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Request
from msgspec import Meta

from healthd.aggregator.api.handling import READ, Admin, Answer, ApiRoute, Body, parts_of, problems
from healthd.aggregator.api.nodes import owner_of
from healthd.aggregator.baselines.service import Learner
from healthd.baselines import files
from healthd.baselines.model import LEAST_SAMPLES, LEAST_SOURCES, Series, State
from healthd.core.errors import BadInputError
from healthd.core.model import Reason

MOST_NAMES = 1000

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


@router.get("/baselines", dependencies=[READ])
async def baselines(request: Request) -> Answer[BaselineList]:
    """
    All that is learned, in the format of files, candidates too; `learning`: where there are too few samples yet.

    `revoked` were in force and judge no more, `drifts` are warnings about the fleet as a whole.
    """
    learner = await learner_of(request)
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
    learner = await learner_of(request)
    changed = files.entries_of(await learner.learn(), candidates=True)
    return Answer(BaselinesChanged(changed=changed, count=len(changed)))


@router.post("/baselines/decide", responses=problems(404))
async def decide(request: Request, caller: Admin, body: Body[Decide]) -> Answer[BaselinesChanged]:
    """Approve, freeze or revoke."""
    if body.state is State.CANDIDATE:
        raise BadInputError("'state' is approved, frozen or revoked")
    if body.state is State.REVOKED and not body.names:
        raise BadInputError("name what is to be revoked")
    learner = await learner_of(request)
    changed = await learner.decide(body.names, body.state, by=owner_of(body.owner, caller))
    return Answer(BaselinesChanged(changed=files.entries_of(changed), count=len(changed)))


@router.post("/baselines/import", responses=problems(409))
async def take(request: Request, caller: Admin, body: Body[files.File]) -> Answer[BaselinesTaken]:
    """Baselines of a file: what is approved in it judges from now on."""
    learner = await learner_of(request)
    changed = await learner.take(files.checked(body, what="body"), by=caller.name)
    return Answer(BaselinesTaken(count=len(changed)))


async def learner_of(request: Request) -> Learner:
    """What learns baselines, once it has read what it knows."""
    learner = parts_of(request).learner
    await learner.ready()
    return learner


def _learning(learner: Learner, series: Series) -> Learning:
    samples = learner.book.samples(series.id)
    sources = {(one.node, one.target) for one in samples}
    return Learning(id=series.id, name=series.name, kind=str(series.kind), samples=len(samples), sources=len(sources))
