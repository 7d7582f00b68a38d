"""
Which groups to test next, where disjoint groups run at once.

A generator: it yields the groups of a round with a sentence, finds their outcomes in the evidence when it goes on, and
ends when nothing more can be learnt. It accuses nobody; `judge` does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from healthd.localize.evidence import SILENT, Evidence, Ids, Pair, disjoint
from healthd.localize.judge import PATH_FAILS, Judged, chance_of, is_open, judge, wants_part
from healthd.localize.model import ScaleFault

LOOK = 64  # of those who are free, so many are looked at for the best partner
FEW = 4  # pairs and free ones, with whom pairs are formed anew where one has no partner

Ask = tuple[list[Ids], str]  # groups to test at once, and why
Steps = Generator[Ask, None, None]
Wish = tuple[bool, Callable[[], Iterable[Sequence[int]]], str]  # whether now, which groups, and why
Rank = Callable[[int, int], int | None]  # how good a partner the second is for the first: 0 is best, None: never

MOST_NEEDED = 8  # members that must all take part; for more of them the bound on rounds is too low
SPARED = 4  # members left out, one after another, before it is said that nobody can be spared
PAIRINGS = (((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (2, 3)))

ODD_PASSES = 8  # passes with others that each end of an odd pair shall have before the pair is tried again
SUSPECT_TESTS = 8  # of one who met all clean partners and never passed, where chance may still be why
MOST_ODD_TESTS = 30  # of an odd pair and its ends, after which it is left as it is
FILLED_ROUNDS = 9  # up to this round all others are tested beside odd pairs: chance is learnt from them
LINKS = 8  # members of a part that are tested with the main one in one round
PROBES = 3  # pairs across what may be a broken trunk, in one round

LAST_PAIR_ROUND = 9  # an intermittent failure of the whole is looked for in so many rounds of pairs
MANY = 3  # bad pairs without a member in common
LAST_WITHOUT_PASS = 8  # rounds after which a search in which nothing ever passed ends


def by_rounds(ev: Evidence, found: Found) -> Steps:
    """Test until each failure has a name or nothing more can be learnt."""
    while True:
        if ev.first is None:
            if ev.silent[ev.job[0]] >= SILENT:
                return
            yield [ev.job], "the whole again: the first run gave no outcome"
            continue
        judged = judge(ev)
        found.rest = rest_of(ev, judged)
        found.rest_passed = rest_state(ev, found.rest)
        if ev.rounds >= LAST_WITHOUT_PASS and not any(ev.passes):
            return
        if not ev.rounds and ev.shown:
            found.pair_rounds += 1
            yield [tuple(v for v in ev.job if v not in ev.shown)], "all without a fault so far, together"
            continue
        ask = with_rest(ev, judged, found) if found.pair_rounds or found.rest_passed is not False else None
        if ask is not None:
            yield ask
        elif len(found.rest) < 2 or (found.rest_passed and not (found.intermittent and found.rest == ev.job)):
            return
        elif found.rest_passed is None:
            if min(ev.silent[v] for v in found.rest) >= SILENT:
                return
            yield [found.rest, *named_pairs(ev, judged)], "all remaining members, together"
        elif (judged.paths or many(ev, judged.odd)) and len(found.rest) > 3:
            yield from grow(ev, found, {*judged.paths, *judged.odd})
            return
        elif not (yield from hidden(ev, found)):
            return


@dataclass(kw_only=True)
class Found:
    """What only the course of the tests tells, for the verdict. `grown`: the largest group found to pass, if sought."""

    rest: Ids = ()
    rest_passed: bool | None = None
    scale: ScaleFault | None = None
    intermittent: bool = False
    pair_rounds: int = 0
    grown: Ids | None = None


def final(ev: Evidence, groups: list[Ids], why: str) -> Ask:
    """The last round there is time for: all who remain together, unless that is known, beside what fits."""
    rest = tuple(v for v in rest_of(ev, judge(ev)) if ev.passes[v])
    if len(rest) < 2 or rest_state(ev, rest) is not None:
        return groups, why
    kept = [group for group in groups if not set(rest).intersection(group)]
    return [*kept, rest], "the last round: all remaining members, together"


def rest_of(ev: Evidence, judged: Judged) -> Ids:
    """Who remains without the blamed, one side of each trunk, one end of each path, and who is not yet understood."""
    out = judged.blamed() | set(judged.awaiting)
    for trunk in judged.trunks:
        out |= min(reversed(ev.sides(trunk)), key=len)
    ends = Counter(v for pair in judged.paths if out.isdisjoint(pair) for v in pair)
    for pair in judged.paths:  # first who is in most, else the later
        if out.isdisjoint(pair):
            out.add(max(pair, key=lambda v: (ends[v], v)))
    out |= {v for v in judged.suspects if ev.pair_tests[v] or ev.silent[v] >= SILENT}
    out.update(*in_doubt(ev, judged))
    return tuple(v for v in ev.job if v not in out)


def rest_state(ev: Evidence, rest: Ids) -> bool | None:
    """
    Whether the rest passed together when last tested; False also while it failed once and is not understood.

    Idle nodes may have joined since the whole failed: what fails in a part is taken to fail in the rest.
    """
    if len(rest) < 2:
        return True if rest and ev.passes[rest[0]] else None
    if (bad := ev.last(rest)) is not None:
        return not bad
    if ev.passed_together(rest):
        return True
    return False if any(any(bads) and group.issubset(rest) for group, bads in ev.large.items()) else None


def in_doubt(ev: Evidence, judged: Judged) -> list[Pair]:
    """
    The odd pairs that nothing explains yet: an end may be flaky, or the path between them bad.

    A single failure, and one that passed since, is no ground to go without anybody where a cause is named.
    """
    explained = judged.explains()
    return [
        pair
        for pair in judged.odd
        for failed, passed in [ev.own(pair)]
        if not settled(ev, pair, judged.odd) and not (explained and (failed == 1 or passed))
    ]


def passed_parts(ev: Evidence, members: Ids, apart: Collection[Pair]) -> list[Ids]:
    """Disjoint groups of these that passed and hold no pair of `apart`, the largest first; the others one by one."""
    wanted, used = frozenset(members), set[int]()
    groups = [group for group, bad in ev.large.items() if not all(bad) and not any(map(group.issuperset, apart))]
    groups += [frozenset(pair) for pair in ev.good_pairs if pair not in apart]
    parts: list[Ids] = []
    for group in sorted(groups, key=lambda group: (-len(group), sorted(group))):
        if group <= wanted and used.isdisjoint(group):
            used |= group
            parts.append(tuple(sorted(group)))
    return parts + [(v,) for v in members if v not in used]


def with_rest(ev: Evidence, judged: Judged, found: Found) -> Ask | None:
    """What is targeted now; beside it all that remain, together, where that takes nobody away."""
    doubt = found.rest_passed is False or not judged.explains() or bool(in_doubt(ev, judged))
    doubt = doubt and not many(ev, judged.odd)
    ask = targeted(ev, judged, odd=doubt)
    if ask is None:
        return alone(ev, judged, odd=doubt)
    groups, why = ask
    ready = found.rest_passed is None and judged.explains() and not judged.suspects and len(found.rest) > 1
    if ready and all(map(set(found.rest).isdisjoint, groups)) and min(ev.silent[v] for v in found.rest) < SILENT:
        return [*groups, found.rest], f"{why}; at the same time all remaining members, together"
    return ask


def hidden(ev: Evidence, found: Found) -> Generator[Ask, None, bool]:
    """The rest fails together and nobody in it is suspect: pairs, then the whole again, then search. False: the end."""
    limit = LAST_PAIR_ROUND if found.intermittent else ev.problem.pair_rounds
    if found.pair_rounds < (limit if len(found.rest) > 2 else 1):
        found.pair_rounds += 1
        if len(found.rest) > 2 or ev.last(found.rest) is None:  # the pair of two alone is the whole, which was measured
            yield shuffled_pairs(ev, found.rest, across=found.pair_rounds == 1), "shuffled pairs, all at once"
        return True
    if found.intermittent or found.scale is not None or len(found.rest) <= 2:
        return False
    if ev.large.get(frozenset(found.rest), []).count(True) < 2:
        if min(ev.silent[v] for v in found.rest) >= SILENT:
            return False
        yield [found.rest], "pairs are clean: the whole again"
        found.intermittent = rest_state(ev, found.rest) is True
        return True
    before = len(ev.bad_pairs)
    yield from smallest_failing(ev, found)
    return found.intermittent or len(ev.bad_pairs) > before


def many(ev: Evidence, odd: list[Pair]) -> bool:
    """
    Whether so many pairs without a common member failed twice and never passed that naming each takes too long.

    Twice as many as chance gives do not count: of those that failed once it fails its share again.
    """
    own = {pair: ev.own(pair) for pair in odd}
    twice = disjoint(pair for pair, (failed, passed) in own.items() if failed > 1 and not passed)
    return len(twice) >= 2 * MANY and len(twice) / 2 >= MANY + 2 * chance_of(ev, odd) * len(odd)


def alone(ev: Evidence, judged: Judged, *, odd: bool) -> Ask | None:
    """A slow pair by itself: one in a round."""
    for v, counted in sorted(judged.awaiting.items()):
        clean = [o for o, _ in counted if o != v and ev.passes[o]]
        if clean and ev.silent[v] < SILENT:
            return [(v, clean[-1])], f"{ev.names[v]} was slow while others ran: again, alone"
    for a, b in judged.odd if odd else ():
        if ev.is_soft((a, b)) and max(ev.silent[a], ev.silent[b]) < SILENT:
            return [(a, b)], f"{ev.names[a]} and {ev.names[b]} were slow while others ran: again, alone"
    return None


def targeted(ev: Evidence, judged: Judged, *, odd: bool) -> Ask | None:
    """All of it at once, most important first; `odd`: odd pairs too, since nothing else explains the failure."""
    out = judged.blamed() | set(judged.awaiting)
    doubtful = {v for pair in judged.odd for v in pair}
    clean = [v for v in ev.job if ev.passes[v] and v not in out and v not in doubtful and ev.silent[v] < SILENT]
    suspects = [v for v in judged.suspects if ev.silent[v] < SILENT and v not in judged.awaiting]
    pending = [v for v in judged.pending if ev.silent[v] < SILENT]
    if suspects or judged.pending or odd or judged.apart:
        ev.random("witnesses").shuffle(clean)
        clean.sort(key=lambda v: -len(ev.fails.get(v, ())))  # taken from the end
    # Who has no failure with a clean partner yet comes first: that decides most; of those, who failed at all.
    suspects.sort(key=lambda v: (sum(bool(ev.passes[o]) for o, _ in ev.counted(v)), v not in ev.fails))
    plan = Plan(clean=clean)
    for now, groups, why in _wishes(ev, judged, plan, suspects, pending, odd=odd):
        if now:
            plan.add(groups(), why)
    if not plan.groups:
        return None
    shown = [v for v in (*pending, *suspects, *sorted(doubtful)) if v in plan.busy]
    names, more = ", ".join(ev.say(shown)[:6]), len(shown) - 6
    said = "; ".join(plan.said) + (f": {names}" if names else "") + (f" and {more} more" if more > 0 else "")
    return plan.groups, said


@dataclass(kw_only=True)
class Plan:
    """A round as it is put together: its groups share no member."""

    clean: list[int]
    groups: list[Ids] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    said: list[str] = field(default_factory=list)

    def add(self, groups: Iterable[Sequence[int]], what: str) -> None:
        """Take in those groups whose members are free, and say what they are for."""
        for group in groups:
            if self.busy.isdisjoint(group):
                self.busy.update(group)
                self.groups.append(tuple(sorted(group)))
                self.said.extend([what] if what not in self.said else [])

    def free(self, members: Iterable[int] | None = None) -> list[int]:
        """Those of these, or of the clean, who are in no group yet."""
        return [v for v in (self.clean if members is None else members) if v not in self.busy]


def _wishes(
    ev: Evidence, judged: Judged, plan: Plan, suspects: list[int], pending: list[int], *, odd: bool
) -> Iterator[Wish]:
    """
    What to test, in the order of importance.

    Each wish is for members whom those before it have left free, so it is made once they are in the plan.
    """
    free = plan.free
    for part in judged.parts():
        yield True, partial(_with_part, ev, plan, pending, part), "parts of the network"
    wanting = [v for v in free(pending) if v in judged.wanting]
    yield True, lambda: witness_pairs(ev, free(suspects), free()), "suspects with clean partners"
    yield True, lambda: witness_pairs(ev, free(wanting), free()), "suspects with other clean partners"
    yield True, lambda: _with_known_witnesses(ev, plan, suspects), "suspects with clean partners again"
    yield True, lambda: _links(ev, judged, free()), "parts of the network with each other"
    yield odd, lambda: _odd(ev, judged, free(), plan.busy), "pairs that failed though both pass elsewhere"
    yield odd, lambda: _across(ev, judged, free()), "a trunk that may be broken"
    no_witness_left = not all(any(ev.passes[o] for o, _ in ev.counted(v)) for v in free(suspects))
    yield no_witness_left, lambda: _among(ev, free(suspects)), "suspects with each other"
    yield not pending and not suspects, lambda: _joined(ev, judged), "the members that are cut off, together"
    yield bool(plan.groups or pending), lambda: named_pairs(ev, judged, plan.busy), "suspects with each other"
    learn = odd and bool(plan.groups and judged.odd) and ev.rounds < FILLED_ROUNDS and not ev.is_near()
    yield learn, lambda: shuffled_pairs(ev, free(), across=False), "others, to learn how often they fail"


def _with_part(ev: Evidence, plan: Plan, pending: list[int], part: frozenset[int]) -> list[Ids]:
    """Those to be named who were tried with too few members of this part of the network, with members of it."""
    far = [v for v in pending if wants_part(ev, v, part)]
    return witness_pairs(ev, plan.free(far), plan.free(part))


def _with_known_witnesses(ev: Evidence, plan: Plan, suspects: list[int]) -> list[Ids]:
    known = [v for v in plan.free(suspects) if len(ev.met[v]) > 1 and ev.pair_tests[v] < SUSPECT_TESTS]
    return witness_pairs(ev, known, plan.free(), again=True)


def _among(ev: Evidence, left: list[int]) -> list[Ids]:
    ev.random("among").shuffle(left)
    return fresh_pairs(ev, left, near=False)


def _odd(ev: Evidence, judged: Judged, clean: list[int], busy: set[int]) -> list[Ids]:
    """Ends of odd pairs with others, those that each has passed with first: a failure then is not the path's."""
    ends: list[int] = []
    again: list[Ids] = []
    taken = set(busy)
    for pair in sorted(judged.odd, key=ev.own):
        one, other = (judged.component.get(ev.root(v), frozenset()) for v in pair)
        if one != other and any(o not in ev.met[v] for v in one for o in other):
            continue  # first whether the two parts reach each other at all
        if not taken.isdisjoint(pair) or max(ev.silent[v] for v in pair) >= SILENT:
            continue
        if settled(ev, pair, judged.odd) or ev.is_soft(pair):  # what was slow beside others is measured alone first
            continue
        failed, passed = ev.own(pair)
        enough = ev.passes_apart(*pair) >= ODD_PASSES
        enough = enough or any(sum(v in other for other in judged.odd) > 1 for v in pair)  # flaky, or several paths
        taken |= set(pair)
        if not clean or (not passed and (enough or not is_open(ev, pair, judged.odd)) and failed < PATH_FAILS):
            again.append(pair)
        else:
            ends += pair
    ends.sort(key=lambda v: ev.pair_tests[v])  # with one witness for two ends, in turn
    pairs: list[Ids] = []
    for v in ends:
        used = {o for pair in pairs for o in pair}
        free = [o for o in clean if o not in used]
        known = next((o for o in free if (min(o, v), max(o, v)) in ev.good_pairs), None)
        pairs += witness_pairs(ev, [v], free, again=True) if known is None else [(v, known)]
    return again + pairs


def _links(ev: Evidence, judged: Judged, clean: list[int]) -> list[Ids]:
    """Fresh pairs of the main component and each other one that failed with somebody outside of it."""
    failed = (judged.component.get(ev.root(v)) for pair in judged.odd for v in pair)
    wanted: list[int] = []
    for part in dict.fromkeys((*judged.apart, *failed)):
        if part and part != judged.main:
            ready = [v for v in part if ev.silent[v] < SILENT and judged.main.isdisjoint(o for o, _ in ev.counted(v))]
            wanted += sorted(ready)[:LINKS]
    return witness_pairs(ev, wanted, [v for v in clean if v in judged.main])


def _across(ev: Evidence, judged: Judged, clean: list[int]) -> list[Ids]:
    """Fresh pairs between the label values of an odd pair: is it the trunk between them?"""
    pairs: list[Ids] = []
    for trunk in (trunk for pair in judged.odd for trunk in ev.crossing(*pair)):
        if not ev.passed_across(trunk):
            sides = [[v for v in clean if v in side] for side in ev.sides(trunk)]
            pairs += [(a, b) for a, b in zip(*sides, strict=False) if b not in ev.met[a]][:PROBES]
    return pairs


def _joined(ev: Evidence, judged: Judged) -> list[Ids]:
    """Parts cut off that no label names: all in one group; if that fails, two by two."""
    parts = [part for _, _, part, inside in judged.groups if inside]
    if len(parts) < 2 or all(label for label, _, _, _ in judged.groups):
        return []
    union = tuple(sorted(frozenset[int]().union(*parts)))
    if ev.last(union) is None:
        return [union]
    twos = itertools.combinations(parts, 2)
    return [(min(one), min(other)) for one, other in twos if all(other.isdisjoint(ev.met[v]) for v in one)]


def named_pairs(ev: Evidence, judged: Judged, busy: Container[int] = ()) -> list[Ids]:
    """Who never passed and is to be named, with each other: whom that keeps, and who met the fewest, first."""
    named = {v for v in (*judged.pending, *judged.accused) if not ev.passes[v] and ev.silent[v] < SILENT}
    free = [v for v in sorted(named) if v not in busy]
    free.sort(key=lambda v: (v not in judged.pending, ev.labels[v], len(named.intersection(ev.met[v]))))
    return fresh_pairs(ev, free, near=True)


def settled(ev: Evidence, pair: Pair, odd: list[Pair]) -> bool:
    """Whether an odd pair is left: it passed again, and neither end is likely to be flaky; or it was tried enough."""
    failed, passed = ev.own(pair)
    if failed + passed + ev.passes_apart(*pair) > MOST_ODD_TESTS:
        return True
    return passed > 0 and not is_open(ev, pair, odd)


def grow(ev: Evidence, found: Found, apart: Collection[Pair]) -> Steps:
    """
    Put groups of the rest that passed together two by two, all at once, then the largest with one after another.

    What holds a pair of `apart` or a union that failed is never put together. A group that does not fit the largest for
    that is halved, and a single one left out.
    """
    failed = [frozenset(pair) for pair in apart]

    def fits(one: Ids, other: Ids) -> bool:
        return not any(map(frozenset(one + other).issuperset, failed))

    def fitting(part: Ids) -> list[Ids]:
        """Pieces of a part that may pass with the largest."""
        if fits(parts[0], part):
            return [part]
        middle = len(part) // 2
        return [*fitting(part[:middle]), *fitting(part[middle:])] if middle else []

    parts = passed_parts(ev, found.rest, apart)
    while len(parts := [parts[0], *(piece for part in parts[1:] for piece in fitting(part))]) > 1:
        left, unions = list(parts) if len(parts[0]) * 6 <= len(found.rest) else parts[:2], list[Ids]()
        while left:
            one = left.pop(0)
            if other := next((other for other in left[:64] if fits(one, other)), None):
                left.remove(other)
                unions.append(tuple(sorted(one + other)))
        yield unions, "groups that passed, combined"
        passed = {union for union in unions if ev.last(union) is False}
        failed += [frozenset(union) for union in unions if union not in passed]
        taken = {v for union in passed for v in union}
        parts = [*passed, *(part for part in parts if taken.isdisjoint(part))]
        parts.sort(key=lambda part: (-len(part), part))
    found.grown = parts[0]


def smallest_failing(ev: Evidence, found: Found) -> Steps:
    """Shrink the rest, to `found.scale`; None there if it comes and goes, or a bad pair was found, now in evidence."""
    failing = list(found.rest)
    ev.random("search").shuffle(failing)
    failing.sort(key=lambda v: ev.labels[v])  # a fault within one switch or rack stays within a block
    while len(failing) > 2 and (smaller := (yield from _halve(ev, failing))):
        failing = smaller
    if len(failing) > 2:
        lower = max(len(failing) // 2, 1)  # passes, or is a single member
        failing = failing[: (yield from _shortest(ev, [], failing, lower, "the smallest group that fails"))]
    if len(failing) == 2:
        return
    size = len(failing)
    yield [tuple(sorted(failing))], f"the smallest failing group, of {size}, again"
    others, any_group = [v for v in found.rest if v not in set(failing)], None
    if others:
        another = (others + failing)[:size]
        yield [tuple(sorted(another))], f"another group of {size}"
        any_group = ev.last(another)
    found.scale = _scale(ev, failing, any_group=any_group)
    if any_group is not True and not ev.passed_together(failing):
        yield from _needed(ev, found, failing)
    if ev.passed_together(ev.index[name] for name in found.scale.members):
        found.scale, found.intermittent = None, True


def _scale(ev: Evidence, members: Iterable[int], *, any_group: bool | None) -> ScaleFault:
    sizes = (len(group) for group, bad in ev.large.items() if not all(bad))
    largest = max(sizes, default=2 if ev.good_pairs else 0)
    return ScaleFault(members=ev.say(members), largest_passing=largest, any_group=any_group)


def _needed(ev: Evidence, found: Found, failing: list[int]) -> Steps:
    """It matters who takes part: find each who must, one after another. The last of a shortest beginning is one."""
    needed, others = failing[-1:], failing[:-1]
    for drop in others[:: -(-len(others) // SPARED)]:  # where nobody can be spared it is the number after all
        if (
            yield from _fails(
                ev,
                [v for v in failing if v != drop],
                f"without one of {len(failing)}",
            )
        ):
            break
    else:
        return
    while others and len(needed) < MOST_NEEDED:
        why = f"the members that must take part: {len(needed)} known"
        upper = yield from _shortest(ev, needed, others, 0 if len(needed) == 1 else -1, why)
        needed, others = [*needed, *others[:upper][-1:]], others[: max(0, upper - 1)]
        found.scale = _scale(ev, [*needed, *others], any_group=False)


def _shortest(ev: Evidence, needed: list[int], order: list[int], lower: int, why: str) -> Generator[Ask, None, int]:
    """How many of the first of an order fail with those needed, by bisection; all do, and `lower` are too few."""
    upper = len(order)
    while upper - lower > 1:
        middle = (lower + upper) // 2
        failed = yield from _fails(ev, needed + order[:middle], why)
        lower, upper = (lower, middle) if failed else (middle, upper)
    return upper


def _fails(ev: Evidence, group: list[int], why: str) -> Generator[Ask, None, bool]:
    """Whether a group fails; one that gives no outcome does not."""
    if len(group) > 1 and ev.last(group) is None and not ev.passed_together(group):
        yield [tuple(sorted(group))], why
    return ev.last(group) is True


def _halve(ev: Evidence, failing: list[int]) -> Generator[Ask, None, list[int] | None]:
    """A union of two of four blocks that fails, or None."""
    size = len(failing)
    blocks = [failing[size * i // 4 : size * (i + 1) // 4] for i in range(4)]
    for pairing in PAIRINGS:
        unions = [blocks[a] + blocks[b] for a, b in pairing if len(blocks[a] + blocks[b]) > 1]
        groups = [tuple(sorted(union)) for union in unions if not ev.passed_together(union)]
        if groups and not any(map(ev.last, unions)):
            yield groups, f"halves of the {size} that fail together"
        if failed := [union for union in unions if ev.last(union)]:
            return failed[0]
    return None


def matched(wanted: Iterable[int], free: Iterable[int], rank: Rank) -> list[Ids]:
    """
    Disjoint pairs: each wanted one, in this order, with a free one of the lowest rank, the last of `free` first.

    Who is wanted may be free too, and then is in one pair alone. Where they are few, one without a partner gets that of
    another who finds a new one.
    """
    left, used = list(free), set[int]()
    pairs: list[Ids] = []

    def best(v: int, but: int) -> int | None:
        found: tuple[int, int] | None = None
        for spot in range(len(left) - 1, max(-1, len(left) - 1 - LOOK), -1):
            o = left[spot]
            ranked = None if o in (v, but) or o in used else rank(v, o)
            if ranked is not None and (found is None or ranked < found[0]):
                found = (ranked, spot)
                if not ranked:
                    break
        return found and found[1]

    for v in wanted:
        while left and left[-1] in used:
            left.pop()
        if v in used:
            continue
        first, spot = v, best(v, v)
        if spot is None and len(pairs) + len(left) <= FEW:
            for i, (a, b) in enumerate(pairs):
                if rank(v, b) is not None and (spot := best(a, v)) is not None:
                    pairs[i], first = (v, b), a
                    break
        if spot is not None:
            pairs.append((first, left.pop(spot)))
            used.update((v, *pairs[-1]))
    return pairs


def shuffled_pairs(ev: Evidence, members: Sequence[int], *, across: bool) -> list[Ids]:
    """
    One round of disjoint pairs over all members, nobody with a partner met before where that can be had.

    `across` pairs by position in two halves ordered by labels, so that a label group below half of the fleet meets
    outsiders only: the first failure then tells of whole groups. Of an odd number one who was tested most waits. Where
    the whole was slow, pairs are within label groups instead, since many pairs across load the uplinks themselves.
    """
    order = list(members)
    ev.random("pairs").shuffle(order)
    near = ev.is_near() and any(ev.labels[v] for v in order)
    order.sort(key=lambda v: ev.labels[v] if near or across else (ev.pair_tests[v],))
    if across and not near:
        return list(zip(order[: len(order) // 2], order[len(order) // 2 :], strict=False))
    return matched(order, order[::-1], lambda v, o: 2 * (near and ev.labels[v] != ev.labels[o]) + (o in ev.met[v]))


def witness_pairs(ev: Evidence, wanted: Sequence[int], clean: Iterable[int], *, again: bool = False) -> list[Ids]:
    """
    Pair each wanted member, in this order, with a clean one that it has not met.

    Of those, one with no label in common with it, nor with the partners it failed with, comes first: a witness from the
    same switch is a poor one. Where the whole was slow it is one with the same labels, since those load no uplink.
    `again`: a partner met before will do where there is no other, first the one it was tested with least: failures with
    one partner alone may be the path between the two.
    """
    known = {v: {pair for o in (v, *(o for o, _ in ev.fails.get(v, ()))) for pair in ev.labels[o]} for v in wanted}

    def rank(v: int, o: int) -> int | None:
        if o in ev.met[v]:
            return 2 + sum(ev.own((min(o, v), max(o, v)))) if again else None
        near = ev.is_near() and ev.labels[v]
        return int(ev.labels[v] != ev.labels[o] if near else not known[v].isdisjoint(ev.labels[o]))

    return matched(wanted, dict.fromkeys(clean), rank)


def fresh_pairs(ev: Evidence, members: Sequence[int], *, near: bool) -> list[Ids]:
    """
    Disjoint pairs in this order of whom nobody has met, but two who are alone may meet again.

    `near`: with one that has a label in common first: they pass if they are only cut off. Who is left is of the last.
    """

    def fresh(v: int, o: int) -> int | None:
        return None if o in ev.met[v] and len(members) > 2 else 0

    def mate(v: int, o: int) -> int | None:
        return None if set(ev.labels[v]).isdisjoint(ev.labels[o]) else fresh(v, o)

    pairs = matched(members, members[::-1], mate) if near else []
    used = {v for pair in pairs for v in pair}
    left = [v for v in members if v not in used]
    return pairs + matched(left, left[::-1], fresh)
