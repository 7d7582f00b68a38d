"""Durations as people write them in settings."""

from __future__ import annotations

import re

LONGEST_SECONDS = 1e10
"""Three hundred years; longer is a slip, and without an end nothing would ever time out."""
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*")
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | float) -> float:
    """Seconds of `2s`, `10m`, `1h`, `1d`, `250ms` or a plain number; ValueError says what would be right."""
    found: float = -1
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        found = text
    elif isinstance(text, str) and (match := _DURATION.fullmatch(text)):
        found = float(match[1]) * _UNIT_SECONDS[match[2]]
    if 0 <= found <= LONGEST_SECONDS:  # also catches NaN
        return float(found)
    raise ValueError(f"{text!r} is not a duration; write 2s, 10m or 1h")
