"""
Which members are at fault: the rules of accusation. It does not decide what to test next.

All rules read the graph of passed tests; docs/localisation_rules.md has the idea and the proof.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from healthd.core.errors import BadInputError
from healthd.localize.model import GroupOutcome, Outcome, Problem

# What has been seen so far, indexed for the rules: members are numbers here, in the order of their names.


Ids = tuple[int, ...]
Pair = tuple[int, int]  # the lower number first
Trunk = tuple[str, str, str]  # a label, and two values of it in order
Ask = tuple[list[Ids], str]  # groups to test at once, and why
Steps = Generator[Ask, None, None]

SILENT = 2  # outcomes unknown in a row after which a member is no longer asked


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


def disjoint(pairs: Iterable[Pair]) -> set[int]:
    """The ends of those of the pairs, taken in this order, that have no member in common."""
    used: set[int] = set()
    for pair in pairs:
        if used.isdisjoint(pair):
            used.update(pair)
    return used


# What the graph of passed tests says of the network: parts that are cut off, trunks, and the labels that name them.


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


# What chance gives: how often healthy members fail, as learnt, and what a path or a flaky end is likelier than.


# How much likelier than "one end is flaky" a path must be, whatever share of its tests a flaky member fails.
PATH_ODDS = 300.0
PATH_FAILS = 4  # tests of the pair itself: one that fails a fifth of its tests by chance fails four in a row in 0.8 %
BUDGET = 0.001  # false accusations accepted for each validation of a whole healthy fleet
FLAKY = 0.5  # how often a flaky member makes its group fail, which decides how long one is looked for
OPEN_ODDS = 0.05  # a member is worth more tests while its odds of being flaky, one culprit being expected, are above
# What is taken for known before any test, at least: that many failures by chance in that many tests of healthy members.
CHANCE_FAILS, CHANCE_TESTS = 0.03, 10.0
MOST_CHANCE = 0.25  # failures by chance are never taken to be more frequent than this


def chance_of(ev: Evidence, odd: Iterable[Pair], without: Iterable[int] = ()) -> float:
    """
    The share of tests that healthy members fail, as learnt: from pairs that failed though both ends pass elsewhere.

    Pairs with a member in common count once, since that member may be the cause; `without`: pairs of these do not
    count, since whether they fail by chance is the question. What earlier searches have seen only raises the estimate:
    a network that was good for weeks may be bad today. So does the setting, less and less as tests pass.
    """
    count = len(disjoint(pair for pair in odd if not ev.is_soft(pair) and set(pair).isdisjoint(without))) // 2
    tests = ev.passed + count
    known = max(CHANCE_FAILS, ev.problem.false_alarm_ratio * CHANCE_TESTS)

    def estimate(failed: float, tests: float) -> float:
        """From above."""
        return (known + failed + 2 * math.sqrt(failed)) / (CHANCE_TESTS + tests)

    ever = estimate(count + ev.problem.seen_failed, tests + ev.problem.seen_tests)
    return min(MOST_CHANCE, max(estimate(count, tests), ever))


def is_chance(ev: Evidence, many: float, tests: int, failed: int, chance: float) -> bool:
    """
    Whether chance alone gives one of `many` healthy ones so many failures in so many tests too often.

    The bound holds at any time that one looks: the failures can be chosen in `comb` ways among the tests.
    """
    return many * math.comb(max(tests, failed), failed) * chance**failed > BUDGET


def independent(v: int, partners: Iterable[int]) -> int:
    """
    How many failures of a member in tests with these partners (itself: alone) one bad path does not explain.

    Of those with the partner with whom it failed most one counts, since the path to it may be bad.
    """
    counts = Counter(partners)
    own = counts.pop(v, 0)
    return own + counts.total() - max(counts.values()) + 1 if counts else own


def is_path(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """A pair that fails each time, by itself, while both ends pass with others: too often for a flaky end or chance."""
    failed, passed = ev.own(pair)
    if passed or failed < PATH_FAILS or ev.is_soft(pair):
        return False
    if is_chance(ev, ev.count, failed, failed, chance_of(ev, odd, pair)):
        return False
    others = ev.passes_apart(*pair)
    share = (failed - 1) / (failed - 1 + others)  # of failures of a flaky end for which this is likeliest
    return others > 0 and share ** (failed - 1) * (1 - share) ** others * PATH_ODDS <= 1


def is_open(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """Whether an end of an odd pair may yet turn out flaky: likelier than chance by enough."""
    for v in pair:
        chance = chance_of(ev, odd, (v,))
        failed = independent(v, (o for o, _ in ev.counted(v)))
        odds = failed * math.log(FLAKY / chance) + ev.passes[v] * math.log((1 - FLAKY) / (1 - chance))
        if odds - math.log(len(ev.job)) > math.log(OPEN_ODDS):
            return True
    return False


SOMETIMES_ROUNDS = 9  # from here on two failures accuse one that passes at times; before it takes three
SOMETIMES_SHARE = 5  # one that passes at times is accused only where more than one in so many of its tests failed

LARGE = 128  # members of a fleet in which chance fails two tests of one likelier than the one test of two cut off
WITNESSES = 3  # clean partners with whom one or two who are to be named are tried in the first rounds
DOUBT_WITNESSES = 6  # the same for all wherever the network is at fault too
OF_PART = 2  # members of each part of the network with whom who is to be named is tried
# With how many others each who is to be named is tried: in the first four rounds, or six where more than a quarter are;
# and at any time where more than half are. After that with one.
OTHERS, OTHERS_OF_MANY = 4, 6

Failures = list[tuple[int, int]]  # of a member: partner (itself: alone) and number of the test


@dataclass(kw_only=True)
class Judged:
    """
    What the evidence says now.

    `accused` maps a member to its counted (partner, test). `pending` would be accused, but were not tried with all to
    whom they could belong; those of them in `wanting` not with enough clean partners. `awaiting` would, but were only
    slow while others ran. `suspects` never passed. `apart` are the components cut off from the `main` one, `groups` the
    same by the name of a label. `trunks` with the number of failed pairs. `odd` pairs failed although both ends passed
    elsewhere and nothing explains them.
    """

    accused: dict[int, Failures] = field(default_factory=dict)
    pending: dict[int, Failures] = field(default_factory=dict)
    wanting: set[int] = field(default_factory=set)
    awaiting: dict[int, Failures] = field(default_factory=dict)
    apart: list[frozenset[int]] = field(default_factory=list)
    component: dict[int, frozenset[int]] = field(default_factory=dict)  # root -> members, where any failed across
    part: dict[int, int] = field(default_factory=dict)  # member of a part that is apart -> which
    main: frozenset[int] = frozenset()
    groups: list[Group] = field(default_factory=list)
    trunks: dict[Trunk, int] = field(default_factory=dict)
    paths: list[Pair] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    odd: list[Pair] = field(default_factory=list)

    def blamed(self) -> set[int]:
        """Members that the job must do without: accused or about to be, or cut off from the most."""
        cut = (members for _, _, members, inside in self.groups if not inside)
        return set(self.accused).union(self.pending, *self.apart, *cut)

    def explains(self) -> bool:
        """Whether anything is named that can be why the whole failed."""
        return bool(self.accused or self.pending or self.apart or self.groups or self.trunks or self.paths)

    def parts(self) -> list[frozenset[int]]:
        """The parts into which the network has come; none where it is in one."""
        return [self.main, *self.apart] if self.apart else []

    def is_over_trunk(self, ev: Evidence, pair: Pair) -> bool:
        """Whether a trunk explains why these two fail."""
        return not self.trunks.keys().isdisjoint(ev.crossing(*pair))


def judge(ev: Evidence) -> Judged:
    """All rules over all evidence; the order of names decides nothing but the order of answers."""
    found = Judged()
    live = [pair for pair in ev.bad_pairs if pair[0] != pair[1] and ev.own(pair)[0]]
    odd = sorted(pair for pair in live if ev.passes[pair[0]] and ev.passes[pair[1]])
    if any(ev.root(a) != ev.root(b) for a, b in odd):
        found.component = ev.components()
        found.main = next(iter(found.component.values()), frozenset())
        found.apart = find_apart(ev, odd, found.component)
        found.part = {v: i for i, part in enumerate(found.apart) for v in part}
        odd = [(a, b) for a, b in odd if found.part.get(a) == found.part.get(b)]
    found.trunks = find_trunks(ev, odd)
    odd = [pair for pair in odd if not found.is_over_trunk(ev, pair)]
    found.paths = [pair for pair in odd if is_path(ev, pair, odd)]
    explained = {*found.paths, *(pair for pair in live if found.is_over_trunk(ev, pair))}
    rest = [pair for pair in odd if pair not in explained]
    _accuse(ev, found, explained, rest)
    found.odd = [pair for pair in rest if found.accused.keys().isdisjoint(pair)]
    _hold_back(ev, found)
    found.groups = name_groups(ev, found.accused, found.apart)
    blamed = found.blamed()
    cut = frozenset[int]().union(*(members for _, _, members, inside in found.groups if not inside))
    found.accused = {v: counted for v, counted in found.accused.items() if v not in cut}
    found.paths = [pair for pair in found.paths if blamed.isdisjoint(pair)]
    found.odd = [pair for pair in rest if blamed.isdisjoint(pair)]
    if ev.count > 1 or (ev.first and len(ev.first.members) < len(ev.job)):
        found.suspects = [v for v in ev.job if not ev.passes[v] and v not in blamed]
    return found


def _accuse(ev: Evidence, found: Judged, explained: set[Pair], odd: list[Pair]) -> None:
    """Accuse until nobody is added: what an accused member explains makes its partners clean."""
    open_ends = {v for pair in odd for v in pair}
    waiting = {v for v in ev.fails if len(ev.fails[v]) > 1}
    new: set[int] | None = None
    while new is None or new:
        known, found.awaiting = set(found.accused), {}
        odd = [pair for pair in odd if known.isdisjoint(pair)]
        usual = chance_of(ev, odd)
        for v in waiting:
            counted = _clean_failures(ev, v, known, explained, found)
            slow = [(o, n) for o, n in counted if ev.tests[n].slow]
            hard = [(o, n) for o, n in counted if not ev.tests[n].slow]
            chance = usual if v not in open_ends else chance_of(ev, odd, (v,))
            if _is_enough(ev, v, hard, chance, known):
                found.accused[v] = counted
            elif _is_enough(ev, v, slow, chance, known):
                soft = all(ev.tests[n].soft for _, n in slow)
                (found.awaiting if soft else found.accused)[v] = slow
        new = waiting & found.accused.keys()
        waiting -= new


def _is_enough(ev: Evidence, v: int, counted: Failures, chance: float, known: set[int]) -> bool:
    """
    Whether these failures accuse v: alone or with different clean partners, two at least, and more than chance gives.

    One that passed elsewhere may be a healthy end of bad paths: as many of its failed pairs must have passed too as
    failed again, and one at least. A few of many tests accuse nobody. It may be tested until chance fails it often
    enough, so chance is never taken to be rarer than the setting says.
    """
    own = sum(o == v for o, _ in counted)
    failed = len({o for o, _ in counted if o != v}) + own
    tests = independent(v, (o for o, _ in counted))
    many = 1 if own and not ev.passes[v] else len(ev.job)  # who failed by itself was singled out by that
    usual = max(chance, ev.problem.false_alarm_ratio) if ev.passes[v] else chance
    if failed < 2 or is_chance(ev, many, ev.passes[v] + tests, tests, usual):
        return False
    if not ev.passes[v]:
        return True
    pairs = {(min(o, v), max(o, v)) for o, _ in counted}
    again = len(pairs & ev.good_pairs.keys())
    stable = sum(ev.own(pair)[0] > 1 and pair not in ev.good_pairs for pair in pairs)
    if again < max(1, stable) or tests * SOMETIMES_SHARE <= ev.pair_tests[v]:
        return False
    if failed > 2:
        return failed > 3 or ev.is_all_with({v} | known | {o for o in ev.fails if not ev.passes[o]})
    return ev.rounds >= SOMETIMES_ROUNDS and ev.is_all_with({v})


def _clean_failures(ev: Evidence, v: int, known: set[int], explained: set[Pair], found: Judged) -> Failures:
    """
    Failures of v that nothing named explains, alone or with witnesses against it.

    A witness passed, and whom else it failed with never did, or is named or cut off. Across the border of what is cut
    off one speaks against nobody who passed.
    """

    def is_told(o: int, p: int) -> bool:
        return p in known or (min(o, p), max(o, p)) in explained

    def is_clean(o: int) -> bool:
        if not ev.passes[o] or (found.apart and ev.passes[v] and ev.root(o) != ev.root(v)):
            return False
        others = (p for p, _ in ev.counted(o) if p not in (v, o) and ev.passes[p] and not is_told(o, p))
        return all(found.apart and found.part.get(p) != found.part.get(o) for p in others)

    return [(o, n) for o, n in ev.counted(v) if o == v or (not is_told(v, o) and is_clean(o))]


def _hold_back(ev: Evidence, found: Judged) -> None:
    """
    Nobody who never passed is accused before it was tried with those to whom it could belong.

    These are others who are to be named, members of each part of the network, and clean partners. Two are tried with
    each other twice: they may be cut off together, and have failed once by chance.
    """
    named = {v for v in found.accused if not ev.passes[v]}
    heard = {v for v in named if ev.silent[v] < SILENT}
    share, large = len(named) / len(ev.job), len(ev.job) > LARGE
    others = OTHERS_OF_MANY if share > 0.5 else OTHERS if ev.rounds < (6 if share > 0.25 else 4) else 1
    early = len(named) < (3 if share > 0.25 or large else 2) and ev.rounds < (5 if share > 0.25 else 3)
    doubt = found.odd or found.paths or found.trunks or found.apart
    few = DOUBT_WITNESSES if doubt else WITNESSES if early else 2
    taken = found.blamed().union(found.awaiting, *found.odd)
    clean = [o for o in ev.job if ev.passes[o] and ev.silent[o] < SILENT and o not in taken]
    for v in named:
        tried = sum(ev.own((min(o, v), max(o, v)))[0] for o in named.intersection(ev.met[v]))
        most = len(heard) - (v in heard)
        failed = {o for o, _ in ev.counted(v) if ev.passes[o]}
        lonely = tried < min(others, 2 if most == 1 and not (large and len(failed) >= WITNESSES) else most)
        if v not in ev.shown and len(failed) < few and ev.met[v] and any(o not in ev.met[v] for o in clean):
            found.wanting.add(v)
        if (ev.met[v] and lonely) or any(wants_part(ev, v, part) for part in found.parts()) or v in found.wanting:
            found.pending[v] = found.accused.pop(v)


def wants_part(ev: Evidence, v: int, part: frozenset[int]) -> bool:
    """Whether one who is to be named was tried with too few members of a part; slow beside others counts for slow."""
    met = part.intersection(ev.met[v])
    if any(not ev.tests[n].slow for _, n in ev.counted(v)):
        met = frozenset(o for o in met if not ev.is_soft((min(o, v), max(o, v))))
    return len(met) < min(OF_PART, len(part))
