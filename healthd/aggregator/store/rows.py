"""Changes on their way into the tables: upserts, the same on SQLite and PostgreSQL; the caller commits."""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Connection, Insert, Row, Select, Table, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from healthd.aggregator.fleet.packed_records import pack_all
from healthd.aggregator.fleet.records import Duplicate
from healthd.aggregator.gate.records import Gate, LeaseRow, Override
from healthd.aggregator.jobs.outcome_records import STARTED, Counts, DecisionRow, EndRow, GateEnding, GateFacts
from healthd.aggregator.jobs.postmortem_records import Postmortem
from healthd.aggregator.quarantine.records import Latch, RuleRecord
from healthd.aggregator.screening.records import Screened
from healthd.aggregator.store.tables import (
    EVENTS,
    EVIDENCE,
    GATE_FACTS,
    GATE_FAULTS,
    GATES,
    LEASES,
    META,
    NODES,
    NOTES,
    OUTCOMES,
    POSTMORTEMS,
    QUARANTINED,
    RECORDS,
    SCREENINGS,
    fit,
)
from healthd.core import wire
from healthd.core.model import NodeState, Quarantine

# The records that are written to the database. Writing each of them again changes nothing, except for `PutEvent`.
# `rows` has their SQL, `reading` what is read back.


@dataclass(frozen=True, kw_only=True)
class PutGate:
    """A gate."""

    gate: Gate


@dataclass(frozen=True, kw_only=True)
class PutEvidence:
    """The states that a decision is based on."""

    gate: str
    states: tuple[NodeState, ...]


@dataclass(frozen=True, kw_only=True)
class PutFacts:
    """The facts of a decided gate that figures are computed from."""

    facts: GateFacts


@dataclass(frozen=True, kw_only=True)
class PutLease:
    """A lease."""

    row: LeaseRow


@dataclass(frozen=True, kw_only=True)
class PutOutcome:
    """How an admitted job ended."""

    gate: str
    job: str
    attempt: int
    status: str
    message: str
    told_at: float


@dataclass(frozen=True, kw_only=True)
class PutNotes:
    """The packed notes of one member of a job that ended badly."""

    gate: str
    member: str
    node: str
    told_at: float
    notes: bytes


@dataclass(frozen=True, kw_only=True)
class PutPostmortem:
    """What is said of a job's bad end."""

    postmortem: Postmortem


@dataclass(frozen=True, kw_only=True)
class PutNode:
    """A node that has reported; its key is left as it is."""

    node: str
    labels: Mapping[str, str]
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class PutKey:
    """The key of a node; None lets the next one enrol."""

    node: str
    key_hash: str | None
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class PutDuplicate:
    """That two daemons claim the name of a node; None: an admin has decided. No effect on an unknown node."""

    node: str
    duplicate: Duplicate | None


@dataclass(frozen=True, kw_only=True)
class ForgetNode:
    """Deletes a node that is gone for good, with its quarantine and what the rules remember of it."""

    node: str


@dataclass(frozen=True, kw_only=True)
class PutQuarantined:
    """The number of the last quarantine of a node; None forgets it."""

    node: str
    number: int | None


@dataclass(frozen=True, kw_only=True)
class PutEvent:
    """
    A line of the audit trail; `subject` is a node's name, `job:NAME` or `fleet`. The one change that is not an upsert.
    """

    at: float
    subject: str
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class PutScreened:
    """What is remembered of the screenings of a node."""

    screened: Screened


class Kind(str, enum.Enum):
    """What a record of the table `records` is."""

    QUARANTINE = "quarantine"
    """A `Quarantine`, by node."""
    OVERRIDE = "override"
    """An `Override`, by job."""
    RULES = "rules"
    """The `RuleRecord` of a node without its latches, while there is anything to remember."""
    LATCHES = "latches"
    """Each `Latch` on a device or machine, by its serial number, its instance id, else its node's name."""
    MACHINE = "machine"
    """Which machine a node was last, as `healthd.aggregator.fleet.node_record.machine_of` writes it."""


Record = Quarantine | Override | RuleRecord | tuple[Latch, ...] | str


@dataclass(frozen=True, kw_only=True)
class PutRecord:
    """A record of a kind; None: there is none."""

    kind: Kind
    key: str
    record: Record | None


@dataclass(frozen=True, kw_only=True)
class PutMeta:
    """A fact about the database as a whole."""

    key: str
    value: str


Change = (
    PutGate
    | PutEvidence
    | PutFacts
    | PutLease
    | PutOutcome
    | PutNotes
    | PutPostmortem
    | PutNode
    | PutKey
    | PutDuplicate
    | ForgetNode
    | PutQuarantined
    | PutEvent
    | PutMeta
    | PutRecord
    | PutScreened
)


# Facts of gates into their tables, and counted out of them again: one query for each figure, none reads a record.


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


def upsert(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, keep: tuple[str, ...] = ()
) -> None:
    """Insert rows of the same columns, or replace all but those of `keep`; the same on SQLite and PostgreSQL."""
    if not rows:
        return
    statement = _upsert(connection.dialect.name, table, tuple(rows[0]), keep)
    connection.execute(statement, [fit(table, row) for row in rows])


@functools.lru_cache(maxsize=256)  # each kind of change has one
def _upsert(dialect: str, table: Table, columns: tuple[str, ...], keep: tuple[str, ...]) -> Insert:
    insert = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    keys = [column.name for column in table.primary_key]
    new = {name: insert.excluded[name] for name in columns if name not in keys and name not in keep}
    return insert.on_conflict_do_update(index_elements=keys, set_=new)


def apply_changes(connection: Connection, changes: Sequence[Change]) -> None:
    """
    Write them all, of one kind together; the caller commits.

    Within a kind the order stays; between kinds only that gates come before what refers to them.
    """
    kinds: dict[type, list[Any]] = {}
    for change in changes:
        kinds.setdefault(type(change), []).append(change)
    for kind, write in _WRITERS.items():
        if kind in kinds:
            write(connection, kinds[kind])


def _forget_nodes(connection: Connection, changes: Sequence[ForgetNode]) -> None:
    names = [c.node for c in changes]
    connection.execute(delete(NODES).where(NODES.c.node.in_(names)))
    of_node = RECORDS.c.kind.in_([Kind.QUARANTINE.value, Kind.RULES.value, Kind.MACHINE.value])
    connection.execute(delete(RECORDS).where(of_node, RECORDS.c.key.in_(names)))
    connection.execute(delete(SCREENINGS).where(SCREENINGS.c.node.in_(names)))


def _put_records(connection: Connection, changes: Sequence[PutRecord]) -> None:
    last = {(c.kind.value, c.key): c.record for c in changes}
    gone = [{"of_kind": kind, "of_key": key} for (kind, key), record in last.items() if record is None]
    if gone:  # one statement each: a database bounds the parameters of one
        one = (RECORDS.c.kind == bindparam("of_kind")) & (RECORDS.c.key == bindparam("of_key"))
        connection.execute(delete(RECORDS).where(one), gone)
    kept = [
        {"kind": kind, "key": key, "record": wire.encode(record).decode()}
        for (kind, key), record in last.items()
        if record is not None
    ]
    upsert(connection, RECORDS, kept)


def _put_quarantined(connection: Connection, changes: Sequence[PutQuarantined]) -> None:
    last = {change.node: change.number for change in changes}
    gone = [{"of_node": node} for node, number in last.items() if number is None]
    if gone:
        connection.execute(delete(QUARANTINED).where(QUARANTINED.c.node == bindparam("of_node")), gone)
    kept = [{"node": node, "number": number} for node, number in last.items() if number is not None]
    upsert(connection, QUARANTINED, kept)


def _of_known_gates(connection: Connection, table: Table, found: Sequence[Mapping[str, Any]]) -> None:
    """One whose gate was dropped meanwhile is left out: it must not fail what it shares a transaction with."""
    kept = set(connection.scalars(select(GATES.c.id).where(GATES.c.id.in_({row["gate"] for row in found}))))
    upsert(connection, table, [row for row in found if row["gate"] in kept])


def _postmortem(record: Postmortem) -> Mapping[str, Any]:
    return {
        "gate": record.gate,
        "job": record.job,
        "attempt": record.attempt,
        "phase": record.phase.value,
        "record": wire.encode(record).decode(),
    }


def _put_duplicates(connection: Connection, changes: Sequence[PutDuplicate]) -> None:
    for change in changes:
        record = None if change.duplicate is None else wire.encode(change.duplicate).decode()
        connection.execute(update(NODES).where(NODES.c.node == change.node).values(duplicate=record))


def _screened(record: Screened) -> Mapping[str, Any]:
    return {"node": record.node, "record": wire.encode(record).decode()}


def _node(change: PutNode | PutKey, labels: Mapping[str, str], key_hash: str | None) -> Mapping[str, Any]:
    return {
        "node": change.node,
        "key_hash": key_hash,
        "labels": wire.encode(labels).decode(),
        "first_seen": change.seen_at,
        "last_seen": change.seen_at,
    }


def _gate(gate: Gate) -> Mapping[str, Any]:
    return {
        "id": gate.id,
        "job": gate.request.job,
        "attempt": gate.request.attempt,
        "phase": gate.phase.value,
        "created_at": gate.created_at,
        "decided_at": gate.decision.decided_at if gate.decision is not None else None,
        "record": wire.encode(replace(gate, waiting=())).decode(),
    }


def _lease(row: LeaseRow) -> Mapping[str, Any]:
    return {
        "id": row.lease.id,
        "gate": row.lease.gate,
        "node": row.node,
        "state": row.state.value,
        "granted_at": row.granted_at,
        "adopted": row.adopted,
        "record": wire.encode(row).decode(),
    }


_WRITERS: Mapping[type, Callable[[Connection, Any], object]] = {
    PutMeta: lambda to, changes: upsert(to, META, [vars(c) for c in changes]),
    ForgetNode: _forget_nodes,
    PutNode: lambda to, changes: upsert(
        to, NODES, [_node(c, c.labels, None) for c in changes], keep=("first_seen", "key_hash")
    ),
    PutKey: lambda to, changes: upsert(
        to, NODES, [_node(c, {}, c.key_hash) for c in changes], keep=("first_seen", "labels")
    ),
    PutDuplicate: _put_duplicates,
    PutGate: lambda to, changes: upsert(to, GATES, [_gate(g) for g in {c.gate.id: c.gate for c in changes}.values()]),
    PutLease: lambda to, changes: upsert(to, LEASES, [_lease(c.row) for c in changes]),
    PutRecord: _put_records,
    PutQuarantined: _put_quarantined,
    PutScreened: lambda to, changes: upsert(
        to, SCREENINGS, [_screened(s) for s in {c.screened.node: c.screened for c in changes}.values()]
    ),
    PutEvidence: lambda to, changes: upsert(
        to, EVIDENCE, [{"gate": c.gate, "states": pack_all(c.states)} for c in changes]
    ),
    PutFacts: lambda to, changes: put_facts(to, {c.facts.gate: c.facts for c in changes}.values()),
    PutOutcome: lambda to, changes: _of_known_gates(to, OUTCOMES, [vars(c) for c in changes]),
    PutNotes: lambda to, changes: _of_known_gates(to, NOTES, [vars(c) for c in changes]),
    PutPostmortem: lambda to, changes: _of_known_gates(
        to, POSTMORTEMS, [_postmortem(p) for p in {c.postmortem.gate: c.postmortem for c in changes}.values()]
    ),
    PutEvent: lambda to, changes: to.execute(EVENTS.insert(), [fit(EVENTS, vars(c)) for c in changes]),
}
"""In the order in which they are written."""
