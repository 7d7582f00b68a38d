"""
The tables of the aggregator's database.

What decides is in columns; what is only read back whole is JSON of the model (`healthd.core.wire`). A new
database is made from these; a change here needs a file in `migrations/versions` for those that are there already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from healthd.core.text import plain

METADATA = MetaData()

META = Table(
    "meta",
    METADATA,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
"""
`store_id` names the database for life, `lease_key` is the secret by which it recognizes leases that it granted; other
keys are the engine's.
"""

LEADERSHIP = Table(
    "leadership",
    METADATA,
    Column("shard", String(253), primary_key=True),
    Column("term", Integer, nullable=False),
    Column("holder", String(300), nullable=False),
    Column("url", String(300), nullable=False),
    Column("renewed", Double, nullable=False),
)
"""
One row, `default`: which aggregator may write; see `leadership`. `term` counts takeovers, `holder` is empty while there
is no leader, `url` is where the leader answers, `renewed` is a time of day.
"""

AGGREGATORS = Table(
    "aggregators",
    METADATA,
    Column("url", String(300), primary_key=True),
    Column("renewed", Double, nullable=False),
)
"""The aggregators that use the database, by the URL at which each answers; `renewed` is a time of day."""

QUARANTINED = Table(
    "quarantined",
    METADATA,
    Column("node", String(253), primary_key=True),
    Column("number", Integer, nullable=False),
)
"""The number of the last quarantine of a node, also of one that was lifted."""

NODES = Table(
    "nodes",
    METADATA,
    Column("node", String(253), primary_key=True),
    Column("key_hash", String(128)),
    Column("labels", Text, nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("duplicate", Text),
)
"""`duplicate` is a whole `Duplicate` while two daemons claim the name."""

GATES = Table(
    "gates",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("job", String(256), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("decided_at", Double),
    Column("record", Text, nullable=False),
    UniqueConstraint("job", "attempt", name="one_gate_for_each_attempt"),
    Index("gates_by_phase", "phase"),
    Index("gates_by_age", "created_at"),
)
"""`record` is the whole `Gate`: request, reservation, ordered runs, decision."""

EVIDENCE = Table(
    "evidence",
    METADATA,
    Column("gate", String(64), ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
    Column("states", LargeBinary, nullable=False),
)
"""The states of the nodes that a decision went by, as JSON packed by zlib."""

LEASES = Table(
    "leases",
    METADATA,
    Column("id", String(400), primary_key=True),
    Column("gate", String(64), nullable=False),
    Column("node", String(253), nullable=False),
    Column("state", String(16), nullable=False),
    Column("granted_at", Double, nullable=False),
    Column("adopted", Boolean, nullable=False),
    Column("record", Text, nullable=False),
    Index("leases_by_state", "state"),
    Index("leases_by_gate", "gate"),
)
"""No key into gates: a lease adopted from another database has its gate there."""

RECORDS = Table(
    "records",
    METADATA,
    Column("kind", String(16), primary_key=True),
    Column("key", String(300), primary_key=True),
    Column("record", Text, nullable=False),
)
"""What is read and written whole, by the name of what it is about; the kinds: `healthd.aggregator.store.rows.Kind`."""

REPAIRS = Table(
    "repairs",
    METADATA,
    Column("node", String(253), primary_key=True),
    Column("device", String(128), primary_key=True),
    Column("since", Double, primary_key=True),
    Column("closed_at", Double),
    Column("record", Text, nullable=False),
    Index("repairs_by_end", "closed_at"),
)
"""`record` is the whole `Repair`; `closed_at` is empty while it is open."""

OUTCOMES = Table(
    "outcomes",
    METADATA,
    Column("gate", String(64), ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
    Column("job", String(256), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("status", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("told_at", Double, nullable=False),
)

NOTES = Table(
    "notes",
    METADATA,
    Column("gate", String(64), ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
    Column("member", String(300), primary_key=True),
    Column("node", String(253), nullable=False),
    Column("told_at", Double, nullable=False),
    Column("notes", LargeBinary, nullable=False),
)
"""What each `healthd run` of a job sent of its bad end, as `healthd.postmortem.notes.pack` packs it."""

POSTMORTEMS = Table(
    "postmortems",
    METADATA,
    Column("gate", String(64), ForeignKey("gates.id", ondelete="CASCADE"), primary_key=True),
    Column("job", String(256), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("record", Text, nullable=False),
    Index("postmortems_by_job", "job"),
    Index("postmortems_by_phase", "phase"),
)
"""`record` is the whole `Postmortem`."""

EVENTS = Table(
    "events",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("subject", String(300), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Index("events_by_subject", "subject", "id"),
    Index("events_by_age", "at"),
)
"""The audit trail: `subject` is a node's name, `job:NAME`, or `fleet`."""


def fit(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """
    The row with text that every database takes.

    PostgreSQL refuses a NUL and what is longer than its column, and with it the whole transaction: one odd word of one
    node would stop everybody. JSON has neither.
    """
    return {key: _fitted(value, table.c[key].type) if isinstance(value, str) else value for key, value in row.items()}


def _fitted(text: str, kind: object) -> str:
    length = kind.length if isinstance(kind, String) else None
    return text.replace("\0", " ") if length is None else plain(text, length)
