"""What happened, to a node or the fleet, page by page: failed checks, quarantines, leases, accusations, boots."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, or_, select

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
    connection: Connection,
    subject: str | None,
    *,
    limit: int,
    before: int | None = None,
    since: float = 0.0,
    text: str = "",
) -> tuple[HistoryEvent, ...]:
    """
    Events of a node or job, newest first and none older than `since`; `before` is the id to go on from.

    None: of all subjects. With `text` those alone whose subject, kind or message has each word of it, among the newest
    MOST_SEARCHED.
    """
    columns = (EVENTS.c.id, EVENTS.c.at, EVENTS.c.kind, EVENTS.c.message, EVENTS.c.subject)
    query = select(*columns).where(EVENTS.c.at >= since)
    newest = select(EVENTS.c.id).order_by(EVENTS.c.id.desc()).limit(MOST_SEARCHED)
    if subject is not None:
        query = query.where(EVENTS.c.subject == subject)
    if before is not None:
        query, newest = query.where(EVENTS.c.id < before), newest.where(EVENTS.c.id < before)
    for number, word in enumerate(text.split()[:MOST_WORDS]):
        query = query if number else query.where(EVENTS.c.id.in_(newest))
        query = query.where(or_(*(one.icontains(word, autoescape=True) for one in columns[2:])))
    rows = connection.execute(query.order_by(EVENTS.c.id.desc()).limit(limit))
    return tuple(HistoryEvent(**row._mapping) for row in rows)
