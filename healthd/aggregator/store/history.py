"""What happened, to a node or the fleet, page by page: failed checks, quarantines, leases, accusations, boots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, or_, select

from healthd.aggregator.store.tables import EVENTS

# Of a search: each costs a look at every line that is searched, on the thread that also commits what gates decide.
MOST_WORDS = 4
MOST_SEARCHED = 20_000


@dataclass(frozen=True, kw_only=True)
class HistoryEvent:
    """
    One line; `id` grows with time, `at` is in seconds since the epoch.

    `subject` is a node's name, `job:NAME` or `fleet`.
    """

    id: int
    at: float
    kind: str
    message: str
    subject: str


def read_history(
    connection: Connection, subject: str, *, limit: int, before: int | None = None, since: float = 0.0
) -> tuple[HistoryEvent, ...]:
    """Events of a node or job, newest first and none older than `since`; `before` is the id to go on from."""
    return _read(connection, limit=limit, before=before, since=since, also=(EVENTS.c.subject == subject,))


def read_fleet_history(
    connection: Connection, *, limit: int, before: int | None, since: float, text: str = ""
) -> tuple[HistoryEvent, ...]:
    """
    As `read_history`, of all subjects; of those alone whose subject, kind or message has each word of `text`, among the
    newest MOST_SEARCHED.
    """
    words = text.split()[:MOST_WORDS]
    if not words:
        return _read(connection, limit=limit, before=before, since=since)
    newest = select(EVENTS.c.id).order_by(EVENTS.c.id.desc()).limit(MOST_SEARCHED)
    newest = newest if before is None else newest.where(EVENTS.c.id < before)
    also = [
        or_(
            *(column.icontains(word, autoescape=True) for column in (EVENTS.c.subject, EVENTS.c.kind, EVENTS.c.message))
        )
        for word in words
    ]
    return _read(connection, limit=limit, before=before, since=since, also=(EVENTS.c.id.in_(newest), *also))


def _read(
    connection: Connection,
    *,
    limit: int,
    before: int | None,
    since: float,
    also: Sequence[ColumnElement[bool]] = (),
) -> tuple[HistoryEvent, ...]:
    columns = (EVENTS.c.id, EVENTS.c.at, EVENTS.c.kind, EVENTS.c.message, EVENTS.c.subject)
    query = select(*columns).where(EVENTS.c.at >= since, *also)
    query = query if before is None else query.where(EVENTS.c.id < before)
    rows = connection.execute(query.order_by(EVENTS.c.id.desc()).limit(limit))
    return tuple(HistoryEvent(id=r.id, at=r.at, kind=r.kind, message=r.message, subject=r.subject) for r in rows)
