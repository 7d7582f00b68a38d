"""
One connection to the aggregator's database, reopened after it was lost; every transaction checks the term.

For one thread at a time. Only `cut` may be called from another: it ends a call that hangs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from healthd.aggregator.store import leadership
from healthd.aggregator.store.database import (
    AwayError,
    Line,
    RefusedWorkError,
    UnsureError,
    failure_of,
    file_of,
    make_engine,
    place_of,
    require_writable,
)
from healthd.aggregator.store.leadership import RENEW_SECONDS, boot_seconds
from healthd.aggregator.store.sqlite_file import DatabaseFile
from healthd.core.errors import ConfigError, StoreError

Work = Callable[[sa.Connection], Any]


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
        self._url = url
        self.holder = leadership.new_holder()
        self.term = 0
        self.renewed_at = -math.inf
        self._engine = make_engine(url) if engine is None else engine
        self.shared = self._engine.dialect.name != "sqlite" if shared is None else shared
        path = file_of(url)
        self._file = None if path is None else DatabaseFile(path)
        self._connection: sa.Connection | None = None
        self._line = Line()
        sa.event.listen(self._engine, "do_connect", self._line.connect)

    def close(self) -> None:
        """Let go of connection and lock. Safe to repeat."""
        self._disconnect()
        self._engine.dispose()
        if sa.event.contains(self._engine, "do_connect", self._line.connect):  # the engine may outlive this session
            sa.event.remove(self._engine, "do_connect", self._line.connect)
        if self._file is not None:
            self._file.close()

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
        self._check_file()
        at_rest = self._connection is not None
        connection = self.connect()
        committing, renewing_at = False, -math.inf
        try:
            with connection.begin():
                leadership.check_term(connection, self.term, self.holder, place=self.place, lock=write)
                at_rest = False
                results = [work(connection) for work in works]
                # Last, so that a transaction that took long does not end with a lease that is over.
                if write and boot_seconds() - self.renewed_at >= RENEW_SECONDS / 2:
                    renewing_at = boot_seconds()
                    leadership.renew(connection)
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
            self._check_file()
        except StoreError as error:
            # In SQLite's journal it may be on disk all the same: closing the connection has saved what was there.
            unsure = write and self._file is not None and self._file.lost_its_journal
            raise (UnsureError(str(error)) if unsure else error) from None
        if self._file is not None:
            self._file.note_journal()
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
        text, misconfigured = failure_of(self._url, error)
        return ConfigError(text) if misconfigured and not self.term else kind(text)

    def _disconnect(self) -> None:
        """Drop the connection after an error, unless the database lives in it."""
        if self._connection is None or (self._engine.dialect.name == "sqlite" and self._file is None):
            return
        self._let_go(self._connection)
        self._connection = None
        if self._file is not None:
            self._file.forget_journal()

    def _let_go(self, connection: sa.Connection | None) -> None:
        with contextlib.suppress(SQLAlchemyError):
            if connection is not None:
                connection.close()
            self._engine.dispose()
        self._line.forget()

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check(self.place, save=self._disconnect)
