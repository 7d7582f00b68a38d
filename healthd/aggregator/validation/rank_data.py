"""
What a rank says that it measured, before anybody counts with it: pure.

Data come over the wire from whoever has a node's key, and `checks.collective.judge` takes them as they are. What is not
a whole measurement of the rank's own is no evidence: neither that the group is well, nor that a node is bad.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from checks.contract import Progress
from healthd.core.model import RankReport

LIMITED = ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds")
MOST_TEXT = 500
MOST_EVENTS = 1000
"""Signs of life of a rank in one check that are counted: twice the sizes and a few."""
_ELEMENT_BYTES = 8
"""Of the largest kind of element: a small size is rounded up to one element a rank."""


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


def events_of(ranks: Mapping[int, RankReport]) -> Callable[[int], Progress]:
    """The n-th sign of life of a rank: all pass the same, and those that are somewhere say where."""
    known: dict[int, Progress] = {}
    for report in ranks.values():
        step, _, event = report.last.rpartition(" ")
        if report.events and step:
            known[report.events - 1] = Progress(step=step, event=event, monotonic_seconds=0.0)

    def at(index: int) -> Progress:
        if index in known:
            return known[index]
        before = known.get(index - 1)
        if before is not None and before.event == "entered":
            return Progress(step=before.step, event="left", monotonic_seconds=0.0)
        return Progress(step=f"step {index + 1}", event="left" if index % 2 else "entered", monotonic_seconds=0.0)

    return at


def _odd(data: Mapping[str, Any], rank: int, size: int) -> str:
    if not _is(data.get("rank"), rank):
        return f"its data are of rank {_shown(data.get('rank'))}"
    if not _is(data.get("ranks"), size):
        return f"its data are of a group of {_shown(data.get('ranks'))} ranks, and this one has {size}"
    targets, sizes = data.get("targets"), data.get("sizes")
    if not isinstance(targets, (list, tuple)) or not all(isinstance(one, str) for one in targets):
        return "its data name no devices"
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return "it measured no size"
    for one in sizes:
        if not isinstance(one, Mapping) or not _count(one.get("size_bytes")) or not one["size_bytes"]:
            return "its data hold a size that is none"
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
        return "wrong values come from no rank"
    first = one.get("first")
    if first is not None and not (isinstance(first, str) and len(first) <= MOST_TEXT):
        return "the first wrong value is no text"
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
        return "more than can be counted"  # Python does not write out whole numbers of any length
    return repr(value)[:40]


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:8])) + (" ..." if len(sizes) > 8 else "")
