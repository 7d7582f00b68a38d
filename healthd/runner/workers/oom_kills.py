"""Whether the kernel has lately killed a process of this host for want of memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

WINDOW_SECONDS = 600.0
"""A kill counts at least so long. The death that follows it may show seconds later, when the memory is given back."""


class OomKills:
    """
    Compares the kernel's count with that of the time before the last window; a worker may live for days.

    `read` says the count; None where the kernel does not say. `clock` in seconds.
    """

    def __init__(self, read: Callable[[], int | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._before = self._later = read()
        self._later_at = clock()

    def mark(self) -> None:
        """Let go what was longer ago than two windows: called whenever the worker is told to work."""
        now = self._clock()
        if now - self._later_at >= WINDOW_SECONDS and (count := self._read()) is not None:
            self._before, self._later, self._later_at = self._later, count, now

    def have_grown(self) -> bool:
        """Whether one was killed lately; False where the kernel does not say."""
        now = self._read()
        return self._before is not None and now is not None and now > self._before


def read_oom_kills() -> int | None:
    """How many processes of this host the kernel has killed for want of memory; None where it does not say (< 4.13)."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return None
