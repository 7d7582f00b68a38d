"""Changes on their way into the tables: upserts, the same on SQLite and PostgreSQL; the caller commits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Table, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite

from healthd.aggregator.model import Gate, LeaseRow, Override
from healthd.aggregator.model.quarantines import Latch, RuleRecord
from healthd.aggregator.store.calibration_rows import put_facts
from healthd.aggregator.store.changes import (
    Change,
    ForgetNode,
    PutDuplicate,
    PutEvent,
    PutEvidence,
    PutFacts,
    PutGate,
    PutKey,
    PutLatches,
    PutLease,
    PutMachine,
    PutMeta,
    PutNode,
    PutOutcome,
    PutOverride,
    PutQuarantine,
    PutRecord,
)
from healthd.aggregator.store.tables import (
    EVENTS,
    EVIDENCE,
    GATES,
    LATCHES,
    LEASES,
    MACHINES,
    META,
    NODES,
    OUTCOMES,
    OVERRIDES,
    QUARANTINES,
    RULES,
    fit,
)
from healthd.core import wire
from healthd.core.model import NodeState, Quarantine


def upsert(
    connection: Connection, table: Table, key: str, rows: Sequence[Mapping[str, Any]], *, keep: tuple[str, ...] = ()
) -> None:
    """Insert rows of the same columns, or replace all but those of `keep`; the same on SQLite and PostgreSQL."""
    if not rows:
        return
    insert = postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)
    new = {name: insert.excluded[name] for name in rows[0] if name != key and name not in keep}
    connection.execute(insert.on_conflict_do_update(index_elements=[key], set_=new), [fit(table, row) for row in rows])


def apply_changes(connection: Connection, changes: Sequence[Change]) -> None:
    """
    Write them all, of one kind together; the caller commits.

    Within a kind the order stays; between kinds only that gates come before what refers to them.
    """
    kinds: dict[type, list[Any]] = {}
    for change in changes:
        kinds.setdefault(type(change), []).append(change)
    for kind in sorted(kinds, key=_KINDS.index):
        if kind in _OF_RULES:
            _apply_rules(connection, kinds[kind])
        elif kind is PutFacts:
            put_facts(connection, {c.facts.gate: c.facts for c in kinds[kind]}.values())
        elif kind is PutDuplicate:
            _put_duplicates(connection, kinds[kind])
        else:
            _apply(connection, kind, kinds[kind])


_KINDS: tuple[type, ...] = (
    PutMeta,
    ForgetNode,
    PutNode,
    PutKey,
    PutDuplicate,
    PutGate,
    PutLease,
    PutQuarantine,
    PutOverride,
    PutEvidence,
    PutFacts,
    PutOutcome,
    PutRecord,
    PutLatches,
    PutMachine,
    PutEvent,
)
_OF_RULES = (PutRecord, PutLatches, PutMachine)


def _apply(connection: Connection, kind: type, changes: Sequence[Any]) -> None:
    if kind is PutMeta:
        upsert(connection, META, "key", [{"key": c.key, "value": c.value} for c in changes])
    elif kind is ForgetNode:
        for table in (NODES, QUARANTINES, RULES, MACHINES):
            connection.execute(delete(table).where(table.c.node.in_([c.node for c in changes])))
    elif kind is PutNode:
        upsert(connection, NODES, "node", [_node(c, c.labels, None) for c in changes], keep=("first_seen", "key_hash"))
    elif kind is PutKey:
        upsert(connection, NODES, "node", [_node(c, {}, c.key_hash) for c in changes], keep=("first_seen", "labels"))
    elif kind is PutGate:
        upsert(connection, GATES, "id", [_gate(c.gate) for c in {c.gate.id: c for c in changes}.values()])
    elif kind is PutLease:
        upsert(connection, LEASES, "id", [_lease(c.row) for c in changes])
    elif kind is PutQuarantine:
        _put_records(connection, QUARANTINES, "node", {c.node: c.quarantine for c in changes})
    elif kind is PutOverride:
        _put_records(connection, OVERRIDES, "job", {c.job: c.override for c in changes})
    elif kind is PutEvidence:
        upsert(connection, EVIDENCE, "gate", [{"gate": c.gate, "states": _packed(c.states)} for c in changes])
    elif kind is PutOutcome:
        _put_outcomes(connection, changes)
    else:
        connection.execute(EVENTS.insert(), [fit(EVENTS, vars(c)) for c in changes])


def _apply_rules(connection: Connection, changes: Sequence[PutRecord | PutLatches | PutMachine]) -> None:
    """Changes of one kind."""
    records = {c.node: c.record for c in changes if isinstance(c, PutRecord)}
    latches = {c.identity: c.latches or None for c in changes if isinstance(c, PutLatches)}
    machines = {c.node: {"node": c.node, "record": c.machine} for c in changes if isinstance(c, PutMachine)}
    _put_records(connection, RULES, "node", records)
    _put_records(connection, LATCHES, "identity", latches)
    upsert(connection, MACHINES, "node", list(machines.values()))


def _put_outcomes(connection: Connection, changes: Sequence[PutOutcome]) -> None:
    """One whose gate was dropped meanwhile is left out: it must not fail what it shares a transaction with."""
    kept = set(connection.scalars(select(GATES.c.id).where(GATES.c.id.in_({c.gate for c in changes}))))
    upsert(connection, OUTCOMES, "gate", [vars(c) for c in changes if c.gate in kept])


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


def _put_records(
    connection: Connection,
    table: Table,
    key: str,
    records: Mapping[str, Quarantine | Override | RuleRecord | tuple[Latch, ...] | None],
) -> None:
    gone = [name for name, record in records.items() if record is None]
    if gone:
        connection.execute(delete(table).where(table.c[key].in_(gone)))
    kept = [{key: name, "record": wire.encode(r).decode()} for name, r in records.items() if r is not None]
    upsert(connection, table, key, kept)
