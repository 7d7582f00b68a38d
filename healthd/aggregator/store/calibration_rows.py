"""
Facts of gates into their tables, and counted out of them again: one query for each figure, none reads a record.

The queries run on the store's one thread, between writes, so that they are bounded by what is kept (20,000 gates).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete, func, select

from healthd.aggregator.model.calibration import STARTED, Counts, DecisionRow, EndRow, GateEnding, GateFacts
from healthd.aggregator.store.tables import GATE_FACTS, GATE_FAULTS, OUTCOMES, fit
from healthd.core import wire

T = TypeVar("T")

MOST_EXCLUDED_ROWS = 20_000
"""Nodes, and (node, reason) pairs, that one report looks at: a fleet of 10,000 with two reasons each."""


def put_facts(connection: Connection, facts: Iterable[GateFacts]) -> None:
    """Write them, in the place of what was there; the caller commits."""
    found = list(facts)
    gates = [one.gate for one in found]
    for table in (GATE_FAULTS, GATE_FACTS):
        connection.execute(delete(table).where(table.c.gate.in_(gates)))
    rows = [wire.plain(one) for one in found]
    faults = [
        {
            "gate": row["gate"],
            "number": number,
            "node": fault["node"],
            "check_name": fault["check"],
            "code": fault["code"],
            "left_out": fault["out"],
        }
        for row in rows
        for number, fault in enumerate(row.pop("faults"))
    ]
    connection.execute(GATE_FACTS.insert(), rows)
    if faults:
        connection.execute(GATE_FAULTS.insert(), [fit(GATE_FAULTS, fault) for fault in faults])


def read_facts(connection: Connection, gate_id: str) -> GateFacts | None:
    """The facts of a gate without its faults; None of one that is open."""
    row = connection.execute(select(GATE_FACTS).where(GATE_FACTS.c.gate == gate_id)).one_or_none()
    return None if row is None else _record(row, GateFacts)


def read_counts(connection: Connection, since: float) -> Counts:
    """What was counted of gates that were decided from `since` (seconds since the epoch) on."""
    decisions, oldest = _decisions(connection, since)
    out, excluded = _excluded(connection, since)
    return Counts(
        since=oldest,
        ends=_ends(connection, since),
        decisions=decisions,
        failed=_failed(connection, since),
        excluded=excluded,
        out=out,
        waits=_waits(connection, since),
    )


def _decisions(connection: Connection, since: float) -> tuple[list[DecisionRow], float | None]:
    query = (
        select(
            GATE_FACTS.c.way,
            GATE_FACTS.c.would,
            func.count().label("count"),
            func.sum(GATE_FACTS.c.device_seconds).label("device_seconds"),
            func.min(GATE_FACTS.c.decided_at).label("oldest"),
        )
        .where(GATE_FACTS.c.decided_at >= since)
        .group_by(GATE_FACTS.c.way, GATE_FACTS.c.would)
    )
    rows = connection.execute(query).all()
    found = [_record(row, DecisionRow) for row in rows]
    return found, min((row.oldest for row in rows), default=None)


def _ends(connection: Connection, since: float) -> list[EndRow]:
    kinds = (OUTCOMES.c.status, GATE_FACTS.c.way, GATE_FACTS.c.would, GATE_FACTS.c.alarmed, GATE_FACTS.c.clean)
    query = (
        select(*kinds, func.count().label("count"))
        .join_from(GATE_FACTS, OUTCOMES, GATE_FACTS.c.gate == OUTCOMES.c.gate)
        .where(GATE_FACTS.c.decided_at >= since)
        .group_by(*kinds)
    )
    return [_record(row, EndRow) for row in connection.execute(query)]


def _failed(connection: Connection, since: float) -> list[tuple[str, str, int]]:
    """Checks that had failed on a node of a job that ran all the same, by how it ended."""
    started = [way.value for way in STARTED]
    query = (
        select(GATE_FAULTS.c.check_name, OUTCOMES.c.status, func.count(GATE_FACTS.c.gate.distinct()).label("gates"))
        .join_from(GATE_FACTS, GATE_FAULTS, GATE_FACTS.c.gate == GATE_FAULTS.c.gate)
        .join(OUTCOMES, GATE_FACTS.c.gate == OUTCOMES.c.gate)
        .where(GATE_FACTS.c.decided_at >= since, GATE_FACTS.c.way.in_(started), GATE_FAULTS.c.left_out.is_(False))
        .group_by(GATE_FAULTS.c.check_name, OUTCOMES.c.status)
    )
    return [(r.check_name, r.status, r.gates) for r in connection.execute(query)]


def _excluded(connection: Connection, since: float) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """By node in how many gates it was left out, and by (node, reason)."""
    gates = func.count(GATE_FACTS.c.gate.distinct()).label("gates")

    def of(query: Select[tuple[str, int]] | Select[tuple[str, str, int]]) -> list[tuple[str | int, ...]]:
        narrowed = (
            query.join_from(GATE_FACTS, GATE_FAULTS, GATE_FACTS.c.gate == GATE_FAULTS.c.gate)
            .where(GATE_FACTS.c.decided_at >= since, GATE_FAULTS.c.left_out.is_(True))
            .order_by(gates.desc(), GATE_FAULTS.c.node)
            .limit(MOST_EXCLUDED_ROWS)
        )
        return [tuple(row) for row in connection.execute(narrowed)]

    nodes = of(select(GATE_FAULTS.c.node, gates).group_by(GATE_FAULTS.c.node))
    reasons = of(select(GATE_FAULTS.c.node, GATE_FAULTS.c.code, gates).group_by(GATE_FAULTS.c.node, GATE_FAULTS.c.code))
    return {str(node): int(count) for node, count in nodes}, [(str(n), str(c), int(k)) for n, c, k in reasons]


def _waits(connection: Connection, since: float) -> dict[GateEnding, list[float]]:
    query = (
        select(GATE_FACTS.c.way, GATE_FACTS.c.wait_seconds)
        .where(GATE_FACTS.c.decided_at >= since)
        .order_by(GATE_FACTS.c.wait_seconds)
    )
    found: dict[GateEnding, list[float]] = defaultdict(list)
    for way, seconds in connection.execute(query):
        found[GateEnding(way)].append(seconds)
    return dict(found)


def _record(row: Row[Any], wanted: type[T]) -> T:
    """A row as a record of the same names; their labels are texts of SQLAlchemy's own kind."""
    return wire.convert({str(name): value for name, value in row._mapping.items()}, wanted, what="facts of gates")
