"""
The one place of the services that creates tasks: each has a name, and what lives long is supervised by a policy.

A task that may be restarted is called again with backoff whatever it raises. The end of a fatal one is the end of the
service: whoever runs it waits for `failure`.

Also here:

- how often the failure of something is logged.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from healthd.core.backoff import Backoff
from healthd.core.errors import HealthdError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Longest sleep: timers count CLOCK_MONOTONIC, which stands still while the machine sleeps.
LONGEST_SLEEP_SECONDS = 60.0

# Between the end of a task and its restart: doubled with each, back at the least after a good while.
FIRST_RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 60.0
MOST_MESSAGE_CHARACTERS = 300


class LogOnce:
    """The line of a log about something that may fail for long: it is logged when it becomes another one."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last = ""

    def say(self, text: str, level: int = logging.WARNING) -> None:
        """What is wrong."""
        if text != self._last:
            self._log.log(level, "%s", text)
        self._last = text

    def clear(self) -> None:
        """Nothing is wrong any more, so that the next line is logged whatever it is."""
        self._last = ""


class OnEnd(enum.Enum):
    """What follows when a supervised task raises, or returns although it must not."""

    RESTART = "restart"
    FATAL = "fatal"


class Tasks:
    """The tasks of one service; or with `within` some that end before it does, whose failures count as its own."""

    def __init__(self, *, first_restart_seconds: float = FIRST_RESTART_SECONDS, within: Tasks | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._first_restart_seconds = first_restart_seconds
        self._errors: Counter[str] = Counter() if within is None else within._errors
        self._messages: dict[str, str] = {} if within is None else within._messages
        self._down: set[str] = set() if within is None else within._down
        self._fatal: list[HealthdError] = []
        self._has_failed = asyncio.Event()

    @property
    def errors(self) -> Mapping[str, int]:
        """How often each supervised task failed since the start; 0 where it never did. Stays up to date."""
        return self._errors

    def failures(self) -> tuple[TaskFailure, ...]:
        """All supervised tasks that have failed, by name."""
        return tuple(
            TaskFailure(task=name, times=times, message=self._messages.get(name, ""), running=name not in self._down)
            for name, times in sorted(self._errors.items())
            if times
        )

    def count_error(self, name: str, error: Exception | None = None) -> None:
        """One more that a task has handled itself. None: it has ended by itself."""
        self._errors[name] += 1
        said = "ended by itself" if error is None else f"{type(error).__name__}: {error}"
        self._messages[name] = (said.splitlines() or [""])[0][:MOST_MESSAGE_CHARACTERS]

    def supervise(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], on_end: OnEnd = OnEnd.RESTART
    ) -> None:
        """
        Run `work()` until `stop`. When it raises or returns, `on_end` says what follows.

        RESTART: it is called again after a pause, so `work` must be able to begin anew. FATAL: `failure` raises; what
        is not a HealthdError is logged with its traceback.
        """
        self._errors[name] += 0
        self._down.discard(name)  # it may have failed before, within the same service
        self.start(name, self._restarted(name, work) if on_end is OnEnd.RESTART else self._once(name, work))

    async def failure(self) -> NoReturn:
        """Wait until a fatal task ends; raises the HealthdError that tells why."""
        await self._has_failed.wait()
        raise self._fatal[0]

    async def first(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless a fatal task ends before: then `work` is cancelled, and `failure` raised."""
        task = self.start("work beside fatal tasks", work)
        failure = self.start("watch over fatal tasks", self.failure())
        try:
            await asyncio.wait((task, failure), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await failure
            return await task
        finally:
            task.cancel()
            failure.cancel()
            await asyncio.wait((failure,))
            failure.cancelled() or failure.exception()  # retrieved: it was raised above where it came first

    async def _restarted(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        backoff, failures = Backoff(self._first_restart_seconds, MAX_RESTART_SECONDS), 0
        while True:
            began, failure = loop.time(), None
            try:
                await _stray_is_failure(work)
            except Exception as error:  # noqa: BLE001  # whatever the machine or an error of our own made it raise
                failure = error
            failures = 1 if loop.time() - began > MAX_RESTART_SECONDS else failures + 1
            pause = backoff.after(failures)
            if failure is None:
                log.error("%s has ended unexpectedly; it is restarted in %g s", name, pause)
            else:
                log.error("%s has failed; it is restarted in %g s", name, pause, exc_info=failure)
            self.count_error(name, failure)
            self._down.add(name)
            await asyncio.sleep(pause)
            self._down.discard(name)

    async def _once(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await _stray_is_failure(work)
            error = HealthdError(f"{name} has ended unexpectedly, and the service cannot run without it; see the log")
            self.count_error(name)
        except HealthdError as told:
            error = told
            self.count_error(name, told)
        except Exception as unforeseen:
            log.exception("%s has failed, and the service cannot run without it", name)
            self.count_error(name, unforeseen)
            error = HealthdError(f"{name} has failed ({self._messages[name]}); the log has the traceback")
        self._down.add(name)
        self._fatal.append(error)
        self._has_failed.set()

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run once. Who starts it awaits it, or has it report by itself."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self, seconds: float | None) -> None:
        """Cancel all and wait for them, None for as long as it takes; names those that do not end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, stuck = await asyncio.wait(tasks, timeout=seconds)
        if stuck:
            log.error("did not stop within %g s: %s", seconds, ", ".join(sorted(task.get_name() for task in stuck)))


@dataclass(frozen=True, kw_only=True)
class TaskFailure:
    """A supervised task that has failed: `times` since the start, last with `message`. Not `running`: it waits."""

    task: str
    times: int
    message: str
    running: bool


def is_cancelling() -> bool:
    """Whether the task at hand is itself being cancelled, rather than one that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, and clear it; false when it was not set in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


async def _stray_is_failure(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """RuntimeError for a cancellation that is not of this task: of something that `work` waited for."""
    try:
        await work()
    except asyncio.CancelledError as stray:
        if is_cancelling():
            raise
        raise RuntimeError("something that it waited for was cancelled") from stray
