"""
One connection to the aggregator's database, opened anew when it was lost; every transaction checks the term.

For one thread at a time. `cut` alone may come from another: it ends a call that hangs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from healthd.aggregator.store.databases import file_of, make_engine, place_of, remedy_of, said
from healthd.aggregator.store.leadership import check_term
from healthd.aggregator.store.locks import FileLock, inode_of, lock_server
from healthd.core.errors import ConfigError, StoreError

BESIDE = ("-wal", "-shm")
"""What SQLite adds to the name of a database for its journal and the index of that."""

Work = Callable[[sa.Connection], Any]


class UnsureError(StoreError):
    """A server was lost between a commit and its word on it: whether it is on disk, reading alone can tell."""


class AwayError(StoreError):
    """There is no connection, and none could be made."""


class RefusedWorkError(StoreError):
    """The database did not take this piece of work, for what is in it; it is in order itself."""


class Session:
    """
    See the module. `term` is that of `leadership.take_over`; 0 until then.

    StoreError when another aggregator has the file, ConfigError for what no attempt could open. `place` names the
    database for people, without its password.
    """

    def __init__(self, url: sa.URL) -> None:
        self.place = place_of(url)
        self.term = 0
        path = file_of(url)
        self._engine = make_engine(url)
        self._path = path
        self._lock = None if path is None else FileLock(path)
        self._connection: sa.Connection | None = None
        # SQLite's files beside its database (device, inode), once this connection has them open; and the one that was
        # taken from it.
        self._beside: dict[Path, tuple[int, int]] = {}
        self._taken: Path | None = None
        self._line = _Line()
        sa.event.listen(self._engine, "do_connect", self._line.connect)

    def close(self) -> None:
        """Let go of connection and lock. Safe to repeat."""
        self._disconnect()
        self._engine.dispose()
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
        committing = False
        try:
            with connection.begin():
                check_term(connection, self.term, place=self.place, lock=write)
                at_rest = False
                results = [work(connection) for work in works]
                committing = write and connection.dialect.name != "sqlite"  # a file says whether it has it
        except (IntegrityError, DataError) as error:
            raise RefusedWorkError(str(self.failed(error))) from None
        except SQLAlchemyError as error:
            self._disconnect()
            if at_rest and isinstance(error, DBAPIError) and error.connection_invalidated:
                return self.transact(works, write=write)  # it was lost since the last transaction: nothing was begun
            failed = self.failed(error)
            raise (UnsureError(str(failed)) if committing else failed) from None
        try:
            self._check_place()
        except StoreError as error:
            # In SQLite's journal it may be on disk all the same: closing the connection has saved what was there.
            raise (UnsureError(str(error)) if write and self._taken is not None else error) from None
        self._note_beside()
        return results

    def connect(self) -> sa.Connection:
        """The connection, with the server's lock; AwayError or FencedError."""
        if self._connection is None:
            connection = None
            try:
                connection = self._engine.connect()
                locked = connection.dialect.name != "postgresql" or lock_server(connection)
                if not locked:
                    self._refuse(connection)
            except SQLAlchemyError as error:
                self._let_go(connection)
                raise self.failed(error, AwayError) from None
            except StoreError:
                self._let_go(connection)
                raise
            self._connection = connection
        return self._connection

    def _refuse(self, connection: sa.Connection) -> None:
        """Another session has the lock: that of an aggregator that took over, or our own former one that lingers."""
        if self.term:
            check_term(connection, self.term, place=self.place, lock=False)
        raise AwayError(f"{self.place} is in use by another aggregator; stop it or use another database")

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
                f"{self.place} was deleted or replaced while in use; put it back and restart the aggregator, or "
                "restart it as it is: nodes report their leases again"
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


class _Line:
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
