"""Opening a database of either kind so that it behaves alike, and so that only one aggregator has it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from healthd.errors import ConfigError, StoreError

KEY = "aggregator.database"
FORMS = "write sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
CONNECT_SECONDS = 10
"""How long a server may take to answer; a host that swallows packets would hold the start for two minutes."""
LOCK_KEY = 0x6865616C746864
"""PostgreSQL advisory lock of an aggregator: "healthd" in ASCII."""
LOCK_SECONDS = 2.0
"""How long a former aggregator's connection may take to be gone from the server."""


# What the driver says -> what is to be done. WRONG: what is configured is wrong, so that trying again cannot help.
WRONG = {
    "password authentication failed": f"correct user and password in {KEY}",
    "no password supplied": f"put the password into {KEY}, or let libpq find it (PGPASSFILE)",
    "does not exist": f"create it, or correct {KEY}",
    "pg_hba.conf": "allow this host and user there, and reload the server",
    "invalid port": f"correct the port in {KEY}",
    "invalid connection option": f"correct what follows the ? in {KEY}",
    "invalid integer value": f"correct what follows the ? in {KEY}",
}
AWAY = {
    "Connection refused": f"start the server, or correct host and port in {KEY}",
    "failed to resolve": f"correct the host in {KEY}, or look at its name service",
    "on socket": f"start the server, or name its host in {KEY}",
    "timeout": f"see that the server and the way to it are up, or correct the host in {KEY}",
    "No route to host": f"see that the server and the way to it are up, or correct the host in {KEY}",
    "disk is full": "free some space",
    "locked": "another program holds it; end that program",
    "readonly": "make it writable for this user",
    "unable to open": "make its directory writable for this user",
    "not a database": "restore a backup, or move the file away: nodes report their leases again",
    "malformed": "restore a backup, or move the file away: nodes report their leases again",
}


def parse(text: str) -> sa.URL:
    """
    The URL of a database that can be used here, with its driver at hand; else ConfigError.

    What is no URL is never repeated: a password may be in it.
    """
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigError(f"{KEY}: not the URL of a database (and is its port a number?); {FORMS}") from None
    kind = url.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise ConfigError(f"{KEY}: {url.drivername} is none of the databases that can be used; {FORMS}")
    if "@" in (url.host or ""):
        raise ConfigError(f"{KEY}: the host has an @ in it; if it belongs to the password, write it as %40")
    if url.port is not None and not 0 < url.port < 65536:
        raise ConfigError(f"{KEY}: port {url.port} is none; ports go from 1 to 65535")
    if kind == "sqlite" and (url.host or url.username or url.port):
        raise ConfigError(f"{KEY}: a file has no host; write sqlite:///PATH, with a fourth slash for /an/absolute/path")
    try:
        dialect = url.get_dialect()
        dialect.import_dbapi()
    except (NoSuchModuleError, ImportError) as error:
        package = getattr(error, "name", None) or "its driver"
        hint = "install healthd[postgresql], or " if kind == "postgresql" else ""
        raise ConfigError(f"{KEY}: {url.drivername} needs {package}, which is not installed; {hint}{FORMS}") from None
    if dialect.is_async:
        raise ConfigError(f"{KEY}: {url.drivername} is a driver for asyncio, which is not used here; {FORMS}")
    return url


def place_of(url: sa.URL) -> str:
    """The database for people: without its password, which may also be among what follows the question mark."""
    path = file_of(url)
    return f"database {path if path is not None else url.set(query={}).render_as_string(hide_password=True)}"


def said(url: sa.URL, error: Exception) -> str:
    """What the driver said in one line, without the password."""
    line = first_line(error)
    for secret in (url.password, *(value for key, value in url.query.items() if "password" in key)):
        if isinstance(secret, str) and secret:
            line = line.replace(secret, "***")
    return line


def remedy_of(line: str) -> tuple[str, bool]:
    """What to do about a failure, and whether the configuration is at fault."""
    for signs, wrong in ((WRONG, True), (AWAY, False)):
        for sign, text in signs.items():
            if sign in line:
                return text, wrong
    return "look at the database and its log", False


def make_engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        bounded = url.get_driver_name() in ("psycopg", "psycopg2") and "connect_timeout" not in url.query
        bound = {"connect_timeout": CONNECT_SECONDS} if bounded else {}
        return sa.create_engine(url, poolclass=sa.NullPool, connect_args=bound)
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
