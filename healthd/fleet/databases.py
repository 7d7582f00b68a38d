"""Opening a database of either kind so that it behaves alike, and so that only one aggregator has it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from healthd.errors import StoreError

LOCK_KEY = 0x6865616C746864
"""PostgreSQL advisory lock of an aggregator: "healthd" in ASCII."""
LOCK_SECONDS = 2.0
"""How long a former aggregator's connection may take to be gone from the server."""


def make_engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(url, poolclass=sa.NullPool)
    # Five seconds for another program that looks into the file; `?timeout=` in the URL says otherwise.
    arguments = {"check_same_thread": False} | ({} if "timeout" in url.query else {"timeout": 5.0})
    engine = sa.create_engine(url, poolclass=sa.StaticPool, connect_args=arguments)

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # Transactions begin where we say so (below), not where the driver guesses.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def file_of(url: sa.URL) -> Path | None:
    """The file of a SQLite URL; None for one in memory or another kind of database."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def lock_file(path: Path) -> int:
    """Two aggregators on one database would give one node to two jobs: the second is refused."""
    try:
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"database {path}: {error.strerror}; make its directory exist and be writable") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise StoreError(f"database {path} is in use by another aggregator; stop it or use another file") from None
    return handle


def lock_server(connection: sa.Connection) -> bool:
    """The same on PostgreSQL, for as long as the connection lives; one that just closed is given time to go."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        taken = connection.execute(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK_KEY}).scalar()
        connection.commit()
        if taken or time.monotonic() > until:
            return bool(taken)
        time.sleep(0.05)


def first_line(error: Exception) -> str:
    """The first line of what the driver said."""
    cause = getattr(error, "orig", None) or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]
