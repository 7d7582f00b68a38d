"""
How much the tests try: a few examples for people who wait (`unit`), as many as before in CI and by night (`ci`).

TESTS_PROFILE chooses. Without it `ci` is meant where CI is set, as `.ci/run` does, else `unit`. Tests that are marked
`thorough` run with `ci` alone: they show by real processes what a quicker test shows too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")

THOROUGH = os.environ.get("TESTS_PROFILE", "ci" if os.environ.get("CI") else "unit") == "ci"
EXAMPLES = 20
FLEETS = 12


def examples(thorough: int) -> int:
    """How many examples Hypothesis draws, of so many in CI."""
    return thorough if THOROUGH else min(EXAMPLES, thorough)


def fleets(thorough: int) -> int:
    """How many simulated fleets or sites are tried, of so many in CI."""
    return thorough if THOROUGH else min(FLEETS, thorough)


def some(rows: Sequence[Row], step: int) -> list[Row]:
    """All rows of a table whose cases start processes in CI, else one in `step`."""
    return list(rows if THOROUGH else rows[::step])
