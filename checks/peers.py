"""
Compares things that should be alike: whose digest differs, and which of them is slow. Pure arithmetic.

Numbers and digests come in, and who stands out goes out. What a number means, whose fault it is and what to say of it
is the caller's; so are the thresholds. A caller that compares one thing with others, of which it is not one, asks for
what is `normal` among these others; one that compares all members of a large group with each other takes `slow_ones`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Digest = TypeVar("Digest", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)

SIGMA_OF_MAD = 1.4826
"""The standard deviation of normal values is so many times their MAD: 1 over the quantile of 3/4."""
LEAST_PEERS = 11
"""The deviation of fewer says too little of what is normal: then the floor alone judges."""
LEAST_MAD_RATIO = 0.005
"""The MAD is at least this share of the median: values that hardly differ make no limit that a warm day breaks."""


def vote(counts: Mapping[Digest, int]) -> Majority[Digest]:
    """The majority among digests, from how many votes each has (`Counter(digests)`). There must be at least one."""
    most, count = max(counts.items(), key=lambda item: item[1])
    total = sum(counts.values())
    return Majority(most if 2 * count > total else None, count, total)


@dataclass(frozen=True)
class Majority(Generic[Digest]):
    """
    What a vote came to: the digest of more than half of the `total` votes; None where nobody can tell which is right.

    `count` is how many votes the most frequent digest has.
    """

    right: Digest | None
    count: int
    total: int

    @property
    def is_unanimous(self) -> bool:
        """Whether all have the same digest."""
        return self.count == self.total


def slow_ones(
    values: Sequence[float], floor: Callable[[float], float], *, factor: float, higher_is_better: bool = False
) -> tuple[Normal, tuple[int, ...]]:
    """What is normal among values, and the places of those that are slow; see `normal`."""
    found, sign = normal(values, floor, factor=factor), _sign(higher_is_better)
    middle, margin = found.median, found.margin  # there may be a million values
    return found, tuple(place for place, value in enumerate(values) if sign * (value - middle) > margin)


def normal(peers: Sequence[float], floor: Callable[[float], float], *, factor: float) -> Normal:
    """
    What is normal among peers: as far from the median as `factor` standard deviations, and never nearer than the floor.

    `floor` gives the least margin for a median. The deviation of fewer than `LEAST_PEERS` does not count.
    """
    middle, mad = spread(peers)
    margin = factor * SIGMA_OF_MAD * mad if len(peers) >= LEAST_PEERS else 0.0
    return Normal(middle, mad, max(margin, floor(middle)))


@dataclass(frozen=True)
class Normal:
    """What is normal among peers: a value that is further than `margin` on the bad side of the median is slow."""

    median: float
    mad: float
    margin: float

    def is_slow(self, value: float, *, higher_is_better: bool = False) -> bool:
        """Whether a value is on the bad side of `limit`."""
        return _sign(higher_is_better) * (value - self.median) > self.margin

    def limit(self, *, higher_is_better: bool = False) -> float:
        """The worst value that is still normal."""
        return self.median + _sign(higher_is_better) * self.margin


def factor_of(false_alarms: float, comparisons: int) -> float:
    """How many standard deviations away one of `comparisons` numbers may be by chance, with that many false alarms."""
    from statistics import NormalDist  # most workers that load this module need no quantile, and it takes long to load

    share = min(0.5, max(1e-15, false_alarms / max(1, comparisons)))
    return NormalDist().inv_cdf(1 - share / 2)


def excess_ratios(values: Mapping[Key, float]) -> dict[Key, float]:
    """
    By how much each value is above the median of the others, as a ratio; empty for one alone.

    Only values whose others have a median above 0 are in it.
    """
    if len(values) < 2:
        return {}
    ordered = sorted(values.values())
    count = len(ordered) - 1
    places = {value: place for place, value in enumerate(ordered)}
    found = {}
    for key, value in values.items():
        place = places[value]
        low, high = (count - 1) // 2, count // 2
        others = (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
        if others > 0:
            found[key] = value / others - 1
    return found


def sigma_of(deviations: Iterable[float]) -> float:
    """The standard deviation of normal values, from their deviations from the median, by the MAD."""
    return SIGMA_OF_MAD * median(map(abs, deviations))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """
    Median and MAD, the latter raised by what it is too small by in few samples, n / (n - 0.8), and not below its floor.

    Source: Croux and Rousseeuw, "Time-efficient algorithms for two highly robust estimators of scale", 1992.
    """
    middle = median(values)
    deviation = median(abs(value - middle) for value in values) * len(values) / max(0.2, len(values) - 0.8)
    return middle, max(deviation, LEAST_MAD_RATIO * abs(middle))


def median(values: Iterable[float]) -> float:
    """The middle value; NaN of nothing, which no limit lets pass."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _sign(higher_is_better: bool) -> float:
    return -1.0 if higher_is_better else 1.0
