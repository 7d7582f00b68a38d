"""
The smallest group that still fails, where pairs are clean and the whole is not: a bad path, or a fault of scale.

Four blocks give three rounds of two unions each; a union that fails is the new whole, about half as large. When no
union fails the fault needs more than two blocks, and the size itself is searched.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from healthd.localize.evidence import Evidence, Ids

Steps = Generator[tuple[list[Ids], str], None, None]

MOST_NEEDED = 8  # members that must all take part; for more of them the bound on rounds is too low
SPARED = 4  # members left out, one after another, before it is said that nobody can be spared
PAIRINGS = (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (2, 3)))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The smallest failing group seen, the size of the largest that passed, whether others of that size fail too."""

    members: Ids
    largest_passing: int
    any_group: bool | None


@dataclass(kw_only=True)
class Found:
    """What only the course of the tests tells, for the verdict. `grown`: the largest group found to pass, if sought."""

    rest: Ids = ()
    rest_passed: bool | None = None
    scale: Scale | None = None
    intermittent: bool = False
    pair_rounds: int = 0
    whole_again: int = 0
    grown: Ids | None = None


def smallest_failing(ev: Evidence, found: Found) -> Steps:
    """Shrink the rest, to `found.scale`; None there when a bad pair was found: then it is in the evidence as such."""
    whole = found.rest
    order = list(whole)
    ev.random("search").shuffle(order)
    order.sort(key=lambda v: ev.labels[v])  # a fault within one switch or rack stays within a block
    failing = order
    while len(failing) > 2:
        smaller = yield from _halve(ev, failing)
        if smaller is None:
            break
        failing = smaller
    if len(failing) > 2:
        failing = yield from _shortest_prefix(ev, failing)
    if len(failing) == 2:
        return
    yield [tuple(sorted(failing))], f"the smallest failing group, of {len(failing)}, again"
    any_group = yield from _another(ev, list(whole), failing)
    found.scale = _scale(ev, failing, any_group=any_group)
    if any_group is not True and not is_contradicted(ev, found):
        yield from _needed(ev, found, failing)


def _scale(ev: Evidence, members: Iterable[int], *, any_group: bool | None) -> Scale:
    largest = max((len(t.members) for t in ev.tests if not t.bad), default=2 if ev.good_pairs else 0)
    return Scale(members=tuple(sorted(members)), largest_passing=largest, any_group=any_group)


def _needed(ev: Evidence, found: Found, failing: list[int]) -> Steps:
    """It matters who takes part: find each who must, one after another. The last of a shortest beginning is one."""
    needed, others = failing[-1:], failing[:-1]
    for drop in others[:: -(-len(others) // SPARED)]:  # where nobody can be spared it is the number after all
        group = [v for v in failing if v != drop]
        seen = yield from _try(ev, group, f"can one of {len(failing)} be spared?")
        if seen:
            break
    else:
        return
    while others and len(needed) < MOST_NEEDED:
        lower, upper = 0, len(others)  # with all others it fails
        while upper - lower > 1 or (upper == 1 and lower == 0 and len(needed) > 1):
            middle = (lower + upper) // 2
            if (yield from _try(ev, needed + others[:middle], f"those that must take part: {len(needed)} known")):
                upper = middle
            elif middle == 0:
                break
            else:
                lower = middle
        if upper == 0:
            others = []
        else:
            needed, others = [*needed, others[upper - 1]], others[: upper - 1]
        found.scale = _scale(ev, [*needed, *others], any_group=False)


def _try(ev: Evidence, group: list[int], why: str) -> Generator[tuple[list[Ids], str], None, bool]:
    """Whether a group fails; one that gives no outcome does not."""
    if len(group) < 2:
        return False
    if not ev.history(group):
        yield [tuple(sorted(group))], why
    return ev.history(group)[-1:] == [True]


def _halve(ev: Evidence, failing: list[int]) -> Generator[tuple[list[Ids], str], None, list[int] | None]:
    """A union of two of four blocks that fails, or None."""
    size = len(failing)
    cuts = [size * i // 4 for i in range(5)] if size > 3 else [0, 1, 2, 3, 3]
    blocks = [failing[a:b] for a, b in itertools.pairwise(cuts)]
    for pairing in PAIRINGS:
        unions = [blocks[a] + blocks[b] for a, b in pairing]
        known = [union for union in unions if len(union) > 1 and any(ev.history(union)[-1:])]
        if known:
            return known[0]
        groups = [union for union in unions if 1 < len(union) < size and not ev.passed_together(union)]
        if not groups:
            continue
        yield [tuple(sorted(group)) for group in groups], f"halves of the {size} that fail together"
        for group in groups:
            if ev.history(group)[-1:] == [True]:
                return group
    return None


def _shortest_prefix(ev: Evidence, failing: list[int]) -> Generator[tuple[list[Ids], str], None, list[int]]:
    """The shortest failing beginning of a failing order, by bisection of its length."""
    lower, upper = max(len(failing) // 2, 1), len(failing)  # lower passes or is a single member
    while upper - lower > 1:
        middle = (lower + upper) // 2
        group = failing[:middle]
        if ev.passed_together(group):
            lower = middle
            continue
        yield [tuple(sorted(group))], f"is {middle} enough to fail? {lower} passed, {upper} failed"
        seen = ev.history(group)[-1:]
        if not seen:
            break
        if seen[0]:
            upper = middle
        else:
            lower = middle
    return failing[:upper]


def _another(ev: Evidence, whole: list[int], failing: list[int]) -> Generator[tuple[list[Ids], str], None, bool | None]:
    """Whether another group of the same size fails as well; None when there is none or no outcome."""
    size = len(failing)
    if size >= len(whole):
        return None
    outside = [v for v in whole if v not in set(failing)]
    group = (outside + failing)[:size]
    yield [tuple(sorted(group))], f"another group of {size}"
    seen = ev.history(group)[-1:]
    return seen[0] if seen else None


def is_contradicted(ev: Evidence, found: Found) -> bool:
    """Whether a group that failed passed too, itself or within a larger one: the fault comes and goes."""
    scale = found.scale
    return scale is not None and (ev.passed_together(scale.members) or not all(ev.history(scale.members)))
