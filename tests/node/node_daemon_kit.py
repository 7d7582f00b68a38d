"""What the tests of node daemon, and those beside them, are made with."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.patience import PATIENCE


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
