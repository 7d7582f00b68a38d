"""
Who leads a database that several aggregators share: looked at by a thread with a connection of its own.

LISTEN wakes it; what wakes it carries nothing, and the row says the rest. Of leadership it only reads: `Store.open`
takes over.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from healthd.aggregator.store.database import (
    KEY,
    AwayError,
    Line,
    failure_of,
    is_shared,
    make_engine,
    parse,
    place_of,
    require_writable,
)
from healthd.aggregator.store.leadership import (
    CHANNEL,
    LEASE_SECONDS,
    RENEW_SECONDS,
    Leadership,
    boot_seconds,
    clock_of,
    depose,
    leader_of,
    say_alive,
    say_gone,
)
from healthd.core.errors import ConfigError, StoreError

LOOK_SECONDS = 1.0
"""How often the row is read where nothing wakes us. A read of one row by its key."""
RETRY_SECONDS = 0.5
"""The pause after a connection was lost, or none could be made."""
CLOSE_SECONDS = 0.5

Look = Leadership | StoreError
"""The row as it is, or why it cannot be read."""


def step_down(url: str) -> Leadership:
    """
    End the lease of the leader, so that another aggregator takes over at once; what the row was. Blocks.

    ConfigError for a database that is not shared. StoreError.
    """
    if not is_shared(url):
        raise ConfigError(f"{KEY}: SQLite has only one aggregator, so no standby can take over; stop it instead")
    watch = Watch(url)
    try:
        return watch.depose()
    finally:
        watch.close()


class Watch:
    """
    `look` blocks, before the start. From `start` on `on_look` is called by a thread of its own with each look, until
    `close`; between two of them pass some `LOOK_SECONDS`, or as long as the server hangs: `cut` ends that.

    With `own_url` it writes every RENEW_SECONDS that the aggregator which answers there lives.
    """

    def __init__(self, url: str, own_url: str | None = None) -> None:
        self._url = parse(url)
        self._engine = make_engine(self._url)
        self._own_url = own_url
        self._said_at = -math.inf
        self._place = place_of(self._url)
        self._line = Line()
        sa.event.listen(self._engine, "do_connect", self._line.connect)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> tuple[Leadership, bool]:
        """The row, and whether its lease is over by the clock of the server. StoreError, ConfigError."""
        try:
            with self._engine.begin() as connection:
                found = self._read(connection)
                now = connection.execute(sa.select(clock_of(connection))).scalar_one()
        except SQLAlchemyError as error:
            raise self._failed(error) from None
        finally:
            self._line.forget()
        return found, not found.holder or now - found.renewed >= LEASE_SECONDS

    def depose(self) -> Leadership:
        """End the lease of the leader; the row as it was. Blocks. StoreError, ConfigError."""
        try:
            with self._engine.begin() as connection:
                before = leader_of(connection, place=self._place)
                depose(connection)
        except SQLAlchemyError as error:
            raise self._failed(error) from None
        finally:
            self._line.forget()
        return before

    def leave(self) -> None:
        """
        Look no more, and write that the aggregator which answers at `own_url` has ended: migrations need not wait for
        it. Blocks; `cut` ends it. Safe to repeat. StoreError, ConfigError.
        """
        if self._ending.is_set():
            return
        self._end_looking()
        try:
            with self._engine.begin() as connection:
                if self._own_url is not None:
                    say_gone(connection, self._own_url)
        except SQLAlchemyError as error:
            raise self._failed(error) from None
        finally:
            self._line.forget()

    def start(self, on_look: Callable[[Look], None]) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, args=(on_look,), name="leadership", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End a call that hangs; the connection is made anew."""
        self._line.cut()

    def close(self) -> None:
        """End it; half a second at most. Safe to repeat."""
        self._end_looking()
        self._engine.dispose()

    def _end_looking(self) -> None:
        self._ending.set()
        self._line.cut()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self, on_look: Callable[[Look], None]) -> None:
        dialect = self._engine.dialect
        dialect.import_dbapi()
        of_driver: type[Exception] = dialect.loaded_dbapi.Error
        while not self._ending.is_set():
            try:
                with self._engine.connect() as connection:
                    self._watch(connection, on_look)
            except (SQLAlchemyError, StoreError, of_driver, OSError) as error:
                if not self._ending.is_set():
                    on_look(error if isinstance(error, StoreError) else AwayError(failure_of(self._url, error)[0]))
                    self._ending.wait(RETRY_SECONDS)
            finally:
                self._line.forget()

    def _watch(self, connection: sa.Connection, on_look: Callable[[Look], None]) -> None:
        """Until the end, or until the connection is lost."""
        require_writable(connection, self._place)
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        listening = connection.dialect.driver == "psycopg"
        if listening:
            connection.exec_driver_sql(f"LISTEN {CHANNEL}")
        while not self._ending.is_set():
            on_look(self._read(connection))
            driver = connection.connection.driver_connection
            if listening and driver is not None:
                for _ in driver.notifies(timeout=LOOK_SECONDS, stop_after=1):
                    pass
            else:
                self._ending.wait(LOOK_SECONDS)

    def _read(self, connection: sa.Connection) -> Leadership:
        now = boot_seconds()
        if self._own_url is not None and now - self._said_at >= RENEW_SECONDS:
            say_alive(connection, self._own_url)
            self._said_at = now
        return leader_of(connection, place=self._place)

    def _failed(self, error: Exception) -> StoreError | ConfigError:
        """As of an opening: ConfigError for what no attempt could open."""
        text, misconfigured = failure_of(self._url, error)
        return ConfigError(text) if misconfigured else AwayError(text)
