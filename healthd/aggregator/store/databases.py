"""Opening a database of either kind so that it behaves alike: its URL, its errors in one line, its time-outs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from healthd.core.errors import ConfigError

KEY = "aggregator.database"
FORMS = "write sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
CONNECT_SECONDS = 4
"""How long a server may take to let us in: less than a caller waits for an answer, so that it is told why."""
LOCKED_SECONDS = 4.0
"""How long a statement waits for what another program has locked; likewise."""
# So that a server lets go of an aggregator that is frozen in a transaction, or cut off: else nobody could take over.
SERVER_SETTINGS = {
    "lock_timeout": f"{LOCKED_SECONDS:.0f}s",
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


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
    "lock timeout": "another program holds it; end that program",
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
        hint = "run 'pip install psycopg[binary]' in healthd's environment, or " if kind == "postgresql" else ""
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
    """The engine of a parsed URL; nothing is opened yet."""
    return _sqlite_engine(url) if url.get_backend_name() == "sqlite" else _server_engine(url)


def _server_engine(url: sa.URL) -> sa.Engine:
    bounded = url.get_driver_name() in ("psycopg", "psycopg2") and "connect_timeout" not in url.query
    bound = {"connect_timeout": CONNECT_SECONDS} if bounded else {}
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


def file_of(url: sa.URL) -> Path | None:
    """The file of a SQLite URL; None for one in memory or another kind of database."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def first_line(error: Exception) -> str:
    """The first line of what the driver said."""
    cause = getattr(error, "orig", None) or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]
