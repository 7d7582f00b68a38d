"""Pages over the whole fleet: the heat map of one measurement, and what happened lately, with who did it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from healthd.aggregator.api.handling import parts_of
from healthd.aggregator.api.rules import MOST_ID
from healthd.aggregator.store.history import read_history
from healthd.aggregator.ui import fleet_grid, rendering
from healthd.aggregator.ui.overview.heat_map import heat_map
from healthd.aggregator.ui.route import PageRoute, feed_of
from healthd.aggregator.ui.session import visitor_of
from healthd.core.errors import BadInputError

MOST_EVENTS = 100
# Cells of one map; what is more is left to the filter.
MOST_CELLS = 5000

router = APIRouter(route_class=PageRoute)


@router.get("/heat")
async def heat(
    request: Request,
    of: Annotated[str | None, Query(max_length=200)] = None,
    group: Annotated[str | None, Query(max_length=120)] = None,
    q: Annotated[str, Query(max_length=120)] = "",
) -> Response:
    """The fleet coloured by one measurement."""
    visitor = visitor_of(request)
    parts, feed = parts_of(request), feed_of(request)
    waiting = feed.catch_up()
    cells, _ = feed.all_cells()
    topology = parts.engine.policy.topology_labels
    choices = fleet_grid.choices(cells, topology)
    chosen = group if group in dict(choices) else fleet_grid.default_choice(cells, topology)
    names = feed.samples.readings.names()
    name = of if of in names else next((n for n in names if "flops_per_second" in n), next(iter(names), None))
    shown = fleet_grid.found(cells, q)[:MOST_CELLS]
    return rendering.page(
        "heat.html",
        visitor=visitor,
        names=names,
        name=name,
        choices=choices,
        chosen=chosen,
        q=q,
        total=len(cells),
        shown=len(shown),
        waiting=waiting,
        map=None if name is None else heat_map(shown, feed.samples.readings.of(name), names[name], chosen),
    )


@router.get("/history")
async def history(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=MOST_ID)] = None,
    q: Annotated[str, Query(max_length=120)] = "",
) -> Response:
    """What happened on all nodes and jobs, newest first: faults, quarantines, overrides, decisions."""
    visitor = visitor_of(request)
    parts = parts_of(request)
    if q and not q.isprintable():
        raise BadInputError("q: a search has no control characters")
    days = parts.engine.policy.history_days
    since = parts.engine.now() - days * 86400.0
    events = await parts.store.read(
        lambda connection: read_history(connection, None, limit=MOST_EVENTS + 1, before=before, since=since, text=q)
    )
    return rendering.page(
        "history.html",
        visitor=visitor,
        events=events[:MOST_EVENTS],
        older=events[MOST_EVENTS - 1].id if len(events) > MOST_EVENTS else None,
        before=before,
        q=q,
        days=days,
    )
