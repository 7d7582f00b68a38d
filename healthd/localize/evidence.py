"""What the tests have shown so far, indexed for the rules. Members are numbers here, in the order of their names."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from healthd.core.errors import BadInputError
from healthd.localize.model import GroupOutcome, Outcome, Problem

Ids = tuple[int, ...]
Pair = tuple[int, int]  # the lower number first
Trunk = tuple[str, str, str]  # a label, and two values of it in order

SILENT = 2  # outcomes unknown in a row after which a member is no longer asked


class Evidence:
    """Grows round by round; everything else in the room reads it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = sorted(problem.members)
        self.job: Ids = tuple(range(len(self.names)))
        self.labels = [tuple(sorted(problem.labels.get(name, {}).items())) for name in self.names]
        by_label: dict[tuple[str, str], list[int]] = defaultdict(list)
        for v in self.job:
            for label in self.labels[v]:
                by_label[label].append(v)
        self.by_label = {label: frozenset(members) for label, members in by_label.items()}
        self.rounds = self.asked = 0
        self.first: Test | None = None
        self.count = self.passed = 0  # of all tests
        self.tests: list[Test] = []  # all that failed, and those of more than two that passed
        self.large: dict[frozenset[int], list[bool]] = defaultdict(list)  # group of more than two -> bad, each time
        self.bad_pairs: dict[Pair, list[int]] = defaultdict(list)  # failed tests of exactly these two
        self.good_pairs: Counter[Pair] = Counter()  # how many tests of exactly these two passed
        self.mended: set[Pair] = set()  # failed, and passed when tested last
        self.dropped: set[int] = set()  # soft tests that passed when measured alone
        self.fails: dict[int, list[tuple[int, int]]] = defaultdict(list)  # member -> (partner, test); alone: itself
        self.shown: set[int] = set()  # in whom the failing whole itself saw the fault
        self.met = [set[int]() for _ in self.job]  # partners in pairs with an outcome
        self.passes = [0] * len(self.job)  # tests passed, of any size
        self.pair_tests = [0] * len(self.job)
        self.silent = [0] * len(self.job)  # unknown outcomes in a row
        self.index = {name: i for i, name in enumerate(self.names)}
        self._joined = Parts(len(self.job))  # the graph of passed tests
        self.root = self._joined.root

    def random(self, purpose: str) -> random.Random:
        """A shuffle of its own for each round and purpose; no global state."""
        return random.Random(f"{self.problem.seed}:{self.rounds}:{purpose}")  # noqa: S311  shuffles, no secrets

    def say(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Names of numbers, in order of names."""
        return tuple(self.names[i] for i in sorted(ids))

    def record(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Take in the outcomes of one round; raises BadInputError where one names a stranger."""
        for one in sorted(outcomes, key=lambda one: (one.members, one.outcome.value)):
            try:
                members, shown = (frozenset(self.index[name] for name in names) for names in (one.members, one.shown))
            except KeyError as error:
                what = f"localisation: an outcome names {error}, which is not a member; leave it out"
                raise BadInputError(what) from None
            slow, fail = one.outcome is Outcome.SLOW, one.outcome is Outcome.FAIL
            if one.outcome is Outcome.UNKNOWN:
                for v in members:
                    self.silent[v] += 1
            elif members:
                few = fail and len(members) > 2 and len(shown) <= max(1, len(members) // 4)
                for v in shown - self.shown if few else ():
                    self.fails[v].append((v, len(self.tests)))  # counts as failed alone, once
                    self.pair_tests[v] += 1
                    self.shown.add(v)
                self._add(Test(members, slow or fail, slow, slow and len(outcomes) > 1), alone=len(outcomes) == 1)

    def _add(self, test: Test, *, alone: bool) -> None:
        number, is_pair = len(self.tests), len(test.members) < 3
        self.first = self.first or test
        self.count += 1
        self.passed += not test.bad
        if test.bad or not is_pair:
            self.tests.append(test)
        for v in test.members:
            self.silent[v] = 0
            self.passes[v] += not test.bad
            self.pair_tests[v] += is_pair
        if not test.bad:
            self._joined.join(test.members)
        if not is_pair:
            self.large[test.members].append(test.bad)
            return
        a, b = pair = min(test.members), max(test.members)
        for v, o in dict.fromkeys(((a, b), (b, a))):
            self.met[v].update({o} - {v})
            if test.bad:
                self.fails[v].append((o, number))
        if test.bad:
            self.bad_pairs[pair].append(number)
            self.mended.discard(pair)
            return
        self.good_pairs[pair] += 1
        if pair in self.bad_pairs:
            self.mended.add(pair)
            if alone:  # slow in company, fine alone: the company was the cause
                self.dropped.update(n for n in self.bad_pairs[pair] if self.tests[n].soft)

    def components(self) -> dict[int, frozenset[int]]:
        """Components of two and more by root, the largest first."""
        parts = sorted(self._joined.of(self.job).items(), key=lambda item: -len(item[1]))
        return {root: frozenset(part) for root, part in parts if len(part) > 1}

    def is_near(self) -> bool:
        """Whether the whole was slow: then pairs are within label groups, which load no uplink."""
        return self.first is not None and self.first.slow

    def crossing(self, a: int, b: int) -> Iterator[Trunk]:
        """The labels in which two members differ, with both values."""
        other = dict(self.labels[b])
        for label, value in self.labels[a]:
            if other.get(label, value) != value:
                yield label, min(value, other[label]), max(value, other[label])

    def sides(self, trunk: Trunk) -> tuple[frozenset[int], frozenset[int]]:
        """All members with the one value of a label, and with the other."""
        return self.by_label[trunk[:2]], self.by_label[trunk[0], trunk[2]]

    def passed_across(self, trunk: Trunk) -> bool:
        """Whether any pair of members with these values passed."""
        one, other = self.sides(trunk)
        return any((min(v, o), max(v, o)) in self.good_pairs for v in one for o in self.met[v] if o in other)

    def counted(self, v: int) -> list[tuple[int, int]]:
        """Partner and test of each failure of a member in a pair, without what was dismissed."""
        return [(o, n) for o, n in self.fails.get(v, ()) if n not in self.dropped]

    def own(self, pair: Pair) -> tuple[int, int]:
        """How many tests of exactly this pair failed, and how many passed."""
        return sum(n not in self.dropped for n in self.bad_pairs.get(pair, ())), self.good_pairs[pair]

    def is_soft(self, pair: Pair) -> bool:
        """Whether these two never failed but slowly, while others ran."""
        failed = [n for n in self.bad_pairs.get(pair, ()) if n not in self.dropped]
        return bool(failed) and all(self.tests[n].soft for n in failed)

    def is_all_with(self, members: set[int]) -> bool:
        """Whether each test that failed, other than slowly beside others, was with one of these."""
        return all(not t.bad or t.soft or not members.isdisjoint(t.members) for t in self.tests)

    def passes_apart(self, a: int, b: int) -> int:
        """Tests that passed with one of two and without the other: of the one that has fewer."""
        both = sum(bad.count(False) for group, bad in self.large.items() if a in group and b in group)
        return min(self.passes[a], self.passes[b]) - both - self.good_pairs[a, b]

    def passed_together(self, group: Iterable[int]) -> bool:
        """Whether these took part together in a test that passed."""
        wanted = frozenset(group)
        if len(wanted) == 2 and (min(wanted), max(wanted)) in self.good_pairs:
            return True
        return any(wanted <= group and not all(bad) for group, bad in self.large.items())

    def last(self, group: Iterable[int]) -> bool | None:
        """Whether exactly this group was bad when tested last; None where it never was tested."""
        wanted = frozenset(group)
        if len(wanted) > 2:
            return self.large[wanted][-1] if wanted in self.large else None
        pair = (min(wanted), max(wanted))
        failed, passed = self.own(pair)
        return True if failed and pair not in self.mended else False if passed else None


@dataclass(frozen=True, slots=True)
class Test:
    """One known outcome. `soft`: slow while other groups ran, which is suspicion and no ground for blame."""

    members: frozenset[int]
    bad: bool
    slow: bool
    soft: bool


class Parts:
    """Members joined into parts, each known by its least member."""

    def __init__(self, size: int) -> None:
        self._root = list(range(size))

    def root(self, v: int) -> int:
        """The part of a member, by its least member."""
        while self._root[v] != v:
            self._root[v] = self._root[self._root[v]]
            v = self._root[v]
        return v

    def join(self, members: Iterable[int]) -> None:
        """Make the parts of these one."""
        roots = {self.root(v) for v in members}
        least = min(roots)
        for root in roots:
            self._root[root] = least

    def of(self, members: Iterable[int]) -> dict[int, list[int]]:
        """These members by the root of their part."""
        parts: dict[int, list[int]] = defaultdict(list)
        for v in members:
            parts[self.root(v)].append(v)
        return parts


def disjoint(pairs: Iterable[Pair]) -> set[int]:
    """The ends of those of the pairs, taken in this order, that have no member in common."""
    used: set[int] = set()
    for pair in pairs:
        if used.isdisjoint(pair):
            used.update(pair)
    return used
