"""
How the aggregator's database is opened: its URL, an engine that behaves alike on SQLite and on PostgreSQL, the end of
a call that hangs, and what an error of a driver means, in one line.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from healthd.aggregator.store.leadership import LEASE_SECONDS
from healthd.core.errors import ConfigError, StoreError

KEY = "aggregator.database"
FORMS = "write sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
CONNECT_SECONDS = 4
"""How long a server may take to let us in: less than a caller waits for an answer, so that it is told why."""
LOCKED_SECONDS = 4.0
"""How long a statement waits for what another program has locked; likewise."""
# So that a server lets go of an aggregator that is frozen in a transaction, or cut off: else nobody could take over.
SERVER_SETTINGS = {
    "lock_timeout": f"{LOCKED_SECONDS:.0f}s",
    "idle_in_transaction_session_timeout": f"{LEASE_SECONDS:.0f}s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
# The same seen from here, in libpq's words: a server that is gone without a word is noticed.
CLIENT_SETTINGS = {
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
# What the driver says -> what is to be done. WRONG: what is configured is wrong, so that trying again cannot help.
WRONG = {
    "password authentication failed": f"correct user and password in {KEY}",
    "no password supplied": f"put the password into {KEY}, or let libpq find it (PGPASSFILE)",
    "certificate verify failed": f"name the CA of the server's certificate as sslrootcert in {KEY}",
    "does not match host name": f"use the server's name from its certificate in {KEY}",
    "does not support SSL": f"turn ssl on at the server, or correct sslmode in {KEY}",
    "permission denied": f"grant it to the user of {KEY}, or make that user the owner of the database",
    "must be owner": f"make the user of {KEY} the owner of the database, at least for an upgrade",
    "does not exist": f"create it, or correct {KEY}",
    "pg_hba.conf": "allow this host and user there, and reload the server",
    "invalid port": f"correct the port in {KEY}",
    "invalid connection option": f"correct the part after ? in {KEY}",
    "invalid integer value": f"correct the part after ? in {KEY}",
}
AWAY = {
    "Connection refused": f"start the server, or correct host and port in {KEY}",
    "failed to resolve": f"correct the host in {KEY}, or check its name resolution",
    "on socket": f"start the server, or name its host in {KEY}",
    "read-only transaction": (
        f"this server is a read-only standby: use the server that accepts writes, or list all of them in {KEY} with "
        "libpq's ?host=A&host=B&target_session_attrs=read-write"
    ),
    "lock timeout": "another program holds it; end that program",
    "timeout": f"check that the server and the route to it are up, or correct the host in {KEY}",
    "No route to host": f"check that the server and the route to it are up, or correct the host in {KEY}",
    "disk is full": "free some space",
    "locked": "another program holds it; end that program",
    "readonly": "make it writable for this user",
    "unable to open": "make its directory writable for this user",
    "not a database": "restore a backup, or move the file away: nodes report their leases again",
    "malformed": "restore a backup, or move the file away: nodes report their leases again",
}


class UnsureError(StoreError):
    """A server was lost between a commit and its word on it: whether it is on disk, reading alone can tell."""


class AwayError(StoreError):
    """There is no connection, and none could be made."""


class RefusedWorkError(StoreError):
    """The database did not take this piece of work, for what is in it; it is in order itself."""


def parse(text: str) -> sa.URL:
    """
    The URL of a database that can be used here, with its driver at hand; else ConfigError.

    What is no URL is never repeated: a password may be in it.
    """
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigError(f"{KEY}: not a database URL (is its port a number?); {FORMS}") from None
    kind = url.get_backend_name()
    if kind not in ("sqlite", "postgresql"):
        raise ConfigError(f"{KEY}: {url.drivername} is not a supported database; {FORMS}")
    if "@" in (url.host or ""):
        raise ConfigError(f"{KEY}: the host has an @ in it; if it belongs to the password, write it as %40")
    if url.port is not None and not 0 < url.port < 65536:
        raise ConfigError(f"{KEY}: {url.port} is not a port; ports go from 1 to 65535")
    if kind == "sqlite" and (url.host or url.username or url.port):
        raise ConfigError(f"{KEY}: a file has no host; write sqlite:///PATH, with a fourth slash for /an/absolute/path")
    try:
        dialect = url.get_dialect()
        dialect.import_dbapi()
    except (NoSuchModuleError, ImportError) as error:
        package = getattr(error, "name", None) or "its driver"
        hint = "run 'pip install psycopg[binary]' in healthd's environment, or " if kind == "postgresql" else ""
        raise ConfigError(f"{KEY}: {url.drivername} needs {package}, which is not installed; {hint}{FORMS}") from None
    if dialect.is_async:
        raise ConfigError(f"{KEY}: {url.drivername} is an asyncio driver, which healthd does not use; {FORMS}")
    return url


def place_of(url: sa.URL) -> str:
    """The database for people: without its password, which may also be among what follows the question mark."""
    path = file_of(url)
    return f"database {path if path is not None else url.set(query={}).render_as_string(hide_password=True)}"


def file_of(url: sa.URL) -> Path | None:
    """The file of a SQLite URL; None for one in memory or another kind of database."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def is_shared(url: str) -> bool:
    """Whether a database is on a server, where several aggregators may use it. ConfigError."""
    return parse(url).get_backend_name() != "sqlite"


def make_engine(url: sa.URL) -> sa.Engine:
    """The engine of a parsed URL; nothing is opened yet."""
    return _sqlite_engine(url) if url.get_backend_name() == "sqlite" else _server_engine(url)


def require_writable(connection: sa.Connection, place: str) -> None:
    """AwayError where this server is the read-only standby of another one."""
    query = "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool"
    refuses = connection.exec_driver_sql(query).scalar()
    connection.commit()
    if refuses:
        raise AwayError(f"{place}: it only allows read-only transactions; {AWAY['read-only transaction']}")


class Line:
    """What ends a call of the driver from outside: a server's socket is shut down, SQLite is interrupted."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._socket: socket.socket | None = None

    def connect(self, dialect: Any, _record: object, arguments: Any, options: Any) -> Any:
        """SQLAlchemy asks this for a connection of the driver (`do_connect`)."""
        connection = dialect.connect(*arguments, **options)
        self.forget()
        with self._guard:
            if dialect.name == "sqlite":
                self._end = connection.interrupt
            elif hasattr(connection, "fileno"):
                # A descriptor of our own: that of the driver may be closed, and its number another file's, at any time.
                self._socket = socket.socket(fileno=os.dup(connection.fileno()))
                self._end = functools.partial(self._socket.shutdown, socket.SHUT_RDWR)
        return connection

    def cut(self) -> None:
        """End the call that is under way, if there is one."""
        with self._guard, contextlib.suppress(Exception):  # a connection that is closed meanwhile needs no cut
            if self._end is not None:
                self._end()

    def forget(self) -> None:
        """The connection is closed."""
        with self._guard:
            if self._socket is not None:
                self._socket.close()
            self._socket = self._end = None


def failure_of(url: sa.URL, error: Exception) -> tuple[str, bool]:
    """What the driver said, in one line with the place and what to do; and whether the configuration is at fault."""
    line = first_line(error)
    for secret in (url.password, *(value for key, value in url.query.items() if "password" in key)):
        if isinstance(secret, str) and secret:
            line = line.replace(secret, "***")
    remedy, misconfigured = _remedy_of(line)
    return f"{place_of(url)}: {line}; {remedy}", misconfigured


def first_line(error: Exception) -> str:
    """The first line of what the driver said; it may have the password in it."""
    cause = getattr(error, "orig", None) or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]


def _remedy_of(line: str) -> tuple[str, bool]:
    for signs, wrong in ((WRONG, True), (AWAY, False)):
        for sign, text in signs.items():
            if sign in line:
                return text, wrong
    return "look at the database and its log", False


def _server_engine(url: sa.URL) -> sa.Engine:
    libpq = url.get_driver_name() in ("psycopg", "psycopg2")
    defaults = {"connect_timeout": CONNECT_SECONDS, **CLIENT_SETTINGS} if libpq else {}
    bound = {name: value for name, value in defaults.items() if name not in url.query}
    engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args=bound)

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            for name, value in SERVER_SETTINGS.items():
                cursor.execute("SELECT set_config(name, %s, false) FROM pg_settings WHERE name = %s", (value, name))
        connection.commit()

    return engine


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    # `?timeout=` in the URL says otherwise how long to wait for another program that looks into the file.
    arguments = {"check_same_thread": False} | ({} if "timeout" in url.query else {"timeout": LOCKED_SECONDS})
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
