"""
What a benchmark says: figures with their aims, readings, verdicts. No measuring here.

A figure is a ratio or a number of one run on one machine. None of them is ever asserted in the test suite.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from checks.limits import quantity

T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """How much is measured. `short` is enough to see that a figure can be measured, and too little to compare it."""

    short: bool = False

    def of(self, whole: T, short: T) -> T:
        """A number of rounds, nodes or seconds at this scale."""
        return short if self.short else whole


WHOLE, SHORT = Scale(), Scale(short=True)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """
    One row of the table. `unit` is seconds, bytes or ratio (shown in per cent).

    The aim is met within `lower` and `upper`; where both are None the figure is shown for its own sake.
    """

    name: str
    what: str
    unit: str
    lower: float | None = None
    upper: float | None = None

    def shown(self, value: float | None) -> str:
        """A value of this figure for people."""
        return quantity(f"value_{self.unit}", value)

    @property
    def aim(self) -> str:
        """The aim in words; empty without one."""
        if self.lower is not None and self.upper is not None:
            return f"{self.shown(self.lower)} to {self.shown(self.upper)}"
        if self.lower is not None:
            return f"at least {self.shown(self.lower)}"
        return f"at most {self.shown(self.upper)}" if self.upper is not None else ""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """
    What was measured of a figure; `value` None means that it could not be.

    `ratio` compares it with `beside`, something measured in the same run. `note` holds spread and circumstances.
    `skipped`: it was not tried, and `note` says why.
    """

    figure: str
    value: float | None
    ratio: float | None = None
    beside: str = ""
    note: str = ""
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A piece of measuring that gives some figures, within `limit_seconds`. `needs_root`: it is skipped without."""

    name: str
    figures: tuple[Figure, ...]
    run: Callable[[Scale], Iterator[Reading]]
    limit_seconds: float
    needs_root: bool = False


def verdict(figure: Figure, reading: Reading) -> str:
    """One of met, missed, shown (there is no aim), skipped (not tried), unknown (not measured, which is never met)."""
    value = reading.value
    if reading.skipped:
        return "skipped"
    if value is None or not math.isfinite(value):
        return "unknown"
    if figure.lower is None and figure.upper is None:
        return "shown"
    low_enough = figure.upper is None or value <= figure.upper
    high_enough = figure.lower is None or value >= figure.lower
    return "met" if low_enough and high_enough else "missed"


def measure(bench: Bench, scale: Scale = WHOLE, *, root: bool | None = None) -> tuple[Reading, ...]:
    """
    A reading for each figure of a bench, in order; what it did not tell, for whatever cause, has none as value.

    `root`: whether this process may do what root may; None asks the system.

    Call it in the main thread: the time limit is an alarm.
    """
    if bench.needs_root and not (os.geteuid() == 0 if root is None else root):
        note = f"{bench.name} needs root"
        return tuple(Reading(figure=figure.name, value=None, note=note, skipped=True) for figure in bench.figures)
    found: dict[str, Reading] = {}
    trouble = "the bench gave no reading of it"
    try:
        with time_limit(bench.limit_seconds):
            for reading in bench.run(scale):
                found[reading.figure] = reading
    except Exception as error:  # noqa: BLE001  a bench that fails is a row that says so; the others still run
        trouble = f"{type(error).__name__}: {error}"
    return tuple(
        found.get(figure.name) or Reading(figure=figure.name, value=None, note=trouble) for figure in bench.figures
    )


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the time is up."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def percentile(values: Sequence[float], percent: int) -> float:
    """That percentile of at least two values, by linear interpolation."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def spread(figure: Figure, values: Sequence[float]) -> str:
    """Least, quartiles and greatest of what was measured, and how many."""
    quartiles = [percentile(values, q) for q in (25, 50, 75)] if len(values) > 1 else list(values)
    words = (figure.shown(min(values)), "/".join(figure.shown(q) for q in quartiles), figure.shown(max(values)))
    return f"min {words[0]}, quartiles {words[1]}, max {words[2]}, n={len(values)}"
