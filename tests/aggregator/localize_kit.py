"""What the tests of localize, and those beside them, are made with."""

from __future__ import annotations

from healthd.localize.model import GroupOutcome, Outcome, Problem, ValidationVerdict
from tests.benchmarks.localize.simulator import localize


def seen(round_number: int, members: str, outcome: Outcome) -> GroupOutcome:
    return GroupOutcome(members=tuple(members), outcome=outcome, round=round_number)


def verdict_on(problem: Problem, *history: GroupOutcome) -> ValidationVerdict:
    verdict = localize(problem, history, conclude=True)
    assert isinstance(verdict, ValidationVerdict)
    return verdict


def accused(verdict: ValidationVerdict) -> set[str]:
    return {culprit.member for culprit in verdict.culprits}
