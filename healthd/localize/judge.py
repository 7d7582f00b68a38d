"""
Who is to blame for what was seen: the rules of accusation, and nothing about what to test next.

All rules read the graph of passed tests; docs/localisation.md has the idea and the proof.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from healthd.localize.chance import chance_of, independent, is_chance, is_path
from healthd.localize.evidence import SILENT, Evidence, Pair, Trunk
from healthd.localize.network import Group, find_apart, find_trunks, name_groups

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
