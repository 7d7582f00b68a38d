"""
The disk of an aggregator: a SQLite database in memory that outlives the processes that have it open.

Commits take time, fail before or after they are on disk, and may kill their process; a copy can be kept and put back.
The store's own code runs on it, with a writer without a thread (`SimulatedWriter`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import sqlalchemy as sa

from healthd.aggregator.leadership import HANGS_SECONDS
from healthd.aggregator.store import LEASE_SECONDS, Leadership, Look, Store
from healthd.aggregator.store.database import AwayError, make_engine
from healthd.aggregator.store.leadership import depose
from healthd.aggregator.store.session import Session
from healthd.aggregator.store.store import Job, Writer
from tests.simulation.loop import PROCESS, KilledError, Process, VirtualLoop

BUSY_SECONDS = (0.0005, 0.004)
"""How long a commit, and again its answer, takes on a disk that is well."""
LOOK_SECONDS = 1.0
"""How often a watch looks where nothing wakes it."""


class DiskConnection(sqlite3.Connection):
    """The one connection to a database in memory: closing it loses nothing, and commits ask the disk."""

    disk: Disk
    ended = False

    def close(self) -> None:
        """The process lets go of it."""
        if not self.ended and self.in_transaction:
            super().rollback()

    def commit(self) -> None:
        """As the disk allows."""
        self.disk.commit(super().commit)

    def rollback(self) -> None:
        """What the transaction changed is undone, and is no change of the next one."""
        super().rollback()
        self.disk.began = self.total_changes

    def end(self) -> None:
        """The database is gone."""
        self.ended = True
        super().close()


class Disk:
    """
    See the module. `on_commit` is called before each commit that changes something, with the process and the term of
    its leader, 0 where that takes over. `cut_off`: which machines do not reach it, and whether their calls hang.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.cut_off: dict[str, bool] = {}
        self.term = 0  # of who is writing
        self.gone = False  # with the whole simulation
        self._leader: tuple[int, str] | None = None
        self._news = asyncio.Event()
        self.slow_seconds = 0.0
        self.fail_before = self.fail_after = 0.0  # probabilities
        self.kill_at: int | None = None  # the commit, counted from now, at which the process is killed
        self.kill_after = False  # once that is on disk
        self.commits = 0
        self.on_commit: Callable[[Process | None, int], None] = lambda _process, _term: None
        self.copy: bytes | None = None
        self.began = 0
        _ENGINE.dispose()  # of the simulation before
        self.connection = self._empty()
        # What the collector of garbage does to one rolls back a transaction of whoever has the connection now.
        self._sessions: list[Session] = []

    def _empty(self) -> DiskConnection:
        made = sqlite3.connect(":memory:", factory=DiskConnection, check_same_thread=False, isolation_level=None)
        made.disk = self
        return made

    def connect(self) -> sqlite3.Connection:
        """What the driver's `connect` would give."""
        if self.connection.in_transaction:
            self.connection.rollback()  # of a process that was killed
        return self.connection

    # --- commits ------------------------------------------------------------------------------------------------------

    def commit(self, really: Callable[[], None]) -> None:
        """One commit, or what becomes of it."""
        changed, self.began = self.connection.total_changes != self.began, self.connection.total_changes
        process = PROCESS.get()
        if not changed:
            really()
            return
        self.commits += 1
        self.on_commit(process, self.term)
        killed = self.kill_at is not None and self.kill_at <= 0
        if self.kill_at is not None:
            self.kill_at = None if killed else self.kill_at - 1
        drawn = self.chance.random()
        if drawn < self.fail_before or (killed and not self.kill_after):
            self.connection.rollback()
        else:
            really()
            self._notify()
        if killed and process is not None:
            process.kill()
            raise KilledError
        if drawn < self.fail_before + self.fail_after:
            raise sqlite3.OperationalError("disk I/O error")

    # --- leadership ---------------------------------------------------------------------------------------------------

    def reached(self) -> bool | None:
        """Whether the running process reaches the disk; None where it hangs in trying."""
        process = PROCESS.get()
        hangs = self.cut_off.get(process.machine.name) if process is not None else None
        return True if hangs is None else None if hangs else False

    def look(self) -> Leadership:
        """The row of `leadership`."""
        row = self.connection.execute("SELECT term, holder, url, renewed FROM leadership").fetchone()
        return Leadership(term=row[0], holder=row[1], url=row[2], renewed=row[3])

    def depose(self) -> None:
        """As `healthd aggregator --step-down` does it."""
        with contextlib.suppress(sa.exc.SQLAlchemyError), self._engine().begin() as connection:
            depose(connection)

    def _engine(self) -> sa.Engine:
        _opened[:] = [self]
        return _ENGINE

    def _notify(self) -> None:
        """NOTIFY of PostgreSQL: who watches looks at once when a leader comes or goes."""
        with contextlib.suppress(sqlite3.OperationalError):  # there are no tables yet
            row = self.connection.execute("SELECT term, holder FROM leadership").fetchone()
            if row != self._leader:
                self._leader = row
                news, self._news = self._news, asyncio.Event()
                news.set()

    @property
    def holder(self) -> str:
        """Who led by the last commit that changed it; empty: nobody."""
        return "" if self._leader is None else self._leader[1]

    async def news(self, seconds: float) -> None:
        """Until a leader comes or goes; at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    # --- copies -------------------------------------------------------------------------------------------------------

    def keep_copy(self) -> None:
        """A backup of the database as it is."""
        (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
        self.copy = self.connection.serialize() if pages else b""  # of nothing SQLite makes no copy

    def put_back(self) -> None:
        """The database is what it was when the copy was made; no process may have it open."""
        if self.copy is not None:
            self._replace()
            if self.copy:
                self.connection.deserialize(self.copy)

    def lose(self) -> None:
        """The database is empty; no process may have it open."""
        self._replace()

    def _replace(self) -> None:
        _ENGINE.dispose()
        self.connection.end()
        self.connection, self.began = self._empty(), 0
        self._leader = None

    def delay(self) -> float:
        """How long the next commit takes, or its answer."""
        return self.chance.uniform(*BUSY_SECONDS) + self.chance.random() * self.slow_seconds

    def open(self, loop: VirtualLoop) -> Store:
        """An aggregator's store on this disk, which nobody shares."""
        return Store.open("sqlite://", engine=self._engine(), make_writer=self._make_writer(loop))

    def take(self, loop: VirtualLoop, seen: Leadership, url: str) -> Store:
        """The store of who takes over from `seen` and answers at this URL."""
        return Store.open(
            "sqlite://",
            engine=self._engine(),
            shared=True,
            seen=seen,
            advertised=url,
            make_writer=self._make_writer(loop),
        )

    def first_look(self, now: float) -> tuple[Leadership, bool]:
        """As an aggregator that starts looks: the row, and whether its lease is over by the clock of the server."""
        Store.prepare("sqlite://", engine=self._engine())
        row = self.look()
        return row, not row.holder or now - row.renewed >= LEASE_SECONDS

    def _make_writer(self, loop: VirtualLoop) -> Callable[[Session], Writer]:
        def make(session: Session) -> SimulatedWriter:
            self._sessions.append(session)
            return SimulatedWriter(session, loop, self)

        return make


class SimulatedWatch:
    """A `Watch` without a thread: a task of the process looks at the row."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk, self._process = disk, process

    def start(self, on_look: Callable[[Look], None]) -> None:
        """As of a Watch."""
        self._process.start(self._run(on_look), "leadership")

    async def _run(self, on_look: Callable[[Look], None]) -> None:
        while True:
            if self._disk.reached():
                await asyncio.sleep(self._disk.chance.uniform(*BUSY_SECONDS))
                on_look(self._disk.look())
                await self._disk.news(LOOK_SECONDS)
                continue
            if self._disk.reached() is None:
                await asyncio.sleep(HANGS_SECONDS)
            on_look(AwayError("database: Connection refused"))
            await asyncio.sleep(LOOK_SECONDS / 2)


# One engine for all stores of this process, so that each statement is compiled once: that is a third of the work.
_ENGINE = make_engine(sa.make_url("sqlite://"))
_opened: list[Disk] = []


@sa.event.listens_for(_ENGINE, "do_connect")
def _connect(*_: object) -> sqlite3.Connection:
    return _opened[0].connect()


@sa.event.listens_for(_ENGINE, "begin", insert=True)  # before the one that begins it
def _begin(_connection: object) -> None:
    if _opened and not _opened[0].reached():
        raise sa.exc.OperationalError("BEGIN", None, sqlite3.OperationalError("Connection refused"))


class SimulatedWriter(Writer):
    """The writer whose thread is a timer of the loop: a job is done after a while, and answered a while later."""

    def __init__(self, session: Session, loop: VirtualLoop, disk: Disk) -> None:
        super().__init__(session)
        self._loop, self._disk, self._leader = loop, disk, session
        self._due = False
        self._waiting = 0
        self._answer_seconds = 0.0

    def start(self) -> None:
        """Nothing is to be started."""

    def submit(self, job: Job) -> None:
        """As of a Writer."""
        super().submit(_Answered(job, self))
        self._waiting += 1
        self._plan(0.0)

    def wait(self, done: Future[Any], _seconds: float) -> bool:
        """Do all that waits now: its caller blocks the process meanwhile."""
        while not done.done() and self._waiting:
            self.run_next()
        return done.done()

    def run_next(self) -> bool:
        """As of a Writer; the disk is told who writes."""
        self._disk.term = self._leader.term
        try:
            return super().run_next()
        finally:
            self._disk.term = 0

    def close(self, seconds: float) -> None:
        """As of a Writer: what waits is done, where the disk can be reached."""
        while self._jobs and not self._disk.gone and self._disk.reached() is not None:
            self.run_next()
        super().close(seconds)
        if self._jobs:
            self.give_up()

    def _plan(self, seconds: float) -> None:
        if not self._due and self._waiting:
            self._due = True
            self._loop.call_later(seconds + self._disk.delay(), self._turn)

    def _turn(self) -> None:
        self._due = False
        if self._disk.reached() is None:
            self._plan(0.5)
        elif self._waiting:
            self._answer_seconds = answered = self._disk.delay()
            try:
                self.run_next()
            finally:
                self._answer_seconds = 0.0
            self._plan(answered)

    def done(self, job: Job, value: Any, error: Exception | None) -> None:
        """A job is done: its answer takes a while."""
        if self._answer_seconds:
            self._loop.call_later(self._answer_seconds, job.end, value, error)
        else:
            job.end(value, error)

    def begun(self) -> None:
        """A job has left the queue."""
        self._waiting -= 1


class _Answered(Job):
    """A job whose answer comes later than it is done; its time-out goes on meanwhile, and so does what it knows."""

    def __init__(self, job: Job, writer: SimulatedWriter) -> None:
        super().__init__(job.work, job.end, write=job.write, seconds=job.seconds)
        self._job, self._writer = job, writer
        self._taken = False

    def begin(self) -> bool:
        """As of a Job."""
        if not self._taken:
            self._taken = True
            self._writer.begun()
        return self._job.begin() and super().begin()

    def end(self, value: Any, error: Exception | None) -> None:
        """As of a Job."""
        self._writer.done(self._job, value, error)
