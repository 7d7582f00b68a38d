"""
What the pages over the whole fleet show of one shard, and of all of them together.

A leader makes a view of its shard from what it has in memory; where the fleet has several shards, whoever renders the
page asks all leaders for theirs (`Source`). Merging is pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request

from healthd.aggregator.api import MOST_ID, Parts, ShardRow, parts_of
from healthd.aggregator.controller import Fault
from healthd.aggregator.inventory import Accusation
from healthd.aggregator.model.gates import Gate, Override, Phase
from healthd.aggregator.model.policy import HISTORY_DAYS
from healthd.aggregator.model.postmortems import Postmortem
from healthd.aggregator.model.quarantines import Breaker
from healthd.aggregator.store import HistoryEvent
from healthd.aggregator.ui import fleet_grid
from healthd.aggregator.ui.events import FLEET, GATES, Feed
from healthd.aggregator.ui.fleet_grid import Cell
from healthd.aggregator.ui.job_view import job_end
from healthd.aggregator.ui.samples import Reading
from healthd.core import wire
from healthd.core.errors import BadInputError, NotFoundError
from healthd.core.model import Decision, Reason, Verdict

V = TypeVar("V")

MOST_GATES = 50
MOST_OPEN_GATES = 100
MOST_EVENTS = 100
MOST_REASONS = 3
"""Of what one page shows; what is more is counted, or on the next page."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a page was asked for, as far as its views depend on it; each view looks at some of it."""

    q: str = ""
    job: str = ""
    before: str = ""
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[V]):
    """A kind of view: its name in paths, its record, and how a leader makes it."""

    name: str
    record: type[V]
    make: Callable[[Parts, Feed, Asked], Awaitable[V]]


@dataclass(frozen=True, kw_only=True)
class Gathered(Generic[V]):
    """
    The views of the shards that answered, by shard, and why others do not. `shards` are all that there are, one where
    the fleet is not divided. `only` is the shard that was asked for, empty: all.
    """

    views: Mapping[str, V]
    unanswered: Mapping[str, str] = field(default_factory=dict)
    shards: Sequence[ShardRow] = ()
    only: str = ""


class Source(Protocol):
    """Where a page gets its views from. `only` is the shard that is asked for, empty: all. HealthdError."""

    async def gather(self, request: Request, kind: Kind[V], asked: Asked, only: str) -> Gathered[V]: ...


class OwnShard:
    """The source of a leader: its own shard."""

    async def gather(self, request: Request, kind: Kind[V], asked: Asked, only: str) -> Gathered[V]:
        """See `Source`."""
        parts = parts_of(request)
        if only not in ("", parts.shard):
            raise BadInputError(f"no shard is named {only[:80]!r} here; this one is {parts.shard}")
        feed: Feed = request.app.state.feed
        return Gathered(views={parts.shard: await kind.make(parts, feed, asked)})


def source_of(request: Request) -> Source:
    """Where the pages of this application get their views from."""
    source: Source = request.app.state.source
    return source


# --- the fleet --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GateLine:
    """A gate on a line of a page; `nodes` and `excluded` are counts, `reasons` the first of the decision."""

    id: str
    job: str
    attempt: int
    phase: Phase
    wanted: int
    created_at: float
    deadline: float
    validated: bool
    decision: Verdict
    would: Verdict | None
    drill: bool
    reasons: tuple[Reason, ...]
    nodes: int
    excluded: int
    duration_seconds: float
    decided_at: float | None


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """
    All of a shard that the first page shows. `found` are the nodes that the search finds, None: nothing is searched.
    `cursor` is where the stream of changes goes on from here.
    """

    cells: Sequence[Cell]
    found: frozenset[str] | None
    gates: tuple[GateLine, ...]
    open_gates: int
    overrides: tuple[Override, ...]
    recovering: str | None
    breakers: tuple[tuple[str, Breaker], ...]
    accused: tuple[Accusation, ...]
    faults: tuple[Fault, ...]
    mode: str
    topology: tuple[str, ...]
    cursor: str

    @property
    def found_cells(self) -> list[Cell]:
        """The cells that the search finds; all of them where nothing is searched."""
        return [cell for cell in self.cells if self.found is None or cell.node in self.found]


async def _fleet(parts: Parts, feed: Feed, asked: Asked) -> FleetView:
    feed.begin(FLEET)
    cells, cursor = feed.all_cells()
    engine = parts.engine
    open_gates = engine.open_gates()
    return FleetView(
        cells=cells,
        found=frozenset(cell.node for cell in fleet_grid.found(cells, asked.q)) if asked.q else None,
        gates=tuple(_line(gate, engine.answer(gate)) for gate in open_gates[:5]),
        open_gates=len(open_gates),
        overrides=tuple(engine.overrides()),
        recovering=engine.recovering(),
        breakers=tuple(engine.breakers().items()),
        accused=tuple(parts.accusations.all()),
        faults=tuple(engine.faults()),
        mode=engine.policy.mode.value,
        topology=tuple(engine.policy.topology_labels),
        cursor=cursor,
    )


def _line(gate: Gate, decision: Decision) -> GateLine:
    return GateLine(
        id=gate.id,
        job=gate.request.job,
        attempt=gate.request.attempt,
        phase=gate.phase,
        wanted=gate.terms.wanted,
        created_at=gate.created_at,
        deadline=gate.deadline,
        validated=bool(gate.validated),
        decision=decision.decision,
        would=decision.would,
        drill=decision.drill,
        reasons=decision.reasons[:MOST_REASONS],
        nodes=len(decision.nodes),
        excluded=len(decision.excluded),
        duration_seconds=decision.duration_seconds,
        decided_at=decision.decided_at,
    )


def cursor_of(cursors: Mapping[str, str]) -> str:
    """Where the stream of several shards goes on: the cursor of each."""
    return ",".join(f"{shard}:{cursor}" for shard, cursor in cursors.items())


def cursors_in(text: str) -> dict[str, str]:
    """The same, read again; what is no cursor is left out."""
    pairs = (part.partition(":") for part in text.split(","))
    return {shard: cursor for shard, colon, cursor in pairs if colon}


def whole_fleet(gathered: Gathered[FleetView]) -> FleetView:
    """One view of all that answered; what says something of a shard as a whole begins with its name."""
    views = gathered.views
    if not gathered.shards and len(views) == 1:
        return next(iter(views.values()))
    overrides = {one.job: one for view in views.values() for one in view.overrides}
    recovering = [f"{shard}: {view.recovering}" for shard, view in views.items() if view.recovering]
    gates = sorted((gate for view in views.values() for gate in view.gates), key=lambda gate: gate.id)
    first = next(iter(views.values()), None)
    return FleetView(
        cells=[cell for view in views.values() for cell in view.cells],
        found=_union(view.found for view in views.values()),
        gates=tuple(gates[:5]),
        open_gates=sum(view.open_gates for view in views.values()),
        overrides=tuple(overrides.values()),
        recovering="; ".join(recovering) or None,
        breakers=tuple(one for view in views.values() for one in view.breakers),
        accused=tuple(one for view in views.values() for one in view.accused),
        faults=tuple(one for view in views.values() for one in view.faults),
        mode=first.mode if first else "",
        topology=first.topology if first else (),
        cursor=cursor_of({shard: view.cursor for shard, view in views.items()}),
    )


def _union(found: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    sets = [one for one in found if one is not None]
    return frozenset().union(*sets) if sets else None


def _for_others(cell: Cell) -> Cell:
    """A cell without what only its own leader needs: what a search looks through is most of it."""
    return dataclasses.replace(cell, codes="", found_by="", place=())


# --- lists: gates, jobs that died, events -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GatesView:
    """Gates in progress and the newest decisions; `older` is where the next page begins, None on the last."""

    under_way: tuple[GateLine, ...]
    more_open: int
    decided: tuple[GateLine, ...]
    older: str | None
    cursor: str


async def _gates(parts: Parts, feed: Feed, asked: Asked) -> GatesView:
    cursor, engine = feed.begin(GATES), parts.engine
    found = await engine.gates(limit=MOST_GATES + 1, before=asked.before or None, job=asked.job or None)
    under_way = [gate for gate in engine.open_gates() if not asked.job or gate.request.job == asked.job]
    shown = [] if asked.before else under_way[:MOST_OPEN_GATES]
    return GatesView(
        under_way=tuple(_line(gate, engine.answer(gate)) for gate in shown),
        more_open=max(0, len(under_way) - MOST_OPEN_GATES),
        decided=tuple(_line(gate, engine.answer(gate)) for gate in found[:MOST_GATES] if gate.decision is not None),
        older=found[MOST_GATES - 1].id if len(found) > MOST_GATES else None,
        cursor=cursor,
    )


def whole_gates(gathered: Gathered[GatesView]) -> GatesView:
    """One list of all that answered. A page ends where the first of the shards has no more on its own."""
    views = gathered.views
    if not gathered.shards and len(views) == 1:
        return next(iter(views.values()))
    under_way = sorted((gate for view in views.values() for gate in view.under_way), key=lambda gate: gate.id)
    rows = sorted((gate for view in views.values() for gate in view.decided), key=lambda gate: gate.id, reverse=True)
    decided, older = _page(rows, [view.older for view in views.values()], lambda gate: gate.id)
    return GatesView(
        under_way=tuple(under_way[:MOST_OPEN_GATES]),
        more_open=sum(view.more_open for view in views.values()) + max(0, len(under_way) - MOST_OPEN_GATES),
        decided=tuple(decided),
        older=older,
        cursor=cursor_of({shard: view.cursor for shard, view in views.items()}),
    )


def _page(rows: Sequence[V], older: Sequence[str | None], key: Callable[[V], str]) -> tuple[Sequence[V], str | None]:
    """The first rows, newest first, and where the next page begins, when any shard has more or they were too many."""
    page = rows[:MOST_GATES]
    more = len(rows) > len(page) or any(one is not None for one in older)
    return page, key(page[-1]) if more and page else None


@dataclass(frozen=True, kw_only=True)
class JobLine:
    """A job that ended badly, on a line; `node` is None where nobody is named."""

    gate: str
    job: str
    attempt: int
    tone: str
    sign: str
    said: str
    node: str | None
    rank: int | None
    sentence: str
    at: float


@dataclass(frozen=True, kw_only=True)
class JobsView:
    """Jobs that ended badly, newest first; `older` as of `GatesView`."""

    jobs: tuple[JobLine, ...]
    older: str | None


async def _jobs(parts: Parts, _feed: Feed, asked: Asked) -> JobsView:
    found = await parts.postmortems.listed(limit=MOST_GATES + 1, before=asked.before or None, job=asked.job or None)
    return JobsView(
        jobs=tuple(map(_job_line, found[:MOST_GATES])),
        older=found[MOST_GATES - 1].gate if len(found) > MOST_GATES else None,
    )


def _job_line(record: Postmortem) -> JobLine:
    end, verdict = job_end(record), record.verdict
    return JobLine(
        gate=record.gate,
        job=record.job,
        attempt=record.attempt,
        tone=end.tone,
        sign=end.sign,
        said=end.said,
        node=None if verdict is None else verdict.node or None,
        rank=None if verdict is None else verdict.rank,
        sentence="" if verdict is None else verdict.sentence,
        at=record.first_told_at,
    )


def whole_jobs(gathered: Gathered[JobsView]) -> JobsView:
    """One list of all that answered."""
    rows = sorted(
        (one for view in gathered.views.values() for one in view.jobs), key=lambda one: one.gate, reverse=True
    )
    page, older = _page(rows, [view.older for view in gathered.views.values()], lambda one: one.gate)
    return JobsView(jobs=tuple(page), older=older)


@dataclass(frozen=True, kw_only=True)
class EventsView:
    """Events of a shard, newest first; `older` is where the next page begins, None on the last."""

    events: tuple[HistoryEvent, ...]
    older: int | None


async def _events(parts: Parts, _feed: Feed, asked: Asked) -> EventsView:
    if asked.q and not asked.q.isprintable():
        raise BadInputError("q: a search has no control characters")
    if asked.before and not (asked.before.isdecimal() and len(asked.before) < 20 and 0 < int(asked.before) <= MOST_ID):
        raise BadInputError("before: name the id of an event")
    before = int(asked.before) if asked.before else None
    found = await parts.engine.history(None, limit=MOST_EVENTS + 1, before=before, days=HISTORY_DAYS, text=asked.q)
    more = len(found) > MOST_EVENTS
    return EventsView(events=tuple(found[:MOST_EVENTS]), older=found[MOST_EVENTS - 1].id if more else None)


def whole_history(gathered: Gathered[EventsView]) -> EventsView:
    """The newest of all that answered. Each shard counts its own events, so older ones are listed for one alone."""
    views = list(gathered.views.values())
    if len(views) == 1:
        return views[0]
    events = sorted((event for view in views for event in view.events), key=lambda event: event.at, reverse=True)
    return EventsView(events=tuple(events[:MOST_EVENTS]), older=None)


# --- measurements -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReadingsView:
    """
    One measurement on the nodes of a shard, and what could be shown in its place: `names`, each with its unit.
    `waiting` nodes have told something that was not read yet.
    """

    names: Mapping[str, str]
    name: str | None
    values: Mapping[str, Reading]
    waiting: int


async def _readings(_parts: Parts, feed: Feed, asked: Asked) -> ReadingsView:
    waiting, readings = feed.catch_up(), feed.samples.readings
    names = readings.names()
    name = chosen_name(names, asked.of)
    return ReadingsView(names=names, name=name, values={} if name is None else readings.of(name), waiting=waiting)


def chosen_name(names: Mapping[str, str], wanted: str) -> str | None:
    """The measurement that is asked for, else one that says most; None where there is none."""
    if wanted in names:
        return wanted
    return next((name for name in names if "flops_per_second" in name), next(iter(names), None))


def whole_readings(gathered: Gathered[ReadingsView]) -> ReadingsView:
    """One measurement in all shards that answered; of those that chose another one there is nothing."""
    views = gathered.views.values()
    names = dict(sorted({name: unit for view in views for name, unit in view.names.items()}.items()))
    chosen = chosen_name(names, next((view.name for view in views if view.name), ""))
    return ReadingsView(
        names=names,
        name=chosen,
        values={node: one for view in views if view.name == chosen for node, one in view.values.items()},
        waiting=sum(view.waiting for view in views),
    )


FLEET_VIEW = Kind(name="fleet", record=FleetView, make=_fleet)
GATES_VIEW = Kind(name="gates", record=GatesView, make=_gates)
JOBS_VIEW = Kind(name="jobs", record=JobsView, make=_jobs)
EVENTS_VIEW = Kind(name="history", record=EventsView, make=_events)
READINGS_VIEW = Kind(name="readings", record=ReadingsView, make=_readings)
KINDS: Mapping[str, Kind[Any]] = {
    kind.name: kind for kind in (FLEET_VIEW, GATES_VIEW, JOBS_VIEW, EVENTS_VIEW, READINGS_VIEW)
}


async def made(name: str, parts: Parts, feed: Feed, asked: Asked) -> bytes:
    """
    A view of a shard, as `Reader` reads it: JSON, and for the fleet its cells on a second line. Of a large shard they
    take a tenth of a second, so they are kept as long as the feed gives the same. NotFoundError for an unknown name.
    """
    if (kind := KINDS.get(name)) is None:
        raise NotFoundError(f"no view is named {name[:80]!r}")
    view = await kind.make(parts, feed, asked)
    if not isinstance(view, FleetView):
        return wire.encode(view)
    if feed.encoded is None or feed.encoded[0] is not view.cells:
        feed.encoded = (view.cells, wire.encode([_for_others(cell) for cell in view.cells]))
    return wire.encode(dataclasses.replace(view, cells=())) + b"\n" + feed.encoded[1]


class Reader:
    """Reads the views that leaders have made; cells that have not changed are read once."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, list[Cell]]] = {}

    def read(self, shard: str, kind: Kind[V], body: bytes) -> V:
        """A view of a shard. BadInputError."""
        first, _, cells = body.partition(b"\n")
        view = wire.decode(first, kind.record, what=f"view {kind.name} of shard {shard}")
        if not isinstance(view, FleetView):
            return view
        if (kept := self._kept.get(shard)) is None or kept[0] != cells:
            kept = self._kept[shard] = (cells, wire.decode(cells, list[Cell], what=f"cells of shard {shard}"))
        return dataclasses.replace(view, cells=kept[1])
