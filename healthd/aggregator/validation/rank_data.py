"""
Whether the data that ranks report are measurements: pure.

Anyone with a node's key can send data, and `checks.collective.judge` uses them unchecked. Anything but a complete
measurement by the rank itself is no evidence: neither that the group is healthy, nor that a node is bad.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from checks.collective.training.shard import ENDS, is_digests_text, names_of

LIMITED = ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds")
MOST_TEXT = 500
MOST_STEPS = 64
MOST_LAYERS = 256
MOST_PLACES_CHARACTERS = 4096
_ELEMENT_BYTES = 8
"""Of the largest kind of element: a small size is rounded up to one element a rank."""
_KEY = "training"
_REASONS = ("SilentCorruption", "WrongResult")


def odd_ranks(measured: Mapping[int, Mapping[str, Any]], size: int) -> dict[int, str]:
    """
    Rank -> what is wrong with its data, of those whose data are no measurement in a group of `size` ranks.

    All ranks of a group run the same sizes, so those that tell of others than most do are odd as well.
    """
    found = {rank: why for rank, data in measured.items() if (why := _odd(data, rank, size))}
    ran = {rank: _sizes(data) for rank, data in measured.items() if rank not in found}
    counts = Counter(ran.values())
    usual = max(counts, key=lambda sizes: (counts[sizes], len(sizes)), default=())
    differing = {rank: f"it measured sizes {_listed(own)} and others {_listed(usual)}" for rank, own in ran.items()}
    return found | {rank: why for rank, why in differing.items() if ran[rank] != usual}


def _odd(data: Mapping[str, Any], rank: int, size: int) -> str:
    if not _is(data.get("rank"), rank):
        return f"its data are of rank {_shown(data.get('rank'))}"
    if not _is(data.get("ranks"), size):
        return f"its data are from a group of {_shown(data.get('ranks'))} ranks, but this group has {size}"
    targets, sizes = data.get("targets"), data.get("sizes")
    if not isinstance(targets, (list, tuple)) or not all(isinstance(one, str) for one in targets):
        return "its data name no devices"
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return "it measured no size"
    for one in sizes:
        if not isinstance(one, Mapping) or not _count(one.get("size_bytes")) or not one["size_bytes"]:
            return "its data contain an invalid size"
        if why := _odd_size(one, size):
            return f"{one['size_bytes']} bytes: {why}"
    if len(set(_sizes(data))) < len(sizes):
        return "it measured a size twice"
    return ""


def _odd_size(one: Mapping[str, Any], size: int) -> str:
    moved, seconds, wrong = one.get("bytes"), one.get("seconds"), one.get("mismatches")
    if not _count(moved) or not 0 < moved <= max(one["size_bytes"], size * _ELEMENT_BYTES):
        return f"{_shown(moved)} bytes were moved"
    if not is_number(seconds) or not seconds > 0:
        return f"it took {_shown(seconds)} seconds"
    if not _count(wrong):
        return f"{_shown(wrong)} elements were wrong"
    sources = one.get("sources")
    if not isinstance(sources, Mapping) or not all(_names_rank(key, size) for key in sources):
        return "wrong values from an unknown rank"
    first = one.get("first")
    if first is not None and not (isinstance(first, str) and len(first) <= MOST_TEXT):
        return "the first wrong value is not text"
    limits = one.get("limits")
    if not isinstance(limits, Mapping) or not all(is_limit(limits.get(name)) for name in LIMITED):
        return "its limits cannot be read"
    return ""


def is_limit(limit: object) -> bool:
    """Whether it is a limit as ranks send them: [lower, upper, origin]."""
    if not isinstance(limit, (list, tuple)) or len(limit) != 3:
        return False
    lower, upper, origin = limit
    return all(bound is None or is_number(bound) for bound in (lower, upper)) and isinstance(origin, str)


def _names_rank(key: object, size: int) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 and int(key) < size


def _sizes(data: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(one["size_bytes"] for one in data["sizes"]))


def _is(value: object, wanted: int) -> bool:
    return _count(value) and value == wanted


def _count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_number(value: object) -> TypeGuard[float]:
    """A number that can be counted with: JSON knows whole ones that are beyond all others."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "an impossibly large number"  # Python does not write out whole numbers of any length
    return repr(value)[:40]


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:8])) + (" ..." if len(sizes) > 8 else "")


def odd_steps(measured: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Rank -> what is wrong with what it says of its steps; all must have done the same ones."""
    told = {rank: data[_KEY] for rank, data in measured.items() if _KEY in data}
    found = {rank: "it reports no training steps" for rank in measured if rank not in told}
    found |= {
        rank: why for rank, steps in told.items() if (why := _odd_of_training_data(steps) or _odd_rank(measured[rank]))
    }
    shapes = {rank: _shape(steps) for rank, steps in told.items() if rank not in found}
    usual = max(Counter(shapes.values()).items(), key=lambda one: (one[1], one[0]), default=((), 0))[0]
    return found | {rank: "it ran other training steps than the others" for rank, own in shapes.items() if own != usual}


def _odd_of_training_data(told: object) -> str:
    if not isinstance(told, Mapping):
        return "its report on training steps cannot be read"
    steps, faults = told.get("steps"), told.get("faults")
    if not _is_count(steps) or not 0 < steps <= MOST_STEPS:
        return "it ran no training steps, or too many"
    places, digests = told.get("places"), told.get("digests")
    if not isinstance(places, str) or not 0 < len(places) <= MOST_PLACES_CHARACTERS:
        return "it does not name the parameters it trained"
    count = len(names_of(places))
    if not _is_table(digests, steps, lambda cell: is_digests_text(cell, count)) or set(digests) != set(ENDS):
        return "its digests of training steps cannot be read"
    if not _is_table(told.get("sums"), steps, _is_sums):
        return "its sums of gradients cannot be read"
    if not isinstance(faults, (list, tuple)) or not all(_is_fault(one, steps) for one in faults):
        return "its own findings cannot be read"
    return ""


def _odd_rank(data: Mapping[str, Any]) -> str:
    size, device = data["sizes"][0], data.get("device")
    if not isinstance(device, str) or len(device) > MOST_TEXT:
        return "it names no device"
    own, limit = size.get("own_seconds"), size["limits"].get("own_seconds")
    return "" if is_number(own) and own >= 0 and is_limit(limit) else "it does not report how long its own work took"


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
