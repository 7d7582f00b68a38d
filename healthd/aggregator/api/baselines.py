"""The paths of baselines and stragglers: what was learned, what people decide about it, who is slow among its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from healthd.aggregator.api.auth import Caller, Scope
from healthd.aggregator.api.handling import answer, body_of, needs, parts_of
from healthd.aggregator.baselines.service import Learner
from healthd.baselines import files
from healthd.baselines.model import LEAST_SAMPLES, LEAST_SOURCES, Series, State
from healthd.core.errors import BadInputError

MOST_NAMES = 1000

router = APIRouter(prefix="/v1")
Admin = Annotated[Caller, Depends(needs(Scope.ADMIN))]
READ = [Depends(needs(Scope.READ))]


@dataclass(frozen=True, kw_only=True)
class Decide:
    """What becomes of baselines, by names or ids; none: all that it can be said of. `owner` is who says so."""

    state: State
    names: tuple[str, ...] = ()
    owner: str | None = None


@router.get("/baselines", dependencies=READ)
async def baselines(request: Request) -> Response:
    """
    All that is learned, in the format of files, candidates too; `learning`: where there are too few samples yet.

    `revoked` were in force and judge no more, `drifts` are warnings about the fleet as a whole.
    """
    learner = await _learner(request)
    series = learner.book.all()
    return answer(
        {
            "format": files.FORMAT,
            "baseline": files.entries_of(series, candidates=True),
            "learning": [_learning(learner, one) for one in series if one.in_force is None and one.candidate is None],
            "revoked": [one.id for one in series if one.in_force and one.in_force.state is State.REVOKED],
            "drifts": learner.book.drifts(),
            "comparisons": learner.book.comparisons(),
            "least": {"samples": LEAST_SAMPLES, "sources": LEAST_SOURCES},
        }
    )


@router.post("/baselines/learn")
async def learn(request: Request, _caller: Admin) -> Response:
    """Look at all nodes and learn now; which changed."""
    learner = await _learner(request)
    return answer({"changed": files.entries_of(await learner.learn(), candidates=True)})


@router.post("/baselines/decide")
async def decide(request: Request, caller: Admin) -> Response:
    """Approve, freeze or revoke."""
    body = await body_of(request, Decide)
    if len(body.names) > MOST_NAMES or body.state is State.CANDIDATE:
        raise BadInputError(f"'state' is approved, frozen or revoked, for at most {MOST_NAMES} names")
    if body.state is State.REVOKED and not body.names:
        raise BadInputError("name what is to be revoked")
    learner = await _learner(request)
    changed = await learner.decide(body.names, body.state, by=_owner(body.owner, caller))
    return answer({"changed": files.entries_of(changed), "count": len(changed)})


@router.post("/baselines/import")
async def take(request: Request, caller: Admin) -> Response:
    """Baselines of a file: what is approved in it judges from now on."""
    body = await body_of(request, files.File)
    learner = await _learner(request)
    changed = await learner.take(files.checked(body, what="body"), by=_owner(None, caller))
    return answer({"count": len(changed)})


@router.get("/fleet/stragglers", dependencies=READ)
async def stragglers(request: Request) -> Response:
    """Who is slow among its peers: `confirmed` by two runs, or `suspects` of one, which accuse nobody yet."""
    learner = await _learner(request)
    await learner.peers.search()
    found = learner.peers.suspects
    return answer(
        {
            "confirmed": [{**vars(one), "message": one.sentence} for one in found if one.confirmed],
            "suspects": [{**vars(one), "message": one.sentence} for one in found if not one.confirmed],
        }
    )


async def _learner(request: Request) -> Learner:
    learner = parts_of(request).learner
    await learner.ready()
    return learner


def _learning(learner: Learner, series: Series) -> dict[str, object]:
    samples = learner.book.samples(series.id)
    sources = {(one.node, one.target) for one in samples}
    return {
        "id": series.id,
        "name": series.name,
        "kind": str(series.kind),
        "samples": len(samples),
        "sources": len(sources),
    }


def _owner(owner: str | None, caller: Caller) -> str:
    if owner is None or owner == caller.name:
        return caller.name
    if not owner.isprintable() or not 0 < len(owner) <= 64:
        raise BadInputError("'owner' must be a name of 1 to 64 characters")
    return owner if caller.name == "loopback" else f"{owner} (token {caller.name})"
