"""What the probes share: seeds that are new each run, medians, and the limit of a number that has a label."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from checks.contract import NO_LIMIT, Context, Limit


def new_seed(wanted: int | None) -> int:
    """The seed that was asked for, else a new one: fixed data would test the same few circuits each time."""
    return int.from_bytes(os.urandom(4), "big") >> 1 if wanted is None else wanted


def median(values: Sequence[float]) -> float:
    """The middle value; NaN of nothing, which no limit lets pass."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def per_second(amount: float, seconds: float) -> float:
    """A rate; NaN where no time was measured, since no rate can be told from it."""
    return amount / seconds if seconds > 0 else float("nan")


def labelled_limit(ctx: Context[Any], name: str, label: str, target: str = "") -> Limit:
    """
    The limit of a number that has one value per label (dtype, direction, size), the most specific that is set.

    In order: `name/label@target`, `name/label`, `name@target`, `name`.
    """
    limit = ctx.limit(f"{name}/{label}", target)
    return limit if limit is not NO_LIMIT else ctx.limit(name, target)
