"""The clock that gates, leases, quarantines and overrides go by."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch as of now, from here on by CLOCK_BOOTTIME: no jump of the clock moves a deadline."""
    start, boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    return lambda: start + time.clock_gettime(time.CLOCK_BOOTTIME) - boot
