"""
What a rank says of data-parallel steps, before anybody compares it with other ranks: pure.

As in `rank_data`: what is not a whole measurement of the rank's own is no evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from checks.collective.training.told import ENDS, is_digests_text, names_of
from healthd.aggregator.validation.rank_data import MOST_TEXT, is_limit, is_number

MOST_STEPS = 64
MOST_LAYERS = 256
MOST_PLACES_CHARACTERS = 4096
_KEY = "training"
_REASONS = ("SilentCorruption", "WrongResult")


def odd_steps(measured: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Rank -> what is wrong with what it says of its steps; all must have done the same ones."""
    told = {rank: data[_KEY] for rank, data in measured.items() if _KEY in data}
    found = {rank: "it says nothing of its training steps" for rank in measured if rank not in told}
    found |= {rank: why for rank, steps in told.items() if (why := _odd(steps) or _odd_rank(measured[rank]))}
    shapes = {rank: _shape(steps) for rank, steps in told.items() if rank not in found}
    usual = max(Counter(shapes.values()).items(), key=lambda one: (one[1], one[0]), default=((), 0))[0]
    return found | {rank: "it did other training steps than others" for rank, own in shapes.items() if own != usual}


def _odd(told: object) -> str:
    if not isinstance(told, Mapping):
        return "what it says of its training steps cannot be read"
    steps, faults = told.get("steps"), told.get("faults")
    if not _is_count(steps) or not 0 < steps <= MOST_STEPS:
        return "it did no training steps, or too many"
    places, digests = told.get("places"), told.get("digests")
    if not isinstance(places, str) or not 0 < len(places) <= MOST_PLACES_CHARACTERS:
        return "it does not name the parameters that it trained"
    count = len(names_of(places))
    if not _is_table(digests, steps, lambda cell: is_digests_text(cell, count)) or set(digests) != set(ENDS):
        return "its digests of training steps cannot be read"
    if not _is_table(told.get("sums"), steps, _is_sums):
        return "its sums of gradients cannot be read"
    if not isinstance(faults, (list, tuple)) or not all(_is_fault(one, steps) for one in faults):
        return "what it saw in itself cannot be read"
    return ""


def _odd_rank(data: Mapping[str, Any]) -> str:
    size, device = data["sizes"][0], data.get("device")
    if not isinstance(device, str) or len(device) > MOST_TEXT:
        return "it names no device"
    own, limit = size.get("own_seconds"), size["limits"].get("own_seconds")
    return "" if is_number(own) and own >= 0 and is_limit(limit) else "it does not say how long its own work took"


def _shape(told: Mapping[str, Any]) -> tuple[Any, ...]:
    return (told["steps"], told["places"], tuple(sorted(told["sums"])))


def _is_table(table: object, steps: int, is_cell: Callable[[object], bool]) -> TypeGuard[Mapping[str, Any]]:
    """Name -> a cell of each step."""
    return (
        isinstance(table, Mapping)
        and 0 < len(table) <= MOST_LAYERS
        and all(isinstance(name, str) and len(name) <= MOST_TEXT for name in table)
        and all(isinstance(cells, (list, tuple)) and len(cells) == steps for cells in table.values())
        and all(is_cell(cell) for cells in table.values() for cell in cells)
    )


def _is_sums(cell: object) -> bool:
    return isinstance(cell, (list, tuple)) and len(cell) == 3 and all(one is None or is_number(one) for one in cell)


def _is_fault(fault: object, steps: int) -> bool:
    if not isinstance(fault, Mapping) or fault.get("reason") not in _REASONS:
        return False
    step, text = fault.get("step"), fault.get("message")
    return _is_count(step) and 0 <= step < steps and isinstance(text, str) and len(text) <= MOST_TEXT


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
