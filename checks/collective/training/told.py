"""
What a rank tells of its steps, in few bytes: a node has up to 64 ranks, and all of them report at once. Pure.

Of each step, the digests of the reduced gradients and those of the parameters after it are one text each, in base64: a
root of 64 bits that decides whether ranks agree, and 18 bits of each parameter that say where they do not. That a later
parameter is named than the first one happens once in 262,144 times.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checks.training.digests import join
from checks.training.places import OPTIMIZER, REDUCTION

ENDS: Mapping[str, str] = {REDUCTION: "_reduced", OPTIMIZER: "_update"}
"""What ranks must share, and how its places end."""

MOST_MESSAGE = 400
"""Characters of what a rank saw in itself."""

_ROOT, _SHORT = 11, 3  # characters
_DIGITS = 8  # of sums, relative to the sum of absolute values; rounding in fp32 explains more


def names_text(parameters: Iterable[str]) -> str:
    """The names of parameters, the layer before its first one: `head: norm_weight logits_weight`."""
    words: list[str] = []
    before = None
    for name in parameters:
        layer, _, own = name.rpartition(".")
        if layer != before:
            words.append(f"{layer}:")
            before = layer
        words.append(own)
    return " ".join(words)


def names_of(text: str) -> list[str]:
    """What `names_text` was given."""
    found: list[str] = []
    layer = ""
    for word in text.split():
        if word.endswith(":"):
            layer = word[:-1]
        else:
            found.append(f"{layer}.{word}" if layer else word)
    return found


def digests_text(digests: Sequence[str]) -> str:
    """Of digests of 16 hexadecimal digits."""
    return _base64(join(digests))[:_ROOT] + "".join(_base64(one)[:_SHORT] for one in digests)


def is_digests_text(text: object, count: int) -> bool:
    """Whether it is one of so many digests."""
    return isinstance(text, str) and len(text) == _ROOT + _SHORT * count and text.isascii()


def first_difference(one: str, other: str, places: str, phase: str) -> str | None:
    """The first place at which two texts differ; None: their roots alone do."""
    for index, name in enumerate(names_of(places)):
        begin = _ROOT + _SHORT * index
        if one[begin : begin + _SHORT] != other[begin : begin + _SHORT]:
            return name + ENDS[phase]
    return None


def rounded(contributed: Any, size: Any, reduced: Any) -> list[float | None]:
    """
    The sum of a layer's own gradients, that of their absolute values, and the sum of the reduced ones, without the
    digits that say nothing; None where it is no number.
    """
    own, most, mean = (_number(value) for value in (contributed, size, reduced))
    places = 12 if not most else min(_DIGITS - math.floor(math.log10(most)), 300)
    return [
        None if own is None else round(own, places),
        None if most is None else float(f"{most:.4g}"),
        None if mean is None else round(mean, places),
    ]


def _base64(digest: str) -> str:
    return binascii.b2a_base64(bytes.fromhex(digest), newline=False).decode()


def _number(value: Any) -> float | None:
    number = float("nan") if value is None else float(value)
    return number if math.isfinite(number) else None
