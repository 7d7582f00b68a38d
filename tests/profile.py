"""
How much the tests try: a few examples for people who wait and for CI (`unit`, the default), many by night (`thorough`).

TESTS_PROFILE chooses; `make nightly` sets it. Tests that are marked `thorough` run with that profile alone: they show
by real processes what a quicker test shows too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")

THOROUGH = os.environ.get("TESTS_PROFILE", "unit") == "thorough"
EXAMPLES = 20
FLEETS = 12


def examples(thorough: int) -> int:
    """How many examples Hypothesis draws, of so many by night."""
    return thorough if THOROUGH else min(EXAMPLES, thorough)


def fleets(thorough: int) -> int:
    """How many simulated fleets or sites are tried, of so many by night."""
    return thorough if THOROUGH else min(FLEETS, thorough)


def some(rows: Sequence[Row], step: int) -> list[Row]:
    """All rows of a table whose cases start processes by night, else one in `step`."""
    return list(rows if THOROUGH else rows[::step])
