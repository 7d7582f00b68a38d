"""When the loop tries again after a pass that has failed."""

from __future__ import annotations

import math

from healthd.core.backoff import Backoff

BACKOFF = Backoff(1.0, 8.0)
"""The pauses after failed commits: each failure costs a rebuild of memory."""
MOST_REFUSED = 3
"""Passes in a row whose rows the database may refuse before that is a fault: the first may be one request's."""


class Retries:
    """`at` is when the next pass may begin; -inf in good days."""

    def __init__(self) -> None:
        self.at = -math.inf
        self._failures = 0
        self._refused = 0

    def succeeded(self) -> None:
        """A pass is on disk."""
        self.at, self._failures, self._refused = -math.inf, 0, 0

    def failed(self, now: float) -> None:
        """A commit failed: pause, longer each time in a row."""
        self._failures += 1
        self.at = now + BACKOFF.after(self._failures)

    def soon(self, now: float) -> None:
        """Nothing was committed: try again after the shortest pause."""
        self.at = now + BACKOFF.first_seconds

    def refused(self) -> bool:
        """Count a pass whose rows were refused; whether there were too many in a row."""
        self._refused += 1
        return self._refused >= MOST_REFUSED
