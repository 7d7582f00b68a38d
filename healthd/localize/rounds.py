"""
Which groups to test next, where disjoint groups run at once.

A generator: it yields the groups of a round with a sentence, finds their outcomes in the evidence when it goes on, and
ends when nothing more can be learnt. It accuses nobody; `judge` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from healthd.localize import search
from healthd.localize.chance import chance_of
from healthd.localize.evidence import SILENT, Ask, Evidence, Ids, Pair, Steps, disjoint
from healthd.localize.judge import Judged, judge
from healthd.localize.pairing import shuffled_pairs
from healthd.localize.search import Found
from healthd.localize.targets import alone, named_pairs, settled, targeted

LAST_PAIR_ROUND = 9  # an intermittent failure of the whole is looked for in so many rounds of pairs
MANY = 3  # bad pairs without a member in common
LAST_WITHOUT_PASS = 8  # rounds after which a search in which nothing ever passed ends


def by_rounds(ev: Evidence, found: Found) -> Steps:
    """Test until each failure has a name or nothing more can be learnt."""
    while True:
        if ev.first is None:
            if ev.silent[ev.job[0]] >= SILENT:
                return
            yield [ev.job], "the whole again: it gave no outcome"
            continue
        judged = judge(ev)
        found.rest = rest_of(ev, judged)
        found.rest_passed = rest_state(ev, found.rest)
        if ev.rounds >= LAST_WITHOUT_PASS and not any(ev.passes):
            return
        if not ev.rounds and ev.shown:
            found.pair_rounds += 1
            yield [tuple(v for v in ev.job if v not in ev.shown)], "all but who showed a fault, together"
            continue
        ask = with_rest(ev, judged, found) if found.pair_rounds or found.rest_passed is not False else None
        if ask is not None:
            yield ask
        elif len(found.rest) < 2 or (found.rest_passed and not (found.intermittent and found.rest == ev.job)):
            return
        elif found.rest_passed is None:
            if min(ev.silent[v] for v in found.rest) >= SILENT:
                return
            yield [found.rest, *named_pairs(ev, judged)], "all that remain, together"
        elif (judged.paths or many(ev, judged.odd)) and len(found.rest) > 3:
            yield from search.grow(ev, found, {*judged.paths, *judged.odd})
            return
        elif not (yield from hidden(ev, found)):
            return


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
        return [*groups, found.rest], f"{why}; beside that all that remain, together"
    return ask


def final(ev: Evidence, groups: list[Ids], why: str) -> Ask:
    """The last round there is time for: all who remain together, unless that is known, beside what fits."""
    rest = tuple(v for v in rest_of(ev, judge(ev)) if ev.passes[v])
    if len(rest) < 2 or rest_state(ev, rest) is not None:
        return groups, why
    kept = [group for group in groups if not set(rest).intersection(group)]
    return [*kept, rest], "the last round: all that remain, together"


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


def many(ev: Evidence, odd: list[Pair]) -> bool:
    """
    Whether so many pairs without a common member failed twice and never passed that naming each takes too long.

    Twice as many as chance gives do not count: of those that failed once it fails its share again.
    """
    own = {pair: ev.own(pair) for pair in odd}
    twice = disjoint(pair for pair, (failed, passed) in own.items() if failed > 1 and not passed)
    return len(twice) >= 2 * MANY and len(twice) / 2 >= MANY + 2 * chance_of(ev, odd) * len(odd)


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
    yield from search.smallest_failing(ev, found)
    return found.intermittent or len(ev.bad_pairs) > before
