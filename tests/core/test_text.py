"""Ages, lengths of time and moments as people read them, and pauses that grow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.core.tasks import Backoff
from healthd.core.text import ago, moment, plain, span
from tests.every import every


@every(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (-1.0, "0 s"),
        (math.nan, "0 s"),
        (math.inf, "0 s"),
        (0.35, "350 ms"),
        (2.5, "2.5 s"),
        (3.0, "3 s"),
        (42.4, "42 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2 h"),
        (9720.0, "2.7 h"),
        (172800.0, "2 d"),
        (2419200.0, "28 d"),
    ],
)
def test_length_of_time_has_one_unit(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "never"), (math.nan, "never"), (0.2, "now"), (60.0, "60 s ago")])
def test_age(seconds: float | None, text: str) -> None:
    assert ago(seconds) == text


@given(st.floats())
def test_moment_is_a_line_whatever_a_node_says(at: float) -> None:
    assert "\n" not in moment(at)


def test_moment() -> None:
    assert moment(1_795_348_805.9) == "2026-11-22 12:00:05Z"
    assert (moment(-1e300), moment(1e300)) == ("long ago", "a time to come")


def test_text_of_others_becomes_one_line_and_is_cut() -> None:
    assert plain("a\nb\x1b[31m", 4) == "a b "


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.after(failures) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.after(10**6) == 3.0
