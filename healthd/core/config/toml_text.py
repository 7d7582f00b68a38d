"""TOML that somebody else wrote: a bound on its depth, because the parser and all code behind it work by recursion."""

from __future__ import annotations

import tomllib
from typing import Any

from checks.json_text import MAX_DEPTH


def parse_toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`. TOMLDecodeError, a ValueError, also for what is nested deeper than MAX_DEPTH."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError(f"nested more than {MAX_DEPTH} deep") from None
    level: list[object] = [found]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return found
    raise tomllib.TOMLDecodeError(f"nested more than {MAX_DEPTH} deep")  # dotted keys: the parser needs no stack


def _members(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
