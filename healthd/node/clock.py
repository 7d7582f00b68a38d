"""The clocks of the daemon, passed to everything that needs the time, so that tests can move them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """
    `boot()` is for decisions: CLOCK_BOOTTIME goes on while the machine sleeps or the daemon is frozen, and cannot be
    set. `wall()` is for display.
    """

    boot: Callable[[], float]
    wall: Callable[[], float]


def system_clock() -> Clock:
    return Clock(boot=lambda: time.clock_gettime(time.CLOCK_BOOTTIME), wall=time.time)
