"""Several nodes at once: choose them from a list, then keep them out, let them in, or validate them together."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from healthd.aggregator.api.handling import parts_of
from healthd.aggregator.api.nodes import MAX_REASON_LENGTH
from healthd.aggregator.api.validations import ValidationBody, request_of
from healthd.aggregator.auth import Scope
from healthd.aggregator.ui import fleet_grid, rendering
from healthd.aggregator.ui.actions import keep_out, known_node, let_in, to
from healthd.aggregator.ui.formatting import natural
from healthd.aggregator.ui.route import PageRoute, feed_of
from healthd.aggregator.ui.session import check_word, pairs_of, visitor_of
from healthd.core.errors import BadInputError
from healthd.core.model import Health

MOST_NODES = 200
# That many names of the longest kind, percent-encoded, and a reason.
MAX_FORM_BYTES = 128 * 1024
DOINGS = {"quarantine", "release", "validate"}

router = APIRouter(route_class=PageRoute)


@router.get("/several")
async def several(
    request: Request,
    q: Annotated[str, Query(max_length=120)] = "",
    health: Annotated[str, Query(max_length=20)] = "",
    done: Annotated[str | None, Query(pattern="^(quarantined|released)$")] = None,
    count: Annotated[int, Query(ge=0, le=MOST_NODES)] = 0,
) -> Response:
    """The nodes that a search finds, to be chosen from."""
    visitor = visitor_of(request)
    cells = fleet_grid.found(feed_of(request).all_cells()[0], q)
    wanted = [cell for cell in cells if not health or cell.health.value == health]
    wanted.sort(key=lambda cell: natural(cell.node))
    return rendering.page(
        "several.html",
        visitor=visitor,
        cells=wanted[:MOST_NODES],
        found=len(wanted),
        q=q,
        health=health,
        healths=[one.value for one in Health],
        done=done,
        count=count,
    )


@router.post("/several")
async def act(request: Request) -> Response:
    """What the form says, on all nodes that were chosen; nothing where one of them is not known."""
    visitor = visitor_of(request, Scope.ADMIN)
    nodes, fields = [], dict[str, str]()
    for name, value in await pairs_of(request, max_bytes=MAX_FORM_BYTES, max_fields=MOST_NODES + 8):
        if name == "node":
            nodes.append(value)
        elif name in ("word", "reason", "end", "do", "q") and name not in fields and len(value) <= MAX_REASON_LENGTH:
            fields[name] = value.strip()
        else:
            raise BadInputError(f"the form has a field {name[:40]!r} too many; load the page again")
    check_word(visitor, fields.get("word", ""))
    if not nodes:
        raise BadInputError("no node is chosen; go back and tick some")
    for node in nodes:
        known_node(request, node)
    doing, engine = fields.get("do"), parts_of(request).engine
    if doing == "validate":
        asked = request_of(ValidationBody(nodes=tuple(nodes)))
        return to(f"/gates/{quote((await engine.ask(asked)).id, safe='')}")
    if doing == "quarantine":
        await keep_out(request, visitor, nodes, fields)
    elif doing == "release":
        await let_in(request, visitor, nodes, fields)
    else:
        raise BadInputError(f"do what? choose one of: {', '.join(sorted(DOINGS))}")
    query = {
        "done": f"{doing}d" if doing == "release" else "quarantined",
        "count": len(nodes),
        "q": fields.get("q", ""),
    }
    return to(f"/several?{urlencode(query)}")
