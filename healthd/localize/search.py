"""
Groups of the rest: the smallest that still fails, where pairs are clean and the whole is not, and the largest that
passes, where so many pairs fail that naming each takes longer than anybody waits.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass

from healthd.localize.evidence import Ask, Evidence, Ids, Pair, Steps
from healthd.localize.model import ScaleFault

MOST_NEEDED = 8  # members that must all take part; for more of them the bound on rounds is too low
SPARED = 4  # members left out, one after another, before it is said that nobody can be spared
PAIRINGS = (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (2, 3)))


@dataclass(kw_only=True)
class Found:
    """What only the course of the tests tells, for the verdict. `grown`: the largest group found to pass, if sought."""

    rest: Ids = ()
    rest_passed: bool | None = None
    scale: ScaleFault | None = None
    intermittent: bool = False
    pair_rounds: int = 0
    grown: Ids | None = None


def smallest_failing(ev: Evidence, found: Found) -> Steps:
    """Shrink the rest, to `found.scale`; None there if it comes and goes, or a bad pair was found, now in evidence."""
    failing = list(found.rest)
    ev.random("search").shuffle(failing)
    failing.sort(key=lambda v: ev.labels[v])  # a fault within one switch or rack stays within a block
    while len(failing) > 2 and (smaller := (yield from _halve(ev, failing))):
        failing = smaller
    if len(failing) > 2:
        lower = max(len(failing) // 2, 1)  # passes, or is a single member
        failing = failing[: (yield from _shortest(ev, [], failing, lower, "the smallest group that fails"))]
    if len(failing) == 2:
        return
    size = len(failing)
    yield [tuple(sorted(failing))], f"the smallest failing group, of {size}, again"
    others, any_group = [v for v in found.rest if v not in set(failing)], None
    if others:
        another = (others + failing)[:size]
        yield [tuple(sorted(another))], f"another group of {size}"
        any_group = ev.last(another)
    found.scale = _scale(ev, failing, any_group=any_group)
    if any_group is not True and not ev.passed_together(failing):
        yield from _needed(ev, found, failing)
    if ev.passed_together(ev.index[name] for name in found.scale.members):
        found.scale, found.intermittent = None, True


def _scale(ev: Evidence, members: Iterable[int], *, any_group: bool | None) -> ScaleFault:
    sizes = (len(group) for group, bad in ev.large.items() if not all(bad))
    largest = max(sizes, default=2 if ev.good_pairs else 0)
    return ScaleFault(members=ev.say(members), largest_passing=largest, any_group=any_group)


def _needed(ev: Evidence, found: Found, failing: list[int]) -> Steps:
    """It matters who takes part: find each who must, one after another. The last of a shortest beginning is one."""
    needed, others = failing[-1:], failing[:-1]
    for drop in others[:: -(-len(others) // SPARED)]:  # where nobody can be spared it is the number after all
        if (yield from _fails(ev, [v for v in failing if v != drop], f"can one of {len(failing)} be spared?")):
            break
    else:
        return
    while others and len(needed) < MOST_NEEDED:
        why = f"those that must take part: {len(needed)} known"
        upper = yield from _shortest(ev, needed, others, 0 if len(needed) == 1 else -1, why)
        needed, others = [*needed, *others[:upper][-1:]], others[: max(0, upper - 1)]
        found.scale = _scale(ev, [*needed, *others], any_group=False)


def _shortest(ev: Evidence, needed: list[int], order: list[int], lower: int, why: str) -> Generator[Ask, None, int]:
    """How many of the first of an order fail with those needed, by bisection; all do, and `lower` are too few."""
    upper = len(order)
    while upper - lower > 1:
        middle = (lower + upper) // 2
        failed = yield from _fails(ev, needed + order[:middle], why)
        lower, upper = (lower, middle) if failed else (middle, upper)
    return upper


def _fails(ev: Evidence, group: list[int], why: str) -> Generator[Ask, None, bool]:
    """Whether a group fails; one that gives no outcome does not."""
    if len(group) > 1 and ev.last(group) is None and not ev.passed_together(group):
        yield [tuple(sorted(group))], why
    return ev.last(group) is True


def _halve(ev: Evidence, failing: list[int]) -> Generator[Ask, None, list[int] | None]:
    """A union of two of four blocks that fails, or None."""
    size = len(failing)
    blocks = [failing[size * i // 4 : size * (i + 1) // 4] for i in range(4)]
    for pairing in PAIRINGS:
        unions = [blocks[a] + blocks[b] for a, b in pairing if len(blocks[a] + blocks[b]) > 1]
        groups = [tuple(sorted(union)) for union in unions if not ev.passed_together(union)]
        if groups and not any(map(ev.last, unions)):
            yield groups, f"halves of the {size} that fail together"
        if failed := [union for union in unions if ev.last(union)]:
            return failed[0]
    return None


def grow(ev: Evidence, found: Found, apart: Collection[Pair]) -> Steps:
    """
    Put groups of the rest that passed together two by two, all at once, then the largest with one after another.

    What holds a pair of `apart` or a union that failed is never put together. A group that does not fit the largest for
    that is halved, and a single one left out.
    """
    failed = [frozenset(pair) for pair in apart]

    def fits(one: Ids, other: Ids) -> bool:
        return not any(map(frozenset(one + other).issuperset, failed))

    def fitting(part: Ids) -> list[Ids]:
        """Pieces of a part that may pass with the largest."""
        if fits(parts[0], part):
            return [part]
        middle = len(part) // 2
        return [*fitting(part[:middle]), *fitting(part[middle:])] if middle else []

    parts = passed_parts(ev, found.rest, apart)
    while len(parts := [parts[0], *(piece for part in parts[1:] for piece in fitting(part))]) > 1:
        left, unions = list(parts) if len(parts[0]) * 6 <= len(found.rest) else parts[:2], list[Ids]()
        while left:
            one = left.pop(0)
            if other := next((other for other in left[:64] if fits(one, other)), None):
                left.remove(other)
                unions.append(tuple(sorted(one + other)))
        yield unions, "groups that passed, put together"
        passed = {union for union in unions if ev.last(union) is False}
        failed += [frozenset(union) for union in unions if union not in passed]
        taken = {v for union in passed for v in union}
        parts = [*passed, *(part for part in parts if taken.isdisjoint(part))]
        parts.sort(key=lambda part: (-len(part), part))
    found.grown = parts[0]


def passed_parts(ev: Evidence, members: Ids, apart: Collection[Pair]) -> list[Ids]:
    """Disjoint groups of these that passed and hold no pair of `apart`, the largest first; the others one by one."""
    wanted, used = frozenset(members), set[int]()
    groups = [group for group, bad in ev.large.items() if not all(bad) and not any(map(group.issuperset, apart))]
    groups += [frozenset(pair) for pair in ev.good_pairs if pair not in apart]
    parts: list[Ids] = []
    for group in sorted(groups, key=lambda group: (-len(group), sorted(group))):
        if group <= wanted and used.isdisjoint(group):
            used |= group
            parts.append(tuple(sorted(group)))
    return parts + [(v,) for v in members if v not in used]
