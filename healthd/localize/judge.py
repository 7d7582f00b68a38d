"""
Which members are at fault: the rules of accusation. It does not decide what to test next.

All rules read the graph of passed tests: what it says of the network, and how often chance makes healthy members fail.
docs/localisation_rules.md has the idea and the proof.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from healthd.localize.evidence import SILENT, Evidence, Pair, Trunk, disjoint

Group = tuple[str, str, frozenset[int], bool]  # label, value, members, whether these pass among themselves
Failures = list[tuple[int, int]]  # of a member: partner (itself: alone) and number of the test

TRUNK_PAIRS = 3  # pairs without a member in common that must fail across before a trunk is named
GROUP_CHANCE = 0.01  # a label group that is bad in every member is named as group when chance does that less often

# How much likelier than "one end is flaky" a path must be, whatever share of its tests a flaky member fails.
PATH_ODDS = 300.0
PATH_FAILS = 4  # tests of the pair itself: one that fails a fifth of its tests by chance fails four in a row in 0.8 %
BUDGET = 0.001  # false accusations accepted for each validation of a whole healthy fleet
FLAKY = 0.5  # how often a flaky member makes its group fail, which decides how long one is looked for
OPEN_ODDS = 0.05  # a member is worth more tests while its odds of being flaky, one culprit being expected, are above
# What is taken for known before any test, at least: that many failures by chance in that many tests of healthy members.
CHANCE_FAILS, CHANCE_TESTS = 0.03, 10.0
MOST_CHANCE = 0.25  # failures by chance are never taken to be more frequent than this

SOMETIMES_ROUNDS = 9  # from here on two failures accuse one that passes at times; before it takes three
SOMETIMES_SHARE = 5  # one that passes at times is accused only where more than one in so many of its tests failed

LARGE = 128  # members of a fleet in which chance fails two tests of one likelier than the one test of two cut off
FREQUENT, MOST_OF_ALL = 0.25, 0.5  # shares of all members who are to be named, above which more partners are needed
WITNESSES = 3  # clean partners with whom one or two who are to be named are tried in the first rounds
DOUBT_WITNESSES = 6  # the same for all wherever the network is at fault too
OF_PART = 2  # members of each part of the network with whom who is to be named is tried
# With how many others each who is to be named is tried: in the first four rounds, or six where more than a quarter are;
# and at any time where more than half are. After that with one.
OTHERS, OTHERS_OF_MANY = 4, 6


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


def wants_part(ev: Evidence, v: int, part: frozenset[int]) -> bool:
    """Whether one who is to be named was tried with too few members of a part; slow beside others counts for slow."""
    met = part.intersection(ev.met[v])
    if any(not ev.tests[n].slow for _, n in ev.counted(v)):
        met = frozenset(o for o in met if not ev.is_soft((min(o, v), max(o, v))))
    return len(met) < min(OF_PART, len(part))


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


def is_open(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """Whether an end of an odd pair may yet turn out flaky: likelier than chance by enough."""
    for v in pair:
        chance = chance_of(ev, odd, (v,))
        failed = independent(v, (o for o, _ in ev.counted(v)))
        odds = failed * math.log(FLAKY / chance) + ev.passes[v] * math.log((1 - FLAKY) / (1 - chance))
        if odds - math.log(len(ev.job)) > math.log(OPEN_ODDS):
            return True
    return False


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

    These are others who are to be named, members of each part of the network, and clean partners.
    """
    named = {v for v in found.accused if not ev.passes[v]}
    needed = _needed(ev, found, named)
    taken = found.blamed().union(found.awaiting, *found.odd)
    clean = [o for o in ev.job if ev.passes[o] and ev.silent[o] < SILENT and o not in taken]
    for v in named:
        if _lacks_witnesses(ev, v, clean, needed):
            found.wanting.add(v)
        lonely = _lacks_others(ev, v, named, needed)
        if lonely or v in found.wanting or any(wants_part(ev, v, part) for part in found.parts()):
            found.pending[v] = found.accused.pop(v)


@dataclass(frozen=True, kw_only=True)
class Needed:
    """
    With how many each one who never passed is tried before it is accused. docs/localisation_rules.md says why.

    `others` are to be named too, `witnesses` are clean partners. `settles_twos`: with how many clean partners one of
    two who are to be named need not be tried with the other twice; None: it must be, however many.
    """

    others: int
    witnesses: int
    settles_twos: int | None


def _needed(ev: Evidence, found: Judged, named: Collection[int]) -> Needed:
    share, large = len(named) / len(ev.job), len(ev.job) > LARGE
    frequent = share > FREQUENT
    if share > MOST_OF_ALL:
        others = OTHERS_OF_MANY
    elif ev.rounds < (6 if frequent else 4):
        others = OTHERS
    else:
        others = 1
    first_rounds = ev.rounds < (5 if frequent else 3)
    few_named = len(named) < (3 if frequent or large else 2)
    if found.odd or found.paths or found.trunks or found.apart:
        witnesses = DOUBT_WITNESSES
    else:
        witnesses = WITNESSES if first_rounds and few_named else 2
    return Needed(others=others, witnesses=witnesses, settles_twos=WITNESSES if large else None)


def _lacks_others(ev: Evidence, v: int, named: Collection[int], needed: Needed) -> bool:
    """
    Whether it was tried with too few others who are to be named.

    Two are tried with each other twice: they may be cut off together, and have failed once by chance.
    """
    within_reach = sum(o != v and ev.silent[o] < SILENT for o in named)
    if within_reach == 1:
        settled = needed.settles_twos is not None and len(_clean_partners(ev, v)) >= needed.settles_twos
        wanted = 1 if settled else 2
    else:
        wanted = within_reach
    tried = sum(ev.own((min(o, v), max(o, v)))[0] for o in ev.met[v].intersection(named))
    return bool(ev.met[v]) and tried < min(needed.others, wanted)


def _lacks_witnesses(ev: Evidence, v: int, clean: Iterable[int], needed: Needed) -> bool:
    """Whether it failed with too few clean partners, and there are more. One in whom a fault was seen needs none."""
    if v in ev.shown or not ev.met[v] or len(_clean_partners(ev, v)) >= needed.witnesses:
        return False
    return any(o not in ev.met[v] for o in clean)


def _clean_partners(ev: Evidence, v: int) -> set[int]:
    """With whom it failed though they pass elsewhere."""
    return {o for o, _ in ev.counted(v) if ev.passes[o]}


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
