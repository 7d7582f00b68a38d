"""
Which aggregator may write: the one row of `leadership`, the same on every database; and which aggregators live.

Every transaction checks the term in this row, so an aggregator that was replaced writes nothing more, even if it does
not know. See decision 0015.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, select, update

from healthd.aggregator.store.tables import AGGREGATORS, LEADERSHIP, fit
from healthd.core.errors import StoreError

FLEET = "default"
"""The key of the row."""
LEASE_SECONDS = 6.0
"""How long a leader leads from its last renewal on: it may miss two, and a takeover is over within 10 s."""
RENEW_SECONDS = 2.0
"""How often the row is written while nothing else is: so soon it is noticed that the database cannot be written, or has
been taken over. A flush of one page; a disk does hundreds a second."""
CHANNEL = "healthd_leadership"
"""What is notified on PostgreSQL when a leader comes or goes. It carries nothing: who hears it reads the row."""
FORGET_SECONDS = 600.0
"""After this the row of an aggregator that is gone is dropped."""
_OURS = LEADERSHIP.c.shard == FLEET
_ROW: sa.Select[tuple[int, str, str, float]] = select(
    LEADERSHIP.c.term, LEADERSHIP.c.holder, LEADERSHIP.c.url, LEADERSHIP.c.renewed
).where(_OURS)
_UPDATE = update(LEADERSHIP).where(_OURS)
_TERM = select(LEADERSHIP.c.term, LEADERSHIP.c.holder).where(_OURS)
_LOCKED_TERM = _TERM.with_for_update()


class FencedError(StoreError):
    """Another aggregator has taken the database over. Nothing was changed, and nothing will be by this one."""


class NotVacantError(StoreError):
    """The leader that was to be followed has renewed, or another aggregator was faster: nothing was taken over."""


@dataclass(frozen=True, kw_only=True)
class Leadership:
    """The row. `holder` is empty where its leader has given it up; `renewed` is by the database's clock."""

    term: int
    holder: str
    url: str
    renewed: float


def new_holder() -> str:
    """
    Host and process id of this aggregator, for people, and a word that no other one has.

    A term alone would not do: a server that lost its newest commits in a failover gives the same one twice.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


def boot_seconds() -> float:
    """Seconds by a clock that nobody sets and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def clock_of(connection: Connection) -> ColumnElement[float]:
    """The time of day: of the server, where there is one, so that the clocks of aggregators do not matter."""
    if connection.dialect.name != "postgresql":
        return sa.literal(time.time(), sa.Double)
    return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)


def leader_of(connection: Connection, *, place: str) -> Leadership:
    """Who leads."""
    return _leadership(connection.execute(_ROW).one_or_none(), place)


def take_over(connection: Connection, *, holder: str, url: str, place: str, seen: Leadership | None) -> int:
    """
    Raise the term; from the commit on, transactions of every former holder are refused.

    With `seen` only if the row is still as it was then and no transaction of its leader is under way: NotVacantError.
    Returns the new term.
    """
    query = _ROW.with_for_update(skip_locked=seen is not None)
    row = connection.execute(query).one_or_none()
    if seen is not None and row is None:
        _end_stalled(connection)
        raise NotVacantError(f"{place} has a leader in the middle of a transaction")
    if seen is not None and _leadership(row, place) != seen:
        raise NotVacantError(f"{place} has an active leader")
    term = _leadership(row, place).term + 1
    told = fit(LEADERSHIP, {"term": term, "holder": holder, "url": url})
    connection.execute(_UPDATE.values(**told, renewed=clock_of(connection)))
    notify(connection)
    return term


def check_term(connection: Connection, term: int, holder: str, *, place: str, lock: bool) -> None:
    """
    Refuse the transaction with FencedError unless `term` is the stored one and its holder this one.

    `lock` keeps it so until the transaction ends: who takes over waits for that. Without it this suits reading alone.
    SQLite has no such lock and needs none: its transactions begin with the write lock.
    """
    row = connection.execute(_LOCKED_TERM if lock else _TERM).one_or_none()
    if row is None or (row.term, row.holder) != (term, holder):
        other = f"{row.holder} (term {row.term})" if row is not None and row.holder else "one that has stopped"
        raise FencedError(
            f"{place} was taken over by {other}, so this aggregator (term {term}) stops writing and exits; start it "
            "again only after the other one is stopped"
            if connection.dialect.name == "sqlite"
            else f"{place} was taken over by {other}, so this aggregator (term {term}) no longer leads"
        )


def renew(connection: Connection) -> None:
    """Write the time of day into the row. Its caller has checked the term in the same transaction."""
    connection.execute(_UPDATE.values(renewed=clock_of(connection)))


def give_up(connection: Connection) -> None:
    """End the lease: whoever waits for it takes over at once. Its caller has checked the term."""
    connection.execute(_UPDATE.values(holder="", url=""))
    notify(connection)


def depose(connection: Connection) -> None:
    """End the lease of the leader from outside: it is refused from the commit on."""
    connection.execute(_UPDATE.values(term=LEADERSHIP.c.term + 1, holder="", url=""))
    notify(connection)


def notify(connection: Connection) -> None:
    """Wake those who stand by, once this is committed."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"NOTIFY {CHANNEL}")


def say_alive(connection: Connection, url: str) -> None:
    """Write that the aggregator at this URL lives; drops those that have not for long."""
    now = connection.execute(select(clock_of(connection))).scalar_one()
    renewed = update(AGGREGATORS).where(AGGREGATORS.c.url == url).values(renewed=now)
    if not connection.execute(renewed).rowcount:
        connection.execute(sa.delete(AGGREGATORS).where(AGGREGATORS.c.renewed < now - FORGET_SECONDS))
        connection.execute(AGGREGATORS.insert().values(url=url, renewed=now))
        notify(connection)


def say_gone(connection: Connection, url: str) -> None:
    """Write that this aggregator has ended: migrations need not wait for it."""
    connection.execute(sa.delete(AGGREGATORS).where(AGGREGATORS.c.url == url))
    notify(connection)


def _end_stalled(connection: Connection) -> None:
    """
    End sessions that have the row locked and of which the server has long heard nothing: a frozen leader's.

    It needs no right but to be the same user. The server's own time-out for idle transactions does not count while a
    client is in the middle of a batch of statements.
    """
    connection.execute(
        sa.text(
            "SELECT pg_terminate_backend(a.pid) FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
            "WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND l.relation = CAST(:table AS regclass) AND a.pid <> pg_backend_pid() AND a.wait_event = 'ClientRead' "
            "AND clock_timestamp() - a.state_change > make_interval(secs => :seconds)"
        ),
        {"table": LEADERSHIP.name, "seconds": LEASE_SECONDS / 2},
    )


def _leadership(row: sa.Row[tuple[int, str, str, float]] | None, place: str) -> Leadership:
    if row is None:
        raise StoreError(f"{place} is damaged (its table leadership is empty); restore a backup")
    return Leadership(term=int(row.term), holder=row.holder, url=row.url, renewed=float(row.renewed))
