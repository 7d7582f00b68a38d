"""Faults of real fleets beyond nodes that always fail: networks in parts, paths, noise, healing, short time."""

from __future__ import annotations

import random

from healthd.localize.model import Problem, ValidationVerdict
from tests.benchmarks.localize.simulator import Fleet
from tests.benchmarks.localize.table import Make, Right, accused, nothing_named


def parts(size: int, *, apart: int = 1, others: int = 0) -> Make:
    """So many switches of `size` members cut off, and so many bad members elsewhere."""

    def make(rng: random.Random, problem: Problem, seed: int) -> Fleet:
        members = problem.members
        switches = rng.sample(range(len(members) // size), apart)
        cuts = tuple(frozenset(members[size * one : size * one + size]) for one in switches)
        free = [name for name in members if not any(name in cut for cut in cuts)]
        return Fleet(seed=seed, cuts=cuts, bad=frozenset(rng.sample(free, others)))

    return make


def trunk(size: int) -> Make:
    """Two switches of `size` that do not reach each other."""

    def make(rng: random.Random, problem: Problem, seed: int) -> Fleet:
        one, other = rng.sample(range(len(problem.members) // size), 2)
        ends = tuple(frozenset(problem.members[size * i : size * i + size]) for i in (one, other))
        return Fleet(seed=seed, trunks=((ends[0], ends[1]),))

    return make


def bucket(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    names = problem.members
    pairs = [frozenset((a, b)) for i, a in enumerate(names) for b in names[i + 1 :] if rng.random() < 0.02]
    return Fleet(seed=seed, paths=frozenset(pairs))


def two_paths(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    end, one, other = rng.sample(problem.members, 3)
    return Fleet(seed=seed, paths=frozenset([frozenset((end, one)), frozenset((end, other))]))


def noisy(make: Make, share: float) -> Make:
    """The same with so many groups that fail for no reason."""

    def noisily(rng: random.Random, problem: Problem, seed: int) -> Fleet:
        fleet = make(rng, problem, rng.randrange(1 << 30))
        fleet.alarm_ratio = share
        return fleet

    return noisily


def healing(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=seed, bad=frozenset(rng.sample(problem.members, 1)), failures_left=1)


def seldom(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=rng.randrange(1 << 30), flaky=frozenset(rng.sample(problem.members, 1)), flaky_ratio=0.2)


def slow_in_racks(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=seed, slow=frozenset(rng.sample(problem.members, 1)), racks=8)


def three_together(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=seed, together=frozenset(rng.sample(problem.members, 3)))


def shown(count: int) -> Make:
    """So many members that always fail, of whom each failing test shows one."""
    return lambda rng, problem, seed: Fleet(seed=seed, bad=frozenset(rng.sample(problem.members, count)), shows=True)


def cut_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    named = sorted(sorted(group.members) for group in verdict.groups)
    whole = named == sorted(map(sorted, fleet.cuts)) or named == [sorted(frozenset().union(*fleet.cuts))]
    return whole and accused(verdict) == fleet.bad and not verdict.paths and verdict.decided


def one_kind_goes_on(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    kinds = [frozenset(fleet.cuts[0]), fleet_members(verdict) - fleet.cuts[0]]
    return not accused(verdict) and verdict.rest_passed is True and frozenset(verdict.rest) in kinds


def fleet_members(verdict: ValidationVerdict) -> frozenset[str]:
    """All who are in the verdict somewhere."""
    return frozenset(verdict.rest).union(*(group.members for group in verdict.groups))


def trunk_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    named = [{frozenset(side) for side in one.members} for one in verdict.trunks]
    return named == [set(fleet.trunks[0])] and not accused(verdict) and verdict.decided


def paths_right(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    named = {frozenset(one.ends) for one in verdict.paths}
    return not accused(verdict) and bool(named) and named <= fleet.paths


def path_exactly(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    return paths_right(fleet, verdict) and len(verdict.paths) == len(fleet.paths) and verdict.decided


def no_sound_path(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    return all(frozenset(one.ends) in fleet.paths for one in verdict.paths)


def some_go_on(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    rest = frozenset(verdict.rest)
    return verdict.rest_passed is True and len(rest) >= 24 and not any(one <= rest for one in fleet.paths)


def starts(members: int) -> Right:
    """
    Of so many, all who are sound pass together in the end, but for one pair in doubt, of many one node in 32.

    Nobody of them is at fault, nor said to be in doubt.
    """

    def right(fleet: Fleet, verdict: ValidationVerdict) -> bool:
        rest = frozenset(verdict.rest)
        least = members - len(fleet.at_fault()) - max(2, members // 32)
        clear = rest.isdisjoint(fleet.at_fault().union(*verdict.one_of, verdict.not_measured))
        return verdict.rest_passed is True and clear and len(rest) >= least

    return right


def path_beside_bad(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    one, end, other = rng.sample(problem.members, 3)
    return Fleet(seed=seed, bad=frozenset([one]), paths=frozenset([frozenset((end, other))]))


def both_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    """The bad one and the path, of which one end goes on."""
    paths = {frozenset(one.ends) for one in verdict.paths}
    ends = frozenset().union(*fleet.paths).intersection(verdict.rest)
    return accused(verdict) == fleet.bad and paths == fleet.paths and len(ends) == 1 and verdict.decided


def within(right: Right, rounds: int) -> Right:
    """The same in so many rounds at most."""
    return lambda fleet, verdict: right(fleet, verdict) and verdict.rounds <= rounds


def three_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    return verdict.scale is not None and frozenset(verdict.scale.members) == fleet.together


def nobody_decided(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    return nothing_named(fleet, verdict) and not verdict.decided


def some_told(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    """Something is said that is right, and it can be used."""
    return accused(verdict) <= fleet.at_fault() and (verdict.rest_passed is True or bool(verdict.culprits))


def no_trunk_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    return not verdict.trunks and not accused(verdict)
