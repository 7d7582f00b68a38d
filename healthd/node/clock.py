"""The daemon's clocks, injected everywhere so that tests can move them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """
    `boot()` decides: CLOCK_BOOTTIME goes on while the machine sleeps or the daemon is frozen, and nobody can set it.
    `wall()` is for people to read.
    """

    boot: Callable[[], float]
    wall: Callable[[], float]


def system_clock() -> Clock:
    """The machine's own clocks."""
    return Clock(boot=lambda: time.clock_gettime(time.CLOCK_BOOTTIME), wall=time.time)
