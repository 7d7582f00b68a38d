"""What the pages over the whole fleet show, made from what the leader has in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from healthd.aggregator.api import Parts
from healthd.aggregator.engine import Fault
from healthd.aggregator.gate.records import Gate, Override, Phase
from healthd.aggregator.jobs.postmortem_records import Postmortem
from healthd.aggregator.page import fleet_grid
from healthd.aggregator.page.events import FLEET, GATES, Feed
from healthd.aggregator.page.fleet_grid import Cell
from healthd.aggregator.page.job_view import job_end
from healthd.aggregator.page.samples import Reading
from healthd.aggregator.policy import HISTORY_DAYS
from healthd.aggregator.quarantine import Accusation
from healthd.aggregator.quarantine.records import Breaker
from healthd.aggregator.store import HistoryEvent
from healthd.core.errors import BadInputError
from healthd.core.model import Decision, Reason, Verdict

V = TypeVar("V")

MOST_GATES = 50
MOST_OPEN_GATES = 100
MOST_EVENTS = 100
MOST_REASONS = 3
"""Of what one page shows; what is more is counted, or on the next page."""


def fleet_view(parts: Parts, feed: Feed, *, q: str) -> FleetView:
    """The fleet, and which nodes a search finds."""
    feed.begin(FLEET)
    cells, cursor = feed.all_cells()
    engine = parts.engine
    open_gates = engine.open_gates()
    return FleetView(
        cells=cells,
        found=frozenset(cell.node for cell in fleet_grid.found(cells, q)) if q else None,
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
        without_limits=len(feed.samples.without_limits),
    )


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """
    All that the first page shows. `found` are the nodes that the search finds, None: nothing is searched.
    `cursor` is where the stream of changes goes on from here. `without_limits` counts nodes that measured speeds
    and have no configured or learned limit for them.
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
    without_limits: int

    @property
    def found_cells(self) -> list[Cell]:
        """The cells that the search finds; all of them where nothing is searched."""
        return [cell for cell in self.cells if self.found is None or cell.node in self.found]


async def gates_view(parts: Parts, feed: Feed, *, job: str, before: str) -> GatesView:
    """Gates of all jobs or of one, decided before the gate `before`."""
    cursor, engine = feed.begin(GATES), parts.engine
    found = await engine.gates(limit=MOST_GATES + 1, before=before or None, job=job or None)
    under_way = [gate for gate in engine.open_gates() if not job or gate.request.job == job]
    shown = [] if before else under_way[:MOST_OPEN_GATES]
    return GatesView(
        under_way=tuple(_line(gate, engine.answer(gate)) for gate in shown),
        more_open=max(0, len(under_way) - MOST_OPEN_GATES),
        decided=tuple(_line(gate, engine.answer(gate)) for gate in found[:MOST_GATES] if gate.decision is not None),
        older=found[MOST_GATES - 1].id if len(found) > MOST_GATES else None,
        cursor=cursor,
    )


@dataclass(frozen=True, kw_only=True)
class GatesView:
    """Gates in progress and the newest decisions; `older` is where the next page begins, None on the last."""

    under_way: tuple[GateLine, ...]
    more_open: int
    decided: tuple[GateLine, ...]
    older: str | None
    cursor: str


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


async def jobs_view(parts: Parts, *, job: str, before: str) -> JobsView:
    """Ends of all jobs or of one, of gates before `before`."""
    found = await parts.postmortems.listed(limit=MOST_GATES + 1, before=before or None, job=job or None)
    return JobsView(
        jobs=tuple(map(_job_line, found[:MOST_GATES])),
        older=found[MOST_GATES - 1].gate if len(found) > MOST_GATES else None,
    )


@dataclass(frozen=True, kw_only=True)
class JobsView:
    """Jobs that ended badly, newest first; `older` as of `GatesView`."""

    jobs: tuple[JobLine, ...]
    older: str | None


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


async def events_view(parts: Parts, *, q: str, kind: str, before: int | None) -> EventsView:
    """Events of a kind in which a search finds something, before the event `before`. BadInputError."""
    for name, text in (("q", q), ("kind", kind)):
        if text and not text.isprintable():
            raise BadInputError(f"{name}: a search must not contain control characters")
    engine = parts.engine
    found = await engine.history(None, limit=MOST_EVENTS + 1, before=before, days=HISTORY_DAYS, text=q, kind=kind)
    more = len(found) > MOST_EVENTS
    return EventsView(
        events=tuple(found[:MOST_EVENTS]),
        older=found[MOST_EVENTS - 1].id if more else None,
        kinds=await engine.kinds(),
    )


@dataclass(frozen=True, kw_only=True)
class EventsView:
    """Events, newest first; `older` is where the next page begins, None on the last. `kinds` are there to choose."""

    events: tuple[HistoryEvent, ...]
    older: int | None
    kinds: tuple[str, ...]


def readings_view(feed: Feed, *, of: str) -> ReadingsView:
    """The measurement `of`, or another one where there is none of that name."""
    waiting, readings = feed.catch_up(), feed.samples.readings
    names = readings.names()
    name = _chosen_name(names, of)
    return ReadingsView(names=names, name=name, values={} if name is None else readings.of(name), waiting=waiting)


@dataclass(frozen=True, kw_only=True)
class ReadingsView:
    """
    One measurement on the nodes, and what could be shown in its place: `names`, each with its unit.
    `waiting` nodes have told something that was not read yet.
    """

    names: Mapping[str, str]
    name: str | None
    values: Mapping[str, Reading]
    waiting: int


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


def _chosen_name(names: Mapping[str, str], wanted: str) -> str | None:
    """The measurement that is asked for, else one that says most; None where there is none."""
    if wanted in names:
        return wanted
    return next((name for name in names if "flops_per_second" in name), next(iter(names), None))
