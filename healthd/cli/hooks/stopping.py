"""A hook that a signal ends: what it has begun is taken back first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Stopped(Exception):
    """A signal ended the wait: who asked will not start the job."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT raise Stopped, so that the gate can be withdrawn before the hook ends."""

    def stop(number: int, _: object) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
