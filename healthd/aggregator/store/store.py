"""
The aggregator's database: what must survive. SQLite by default, PostgreSQL by URL, the same code for both.

The aggregator calls `Store`. Everything that touches the database runs on the one thread of its `Writer`, in the order
of submission, by one connection (`session`), and only while this aggregator is the one that took the database over last
(`leadership`). A failure is a StoreError of one line and never a guess.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from healthd.aggregator.store import leadership
from healthd.aggregator.store import reading as rows
from healthd.aggregator.store.database import AwayError, RefusedWorkError, UnsureError, first_line, parse
from healthd.aggregator.store.leadership import LEASE_SECONDS, RENEW_SECONDS, FencedError, Leadership, boot_seconds
from healthd.aggregator.store.reading import Loaded
from healthd.aggregator.store.rows import Change, PutKey, PutMeta, apply_changes
from healthd.aggregator.store.schema import bring_up_to_date
from healthd.aggregator.store.session import Session, Work
from healthd.aggregator.store.tables import META, NODES
from healthd.core.errors import BadInputError, StoreError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Within this everybody is answered who waits for the database: a commit takes milliseconds, a busy disk a second."""
LONG_SECONDS = 30.0
"""For what goes over the whole database: loading all of it, dropping what is old."""
CLOSE_SECONDS = 0.75
"""So long a database has to take what still waits when the aggregator ends, and again to let go of it."""
SLOW_SECONDS = 3.0
"""After this a transaction that is under way is told of as one that hangs."""
RECENT_SECONDS = 3.0
"""So long a failure is told after it has passed: writes of one page may pass where others fail (a full disk)."""
MOST_WAITING = 2000
"""Jobs that may wait: 0.2 s of work at 5 ms a commit of 64; more means that the database stands still."""
MOST_TOGETHER = 64
"""Jobs in one transaction: bounds how long the first of them waits for the last."""
MOST_ENROLLED = 500
"""Nodes whose keys are written in one transaction."""
MOST_REFUSALS = 100
"""Different texts of refused work that are remembered as logged; beyond, they may be logged once more."""

T = TypeVar("T")
Deliver = Callable[[Any, Exception | None], None]


class Store:
    """
    An open database that this process leads. `store_id` names it for life: nodes know by it who issued a lease. `term`
    counts the leaders, so that numbers of this one can be told from those of the last.

    Made by `Store.open`, which blocks; `load` blocks too; the rest is for the event loop. After FencedError every call
    fails with it: memory is out of date then.
    """

    def __init__(self, session: Session, writer: Writer) -> None:
        self.store_id = ""
        self._session = session
        self._writer = writer
        self._closed = False
        self._newcomers: list[_Newcomer] = []
        self._enrolling = asyncio.Lock()

    @classmethod
    def open(
        cls,
        url: str,
        *,
        advertised: str = "",
        seen: Leadership | None = None,
        engine: sa.Engine | None = None,
        shared: bool | None = None,
        make_writer: Callable[[Session], Writer] | None = None,
    ) -> Self:
        """
        Open or make the database, bring its schema up to date and take the lead.

        `advertised` is the URL at which its leader answers from now on. With `seen` it is taken over only from the
        leader that was seen to be gone: NotVacantError where that one works, or somebody else was faster.

        `engine` is used instead of one made for the URL, `shared` says whether several aggregators may use it, and
        `make_writer` runs the jobs: a simulation has neither servers nor files nor threads.

        ConfigError for a URL that cannot be right, StoreError for a database that cannot be used; both name the place
        and the remedy, and never the password.
        """
        session = Session(parse(url), engine=engine, shared=shared)
        store = cls(session, (make_writer or Writer)(session))
        try:
            store._prepare(advertised, seen)
        except BaseException:
            store._session.cut()  # a signal may have come while the server hung: then it would hang in closing too
            store.close()
            raise
        store._writer.start()
        return store

    @staticmethod
    def prepare(url: str, own_url: str | None = None, *, engine: sa.Engine | None = None) -> None:
        """
        Open or make a database, bring its schema up to date and leave it. The aggregator that answers at `own_url`
        counts as one that uses it from then on. `engine` and errors as of `open`. Blocks.
        """
        opened = Session(parse(url), engine=engine)
        try:
            bring_up_to_date(opened.connect(), opened.place, own_url)
        except SQLAlchemyError as error:
            raise opened.failed(error) from None
        except BaseException:
            opened.cut()
            raise
        finally:
            opened.close()

    @property
    def term(self) -> int:
        """How many leaders the database has had, this one included."""
        return self._session.term

    @property
    def holder(self) -> str:
        """By what the database knows this process, in no other one's life."""
        return self._session.holder

    def leads(self) -> bool:
        """
        Whether this process may still speak as the leader: nobody can have taken over yet, by our own clock.

        What is written does not depend on it: each transaction checks the term.
        """
        return not self._session.shared or boot_seconds() - self._session.renewed_at < LEASE_SECONDS

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
        """
        Finish what waits, end the lease, then let go of the database; a few seconds at most. Safe to repeat.
        """
        if self._closed:
            return
        self._closed = True
        if self._session.shared and self._session.term:
            self._give_up_lease()
        self._writer.close(CLOSE_SECONDS)
        if self._writer.alive:
            log.error("%s does not respond: it is left as it is", self._session.place)
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
        if not self._writer.wait(done, LONG_SECONDS):
            self._writer.expire(job)
        return done.result()

    async def write(self, changes: Sequence[Change]) -> None:
        """Commit them all or none; returns once they are on disk."""
        await self.run(lambda connection: apply_changes(connection, changes))

    async def enrol(self, node: str, key_hash: str, *, now: float) -> str:
        """
        The hash of the key that the name belongs to: this one, if it belonged to none.

        Nodes that come at once are looked up and written together: a new fleet comes as a whole. A name is given by one
        caller at a time.
        """
        mine = _Newcomer(PutKey(node=node, key_hash=key_hash, seen_at=now))
        self._newcomers.append(mine)
        async with self._enrolling:
            while mine.answer is None:
                batch, self._newcomers = self._newcomers[:MOST_ENROLLED], self._newcomers[MOST_ENROLLED:]
                await self._enrol(batch)
        if isinstance(mine.answer, StoreError):
            raise mine.answer
        return mine.answer

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
                await self.run(lambda _connection: None)  # whatever is written renews it
            except FencedError:
                raise
            except StoreError:
                log.debug("the leadership could not be renewed; see the writer's message")
            await asyncio.sleep(RENEW_SECONDS)

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

    async def _enrol(self, batch: Sequence[_Newcomer]) -> None:
        """Give each its answer. Cancelled, it leaves them to the callers that wait."""
        try:
            answers = await self.run(lambda connection: _keys_of(connection, [one.key for one in batch]))
        except StoreError as error:
            for one in batch:
                one.answer = error
        except asyncio.CancelledError:
            self._newcomers = [*batch, *self._newcomers]
            raise
        else:
            for one in batch:
                one.answer = answers[one.key.node]

    def _prepare(self, advertised: str, seen: Leadership | None) -> None:
        """Check the file, migrate it, take it over, read who it is."""
        try:
            connection = self._session.connect()
            with connection.begin():
                wrong = rows.check_whole(connection)
            if wrong is not None:
                raise StoreError(
                    f"{self._session.place} is damaged ({wrong.splitlines()[-1]}); restore a backup, or move the file "
                    "away: nodes report their leases again"
                )
            bring_up_to_date(connection, self._session.place)
            began = boot_seconds()
            with connection.begin():
                term = leadership.take_over(
                    connection,
                    holder=self._session.holder,
                    url=advertised,
                    place=self._session.place,
                    seen=seen,
                )
                known = {row.key: row.value for row in connection.execute(sa.select(META))}
                self.store_id = known.get("store_id") or f"store-{secrets.token_hex(8)}"
                lease_key = known.get("lease_key") or secrets.token_hex(32)
                facts = {"store_id": self.store_id, "lease_key": lease_key}
                apply_changes(connection, [PutMeta(key=key, value=value) for key, value in facts.items()])
            self._session.term, self._session.renewed_at = term, began
        except SQLAlchemyError as error:
            raise self._session.failed(error) from None

    def _give_up_lease(self) -> None:
        """After all that waits. Who cannot be told takes over once the lease is over."""
        with contextlib.suppress(StoreError):
            self._writer.submit(Job(leadership.give_up, lambda _value, _error: None, write=True, seconds=CLOSE_SECONDS))


class Writer:
    """
    Start it, `submit` jobs to it, `close` it. Call `expire` when the time limit of a job is over; the writer does not
    watch the clock.

    `failures` counts the jobs that have failed since the start; `failing`: the last one has.
    """

    def __init__(self, session: Session) -> None:
        self.failures = 0
        self.failing = False
        self._session = session
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._ending = False
        self._given_up = False
        self._under_way: tuple[float, Sequence[Job]] | None = None  # since when, by time.monotonic
        self._fenced: FencedError | None = None
        self._outage = ""
        self._refusals: set[str] = set()  # those that were logged
        self._failed_at = -math.inf

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Add the job to the queue. StoreError at once when it cannot be done."""
        with self._changed:
            if self._fenced is not None:
                raise self._fenced
            if self._ending:
                raise StoreError(f"{self._session.place} is closed")
            if len(self._jobs) >= MOST_WAITING:
                text = f"{self._session.place} does not keep up: {MOST_WAITING} writes wait; check its disk"
                raise StoreError(text)
            self._jobs.append(job)
            self._changed.notify()

    def wait(self, done: Future[Any], seconds: float) -> bool:
        """Block until a job has set this; false when it has not within `seconds`."""
        return bool(wait([done], seconds).done)

    def expire(self, job: Job) -> None:
        """Fail a job whose time is over, and interrupt a transaction that has hung for as long."""
        text = (
            f"{self._session.place} did not respond within {job.seconds:g} s; check that it is up and its disk keeps up"
        )
        if job.give_up(text):
            self._failed(StoreError(text))
        began, batch = self._under_way or (math.inf, ())
        # A job reaches this thread a little after it was submitted, so not the whole time.
        if time.monotonic() - began >= 0.9 * max((one.seconds for one in batch), default=0.0):
            self._session.cut()

    def hangs(self, seconds: float) -> bool:
        """Whether a transaction has taken so long."""
        began, _ = self._under_way or (math.inf, ())
        return time.monotonic() - began >= seconds

    def close(self, seconds: float) -> None:
        """Finish the queue; fail what is not done within `seconds`. Blocks for twice that at most. Safe to repeat."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread.is_alive() and not self._given_up:
            self._thread.join(seconds)
        if self._thread.is_alive():
            self.give_up()
            self._thread.join(seconds)

    def give_up(self) -> None:
        """Fail all jobs and accept no more: the aggregator ends, and the database does not answer."""
        with self._changed:
            self._ending = self._given_up = True
            self._changed.notify()
            waiting = list(self._jobs)
            self._jobs.clear()
        _, batch = self._under_way or (0.0, ())
        for job in (*batch, *waiting):
            job.give_up(f"{self._session.place} does not respond, and the aggregator is stopping")
        if batch:
            self._session.cut()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def trouble(self) -> str | None:
        """Why the database cannot be written, in one line; None while it can, as far as is known."""
        if self._fenced is not None:
            return str(self._fenced)
        now = time.monotonic()
        began, _ = self._under_way or (now, ())
        if now - began >= SLOW_SECONDS:
            return f"{self._session.place} has not responded for {now - began:.0f} s"
        return self._outage if self._outage and (self.failing or now - self._failed_at < RECENT_SECONDS) else None

    def _run(self) -> None:
        while self.run_next():
            pass

    def run_next(self) -> bool:
        """Do the jobs of the next transaction, once there are any; false at the end."""
        batch = self._next()
        if batch is None:
            return False
        self._under_way = (time.monotonic(), batch)
        try:
            self._commit(batch)
        finally:
            self._under_way = None
        return True

    def _next(self) -> list[Job] | None:
        """Jobs for one transaction, once there are any; None at the end. Jobs with another time limit wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ending)
            batch: list[Job] = []
            while self._jobs and len(batch) < MOST_TOGETHER:
                if batch and self._jobs[0].seconds != batch[0].seconds:
                    break
                batch.append(self._jobs.popleft())
            return batch or None

    def _commit(self, batch: Sequence[Job], *, unsure: bool = False) -> None:
        """
        Run all jobs in one transaction; when it fails, run each alone, so that no job fails for the fault of another.

        `unsure`: it may be on disk already.
        """
        batch = [job for job in batch if job.begin()]
        if not batch:
            return
        write = any(job.write for job in batch)
        try:
            results = self._session.transact([job.work for job in batch], write=write)
        except (StoreError, BadInputError) as error:
            self._failed_together(batch, error, unsure)
            return
        except Exception as error:
            # A bug in one job must not end the thread and leave the others waiting.
            log.exception("%s: a job failed", self._session.place)
            internal = RefusedWorkError(f"{self._session.place}: internal error: {first_line(error)}")
            self._failed_together(batch, internal, unsure)
            return
        if write:
            self._written()
        for job, result in zip(batch, results, strict=True):
            job.end(result, None)

    def _failed_together(self, batch: Sequence[Job], error: StoreError | BadInputError, unsure: bool) -> None:
        unsure = unsure or isinstance(error, UnsureError)
        if isinstance(error, FencedError):
            self._fenced = error
        elif len(batch) > 1 and not isinstance(error, AwayError):
            for job in batch:
                self._commit([job], unsure=unsure)
            return
        for job in batch:
            lost = unsure and job.write and isinstance(error, StoreError) and not isinstance(error, FencedError)
            if job.begin() and isinstance(error, StoreError):  # otherwise it was failed and counted before
                self._failed(error)
            job.end(None, UnsureError(str(error)) if lost else error)

    def _written(self) -> None:
        if self.failing and self._outage:
            log.warning("%s accepts writes again", self._session.place)
        self.failing = False

    def _failed(self, error: StoreError) -> None:
        self.failures += 1
        if isinstance(error, RefusedWorkError):
            self.failing, self._outage = True, ""
            self._log_once(str(error))
            return
        news = str(error) != self._outage or not self.failing
        if news and not isinstance(error, FencedError):  # the aggregator logs that when it ends
            log.error("%s", error)
        self.failing, self._outage, self._failed_at = True, str(error), time.monotonic()

    def _log_once(self, refusal: str) -> None:
        """Log each refused text once; every caller is told."""
        if refusal in self._refusals:
            return
        if len(self._refusals) >= MOST_REFUSALS:
            self._refusals.clear()
        self._refusals.add(refusal)
        log.error("%s", refusal)


class Job:
    """
    A piece of work, and who is told its result: once, by whichever thread knows it first.

    `work` must be safe to repeat: when one of several jobs in a transaction fails, each is tried alone. `write`: it may
    change something. It is answered within `seconds`.
    """

    def __init__(self, work: Work, deliver: Deliver, *, write: bool, seconds: float) -> None:
        self.work, self.write, self.seconds = work, write, seconds
        self._deliver = deliver
        self._state = _State.WAITING
        self._guard = threading.Lock()

    def begin(self) -> bool:
        """Start the job; false when it was answered already."""
        with self._guard:
            if self._state is _State.WAITING:
                self._state = _State.RUNNING
            return self._state is _State.RUNNING

    def end(self, value: Any, error: Exception | None) -> None:
        """Answer the job."""
        self._end(lambda _running: (value, error))

    def give_up(self, why: str) -> bool:
        """
        Fail the job because its time is over: StoreError, or UnsureError where it was started. False: it was answered
        already.
        """

        def outcome(running: bool) -> tuple[None, Exception]:
            return None, (UnsureError(why) if running and self.write else StoreError(why))

        return self._end(outcome)

    def _end(self, outcome: Callable[[bool], tuple[Any, Exception | None]]) -> bool:
        with self._guard:
            before, self._state = self._state, _State.DONE
        if before is not _State.DONE:
            self._deliver(*outcome(before is _State.RUNNING))
        return before is not _State.DONE


@dataclass
class _Newcomer:
    """A key that waits to be written under its name; `answer` is the hash of the key that has the name."""

    key: PutKey
    answer: str | StoreError | None = None


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


def _keys_of(connection: sa.Connection, wanted: Sequence[PutKey]) -> Mapping[str, str]:
    """By name the hash of the key that has it; keys of names without one are written."""
    names = [one.node for one in wanted]
    query = sa.select(NODES.c.node, NODES.c.key_hash).where(NODES.c.node.in_(names))
    known = {name: key_hash for name, key_hash in connection.execute(query) if key_hash is not None}
    apply_changes(connection, [one for one in wanted if one.node not in known])
    return {one.node: one.key_hash or "" for one in wanted} | known
