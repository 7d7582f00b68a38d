"""
The thread that does all work on the database, in the order in which it was asked.

What waits together is committed together, because a commit costs a disk flush. Every piece of work is answered within
its seconds, whether the database answers or not; a call that hangs is ended from outside.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from healthd.aggregator.store.databases import first_line
from healthd.aggregator.store.leadership import FencedError
from healthd.aggregator.store.session import AwayError, RefusedWorkError, Session, UnsureError, Work
from healthd.core.errors import BadInputError, StoreError

log = logging.getLogger(__name__)

Deliver = Callable[[Any, Exception | None], None]

ANSWER_SECONDS = 5.0
"""Within this everybody is answered who waits for the database: a commit takes milliseconds, a busy disk a second."""
SLOW_SECONDS = 3.0
"""After this a transaction that is under way is told of as one that hangs."""
RECENT_SECONDS = 3.0
"""So long a failure is told after it has passed: writes of one page may pass where others fail (a full disk)."""
MOST_WAITING = 2000
"""Jobs that may wait: 0.2 s of work at 5 ms a commit of 64; more means that the database stands still."""
MOST_TOGETHER = 64
"""Jobs in one transaction: bounds how long the first of them waits for the last."""

MOST_REFUSALS = 100
"""Different texts of refused work that are remembered as logged; beyond, they may be logged once more."""


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


class Job:
    """
    A piece of work, and who is to be told what came of it: once, by whichever thread knows first.

    `work` must be safe to repeat: when one of several that share a transaction fails, each is tried by itself. `write`:
    it may change something. `seconds`: within this it is answered.
    """

    def __init__(self, work: Work, deliver: Deliver, *, write: bool, seconds: float) -> None:
        self.work, self.write, self.seconds = work, write, seconds
        self._deliver = deliver
        self._state = _State.WAITING
        self._guard = threading.Lock()

    def begin(self) -> bool:
        """Whether it is still to be done."""
        with self._guard:
            if self._state is _State.WAITING:
                self._state = _State.RUNNING
            return self._state is _State.RUNNING

    def end(self, value: Any, error: Exception | None) -> None:
        """What came of it."""
        self._end(lambda _running: (value, error))

    def give_up(self, why: str) -> bool:
        """Nobody waits any longer: StoreError, and UnsureError where it was begun. False: it had ended already."""

        def outcome(running: bool) -> tuple[None, Exception]:
            return None, (UnsureError(why) if running and self.write else StoreError(why))

        return self._end(outcome)

    def _end(self, outcome: Callable[[bool], tuple[Any, Exception | None]]) -> bool:
        with self._guard:
            before, self._state = self._state, _State.DONE
        if before is not _State.DONE:
            self._deliver(*outcome(before is _State.RUNNING))
        return before is not _State.DONE


class Writer:
    """
    Start it, `submit` jobs to it, `close` it. `expire` a job when its seconds are over: nobody else looks at the clock.

    `failures` counts the jobs that could not be done since the start; `failing`: the last one could not.
    """

    def __init__(self, session: Session) -> None:
        self.failures = 0
        self.failing = False
        self._session = session
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._ending = False
        self._under_way: tuple[float, Sequence[Job]] | None = None  # since when, by time.monotonic
        self._fenced: FencedError | None = None
        self._outage = ""
        self._refusals: set[str] = set()  # those that were logged
        self._failed_at = -math.inf

    def start(self) -> None:
        """From now on jobs are done."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have it done after all that wait already. StoreError at once when it cannot be."""
        with self._changed:
            if self._fenced is not None:
                raise self._fenced
            if self._ending:
                raise StoreError(f"{self._session.place} is closed")
            if len(self._jobs) >= MOST_WAITING:
                text = f"{self._session.place} does not keep up: {MOST_WAITING} writes wait; look at its disk"
                raise StoreError(text)
            self._jobs.append(job)
            self._changed.notify()

    def expire(self, job: Job) -> None:
        """Its seconds are over: it is answered now. A transaction that has hung for as long is ended."""
        text = f"{self._session.place} did not answer within {job.seconds:g} s; see that it is up and its disk keeps up"
        if job.give_up(text):
            self._failed(StoreError(text))
        began, batch = self._under_way or (math.inf, ())
        # A job is handed over a little later than it was asked, hence not the whole time.
        if time.monotonic() - began >= 0.9 * max((one.seconds for one in batch), default=0.0):
            self._session.cut()

    def hangs(self, seconds: float) -> bool:
        """Whether a transaction has been under way for so long."""
        began, _ = self._under_way or (math.inf, ())
        return time.monotonic() - began >= seconds

    def close(self, seconds: float) -> None:
        """Finish what waits; what is not done within `seconds` is given up. Blocks so long. Safe to repeat."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self._thread.is_alive():
            self.give_up()
            self._thread.join(seconds)

    def give_up(self) -> None:
        """Answer everybody who waits now, and take no more: the aggregator ends, and the database does not answer."""
        with self._changed:
            self._ending = True
            self._changed.notify()
            waiting = list(self._jobs)
            self._jobs.clear()
        _, batch = self._under_way or (0.0, ())
        for job in (*batch, *waiting):
            job.give_up(f"{self._session.place} does not answer, and the aggregator is stopping")
        if batch:
            self._session.cut()

    @property
    def alive(self) -> bool:
        """Whether the thread still has the session."""
        return self._thread.is_alive()

    def trouble(self) -> str | None:
        """Why the database cannot be written, in one line; None while it can, as far as was seen."""
        if self._fenced is not None:
            return str(self._fenced)
        now = time.monotonic()
        began, _ = self._under_way or (now, ())
        if now - began >= SLOW_SECONDS:
            return f"{self._session.place} has not answered for {now - began:.0f} s"
        return self._outage if self._outage and (self.failing or now - self._failed_at < RECENT_SECONDS) else None

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._under_way = (time.monotonic(), batch)
            try:
                self._commit(batch)
            finally:
                self._under_way = None

    def _next(self) -> list[Job] | None:
        """Jobs for one transaction, once there are any; None at the end. What may take longer goes alone."""
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
        One transaction for all; when it fails, one for each, so that nobody fails for another's fault.

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
            # A fault of ours in one job must not end the thread and leave everybody waiting.
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
            if job.begin() and isinstance(error, StoreError):  # else it was given up, and counted then
                self._failed(error)
            job.end(None, UnsureError(str(error)) if lost else error)

    def _written(self) -> None:
        if self.failing and self._outage:
            log.warning("%s takes writes again", self._session.place)
        self.failing = False

    def _failed(self, error: StoreError) -> None:
        self.failures += 1
        if isinstance(error, RefusedWorkError):
            self.failing, self._outage = True, ""
            self._tell_once(str(error))
            return
        news = str(error) != self._outage or not self.failing
        if news and not isinstance(error, FencedError):  # the aggregator ends with that, as its last word
            log.error("%s", error)
        self.failing, self._outage, self._failed_at = True, str(error), time.monotonic()

    def _tell_once(self, refusal: str) -> None:
        """Whoever asked is told each time; the log has each text once."""
        if refusal in self._refusals:
            return
        if len(self._refusals) >= MOST_REFUSALS:
            self._refusals.clear()
        self._refusals.add(refusal)
        log.error("%s", refusal)
