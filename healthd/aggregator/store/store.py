"""
The aggregator's database: what must survive. SQLite by default, PostgreSQL by URL, the same code for both.

Everything that touches it runs on one thread (`writer`), by one connection (`session`), and only while this aggregator
is the one that took the database over last (`leadership`). A failure is a StoreError of one line and never a guess.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.exc import SQLAlchemyError

from healthd.aggregator.store import leadership
from healthd.aggregator.store import reading as rows
from healthd.aggregator.store.changes import Change, PutKey, PutMeta
from healthd.aggregator.store.databases import first_line, parse
from healthd.aggregator.store.leadership import FencedError
from healthd.aggregator.store.reading import Loaded
from healthd.aggregator.store.rows import apply_changes
from healthd.aggregator.store.session import Session
from healthd.aggregator.store.tables import LEADERSHIP, META, METADATA, NODES
from healthd.aggregator.store.writer import ANSWER_SECONDS, Job, Writer
from healthd.core.errors import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

LONG_SECONDS = 30.0
"""For what goes over the whole database: loading all of it, dropping what is old."""
CLOSE_SECONDS = 0.75
"""So long a database has to take what still waits when the aggregator ends, and again to let go of it."""


class Store:
    """
    An open database. `store_id` names it for life: nodes know by it who issued a lease. `term` counts the aggregators
    that had it, so that numbers of this process can be told from those of the last; see `leadership`.

    Made by `Store.open`, which blocks; `load` blocks too; the rest is for the event loop. After FencedError every call
    fails with it: memory is out of date then, and the process has to end.
    """

    def __init__(self, session: Session) -> None:
        self.store_id = ""
        self._session = session
        self._writer = Writer(session)
        self._closed = False

    @classmethod
    def open(cls, url: str) -> Store:
        """
        Open or make the database, bring its schema up to date and take it over.

        ConfigError for a URL that cannot be right, StoreError for a database that cannot be used; both name the place
        and the remedy, and never the password.
        """
        store = cls(Session(parse(url)))
        try:
            store._prepare()
        except BaseException:
            store._session.cut()  # a signal may have come while the server hung: then it would hang in closing too
            store.close()
            raise
        store._writer.start()
        return store

    @property
    def term(self) -> int:
        """How many aggregators have had this database, this one included."""
        return self._session.term

    @property
    def failures(self) -> int:
        """Jobs that could not be done since the start."""
        return self._writer.failures

    @property
    def failing(self) -> bool:
        """Whether the last one could not."""
        return self._writer.failing

    def trouble(self) -> str | None:
        """Why the database cannot be written, in one line; None while it can. Looks at nothing but memory."""
        return self._writer.trouble()

    def close(self) -> None:
        """Finish what waits, then let go of the database; a few seconds at most. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._writer.close(CLOSE_SECONDS)
        if self._writer.alive:
            log.error("%s does not answer: it is left as it is", self._session.place)
        else:
            self._session.close()

    async def give_up_when_stuck(self) -> None:
        """While the aggregator ends: once the database hangs, whoever waits for it is answered with a StoreError."""
        while True:
            await asyncio.sleep(CLOSE_SECONDS / 4)
            if self._writer.hangs(CLOSE_SECONDS):
                self._writer.give_up()
                return

    def load(self) -> Loaded:
        """What an aggregator starts from. Blocks."""
        done: Future[Loaded] = Future()

        def deliver(value: Any, error: Exception | None) -> None:
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

        job = Job(rows.load, deliver, write=False, seconds=LONG_SECONDS)
        self._writer.submit(job)
        if not wait([done], LONG_SECONDS).done:
            self._writer.expire(job)
        return done.result()

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

    async def confirm(self) -> None:
        """Return if nobody else has taken the database over; FencedError, or StoreError when it does not answer."""
        await self.read(lambda _connection: None)

    async def lead(self) -> None:
        """
        Renew the leadership for ever, so that it is noticed within seconds when the database cannot be written or was
        taken over. One task runs it; it ends by cancellation, or with FencedError.
        """
        while True:
            try:
                await self.run(lambda connection: leadership.renew(connection, now=time.time()))
            except FencedError:
                raise
            except StoreError:
                log.debug("the leadership could not be renewed; the writer has said why")
            await asyncio.sleep(leadership.RENEW_SECONDS)

    async def read(self, work: Callable[[sa.Connection], T], *, seconds: float = ANSWER_SECONDS) -> T:
        """Run `work`, which changes nothing, in a transaction; its result. See `run`."""
        return await self._do(work, write=False, seconds=seconds)

    async def run(self, work: Callable[[sa.Connection], T], *, seconds: float = ANSWER_SECONDS) -> T:
        """
        Run `work` in a transaction on the writer thread; its result once it is committed.

        StoreError after `seconds` at the latest, as UnsureError where it may be on disk all the same. `work` must be
        safe to repeat: when one of several that share a transaction fails, each is tried by itself.
        """
        return await self._do(work, write=True, seconds=seconds)

    async def _do(self, work: Callable[[sa.Connection], T], *, write: bool, seconds: float) -> T:
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

        job = Job(work, deliver, write=write, seconds=seconds)
        self._writer.submit(job)
        timer = loop.call_later(seconds, self._writer.expire, job)
        try:
            return await future
        finally:
            timer.cancel()

    # --- at the start -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Check the file, migrate it, read who it is, take it over."""
        try:
            connection = self._session.connect()
            with connection.begin():
                wrong = rows.check_whole(connection)
            if wrong is not None:
                raise StoreError(
                    f"{self._session.place} is damaged ({wrong.splitlines()[-1]}); restore a backup, or move the file "
                    "away: nodes report their leases again"
                )
            self._migrate(connection)
            with connection.begin():
                known = {row.key: row.value for row in connection.execute(sa.select(META))}
                self.store_id = known.get("store_id") or f"store-{secrets.token_hex(8)}"
                lease_key = known.get("lease_key") or secrets.token_hex(32)
                term, left_at = leadership.take_over(connection, place=self._session.place, now=time.time())
                facts = {"store_id": self.store_id, "lease_key": lease_key, "left_at": str(left_at)}
                apply_changes(connection, [PutMeta(key=key, value=value) for key, value in facts.items()])
            self._session.term = term
        except SQLAlchemyError as error:
            raise self._session.failed(error) from None

    def _migrate(self, connection: sa.Connection) -> None:
        config = Config()
        config.set_main_option(
            "script_location", str(importlib.resources.files("healthd.aggregator.store") / "migrations")
        )
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        with connection.begin():
            current = set(MigrationContext.configure(connection).get_current_heads())
        if current - known:
            versions = ", ".join(sorted(current - known))
            raise StoreError(
                f"{self._session.place} is of a newer healthd, or of a development version before 0.1.0 (schema "
                f"{versions}); upgrade healthd, or use another database"
            )
        try:
            with connection.begin():
                if current:
                    command.upgrade(config, "head")
                else:
                    METADATA.create_all(connection, checkfirst=False)  # a table of somebody else is never taken over
                    connection.execute(LEADERSHIP.insert().values(id=1, term=0, holder="", renewed=0.0))
                    command.stamp(config, "head")
        except CommandError as error:
            raise StoreError(f"{self._session.place} cannot be migrated: {first_line(error)}") from None
