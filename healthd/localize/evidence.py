"""
What has been seen so far, indexed for the rules: members are numbers here, in the order of their names.

Pairs decide about members; larger groups clear members, and tell of paths and of scale.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from healthd.core.errors import BadInputError
from healthd.localize.model import GroupOutcome, Outcome, Problem

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Test:
    """One known outcome. `soft`: slow while other groups ran, which is suspicion and no ground for blame."""

    members: frozenset[int]
    bad: bool
    slow: bool
    soft: bool
    alone: bool


class Evidence:
    """Grows round by round; everything else in the room reads it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = sorted(problem.members)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.job: Ids = tuple(range(len(self.names)))
        self.tests: list[Test] = []
        self.rounds = 0
        self.asked = 0
        size = len(self.names)
        self.passes = [0] * size  # tests passed, of any size
        self.pair_tests = [0] * size
        self.silent = [0] * size  # unknown outcomes in a row
        self.met: list[set[int]] = [set() for _ in range(size)]  # partners in pairs with an outcome
        self.fails: dict[int, list[tuple[int, int]]] = defaultdict(list)  # member -> (partner, test); alone: itself
        self.bad_pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.large: list[Test] = []
        self.dropped: set[int] = set()  # soft tests that passed when measured alone
        self.labels = [tuple(sorted(problem.labels.get(name, {}).items())) for name in self.names]

    def random(self, purpose: str) -> random.Random:
        """A shuffle of its own for each round and purpose; no global state."""
        return random.Random(f"{self.problem.seed}:{self.rounds}:{purpose}")  # noqa: S311  shuffles, no secrets

    def ids(self, names: Iterable[str]) -> Ids:
        """Numbers of names; raises BadInputError on a stranger."""
        try:
            return tuple(self.index[name] for name in names)
        except KeyError as error:
            raise BadInputError(f"localisation: an outcome names {error}, which is no member; leave it out") from None

    def record(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Take in the outcomes of one round."""
        for one in sorted(outcomes, key=lambda one: (one.members, one.outcome.value)):
            members = frozenset(self.ids(one.members))
            if not members:
                continue
            if one.outcome is Outcome.UNKNOWN:
                for v in members:
                    self.silent[v] += 1
                continue
            slow = one.outcome is Outcome.SLOW
            bad = slow or one.outcome is Outcome.FAIL
            alone = len(outcomes) == 1
            self._add(Test(members=members, bad=bad, slow=slow, soft=slow and not alone, alone=alone))

    def _add(self, test: Test) -> None:
        number = len(self.tests)
        self.tests.append(test)
        for v in test.members:
            self.silent[v] = 0
            self.passes[v] += not test.bad
        if len(test.members) > 2:
            self.large.append(test)
            return
        a, b = min(test.members), max(test.members)
        for v in test.members:
            self.pair_tests[v] += 1
        if a != b:
            self.met[a].add(b)
            self.met[b].add(a)
        if test.bad:
            self.bad_pairs[a, b].append(number)
            self.fails[a].append((b, number))
            if a != b:
                self.fails[b].append((a, number))
        elif test.alone and (a, b) in self.bad_pairs:  # slow in company, fine alone: the company was the cause
            self.dropped.update(n for n in self.bad_pairs[a, b] if self.tests[n].soft)

    def counted(self, v: int) -> Iterator[tuple[int, int]]:
        """Partner and test of each failure of a member in a pair, without what was dismissed."""
        return ((o, n) for o, n in self.fails.get(v, ()) if n not in self.dropped)

    def passed_together(self, group: Iterable[int]) -> bool:
        """Whether these took part together in a test that passed."""
        wanted = frozenset(group)
        if len(wanted) == 2:
            a, b = wanted
            if b in self.met[a] and any(not t.bad and t.members == wanted for t in self.tests):
                return True
        return any(not test.bad and wanted <= test.members for test in self.large)

    def failed_inside(self, group: Iterable[int]) -> bool:
        """Whether a part of these, of three or more, failed."""
        wanted = frozenset(group)
        return any(test.bad and test.members <= wanted for test in self.large)

    def history(self, group: Iterable[int]) -> list[bool]:
        """Whether exactly this group was bad, each time it was tested, oldest first."""
        wanted = frozenset(group)
        return [t.bad for n, t in enumerate(self.tests) if t.members == wanted and n not in self.dropped]

    def with_both(self, a: int, b: int) -> tuple[int, int]:
        """How many tests with both members were bad, and how many passed."""
        both = [t.bad for n, t in enumerate(self.tests) if a in t.members and b in t.members and n not in self.dropped]
        return sum(both), len(both) - sum(both)

    def passes_without(self, a: int, b: int) -> int:
        """Tests that passed with a and without b."""
        return sum(not t.bad and a in t.members and b not in t.members for t in self.tests)

    def say(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Names of numbers, in order of names."""
        return tuple(self.names[i] for i in sorted(ids))
