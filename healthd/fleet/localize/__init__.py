"""
Who is at fault when a fleet fails together: pure, deterministic, and never a guess.

`localize(problem, history)` looks at the outcomes so far and says which groups to test next, or the verdict. It keeps no
state: the course of the tests is replayed from the history, so the same input gives the same answer. Nothing here runs
a test, knows a clock, or knows what a member is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from healthd.fleet.localize.evidence import Evidence, Ids
from healthd.fleet.localize.model import (
    Bounds,
    Culprit,
    GroupOutcome,
    LabelFault,
    Manner,
    NextRound,
    Noise,
    Outcome,
    PathFault,
    Problem,
    ScaleFault,
    Verdict,
)
from healthd.fleet.localize.rounds import Found, by_rounds
from healthd.fleet.localize.sequence import Sequence, one_by_one
from healthd.fleet.localize.verdict import from_rounds, from_sequence

__all__ = [
    "Bounds",
    "Culprit",
    "GroupOutcome",
    "LabelFault",
    "Manner",
    "NextRound",
    "Noise",
    "Outcome",
    "PathFault",
    "Problem",
    "ScaleFault",
    "Verdict",
    "localize",
]


def localize(problem: Problem, history: Iterable[GroupOutcome], *, conclude: bool = False) -> NextRound | Verdict:
    """
    The groups to test next, or the verdict.

    Round 0 is asked for first: the whole. A round counts as run when the history has any outcome of it; what is missing
    of it counts as unknown. `conclude`: the verdict on what is known now, for a caller whose time is up. Raises
    BadInputError on an outcome of somebody who is neither member nor partner.
    """
    rounds: dict[int, list[GroupOutcome]] = defaultdict(list)
    for outcome in history:
        rounds[outcome.round].append(outcome)
    ev = Evidence(problem)
    if 0 not in rounds and not conclude:
        return NextRound(number=0, groups=(problem.members,), why="the whole")
    ev.record(rounds.get(0, []))
    found, sequence = Found(), Sequence()
    steps = one_by_one(ev, sequence) if problem.one_after_another else by_rounds(ev, found)
    spent = False
    for groups, why in steps:
        number = ev.rounds + 1
        groups = groups[: problem.bounds.max_tests - ev.asked]
        spent = number > problem.bounds.max_rounds and not problem.one_after_another
        spent = spent or not groups or (conclude and number not in rounds)
        if spent:
            break
        if number not in rounds:
            return NextRound(number=number, groups=tuple(_named(ev, group) for group in groups), why=why)
        ev.rounds = number
        ev.asked += len(groups)
        ev.record(rounds[number])
        _note_missing(ev, groups, rounds[number])
    steps.close()
    if problem.one_after_another:
        return from_sequence(ev, sequence, spent=spent)
    return from_rounds(ev, found, spent=spent)


def _named(ev: Evidence, group: Ids) -> tuple[str, ...]:
    return tuple(ev.names[v] for v in group)


def _note_missing(ev: Evidence, groups: list[Ids], outcomes: list[GroupOutcome]) -> None:
    """Groups that were asked for and have no outcome at all count as unknown."""
    given = {frozenset(one.members) for one in outcomes}
    for group in groups:
        names = _named(ev, group)
        if frozenset(names) not in given:
            ev.record([GroupOutcome(members=names, outcome=Outcome.UNKNOWN, round=ev.rounds)])
