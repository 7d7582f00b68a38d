"""
A fleet that exists only as a rule: which groups pass, and which fail.

`Fleet.run(groups)` has the shape of the real thing: groups of one round go in, their outcomes come out. Faults are
what is really wrong; the localiser never sees them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from healthd.localize import Course, replay
from healthd.localize.model import GroupOutcome, NextRound, Outcome, Problem, ValidationVerdict


@dataclass(kw_only=True)
class Fleet:
    """
    What is wrong, and how noisy the fleet is.

    `bad` fail always, `flaky` with `flaky_ratio`, `slow` make their group slow. `paths` fail when both ends take part,
    in so many tests as `path_ratio` says.
    Members of one of `cuts` pass with nobody outside of it; `cut_inside`: nor with one another. `trunks` are pairs of
    sets that do not reach each other. `scale`: at least so many members of `scale_of` (None: of anybody) fail together.
    `together`: fail when all of these take part. `alarm_ratio` of tests fail for no reason; `contention_ratio` of
    groups that run beside others are slow for no reason of their own. `racks`, of members each, are behind an uplink
    that is slow while more than half of a rack use it. `failures_left`: after so many failures more all is healed.
    `shows`: a test that fails because of bad members shows one. `hang_seconds`: how long a test that fails takes;
    one that passes takes a second.
    """

    seed: int
    bad: frozenset[str] = frozenset()
    flaky: frozenset[str] = frozenset()
    flaky_ratio: float = 0.5
    slow: frozenset[str] = frozenset()
    paths: frozenset[frozenset[str]] = frozenset()
    path_ratio: float = 1.0
    cuts: tuple[frozenset[str], ...] = ()
    cut_inside: bool = False
    trunks: tuple[tuple[frozenset[str], frozenset[str]], ...] = ()
    scale: int = 0
    scale_of: frozenset[str] | None = None
    together: frozenset[str] = frozenset()
    alarm_ratio: float = 0.0
    contention_ratio: float = 0.0
    racks: int = 0
    failures_left: int | None = None
    shows: bool = False
    hang_seconds: float = 1.0
    chance: random.Random = field(init=False)
    node_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def at_fault(self) -> frozenset[str]:
        """The members that may be accused."""
        return self.bad | self.flaky | self.slow

    def run(self, groups: Sequence[tuple[str, ...]], number: int) -> list[GroupOutcome]:
        """Run the groups of a round at once."""
        crowded = self._crowded(groups)
        outcomes = [self._one(group, len(groups), number, crowded) for group in groups]
        failed = sum(one.outcome is Outcome.FAIL for one in outcomes)
        if self.failures_left is not None:
            self.failures_left -= failed if number else 0
        for one in outcomes:
            self.node_seconds += len(one.members) * (self.hang_seconds if one.outcome is Outcome.FAIL else 1.0)
        return outcomes

    def _one(self, members: tuple[str, ...], company: int, number: int, crowded: frozenset[int]) -> GroupOutcome:
        group = frozenset(members)
        healed = self.failures_left is not None and self.failures_left <= 0 and number > 0
        fails = not healed and self._is_broken(group)
        fails = fails or (self.alarm_ratio > 0 and self.chance.random() < self.alarm_ratio)
        slow = not group.isdisjoint(self.slow) or not crowded.isdisjoint(self._racks(group))
        slow = slow or (company > 1 and self.contention_ratio > 0 and self.chance.random() < self.contention_ratio)
        outcome = Outcome.FAIL if fails else Outcome.SLOW if slow else Outcome.PASS
        return GroupOutcome(members=members, outcome=outcome, round=number, **self._shown(group))

    def _shown(self, group: frozenset[str]) -> dict[str, tuple[str, ...]]:
        return {"shown": (min(group & self.bad),)} if self.shows and group & self.bad else {}

    def _is_broken(self, group: frozenset[str]) -> bool:
        if not group.isdisjoint(self.bad) or any(self.chance.random() < self.flaky_ratio for _ in group & self.flaky):
            return True
        if self.is_cut(group) or (self.together and self.together <= group):
            return True
        return self.scale > 0 and len(group if self.scale_of is None else group & self.scale_of) >= self.scale

    def is_cut(self, group: frozenset[str]) -> bool:
        """Whether the network between the members of a group fails it."""
        if any(path <= group and self._lets_fail() for path in self.paths):
            return True
        for cut in self.cuts:
            inside = len(group & cut)
            if 0 < inside < len(group) or (self.cut_inside and inside > 1):
                return True
        return any(not group.isdisjoint(one) and not group.isdisjoint(other) for one, other in self.trunks)

    def _lets_fail(self) -> bool:
        return self.path_ratio >= 1 or self.chance.random() < self.path_ratio

    def _racks(self, group: frozenset[str]) -> frozenset[int]:
        """The racks of a group that is in several."""
        if not self.racks:
            return frozenset()
        found = frozenset(int(name[1:]) // self.racks for name in group)
        return found if len(found) > 1 else frozenset()

    def _crowded(self, groups: Sequence[tuple[str, ...]]) -> frozenset[int]:
        """The racks of which more than half of the members use the uplink at once; a ring uses it once."""
        if not self.racks:
            return frozenset()
        flows = Counter(rack for group in groups for rack in self._racks(frozenset(group)))
        return frozenset(rack for rack, count in flows.items() if count > self.racks // 2)


def names(count: int, prefix: str = "n") -> tuple[str, ...]:
    """`n0000`, `n0001` ..."""
    return tuple(f"{prefix}{i:04d}" for i in range(count))


def switches(
    members: tuple[str, ...], size: int, *, told: str = "right", seed: int = 0
) -> Mapping[str, Mapping[str, str]]:
    """Topology: so many neighbours share a switch. `told`: right, half (of the members), wrong (shuffled), missing."""
    labels = {name: {"switch": f"s{i // size}"} for i, name in enumerate(members)} if size else {}
    chance = random.Random(seed)
    if told == "wrong":
        values = list(labels.values())
        chance.shuffle(values)
        return dict(zip(labels, values, strict=True))
    if told == "half":
        return {name: labels[name] for name in sorted(chance.sample(members, len(members) // 2)) if labels}
    return {} if told == "missing" else labels


def play(
    fleet: Fleet, problem: Problem, *, first: Outcome | None = None, borrowed: int = 0
) -> tuple[ValidationVerdict, list[GroupOutcome]]:
    """
    Localise to the end, as the real caller would. `first` forces the outcome of the first whole, which is without the
    last `borrowed` members: a validation borrows idle nodes once the whole did not pass, and tests them like its own.
    """
    history: list[GroupOutcome] = []
    course = Course(problem)
    whole = problem.members[: len(problem.members) - borrowed]
    step: NextRound | ValidationVerdict = NextRound(number=0, groups=(whole,), why="the whole")
    while isinstance(step, NextRound):
        check_round(step, problem)
        groups = (whole,) if step.number == 0 else step.groups
        outcomes = fleet.run(groups, step.number)
        if step.number == 0 and first is not None:
            outcomes = [GroupOutcome(members=whole, outcome=first, round=0)]
        history += outcomes
        step = course.step(outcomes)
    return step, history


def localize(
    problem: Problem, history: Iterable[GroupOutcome], *, conclude: bool = False
) -> NextRound | ValidationVerdict:
    """What comes after a history; `conclude`: the verdict on what is known, as when the time is up."""
    course, step = replay(problem, history)
    return course.conclude() if conclude else step


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
    max_rounds: int = 40,
    told: str = "right",
) -> Problem:
    """A fleet of so many members, `switch` of them on each switch (0: no labels); `told` as in `switches`."""
    members = names(count)
    return Problem(
        members=members,
        labels=switches(members, switch, told=told, seed=seed),
        seed=seed,
        false_alarm_ratio=noise,
        max_rounds=max_rounds,
    )
