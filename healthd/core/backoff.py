"""How long to wait before something that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Pauses that double with each failure in a row."""

    first_seconds: float
    most_seconds: float

    def after(self, failures: int) -> float:
        """The pause in seconds after so many failures in a row; 0.0 after none."""
        return min(self.first_seconds * 2.0 ** min(failures - 1, 60), self.most_seconds) if failures > 0 else 0.0
