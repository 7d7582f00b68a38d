"""
Who is to blame for what was seen: the rules of accusation, and nothing about what to test next.

All rules read the graph of passed tests (docs/localisation.md has the idea and the proof). Who passed is joined with
others; a failure between two who passed is a path, a trunk, or chance. Who never passed and failed with several who did
is a culprit, once it has been tried with all to whom it could belong: others who never passed, and each part cut off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from healthd.localize.evidence import Evidence, Pair
from healthd.localize.network import Trunk, find_apart, find_trunks, name_groups

# How much likelier than "one end is flaky" a path must be, whatever share of its tests a flaky member fails.
PATH_ODDS = 300.0
PATH_FAILS = 4  # tests of the pair itself: one that fails a fifth of its tests by chance fails four in a row in 0.8 %
# A member is worth more tests while the odds that it is flaky, one culprit in the fleet being expected, are above this.
OPEN_ODDS = 0.05
# What is taken for known before any test: that many failures by chance in that many tests of healthy members.
CHANCE_FAILS, CHANCE_TESTS = 0.03, 10.0
MOST_CHANCE = 0.25  # failures by chance are never taken to be more frequent than this

SOMETIMES_ROUNDS = 9  # from here on two failures accuse one that passes at times; before it takes three
SOMETIMES_TESTS = 10  # of so many tests and more two failures accuse nobody: chance alone makes that of a healthy one

WITNESSES, SMALL = 3, 128  # in a fleet of so many at most, who is named is tried so often in the first rounds
DOUBT_WITNESSES = 6  # the same wherever the network is at fault too

LARGE_PART = 4  # members of a part, of whom who is to be named is tried with two

FIRST_ROUNDS = 4  # three and more who are to be named are tried with each other in each of these
SECOND_OTHER = 6  # rounds in which a second other is looked for
FEW = 5  # who is to be named is tried with one other; where more than these and a quarter are, with more

Failures = list[tuple[int, int]]  # of a member: partner (itself: alone) and number of the test


@dataclass(kw_only=True)
class Judged:
    """
    What the evidence says now.

    `accused` maps a member to its counted (partner, test). `pending` would be accused, but were not tried with all to
    whom they could belong; those of them in `wanting` not with enough clean partners. `awaiting` would, but were only
    slow while others ran. `suspects` never passed. `apart` are the components cut off, `groups` the same by the name
    of a label: (label, value, members, whether they pass among themselves). `odd` pairs failed although both ends
    passed elsewhere and nothing explains them.
    """

    accused: dict[int, Failures] = field(default_factory=dict)
    pending: dict[int, Failures] = field(default_factory=dict)
    wanting: set[int] = field(default_factory=set)
    awaiting: dict[int, Failures] = field(default_factory=dict)
    apart: list[frozenset[int]] = field(default_factory=list)
    component: dict[int, frozenset[int]] = field(default_factory=dict)  # root -> members, where any failed across
    part: dict[int, int] = field(default_factory=dict)  # member of a part that is apart -> which
    main: frozenset[int] = frozenset()
    groups: list[tuple[str, str, frozenset[int], bool]] = field(default_factory=list)
    trunks: list[Trunk] = field(default_factory=list)
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


def judge(ev: Evidence) -> Judged:
    """All rules over all evidence; the order of names decides nothing but the order of answers."""
    found = Judged()
    live = [pair for pair, tests in ev.bad_pairs.items() if pair[0] != pair[1] and not ev.dropped.issuperset(tests)]
    odd = sorted(pair for pair in live if ev.passes[pair[0]] and ev.passes[pair[1]])
    if any(ev.root(a) != ev.root(b) for a, b in odd):
        found.component = {ev.root(part[0]): frozenset(part) for part in ev.components()}
        found.main, found.apart = find_apart(ev, odd, found.component)
        found.part = {v: i for i, part in enumerate(found.apart) for v in part}
        odd = [(a, b) for a, b in odd if found.part.get(a) == found.part.get(b)]
    found.trunks = find_trunks(ev, odd)
    odd = [pair for pair in odd if not any(trunk.explains(pair) for trunk in found.trunks)]
    found.paths = [pair for pair in odd if _is_path(ev, pair, odd)]
    explained = set(found.paths).union(pair for pair in live if any(one.explains(pair) for one in found.trunks))
    rest = [pair for pair in odd if pair not in explained]
    _accuse(ev, found, explained, rest)
    found.odd = [pair for pair in rest if found.accused.keys().isdisjoint(pair)]
    _hold_back(ev, found)
    name_groups(ev, found, found.groups)
    for _, _, members, inside in found.groups:
        if not inside:
            for v in members:
                found.accused.pop(v, None)
    blamed = found.blamed()
    found.paths = [pair for pair in found.paths if blamed.isdisjoint(pair)]
    found.odd = [pair for pair in rest if blamed.isdisjoint(pair)]
    if ev.count > 1 or (ev.first and len(ev.first.members) < len(ev.job)):
        found.suspects = [v for v in ev.job if not ev.passes[v] and v not in blamed and _is_suspect(ev, v, blamed)]
    return found


def _is_suspect(ev: Evidence, v: int, blamed: set[int]) -> bool:
    """Whether one who never passed is worth a test: not the witness of one in whom the whole showed the fault."""
    return v not in ev.fails or any(o not in blamed or o not in ev.shown for o, _ in ev.counted(v))


# --- chance -----------------------------------------------------------------------------------------------------------


def chance_of(ev: Evidence, odd: Iterable[Pair], without: Iterable[int] = ()) -> float:
    """
    The share of tests that healthy members fail, as learnt: from pairs that failed though both ends pass elsewhere.

    Pairs with a member in common count once, since that member may be the cause; `without`: pairs of these do not
    count, since whether they fail by chance is the question. The setting is an upper bound.
    """
    used = set(without)
    count = 0
    for a, b in odd:
        if a not in used and b not in used and not ev.is_soft((a, b)):
            used |= {a, b}
            count += 1
    bound = ev.problem.noise.false_alarm_ratio
    known = max(CHANCE_FAILS, bound * CHANCE_TESTS) + count + 2 * math.sqrt(count)  # an upper estimate
    return min(bound or MOST_CHANCE, known / (CHANCE_TESTS + ev.passed + count))


def _is_chance(ev: Evidence, many: float, tests: int, failed: int, chance: float) -> bool:
    """
    Whether chance alone gives one of `many` healthy ones so many failures in so many tests too often.

    The bound holds at any time that one looks: the failures can be chosen in `comb` ways among the tests.
    """
    return many * math.comb(max(tests, failed), failed) * chance**failed > ev.problem.noise.budget_ratio


def _is_path(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """A pair that fails each time, by itself, while both ends pass with others: too often for a flaky end or chance."""
    failed, passed = ev.own(pair)
    if passed or failed < PATH_FAILS or ev.is_soft(pair):
        return False
    if _is_chance(ev, ev.count, failed, failed, chance_of(ev, odd, pair)):
        return False
    others = ev.passes_apart(*pair)
    share = (failed - 1) / (failed - 1 + others)  # of failures of a flaky end for which this is likeliest
    return others > 0 and share ** (failed - 1) * (1 - share) ** others * PATH_ODDS <= 1


def is_open(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """Whether an end of an odd pair may yet turn out flaky: likelier than chance by enough."""
    for v in pair:
        chance = chance_of(ev, odd, (v,))
        flaky = ev.problem.noise.flaky_fail_ratio
        failed = len({o for o, _ in ev.counted(v)})
        odds = failed * math.log(flaky / chance) + ev.passes[v] * math.log((1 - flaky) / (1 - chance))
        if odds - math.log(len(ev.job)) > math.log(OPEN_ODDS):
            return True
    return False


# --- members ----------------------------------------------------------------------------------------------------------


def _accuse(ev: Evidence, found: Judged, explained: set[Pair], odd: list[Pair]) -> None:
    """Accuse until nobody is added: what an accused member explains makes its partners clean."""
    known: set[int] = set()
    usual = chance_of(ev, odd)
    open_ends = {v for pair in odd for v in pair}
    waiting = {v for v in ev.fails if len(ev.fails[v]) > 1 or v in ev.shown}
    while waiting:
        new: set[int] = set()
        for v in waiting:
            counted = _clean_failures(ev, v, known, explained, found)
            hard = [(o, n) for o, n in counted if not ev.tests[n].slow]
            slow = [(o, n) for o, n in counted if ev.tests[n].slow]
            chance = usual if v not in open_ends else chance_of(ev, odd, (v,))
            lone = all(v in pair for pair in odd) and not (known or found.apart or explained)
            if _is_enough(ev, v, hard, chance, lone=lone):
                found.accused[v] = counted
                found.awaiting.pop(v, None)
            elif not _is_enough(ev, v, slow, chance, lone=lone):
                _of_shown(ev, v, known, found)
            elif all(ev.tests[n].soft for _, n in slow):
                found.awaiting[v] = slow
            else:
                found.accused[v] = slow
                found.awaiting.pop(v, None)
            if v in found.accused:
                found.pending.pop(v, None)
                new.add(v)
        known |= new
        waiting -= new
        if not new:
            return
        odd = [pair for pair in odd if known.isdisjoint(pair)]
        usual = chance_of(ev, odd)


def _of_shown(ev: Evidence, v: int, known: set[int], found: Judged) -> None:
    """
    Accuse one in whom the failing whole itself saw the fault, and a pair again: died, hung, or sent wrong values.

    All others must have passed since without it; until its witness has, it may be the witness's fault.
    """
    tests = [ev.tests[n].members for n in ev.shown.get(v, ())]
    if ev.passes[v] or len(tests) < 2 or not any(not t.bad and v not in t.members for t in ev.large):
        return
    if any(not known.isdisjoint(members) for members in tests):
        return
    sure = all(ev.passes[o] for members in tests if len(members) == 2 for o in members if o != v)
    (found.accused if sure else found.pending)[v] = [(o, n) for o, n in ev.counted(v) if ev.passes[o]]


def _is_enough(ev: Evidence, v: int, counted: Failures, chance: float, *, lone: bool) -> bool:
    """
    Whether these failures accuse v: with two different clean partners at least, and more than chance would give.

    One that passed elsewhere may be a healthy end of several bad paths: not before one of its failed pairs has passed.
    Two failures of such a one are enough only once it is learnt from the others how often chance fails a test,
    and where they are not two of many.
    """
    alone = sum(o == v for o, _ in counted)
    failed = len({o for o, _ in counted if o != v}) + alone
    if failed < 2 or _is_chance(ev, len(ev.job), ev.passes[v] + failed, failed, chance):
        return False
    if not ev.passes[v] or alone:
        return True
    again = len({o for o, _ in counted if (min(o, v), max(o, v)) in ev.good_pairs})
    if failed > 2:
        pairs = {(min(o, v), max(o, v)) for o, _ in counted}
        stable = sum(ev.own(pair)[0] > 1 and pair not in ev.good_pairs for pair in pairs)
        return 0 < again >= stable and failed * 5 >= ev.pair_tests[v]
    return lone and again > 0 and ev.rounds >= SOMETIMES_ROUNDS and ev.pair_tests[v] < SOMETIMES_TESTS


def _clean_failures(ev: Evidence, v: int, known: set[int], explained: set[Pair], found: Judged) -> Failures:
    """Failures of v that nothing named explains, with partners that are otherwise clean."""
    counted = [
        (o, n)
        for o, n in ev.counted(v)
        if o == v
        or (o not in known and (min(o, v), max(o, v)) not in explained and _is_clean(ev, o, v, known, explained, found))
    ]
    if counted and ev.passes[v] and found.apart:  # across the border of what is cut off it speaks against nobody
        mine = ev.root(v)
        counted = [(o, n) for o, n in counted if o == v or ev.root(o) == mine]
    return counted


def _is_clean(ev: Evidence, o: int, v: int, known: set[int], explained: set[Pair], found: Judged) -> bool:
    """Whether o is a witness against v: it passed, and whom else it failed with never did, or is named or cut off."""
    if not ev.passes[o]:
        return False
    for p, _ in ev.counted(o):
        if p in (v, o) or p in known or not ev.passes[p] or (min(o, p), max(o, p)) in explained:
            continue
        if not found.apart or found.part.get(p) == found.part.get(o):
            return False
    return True


def _hold_back(ev: Evidence, found: Judged) -> None:
    """
    Nobody who never passed is accused before it was tried with those to whom it could belong.

    These are one other at least who is to be named, all that the first rounds allow, and a member of each part of the
    network. One or two in a small fleet are tried with a third clean partner too.
    """
    named = {v for v in found.accused if not ev.passes[v]}
    heard = {v for v in named if ev.silent[v] < 2}
    by_label: dict[tuple[str, str], set[int]] = {}
    for v in heard:
        for label in ev.labels[v]:
            by_label.setdefault(label, set()).add(v)
    share = len(named) / len(ev.job)
    some = len(named) > FEW and share > 0.25 and ev.rounds < SECOND_OTHER
    others = 6 if share > 0.5 else 2 if some or (len(named) == 3 and share < 0.4) else 1
    if ev.rounds < FIRST_ROUNDS and len(named) > 2:
        others = FIRST_ROUNDS
    clean = [o for o in ev.job if ev.passes[o] and ev.silent[o] < 2]
    for v in named:
        met = named.intersection(ev.met[v])
        near = set[int]().union(*(by_label.get(label, ()) for label in ev.labels[v])) - {v}
        lonely = len(met) < min(others, len(heard) - (v in heard)) or (near and near.isdisjoint(met))
        fails = {o for o, n in found.accused[v] if not ev.tests[n].slow}
        heard_of = {o for o in ev.met[v] if not fails or not ev.is_soft((min(o, v), max(o, v)))}
        unmet = any(len(part & heard_of) < _enough_of(part) for part in parts_of(found))
        if ev.met[v] and _wants_witness(ev, v, found, share, clean):
            found.wanting.add(v)
        if (ev.met[v] and lonely) or unmet or v in found.wanting:
            found.pending[v] = found.accused.pop(v)


def _wants_witness(ev: Evidence, v: int, found: Judged, share: float, clean: list[int]) -> bool:
    """
    Whether one who never passed is to be tried with a clean partner more.

    A healthy end of two bad paths meets just their other ends first too often: of 8 in one of 21. Where pairs fail
    between members that pass, the network is at fault somewhere: more of them.
    """
    failed = {o for o, _ in ev.counted(v) if ev.passes[o]}
    wanted = 2
    if found.odd or found.paths or found.trunks or found.apart:
        wanted = DOUBT_WITNESSES
    elif len(ev.job) <= SMALL and share * len(ev.job) < 3 and ev.rounds < (5 if share > 0.25 else WITNESSES):
        wanted = WITNESSES
    return v not in ev.shown and len(failed) < wanted and any(o not in ev.met[v] for o in clean)


def _enough_of(part: frozenset[int]) -> int:
    return 1 if len(part) < LARGE_PART else 2


def wants_part(ev: Evidence, v: int, part: frozenset[int]) -> bool:
    """Whether one who is to be named was tried with too few members of a part: of a large one with two, for chance."""
    return len(part.intersection(ev.met[v])) < _enough_of(part)


def parts_of(found: Judged) -> list[frozenset[int]]:
    """The parts into which the network has come; none where it is in one."""
    return [found.main, *found.apart] if found.apart else []
