"""
A fleet that exists only as a rule: which groups pass, and which fail.

`Fleet.run(groups)` has the shape of the real thing: groups of one round go in, their outcomes come out. Faults are
what is really wrong; the localiser never sees them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from healthd.localize import Bounds, Course, GroupOutcome, NextRound, Noise, Outcome, Problem, Verdict


@dataclass(kw_only=True)
class Fleet:
    """
    What is wrong, and how noisy the fleet is.

    `bad` fail always, `flaky` with `flaky_ratio`, `slow` make their group slow. `paths` fail when both ends take part.
    `cut` cannot reach anybody outside of itself; `cut_inside`: nor one another. `scale`: at least so many members
    of `scale_of` (None: of anybody) fail together. `alarm_ratio` of tests fail for no reason; `contention_ratio` of
    groups that run beside others are slow for no reason of their own.
    """

    seed: int
    bad: frozenset[str] = frozenset()
    flaky: frozenset[str] = frozenset()
    flaky_ratio: float = 0.5
    slow: frozenset[str] = frozenset()
    paths: frozenset[frozenset[str]] = frozenset()
    cut: frozenset[str] = frozenset()
    cut_inside: bool = False
    scale: int = 0
    scale_of: frozenset[str] | None = None
    alarm_ratio: float = 0.0
    contention_ratio: float = 0.0
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def run(self, groups: tuple[tuple[str, ...], ...], number: int) -> list[GroupOutcome]:
        """Run the groups of a round at once."""
        return [
            GroupOutcome(members=group, outcome=self._one(frozenset(group), len(groups)), round=number)
            for group in groups
        ]

    def _one(self, group: frozenset[str], company: int) -> Outcome:
        fails = not group.isdisjoint(self.bad)
        fails = fails or any(self.chance.random() < self.flaky_ratio for _ in group & self.flaky)
        fails = fails or any(path <= group for path in self.paths)
        inside = len(group & self.cut)
        fails = fails or (0 < inside < len(group)) or (self.cut_inside and inside > 1)
        if self.scale:
            fails = fails or len(group if self.scale_of is None else group & self.scale_of) >= self.scale
        fails = fails or (self.alarm_ratio > 0 and self.chance.random() < self.alarm_ratio)
        if fails:
            return Outcome.FAIL
        slow = not group.isdisjoint(self.slow)
        slow = slow or (company > 1 and self.contention_ratio > 0 and self.chance.random() < self.contention_ratio)
        return Outcome.SLOW if slow else Outcome.PASS


def names(count: int, prefix: str = "n") -> tuple[str, ...]:
    """`n0000`, `n0001` ..."""
    return tuple(f"{prefix}{i:04d}" for i in range(count))


def switches(members: tuple[str, ...], size: int) -> Mapping[str, Mapping[str, str]]:
    """Topology: so many neighbours share a switch."""
    return {name: {"switch": f"s{i // size}"} for i, name in enumerate(members)}


def play(
    fleet: Fleet, problem: Problem, *, first: Outcome | None = None, borrowed: int = 0
) -> tuple[Verdict, list[GroupOutcome]]:
    """
    Localise to the end, as the real caller would. `first` forces the outcome of the first whole, which is without the
    last `borrowed` members: a validation borrows idle nodes once the whole did not pass, and tests them like its own.
    """
    history: list[GroupOutcome] = []
    course = Course(problem)
    whole = problem.members[: len(problem.members) - borrowed]
    step: NextRound | Verdict = NextRound(number=0, groups=(whole,), why="the whole")
    while isinstance(step, NextRound):
        check_round(step, problem)
        outcomes = fleet.run(step.groups, step.number)
        if step.number == 0 and first is not None:
            outcomes = [GroupOutcome(members=whole, outcome=first, round=0)]
        history += outcomes
        step = course.step(outcomes)
    return step, history


def check_round(step: NextRound, problem: Problem) -> None:
    """What every round must be: not empty, of known members, disjoint."""
    seen = [name for group in step.groups for name in group]
    if not seen or len(seen) != len(set(seen)) or not set(seen) <= set(problem.members):
        raise RuntimeError(f"round {step.number} is not a set of disjoint groups of the fleet: {step.groups[:3]}")


def problem_of(
    count: int,
    *,
    seed: int,
    switch: int = 0,
    noise: float = 0.0,
    one_after_another: bool = False,
    max_rounds: int = 40,
) -> Problem:
    """A fleet of so many members, `switch` of them on each switch (0: no labels)."""
    members = names(count)
    return Problem(
        members=members,
        labels=switches(members, switch) if switch else {},
        seed=seed,
        noise=Noise(false_alarm_ratio=noise),
        bounds=Bounds(max_rounds=max_rounds),
        one_after_another=one_after_another,
    )
