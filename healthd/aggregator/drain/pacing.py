"""When the next call about a node may be made: after failures, and within the rate of removals. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from healthd.aggregator.drain.model import ActuatorError
from healthd.core.backoff import Backoff


@dataclass(frozen=True)
class _Trouble:
    failures: int
    retry_at: float


class Retries:
    """Nodes whose last calls failed. All times are of one clock, in seconds."""

    def __init__(self, first_seconds: float, most_seconds: float) -> None:
        self._backoff = Backoff(first_seconds, most_seconds)
        self._trouble: dict[str, _Trouble] = {}

    def __len__(self) -> int:
        return len(self._trouble)

    def failed(self, node: str, error: ActuatorError, now: float) -> None:
        """One more call about the node failed."""
        failures = self._trouble[node].failures + 1 if node in self._trouble else 1
        self._trouble[node] = _Trouble(failures, now + self.pause(failures, error))

    def succeeded(self, node: str) -> None:
        """A call about the node went through."""
        self._trouble.pop(node, None)

    def is_pausing(self, node: str, now: float) -> bool:
        """Whether it is too early for another call about the node."""
        return node in self._trouble and now < self._trouble[node].retry_at

    def keep(self, nodes: Collection[str]) -> None:
        """Forget all other nodes."""
        self._trouble = {node: trouble for node, trouble in self._trouble.items() if node in nodes}

    def due_in(self, now: float) -> Iterator[float]:
        """Seconds until each of the next calls."""
        return (trouble.retry_at - now for trouble in self._trouble.values())

    def pause(self, failures: int, error: ActuatorError) -> float:
        """Seconds until the next try: by the failures in a row, or longer where the scheduler asks for it."""
        most = self._backoff.most_seconds
        return max(self._backoff.after(failures), min(error.retry_after_seconds or 0.0, most))


class RemovalRate:
    """At most so many removals in any 60 seconds."""

    def __init__(self, most_per_minute: int) -> None:
        self.most_per_minute = most_per_minute
        self._removed_at: deque[float] = deque()

    def removed(self, now: float) -> None:
        """A node was taken out."""
        self._removed_at.append(now)

    def allows_one(self, now: float) -> bool:
        """Whether one more may be taken out now."""
        while self._removed_at and now - self._removed_at[0] >= 60.0:
            self._removed_at.popleft()
        return len(self._removed_at) < self.most_per_minute
