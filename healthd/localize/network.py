"""What the graph of passed tests says of the network: parts that are cut off, trunks, and the labels that name them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from healthd.localize.evidence import Evidence, Pair, Trunk, disjoint

Group = tuple[str, str, frozenset[int], bool]  # label, value, members, whether these pass among themselves

TRUNK_PAIRS = 3  # pairs without a member in common that must fail across before a trunk is named
GROUP_CHANCE = 0.01  # a label group that is bad in every member is named as group when chance does that less often


def find_apart(ev: Evidence, odd: Iterable[Pair], parts: Mapping[int, frozenset[int]]) -> list[frozenset[int]]:
    """
    The components cut off from the largest: of several members, of whom two failed with two outside.

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
        cut = [root for root, both in ends.items() if root != main and min(map(len, both)) > 1]
        if not cut:
            return apart
        worst = max(cut, key=lambda root: (len(ends[root][1]) / len(parts[root]), -len(parts[root]), root))
        apart.append(parts[worst])
        across = {(a, b) for a, b in across if worst not in (ev.root(a), ev.root(b))}


def find_trunks(ev: Evidence, odd: Iterable[Pair]) -> dict[Trunk, int]:
    """Two label values of which several pairs failed and none ever passed: how many failed."""
    failed: dict[Trunk, list[Pair]] = defaultdict(list)
    for pair in odd:
        for trunk in ev.crossing(*pair):
            failed[trunk].append(pair)
    found: dict[Trunk, int] = {}
    for trunk, pairs in sorted(failed.items()):
        enough = min(TRUNK_PAIRS, *(max(2, len(side)) for side in ev.sides(trunk)))
        if len(disjoint(pairs)) >= 2 * enough and not ev.passed_across(trunk):
            found[trunk] = len(pairs)
    return found


def name_groups(ev: Evidence, accused: Collection[int], apart: Iterable[frozenset[int]]) -> list[Group]:
    """
    What is cut off, by the label that is its alone; an empty label where there is none.

    A part is cut off where each of its members failed with somebody outside of it who passed. A label group of which
    each member is to be accused is named in their place, unless chance does that.
    """
    bad = frozenset(accused)
    left = [part for part in apart if all(any(o not in part and ev.passes[o] for o, _ in ev.counted(v)) for v in part)]
    wanted = bad.union(*left)
    labels = {label: ev.by_label[label] for v in wanted for label in ev.labels[v]}
    groups: list[Group] = []
    for (label, value), members in sorted(labels.items(), key=lambda item: (-len(item[1]), item[0])):
        if not 1 < len(members) < len(ev.job) or not members <= wanted:
            continue
        own = [part for part in left if not part.isdisjoint(members)]
        own = [part for part in own if all(v in members or label not in dict(ev.labels[v]) for v in part)]
        inside = frozenset[int]().union(*own)
        if own and members <= inside | bad:
            groups.append((label, value, inside, True))
            left = [part for part in left if part not in own]
        elif members <= bad and not any(members <= named for _, _, named, _ in groups):
            share = (len(bad - members) + 1) / (len(ev.job) - len(members) + 2)
            if share ** len(members) <= GROUP_CHANCE:
                groups.append((label, value, members, False))
    return groups + [("", "", part, True) for part in left]
