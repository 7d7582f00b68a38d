"""
What is read back from the database: all that an aggregator starts from, gates, their evidence; and what goes.

Also here:

- what happened, to a node or the fleet, page by page: failed checks, quarantines, leases, accusations, boots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, func, or_, select, text

from healthd.aggregator.fleet.packed_records import unpack_all
from healthd.aggregator.fleet.records import Duplicate
from healthd.aggregator.gate.records import Gate, LeaseRow, LeaseState, Override, Phase
from healthd.aggregator.jobs.outcome_records import GateFacts
from healthd.aggregator.jobs.postmortem_records import Postmortem, PostmortemPhase
from healthd.aggregator.quarantine.records import Latch, RuleRecord
from healthd.aggregator.quarantine.repair_records import Repair
from healthd.aggregator.screening.records import Screened
from healthd.aggregator.store.rows import Kind, PutEvent, PutNotes, PutOutcome
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
)
from healthd.core import wire
from healthd.core.errors import BadInputError
from healthd.core.model import NodeState, Quarantine

MOST_NOTED = 200
"""Jobs whose notes are kept, to be looked at again: at 64 nodes with 100 KB each some 1.3 GB at the very most."""

REPAIRS_DAYS = 365
"""How much longer than events closed repairs are kept: what failed a year ago still says something of a node."""

_RECORDS: Mapping[Kind, Any] = {
    Kind.QUARANTINE: Quarantine,
    Kind.OVERRIDE: Override,
    Kind.RULES: RuleRecord,
    Kind.LATCHES: tuple[Latch, ...],
    Kind.MACHINE: str,
}
"""Those that an aggregator starts from."""
_LATER = (Kind.FACTS.value, Kind.SCREENED.value)
"""Those that are read by whom they concern."""

# Of a search: each costs a look at every line that is searched, on the thread that also commits what gates decide.
MOST_WORDS = 4
MOST_SEARCHED = 20_000


def load(connection: Connection) -> Loaded:
    """Read everything that an aggregator starts from; BadInputError when a record cannot be decoded."""
    open_gates = select(GATES.c.id, GATES.c.record).where(GATES.c.phase != Phase.DECIDED.value).order_by(GATES.c.id)
    open_leases = (
        select(LEASES.c.id, LEASES.c.record).where(LEASES.c.state != LeaseState.CLOSED.value).order_by(LEASES.c.id)
    )
    kinds = {kind.value for kind in _RECORDS}
    records: dict[Kind, dict[str, Any]] = {kind: {} for kind in _RECORDS}
    for r in connection.execute(select(RECORDS).where(RECORDS.c.kind.not_in(_LATER))):
        if r.kind not in kinds:
            raise BadInputError(
                f"the record {r.key} of kind {r.kind!r} was written by a newer healthd; upgrade healthd"
            )
        kind = Kind(r.kind)
        records[kind][r.key] = wire.decode(r.record.encode(), _RECORDS[kind], what=f"{kind.value} of {r.key}")
    return Loaded(
        gates=tuple(wire.decode(r.record.encode(), Gate, what=f"gate {r.id}") for r in connection.execute(open_gates)),
        keys={(r.job, r.attempt): r.id for r in connection.execute(select(GATES.c.job, GATES.c.attempt, GATES.c.id))},
        leases=tuple(
            wire.decode(r.record.encode(), LeaseRow, what=f"lease {r.id}") for r in connection.execute(open_leases)
        ),
        quarantines=records[Kind.QUARANTINE],
        quarantined={r.node: r.number for r in connection.execute(select(QUARANTINED))},
        overrides=records[Kind.OVERRIDE],
        nodes=tuple(
            NodeRow(
                node=r.node,
                key_hash=r.key_hash,
                labels=wire.decode(r.labels.encode(), dict[str, str], what=f"labels of {r.node}"),
                last_seen=r.last_seen,
                duplicate=None
                if r.duplicate is None
                else wire.decode(r.duplicate.encode(), Duplicate, what=f"duplicate of {r.node}"),
            )
            for r in connection.execute(select(NODES).order_by(NODES.c.node))
        ),
        meta={r.key: r.value for r in connection.execute(select(META))},
        rules=records[Kind.RULES],
        latches=records[Kind.LATCHES],
        machines=records[Kind.MACHINE],
        repairs=_repairs(connection, select(REPAIRS).where(REPAIRS.c.closed_at.is_(None)).order_by(REPAIRS.c.since)),
    )


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Everything that an aggregator starts from. `keys` maps job and attempt to gate ids; `gates` are the open ones."""

    gates: tuple[Gate, ...]
    keys: Mapping[tuple[str, int], str]
    leases: tuple[LeaseRow, ...]
    quarantines: Mapping[str, Quarantine]
    quarantined: Mapping[str, int]
    overrides: Mapping[str, Override]
    nodes: tuple[NodeRow, ...]
    meta: Mapping[str, str]
    rules: Mapping[str, RuleRecord]
    latches: Mapping[str, tuple[Latch, ...]]
    machines: Mapping[str, str]
    repairs: tuple[Repair, ...] = ()
    """The open ones."""


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """A node as the store knows it; `duplicate` while two daemons claim its name."""

    node: str
    key_hash: str | None
    labels: Mapping[str, str]
    last_seen: float
    duplicate: Duplicate | None = None


def read_closed_repairs(connection: Connection, *, limit: int) -> tuple[Repair, ...]:
    """Repairs that are closed, the newest first."""
    query = select(REPAIRS).where(REPAIRS.c.closed_at.is_not(None)).order_by(REPAIRS.c.closed_at.desc()).limit(limit)
    return _repairs(connection, query)


def read_screened(connection: Connection) -> dict[str, Screened]:
    """What is remembered of the screenings of all nodes."""
    rows = connection.execute(select(RECORDS).where(RECORDS.c.kind == Kind.SCREENED.value))
    return {r.key: wire.decode(r.record.encode(), Screened, what=f"screenings of {r.key}") for r in rows}


def read_gate(connection: Connection, gate_id: str) -> Gate | None:
    """One gate, open or decided."""
    row = connection.execute(select(GATES.c.record).where(GATES.c.id == gate_id)).one_or_none()
    return None if row is None else wire.decode(row.record.encode(), Gate, what=f"gate {gate_id}")


def read_leases(connection: Connection, lease_ids: Collection[str]) -> tuple[LeaseRow, ...]:
    """The leases of these ids, closed ones too. No lease has an id with control characters."""
    asked = [lease_id for lease_id in lease_ids if lease_id.isprintable()]  # PostgreSQL drops the connection over a NUL
    found = connection.execute(select(LEASES.c.id, LEASES.c.record).where(LEASES.c.id.in_(asked)))
    return tuple(wire.decode(r.record.encode(), LeaseRow, what=f"lease {r.id}") for r in found)


def read_evidence(connection: Connection, gate_id: str) -> tuple[NodeState, ...]:
    """The states that a decision is based on; empty for an open gate."""
    row = connection.execute(select(EVIDENCE.c.states).where(EVIDENCE.c.gate == gate_id)).one_or_none()
    if row is None:
        return ()
    return unpack_all(row.states, what=f"evidence of gate {gate_id}")


def read_gates(connection: Connection, *, limit: int, before: str | None, job: str | None) -> tuple[Gate, ...]:
    """Gates, newest first; `before` is the id to continue from. No gate has a name with control characters."""
    if not all(text is None or text.isprintable() for text in (before, job)):
        return ()  # PostgreSQL drops the connection over a NUL
    query = select(GATES.c.id, GATES.c.record).order_by(GATES.c.id.desc()).limit(limit)
    query = query if before is None else query.where(GATES.c.id < before)
    query = query if job is None else query.where(GATES.c.job == job)
    return tuple(wire.decode(r.record.encode(), Gate, what=f"gate {r.id}") for r in connection.execute(query))


def read_outcome(connection: Connection, gate_id: str) -> PutOutcome | None:
    """How the job of a gate ended; None when nobody has said."""
    row = connection.execute(select(OUTCOMES).where(OUTCOMES.c.gate == gate_id)).one_or_none()
    return None if row is None else PutOutcome(**row._mapping)


def read_facts(connection: Connection, gate_id: str) -> GateFacts | None:
    """The facts of a gate; None of one that is open."""
    key = (RECORDS.c.kind == Kind.FACTS.value) & (RECORDS.c.key == gate_id)
    record = connection.execute(select(RECORDS.c.record).where(key)).scalar_one_or_none()
    return None if record is None else _facts(gate_id, record)


def read_facts_since(connection: Connection, since: float) -> Iterator[tuple[GateFacts, str | None]]:
    """The facts of gates decided from `since` (seconds since the epoch) on, each with the reported outcome, if any."""
    query = (
        select(RECORDS.c.key, RECORDS.c.record, OUTCOMES.c.status)
        .join_from(RECORDS, OUTCOMES, RECORDS.c.key == OUTCOMES.c.gate, isouter=True)
        .where(RECORDS.c.kind == Kind.FACTS.value)
    )
    for row in connection.execute(query):
        facts = _facts(row.key, row.record)
        if facts.decided_at >= since:
            yield facts, row.status


def read_notes(connection: Connection, gate_id: str) -> tuple[PutNotes, ...]:
    """The notes that the members of a job have sent."""
    rows = connection.execute(select(NOTES).where(NOTES.c.gate == gate_id).order_by(NOTES.c.member))
    return tuple(PutNotes(**row._mapping) for row in rows)


def read_postmortem(connection: Connection, gate_id: str) -> Postmortem | None:
    """What was said of the bad end of a gate's job; None where nobody has told of one."""
    found = connection.execute(select(POSTMORTEMS.c.record).where(POSTMORTEMS.c.gate == gate_id)).one_or_none()
    return None if found is None else wire.decode(found.record.encode(), Postmortem, what=f"end of gate {gate_id}")


def read_postmortems(
    connection: Connection, *, limit: int, before: str | None = None, job: str | None = None, final: bool | None = None
) -> tuple[Postmortem, ...]:
    """
    Bad ends of jobs, by their gates, newest first; `before` is the gate to continue from. `final` False: those that
    more is waited for. No gate and no job has a name with control characters.
    """
    if not all(text is None or text.isprintable() for text in (before, job)):
        return ()  # PostgreSQL drops the connection over a NUL
    query = select(POSTMORTEMS.c.gate, POSTMORTEMS.c.record).order_by(POSTMORTEMS.c.gate.desc()).limit(limit)
    query = query if before is None else query.where(POSTMORTEMS.c.gate < before)
    query = query if job is None else query.where(POSTMORTEMS.c.job == job)
    if final is not None:
        is_final = POSTMORTEMS.c.phase == PostmortemPhase.FINAL.value
        query = query.where(is_final if final else ~is_final)
    return tuple(
        wire.decode(row.record.encode(), Postmortem, what=f"end of gate {row.gate}")
        for row in connection.execute(query)
    )


def prune(
    connection: Connection,
    *,
    before: float,
    most_gates: int,
    most_events: int,
    history_before: float = 0.0,
    most_noted: int = MOST_NOTED,
) -> tuple[str, ...]:
    """
    Drop the notes of all but the newest `most_noted` jobs that ended badly (what was said of them stays with their
    gates); decided gates older than `before` or beyond `most_gates`, unless a lease of theirs is open; closed leases of
    gates that are gone; all but the newest `most_events` events of each subject, those of nodes older than
    `history_before`, those of jobs older than `before`, and those of jobs without a gate that are older than all of the
    newest `most_gates`; repairs that were closed REPAIRS_DAYS before `history_before`. Returns the ids of the gates
    dropped.
    """
    leased = select(LEASES.c.gate).where(LEASES.c.state != LeaseState.CLOSED.value)
    newest = select(GATES.c.id).order_by(GATES.c.id.desc()).limit(most_gates)
    old = (GATES.c.created_at < before) | GATES.c.id.not_in(newest)
    where = (GATES.c.phase == Phase.DECIDED.value) & old & GATES.c.id.not_in(leased)
    dropped = tuple(connection.execute(select(GATES.c.id).where(where)).scalars())
    beyond = select(GATES.c.created_at).order_by(GATES.c.id.desc()).offset(most_gates).limit(1)
    older_than_kept: float | None = connection.execute(beyond).scalar()
    noted = select(POSTMORTEMS.c.gate).order_by(POSTMORTEMS.c.gate.desc()).limit(most_noted)
    connection.execute(delete(NOTES).where(NOTES.c.gate.not_in(noted)))
    connection.execute(delete(REPAIRS).where(REPAIRS.c.closed_at < history_before - REPAIRS_DAYS * 86400.0))
    connection.execute(delete(GATES).where(where))
    of_gone = (RECORDS.c.kind == Kind.FACTS.value) & RECORDS.c.key.not_in(select(GATES.c.id))
    connection.execute(delete(RECORDS).where(of_gone))
    connection.execute(
        delete(LEASES).where(LEASES.c.state == LeaseState.CLOSED.value, LEASES.c.gate.not_in(select(GATES.c.id)))
    )
    of_job = EVENTS.c.subject.like("job:%")
    connection.execute(delete(EVENTS).where(EVENTS.c.at < history_before, ~of_job))
    connection.execute(delete(EVENTS).where(EVENTS.c.at < min(before, history_before), of_job))
    if older_than_kept is not None:  # else nothing bounds the history of jobs of which each has a name of its own
        of_gates = select("job:" + GATES.c.job)
        without_gate = EVENTS.c.subject.not_in(of_gates)
        connection.execute(delete(EVENTS).where(EVENTS.c.at <= older_than_kept, of_job, without_gate))
    _drop_beyond(connection, most_events)
    return dropped


def check_whole(connection: Connection) -> str | None:
    """What is wrong with the database file; None when nothing is. PostgreSQL looks after itself."""
    if connection.dialect.name != "sqlite":
        return None
    found = connection.execute(text("PRAGMA quick_check(1)")).scalar()
    return None if found == "ok" else str(found)


def read_history(
    connection: Connection,
    subject: str | None,
    *,
    limit: int,
    before: int | None = None,
    since: float = 0.0,
    text: str = "",
    kind: str = "",
) -> tuple[HistoryEvent, ...]:
    """
    Events of a node or job, newest first and none older than `since`; `before` is the id to go on from.

    None: of all subjects. With `kind` those of it alone, and with `text` those whose subject, kind or message has each
    word of it; both among the newest MOST_SEARCHED.
    """
    columns = (EVENTS.c.id, EVENTS.c.at, EVENTS.c.kind, EVENTS.c.message, EVENTS.c.subject)
    query = select(*columns).where(EVENTS.c.at >= since)
    newest = select(EVENTS.c.id).order_by(EVENTS.c.id.desc()).limit(MOST_SEARCHED)
    if subject is not None:
        query = query.where(EVENTS.c.subject == subject)
    if before is not None:
        query, newest = query.where(EVENTS.c.id < before), newest.where(EVENTS.c.id < before)
    words = text.split()[:MOST_WORDS]
    if kind or words:
        query = query.where(EVENTS.c.id.in_(newest))
    if kind:
        query = query.where(EVENTS.c.kind == kind)
    for word in words:
        query = query.where(or_(*(one.icontains(word, autoescape=True) for one in columns[2:])))
    rows = connection.execute(query.order_by(EVENTS.c.id.desc()).limit(limit))
    return tuple(HistoryEvent(**row._mapping) for row in rows)


@dataclass(frozen=True, kw_only=True)
class HistoryEvent(PutEvent):
    """
    One line; `id` grows with time, `at` is in seconds since the epoch.

    `subject` is a node's name, `job:NAME` or `fleet`.
    """

    id: int


def read_kinds(connection: Connection) -> tuple[str, ...]:
    """The kinds of the newest MOST_SEARCHED events, in order."""
    newest = select(EVENTS.c.kind).order_by(EVENTS.c.id.desc()).limit(MOST_SEARCHED).subquery()
    return tuple(connection.execute(select(newest.c.kind).distinct().order_by(newest.c.kind)).scalars())


def _repairs(connection: Connection, query: Select[Any]) -> tuple[Repair, ...]:
    rows = connection.execute(query)
    return tuple(wire.decode(r.record.encode(), Repair, what=f"repair of {r.node} {r.device}") for r in rows)


def _facts(gate_id: str, record: str) -> GateFacts:
    return wire.decode(record.encode(), GateFacts, what=f"facts of gate {gate_id}")


def _drop_beyond(connection: Connection, most_events: int) -> None:
    """
    Drop all but the newest events of each subject. Nobody gets an answer meanwhile, and there may be two million:
    so they are counted in an index, not ranked one by one, which takes six times the work.
    """
    full = select(EVENTS.c.subject).group_by(EVENTS.c.subject).having(func.count() > most_events)
    subjects = [{"full": subject} for subject in connection.execute(full).scalars()]
    of_full = EVENTS.c.subject == bindparam("full")
    newest = select(EVENTS.c.id).where(of_full).order_by(EVENTS.c.id.desc()).offset(most_events).limit(1)
    if subjects:
        connection.execute(delete(EVENTS).where(of_full, EVENTS.c.id <= newest.scalar_subquery()), subjects)
