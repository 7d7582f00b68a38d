"""Localisation where the first tests mislead: what is asked besides, what a bound leaves, why the healthy are."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest

from healthd.aggregator.validation import records as model
from healthd.aggregator.validation.plan import NOISE_RATIO
from healthd.aggregator.validation.verdicts import consequence
from healthd.core.model import Verdict
from healthd.localize.model import GroupOutcome, NextRound, Outcome, Problem
from healthd.localize.model import ValidationVerdict as Found
from tests.aggregator.chance_seen_kit import validation
from tests.aggregator.lab import Lab
from tests.aggregator.localize_kit import accused, seen, verdict_on
from tests.benchmarks.localize.__main__ import fleet_of, rows
from tests.benchmarks.localize.simulator import Fleet, localize, names, play, problem_of

PASS, FAIL = Outcome.PASS, Outcome.FAIL


def test_a_healthy_end_of_two_bad_paths_that_met_just_those_is_tried_with_a_third_partner() -> None:
    problem = Problem(members=tuple("vabcdefg"))
    history = [seen(0, "vabcdefg", FAIL), seen(1, "va", FAIL), *(seen(1, pair, PASS) for pair in ("bc", "de", "fg"))]
    history += [seen(2, "vb", FAIL), seen(2, "ac", PASS)]
    assert not verdict_on(problem, *history).culprits
    step = localize(problem, history)
    assert isinstance(step, NextRound)
    (group,) = (group for group in step.groups if "v" in group)
    assert set(group) < set("vcdefg")
    assert len(group) == 2
    paths = frozenset([frozenset("va"), frozenset("vb")])
    for seed in range(40):
        verdict, _ = play(Fleet(seed=seed, paths=paths), Problem(members=tuple("vabcdefg"), seed=seed))
        assert not verdict.culprits, seed


def test_of_many_tests_two_failures_accuse_nobody() -> None:
    members = names(16)
    others = [members[i : i + 2] for i in range(4, 16, 2)]

    def history(passes: int) -> list[GroupOutcome]:
        rounds = [GroupOutcome(members=members, outcome=FAIL, round=0)]
        rounds += [GroupOutcome(members=pair, outcome=PASS, round=i) for pair in others for i in range(1, 10)]
        rounds += [GroupOutcome(members=(members[0], members[i]), outcome=FAIL, round=i) for i in (1, 2)]
        return rounds + [
            GroupOutcome(members=(members[0], members[1 + i % 3]), outcome=PASS, round=3 + i % 7) for i in range(passes)
        ]

    assert accused(verdict_on(Problem(members=members), *history(7))) == {members[0]}
    assert not accused(verdict_on(Problem(members=members), *history(10)))


def test_slow_beside_others_and_one_failure_accuse_nobody() -> None:
    problem = Problem(members=tuple("vabcdefg"))
    history = [seen(0, "vabcdefg", FAIL), seen(1, "va", FAIL), *(seen(1, pair, PASS) for pair in ("bc", "de", "fg"))]
    history += [seen(2, "vb", Outcome.SLOW), seen(2, "ac", PASS), seen(3, "vd", Outcome.SLOW), seen(3, "ae", PASS)]
    assert not verdict_on(problem, *history).culprits


def test_two_bad_paths_and_a_failure_by_chance_accuse_nobody() -> None:
    """v fails with a and with b each time, and once with c."""
    members = tuple("vabcdefghijk")
    history = [GroupOutcome(members=members, outcome=FAIL, round=0)]
    history += [seen(1, "va", FAIL), seen(1, "bc", PASS), seen(2, "vb", FAIL), seen(2, "ac", PASS)]
    history += [seen(3, "vc", FAIL), seen(4, "vc", PASS), seen(5, "va", FAIL), seen(6, "vb", FAIL)]
    history += [seen(i, pair, PASS) for i in range(1, 7) for pair in ("de", "fg", "hi", "jk")]
    assert not verdict_on(Problem(members=members), *history).culprits


def test_two_failures_do_not_accuse_where_the_rest_fails_without_the_member() -> None:
    members = names(16)
    others = [members[i : i + 2] for i in range(4, 16, 2)]
    history = [GroupOutcome(members=members, outcome=FAIL, round=0)]
    history += [GroupOutcome(members=pair, outcome=PASS, round=i) for pair in others for i in range(1, 10)]
    history += [GroupOutcome(members=(members[0], members[i]), outcome=FAIL, round=i) for i in (1, 2)]
    history += [GroupOutcome(members=(members[0], members[1 + i % 3]), outcome=PASS, round=3 + i) for i in range(7)]
    assert accused(verdict_on(Problem(members=members), *history)) == {members[0]}
    rest = GroupOutcome(members=members[1:], outcome=FAIL, round=10)
    assert not accused(verdict_on(Problem(members=members), *history, rest))


@pytest.mark.parametrize("count", [6, 8])
def test_two_that_are_cut_off_beside_a_bad_node_meet_before_anybody_is_accused(count: int) -> None:
    bad, cut = frozenset(["n0002"]), frozenset(names(count)[-2:])
    for seed in range(100):
        verdict, _ = play(Fleet(seed=seed, bad=bad, cuts=(cut,)), problem_of(count, seed=seed))
        assert accused(verdict) <= bad, seed


def cleared(verdict: Found, history: Sequence[GroupOutcome], members: tuple[str, ...]) -> set[str]:
    """Whom a gate over these may start on."""
    tested = [model.Tested(members=one.members, outcome=one.outcome, round=one.round, seconds=1.0) for one in history]
    found = dataclasses.replace(validation(verdict, *tested), members=members)
    return set(consequence(found).cleared)


@pytest.mark.parametrize("noise", [0.0, NOISE_RATIO])
def test_a_whole_that_passes_clears_who_failed_by_chance_before(noise: float) -> None:
    """The verdict called all of them healthy, and two of them in doubt, so that the gate cleared nobody."""
    started = 0
    for seed in range(20):
        problem = problem_of(64, seed=seed, noise=noise)
        verdict, history = play(Fleet(seed=seed, alarm_ratio=0.02), problem, first=FAIL)
        assert set(verdict.rest).isdisjoint(set[str]().union(*verdict.one_of)), verdict.reasons
        started += cleared(verdict, history, problem.members) == set(problem.members)
    assert started >= 17


@pytest.mark.parametrize("count", [8, 16, 64])
def test_a_bad_path_beside_a_bad_node_is_named_and_one_of_its_ends_goes_on(count: int) -> None:
    for seed in range(10):
        bad, end, other = random.Random(seed).sample(names(count), 3)
        fleet = Fleet(seed=seed, bad=frozenset([bad]), paths=frozenset([frozenset((end, other))]))
        verdict, history = play(fleet, problem_of(count, seed=seed))
        assert accused(verdict) == {bad}
        assert [set(path.ends) for path in verdict.paths] == [{end, other}], seed
        assert len(cleared(verdict, history, names(count))) == count - 2


def test_each_end_of_a_doubtful_pair_gets_its_turn_with_the_one_clean_node() -> None:
    """The end that had passed with it before was tested with it in every round, and the flaky node in none."""
    flaky = random.Random(0).choice(names(4))
    for seed in range(20):
        fleet = Fleet(seed=seed, flaky=frozenset([flaky]))
        verdict, _ = play(fleet, problem_of(4, seed=seed, noise=0.02), first=FAIL)
        assert accused(verdict) == {flaky} or verdict.rounds < 40, (seed, verdict.reasons)


def test_one_of_three_that_always_fails_is_tried_again_where_both_partners_are_not_enough() -> None:
    for seed in range(20):
        fleet = Fleet(seed=seed, bad=frozenset(["n0001"]))
        verdict, _ = play(fleet, problem_of(3, seed=seed, noise=NOISE_RATIO))
        assert accused(verdict) == {"n0001"}, (seed, verdict.reasons)


def test_two_of_four_that_always_fail_are_tried_again_with_each_clean_partner_in_turn() -> None:
    """Each was tested again with the same partner every time, which one bad path would explain as well."""
    for seed in range(40):
        bad = set(random.Random(seed).sample(names(4), 2))
        fleet = Fleet(seed=seed, bad=frozenset(bad))
        verdict, _ = play(fleet, problem_of(4, seed=seed, noise=NOISE_RATIO))
        assert accused(verdict) == bad, (seed, verdict.reasons)


class Unlucky(Fleet):
    """The first test of those that are cut off fails by chance."""

    def run(self, groups: Sequence[tuple[str, ...]], number: int) -> list[GroupOutcome]:
        outcomes = super().run(groups, number)
        (cut,) = self.cuts
        for i, one in enumerate(outcomes):
            if cut == frozenset(one.members) and self.failures_left is None:
                self.failures_left = 1_000_000
                outcomes[i] = dataclasses.replace(one, outcome=FAIL)
        return outcomes


@pytest.mark.parametrize("count", [4, 8, 16])
def test_two_that_are_cut_off_and_fail_together_by_chance_are_tried_again(count: int) -> None:
    for seed in range(50):
        cut = frozenset(names(count)[:2])
        verdict, _ = play(Unlucky(seed=seed, cuts=(cut,)), problem_of(count, seed=seed))
        assert not accused(verdict), seed


def test_one_that_is_cut_off_with_two_meets_both_of_them() -> None:
    """Its path to one of them is bad as well."""
    cut, path = frozenset(["n0000", "n0001", "n0002"]), frozenset(["n0000", "n0001"])
    for seed in range(100):
        verdict, _ = play(Fleet(seed=seed, cuts=(cut,), paths=frozenset([path])), problem_of(8, seed=seed))
        assert not accused(verdict), seed


def test_a_bound_leaves_the_largest_group_that_passed_to_run_and_nothing_decided() -> None:
    problem = Problem(members=tuple("abcd"), max_rounds=1)
    verdict = verdict_on(problem, seen(0, "abcd", FAIL), seen(1, "abc", PASS))
    assert (verdict.rest, verdict.rest_passed, verdict.decided) == (("a", "b", "c"), True, False)
    assert "the 4 remaining members fail together; the largest group that passed has 3" in verdict.reasons


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        (Fleet(seed=1), "all 8 are healthy: they passed together"),
        (
            Fleet(seed=1, bad=frozenset(["n0003"])),
            "the other 7 are healthy: they passed together, without the suspects",
        ),
        (Fleet(seed=1, scale=5), "8 of them passed in other groups, so none is accused"),
    ],
    ids=["whole", "rest", "scale"],
)
def test_the_verdict_says_why_the_healthy_are_healthy(fleet: Fleet, said: str) -> None:
    verdict, _ = play(fleet, problem_of(8, seed=1))
    assert any(reason.endswith(said) for reason in verdict.reasons), verdict.reasons


def test_three_who_must_take_part_are_found_where_those_left_out_first_are_among_them() -> None:
    row = next(row for row in rows() if row.kind == "three certain nodes together")
    for run in (5, 54, 61):
        fleet, problem = fleet_of(row, run)
        verdict, _ = play(fleet, problem)
        assert verdict.scale is not None
        assert frozenset(verdict.scale.members) == fleet.together, run


def test_of_many_broken_paths_those_that_can_run_together_are_admitted() -> None:
    names = tuple(f"n{i:02d}" for i in range(24))
    chance = random.Random(3)
    cut = [frozenset(pair) for pair in itertools.combinations(names, 2) if chance.random() < 0.1]
    lab = Lab(names, cut=cut)
    decision = lab.decide(lab.ask(nodes=names, min_nodes=6))
    assert decision.decision is Verdict.ADMIT, decision.reasons
    assert not any(pair <= {one.node for one in decision.nodes} for pair in cut)
    assert {one.reasons[0].code for one in decision.excluded if one.reasons} <= {"PathFault", "Undecided", "Ambiguous"}
    assert lab.accused() == set()
