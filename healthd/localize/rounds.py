"""
Which groups to test next, where disjoint groups run at once.

A generator: it yields the groups of a round with a sentence, finds their outcomes in the evidence when it goes on, and
ends when nothing more can be learnt. It accuses nobody; `judge` does.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from healthd.localize import search
from healthd.localize.evidence import Evidence, Ids
from healthd.localize.judge import Judged, inside_of, judge
from healthd.localize.pairing import among_themselves, shuffled_pairs, witness_pairs

Ask = tuple[list[Ids], str]
Steps = Generator[Ask, None, None]

SILENT = 2  # outcomes unknown in a row after which a member is no longer asked
ODD_PASSES = 8  # passes with others that each end of an odd pair shall have before the pair is tried again
LAST_PAIR_ROUND = 9  # an intermittent failure of the whole is looked for in so many rounds of pairs


@dataclass(kw_only=True)
class Found:
    """What only the course of the tests tells, for the verdict."""

    rest: Ids = ()
    rest_passed: bool | None = None
    scale: search.Scale | None = None
    intermittent: bool = False
    pair_rounds: int = 0
    whole_again: int = 0


def by_rounds(ev: Evidence, found: Found) -> Steps:
    """Test until each failure has a name or nothing more can be learnt."""
    while True:
        if not ev.tests:
            if ev.silent[ev.job[0]] >= SILENT:
                return
            yield [ev.job], "the whole again: it gave no outcome"
            continue
        judged = judge(ev)
        found.rest = rest_of(ev, judged)
        found.rest_passed = rest_state(ev, found.rest)
        ask = None
        if found.pair_rounds or found.rest_passed is not False:
            ask = targeted(ev, judged) or alone(ev, judged) or inside(ev, judged)
        if ask is not None:
            yield ask
        elif len(found.rest) < 2 or (found.rest_passed and not (found.intermittent and found.rest == ev.job)):
            return
        elif found.rest_passed is None:
            if min(ev.silent[v] for v in found.rest) >= SILENT:
                return
            yield [found.rest], "all that remain, together"
        elif not (yield from hidden(ev, found)):
            return


def rest_of(ev: Evidence, judged: Judged) -> Ids:
    """Who remains without the blamed, one end of each path, and those of whom nothing certain is known."""
    blamed = judged.blamed()
    whole = [members for members in judged.groups.values() if inside_of(ev, members)]
    if whole and blamed >= set(ev.job):  # cut off from each other: one of them can go on
        goes_on = max(whole, key=lambda members: (len(members), -min(members)))
        blamed -= goes_on
    out = blamed | {max(pair) for pair in judged.paths} | set(judged.awaiting)
    out |= {v for pair in judged.odd for v in pair}
    if any(ev.pair_tests[v] for v in ev.job):
        out |= {v for v in judged.suspects if ev.pair_tests[v] or ev.silent[v] >= SILENT}
    return tuple(v for v in ev.job if v not in out)


def rest_state(ev: Evidence, rest: Ids) -> bool | None:
    """
    Whether the rest passed together when last tested; False also while it failed once and is not understood.

    Idle nodes may have joined since the whole failed: what fails in a part is taken to fail in the rest.
    """
    if len(rest) < 2:
        return True if rest and ev.passes[rest[0]] else None
    seen = ev.history(rest)
    if seen:
        return not seen[-1]
    if ev.passed_together(rest):
        return True
    return False if ev.failed_inside(rest) else None


def targeted(ev: Evidence, judged: Judged) -> Ask | None:
    """Suspects and ends of odd pairs, each with a clean partner, all at once; suspects left over with each other."""
    suspects = [v for v in judged.suspects if ev.silent[v] < SILENT]
    odd, repeat = _odd(ev, judged)
    used = {v for pair in repeat for v in pair}
    doubtful = {v for pair in judged.odd for v in pair}
    blamed = judged.blamed() | set(judged.awaiting)
    suspects = [v for v in suspects if v not in judged.awaiting]
    out = doubtful | used | blamed
    clean = [v for v in ev.job if ev.passes[v] and v not in out and ev.silent[v] < SILENT]
    ev.random("witnesses").shuffle(clean)
    clean.sort(key=lambda v: -len(ev.fails.get(v, ())))  # taken from the end
    # Who has no failure with a clean partner yet comes first: that decides most.
    suspects.sort(key=lambda v: sum(bool(ev.passes[o]) for o, _ in ev.counted(v)))
    pairs = witness_pairs(ev, suspects, clean)
    taken = {v for pair in pairs for v in pair}
    free = [v for v in clean if v not in taken]
    pairs += witness_pairs(ev, odd, free, again=True)
    left = [v for v in suspects if v not in taken]
    if left and not _all_but_proved(ev, left):
        pairs += among_themselves(ev, left)
    pairs += repeat
    if not pairs:
        return None
    names = ", ".join(ev.say(suspects + odd)[:6]) or ", ".join(ev.say(used)[:6])
    more = len(suspects) + len(odd) - 6
    return pairs, f"suspects with clean partners: {names}" + (f" and {more} more" if more > 0 else "")


def _all_but_proved(ev: Evidence, left: Sequence[int]) -> bool:
    """Whether all have a failure with a clean partner: testing them with each other says nothing then."""
    return all(any(ev.passes[o] for o, _ in ev.counted(v)) for v in left)


def _odd(ev: Evidence, judged: Judged) -> tuple[list[int], list[Ids]]:
    """Ends of odd pairs to test with others, and odd pairs to test again."""
    ends: list[int] = []
    repeat: list[Ids] = []
    busy: set[int] = set()
    noisy = ev.problem.noise.false_alarm_ratio > 0
    others = len(ev.job) - len(judged.blamed()) - 2
    for a, b in judged.odd:
        if a in busy or b in busy:
            continue
        failed, passed = ev.with_both(a, b)
        fewest = min(ev.passes_without(a, b), ev.passes_without(b, a))
        if (passed and fewest >= LAST_PAIR_ROUND) or fewest + failed > 3 * LAST_PAIR_ROUND:
            continue  # neither flaky nor path can be shown
        if all(ev.tests[n].soft for n in ev.bad_pairs[a, b] if n not in ev.dropped):
            continue  # to be measured alone first
        if not passed and fewest >= 1 and (fewest >= ODD_PASSES or others < 2) and not noisy:
            repeat.append((a, b))
        elif others > 0:
            ends += [v for v in (a, b) if ev.silent[v] < SILENT]
        busy |= {a, b}
    return sorted(ends, key=lambda v: ev.pair_tests[v]), repeat  # with one witness for two ends, in turn


def alone(ev: Evidence, judged: Judged) -> Ask | None:
    """A slow pair by itself: one in a round."""
    for v, counted in sorted(judged.awaiting.items()):
        clean = [o for o, _ in counted if o != v and ev.passes[o]]
        if clean and ev.silent[v] < SILENT:
            return [(v, clean[-1])], f"{ev.names[v]} was slow while others ran: again, alone"
    for a, b in judged.odd:
        tests = [n for n in ev.bad_pairs[a, b] if n not in ev.dropped]
        if tests and all(ev.tests[n].soft for n in tests) and max(ev.silent[a], ev.silent[b]) < SILENT:
            return [(a, b)], f"{ev.names[a]} and {ev.names[b]} were slow while others ran: again, alone"
    return None


def inside(ev: Evidence, judged: Judged) -> Ask | None:
    """Members of a named group with one another: is it the way out, or all of it?"""
    pairs: list[Ids] = []
    busy: set[int] = set()  # groups of two labels may overlap
    for _, members in sorted(judged.groups.items()):
        order = sorted(members)
        if inside_of(ev, members) is None and busy.isdisjoint(order) and all(ev.silent[v] < SILENT for v in order):
            pairs += [(order[i], order[i + 1]) for i in range(0, len(order) - 1, 2)]
            busy |= members
    return (pairs, "the named group among itself") if pairs else None


def hidden(ev: Evidence, found: Found) -> Generator[Ask, None, bool]:
    """The rest fails together and nobody in it is suspect: pairs, then the whole again, then search. False: the end."""
    limit = LAST_PAIR_ROUND if found.intermittent else ev.problem.bounds.pair_rounds
    if found.pair_rounds < (limit if len(found.rest) > 2 else 1):
        pairs = shuffled_pairs(ev, found.rest, across=not found.pair_rounds)
        if set(pairs[:1]) == {found.rest}:
            pairs = []  # two alone: their pair is the whole, which was measured
        found.pair_rounds += 1
        if pairs:
            yield pairs, "shuffled pairs, all at once"
        return True
    if found.intermittent or found.scale is not None or len(found.rest) <= 2:
        return False
    if ev.history(found.rest).count(True) < _persistent(ev):
        if found.whole_again > _persistent(ev):
            return False
        found.whole_again += 1
        yield [found.rest], "pairs are clean: the whole again"
        found.intermittent = _is_intermittent(ev, found)
        return True
    before = len(judge(ev).odd) + len(judge(ev).paths)
    found.scale = yield from search.smallest_failing(ev, found.rest)
    if found.scale is not None and search.contradicted(ev, found.scale.members):
        found.scale, found.intermittent = None, True
        return True
    after = judge(ev)
    return len(after.odd) + len(after.paths) > before


def _persistent(ev: Evidence) -> int:
    """How often a whole must fail before it is searched: twice, or as often as noise makes rarer than the budget."""
    noise, times = ev.problem.noise, 2
    while noise.false_alarm_ratio ** (times - 1) > noise.budget_ratio:
        times += 1
    return times


def _is_intermittent(ev: Evidence, found: Found) -> bool:
    """Whether the whole passes at times; under noise one failure that does not come back is noise."""
    return found.intermittent or (ev.problem.noise.false_alarm_ratio == 0 and rest_state(ev, found.rest) is True)
