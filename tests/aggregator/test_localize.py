"""Localisation: who is named, who never is, and the sentences that say so."""

from __future__ import annotations

import random
import time

import pytest

from healthd.core.errors import BadInputError
from healthd.localize import Course
from healthd.localize.model import GroupOutcome, Manner, NextRound, Outcome, Problem, ValidationVerdict
from tests.aggregator.localize_kit import accused, seen, verdict_on
from tests.benchmarks.localize.__main__ import SURE, is_met, main, measure, rows
from tests.benchmarks.localize.hard_rows import hard_rows
from tests.benchmarks.localize.simulator import Fleet, localize, names, play, problem_of
from tests.benchmarks.localize.table import Row, usual_rows
from tests.every import every
from tests.profile import fleets, some

PASS, FAIL, SLOW, UNKNOWN = Outcome.PASS, Outcome.FAIL, Outcome.SLOW, Outcome.UNKNOWN


def test_the_first_question_is_the_whole() -> None:
    step = localize(Problem(members=("b", "a", "c")), [])
    assert step == NextRound(number=0, groups=(("b", "a", "c"),), why="the whole")


def test_a_whole_that_passes_needs_nothing_more() -> None:
    verdict = localize(Problem(members=("a", "b", "c")), [seen(0, "abc", PASS)])
    assert isinstance(verdict, ValidationVerdict)
    assert (verdict.decided, verdict.rest, verdict.rounds) == (True, ("a", "b", "c"), 0)
    assert verdict.reasons == ("all 3 are healthy: they passed together",)


def test_two_alone_are_one_of_two_and_neither_is_accused() -> None:
    """Fault 26 of the rivals."""
    verdict = localize(Problem(members=("a", "b")), [seen(0, "ab", FAIL)])
    assert isinstance(verdict, ValidationVerdict)
    assert not verdict.culprits
    assert verdict.one_of == (("a", "b"),)
    assert not verdict.decided
    assert "one of a, b, or the path between them" in verdict.reasons[0]


@pytest.mark.parametrize("culprit", ["n0000", "n0001"])
def test_one_idle_third_node_tells_the_two_apart(culprit: str) -> None:
    for seed in range(10):
        verdict, _ = play(Fleet(seed=seed, bad=frozenset([culprit])), problem_of(3, seed=seed), borrowed=1)
        assert accused(verdict) == {culprit}
        assert verdict.decided


def test_both_of_two_are_named_with_two_idle_nodes() -> None:
    verdict, _ = play(Fleet(seed=0, bad=frozenset(names(2))), problem_of(4, seed=0), borrowed=2)
    assert accused(verdict) == set(names(2))
    assert verdict.rest == names(4)[2:]


def test_the_whole_that_failed_blames_none_of_those_in_it() -> None:
    """Fault 25: the member that reports, or that comes first, is no more suspect than any other."""
    verdict = verdict_on(Problem(members=tuple("abcd")), seen(0, "abcd", FAIL))
    assert not verdict.culprits
    assert not verdict.one_of
    assert not verdict.decided


def test_the_sentences_name_the_culprit_its_partners_and_the_rest() -> None:
    problem = Problem(members=tuple("abcd"))
    history = [seen(0, "abcd", FAIL), seen(1, "ab", FAIL), seen(1, "cd", PASS)]
    history += [seen(2, "ac", FAIL), seen(2, "bd", PASS), seen(3, "bcd", PASS)]
    verdict = verdict_on(problem, *history)
    (culprit,) = verdict.culprits
    assert (culprit.member, culprit.manner, culprit.failed_with) == ("a", Manner.ALWAYS, ("b", "c"))
    assert verdict.reasons[0] == "a fails always: 2 of 2 tests, failed with b, c, which otherwise pass"
    assert verdict.rest == ("b", "c", "d")


def test_one_failure_with_a_clean_partner_is_not_enough() -> None:
    verdict = verdict_on(Problem(members=tuple("abc")), seen(0, "ab", FAIL), seen(1, "bc", PASS))
    assert not verdict.culprits
    assert verdict.one_of == (("a",),), "b passed with all others that remain"
    assert verdict.rest == ("b", "c")


def test_the_same_partner_twice_is_not_two_partners() -> None:
    history = [seen(0, "abc", FAIL), seen(1, "ab", FAIL), seen(2, "bc", PASS), seen(3, "ab", FAIL)]
    assert not verdict_on(Problem(members=tuple("abc")), *history).culprits


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_a_pair_that_fails_while_both_pass_elsewhere_is_a_path(count: int) -> None:
    """Fault 23."""
    ends = frozenset(["n0000", "n0002"])
    verdict, _ = play(Fleet(seed=1, paths=frozenset([ends])), problem_of(count, seed=1))
    assert not verdict.culprits
    assert [set(path.ends) for path in verdict.paths] == [ends]
    assert len(ends & set(verdict.rest)) == 1, "the job can run without one of the two ends"
    assert "neither is accused" in verdict.reasons[0]


@pytest.mark.parametrize("inside", [True, False])
def test_a_bad_switch_is_named_as_group_and_no_node_is_accused(inside: bool) -> None:
    problem = problem_of(64, seed=4, switch=8)
    fleet = Fleet(seed=4, cuts=(frozenset(problem.members[16:24]),), cut_inside=not inside)
    verdict, _ = play(fleet, problem)
    (group,) = verdict.groups
    assert (group.label, group.value, group.inside) == ("switch", "s2", inside)
    assert not verdict.culprits
    assert verdict.decided
    assert len(verdict.rest) == 56


def test_of_two_halves_that_are_cut_off_from_each_other_one_is_named_and_the_other_goes_on() -> None:
    problem = problem_of(8, seed=1, switch=4)
    verdict, _ = play(Fleet(seed=1, cuts=(frozenset(problem.members[:4]),)), problem)
    assert [group.value for group in verdict.groups] == ["s1"]
    assert not verdict.culprits
    assert (verdict.rest, verdict.rest_passed) == (problem.members[:4], True)


def test_a_fault_of_scale_reports_the_smallest_failing_group_and_accuses_nobody() -> None:
    verdict, _ = play(Fleet(seed=2, scale=7), problem_of(16, seed=2))
    assert verdict.scale is not None
    assert (len(verdict.scale.members), verdict.scale.any_group) == (7, True)
    assert not verdict.culprits
    assert "only at scale" in verdict.reasons[0]


def test_a_node_that_passes_at_times_is_accused_only_once_one_of_its_failed_pairs_has_passed() -> None:
    """Else it may be the healthy end of several bad paths."""
    history = [seen(0, "abcdef", FAIL), seen(1, "ab", FAIL), seen(1, "cd", PASS), seen(1, "ef", PASS)]
    history += [seen(2, "ac", PASS), seen(2, "bd", PASS)]
    problem = Problem(members=tuple("abcdef"))
    assert not verdict_on(problem, *history).culprits
    history += [seen(3, "ae", FAIL), seen(3, "bf", PASS), seen(4, "ad", FAIL), seen(4, "ef", PASS)]
    assert not verdict_on(problem, *history).culprits, "three bad paths would look the same"
    (culprit,) = verdict_on(problem, *history, seen(5, "ab", PASS)).culprits
    assert (culprit.member, culprit.manner, culprit.failed, culprit.passed) == ("a", Manner.SOMETIMES, 3, 2)


def test_a_doubtful_partner_is_no_witness() -> None:
    """x fails with f and with g, who fail with others too: two flaky nodes, and x is innocent."""
    history = [seen(0, "xf", FAIL), seen(0, "gh", PASS), seen(1, "xg", FAIL), seen(1, "fh", FAIL), seen(2, "xh", PASS)]
    history += [seen(2, "gk", FAIL), seen(3, "fk", PASS), seen(3, "xk", PASS)]
    assert "x" not in accused(verdict_on(Problem(members=tuple("xfghk")), *history))


def test_failures_by_chance_elsewhere_ask_for_more_failures_of_a_culprit() -> None:
    members = names(200)  # so many that two partners are enough
    problem = Problem(members=members)
    pairs = [members[i : i + 2] for i in range(20, 64, 2)]
    history = [GroupOutcome(members=pair, outcome=PASS, round=0) for pair in pairs]
    history += [GroupOutcome(members=("n0000", f"n00{20 + i}"), outcome=FAIL, round=i) for i in range(1, 4)]
    assert accused(verdict_on(problem, *history[:-1])) == {"n0000"}, "nothing else failed: two are enough"
    by_chance = [GroupOutcome(members=(f"n00{i}", f"n00{i + 2}"), outcome=FAIL, round=0) for i in (40, 45, 50)]
    assert not accused(verdict_on(problem, *by_chance, *history[:-1]))
    assert not accused(verdict_on(problem, *by_chance, *history))


def test_slow_beside_others_is_measured_again_alone_before_blame() -> None:
    problem = Problem(members=tuple("abcd"))
    history = [
        seen(0, "abcd", SLOW),
        seen(1, "ab", SLOW),
        seen(1, "cd", PASS),
        seen(2, "ac", SLOW),
        seen(2, "bd", PASS),
    ]
    assert not verdict_on(problem, *history).culprits
    course = Course(problem)
    for number in range(3):
        step = course.step([one for one in history if one.round == number])
    assert isinstance(step, NextRound)
    (group,) = step.groups
    assert "a" in group
    assert "alone" in step.why
    blamed = verdict_on(problem, *history, GroupOutcome(members=group, outcome=SLOW, round=3))
    assert [(one.member, one.manner) for one in blamed.culprits] == [("a", Manner.SLOW)]
    assert not verdict_on(problem, *history, GroupOutcome(members=group, outcome=PASS, round=3)).culprits


def test_unknown_is_no_evidence_and_ends() -> None:
    verdict = localize(Problem(members=tuple("abcd")), [seen(0, "abcd", UNKNOWN), seen(1, "abcd", UNKNOWN)])
    assert isinstance(verdict, ValidationVerdict)
    assert not verdict.decided
    assert not accused(verdict)
    assert verdict.not_measured == tuple("abcd")


def test_a_member_that_never_answers_is_named_as_not_measured_and_the_rest_decided() -> None:
    problem = Problem(members=names(8))
    history: list[GroupOutcome] = []
    fleet = Fleet(seed=0, bad=frozenset(["n0003"]))
    while isinstance(step := localize(problem, history), NextRound):
        for outcome in fleet.run(step.groups, step.number):
            silent = "n0005" in outcome.members and step.number > 0
            history.append(
                outcome if not silent else GroupOutcome(members=outcome.members, outcome=UNKNOWN, round=step.number)
            )
    assert accused(step) == {"n0003"}
    assert step.not_measured == ("n0005",)
    assert step.rest_passed is True
    assert len(step.rest) == 6


@every(("count", "bad"), [(3, 1), (4, 1), (4, 2), (5, 1), (8, 2), (9, 2), (33, 8), (64, 16)])
def test_culprits_that_always_fail_are_found_exactly_in_few_rounds(count: int, bad: int) -> None:
    for seed in range(fleets(20)):
        problem = problem_of(count, seed=seed)
        culprits = frozenset(random.Random(seed).sample(problem.members, bad))
        verdict, _ = play(Fleet(seed=seed, bad=culprits), problem)
        assert accused(verdict) == culprits
        assert verdict.decided
        assert verdict.rounds <= (4 if 4 * bad <= count else 6)


def test_nobody_is_accused_when_nobody_is_clean() -> None:
    problem = problem_of(6, seed=1)
    verdict, _ = play(Fleet(seed=1, bad=frozenset(problem.members)), problem)
    assert not verdict.culprits
    assert not verdict.decided
    assert verdict.one_of == (problem.members,)


def test_bounds_are_kept_and_said() -> None:
    problem = Problem(members=names(64), max_rounds=1)
    verdict, _ = play(Fleet(seed=1, bad=frozenset(["n0007"])), problem)
    assert (verdict.rounds, verdict.tests) == (1, 32)
    assert not verdict.culprits
    assert "stopped by the limit" in verdict.reasons[-1]


def test_a_stranger_or_a_name_twice_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(BadInputError, match="'z', which is not a member; leave it out"):
        localize(Problem(members=("a", "b")), [seen(0, "az", FAIL)])
    with pytest.raises(BadInputError, match="named twice: a"):
        Problem(members=("a", "b", "a"))
    with pytest.raises(BadInputError, match="no members"):
        Problem(members=())
    with pytest.raises(BadInputError, match="false_alarm_ratio"):
        Problem(members=("a", "b"), false_alarm_ratio=0.9)


def test_a_large_fleet_is_planned_quickly() -> None:
    problem = problem_of(4096, seed=0, switch=32)
    culprits = frozenset(random.Random(0).sample(problem.members, 1024))
    began = time.process_time()
    verdict, _ = play(Fleet(seed=0, bad=culprits), problem)
    took = time.process_time() - began
    assert accused(verdict) == culprits
    assert took < 5, "a loop over pairs of members would take minutes"


def test_the_table_is_made_of_the_same_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scale", "0.01", "--only", "switch, "]) == 0
    assert capsys.readouterr().out.count(": met") == 2
    assert len({(row.kind, row.members, row.culprits) for row in rows()}) == len(list(rows()))


SMALL = [row for row in usual_rows() if row.members <= 64 and row.exact]


@every("row", SMALL)
def test_the_aims_of_the_table_hold_in_a_sample_of_its_fleets(row: Row) -> None:
    score = measure(row, fleets(max(20, row.runs // 20)))
    assert is_met(row, score, sure=SURE), score


HARD = [row for row in hard_rows() if row.members <= 64 and (row.exact or row.false)]


@every("row", some(HARD, 3))
def test_the_faults_of_real_fleets_are_named_and_the_healthy_are_not(row: Row) -> None:
    """A sample: an aim counts as missed only where chance would hardly miss it by so much."""
    score = measure(row, fleets(max(20, row.runs // 50)))
    assert is_met(row, score, sure=SURE), score


def test_idle_nodes_that_join_do_not_make_a_flaky_node_pass_for_good() -> None:
    """The whole failed before they came; that all of them pass together once does not undo it."""
    job, idle = tuple("abcd"), tuple("xy")
    problem = Problem(members=(*job, *idle))
    step: NextRound | ValidationVerdict = localize(problem, history := [seen(0, "abcd", FAIL)])
    while isinstance(step, NextRound) and step.number <= 6:
        assert all(len(group) == 2 for group in step.groups), step
        history += [GroupOutcome(members=group, outcome=PASS, round=step.number) for group in step.groups]
        step = localize(problem, history)
    assert isinstance(step, NextRound)
    assert step.groups == ((*job, *idle),)
    history += [GroupOutcome(members=step.groups[0], outcome=PASS, round=step.number)]
    again = localize(problem, history)
    assert isinstance(again, NextRound), "passing once, after it failed: it comes and goes"
