"""Changes on their way into the tables: upserts, the same on SQLite and PostgreSQL; the caller commits."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite

from healthd.aggregator.model.claims import LeaseRow
from healthd.aggregator.model.gates import Gate
from healthd.aggregator.store.calibration_rows import put_facts
from healthd.aggregator.store.changes import (
    Change,
    ForgetNode,
    Kind,
    PutDuplicate,
    PutEvent,
    PutEvidence,
    PutFacts,
    PutGate,
    PutKey,
    PutLease,
    PutMeta,
    PutNode,
    PutOutcome,
    PutRecord,
)
from healthd.aggregator.store.tables import EVENTS, EVIDENCE, GATES, LEASES, META, NODES, OUTCOMES, RECORDS, fit
from healthd.core import wire
from healthd.core.model import NodeState


def upsert(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, keep: tuple[str, ...] = ()
) -> None:
    """Insert rows of the same columns, or replace all but those of `keep`; the same on SQLite and PostgreSQL."""
    if not rows:
        return
    insert = postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)
    keys = [column.name for column in table.primary_key]
    new = {name: insert.excluded[name] for name in rows[0] if name not in keys and name not in keep}
    connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=new), [fit(table, row) for row in rows])


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


def _put_outcomes(connection: Connection, changes: Sequence[PutOutcome]) -> None:
    """One whose gate was dropped meanwhile is left out: it must not fail what it shares a transaction with."""
    kept = set(connection.scalars(select(GATES.c.id).where(GATES.c.id.in_({c.gate for c in changes}))))
    upsert(connection, OUTCOMES, [vars(c) for c in changes if c.gate in kept])


def _put_duplicates(connection: Connection, changes: Sequence[PutDuplicate]) -> None:
    for change in changes:
        record = None if change.duplicate is None else wire.encode(change.duplicate).decode()
        connection.execute(update(NODES).where(NODES.c.node == change.node).values(duplicate=record))


def _packed(states: Sequence[NodeState]) -> bytes:
    """What a check is for is in its documentation; in evidence it would be most of the bytes."""
    slim = [replace(state, checks=tuple(replace(spec, doc="") for spec in state.checks)) for state in states]
    return zlib.compress(wire.encode(slim), 1)


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
    PutEvidence: lambda to, changes: upsert(
        to, EVIDENCE, [{"gate": c.gate, "states": _packed(c.states)} for c in changes]
    ),
    PutFacts: lambda to, changes: put_facts(to, {c.facts.gate: c.facts for c in changes}.values()),
    PutOutcome: _put_outcomes,
    PutEvent: lambda to, changes: to.execute(EVENTS.insert(), [fit(EVENTS, vars(c)) for c in changes]),
}
"""In the order in which they are written."""
