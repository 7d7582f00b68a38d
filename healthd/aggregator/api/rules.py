"""The paths of time in the verdict: what happened on a node, and the breaker of the rules."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from healthd.aggregator.api.handling import READ, Admin, Answer, ApiRoute, parts_of
from healthd.aggregator.api.records import BreakersReset, History, OpenBreakers
from healthd.aggregator.store.history import read_history
from healthd.core.errors import NotFoundError
from healthd.core.node_name import check_name

MOST_EVENTS = 1000
MOST_ID = 2**63 - 1
"""Of an event: what the databases count with."""

router = APIRouter(prefix="/v1", route_class=ApiRoute)


@router.get("/nodes/{node}/history", dependencies=[READ], tags=["nodes"])
async def history(
    request: Request,
    node: str,
    limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 100,
    before: Annotated[int | None, Query(ge=1, le=MOST_ID)] = None,
) -> Answer[History]:
    """What happened on a node, newest first; `next` is the `before` of the next page, null on the last."""
    check_name(node)
    parts = parts_of(request)
    since = parts.engine.now() - parts.engine.policy.history_days * 86400.0
    found = await parts.store.read(
        lambda connection: read_history(connection, node, limit=limit + 1, before=before, since=since)
    )
    if not found and parts.fleet.view(node) is None:
        raise NotFoundError(f"no node {node[:80]!r} was ever heard of; 'healthd fleet status' lists all")
    page = found[:limit]
    return Answer(History(node=node, events=tuple(page), next=page[-1].id if len(found) > limit else None))


@router.get("/fleet/breaker", dependencies=[READ], tags=["fleet"])
async def breaker(request: Request) -> Answer[OpenBreakers]:
    """Breakers of the rules that are open, by pool; the empty name stands for nodes without one."""
    return Answer(OpenBreakers(open=parts_of(request).engine.breakers()))


@router.post("/fleet/breaker/reset", tags=["fleet"])
async def reset_breaker(request: Request, caller: Admin, pool: str | None = None) -> Answer[BreakersReset]:
    """Somebody has looked: rules may quarantine again, everywhere or in one pool. Safe to repeat."""
    return Answer(BreakersReset(reset=await parts_of(request).engine.reset_breaker(caller.name, pool)))
