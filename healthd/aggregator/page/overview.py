"""
Pages over the whole fleet: the grid, the heat map of a measurement, events, gates, jobs, several nodes at once.

Also here:

- several nodes at once: choose them from a list, then keep them out, let them in, or validate them together;
- the first page: the fleet as a grid, what is wrong with it, and what is under way;
- the fleet coloured by one measurement: from the lowest value on it to the highest, in the order of a label;
- pages over the whole fleet: the heat map of one measurement, what happened lately, gates, jobs that died, repairs,
  a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from checks.limits import quantity
from checks.reasons import REASONS, Reason, action_of, blame_of
from healthd.aggregator.api import MAX_REASON_LENGTH, MOST_ID, ValidationBody, parts_of, request_of
from healthd.aggregator.identity.tokens import Scope
from healthd.aggregator.page import fleet_grid, gate_view, rendering
from healthd.aggregator.page.actions import PageRoute, feed_of, keep_out, known_node, let_in, to
from healthd.aggregator.page.events import FLEET, GATES
from healthd.aggregator.page.fleet_grid import Cell, grouped
from healthd.aggregator.page.rendering import WORST_FIRST, natural
from healthd.aggregator.page.samples import Reading
from healthd.aggregator.page.session import Visitor, check_word, pairs_of, visitor_of
from healthd.aggregator.page.views import events_view, fleet_view, gates_view, jobs_view, readings_view
from healthd.aggregator.policy import HISTORY_DAYS
from healthd.aggregator.quarantine.repair_records import RepairState
from healthd.core.errors import BadInputError, NotFoundError
from healthd.core.model import Health
from healthd.core.node_name import check_name

MOST_NODES = 200
# That many names of the longest kind, percent-encoded, and a reason.
MAX_FORM_BYTES = 128 * 1024
DOINGS = {"quarantine", "release", "validate"}

router = APIRouter(route_class=PageRoute, include_in_schema=False)

# What one page may show; what is more is counted, or on the next page.
MOST_ON_PAGE = 5000
# Of a search, which is asked again with each pause in typing: 9 ms to render, where 5,000 take 90.
MOST_FOUND = 500
MOST_TROUBLES = 12
MOST_NAMED = 10

STEPS = 7
LEAST_STEP_RATIO = 0.08
"""Of the median. Healthy devices of one kind differ by some 6 %; what is worth a look differs by more."""
BEYOND = ", beyond its limit"
NOT_NOW = ", measured before the node became unknown"

MOST_NODES_OF_REASON = 200
# Cells of one map; what is more is left to the filter.
MOST_CELLS = 5000

# A repair that a person has accepted is under way; one that is done waits for its proof.
REPAIR_TONES = {
    RepairState.ADVISED: ("unhealthy", "✕"),
    RepairState.ACCEPTED: ("degraded", "!"),
    RepairState.REJECTED: ("none", "-"),
    RepairState.DONE: ("unknown", "?"),
}
MOST_REPAIRS = 200
MOST_CLOSED = 50


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
    cells = fleet_view(parts_of(request), feed_of(request), q=q).found_cells
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
    choice = await choice_of(request)
    for node in choice.nodes:
        known_node(request, node)
    if choice.doing == "validate":
        asked = request_of(ValidationBody(nodes=choice.nodes))
        return to(f"/gates/{quote((await parts_of(request).engine.ask(asked)).id, safe='')}")
    if choice.doing == "quarantine":
        await keep_out(request, choice.visitor, choice.nodes, choice.fields)
    else:
        await let_in(request, choice.visitor, choice.nodes, choice.fields)
    return choice.answer


async def choice_of(request: Request) -> Choice:
    """What a form of ours says, of a visitor who may act. HealthdError."""
    visitor = visitor_of(request, Scope.ADMIN)
    nodes, fields = [], dict[str, str]()
    for name, value in await pairs_of(request, max_bytes=MAX_FORM_BYTES, max_fields=MOST_NODES + 8):
        if name == "node":
            check_name(value)
            nodes.append(value)
        elif name in ("word", "reason", "end", "do", "q") and name not in fields and len(value) <= MAX_REASON_LENGTH:
            fields[name] = value.strip()
        else:
            raise BadInputError(f"the form has an unknown field {name[:40]!r}; load the page again")
    check_word(visitor, fields.get("word", ""))
    if not nodes:
        raise BadInputError("no node is chosen; go back and tick some")
    if (doing := fields.get("do", "")) not in DOINGS:
        raise BadInputError(f"choose an action: {', '.join(sorted(DOINGS))}")
    return Choice(visitor=visitor, nodes=tuple(nodes), doing=doing, fields=fields)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the form says of which nodes. `answer` is where the browser goes once it is done."""

    visitor: Visitor
    nodes: tuple[str, ...]
    doing: str
    fields: Mapping[str, str]

    @property
    def answer(self) -> Response:
        """To the same list, which says what was done."""
        done = "released" if self.doing == "release" else "quarantined"
        return to(f"/several?{urlencode({'done': done, 'count': len(self.nodes), 'q': self.fields.get('q', '')})}")


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
    whole = fleet_view(parts_of(request), feed_of(request), q=q)
    cells = whole.cells
    choices = fleet_grid.choices(cells, whole.topology)
    chosen = group if group in dict(choices) else fleet_grid.default_choice(cells, whole.topology)
    wanted = None if not health else _health(health)
    shown = [cell for cell in whole.found_cells if wanted is None or cell.health is wanted]
    groups = [] if part == "top" else fleet_grid.grouped(shown, chosen)
    on_page, pages = _paged(groups, page, MOST_FOUND if q else MOST_ON_PAGE)
    troubles = fleet_grid.troubles(cells)
    return rendering.page(
        "fleet.html",
        visitor=visitor,
        after=whole.cursor,
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
        gates=whole.gates,
        phases=dict(gate_view.PHASES),
        open_gates=whole.open_gates,
        overrides=whole.overrides,
        recovering=whole.recovering,
        without_limits=whole.without_limits,
        breakers=whole.breakers,
        accused=whole.accused,
        faults=whole.faults,
        injected=[cell.node for cell in cells if cell.injected],
        mode=whole.mode,
    )


@router.get("/heat")
async def heat(
    request: Request,
    of: Annotated[str, Query(max_length=200)] = "",
    group: Annotated[str | None, Query(max_length=120)] = None,
    q: Annotated[str, Query(max_length=120)] = "",
) -> Response:
    """The fleet coloured by one measurement."""
    visitor, feed = visitor_of(request), feed_of(request)
    readings = readings_view(feed, of=of)
    whole = fleet_view(parts_of(request), feed, q=q)
    choices = fleet_grid.choices(whole.cells, whole.topology)
    chosen = group if group in dict(choices) else fleet_grid.default_choice(whole.cells, whole.topology)
    name, names = readings.name, readings.names
    shown = whole.found_cells[:MOST_CELLS]
    return rendering.page(
        "heat.html",
        visitor=visitor,
        names=names,
        name=name,
        choices=choices,
        chosen=chosen,
        q=q,
        total=len(whole.cells),
        shown=len(shown),
        waiting=readings.waiting,
        map=None if name is None else heat_map(shown, readings.values, names[name], chosen),
    )


def heat_map(cells: Sequence[Cell], values: Mapping[str, Reading], plain: str, by: str) -> HeatMap:
    """
    Cells by group; `plain` is the measurement's name, whose ending is its unit.

    Values that are not finite count as none.
    """
    known = {node: one for node, one in values.items() if math.isfinite(one.value)}
    here = [known[cell.node].value for cell in cells if cell.node in known]
    low, high = (min(here), max(here)) if here else (0.0, 0.0)
    middle = median(here) if here else 0.0
    bottom, top = _scale(low, middle, high)

    def step(value: float) -> int:
        if not 0 < top - bottom < math.inf:
            return STEPS // 2
        return min(STEPS - 1, int((value - bottom) / (top - bottom) * STEPS))

    def one(cell: Cell) -> HeatCell:
        found = known.get(cell.node)
        shown = "" if found is None else quantity(plain, found.value)
        outside, old = found is not None and found.outside, found is not None and cell.health is Health.UNKNOWN
        bad = outside or cell.health is Health.UNHEALTHY
        ill = f", {cell.health.value}" if cell.health in (Health.UNHEALTHY, Health.DEGRADED) else ""
        ill += f" ({cell.reason})" if ill and cell.reason else ""
        said = "not measured" if found is None else f"{shown}{_compared(found.value, middle)}"
        marks = (BEYOND if outside else "") + (NOT_NOW if old else "") + ill + (", drill" if cell.injected else "")
        signs = (("✕", bad), ("?", old), ("!", cell.health is Health.DEGRADED), ("·", found is None))
        return HeatCell(
            node=cell.node,
            step=None if found is None else step(found.value),
            bad=bad,
            old=old,
            sign=next((sign for sign, shows in signs if shows), ""),
            shown=shown,
            label=f"{cell.node}: {said}{marks}",
        )

    groups = []
    for group in grouped(cells, by):
        values_here = [known[cell.node].value for cell in group.cells if cell.node in known]
        shown = quantity(plain, median(values_here)) if values_here else ""
        groups.append(HeatGroup(name=group.name, cells=tuple(map(one, group.cells)), shown=shown))
    return HeatMap(
        groups=tuple(groups),
        scale=tuple(quantity(plain, bottom + (top - bottom) * i / STEPS) for i in range(STEPS)) if top > bottom else (),
        low=quantity(plain, low),
        middle=quantity(plain, middle),
        high=quantity(plain, high),
        measured=len(here),
        outside=sum(known[cell.node].outside for cell in cells if cell.node in known),
    )


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The map, and its scale: the smallest value of each step."""

    groups: tuple[HeatGroup, ...]
    scale: tuple[str, ...]
    low: str
    middle: str
    high: str
    measured: int
    outside: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatGroup:
    """The cells that share a value of the label; `shown` is the median of the group."""

    name: str
    cells: tuple[HeatCell, ...]
    shown: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatCell:
    """
    One node: `step` of the scale (None: no value), and its value as people read it. `old`: it may be another by now,
    because the node is silent or its evidence stale. `bad`: it is beyond its limit, or the node is unhealthy. `sign`
    stands in the cell, so that its colour is not alone.
    """

    node: str
    step: int | None
    bad: bool
    old: bool
    sign: str
    shown: str
    label: str


@router.get("/history")
async def history(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=MOST_ID)] = None,
    q: Annotated[str, Query(max_length=120)] = "",
    kind: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """What happened on all nodes and jobs, newest first: faults, quarantines, overrides, decisions."""
    visitor = visitor_of(request)
    whole = await events_view(parts_of(request), q=q, kind=kind, before=before)
    return rendering.page(
        "history.html",
        visitor=visitor,
        events=whole.events,
        older=whole.older,
        kinds=whole.kinds,
        before=before,
        q=q,
        kind=kind,
        days=HISTORY_DAYS,
    )


@router.get("/gates")
async def gates(
    request: Request,
    before: Annotated[str, Query(max_length=64)] = "",
    job: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    """Gates in progress, and decisions of the past, newest first."""
    visitor = visitor_of(request)
    whole = await gates_view(parts_of(request), feed_of(request), job=job, before=before)
    return rendering.page(
        "gates.html",
        visitor=visitor,
        after=whole.cursor,
        topic=GATES,
        under_way=whole.under_way,
        more_open=whole.more_open,
        decided=whole.decided,
        older=whole.older,
        before=before,
        job=job,
        phases=dict(gate_view.PHASES),
    )


@router.get("/jobs")
async def jobs(
    request: Request,
    before: Annotated[str, Query(max_length=64)] = "",
    job: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    """Jobs that ended badly, newest first."""
    visitor = visitor_of(request)
    whole = await jobs_view(parts_of(request), job=job, before=before)
    return rendering.page(
        "jobs.html",
        visitor=visitor,
        ends=whole.jobs,
        older=whole.older,
        before=before,
        job=job,
    )


@router.get("/repairs")
async def repairs(
    request: Request, done: Annotated[str | None, Query(pattern="^(accept|reject|done)$")] = None
) -> Response:
    """Repairs that healthd advises: what people decided, and the newest closed ones."""
    visitor, engine = visitor_of(request), parts_of(request).engine
    found = engine.repairs()
    return rendering.page(
        "repairs.html",
        visitor=visitor,
        repairs=found[:MOST_REPAIRS],
        more=max(0, len(found) - MOST_REPAIRS),
        closed=await engine.closed_repairs(limit=MOST_CLOSED),
        tones=REPAIR_TONES,
        done=done,
    )


@router.get("/reasons/{code}")
async def reason(request: Request, code: str) -> Response:
    """One reason: what it means, whose fault it is, what to do, and who has it now."""
    visitor = visitor_of(request)
    cells = [cell for cell in fleet_view(parts_of(request), feed_of(request), q="").cells if cell.reason == code]
    known = REASONS.get(code)
    if known is None:
        if not cells:
            raise NotFoundError(f"no reason {code[:80]!r} in the catalogue, and no node has it")
        meaning = "Not in the catalogue: a check of your own brought it along."
        known = Reason(code, meaning, blame_of(code), action_of(code))
    return rendering.page(
        "reason.html",
        visitor=visitor,
        reason=known,
        runbook=runbook_of(parts_of(request).settings.runbooks_url, known.code),
        cells=cells[:MOST_NODES_OF_REASON],
        total=len(cells),
    )


def runbook_of(base: str | None, code: str) -> str | None:
    """The published section on a reason; None if `runbooks_url` is not set or the catalogue lacks the reason."""
    return None if base is None or code not in REASONS else f"{base.rstrip('/')}/reasons.md#{code}"


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


def _scale(low: float, middle: float, high: float) -> tuple[float, float]:
    """From where to where the colours go: the lowest and the highest value, wider where these are close together."""
    half = abs(middle) * LEAST_STEP_RATIO * STEPS / 2
    return min(low, middle - half), max(high, middle + half)


def _compared(value: float, middle: float) -> str:
    """How far from the median, where that says something."""
    if middle <= 0 or value == middle:
        return ""
    percent = 100 * (value / middle - 1)
    return f", {abs(percent):.2g} % {'above' if percent > 0 else 'below'} the median" if abs(percent) < 1000 else ""
