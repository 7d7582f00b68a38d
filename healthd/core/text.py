"""Text for people: ages, lengths of time, moments; and text of other machines, made fit for sentences and columns."""

from __future__ import annotations

import math
from datetime import UTC, datetime

# Below the bound (in seconds): the unit, its length in seconds and the decimals that are shown of it.
_SPANS = ((10.0, "s", 1.0, 1), (120.0, "s", 1.0, 0), (7200.0, "min", 60.0, 0), (172800.0, "h", 3600.0, 1))
_DAY_SECONDS = 86400.0


def plain(text: str, most: int) -> str:
    """One line of what a node says, cut: it gets into sentences, logs and the database."""
    if text.isprintable():
        return text[:most]
    return "".join(one if one.isprintable() else " " for one in text[:most])


def counted(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def span(seconds: float) -> str:
    """A length of time in one unit: `350 ms`, `2.5 s`, `90 s`, `10 min`, `2.7 h`, `28 d`; `0 s` for what is none."""
    if not math.isfinite(seconds) or seconds <= 0:
        return "0 s"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    for bound, unit, scale, decimals in _SPANS:
        if seconds < bound:
            return f"{_trimmed(seconds / scale, decimals)} {unit}"
    return f"{_trimmed(seconds / _DAY_SECONDS, 1)} d"


def ago(seconds: float | None) -> str:
    """An age: `now`, `12 s ago`, `3.1 h ago`; `never` where there is none."""
    if seconds is None or math.isnan(seconds):
        return "never"
    return "now" if seconds < 1.5 else f"{span(seconds)} ago"


def moment(at: float) -> str:
    """
    A time in seconds since the epoch: `2026-11-21 12:00:05Z`.

    Times come from what nodes say, so that one may be outside of the calendar: `long ago` or `a time to come`.
    """
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "long ago" if at < 0 else "a time to come"


def _trimmed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}".removesuffix(".0")
