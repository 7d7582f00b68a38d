"""
One connection to the aggregator's database, reopened after it was lost; every transaction checks the term.

For one thread at a time. Only `cut` may be called from another: it ends a call that hangs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, select, update
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from healthd.aggregator.store.tables import LEADERSHIP, fit
from healthd.core.errors import ConfigError, StoreError

# Opening a database of either kind so that it behaves alike: its URL, its errors in one line, its time-outs.


KEY = "aggregator.database"
FORMS = "write sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
CONNECT_SECONDS = 4
"""How long a server may take to let us in: less than a caller waits for an answer, so that it is told why."""
LOCKED_SECONDS = 4.0
"""How long a statement waits for what another program has locked; likewise."""
LEASE_SECONDS = 6.0
"""How long a leader leads from its last renewal on: it may miss two, and a takeover is over within 10 s."""
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


def file_of(url: sa.URL) -> Path | None:
    """The file of a SQLite URL; None for one in memory or another kind of database."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def first_line(error: Exception) -> str:
    """The first line of what the driver said."""
    cause = getattr(error, "orig", None) or error
    return (str(cause).splitlines() or [type(cause).__name__])[0]


# Only one aggregator at a time has a SQLite file: a lock on the file itself. A server is shared, and its row of
# `leadership` says who leads.


LOCK_BYTE = 1 << 62
"""The byte of the file that is locked, far behind its end and behind the bytes at 1 << 30 that SQLite locks itself."""

# Device and inode of the files that this process has locked. Where a process closes any descriptor of a file, all its
# POSIX locks on it are gone, and SQLite's are such: a file that is ours must not even be opened once more.
_ours: set[tuple[int, int]] = set()


class FileLock:
    """
    The lock on a SQLite file, whatever name it is reached by; makes the file where there is none.

    An open file description's lock on one byte: it belongs to the file and not to a name, so symbolic links, hard links
    and deleted files beside it lead nowhere else. StoreError when another aggregator has it.
    """

    def __init__(self, path: Path) -> None:
        if inode_of(path) in _ours:
            raise _in_use(path)
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise StoreError(f"database {path}: {error.strerror}; make its directory exist and be writable") from None
        found = os.fstat(self._handle)
        self.inode = (found.st_dev, found.st_ino)
        try:
            self._lock(path, found)
        except StoreError:
            os.close(self._handle)
            raise
        _ours.add(self.inode)

    def _lock(self, path: Path, found: os.stat_result) -> None:
        # struct flock: type, whence, start, length, process id (0 for this kind of lock)
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCK_BYTE, 1, 0)
        try:
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            raise _in_use(path) from None
        except OSError as error:
            raise StoreError(f"database {path} cannot be locked: {error.strerror}; put it on a local disk") from None
        if found.st_nlink > 1:
            # SQLite keeps its journal beside the name that it was given: what another name left there would be lost.
            raise StoreError(f"database {path} is one file under several names (hard links); remove all but one")

    def close(self) -> None:
        """Let go of it, after SQLite has closed the file. Safe to repeat."""
        if self.inode in _ours:
            _ours.discard(self.inode)
            os.close(self._handle)


def inode_of(path: Path) -> tuple[int, int] | None:
    """What a file is whatever its name: device and inode; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _in_use(path: Path) -> StoreError:
    return StoreError(f"database {path} is in use by another aggregator; stop it or use another file")


# Which aggregator may write: the one row of `leadership`, the same on every database.


FLEET = "default"
"""The key of that row."""
_OURS = LEADERSHIP.c.shard == FLEET
_ROW: sa.Select[tuple[int, str, str, float]] = select(
    LEADERSHIP.c.term, LEADERSHIP.c.holder, LEADERSHIP.c.url, LEADERSHIP.c.renewed
).where(_OURS)
_UPDATE = update(LEADERSHIP).where(_OURS)
_TERM = select(LEADERSHIP.c.term, LEADERSHIP.c.holder).where(_OURS)
_LOCKED_TERM = _TERM.with_for_update()
CHANNEL = "healthd_leadership"
"""What is notified on PostgreSQL when a leader comes or goes. It carries nothing: who hears it reads the row."""
RENEW_SECONDS = 2.0
"""How often the row is written while nothing else is: so soon it is noticed that the database cannot be written, or has
been taken over. A flush of one page; a disk does hundreds a second."""


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
        end_stalled(connection)
        raise NotVacantError(f"{place} has a leader in the middle of a transaction")
    if seen is not None and _leadership(row, place) != seen:
        raise NotVacantError(f"{place} has an active leader")
    term = _leadership(row, place).term + 1
    told = fit(LEADERSHIP, {"term": term, "holder": holder, "url": url})
    connection.execute(_UPDATE.values(**told, renewed=clock_of(connection)))
    notify(connection)
    return term


def end_stalled(connection: Connection) -> None:
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


def _leadership(row: sa.Row[tuple[int, str, str, float]] | None, place: str) -> Leadership:
    if row is None:
        raise StoreError(f"{place} is damaged (its table leadership is empty); restore a backup")
    return Leadership(term=int(row.term), holder=row.holder, url=row.url, renewed=float(row.renewed))


BESIDE = ("-wal", "-shm")
"""What SQLite adds to the name of a database for its journal and the index of that."""

Work = Callable[[sa.Connection], Any]


class UnsureError(StoreError):
    """A server was lost between a commit and its word on it: whether it is on disk, reading alone can tell."""


class AwayError(StoreError):
    """There is no connection, and none could be made."""


class RefusedWorkError(StoreError):
    """The database did not take this piece of work, for what is in it; it is in order itself."""


def require_writable(connection: sa.Connection, place: str) -> None:
    """AwayError where this server is the read-only standby of another one."""
    query = "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool"
    refuses = connection.exec_driver_sql(query).scalar()
    connection.commit()
    if refuses:
        raise AwayError(f"{place}: it only allows read-only transactions; {AWAY['read-only transaction']}")


class Session:
    """
    See the module. `term` is that of `take_over`; 0 until then. `renewed_at` is when the leadership was renewed last,
    by `boot_seconds`.

    StoreError when another aggregator has the file, ConfigError for what no attempt could open. `place` names the
    database for people, without its password.
    """

    def __init__(self, url: sa.URL, *, engine: sa.Engine | None = None, shared: bool | None = None) -> None:
        """`shared`: whether other aggregators may use this database too; None: they may where it is on a server."""
        self.place = place_of(url)
        self.holder = new_holder()
        self.term = 0
        self.renewed_at = -math.inf
        path = file_of(url)
        self._engine = make_engine(url) if engine is None else engine
        self.shared = self._engine.dialect.name != "sqlite" if shared is None else shared
        self._path = path
        self._lock = None if path is None else FileLock(path)
        self._connection: sa.Connection | None = None
        # SQLite's files beside its database (device, inode), once this connection has them open; and the one that was
        # taken from it.
        self._beside: dict[Path, tuple[int, int]] = {}
        self._taken: Path | None = None
        self._line = Line()
        sa.event.listen(self._engine, "do_connect", self._line.connect)

    def close(self) -> None:
        """Let go of connection and lock. Safe to repeat."""
        self._disconnect()
        self._engine.dispose()
        if sa.event.contains(self._engine, "do_connect", self._line.connect):  # the engine may outlive this session
            sa.event.remove(self._engine, "do_connect", self._line.connect)
        if self._lock is not None:
            self._lock.close()

    def cut(self) -> None:
        """End the call that another thread is in now; it gets a StoreError there."""
        self._line.cut()

    def transact(self, works: Sequence[Work], *, write: bool) -> list[Any]:
        """
        Run them in one transaction of this session's term; their results once they are committed.

        Without `write` they only read. FencedError: another aggregator took over. AwayError, UnsureError,
        RefusedWorkError; StoreError where the database failed in any other way. What they raise themselves is passed
        on. Nothing is committed then, but after UnsureError it may be.
        """
        self._check_place()
        at_rest = self._connection is not None
        connection = self.connect()
        committing, renewing_at = False, -math.inf
        try:
            with connection.begin():
                check_term(connection, self.term, self.holder, place=self.place, lock=write)
                at_rest = False
                results = [work(connection) for work in works]
                # Last, so that a transaction that took long does not end with a lease that is over.
                if write and boot_seconds() - self.renewed_at >= RENEW_SECONDS / 2:
                    renewing_at = boot_seconds()
                    renew(connection)
                committing = write and self.shared  # a file says whether it has it
        except (IntegrityError, DataError) as error:
            raise RefusedWorkError(str(self.failed(error))) from None
        except SQLAlchemyError as error:
            self._disconnect()
            if at_rest and isinstance(error, DBAPIError) and error.connection_invalidated:
                return self.transact(works, write=write)  # it was lost since the last transaction: nothing was begun
            failed = self.failed(error)
            raise (UnsureError(str(failed)) if committing else failed) from None
        self.renewed_at = max(self.renewed_at, renewing_at)
        try:
            self._check_place()
        except StoreError as error:
            # In SQLite's journal it may be on disk all the same: closing the connection has saved what was there.
            raise (UnsureError(str(error)) if write and self._taken is not None else error) from None
        self._note_beside()
        return results

    def connect(self) -> sa.Connection:
        """The connection; AwayError where there is none, or to a server that takes no writes."""
        if self._connection is None:
            connection = None
            try:
                connection = self._engine.connect()
                if connection.dialect.name == "postgresql":
                    require_writable(connection, self.place)
            except SQLAlchemyError as error:
                self._let_go(connection)
                raise self.failed(error, AwayError) from None
            except StoreError:
                self._let_go(connection)
                raise
            self._connection = connection
        return self._connection

    def failed(self, error: SQLAlchemyError, kind: type[StoreError] = StoreError) -> StoreError | ConfigError:
        """What the driver said, in one line, with the place and what to do. ConfigError before the first takeover."""
        line = said(self._engine.url, error)
        remedy, misconfigured = remedy_of(line)
        text = f"{self.place}: {line}; {remedy}"
        return ConfigError(text) if misconfigured and not self.term else kind(text)

    def _disconnect(self) -> None:
        """Drop the connection after an error, unless the database lives in it."""
        if self._connection is None or (self._engine.dialect.name == "sqlite" and self._path is None):
            return
        self._let_go(self._connection)
        self._connection = None
        self._beside.clear()  # the last connection that closes removes them itself

    def _let_go(self, connection: sa.Connection | None) -> None:
        with contextlib.suppress(SQLAlchemyError):
            if connection is not None:
                connection.close()
            self._engine.dispose()
        self._line.forget()

    def _check_place(self) -> None:
        """
        SQLite goes on writing into a file that was deleted; what is answered then is gone with this process.

        So is what was committed since the last checkpoint when its journal is deleted. Until somebody opens the
        database anew, closing it saves that: SQLite copies the journal that it still has into the database.
        """
        if self._path is not None and self._lock is not None and inode_of(self._path) != self._lock.inode:
            raise StoreError(
                f"{self.place} was deleted or replaced while in use; restore it and restart the aggregator, or "
                "restart without it: nodes report their leases again"
            )
        changed = [file for file, inode in self._beside.items() if inode_of(file) != inode]
        if changed and self._taken is None:
            self._taken = changed[0]
            if not any(file.exists() for file in changed):
                self._disconnect()
        if self._taken is not None:
            raise StoreError(
                f"{self.place}: its file {self._taken.name} was deleted or replaced while in use; leave the files "
                "beside the database to SQLite and restart the aggregator: nodes report their leases again"
            )

    def _note_beside(self) -> None:
        """Remember the journal and its index, which SQLite makes with the first transaction and keeps open."""
        if self._path is None or len(self._beside) == len(BESIDE):
            return
        real = self._path.resolve()  # SQLite follows symbolic links, too
        for suffix in BESIDE:
            file = real.with_name(real.name + suffix)
            inode = inode_of(file)
            if inode is not None:
                self._beside[file] = inode


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
