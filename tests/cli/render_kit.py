"""What the tests of render, and those beside them, are made with."""

from __future__ import annotations

from rich.text import Text


def plain(*lines: str) -> list[str]:
    return [Text.from_markup(line).plain for line in lines]
