"""
What the probes of a device share: seeds, rates, labelled limits, and whether an error indicates a device in trouble or
only a missing feature.

Also here:

- whether an error tells of a device in trouble, or only that the device lacks what it was asked for.
"""

from __future__ import annotations

import os
import re
from typing import Any

from checks.accelerators import descriptors
from checks.contract import NO_LIMIT, Context, Limit

_NO_MEMORY = re.compile(
    r"out of memory|(?:can't|cannot) allocate memory|not enough memory|RESOURCE_EXHAUSTED", re.IGNORECASE
)


def new_seed(wanted: int | None) -> int:
    """The seed that was asked for, else a new one: fixed data would test the same few circuits each time."""
    return int.from_bytes(os.urandom(4), "big") >> 1 if wanted is None else wanted


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


def is_trouble(error: Exception) -> bool:
    """Whether the device failed, is taken, or could not be asked: to leave the work out would hide that."""
    text = str(error)
    if is_out_of_memory(error):
        return False
    return any(one.tells_of_trouble is not None and one.tells_of_trouble(text) for one in descriptors())


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory for the work."""
    return isinstance(error, MemoryError) or tells_of_want_of_memory(str(error))


def tells_of_want_of_memory(words: str) -> bool:
    """Whether they say that there was no memory for something."""
    return _NO_MEMORY.search(words) is not None
