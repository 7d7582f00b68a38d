"""Judging numbers: text, number and status agree, and what is no number is never a pass."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import NO_LIMIT, Action, Blame, Finding, Limit, Status
from checks.limits import quantity, unit, within
from tests.every import every


def judge(value: float | None, limit: Limit = NO_LIMIT, outside: Status = Status.FAIL) -> Finding:
    return within(
        value, name="room_bytes", target="node", limit=limit, reason="DiskFull", subject="room", outside=outside
    )


def limit(lower: float | None = None, upper: float | None = None, origin: str = "config") -> Limit:
    return Limit(lower=lower, upper=upper, origin=origin)


@every(
    ("value", "bounds", "status"),
    [
        (5.0, limit(lower=5.0), Status.PASS),
        (4.999, limit(lower=5.0), Status.FAIL),
        (5.0, limit(upper=5.0), Status.PASS),
        (5.001, limit(upper=5.0), Status.FAIL),
        (5.0, limit(5.0, 5.0), Status.PASS),
        (0.0, limit(lower=0.0), Status.PASS),
        (-0.5, limit(lower=0.0), Status.FAIL),
    ],
)
def test_value_at_its_bound_passes_and_its_neighbour_does_not(value: float, bounds: Limit, status: Status) -> None:
    finding = judge(value, bounds)
    assert finding.status is status
    assert finding.reason == (None if status is Status.PASS else "DiskFull")


@every("value", [math.nan, math.inf, -math.inf])
@every("bounds", [NO_LIMIT, limit(0.0, 9.0)])
def test_value_that_is_not_finite_fails_even_without_a_limit_and_goes_into_json(value: float, bounds: Limit) -> None:
    finding = judge(value, bounds)
    assert (finding.status, finding.reason) == (Status.FAIL, "DiskFull")
    assert str(value) in finding.message
    json.dumps(asdict(finding), allow_nan=False)


def test_value_that_is_not_finite_fails_where_being_outside_only_warns() -> None:
    assert judge(math.nan, outside=Status.WARN).status is Status.FAIL


def test_no_reading_is_unknown_and_keeps_the_place_of_the_number() -> None:
    finding = judge(None, limit(lower=1.0))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "NoData")
    assert finding.measurements[0].value is None


def test_without_a_limit_the_number_passes_unjudged_and_says_so() -> None:
    finding = judge(7.0)
    assert finding.status is Status.PASS
    assert finding.measurements[0].origin == "none"


@pytest.mark.parametrize("bounds", [limit(lower=9e9, origin="baseline"), limit(upper=1e9, origin="baseline")])
def test_message_of_a_breach_has_number_limit_and_who_set_it(bounds: Limit) -> None:
    text = judge(5e9, bounds).message
    assert "5 GB" in text
    assert "limit from baseline" in text
    assert ("9 GB" in text) or ("1 GB" in text)


def test_blame_and_action_belong_to_a_breach_alone() -> None:
    def made(value: float) -> Finding:
        return within(
            value,
            name="x_count",
            target="node",
            limit=limit(upper=1.0),
            reason="SlowLink",
            subject="x",
            blame=Blame.PATH,
            action=Action.INSPECT,
        )

    assert (made(1.0).blame, made(1.0).action) == (None, None)
    assert (made(2.0).blame, made(2.0).action) == (Blame.PATH, Action.INSPECT)


@pytest.mark.parametrize("bounds", [limit(lower=math.nan), limit(upper=math.nan), limit(math.nan, 9.0)])
def test_limit_that_is_no_number_judges_nothing_so_it_is_unknown(bounds: Limit) -> None:
    finding = judge(5.0, bounds)
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "NoData")
    assert "config" in finding.message


@given(st.floats() | st.none(), st.floats(allow_nan=False) | st.none(), st.floats(allow_nan=False) | st.none())
def test_only_a_finite_number_inside_its_bounds_ever_passes(
    value: float | None, lower: float | None, upper: float | None
) -> None:
    passed = judge(value, limit(lower, upper)).status is Status.PASS
    inside = (
        value is not None
        and math.isfinite(value)
        and (lower is None or value >= lower)
        and (upper is None or value <= upper)
    )
    assert passed == inside


@every(
    ("name", "value", "text"),
    [
        ("a_bytes", None, "none"),
        ("a_bytes", 0, "0 B"),
        ("a_bytes", 999, "999 B"),
        ("a_bytes", 1e9, "1 GB"),
        ("a_bytes_per_second", 12.34e9, "12.3 GB/s"),
        ("a_flops_per_second", 1.5e12, "1.5 TFLOP/s"),
        ("a_seconds", 0.0, "0 s"),
        ("a_seconds", 2.0, "2 s"),
        ("a_seconds", 0.0015, "1.5 ms"),
        ("a_seconds", 2e-6, "2 us"),
        ("a_seconds", 5e-9, "0.005 us"),
        ("a_ratio", 0.87, "87 %"),
        ("a_count", 3.0, "3"),
        ("a_count", math.nan, "nan"),
    ],
)
def test_quantities_read_as_people_write_them(name: str, value: float | None, text: str) -> None:
    assert quantity(name, value) == text


def test_rate_of_bytes_is_not_taken_for_bytes_or_seconds() -> None:
    assert [unit(name) for name in ("a_bytes_per_second", "a_bytes", "a_seconds", "a_ratio", "a")] == [
        "B/s", "B", "s", "", ""
    ]  # fmt: skip
