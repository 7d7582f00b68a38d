"""The first page: the fleet as a grid, what is wrong with it, and what is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from healthd.aggregator.api.handling import parts_of
from healthd.aggregator.ui import fleet_grid, gate_view, rendering
from healthd.aggregator.ui.events import FLEET
from healthd.aggregator.ui.fleet_grid import Cell
from healthd.aggregator.ui.formatting import WORST_FIRST
from healthd.aggregator.ui.route import PageRoute, feed_of
from healthd.aggregator.ui.session import visitor_of
from healthd.core.errors import BadInputError
from healthd.core.model import Health

# What one page may show; what is more is counted, or on the next page.
MOST_ON_PAGE = 5000
# Of a search, which is asked again with each pause in typing: 9 ms to render, where 5,000 take 90.
MOST_FOUND = 500
MOST_TROUBLES = 12
MOST_NAMED = 10

router = APIRouter(route_class=PageRoute)


@router.get("/")
async def fleet(
    request: Request,
    group: Annotated[str | None, Query(max_length=120)] = None,
    health: Annotated[str | None, Query(max_length=20)] = None,
    q: Annotated[str, Query(max_length=120)] = "",
    page: Annotated[int, Query(ge=1, le=100)] = 1,
    part: Annotated[str | None, Query(pattern="^(top|grid)$")] = None,
) -> Response:
    """The fleet as a grid; `part=top` is all of it but the grid, `part=grid` the grid alone."""
    visitor = visitor_of(request)
    parts, feed = parts_of(request), feed_of(request)
    feed.begin(FLEET)
    cells, after = feed.all_cells()
    topology = parts.engine.policy.topology_labels
    choices = fleet_grid.choices(cells, topology)
    chosen = group if group in dict(choices) else fleet_grid.default_choice(cells, topology)
    wanted = None if not health else _health(health)
    shown = [cell for cell in fleet_grid.found(cells, q) if wanted is None or cell.health is wanted]
    groups = [] if part == "top" else fleet_grid.grouped(shown, chosen)
    on_page, pages = _paged(groups, page, MOST_FOUND if q else MOST_ON_PAGE)
    troubles = fleet_grid.troubles(cells)
    recovering, breakers = parts.engine.recovering(), parts.engine.breakers()
    return rendering.page(
        "fleet.html",
        visitor=visitor,
        after=after,
        topic=FLEET,
        part=part,
        total=len(cells),
        counts=[(one, sum(cell.health is one for cell in cells)) for one in WORST_FIRST],
        marks=_marks(cells),
        troubles=troubles[:MOST_TROUBLES],
        more_troubles=max(0, len(troubles) - MOST_TROUBLES),
        most_named=MOST_NAMED,
        not_well=sum(cell.health is not Health.HEALTHY and not cell.drill for cell in cells),
        drilled=sum(cell.health is not Health.HEALTHY and cell.drill for cell in cells),
        choices=choices,
        chosen=chosen,
        health=wanted,
        q=q,
        groups=on_page,
        shown=len(shown),
        page_number=page,
        pages=pages,
        gates=[(gate, parts.engine.answer(gate)) for gate in parts.engine.open_gates()[:5]],
        phases=dict(gate_view.PHASES),
        open_gates=len(parts.engine.open_gates()),
        overrides=parts.engine.overrides(),
        recovering=recovering,
        breakers=breakers,
        accused=parts.accusations.all(),
        faults=parts.engine.faults(),
        injected=[cell.node for cell in cells if cell.injected],
        mode=parts.engine.policy.mode.value,
    )


def _health(text: str) -> Health:
    try:
        return Health(text)
    except ValueError:
        raise BadInputError(f"health={text!r} is not one of: {', '.join(h.value for h in Health)}") from None


def _marks(cells: Sequence[Cell]) -> dict[str, int]:
    return {
        "quarantined": sum(cell.quarantined for cell in cells),
        "taken": sum(cell.taken is not None for cell in cells),
    }


def _paged(groups: Sequence[fleet_grid.Group], page: int, most: int) -> tuple[list[fleet_grid.Group], int]:
    """The groups of one page, cut at its ends, and how many pages there are."""
    total = sum(len(group.cells) for group in groups)
    begin, end, seen = (page - 1) * most, page * most, 0
    found = []
    for group in groups:
        cells = group.cells[max(0, begin - seen) : max(0, end - seen)]
        seen += len(group.cells)
        if cells:
            found.append(
                group
                if len(cells) == len(group.cells)
                else fleet_grid.Group(name=group.name, cells=cells, bad=group.bad)
            )
    return found, max(1, -(-total // most))
