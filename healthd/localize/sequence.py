"""
Tests one after another: group testing with an unknown number of culprits, under the deterministic hypothesis.

Each test is the group whose outcome is most uncertain, given what is known about the share of culprits: a posterior
over that share, learnt as tests go (the nested procedure of Sobel and Groll, 1959, with the share unknown). A culprit
is named only after two failures in which all others were clean, and no other in both: a path could be one of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field

from healthd.localize.evidence import Evidence, Ids

Steps = Generator[tuple[list[Ids], str], None, None]

SHARES = tuple(10 ** (-3.5 + 3.2 * i / 31) for i in range(32))  # 0.03 % to 50 %, evenly by logarithm


@dataclass(kw_only=True)
class Sequence:
    """How far it came. `contradiction`: what failed as a group passed in parts, so the hypothesis does not hold."""

    culprits: dict[int, int] = field(default_factory=dict)  # culprit -> the clean partner it failed with
    clean: list[int] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)  # nothing is known of these
    tainted: list[int] = field(default_factory=list)  # at least one of these is bad
    aside: list[list[int]] = field(default_factory=list)  # tainted twos, until somebody clean can tell them apart
    contradiction: tuple[int, ...] = ()
    done: bool = False
    rest_passed: bool | None = None


def one_by_one(ev: Evidence, state: Sequence) -> Steps:
    """Test until every member is clean or a culprit."""
    order = list(ev.job)
    ev.random("sequence").shuffle(order)
    if ev.history(ev.job)[-1:] != [True]:
        state.done = bool(ev.history(ev.job))
        state.rest_passed = True if state.done else None
        return
    state.tainted = order
    while state.tainted or state.pool or state.aside:
        _put_aside(state)
        group = _next(state)
        if group is None:
            return  # too few are clean to tell those who are left apart
        partner = _partner(ev, state, group[0]) if len(group) == 1 else []
        yield [tuple(sorted(group + partner))], f"{len(group)} of {len(state.tainted or state.pool)} not yet told apart"
        seen = ev.history(group + partner)[-1:]
        if not seen:
            if all(ev.silent[v] > 1 for v in group):
                return
            continue
        if not _learn(state, group, seen[0], partner):
            return
    yield from _prove(ev, state)
    if state.contradiction:
        return
    rest = tuple(sorted(set(state.clean)))
    if len(rest) > 1:
        yield [rest], "all that remain, together"
        state.rest_passed = not any(ev.history(rest)[-1:]) if ev.history(rest) else None
    state.done = state.rest_passed is not False and all(proof(ev, state, v) for v in state.culprits)


def _partner(ev: Evidence, state: Sequence, v: int) -> list[int]:
    """A clean partner that was not in the last failure with v, which so counts as another one."""
    last = next((t.members for t in reversed(ev.tests) if t.bad and v in t.members), frozenset())
    fresh = [o for o in state.clean if o not in last and o not in ev.met[v]]
    other = [o for o in state.clean if o not in ev.met[v]]
    return (fresh or other or state.clean)[-1:]


def proof(ev: Evidence, state: Sequence, v: int) -> tuple[int, ...]:
    """The partners in two failures of v, all of them clean and none in both; empty while there are no such two."""
    clean = frozenset(state.clean)
    failures = [t.members - {v} for t in ev.tests if t.bad and v in t.members]
    failures = sorted((f for f in failures if f and f <= clean), key=lambda f: (len(f), sorted(f)))
    for i, first in enumerate(failures):
        for second in failures[i + 1 :]:
            if first.isdisjoint(second):
                return tuple(sorted(first | second))
    return ()


def _prove(ev: Evidence, state: Sequence) -> Steps:
    """One more test with another clean partner for each culprit that needs it."""
    for v in sorted(state.culprits):
        if proof(ev, state, v):
            continue
        partner = _partner(ev, state, v)
        if partner and partner[0] not in ev.met[v]:
            yield [tuple(sorted([v, *partner]))], f"{ev.names[v]} again, with another clean partner"
            if ev.history([v, *partner])[-1:] == [False]:
                state.contradiction = (v, *partner)
                return


def _put_aside(state: Sequence) -> None:
    """Two tainted members and nobody clean: go on with the pool first. Later they come back."""
    if not state.clean and len(state.tainted) == 2 and state.pool:
        state.aside.append(state.tainted)
        state.tainted = []
    elif state.aside and not state.tainted and (state.clean or not state.pool):
        state.tainted = state.aside.pop()


def _next(state: Sequence) -> list[int] | None:
    """The group to test; one that has a single member needs a clean partner."""
    if state.tainted:
        if len(state.tainted) == 1:
            return state.tainted[:1] if state.clean else None
        most, least = len(state.tainted) - 1, 1 if state.clean else 2
        if most < least:
            return None
    else:
        most, least = len(state.pool), 1 if state.clean else min(2, len(state.pool))
        if most == 1 and not state.clean:
            return None
    size = _most_uncertain(state, least, most)
    return (state.tainted or state.pool)[:size]


def _most_uncertain(state: Sequence, least: int, most: int) -> int:
    """
    The size of group that passes about as often as it fails.

    Given the share q of good members, n of m tainted ones pass with (q^n - q^m) / (1 - q^m), n of the pool with q^n;
    the weight of each share is how likely it makes what was found so far.
    """
    found, clean, m = len(state.culprits), len(state.clean), len(state.tainted)
    logs = [found * math.log(p) + clean * math.log1p(-p) for p in SHARES]
    top = max(logs)
    weights = [(math.exp(log - top), 1 - p) for log, p in zip(logs, SHARES, strict=True)]

    def passing(n: int) -> float:
        if not m:
            return sum(w * q**n for w, q in weights) / sum(w for w, _ in weights)
        return sum(w * (q**n - q**m) for w, q in weights) / sum(w * (1 - q**m) for w, q in weights)

    lower, upper = least, most  # passing() falls as the group grows
    while lower < upper:
        middle = (lower + upper) // 2
        if passing(middle) > 0.5:
            lower = middle + 1
        else:
            upper = middle
    return min((n for n in (lower - 1, lower) if n >= least), key=lambda n: abs(passing(n) - 0.5))


def _learn(state: Sequence, group: list[int], bad: bool, partner: list[int]) -> bool:
    """Take in one outcome; False when it contradicts what was known."""
    members = set(group)
    if not state.tainted:
        state.pool = [v for v in state.pool if v not in members]
        if bad:
            state.tainted = group
        else:
            state.clean += group
    elif bad:
        state.pool = [v for v in state.tainted if v not in members] + state.pool
        state.tainted = group
    else:
        left = [v for v in state.tainted if v not in members]
        if not left:
            state.contradiction = tuple(sorted(members))
            return False
        state.clean += group
        state.tainted = left
    if bad and len(group) == 1:
        state.culprits[group[0]] = partner[0]
        state.tainted = []
    return True
