"""What the graph of passed tests says of the network: parts that are cut off, trunks, and the labels that name them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from healthd.localize.evidence import Evidence, Pair

TRUNK_PAIRS = 3  # pairs without a member in common that must fail across before a trunk is named
# A label group that is bad in every member is named as group when chance would do that less often.
GROUP_CHANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """Two values of a label of which no two members pass."""

    label: str
    values: tuple[str, str]
    members: tuple[frozenset[int], frozenset[int]]
    failed: int

    def explains(self, pair: Pair) -> bool:
        """Whether a pair is one of those that fail over it."""
        one, other = self.members
        return (pair[0] in one and pair[1] in other) or (pair[1] in one and pair[0] in other)

    def smaller(self) -> frozenset[int]:
        """The side that a job does without."""
        return min(reversed(self.members), key=len)


class Parts(Protocol):
    """What is known of members and components when groups are named."""

    accused: dict[int, list[tuple[int, int]]]
    apart: list[frozenset[int]]


def find_apart(
    ev: Evidence, odd: Iterable[Pair], parts: Mapping[int, frozenset[int]]
) -> tuple[frozenset[int], list[frozenset[int]]]:
    """
    The largest component, and those cut off: of several members, of whom two failed with two outside.

    `parts` are the components by root, the largest first. Whose failures are most goes first, and what it explains does
    not count for others.
    """
    main = next(iter(parts), -1)
    across = {pair for pair in odd if ev.root(pair[0]) != ev.root(pair[1])}
    apart: list[frozenset[int]] = []
    while True:
        ends: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for a, b in across:
            for v, o in ((a, b), (b, a)):
                inside, outside = ends[ev.root(v)]
                inside.add(v)
                outside.add(o)
        cut = [root for root, (ins, out) in ends.items() if root != main and len(ins) > 1 and len(out) > 1]
        if not cut:
            return parts.get(main, frozenset()), apart
        worst = max(cut, key=lambda root: (len(ends[root][1]) / len(parts[root]), -len(parts[root]), root))
        apart.append(parts[worst])
        across = {(a, b) for a, b in across if worst not in (ev.root(a), ev.root(b))}


def find_trunks(ev: Evidence, odd: Iterable[Pair]) -> list[Trunk]:
    """Two label values of which several pairs failed and none ever passed."""
    if not any(ev.labels):
        return []
    failed: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in odd:
        for key in ev.crossing(*pair):
            failed[key].append(pair)
    found: list[Trunk] = []
    for key, pairs in sorted(failed.items()):
        label, first, second = key
        sides = ev.labelled(label, first), ev.labelled(label, second)
        used: set[int] = set()
        for pair in pairs:
            if used.isdisjoint(pair):
                used.update(pair)
        if len(used) >= 2 * min(TRUNK_PAIRS, max(2, len(sides[0])), max(2, len(sides[1]))):
            if ev.passed_across(*key):
                continue
            found.append(Trunk(label=label, values=(first, second), members=sides, failed=len(pairs)))
    return found


def is_cut_off(ev: Evidence, part: Collection[int]) -> bool:
    """Whether each member of a component failed with somebody outside of it who passed: all of it is cut off."""
    return all(any(o not in part and ev.passes[o] for o, _ in ev.counted(v)) for v in part)


def name_groups(ev: Evidence, parts: Parts, groups: list[tuple[str, str, frozenset[int], bool]]) -> None:
    """
    What is cut off, by the label that is its alone; an empty label where there is none.

    A label group of which each member is to be accused is named in their place, unless chance does that.
    """
    accused = set(parts.accused)
    left = [part for part in parts.apart if is_cut_off(ev, part)]
    for (label, value), members in _labelled(ev, {v for part in left for v in part}.union(accused)):
        own = [part for part in left if not part.isdisjoint(members) and _is_of(ev, part, label, value)]
        inside = frozenset[int]().union(*own)
        if own and members <= inside | accused:
            groups.append((label, value, inside, True))
            left = [part for part in left if part not in own]
        elif members <= accused and not any(members <= named for _, _, named, _ in groups):
            outside = len(ev.job) - len(members)
            bad = sum(v not in members for v in accused)
            if ((bad + 1) / (outside + 2)) ** len(members) <= GROUP_CHANCE:
                groups.append((label, value, members, False))
    groups += [("", "", part, True) for part in left]


def _is_of(ev: Evidence, part: Collection[int], label: str, value: str) -> bool:
    """Whether all of a part that have this label have this value of it."""
    return all(own != label or said == value for v in part for own, said in ev.labels[v])


def _labelled(ev: Evidence, wanted: set[int]) -> list[tuple[tuple[str, str], frozenset[int]]]:
    """Label groups within `wanted`, the largest first."""
    keys = {pair for v in wanted for pair in ev.labels[v]}
    members = {key: ev.labelled(*key) for key in keys}
    within = [(key, m) for key, m in members.items() if 1 < len(m) < len(ev.job) and m.issubset(wanted)]
    return sorted(within, key=lambda item: (-len(item[1]), item[0]))
