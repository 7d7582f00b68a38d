"""Who is slow by its own time, over simulated jobs: one slow rank is named soon, uneven data accuses nobody."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.integrations.steps.datagram import StepReport, parse
from healthd.integrations.steps.detector import WINDOW_STEPS, JobSteps, change_point
from tests.every import every
from tests.integrations.steps.detector_kit import STEP_SECONDS, Own, by_blocks, by_drift, by_length, by_turns, noisy
from tests.profile import fleets


def reports(own: Own, steps: int, ranks: int, *, first: int = 0, work: Own | None = None) -> Iterator[StepReport]:
    for step in range(first, first + steps):
        seconds = [own(step, rank) for rank in range(ranks)]
        for rank, mine in enumerate(seconds):
            yield StepReport("j", rank, ranks, step, mine, max(seconds) - mine, work(step, rank) if work else None)


def accused(found: Iterator[StepReport]) -> list[tuple[int, ...]]:
    """Who is slow after each window."""
    job = JobSteps()
    return [tuple(one.rank for one in job.slow) for report in found if job.add(report)]


@every("ranks", [3, 4, 8])
@every("scatter", [0.0, 0.01, 0.05])
def test_rank_that_is_a_tenth_slower_is_named_within_five_windows(ranks: int, scatter: float) -> None:
    for seed in range(10):
        own = noisy(random.Random(seed), scatter)
        slow = seed % ranks
        found = accused(
            reports(lambda step, rank: own(step, rank) * (1.1 if rank == slow else 1), 6 * WINDOW_STEPS, ranks)  # noqa: B023
        )
        assert (slow,) in found[:5], (ranks, scatter, seed, found)
        assert all(who in ((), (slow,)) for who in found)


def test_of_two_ranks_the_slow_one_is_named_after_twice_as_long() -> None:
    own = noisy(random.Random(7))
    found = accused(reports(lambda step, rank: own(step, rank) * (1.1 if rank == 1 else 1), 12 * WINDOW_STEPS, 2))
    assert set(found[:8]) == {()}
    assert found[9] == (1,)


@pytest.mark.parametrize("kind", [by_length, by_blocks, by_turns, by_drift])
def test_uneven_data_accuses_nobody_in_a_hundred_runs(kind: Callable[[random.Random, int], Own]) -> None:
    """A quarter of the runs each by night, of 30 windows."""
    for seed in range(fleets(25)):
        ranks = (4, 8)[seed % 2]
        own = kind(random.Random(f"{kind.__name__} {seed}"), ranks)
        found = accused(reports(own, 30 * WINDOW_STEPS, ranks))
        assert found
        assert set(found) == {()}, (kind.__name__, seed, found)


def test_healthy_ranks_accuse_nobody_and_waiting_is_nobodys_fault() -> None:
    for seed in range(20):
        assert set(accused(reports(noisy(random.Random(seed)), 30 * WINDOW_STEPS, 4))) == {()}


def test_step_from_which_a_rank_is_slow_is_told() -> None:
    own = noisy(random.Random(1))
    job = JobSteps()
    change = 15 * WINDOW_STEPS
    for report in reports(
        lambda step, rank: own(step, rank) * (1.25 if rank == 2 and step >= change else 1), 25 * WINDOW_STEPS, 4
    ):
        job.add(report)
    (slow,) = job.slow
    assert slow.rank == 2
    assert slow.since_step is not None
    assert abs(slow.since_step - change) <= WINDOW_STEPS
    assert slow.excess_ratio == pytest.approx(0.25, abs=0.02)
    assert slow.own_seconds == pytest.approx(STEP_SECONDS * 1.25, rel=0.02)
    assert slow.peers_seconds == pytest.approx(STEP_SECONDS, rel=0.02)


def test_rank_that_recovers_is_no_longer_named() -> None:
    own = noisy(random.Random(2))
    found = accused(
        reports(
            lambda step, rank: own(step, rank) * (1.3 if rank == 1 and step < 10 * WINDOW_STEPS else 1),
            20 * WINDOW_STEPS,
            4,
        )
    )
    assert (1,) in found[:10]
    assert found[-1] == ()


def test_rank_with_more_to_do_is_not_slow_where_the_work_is_told() -> None:
    def work(step: int, rank: int) -> float:
        return 1400.0 if rank == 3 else 1000.0

    own = noisy(random.Random(3))
    uneven = accused(reports(lambda s, r: own(s, r) * work(s, r) / 1000, 8 * WINDOW_STEPS, 4))
    assert uneven[-1] == (3,)  # by time alone it cannot be told from a slow device
    told = accused(reports(lambda s, r: own(s, r) * work(s, r) / 1000, 8 * WINDOW_STEPS, 4, work=work))
    assert set(told) == {()}


def test_one_rank_has_nobody_to_be_compared_with() -> None:
    assert set(accused(reports(noisy(random.Random(4)), 8 * WINDOW_STEPS, 1))) == {()}


def test_two_of_four_that_are_slower_than_the_rest_are_both_named_and_three_are_no_outliers() -> None:
    own = noisy(random.Random(5))
    two = accused(reports(lambda s, r: own(s, r) * (1.3 if r < 1 else 1), 8 * WINDOW_STEPS, 3))
    assert two[-1] == (0,)
    three = accused(reports(lambda s, r: own(s, r) * (1.3 if r < 3 else 1), 8 * WINDOW_STEPS, 4))
    assert three[-1] == ()


def test_lost_datagrams_a_rank_that_is_gone_and_a_restart_are_survived() -> None:
    chance = random.Random(6)
    own = noisy(chance)
    slow: Own = lambda step, rank: own(step, rank) * (1.2 if rank == 1 else 1)  # noqa: E731
    job = JobSteps()
    for report in reports(slow, 20 * WINDOW_STEPS, 4):
        if chance.random() > 0.05:
            job.add(report)
    assert [one.rank for one in job.slow] == [1]
    for report in reports(slow, 30 * WINDOW_STEPS, 3, first=20 * WINDOW_STEPS):  # rank 3 has died
        job.add(report)
    assert sorted(job.windows[-1].own_seconds) == [0, 1, 2]
    assert [one.rank for one in job.slow] == [1]
    for report in reports(noisy(chance), 8 * WINDOW_STEPS, 4):  # from a checkpoint, on another device
        job.add(report)
    assert job.slow == ()
    assert len(job.windows) < 10


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 600), st.floats(0, 1)), max_size=400))
def test_any_order_of_reports_is_bounded_and_never_raises(told: Sequence[tuple[int, int, float]]) -> None:
    job = JobSteps()
    for rank, step, own in told:
        job.add(StepReport("j", rank, 4, step, own, 0.0, None))
        assert len(job._pending) <= 8 * WINDOW_STEPS


def test_change_point_is_where_a_series_steps_up() -> None:
    assert change_point([0.0, 0.01, 0.0, -0.01, 0.2, 0.21, 0.19]) == 4
    assert change_point([0.2, 0.21, 0.19, 0.2]) is None
    assert change_point([]) is None
    assert change_point([0.1]) is None


@given(st.binary(max_size=600))
def test_any_bytes_are_a_report_or_nothing(data: bytes) -> None:
    found = parse(data)
    assert found is None or 0 <= found.rank < found.size


@every(
    ("text", "fine"),
    [
        ("step1 j 0 4 7 0.1 0.2", True),
        ("step1 j 0 4 7 0.1 0.2 4096\n", True),
        ("step1 j 4 4 7 0.1 0.2", False),
        ("step1 j 0 4 7 nan 0.2", False),
        ("step1 j 0 4 7 -1 0.2", False),
        ("step1 j 0 4 7 0.1 inf", False),
        ("step1 j 0 4 7 0.1 0.2 0", False),
        ("step1 j 0 4 -7 0.1 0.2", False),
        ("step1 j 0 4 7 0.1", False),
        ("step2 j 0 4 7 0.1 0.2", False),
        (f"step1 {'j' * 200} 0 4 7 0.1 0.2", False),
        ("", False),
    ],
)
def test_datagram_is_what_the_page_says(text: str, fine: bool) -> None:
    assert (parse(text.encode()) is not None) is fine
