"""Kinds of faults, what is a right verdict on each, and the rows of the table that always held."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from healthd.localize.model import Outcome, Problem, ValidationVerdict
from tests.benchmarks.localize.simulator import Fleet

Make = Callable[[random.Random, Problem, int], Fleet]
Right = Callable[[Fleet, ValidationVerdict], bool]


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    One line of the table. `members` are those of the job, `borrowed` idle nodes beside them.

    `told` is how right the labels are, see `switches`; `limit` bounds the rounds. Aims: `rounds` bounds the rounds,
    `exact` the share of right verdicts, `false` the share of fleets in which a healthy
    member is accused. A row without any is there for its own sake: its line says "shown".
    """

    kind: str
    members: int
    runs: int
    make: Make
    right: Right
    culprits: str
    borrowed: int = 0
    switch: int = 0
    told: str = "right"
    noise: float = 0.0
    first: Outcome | None = None
    rounds: int | None = None
    exact: float = 1.0
    false: float = 0.0
    limit: int = 40
    others: str = ""

    @property
    def name(self) -> str:
        """For people and tests."""
        return f"{self.kind}, {self.members} members, {self.culprits} culprits"


def accused(verdict: ValidationVerdict) -> frozenset[str]:
    """Who is accused."""
    return frozenset(culprit.member for culprit in verdict.culprits)


def bad(count: int) -> Make:
    """So many members that fail always."""
    return lambda rng, problem, seed: Fleet(seed=seed, bad=frozenset(rng.sample(problem.members, count)))


def exactly(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    """All culprits, nobody and nothing else, and each failure has its cause."""
    named = accused(verdict) == fleet.at_fault()
    return named and not (verdict.paths or verdict.groups or verdict.scale) and verdict.decided


def in_nine(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    """The flaky one and nobody else; the last of ten rounds is mostly the rest together."""
    return accused(verdict) == fleet.flaky and verdict.rounds <= 10


def path_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    return {frozenset(path.ends) for path in verdict.paths} == fleet.paths and verdict.decided


def group_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    groups = [(frozenset(group.members), group.inside) for group in verdict.groups]
    return groups == [(cut, not fleet.cut_inside) for cut in fleet.cuts] and verdict.decided


def scale_named(fleet: Fleet, verdict: ValidationVerdict) -> bool:
    group = frozenset(verdict.scale.members) if verdict.scale else frozenset()
    return len(group if fleet.scale_of is None else group & fleet.scale_of) == fleet.scale


def nothing_named(_: Fleet, verdict: ValidationVerdict) -> bool:
    return not (verdict.culprits or verdict.paths or verdict.groups or verdict.scale)


def nobody_accused(_: Fleet, verdict: ValidationVerdict) -> bool:
    return nothing_named(_, verdict) and verdict.one_of == (("n0000", "n0001"),)


def path(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=seed, paths=frozenset([frozenset(rng.sample(problem.members, 2))]))


def cut(inside: bool) -> Make:
    def make(rng: random.Random, problem: Problem, seed: int) -> Fleet:
        first = 8 * rng.randrange(len(problem.members) // 8)
        return Fleet(seed=seed, cuts=(frozenset(problem.members[first : first + 8]),), cut_inside=inside)

    return make


def flaky(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=rng.randrange(1 << 30), flaky=frozenset(rng.sample(problem.members, 1)))


def scale(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=seed, scale=rng.randint(3, len(problem.members)))


def scale_in_rack(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    first = 8 * rng.randrange(len(problem.members) // 8)
    return Fleet(seed=seed, scale=rng.randint(3, 8), scale_of=frozenset(problem.members[first : first + 8]))


def slow(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    culprits = frozenset(rng.sample(problem.members, rng.randint(1, 2)))
    return Fleet(seed=rng.randrange(1 << 30), slow=culprits, contention_ratio=0.05)


def noisy(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=rng.randrange(1 << 30), alarm_ratio=problem.false_alarm_ratio)


def noisy_unawares(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=rng.randrange(1 << 30), alarm_ratio=0.02)


def noisy_bad(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    culprits = frozenset(rng.sample(problem.members, 2))
    return Fleet(seed=rng.randrange(1 << 30), bad=culprits, alarm_ratio=problem.false_alarm_ratio)


def noisy_flaky(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    culprits = frozenset(rng.sample(problem.members, 1))
    return Fleet(seed=rng.randrange(1 << 30), flaky=culprits, alarm_ratio=problem.false_alarm_ratio)


def two_flaky(rng: random.Random, problem: Problem, seed: int) -> Fleet:
    return Fleet(seed=rng.randrange(1 << 30), flaky=frozenset(rng.sample(problem.members, 2)))


def usual_rows() -> Iterator[Row]:
    """The table: first what issue and peers have figures for, then what is shown for its own sake (exact=0)."""
    quarter = ((4, 1, 500), (5, 1, 500), (7, 1, 500), (8, 2, 500), (9, 2, 500), (16, 4, 300), (63, 15, 100))
    large = ((64, 1, 100), (64, 16, 100), (232, 5, 60), (512, 4, 20), (512, 128, 10), (4095, 1023, 1), (4096, 1024, 2))
    for members, count, runs in (*quarter, *large):
        others = {232: "CHS 125.9 tests, CRE about 55 (claimed)", 512: "bisection: 10 rounds"}.get(members, "")
        yield _always(members, count, runs, rounds=4, others=others)
    half = ((4, 2, 500), (5, 2, 500), (6, 3, 1000), (7, 3, 500), (8, 4, 500), (16, 8, 200), (64, 32, 50))
    for members, count, runs in (*half, (512, 256, 4), (4096, 2048, 1)):
        others = "CHS accuses 1.35 healthy nodes" if members == 4 else ""
        yield _always(members, count, runs, rounds=6, others=others)
    for members, count, runs in ((16, 10, 100), (64, 40, 30)):
        yield _always(members, count, runs, rounds=None, exact=0.9, kind="always, more than half")
    yield Row(kind="always, 2 alone", members=2, runs=100, make=bad(1), right=nobody_accused, culprits="1",
              others="CHS and NVSentinel accuse the healthy")  # fmt: skip
    yield Row(kind="always, 2 and an idle third", members=2, runs=100, make=bad(1), right=exactly, culprits="1",
              borrowed=1, others="CHS accuses 1.0 healthy nodes")  # fmt: skip
    for members, runs in (
        (3, 2000),
        (4, 4000),
        (5, 4000),
        (7, 2000),
        (8, 4000),
        (9, 2000),
        (16, 4000),
        (64, 3000),
        (512, 200),
    ):
        yield Row(kind="flaky, p = 0.5, by round 9", members=members, runs=runs, make=flaky, right=in_nine,
                  culprits="1", first=Outcome.FAIL, exact={3: 0.85, 5: 0.92}.get(members, 0.95), false=0.001,
                  others={3: "at best 88.1 %", 5: "at best 97.2 %"}.get(members, ""))  # fmt: skip
    for members, runs in ((3, 2000), (4, 2000), (5, 2000), (8, 2000), (16, 2000), (64, 1000)):
        yield Row(kind="flaky, p = 0.5, idle nodes, by round 9", members=members, borrowed=2 + members % 2, runs=runs,
                  make=flaky, right=in_nine, culprits="1", first=Outcome.FAIL, exact=0.95, false=0.001)  # fmt: skip
    yield Row(kind="flaky, p = 0.5, noise 2 %", members=64, runs=300, make=noisy_flaky, right=exactly, noise=0.02,
              culprits="1", first=Outcome.FAIL, exact=0.0, false=0.01)  # fmt: skip
    for members, runs in ((3, 100), (4, 200), (8, 200), (64, 100), (512, 10)):
        yield Row(kind="path", members=members, runs=runs, make=path, right=path_named, culprits="1 path",
                  others="node accused" if members == 3 else "")  # fmt: skip
    for inside in (False, True):
        yield Row(kind="switch, " + ("all of it" if inside else "way out"), members=64, runs=200, make=cut(inside),
                  right=group_named, culprits="8 on 1 switch", switch=8, others="nodes accused")  # fmt: skip
    for members, runs in ((8, 200), (64, 100), (512, 10)):
        yield Row(kind="at least k of all", members=members, runs=runs, make=scale, right=scale_named,
                  culprits="k random")  # fmt: skip
    yield Row(kind="at least k of one rack", members=64, runs=60, make=scale_in_rack, right=scale_named, switch=8,
              culprits="k of 8")  # fmt: skip
    for members in (16, 64):
        yield Row(kind="slow, 5 % contention", members=members, runs=2000, make=slow, right=exactly,
                  culprits="1 or 2", exact=0.99)  # fmt: skip
    yield Row(kind="healthy, noise 2 %, whole failed", members=512, runs=200, make=noisy, right=nothing_named,
              noise=0.02, culprits="0", first=Outcome.FAIL, exact=0.99, false=0.01,
              others="z rules: 50 to 100 % alarms")  # fmt: skip
    yield Row(kind="healthy, noise 2 %, whole failed", members=64, runs=1000, make=noisy, right=nothing_named,
              noise=0.02, culprits="0", first=Outcome.FAIL, exact=0.99, false=0.01)  # fmt: skip
    for members, runs in ((512, 100), (64, 500), (16, 500)):
        yield Row(kind="healthy, noise 2 % taken for 0, whole failed", members=members, runs=runs,
                  make=noisy_unawares, right=nothing_named, culprits="0", first=Outcome.FAIL, exact=0.0)  # fmt: skip
    yield Row(kind="always, noise 2 %", members=64, runs=200, make=noisy_bad, right=exactly, noise=0.02, culprits="2",
              exact=0.0, false=0.001)  # fmt: skip
    yield Row(kind="two flaky, p = 0.5", members=16, runs=1000, make=two_flaky, right=exactly, culprits="2",
              first=Outcome.FAIL, exact=0.0)  # fmt: skip


def _always(
    members: int, count: int, runs: int, *, rounds: int | None, exact: float = 1.0, others: str = "", kind: str = ""
) -> Row:
    return Row(kind=kind or "always", members=members, runs=runs, make=bad(count), right=exactly, culprits=str(count),
               rounds=rounds, exact=exact, others=others)  # fmt: skip
