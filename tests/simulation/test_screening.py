"""A short year of a small fleet: screening by risk prevents failures of jobs, and at least as many as by chance."""

from __future__ import annotations

from tests.simulation.screening import Choice, Site, compare, turns_bad

SITE = Site(seed=1, nodes=120, days=120, idle=0.05, faster=60.0)


def test_screening_by_risk_prevents_at_least_as_many_failures_as_by_chance_within_the_same_hours() -> None:
    year = compare(SITE)
    none, by_chance, by_risk = (year[choice] for choice in (Choice.NONE, Choice.RANDOM, Choice.RISK))
    assert by_risk.failed_jobs <= by_chance.failed_jobs < none.failed_jobs
    assert none.hours == 0
    assert 0 < by_chance.hours <= by_risk.hours < by_risk.idle
    assert compare(SITE) == year, "the same seed is the same year"


def test_devices_turn_bad_as_the_published_shares_say() -> None:
    """A quarter at burn-in, 35 % until a year, the rest in the half year after it."""
    new, year, seen = (days_of(days) for days in (30.0, 365.0, 548.0))
    assert (round(new / seen, 2), round(year / seen, 2)) == (0.25, 0.60)


def days_of(days: float) -> float:
    """The hazard that a new device collects in so many days."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if turns_bad(middle, 0.0) < days else (low, middle)
    return low
