"""What happened on a node, read page by page: checks that failed, quarantines, leases, accusations, boots, devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from healthd.aggregator.store.tables import EVENTS


@dataclass(frozen=True, kw_only=True)
class HistoryEvent:
    """One line; `id` grows with time, `at` is in seconds since the epoch."""

    id: int
    at: float
    kind: str
    message: str


def read_history(
    connection: Connection, subject: str, *, limit: int, before: int | None, since: float
) -> Sequence[HistoryEvent]:
    """Events of a node, newest first and none older than `since`; `before` is the id to go on from."""
    query = select(EVENTS.c.id, EVENTS.c.at, EVENTS.c.kind, EVENTS.c.message).where(
        EVENTS.c.subject == subject, EVENTS.c.at >= since
    )
    query = query if before is None else query.where(EVENTS.c.id < before)
    rows = connection.execute(query.order_by(EVENTS.c.id.desc()).limit(limit))
    return tuple(HistoryEvent(id=r.id, at=r.at, kind=r.kind, message=r.message) for r in rows)
