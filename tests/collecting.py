"""What is not run is not imported: modules all of whose tests the expression of `-m` leaves out are not collected."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

# What `make test` leaves out. `marks` is that of tests/netns: root and its programs.
KINDS = ("gpu", "images", "kubernetes", "system", "xla")
WHOLE_MODULE = re.compile(r"(?m)^pytestmark = (?:.*\bmark\.(gpu|images|kubernetes|system|xla)\b|.*\b(marks)\b)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True: every test of this module is left out; None: let others say."""
    if collection_path.suffix != ".py" or not config.option.markexpr:
        return None
    found = WHOLE_MODULE.search(collection_path.read_text(encoding="utf-8"))
    if found is None or can_be_chosen(config.option.markexpr, found[1] or "system"):
        return None
    return True


@functools.cache
def can_be_chosen(expression: str, kind: str) -> bool:
    """Whether a test of this kind, with any others of KINDS, nightly or not, can be what the expression wants."""
    wanted = Expression.compile(expression)
    others = [one for one in (*KINDS, "nightly") if one != kind]
    return any(
        wanted.evaluate(lambda name, *_, has={kind, *more}, **__: name in has)
        for size in range(len(others) + 1)
        for more in itertools.combinations(others, size)
    )
