"""Three simple ways to find a culprit, to compare with: each gets the fleet and says whom it accuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from healthd.localize.model import Outcome
from tests.benchmarks.localize.simulator import Fleet

Baseline = Callable[[Fleet, Sequence[str]], set[str]]


def fails(fleet: Fleet, groups: Sequence[tuple[str, ...]], number: int) -> list[bool]:
    """Which of these groups, run at once, do not pass."""
    return [one.outcome is not Outcome.PASS for one in fleet.run(groups, number)]


def halving(fleet: Fleet, members: Sequence[str]) -> set[str]:
    """Halve what fails down to pairs; each of a pair that fails is tested with one that passed."""
    failing, passed, number = [tuple(members)], list[str](), 0
    while failing and max(map(len, failing)) > 2:
        number += 1
        halves = [half for one in failing for half in (one[: len(one) // 2], one[len(one) // 2 :]) if len(half) > 1]
        failing = []
        for half, bad in zip(halves, fails(fleet, halves, number), strict=True):
            if bad:
                failing.append(half)
            else:
                passed += half
    last = [(name, passed[0]) for pair in failing for name in pair if passed and name != passed[0]]
    return {pair[0] for pair in last if fails(fleet, [pair], number + 1)[0]}


def two_rounds(fleet: Fleet, members: Sequence[str]) -> set[str]:
    """Neighbours in pairs; then each of a pair that failed with one of a pair that passed."""
    pairs = [(members[i], members[i + 1]) for i in range(0, len(members) - 1, 2)]
    bad = fails(fleet, pairs, 1)
    good = [name for pair, failed in zip(pairs, bad, strict=True) if not failed for name in pair]
    suspects = [name for pair, failed in zip(pairs, bad, strict=True) if failed for name in pair]
    again = list(zip(suspects, good, strict=False))
    return {pair[0] for pair, failed in zip(again, fails(fleet, again, 2), strict=True) if failed}


def one_by_one(fleet: Fleet, members: Sequence[str]) -> set[str]:
    """Each with the first, one after another; if none passes, the first is accused."""
    bad = {name for i, name in enumerate(members[1:]) if fails(fleet, [(members[0], name)], i + 1)[0]}
    return bad if len(bad) < len(members) - 1 else {members[0]}


BASELINES: tuple[tuple[str, Baseline], ...] = (
    ("halving", halving),
    ("two rounds of pairs", two_rounds),
    ("one after another", one_by_one),
)
