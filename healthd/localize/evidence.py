"""
What has been seen so far, indexed for the rules: members are numbers here, in the order of their names.

The heart of it is the graph of passed tests: a test that passed joins all its members. Failures are kept by pair.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from healthd.core.errors import BadInputError
from healthd.localize.model import GroupOutcome, Outcome, Problem

Ids = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Test:
    """One known outcome. `soft`: slow while other groups ran, which is suspicion and no ground for blame."""

    members: frozenset[int]
    bad: bool
    slow: bool
    soft: bool


class Evidence:
    """Grows round by round; everything else in the room reads it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = sorted(problem.members)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.job: Ids = tuple(range(len(self.names)))
        self.tests: list[Test] = []  # all that failed, and those of more than two that passed
        self.first: Test | None = None
        self.count = 0  # of all tests
        self.rounds = 0
        self.asked = 0
        size = len(self.names)
        self.passes = [0] * size  # tests passed, of any size
        self.pair_tests = [0] * size
        self.silent = [0] * size  # unknown outcomes in a row
        self.met: list[set[int] | tuple[()]] = [()] * size  # partners in pairs with an outcome
        self.fails: dict[int, list[tuple[int, int]]] = defaultdict(list)  # member -> (partner, test); alone: itself
        self.bad_pairs: dict[Pair, list[int]] = defaultdict(list)  # failed tests of exactly these two
        self.good_pairs: dict[Pair, int] = {}  # how many tests of exactly these two passed
        self.across: dict[tuple[str, str, str], list[Pair]] = defaultdict(
            list
        )  # label, two values -> pairs that passed
        self.mended: set[Pair] = set()  # failed, and passed when tested last
        self.large: list[Test] = []
        self.of_group: dict[frozenset[int], list[bool]] = defaultdict(list)  # outcomes of larger groups
        self.dropped: set[int] = set()  # soft tests that passed when measured alone
        self.shown: dict[int, list[int]] = {}  # member in whom failing groups themselves saw the fault -> tests
        self.passed = 0  # tests
        self.labels = [tuple(sorted(problem.labels.get(name, {}).items())) for name in self.names]
        self._by_label: dict[tuple[str, str], frozenset[int]] | None = None
        self._root = list(range(size))  # of the graph of passed tests

    def random(self, purpose: str) -> random.Random:
        """A shuffle of its own for each round and purpose; no global state."""
        return random.Random(f"{self.problem.seed}:{self.rounds}:{purpose}")  # noqa: S311  shuffles, no secrets

    def ids(self, names: Iterable[str]) -> Ids:
        """Numbers of names; raises BadInputError on a stranger."""
        try:
            return tuple(self.index[name] for name in names)
        except KeyError as error:
            raise BadInputError(f"localisation: an outcome names {error}, which is no member; leave it out") from None

    # --- growing ------------------------------------------------------------------------------------------------------

    def record(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Take in the outcomes of one round."""
        alone = len(outcomes) == 1
        for one in sorted(outcomes, key=lambda one: (one.members, one.outcome.value)):
            members = frozenset(self.ids(one.members))
            if not members:
                continue
            if one.outcome is Outcome.UNKNOWN:
                for v in members:
                    self.silent[v] += 1
                continue
            slow = one.outcome is Outcome.SLOW
            if one.shown and one.outcome is Outcome.FAIL and len(one.shown) <= max(1, len(members) // 4):
                for v in self.ids(one.shown):
                    self.shown.setdefault(v, []).append(len(self.tests))
            self._add(Test(members, slow or one.outcome is Outcome.FAIL, slow, slow and not alone), alone=alone)

    def _add(self, test: Test, *, alone: bool) -> None:
        number = len(self.tests)
        self.first = self.first or test
        self.count += 1
        if test.bad or len(test.members) > 2:
            self.tests.append(test)
        self.passed += not test.bad
        for v in test.members:
            self.silent[v] = 0
            self.passes[v] += not test.bad
        if not test.bad and len(test.members) > 1:
            self._join(test.members)
        if len(test.members) > 2:
            self.large.append(test)
            self.of_group[test.members].append(test.bad)
            return
        a, b = min(test.members), max(test.members)
        for v in test.members:
            self.pair_tests[v] += 1
        if a != b:
            self._meet(a, b)
            self._meet(b, a)
        if test.bad:
            self.bad_pairs[a, b].append(number)
            self.mended.discard((a, b))
            self.fails[a].append((b, number))
            if a != b:
                self.fails[b].append((a, number))
            return
        self.good_pairs[a, b] = self.good_pairs.get((a, b), 0) + 1
        if (a, b) in self.bad_pairs:
            self.mended.add((a, b))
        if alone and (a, b) in self.bad_pairs:  # slow in company, fine alone: the company was the cause
            self.dropped.update(n for n in self.bad_pairs[a, b] if self.tests[n].soft)

    def _meet(self, v: int, o: int) -> None:
        met = self.met[v]
        if isinstance(met, set):
            met.add(o)
        else:
            self.met[v] = {o}

    def _join(self, members: Iterable[int]) -> None:
        roots = {self.root(v) for v in members}
        least = min(roots)
        for root in roots:
            self._root[root] = least

    # --- reading ------------------------------------------------------------------------------------------------------

    def root(self, v: int) -> int:
        """The component of a member in the graph of passed tests, by its least member."""
        while self._root[v] != v:
            self._root[v] = self._root[self._root[v]]
            v = self._root[v]
        return v

    def components(self) -> list[list[int]]:
        """Components of two and more, the largest first."""
        parts: dict[int, list[int]] = defaultdict(list)
        for v in self.job:
            parts[self.root(v)].append(v)
        return sorted((part for part in parts.values() if len(part) > 1), key=lambda part: (-len(part), part[0]))

    def is_near(self) -> bool:
        """Whether the whole was slow: then pairs are within label groups, which load no uplink."""
        return self.first is not None and self.first.slow

    def labelled(self, label: str, value: str) -> frozenset[int]:
        """All members with this value of a label."""
        if self._by_label is None:
            found: dict[tuple[str, str], set[int]] = defaultdict(set)
            for v in self.job:
                for pair in self.labels[v]:
                    found[pair].add(v)
            self._by_label = {pair: frozenset(members) for pair, members in found.items()}
        return self._by_label.get((label, value), frozenset())

    def passed_across(self, label: str, first: str, second: str) -> bool:
        """Whether any pair of members with these values passed."""
        others = self.labelled(label, second)
        return any(
            (min(v, o), max(v, o)) in self.good_pairs
            for v in self.labelled(label, first)
            for o in self.met[v]
            if o in others
        )

    def crossing(self, a: int, b: int) -> Iterator[tuple[str, str, str]]:
        """The labels in which two members differ: label and both values, in order."""
        if self.labels[a] and self.labels[b]:
            other = dict(self.labels[b])
            for label, value in self.labels[a]:
                if other.get(label, value) != value:
                    yield (label, *sorted((value, other[label])))  # type: ignore[misc]

    def counted(self, v: int) -> list[tuple[int, int]]:
        """Partner and test of each failure of a member in a pair, without what was dismissed."""
        fails = self.fails.get(v, ())
        return [(o, n) for o, n in fails if n not in self.dropped] if self.dropped else list(fails)

    def own(self, pair: Pair) -> tuple[int, int]:
        """How many tests of exactly this pair failed, and how many passed."""
        return sum(n not in self.dropped for n in self.bad_pairs.get(pair, ())), self.good_pairs.get(pair, 0)

    def is_soft(self, pair: Pair) -> bool:
        """Whether these two never failed but slowly, while others ran."""
        failed = self.bad_pairs.get(pair, ())
        return bool(failed) and pair not in self.good_pairs and all(self.tests[n].soft for n in failed)

    def is_all_with(self, members: set[int]) -> bool:
        """Whether each test that failed, other than slowly beside others, was with one of these."""
        return all(not t.bad or t.soft or not members.isdisjoint(t.members) for t in self.tests)

    def passes_apart(self, a: int, b: int) -> int:
        """Tests that passed with one of two and without the other: of the one that has fewer."""
        both = self.good_pairs.get((a, b), 0) + sum(not t.bad and a in t.members and b in t.members for t in self.large)
        return min(self.passes[a], self.passes[b]) - both

    def passed_together(self, group: Iterable[int]) -> bool:
        """Whether these took part together in a test that passed."""
        wanted = frozenset(group)
        if len(wanted) == 2 and self.good_pairs.get((min(wanted), max(wanted))):
            return True
        return any(not test.bad and wanted <= test.members for test in self.large)

    def failed_inside(self, group: Iterable[int]) -> bool:
        """Whether a part of these, of three or more, failed."""
        wanted = frozenset(group)
        return any(test.bad and test.members <= wanted for test in self.large)

    def history(self, group: Iterable[int]) -> list[bool]:
        """Whether exactly this group was bad, each time it was tested; the last is the latest."""
        wanted = frozenset(group)
        if len(wanted) > 2:
            return self.of_group.get(wanted, [])
        pair = (min(wanted), max(wanted))
        failed, passed = self.own(pair)
        if failed and pair not in self.mended:
            return [False] * passed + [True] * failed
        return [True] * failed + [False] * passed

    def say(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Names of numbers, in order of names."""
        return tuple(self.names[i] for i in sorted(ids))
