"""
Changes on their way into the tables: upserts, the same on SQLite and PostgreSQL; the caller commits.

Also here:

- the records that are written to the database. Writing each of them again changes nothing, except for `PutEvent`.
  `rows` has their SQL, `reading` what is read back.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Insert, Table, bindparam, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite

from healthd.aggregator.fleet.packed_records import pack_all
from healthd.aggregator.fleet.records import Duplicate
from healthd.aggregator.gate.records import Gate, LeaseRow, Override
from healthd.aggregator.jobs.outcome_records import GateFacts
from healthd.aggregator.jobs.postmortem_records import Postmortem
from healthd.aggregator.quarantine.records import Latch, RuleRecord
from healthd.aggregator.quarantine.repair_records import Repair
from healthd.aggregator.screening.records import Screened
from healthd.aggregator.store.tables import (
    EVENTS,
    EVIDENCE,
    GATES,
    LEASES,
    META,
    NODES,
    NOTES,
    OUTCOMES,
    POSTMORTEMS,
    QUARANTINED,
    RECORDS,
    REPAIRS,
    fit,
)
from healthd.core import wire
from healthd.core.model import NodeState, Quarantine

Record = Quarantine | Override | RuleRecord | tuple[Latch, ...] | str | GateFacts | Screened


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
class PutRepair:
    """A repair, open or closed."""

    repair: Repair


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
class PutRecord:
    """A record of a kind; None: there is none."""

    kind: Kind
    key: str
    record: Record | None


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
    FACTS = "facts"
    """The `GateFacts` of a decided gate, by gate; they go with it. Only a report reads them."""
    SCREENED = "screened"
    """What is remembered of the screenings of a node: its `Screened`, by node. Only screening reads it."""


@dataclass(frozen=True, kw_only=True)
class PutMeta:
    """A fact about the database as a whole."""

    key: str
    value: str


def upsert(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, keep: tuple[str, ...] = ()
) -> None:
    """Insert rows of the same columns, or replace all but those of `keep`; the same on SQLite and PostgreSQL."""
    if not rows:
        return
    statement = _upsert(connection.dialect.name, table, tuple(rows[0]), keep)
    connection.execute(statement, [fit(table, row) for row in rows])


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


@functools.lru_cache(maxsize=256)  # each kind of change has one
def _upsert(dialect: str, table: Table, columns: tuple[str, ...], keep: tuple[str, ...]) -> Insert:
    insert = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    keys = [column.name for column in table.primary_key]
    new = {name: insert.excluded[name] for name in columns if name not in keys and name not in keep}
    return insert.on_conflict_do_update(index_elements=keys, set_=new)


def _forget_nodes(connection: Connection, changes: Sequence[ForgetNode]) -> None:
    names = [c.node for c in changes]
    connection.execute(delete(NODES).where(NODES.c.node.in_(names)))
    kinds = (Kind.QUARANTINE, Kind.RULES, Kind.MACHINE, Kind.SCREENED)
    of_node = RECORDS.c.kind.in_([kind.value for kind in kinds])
    connection.execute(delete(RECORDS).where(of_node, RECORDS.c.key.in_(names)))


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


def _put_repairs(connection: Connection, changes: Sequence[PutRepair]) -> None:
    last = {(c.repair.node, c.repair.device, c.repair.since): c.repair for c in changes}
    rows = [
        {
            "node": repair.node,
            "device": repair.device,
            "since": repair.since,
            "closed_at": repair.closed_at,
            "record": wire.encode(repair).decode(),
        }
        for repair in last.values()
    ]
    upsert(connection, REPAIRS, rows)


Change = (
    PutGate
    | PutEvidence
    | PutLease
    | PutOutcome
    | PutNotes
    | PutPostmortem
    | PutNode
    | PutKey
    | PutDuplicate
    | ForgetNode
    | PutQuarantined
    | PutRepair
    | PutEvent
    | PutMeta
    | PutRecord
)


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
    PutRepair: _put_repairs,
    PutEvidence: lambda to, changes: upsert(
        to, EVIDENCE, [{"gate": c.gate, "states": pack_all(c.states)} for c in changes]
    ),
    PutOutcome: lambda to, changes: _of_known_gates(to, OUTCOMES, [vars(c) for c in changes]),
    PutNotes: lambda to, changes: _of_known_gates(to, NOTES, [vars(c) for c in changes]),
    PutPostmortem: lambda to, changes: _of_known_gates(
        to, POSTMORTEMS, [_postmortem(p) for p in {c.postmortem.gate: c.postmortem for c in changes}.values()]
    ),
    PutEvent: lambda to, changes: to.execute(EVENTS.insert(), [fit(EVENTS, vars(c)) for c in changes]),
}
"""In the order in which they are written."""
