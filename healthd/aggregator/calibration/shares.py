"""Shares of small numbers, with what may be said of them: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959964
"""Of the normal distribution, two-sided 95 %."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """`count` of `of`, with Wilson's 95 % interval. There is none of nothing: `of` is above 0."""

    count: int
    of: int
    ratio: float
    low: float
    high: float


def wilson(count: int, of: int, *, z: float = Z_95) -> tuple[float, float]:
    """
    The interval of a share of which `count` of `of` were seen; (0, 1) of nothing.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927). Unlike
    the usual one it is right for small numbers, and for none or all.
    """
    if of <= 0:
        return 0.0, 1.0
    ratio = count / of
    middle = ratio + z * z / (2 * of)
    half = z * math.sqrt(ratio * (1 - ratio) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    low = 0.0 if count <= 0 else max(0.0, (middle - half) / scale)
    high = 1.0 if count >= of else min(1.0, (middle + half) / scale)
    return low, high


def share(count: int, of: int) -> Share | None:
    """A share with its interval; None of nothing."""
    if of <= 0:
        return None
    low, high = wilson(count, of)
    return Share(count=count, of=of, ratio=count / of, low=low, high=high)


def quantile(ascending: Sequence[float], q: float) -> float:
    """By nearest rank: a value that was seen. ValueError of nothing."""
    if not ascending:
        raise ValueError("there is no quantile of nothing")
    return ascending[max(0, math.ceil(q * len(ascending)) - 1)]
