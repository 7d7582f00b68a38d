"""
Which aggregator may write: the row `leadership(term, holder, renewed)`, the same on SQLite and PostgreSQL.

Locks keep a second aggregator from starting, but a lock goes with its connection: whoever was frozen or cut off does
not know that it has lost it. So every aggregator that takes the database over raises `term`, and each of its
transactions begins by comparing the stored term with its own (a fencing token): a former holder cannot commit anything.
"""

from __future__ import annotations

import os
import socket

from sqlalchemy import Connection, select, update

from healthd.aggregator.store.tables import LEADERSHIP, fit
from healthd.core.errors import StoreError

RENEW_SECONDS = 2.0
"""How often the row is written while nothing else is: so soon it is noticed that the database cannot be written, or has
been taken over. A flush of one page; a disk does hundreds a second."""


class FencedError(StoreError):
    """Another aggregator has taken the database over. Nothing was changed, and nothing will be by this process."""


def holder() -> str:
    """Host and process id of this aggregator, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


def take_over(connection: Connection, *, place: str, now: float) -> tuple[int, float]:
    """
    Raise the term; from the commit on, transactions of every former holder are refused.

    Returns the new term, and when the former holder wrote last: in an old copy, when that was made.
    """
    stored = connection.execute(select(LEADERSHIP.c.term, LEADERSHIP.c.renewed).with_for_update()).one_or_none()
    if stored is None:
        raise StoreError(f"{place} is damaged (its table leadership is empty); restore a backup")
    term = int(stored.term) + 1
    connection.execute(update(LEADERSHIP).values(fit(LEADERSHIP, {"term": term, "holder": holder(), "renewed": now})))
    return term, float(stored.renewed)


def check_term(connection: Connection, term: int, *, place: str, lock: bool) -> None:
    """
    Refuse the transaction with FencedError unless `term` is the stored one.

    `lock` keeps it so until the transaction ends: who takes over waits for that. Without it this suits reading alone.
    SQLite has no such lock and needs none: its transactions begin with the write lock.
    """
    query = select(LEADERSHIP.c.term, LEADERSHIP.c.holder)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None or row.term != term:
        other = "nobody" if row is None else f"{row.holder} (term {row.term})"
        raise FencedError(
            f"{place} was taken over by {other}, so this aggregator (term {term}) writes nothing more and ends; "
            "start it again only when the other one is stopped"
        )


def renew(connection: Connection, *, now: float) -> None:
    """Write the time of day into the row. Its caller has checked the term in the same transaction."""
    connection.execute(update(LEADERSHIP).values(renewed=now))
