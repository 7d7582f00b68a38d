"""Text from other machines, made fit for sentences, logs and columns."""

from __future__ import annotations


def plain(text: str, most: int) -> str:
    """One line of what a node says, cut: it gets into sentences, logs and the database."""
    if text.isprintable():
        return text[:most]
    return "".join(one if one.isprintable() else " " for one in text[:most])
