"""
Contains unforeseen exceptions: each stops one gate, one node or one request, and nothing else.

What failed rests for a while and is tried again, each time after twice as long. The log has the traceback; `/readyz`,
the page and the metrics show `faults`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from healthd.core.backoff import Backoff

log = logging.getLogger(__name__)

BACKOFF = Backoff(1.0, 60.0)
"""Such a fault seldom passes by itself: a try each minute costs nothing, and ends it soon after its cause is gone."""
MOST_FAULTS = 1000
"""Faults remembered at a time; beyond, the oldest is tried again as if it had never failed."""


class Where(str, enum.Enum):
    """What an unforeseen exception stopped. The values are labels of `healthd_internal_errors_total`."""

    GATE = "gate"
    NODE = "node"
    REQUEST = "request"
    TURN = "turn"


class ContainedError(Exception):
    """An unforeseen exception (`error`), and what it stops. Never leaves the engine."""

    def __init__(self, where: Where, name: str, error: Exception) -> None:
        super().__init__(f"{where.value} {name}")
        self.where, self.name, self.error = where, name, error


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that rests until `retry_at`, by the clock of the engine; `message` is the exception in one line."""

    where: Where
    name: str
    message: str
    times: int
    retry_at: float


@contextlib.contextmanager
def contained(where: Where, name: str) -> Iterator[None]:
    """Raise what the block raises as the fault of this gate, node or request."""
    try:
        yield
    except ContainedError:
        raise
    except Exception as error:
        raise ContainedError(where, name, error) from error


class Bulkheads:
    """What failed and rests, and how often anything has failed since the start."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter({where.value: 0 for where in Where})
        self._faults: dict[tuple[Where, str], Fault] = {}

    def failed(self, where: Where, name: str, error: Exception, now: float) -> Fault:
        """Record a failure; what failed rests until `retry_at` of the fault."""
        before = self._faults.pop((where, name), None)
        message = self.count(where, name, error, again=before is not None)
        times = 1 if before is None else before.times + 1
        fault = Fault(where=where, name=name, message=message, times=times, retry_at=now + BACKOFF.after(times))
        self._faults[where, name] = fault
        while len(self._faults) > MOST_FAULTS:
            del self._faults[next(iter(self._faults))]
        return fault

    def count(self, where: Where, name: str, error: Exception, *, again: bool = False) -> str:
        """Count and log an exception, with its traceback unless it failed before; returns it in one line."""
        self.counted[where.value] += 1
        message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        log.error("%s %s: internal error: %s", where.value, name, message, exc_info=None if again else error)
        return message

    def passed(self, where: Where, name: str) -> None:
        """Record that it worked."""
        if self._faults and self._faults.pop((where, name), None) is not None:
            log.warning("%s %s: works again", where.value, name)

    def keep(self, where: Where, names: Collection[str]) -> None:
        """Forget the faults of this kind that are not among these names."""
        for key in [key for key in self._faults if key[0] is where and key[1] not in names]:
            del self._faults[key]

    def resting(self, where: Where, now: float) -> Mapping[str, float]:
        """What rests of this kind now, with the time of the next try."""
        if not self._faults:
            return {}
        return {f.name: f.retry_at for f in self._faults.values() if f.where is where and now < f.retry_at}

    def due(self, where: Where, now: float) -> set[str]:
        """What is to be tried again of this kind now."""
        return {fault.name for fault in self._faults.values() if fault.where is where and now >= fault.retry_at}

    def next_due(self, now: float) -> float:
        """When the next rest ends."""
        return min((f.retry_at for f in self._faults.values() if f.retry_at > now), default=math.inf)

    def faults(self) -> tuple[Fault, ...]:
        """Gates and nodes that failed last time, and parts of the loop, which stop everything; the newest first."""
        return tuple(reversed(self._faults.values()))
