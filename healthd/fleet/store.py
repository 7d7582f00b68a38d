"""
The aggregator's database: what must survive. SQLite by default, PostgreSQL by URL, one writer thread for both.

Everything that touches the database runs on that thread, in the order in which it was asked; what waits together is
committed together, because a commit costs a disk flush. A failure is a StoreError of one line and never a guess.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from healthd.errors import BadInputError, ConfigError, StoreError
from healthd.fleet import changes as rows
from healthd.fleet.changes import Change, Loaded, PutKey, PutMeta
from healthd.fleet.databases import (
    file_of,
    first_line,
    lock_file,
    lock_server,
    make_engine,
    parse,
    place_of,
    remedy_of,
    said,
)
from healthd.fleet.tables import META, NODES
from healthd.fleet.writing import apply_changes

log = logging.getLogger(__name__)

T = TypeVar("T")
Job = tuple[Callable[[sa.Connection], Any], Callable[[Any, Exception | None], None]]


class UnsureError(StoreError):
    """A server was lost between a commit and its word on it: whether it is on disk, reading alone can tell."""


MOST_WAITING = 2000
"""Jobs that may wait for the writer: 0.2 s of work at 5 ms a commit of 64; more means that it stands still."""
MOST_TOGETHER = 64
"""Jobs in one transaction: bounds how long the first of them waits for the last."""


class Store:
    """
    An open database. `store_id` names it for life: nodes know by it who issued a lease. `generation` counts its
    openings, so that numbers of this process can be told from those of the last.

    Made by `Store.open`, which blocks; `load` blocks too; the rest is for the event loop.
    """

    def __init__(self, engine: sa.Engine, place: str, lock: int | None, path: Path | None) -> None:
        self._engine = engine
        self._place = place
        self._lock = lock
        self._path = path
        self._inode: tuple[int, int] | None = None
        self._connection: sa.Connection | None = None
        self._jobs: queue.Queue[Job | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._closed = False
        self.failures = 0  # jobs that could not be written since the start
        self.failing = False  # whether the last one could not
        self.store_id = ""
        self.generation = 0

    @classmethod
    def open(cls, url: str) -> Store:
        """
        Open or make the database and bring its schema up to date.

        ConfigError for a URL that cannot be right, StoreError for a database that cannot be used; both name the place
        and the remedy, and never the password.
        """
        parsed = parse(url)
        path = file_of(parsed)
        engine = make_engine(parsed)
        store = cls(engine, place_of(parsed), None if path is None else lock_file(path), path)
        try:
            store._prepare()
        except (StoreError, ConfigError):
            store.close()
            raise
        store._thread.start()
        return store

    def close(self) -> None:
        """Finish what waits, then let go of the database. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(timeout=10.0)
        self._disconnect()
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)

    def load(self) -> Loaded:
        """What an aggregator starts from. Blocks."""
        done = threading.Event()
        box: list[Any] = []

        def deliver(value: Any, error: Exception | None) -> None:
            box.extend((value, error))
            done.set()

        self._submit(rows.load, deliver)
        done.wait()
        if box[1] is not None:
            raise box[1]
        loaded: Loaded = box[0]
        return loaded

    async def write(self, changes: Sequence[Change]) -> None:
        """Commit them all or none; returns once they are on disk."""
        await self.run(lambda connection: apply_changes(connection, changes))

    async def enrol(self, node: str, key_hash: str, *, now: float) -> str:
        """The hash of the key that the name belongs to: this one, if it belonged to none."""

        def work(connection: sa.Connection) -> str:
            query = sa.select(NODES.c.key_hash).where(NODES.c.node == node)
            known = connection.execute(query).scalar_one_or_none()
            if known is None:
                apply_changes(connection, [PutKey(node=node, key_hash=key_hash, seen_at=now)])
            return known or key_hash

        return await self.run(work)

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """
        Run `work` in a transaction on the writer thread; its result once it is committed.

        `work` must be safe to repeat: when one of several that share a transaction fails, each is tried by itself.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def resolve(value: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        def deliver(value: Any, error: Exception | None) -> None:
            # The loop may be gone when the aggregator stops in the middle: then nobody waits for this either.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, value, error)

        self._submit(work, deliver)
        return await future

    # --- the writer thread --------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[sa.Connection], Any], deliver: Callable[[Any, Exception | None], None]) -> None:
        if self._closed:
            raise StoreError(f"{self._place} is closed")
        try:
            self._jobs.put_nowait((work, deliver))
        except queue.Full:
            raise StoreError(f"{self._place} does not keep up: {MOST_WAITING} writes wait; look at its disk") from None

    def _work(self) -> None:
        ending = False
        while not ending:
            batch: list[Job] = []
            job = self._jobs.get()
            while job is not None:
                batch.append(job)
                if len(batch) >= MOST_TOGETHER:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            ending = job is None
            if batch:
                self._commit(batch)

    def _commit(self, batch: Sequence[Job], *, unsure: bool = False) -> None:
        """
        One transaction for all; when it fails, one for each, so that nobody fails for another's fault.

        `unsure`: it may be on disk already.
        """
        try:
            results = self._transact([work for work, _ in batch])
        except (StoreError, BadInputError) as error:
            self._failed_together(batch, error, unsure)
            return
        except Exception as error:
            # A fault of ours in one job must not end the thread and leave everybody waiting.
            log.exception("%s: a job failed", self._place)
            internal = StoreError(f"{self._place}: internal error: {first_line(error)}")
            self._failed_together(batch, internal, unsure)
            return
        self.failing = False
        for (_, deliver), result in zip(batch, results, strict=True):
            deliver(result, None)

    def _failed_together(self, batch: Sequence[Job], error: StoreError | BadInputError, unsure: bool) -> None:
        unsure = unsure or isinstance(error, UnsureError)
        if len(batch) > 1:
            for job in batch:
                self._commit([job], unsure=unsure)
            return
        if isinstance(error, StoreError):
            self._count_failure()
            error = UnsureError(str(error)) if unsure else error
        batch[0][1](None, error)

    def _count_failure(self) -> None:
        self.failures += 1
        self.failing = True

    def _transact(self, works: Sequence[Callable[[sa.Connection], Any]]) -> list[Any]:
        committing = False
        try:
            self._check_place()
            connection = self._connect()
            with connection.begin():
                results = [work(connection) for work in works]
                committing = connection.dialect.name != "sqlite"  # a file says whether it has it
        except SQLAlchemyError as error:
            self._disconnect()
            failed = self._failed(error)
            raise (UnsureError(str(failed)) if committing else failed) from None
        self._check_place()
        return results

    def _check_place(self) -> None:
        """SQLite goes on writing into a file that was deleted; what is answered then is gone with this process."""
        if self._inode is not None and self._inode != _inode(self._path):
            raise StoreError(
                f"{self._place} was deleted or replaced while in use; put it back and restart the aggregator, or "
                "restart it as it is: nodes report their leases again"
            )

    def _connect(self) -> sa.Connection:
        if self._connection is None:
            connection = self._engine.connect()
            if connection.dialect.name == "postgresql" and not lock_server(connection):
                connection.close()
                raise StoreError(f"{self._place} is in use by another aggregator; stop it or use another database")
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        """Drop the connection after an error, unless the database lives in it."""
        if self._connection is None or (self._engine.dialect.name == "sqlite" and not self._engine.url.database):
            return
        with contextlib.suppress(SQLAlchemyError):
            self._connection.close()
            self._engine.dispose()
        self._connection = None

    def _failed(self, error: SQLAlchemyError) -> StoreError:
        line = said(self._engine.url, error)
        return StoreError(f"{self._place}: {line}; {remedy_of(line)[0]}")

    # --- at the start -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Check the file, migrate it, read who it is."""
        try:
            connection = self._connect()
            with connection.begin():
                wrong = rows.check_whole(connection)
            if wrong is not None:
                raise StoreError(
                    f"{self._place} is damaged ({wrong.splitlines()[-1]}); restore a backup, or move the file away: "
                    "nodes report their leases again"
                )
            self._migrate(connection)
            with connection.begin():
                meta = {r.key: r.value for r in connection.execute(sa.select(META))}
                self.store_id = meta.get("store_id") or f"store-{secrets.token_hex(8)}"
                self.generation = int(meta.get("generation", "0")) + 1
                facts = (("store_id", self.store_id), ("generation", str(self.generation)))
                apply_changes(connection, [PutMeta(key=key, value=value) for key, value in facts])
        except SQLAlchemyError as error:
            failed = self._failed(error)
            misconfigured = remedy_of(said(self._engine.url, error))[1]
            raise (ConfigError(str(failed)) if misconfigured else failed) from None
        self._inode = _inode(self._path)

    def _migrate(self, connection: sa.Connection) -> None:
        config = Config()
        config.set_main_option("script_location", str(importlib.resources.files("healthd.fleet") / "migrations"))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        with connection.begin():
            current = set(MigrationContext.configure(connection).get_current_heads())
        if current - known:
            versions = ", ".join(sorted(current - known))
            raise StoreError(
                f"{self._place} is of a newer healthd (schema {versions}); upgrade healthd or use another database"
            )
        try:
            with connection.begin():
                command.upgrade(config, "head")
        except CommandError as error:
            raise StoreError(f"{self._place} cannot be migrated: {first_line(error)}") from None


def _inode(path: Path | None) -> tuple[int, int] | None:
    """What a file is whatever its name; None where there is none."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        found = None
    return None if found is None else (found.st_dev, found.st_ino)
