"""The risk of a node: which of two is screened first, and which term says why."""

from __future__ import annotations

import dataclasses

from healthd.aggregator.screening import risk as weights
from healthd.aggregator.screening.records import Candidate
from healthd.aggregator.screening.risk import risk
from tests.every import every

PLAIN = Candidate(
    node="n1",
    pool="a",
    days_since_pass=10.0,
    corrected_per_hour=0.0,
    corrected_before_per_hour=0.0,
    age_days=100.0,
    changed=False,
    neighbour_failed=False,
)


def points(**changed: object) -> dict[str, float]:
    found = risk(dataclasses.replace(PLAIN, **changed))  # type: ignore[arg-type]
    assert found.total == sum(term.points for term in found.terms)
    return {term.name: term.points for term in found.terms}


@every(
    ("changed", "name", "added"),
    [
        ({"corrected_per_hour": 5.0, "corrected_before_per_hour": 4.0}, "corrected_per_hour", 30.0),
        ({"corrected_per_hour": 5.0, "corrected_before_per_hour": 2.0}, "corrected_rise_per_hour", 60.0),
        ({"failures": 1}, "failures", 40.0),
        ({"failures": 9}, "failures", 120.0),
        ({"quarantines": 2}, "quarantines", 10.0),
        ({"quarantines": 99}, "quarantines", 20.0),
        ({"age_days": 29.0}, "age_days", 70.0),
        ({"age_days": 365.0}, "age_days", 10.0),
        ({"changed": True}, "changed", weights.CHANGED_POINTS),
        ({"neighbour_failed": True}, "neighbour_failed", 20.0),
    ],
)
def test_each_sign_adds_its_weight_for_each_day_since_the_pass(
    changed: dict[str, object], name: str, added: float
) -> None:
    assert points() == {"days_since_pass": 10.0}
    assert points(**changed)[name] == added


def test_what_is_not_known_adds_nothing_and_is_named() -> None:
    bare = risk(Candidate(node="n1", pool=None, days_since_pass=10.0))
    assert bare.total == 10.0
    assert set(bare.unknown) == {"corrected_per_hour", "age_days", "changed", "neighbour_failed"}
    assert risk(PLAIN).unknown == ()
    first_count = points(corrected_per_hour=5.0, corrected_before_per_hour=None)
    assert first_count.keys() == {"days_since_pass", "corrected_per_hour"}


def test_node_that_never_passed_comes_before_one_of_last_week_and_a_fresh_pass_outweighs_every_sign() -> None:
    never = risk(dataclasses.replace(PLAIN, days_since_pass=None))
    assert never.total == weights.NEVER_DAYS > risk(PLAIN).total
    marked = dataclasses.replace(PLAIN, days_since_pass=0.1, failures=9, corrected_per_hour=9.0, age_days=1.0)
    assert risk(marked).total < risk(PLAIN).total
