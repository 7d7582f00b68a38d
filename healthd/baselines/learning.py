"""
Limits out of samples: median and MAD, so that a few bad devices among many decide nothing. Pure.

A limit is k standard deviations from the median, where k follows from how many false alarms the whole fleet may have:
with n numbers judged in a run and a budget of b alarms each may be wrong with probability b/n, and k is the two-sided
quantile of the normal distribution for it. The standard deviation is 1.4826 MAD, as for normal values, and the MAD is
at least 0.5 % of the median: a series of values that hardly differ must not make a limit that a warm day breaks. No
limit is nearer to the median than `share_ratio` of it, because so few samples tell little of the tails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, median

from healthd.baselines.model import LEAST_SAMPLES, LEAST_SOURCES, Learned, Sample
from healthd.baselines.rule import Rule

SIGMA_OF_MAD = 1.4826
LEAST_MAD_RATIO = 0.005
MOST_VALUE = 1e100


def higher_is_better(name: str) -> bool | None:
    """True for rates, False for durations; None for what has no good direction and is not learned."""
    plain = name.partition("/")[0]
    if plain.endswith(("_flops_per_second", "_bytes_per_second")):
        return True
    return False if plain.endswith("_duration_seconds") else None


def factor_of(false_alarms: float, comparisons: int) -> float:
    """How many standard deviations away one of `comparisons` numbers may be by chance, with that many false alarms."""
    share = min(0.5, max(1e-15, false_alarms / max(1, comparisons)))
    return NormalDist().inv_cdf(1 - share / 2)


def widening(count: int) -> float:
    """
    By how much k grows for a deviation that is itself uncertain: two of its standard errors, each 1.16 / sqrt(count).

    Source: the MAD's efficiency of 37 % for normal values. Without it one run in four had false alarms where eleven
    samples with 5 % of noise made the limit, with it one in twenty (simulated, 512 devices).
    """
    return 1 + 2 * 1.16 / math.sqrt(count)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """
    Median and MAD, the latter raised by what it is too small by in few samples, n / (n - 0.8), and not below its floor.

    Source: Croux and Rousseeuw, "Time-efficient algorithms for two highly robust estimators of scale", 1992.
    """
    middle = median(values)
    deviation = median(abs(value - middle) for value in values) * len(values) / max(0.2, len(values) - 0.8)
    return middle, max(deviation, LEAST_MAD_RATIO * abs(middle))


def is_usable(value: float) -> bool:
    """Whether a value can be that of anything: sums of larger ones would be no numbers any more."""
    return 0 < value <= MOST_VALUE


def learn(samples: Iterable[Sample], name: str, rule: Rule) -> Learned | None:
    """What the samples of a series come to; None where there are too few, or they are no rates or durations."""
    good = [sample for sample in samples if is_usable(sample.value)]
    sources = {(sample.node, sample.target) for sample in good}
    better = higher_is_better(name)
    if len(good) < LEAST_SAMPLES or len(sources) < LEAST_SOURCES or better is None:
        return None
    values = [sample.value for sample in good]
    middle, mad = spread(values)
    factor = factor_of(rule.false_alarms, rule.comparisons) * widening(len(values))
    margin = max(factor * SIGMA_OF_MAD * mad, rule.share_ratio * middle)
    lower = middle - margin if better and margin < middle else None
    upper = middle + margin if not better and math.isfinite(middle + margin) else None
    return Learned(
        median=middle,
        mad=mad,
        samples=len(good),
        sources=len(sources),
        factor=factor,
        lower=lower,
        upper=upper,
        outside=sum(is_outside(value, lower, upper) for value in values),
    )


def is_outside(value: float, lower: float | None, upper: float | None) -> bool:
    """Whether a limit fails a value."""
    return (lower is not None and value < lower) or (upper is not None and value > upper)


def drift_of(samples: Iterable[Sample], approved: Learned, rule: Rule) -> float | None:
    """How far the median of recent samples is from the approved one, where it is further than it may be; else None."""
    recent = [sample for sample in samples if is_usable(sample.value)]
    if len(recent) < LEAST_SAMPLES or len({(one.node, one.target) for one in recent}) < LEAST_SOURCES:
        return None
    moved = median(sample.value for sample in recent) / approved.median - 1
    return moved if abs(moved) > rule.drift_ratio else None
