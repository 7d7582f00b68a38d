"""The one place of the daemon that creates tasks: each has a name, and what kills one is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from healthd.errors import HealthdError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Longest sleep: timers count CLOCK_MONOTONIC, which stands still while the machine sleeps.
LONGEST_SLEEP_SECONDS = 60.0


class TaskDiedError(HealthdError):
    """A task that was to run for as long as the daemon ended."""


class Tasks:
    """The tasks of one daemon. `failed` resolves to the error of the first eternal task that ended by itself."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failed: asyncio.Future[TaskDiedError] = asyncio.get_running_loop().create_future()

    def eternal(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run until the daemon stops; that it ends earlier, in whatever way, ends the daemon."""
        self.start(name, work).add_done_callback(lambda task: self._eternal_ended(name, task))

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run once. Who starts it awaits it, or has it report by itself."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _eternal_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("%s died", name, exc_info=error)
        if not self.failed.done():
            what = f"{type(error).__name__}: {error}" if error is not None else "it ended without an error"
            self.failed.set_result(TaskDiedError(f"{name} died ({what}); the daemon must be started again"))

    async def stop(self, seconds: float) -> None:
        """Cancel all and wait for them; names those that do not end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, stuck = await asyncio.wait(tasks, timeout=seconds)
        if stuck:
            log.error("did not stop within %g s: %s", seconds, ", ".join(sorted(task.get_name() for task in stuck)))


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
