"""A hook that is ended by a signal: it undoes what it has begun, and its launcher gets the code for a retry."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

NUMBERS = (signal.SIGTERM, signal.SIGINT)

TAKE_BACK_SECONDS = 2.0
"""How long a hook that ends may take to take its word back: its launcher kills it some seconds later."""

HEAR_SECONDS = 0.05
"""How often who waits looks for a signal: Python hears one that comes just before a wait only when that ends."""


class Stopped(Exception):
    """A signal ended the wait: who asked will not start the job."""


class Signals:
    """What `stoppable` hears: `name` is the first signal, None before there is one."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._deferred = False

    def come(self, number: int, _: object) -> None:
        """The handler of the signals. Only the first raises: the next must not cut short what that one has begun."""
        first, self.name = self.name is None, self.name or signal.Signals(number).name
        if first and not self._deferred:
            raise Stopped(self.name)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """
        Within, a signal raises nothing and sets `name`; Stopped is raised at the end, whatever else.

        Not all code bears an exception at any moment: an event loop takes it for the fault of one of its tasks, and one
        inside of `Thread.start` lets the new thread die with a traceback.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if self.name is not None:
                raise Stopped(self.name)

    def wait_for(self, work: Callable[[], T]) -> T:
        """What `work` comes to in a thread that nobody waits for: a signal ends the wait, and not `work` half-way."""
        done = threading.Event()
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                failed.append(error)
            finally:
                done.set()

        with self.deferred():
            threading.Thread(target=run, name="work", daemon=True).start()
            while self.name is None and not done.wait(HEAR_SECONDS):
                pass
        if failed:
            raise failed[0]
        return found[0]

    async def heard(self) -> None:
        """Until a signal has come, within `deferred`."""
        import asyncio  # the hooks that wait on no loop start sooner

        while self.name is None:  # noqa: ASYNC110 - see HEAR_SECONDS
            await asyncio.sleep(HEAR_SECONDS)


@contextlib.contextmanager
def stoppable() -> Iterator[Signals]:
    """
    SIGTERM and SIGINT raise Stopped, so that the gate can be withdrawn before the hook ends.

    They raise it wherever the main thread is: what takes long belongs into `wait_for`, or below `deferred`.
    That holds for the first process of a container too, to which the kernel gives only signals that have a handler.
    """
    signals = Signals()
    before = {number: signal.signal(number, signals.come) for number in NUMBERS}
    try:
        yield signals
    finally:
        with signals.deferred():
            # What has come is heard here; what comes while it is blocked is left to the handler of before.
            signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
