"""The largest group that passes, where so many pairs fail that naming each takes longer than anybody waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from healthd.localize.evidence import Evidence, Ids, Pair
from healthd.localize.search import Found

Steps = Generator[tuple[list[Ids], str], None, None]


def grow(ev: Evidence, found: Found, bad: Iterable[Pair]) -> Steps:
    """
    Put groups of the rest that passed together two by two, all at once, then let the largest take in others.

    `bad` pairs are never put together. What fails with the largest is halved; a single one stays out.
    """
    apart = {frozenset(pair) for pair in bad}
    parts = _passed(ev, found.rest)
    failed: set[frozenset[int]] = set()

    def fit(one: Ids, other: Ids) -> bool:
        union = frozenset((*one, *other))
        return union not in failed and not any(pair <= union for pair in apart)

    while len(parts[0]) * 4 <= len(found.rest):
        matched = _matched(parts, fit)
        if not matched:
            break
        yield [_union(one, other) for one, other in matched], "groups that passed, put together"
        for one, other in matched:
            union = _union(one, other)
            if ev.history(union)[-1:] == [False]:
                parts = [part for part in parts if part not in (one, other)] + [union]
            else:
                failed.add(frozenset(union))
        parts.sort(key=lambda part: (-len(part), part))
    found.grown, others = parts[0], [v for part in parts[1:] for v in part]
    chunks = [tuple(others[i : i + len(parts[0])]) for i in range(0, len(others), max(1, len(parts[0])))]
    while chunks:
        chunk = chunks.pop(0)
        union = _union(found.grown, chunk)
        if fit(found.grown, chunk):
            yield [union], f"{len(found.grown)} that passed, and {len(chunk)} more"
            if ev.history(union)[-1:] == [False]:
                found.grown = union
                continue
        if len(chunk) > 1:
            chunks = [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :], *chunks]


def _union(one: Ids, other: Ids) -> Ids:
    return tuple(sorted(one + other))


def _matched(parts: list[Ids], fit: Callable[[Ids, Ids], bool]) -> list[tuple[Ids, Ids]]:
    """Disjoint twos of parts that may pass together, the largest first."""
    matched: list[tuple[Ids, Ids]] = []
    left = list(parts)
    while len(left) > 1:
        one = left.pop(0)
        other = next((part for part in left[:64] if fit(one, part)), None)
        if other is not None:
            left.remove(other)
            matched.append((one, other))
    return matched


def _passed(ev: Evidence, members: Ids) -> list[Ids]:
    """Disjoint groups within `members` that passed, the largest first; the others one by one."""
    wanted, used = frozenset(members), set[int]()
    groups = [test.members for test in ev.large if not test.bad and test.members <= wanted]
    groups += [frozenset(pair) for pair in ev.good_pairs if wanted.issuperset(pair)]
    parts: list[Ids] = []
    for group in sorted(groups, key=lambda group: (-len(group), sorted(group))):
        if used.isdisjoint(group):
            used |= group
            parts.append(tuple(sorted(group)))
    return parts + [(v,) for v in members if v not in used]
