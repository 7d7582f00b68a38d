"""
Who is to blame for what was seen: the rules of accusation, and nothing about what to test next.

A member is accused when pairs with enough different, otherwise clean partners failed; a pair that fails while both
ends pass with others is a path; a whole label group that cannot reach anybody outside is the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from healthd.localize.evidence import Evidence

# How much likelier than "one end is flaky" a path must be. 2 ** 9 at the usual flaky_fail_ratio of one half: nine
# outcomes that a flaky end would have given otherwise half of the time.
PATH_ODDS = 512.0
# A label group that is bad in every member is named as group when chance would do that less often.
GROUP_CHANCE = 0.01
# A member is worth more tests while the odds that it is flaky, one culprit in the fleet being expected, are above this.
OPEN_ODDS = 0.05


@dataclass(kw_only=True)
class Judged:
    """
    What the evidence says now.

    `accused` maps a member to its counted (partner, test). `awaiting` are those who would be accused but were only slow
    while others ran. `suspects` never passed. `odd` pairs failed although both ends passed elsewhere and nothing
    explains them. `groups`: (label, value) -> members.
    """

    accused: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    awaiting: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    groups: dict[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    paths: list[tuple[int, int]] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    odd: list[tuple[int, int]] = field(default_factory=list)

    def blamed(self) -> set[int]:
        """Members that the job must do without: accused, or in a group that is named."""
        return set(self.accused).union(*self.groups.values())


def is_enough(ev: Evidence, v: int, counted: list[tuple[int, int]]) -> bool:
    """
    Whether these failures accuse v: with two different clean partners at least.

    Under noise they must also be so much likelier for a bad member that all healthy members together reach it less
    often than the budget, however long one tests: a likelihood ratio of a true hypothesis exceeds K at any time with a
    probability of at most 1/K (Ville). Twice the members: a bad one may fail always or sometimes.
    """
    noise = ev.problem.noise
    if len({o for o, _ in counted}) + _alone(v, counted) < 2:
        return False
    if noise.false_alarm_ratio == 0:
        return True
    return log_likelihood(ev, len(counted), ev.passes[v]) >= math.log(2 * len(ev.job) / noise.budget_ratio)


def log_likelihood(ev: Evidence, failed: int, passed: int) -> float:
    """Log of how much likelier these outcomes are for a bad member (always or sometimes) than for a healthy one."""
    noise = ev.problem.noise
    floor = max(noise.false_alarm_ratio, 1e-6)
    healthy = failed * math.log(floor) + passed * math.log1p(-floor)
    flaky = failed * math.log(noise.flaky_fail_ratio) + passed * math.log1p(-noise.flaky_fail_ratio)
    return max(flaky, 0.0 if passed == 0 else -math.inf) - healthy


def judge(ev: Evidence) -> Judged:
    """All rules over all evidence; the order of names decides nothing but the order of answers."""
    found = Judged()
    _accuse(ev, found)
    _groups(ev, found)
    blamed = found.blamed()
    for pair, tests in sorted(ev.bad_pairs.items()):
        a, b = pair
        unexplained = a != b and blamed.isdisjoint(pair) and any(n not in ev.dropped for n in tests)
        if unexplained and ev.passes[a] and ev.passes[b]:
            (found.paths if _is_path(ev, pair) else found.odd).append(pair)
    if found.paths:  # what a path explains speaks against nobody, so others may be judged anew
        _accuse(ev, found)
        _groups(ev, found)
        blamed = found.blamed()
        found.paths = [pair for pair in found.paths if blamed.isdisjoint(pair)]
        found.odd = [pair for pair in found.odd if blamed.isdisjoint(pair)]
    if ev.problem.noise.false_alarm_ratio > 0:
        found.odd = [pair for pair in found.odd if any(_is_open(ev, v, found) for v in pair)]
    found.suspects = [v for v in ev.job if not ev.passes[v] and v not in blamed]
    return found


def _accuse(ev: Evidence, found: Judged) -> None:
    """Accuse until nobody is added: what an accused member explains makes its partners clean."""
    explained = set(found.paths)
    known = found.blamed()
    new: set[int] | None = None
    while new is None or new:
        new = set()
        for v in ev.fails:
            if v in known:
                continue
            counted = _clean_failures(ev, v, known, explained)
            if not is_enough(ev, v, counted):
                continue
            if all(ev.tests[n].soft for _, n in counted):
                found.awaiting[v] = counted
            else:
                found.accused[v] = counted
                found.awaiting.pop(v, None)
                new.add(v)
        known |= new


def _alone(v: int, counted: Iterable[tuple[int, int]]) -> int:
    """Failures of a group of one after the first: it has no partner to differ, so each is as good as a new one."""
    return max(0, sum(o == v for o, _ in counted) - 1)


def _clean_failures(ev: Evidence, v: int, known: set[int], explained: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Failures of v that neither a path nor an accused partner explains, with partners that are otherwise clean."""
    return [
        (o, n)
        for o, n in ev.counted(v)
        if o == v
        or (o not in known and (min(o, v), max(o, v)) not in explained and _is_clean(ev, o, v, known, explained))
    ]


def _is_clean(ev: Evidence, o: int, v: int, known: set[int], explained: set[tuple[int, int]]) -> bool:
    """Whether o is clean as a witness against v."""
    if not ev.passes[o]:
        return False
    others = [
        p for p, _ in ev.counted(o) if p not in (v, o) and p not in known and (min(o, p), max(o, p)) not in explained
    ]
    if ev.problem.noise.false_alarm_ratio > 0:
        return not others or log_likelihood(ev, len(others), ev.passes[o]) < 0
    # A pass clears o only where v itself never passed: the deterministic hypothesis. Its failures are with others of
    # that kind then; a failure with somebody who passes elsewhere makes o a doubtful witness.
    if not ev.passes[v]:
        return all(not ev.passes[p] for p in others)
    return not others


def _is_path(ev: Evidence, pair: tuple[int, int]) -> bool:
    """A pair that always fails while both ends pass with others, too often for a flaky end, or for noise."""
    noise = ev.problem.noise
    failed, passed = ev.with_both(*pair)
    alone = [n for n in ev.bad_pairs[pair] if n not in ev.dropped]
    if passed or failed < 2 or all(ev.tests[n].soft for n in alone):
        return False
    if len(ev.problem.members) * noise.false_alarm_ratio ** len(alone) > noise.budget_ratio:
        return False
    keep = -math.log1p(-noise.flaky_fail_ratio)
    again = -math.log(noise.flaky_fail_ratio)
    a, b = pair
    fewest = min(ev.passes_without(a, b), ev.passes_without(b, a))
    return fewest >= 1 and (failed - 1) * again + fewest * keep >= math.log(PATH_ODDS) - 1e-9


def _is_open(ev: Evidence, v: int, found: Judged) -> bool:
    """Under noise: whether v may yet turn out flaky."""
    failed = len(_clean_failures(ev, v, found.blamed(), set(found.paths)))
    return log_likelihood(ev, failed, ev.passes[v]) - math.log(len(ev.job)) > math.log(OPEN_ODDS)


def _groups(ev: Evidence, found: Judged) -> None:
    """Name label groups in place of their members, the largest first."""
    for (label, value), members in candidates(ev):
        if any(members <= named for named in found.groups.values()):
            continue
        inside_bad, inside_passed = _inside(ev, members)
        outside = [v for v in ev.job if v not in members]
        bad_outside = sum(v in found.accused or not ev.passes[v] for v in outside)
        chance = ((bad_outside + 1) / (len(outside) + 2)) ** len(members)
        if inside_passed or (chance <= GROUP_CHANCE and members <= set(found.accused)):
            if inside_passed and inside_bad:
                continue  # some of it works: not one cause
            found.groups[label, value] = members
    named = set().union(*found.groups.values())
    _uphold(ev, found, named)


def _uphold(ev: Evidence, found: Judged, named: set[int]) -> None:
    """Take back accusations that rest on failures across the border of a named group."""
    for v in list(found.accused):
        kept = [(o, n) for o, n in found.accused[v] if o not in named]
        if v in named or not is_enough(ev, v, kept):
            del found.accused[v]
    for v in list(found.awaiting):
        if v in named:
            del found.awaiting[v]


def candidates(ev: Evidence) -> list[tuple[tuple[str, str], frozenset[int]]]:
    """Label groups of which each member failed with somebody outside, and none ever passed with anybody outside."""
    by_label: dict[tuple[str, str], set[int]] = {}
    for v in ev.job:
        if ev.fails.get(v):
            for pair in ev.labels[v]:
                by_label.setdefault(pair, set()).add(v)
    sizes: dict[tuple[str, str], int] = {}
    for v in ev.job:
        for pair in ev.labels[v]:
            if pair in by_label:
                sizes[pair] = sizes.get(pair, 0) + 1
    failing = {k: frozenset(m) for k, m in by_label.items() if 2 <= len(m) == sizes[k] < len(ev.job)}
    crossing = {
        k: m for k, m in failing.items() if all(any(o not in m and ev.passes[o] for o, _ in ev.counted(v)) for v in m)
    }
    for test in ev.tests:
        if not test.bad and len(test.members) > 1:
            for key in {pair for v in test.members for pair in ev.labels[v]} & crossing.keys():
                if not test.members <= crossing[key]:
                    del crossing[key]
        if not crossing:
            break
    clean = {k: m for k, m in crossing.items() if _outside_clean(ev, m)}
    return sorted(clean.items(), key=lambda item: (-len(item[1]), item[0]))


def _outside_clean(ev: Evidence, members: frozenset[int]) -> bool:
    """At least two different outsiders who pass among themselves are witnesses that the group is cut off."""
    witnesses = {o for v in members for o, _ in ev.counted(v) if o not in members and ev.passes[o]}
    return len(witnesses) >= 2


def _inside(ev: Evidence, members: frozenset[int]) -> tuple[int, int]:
    """Failed and passed tests of members with one another."""
    bad = sum(o in members and o != v for v in members for o, _ in ev.counted(v))
    passed = sum(not t.bad and len(t.members) > 1 and t.members <= members for t in ev.tests)
    return bad, passed


def inside_of(ev: Evidence, members: frozenset[int]) -> bool | None:
    """Whether a group passes among itself; None when that was not measured."""
    bad, passed = _inside(ev, members)
    return True if passed else (False if bad else None)
