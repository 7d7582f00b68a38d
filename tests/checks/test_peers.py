"""Comparison of peers: the vote over digests, and who is slow."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.peers import (
    LEAST_PEERS,
    Majority,
    excess_ratios,
    factor_of,
    median,
    normal,
    sigma_of,
    slow_ones,
    spread,
    vote,
)
from tests.every import every

NUMBERS = st.floats(min_value=1e-3, max_value=1e6)


@every(
    ("digests", "right", "count"),
    [
        ("a", "a", 1),
        ("aa", "a", 2),
        ("ab", None, 1),
        ("aab", "a", 2),
        ("aabb", None, 2),
        ("aabc", None, 2),  # most, but half of them: no majority
        ("aaabc", "a", 3),
        ("abc", None, 1),
    ],
)
def test_more_than_half_of_the_votes_are_right_and_half_are_not(digests: str, right: str | None, count: int) -> None:
    found = vote(Counter(digests))
    assert found == Majority(right, count, len(digests))
    assert found.is_unanimous == (len(set(digests)) == 1)


@given(st.lists(st.sampled_from("abcd"), min_size=1))
def test_nobody_is_right_against_as_many_others(digests: list[str]) -> None:
    found = vote(Counter(digests))
    if found.right is None:
        assert all(2 * digests.count(one) <= len(digests) for one in digests)
    else:
        assert 2 * digests.count(found.right) > len(digests)


def test_a_slow_one_is_beyond_the_deviation_and_beyond_the_floor() -> None:
    values = [98.0, 99.0, 100.0, 101.0, 102.0] * 3
    middle, mad = spread(values)
    assert (middle, mad) == (100.0, pytest.approx(15 / 14.2))
    line = 100 + 4 * 1.4826 * mad

    def is_slow(value: float, floor: float) -> bool:
        return normal(values, lambda _: floor, factor=4.0).is_slow(value)

    assert not is_slow(line - 0.01, 0.0)
    assert is_slow(line + 0.01, 0.0)
    assert not is_slow(line + 0.01, 10.0)
    assert not is_slow(110.0, 10.0)
    assert is_slow(110.01, 10.0)


def test_slow_ones_are_those_on_the_bad_side_alone() -> None:
    values = [100.0] * 20 + [80.0, 120.0]
    line, slow = slow_ones(values, lambda middle: 0.05 * middle, factor=3.0)
    assert (slow, line.limit()) == ((21,), 105.0)
    line, slow = slow_ones(values, lambda middle: 0.05 * middle, factor=3.0, higher_is_better=True)
    assert (slow, line.limit(higher_is_better=True)) == ((20,), 95.0)


def test_the_deviation_counts_from_eleven_peers_on() -> None:
    assert LEAST_PEERS == 11
    peers = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert normal(peers, lambda _: 0.5, factor=4.0).margin == 0.5
    assert normal([*peers, 11.0], lambda _: 0.5, factor=4.0).margin > 4 * 1.4826 * 3


def test_values_that_do_not_differ_leave_half_a_per_cent_of_the_median() -> None:
    line = normal([200.0] * 12, lambda _: 0.0, factor=2.0)
    assert line.margin == pytest.approx(2 * 1.4826 * 1.0)


def test_each_is_compared_with_the_median_of_the_others() -> None:
    assert excess_ratios({0: 1.0}) == {}
    assert excess_ratios({0: 1.0, 1: 1.5}) == {0: pytest.approx(-1 / 3), 1: pytest.approx(0.5)}
    assert excess_ratios({0: 0.0, 1: 1.0}) == {0: -1.0}  # nothing is so many times longer than nothing


@given(st.dictionaries(st.integers(), NUMBERS, min_size=2, max_size=9))
def test_the_median_of_the_others_leaves_out_one_alone(values: dict[int, float]) -> None:
    for key, ratio in excess_ratios(values).items():
        others = statistics.median(value for other, value in values.items() if other != key)
        assert ratio == values[key] / others - 1


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_the_median_is_that_of_statistics(values: list[float]) -> None:
    assert median(values) == statistics.median(values)


def test_no_values_have_no_median() -> None:
    assert math.isnan(median([]))


def test_the_deviation_of_normal_values_is_theirs() -> None:
    ordinary = statistics.NormalDist(0.0, 2.0)
    assert sigma_of(ordinary.inv_cdf((i + 0.5) / 10_001) for i in range(10_001)) == pytest.approx(2.0, rel=1e-3)


def test_more_comparisons_take_a_larger_factor() -> None:
    assert factor_of(0.01, 1) == pytest.approx(2.576, abs=0.001)
    assert factor_of(0.01, 100_000) > factor_of(0.01, 1000) > factor_of(0.01, 1)
