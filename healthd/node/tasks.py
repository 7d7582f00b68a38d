"""
The one place of the daemon that creates tasks: each has a name, and what runs for ever is started again when it fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

# Longest sleep: timers count CLOCK_MONOTONIC, which stands still while the machine sleeps.
LONGEST_SLEEP_SECONDS = 60.0


# Between a failure of an eternal task and its next start: doubled with each, back at the least after a good while.
FIRST_RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 60.0


class Tasks:
    """The tasks of one daemon. What one of them cannot handle never ends the daemon: it is logged and counted."""

    def __init__(self, *, first_restart_seconds: float = FIRST_RESTART_SECONDS) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._first_restart_seconds = first_restart_seconds
        self._errors: Counter[str] = Counter()

    @property
    def errors(self) -> Mapping[str, int]:
        """How often something unforeseen was raised since the daemon started, by eternal task; 0 where nothing was."""
        return self._errors

    def count_error(self, name: str) -> None:
        """One more that a task has handled itself."""
        self._errors[name] += 1

    def eternal(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work()` until the daemon stops. When it raises, or returns, it is called again after a pause."""
        self._errors[name] += 0
        self.start(name, self._again_and_again(name, work))

    async def _again_and_again(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        pause = self._first_restart_seconds
        while True:
            began = loop.time()
            try:
                await work()
                log.error("%s has ended by itself; it is started again in %g s", name, pause)
            except Exception:  # whatever a message, the machine or an error of our own made it raise
                log.exception("%s has failed; it is started again in %g s", name, pause)
            self.count_error(name)
            if loop.time() - began > MAX_RESTART_SECONDS:
                pause = self._first_restart_seconds
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RESTART_SECONDS)

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run once. Who starts it awaits it, or has it report by itself."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
