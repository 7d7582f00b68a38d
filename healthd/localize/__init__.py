"""
Who is at fault when a fleet fails together: pure, deterministic, and never a guess.

`replay(problem, history)` looks at the outcomes so far and says which groups to test next, or the verdict: the same
input gives the same answer. Nothing here runs a test, knows a clock, or knows what a member is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from healthd.localize.evidence import Evidence
from healthd.localize.model import (
    Culprit,
    GroupOutcome,
    Manner,
    NextRound,
    Outcome,
    PathFault,
    Problem,
    ValidationVerdict,
)
from healthd.localize.rounds import Found, by_rounds, final
from healthd.localize.verdict import names, verdict_of

__all__ = [
    "Course",
    "Culprit",
    "GroupOutcome",
    "Manner",
    "NextRound",
    "Outcome",
    "PathFault",
    "Problem",
    "ValidationVerdict",
    "names",
    "replay",
]


class Course:
    """
    The course of the tests, for a caller that goes through round after round: only the last step is computed.

    `step` takes the outcomes of the round that was asked for last; the first is of the whole.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._ev = Evidence(problem)
        self._found = Found()
        self._steps = by_rounds(self._ev, self._found)
        self._asked: tuple[tuple[str, ...], ...] | None = None  # None: the first whole was not given yet
        self._verdict: ValidationVerdict | None = None

    def step(self, outcomes: Iterable[GroupOutcome], *, last: bool = False) -> NextRound | ValidationVerdict:
        """
        What to test next, now that these are known; a group without outcome counts as unknown.

        `last`: there is time for one round more, which then is what tells most: do those who passed do so together?
        """
        if self._verdict is not None:
            return self._verdict
        ev, given = self._ev, list(outcomes)
        if self._asked is not None:
            ev.rounds += 1
            ev.asked += len(self._asked)
            have = {frozenset(one.members) for one in given}
            missing = [group for group in self._asked if frozenset(group) not in have]
            given += [GroupOutcome(members=group, outcome=Outcome.UNKNOWN, round=ev.rounds) for group in missing]
        ev.record(given)
        groups, why = next(self._steps, ([], ""))
        if not groups:
            return self.conclude(spent=False)
        if ev.rounds >= self.problem.max_rounds:
            return self.conclude()
        if last or ev.rounds + 1 == self.problem.max_rounds:
            groups, why = final(ev, groups, why)
        self._asked = tuple(tuple(ev.names[v] for v in group) for group in groups)
        return NextRound(number=ev.rounds + 1, groups=self._asked, why=why)

    def conclude(self, *, spent: bool = True) -> ValidationVerdict:
        """The verdict on what is known now, final. `spent`: ended by a bound or by the caller, which it says."""
        if self._verdict is None:
            self._steps.close()
            self._verdict = verdict_of(self._ev, self._found, spent=spent)
        return self._verdict


def replay(problem: Problem, history: Iterable[GroupOutcome]) -> tuple[Course, NextRound | ValidationVerdict]:
    """
    The course of the tests up to the end of this history, and what comes next: groups to test, or the verdict.

    Round 0 is asked for first: the whole. A round counts as run when the history has any outcome of it. Raises
    BadInputError on an outcome of somebody who is no member.
    """
    rounds: dict[int, list[GroupOutcome]] = defaultdict(list)
    for outcome in history:
        rounds[outcome.round].append(outcome)
    course = Course(problem)
    if 0 not in rounds:
        return course, NextRound(number=0, groups=(problem.members,), why="the whole")
    step = course.step(rounds[0])
    while isinstance(step, NextRound) and step.number in rounds:
        step = course.step(rounds[step.number])
    return course, step
