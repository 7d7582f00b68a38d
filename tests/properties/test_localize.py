"""Localisation over any evidence: who may never be accused, whatever was seen."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.localize import Course
from healthd.localize.model import GroupOutcome, NextRound, Outcome, Problem, ValidationVerdict
from tests.benchmarks.localize.simulator import Fleet, localize, names, play, problem_of, switches
from tests.profile import examples

MEMBERS = names(7)
outcomes = st.sampled_from(list(Outcome))
known = st.sampled_from([Outcome.PASS, Outcome.FAIL, Outcome.SLOW])


@st.composite
def problems(draw: st.DrawFn, least: int = 1) -> Problem:
    count = draw(st.integers(least, 12))
    members = names(count)
    return Problem(
        members=members,
        labels=switches(members, draw(st.integers(2, 4))) if draw(st.booleans()) else {},
        seed=draw(st.integers(0, 1000)),
        false_alarm_ratio=draw(st.sampled_from([0.0, 0.02])),
        max_rounds=draw(st.integers(0, 25)),
    )


@st.composite
def histories(draw: st.DrawFn, members: tuple[str, ...]) -> list[GroupOutcome]:
    """Any outcomes of any groups, in rounds that may overlap, repeat and contradict one another."""
    groups = st.lists(st.sampled_from(members), min_size=1, max_size=len(members), unique=True).map(tuple)
    one = st.builds(GroupOutcome, members=groups, outcome=outcomes, round=st.integers(0, 4))
    return draw(st.lists(one, max_size=25))


def answer(problem: Problem, seed: int, kinds: list[Outcome]) -> tuple[ValidationVerdict, list[GroupOutcome]]:
    """Play against a fleet that answers at random."""
    chance, history = random.Random(seed), []
    while isinstance(step := localize(problem, history), NextRound):
        members = [name for group in step.groups for name in group]
        assert len(members) == len(set(members)) > 0
        assert set(members) <= set(problem.members)
        history += [
            GroupOutcome(members=group, outcome=chance.choice(kinds), round=step.number) for group in step.groups
        ]
    return step, history


@settings(max_examples=examples(150), deadline=None)
@given(problems(), st.integers(0, 10_000), st.lists(outcomes, min_size=1, max_size=4))
def test_it_ends_within_its_bounds_and_says_why(problem: Problem, seed: int, kinds: list[Outcome]) -> None:
    verdict, history = answer(problem, seed, kinds)
    assert verdict.rounds <= problem.max_rounds
    assert verdict.reasons
    accused = {culprit.member for culprit in verdict.culprits}
    assert accused.isdisjoint(verdict.rest)
    if verdict.rest_passed:  # nobody is called healthy and in doubt
        assert set(verdict.rest).isdisjoint({*verdict.not_measured}.union(*verdict.one_of))
    for culprit in verdict.culprits:
        assert culprit.failed >= 2
        assert culprit.member not in culprit.failed_with
    if verdict.decided:
        assert not verdict.one_of
        assert any(one.outcome is not Outcome.UNKNOWN for one in history)


@settings(max_examples=examples(150), deadline=None)
@given(histories(MEMBERS), st.booleans(), st.randoms(use_true_random=False))
def test_same_evidence_same_verdict_in_any_order_within_a_round(
    history: list[GroupOutcome], conclude: bool, chance: random.Random
) -> None:
    problem = Problem(members=MEMBERS, seed=3)
    shuffled = list(history)
    chance.shuffle(shuffled)
    first = localize(problem, history, conclude=conclude)
    assert first == localize(problem, history, conclude=conclude)
    assert first == localize(problem, shuffled, conclude=conclude)


@settings(max_examples=examples(60), deadline=None)
@given(problems(), st.integers(0, 10_000), st.lists(known, min_size=1, max_size=4))
def test_step_by_step_and_replayed_are_the_same(problem: Problem, seed: int, kinds: list[Outcome]) -> None:
    verdict, history = answer(problem, seed, kinds)
    course = Course(problem)
    last = max(one.round for one in history)
    steps = [course.step([one for one in history if one.round == number]) for number in range(last + 1)]
    assert steps[-1] == verdict


@settings(max_examples=examples(100), deadline=None)
@given(problems(), st.integers(0, 10_000))
def test_unknown_alone_accuses_nobody(problem: Problem, seed: int) -> None:
    verdict, _ = answer(problem, seed, [Outcome.UNKNOWN])
    assert not (verdict.culprits)
    assert not (verdict.paths)
    assert not (verdict.groups)
    assert not (verdict.scale)
    assert not (verdict.one_of)
    assert not verdict.decided
    assert verdict.rest_passed is None


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(known, st.booleans()), min_size=1, max_size=12), st.integers(0, 99))
def test_never_both_of_two_alone(seen: list[tuple[Outcome, bool]], seed: int) -> None:
    pair = ("a", "b")
    history = [
        GroupOutcome(members=pair if straight else pair[::-1], outcome=outcome, round=number)
        for number, (outcome, straight) in enumerate(seen)
    ]
    verdict = localize(Problem(members=pair, seed=seed), history, conclude=True)
    assert isinstance(verdict, ValidationVerdict)
    assert not verdict.culprits
    assert not verdict.paths


@settings(max_examples=examples(100), deadline=None)
@given(problems(least=2), st.integers(1, 3), st.integers(0, 10_000))
def test_never_a_member_on_path_evidence(problem: Problem, count: int, seed: int) -> None:
    order = list(problem.members)
    random.Random(seed).shuffle(order)
    pairs = [frozenset(order[i : i + 2]) for i in range(0, min(2 * count, len(order) - 1), 2)]
    verdict, _ = play(Fleet(seed=seed, paths=frozenset(pairs)), problem)
    assert not verdict.culprits


@settings(max_examples=examples(100), deadline=None)
@given(problems(), st.integers(0, 10_000))
def test_a_healthy_fleet_is_never_accused(problem: Problem, seed: int) -> None:
    verdict, history = play(Fleet(seed=seed), problem)
    assert verdict.decided
    assert verdict.rest == problem.members
    assert len(history) == 1
    # Nor when the first whole failed for once, for whatever reason.
    verdict, _ = play(Fleet(seed=seed), problem, first=Outcome.FAIL)
    assert not (verdict.culprits)
    assert not (verdict.paths)
    assert not (verdict.groups)
    assert not (verdict.scale)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(3, 40), st.data())
def test_members_that_always_fail_are_named_exactly(count: int, data: st.DataObject) -> None:
    problem = problem_of(count, seed=data.draw(st.integers(0, 99)), switch=data.draw(st.sampled_from([0, 8])))
    most = max(1, (count - 1) // 2) if count < 5 else count // 2
    bad = data.draw(st.frozensets(st.sampled_from(problem.members), min_size=1, max_size=most))
    verdict, _ = play(Fleet(seed=1, bad=bad), problem)
    named = {culprit.member for culprit in verdict.culprits}.union(*(set(group.members) for group in verdict.groups))
    assert named == bad
    assert verdict.decided
    # Members that share a switch are tried with each other first, and one of three is left over for another round: for
    # two more where these three are all paired with each other.
    values = [label for name in bad for label in problem.labels.get(name, {}).values()]
    shared = len(set(values)) < len(values)
    odd = len(bad) > 2 and len(bad) % 2 == 1  # the same without labels
    assert verdict.rounds <= (4 if 4 * len(bad) <= count else 7) + shared + odd + (len(bad) == 3)


def test_who_is_alone_in_its_switch_is_not_left_over_in_every_round() -> None:
    """Of seven, whom two switches have in twos and threes."""
    bad = frozenset(f"n{i:04d}" for i in (0, 1, 8, 9, 10, 21, 24))
    verdict, _ = play(Fleet(seed=1, bad=bad), problem_of(33, seed=0, switch=8))
    assert {culprit.member for culprit in verdict.culprits} == bad
    assert verdict.rounds <= 6
