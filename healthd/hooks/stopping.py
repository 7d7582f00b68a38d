"""A hook that a signal ends: what it has begun is taken back first, and its launcher is told to try again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A signal ended the wait: who asked will not start the job."""


class Signals:
    """What `stoppable` hears: `name` is the first signal, None before there is one."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._deferred = False
        self._on_stop: Callable[[], object] | None = None

    def come(self, number: int, _: object) -> None:
        """The handler of the signals. Only the first raises: the next must not cut short what that one has begun."""
        first, self.name = self.name is None, self.name or signal.Signals(number).name
        if self._on_stop is not None:
            self._on_stop()
        elif first and not self._deferred:
            raise Stopped(self.name)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """
        Within, a signal raises nothing but calls what `on_stop` was given; Stopped is raised at the end, whatever else.

        For an event loop, which would take an exception that comes at any moment for the fault of one of its tasks.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred, self._on_stop = False, None
            if self.name is not None:
                raise Stopped(self.name)

    def on_stop(self, then: Callable[[], object] | None) -> None:
        """Call this when a signal comes, at once where one has come; None: nothing any more."""
        self._on_stop = then
        if then is not None and self.name is not None:
            then()


@contextlib.contextmanager
def stoppable() -> Iterator[Signals]:
    """
    SIGTERM and SIGINT raise Stopped, so that the gate can be withdrawn before the hook ends.

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
