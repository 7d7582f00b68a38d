"""
The risk of a node: how urgent its screening is. Pure.

The unit is a day. Each day since the last pass counts one point, and each sign that the node turns bad sooner than
others adds a multiple of these days, so that the total compares how likely it is that the node has turned bad since. A
change of driver or firmware adds a fixed number, because it may break a node on its first day. Facts that are not known
add nothing. docs/screening.md has the sources of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.aggregator.screening.records import Candidate, Risk, Term

NEVER_DAYS = 365.0
"""A node that has never passed counts as one whose last pass is a year ago."""
CORRECTED_WEIGHT = 3.0
"""Its memory corrects errors."""
RISING_WEIGHT = 6.0
"""It corrects more than at the last pass, by RISING_RATIO at least."""
RISING_RATIO = 1.5
FAILURE_WEIGHT = 4.0
"""Each screening that failed, up to MOST_FAILURES."""
MOST_FAILURES = 3
QUARANTINE_WEIGHT = 0.5
"""Each quarantine, up to MOST_QUARANTINES: many have other causes than a device."""
MOST_QUARANTINES = 4
NEW_WEIGHT = 7.0
"""In the first NEW_DAYS of a device."""
NEW_DAYS = 30.0
OLD_WEIGHT = 1.0
"""From OLD_DAYS on."""
OLD_DAYS = 365.0
NEIGHBOUR_WEIGHT = 2.0
"""A node with the same switch or delivery failed a screening lately."""
CHANGED_POINTS = 21.0
"""Another driver or firmware: as three weeks without a pass."""


FACTS = ("corrected_per_hour", "age_days", "changed", "neighbour_failed")
"""What may not be known of a node."""


def risk(candidate: Candidate) -> Risk:
    """The risk of a node with its terms. It is called for each node of a fleet, so it makes no sentences."""
    days = NEVER_DAYS if candidate.days_since_pass is None else max(0.0, candidate.days_since_pass)
    terms = [Term("days_since_pass", days, days)]
    terms += [Term(name, value, weight * days) for name, value, weight in _signs(candidate)]
    if candidate.changed:
        terms.append(Term("changed", 1.0, CHANGED_POINTS))
    unknown = tuple([name for name in FACTS if getattr(candidate, name) is None])
    return Risk(sum([term.points for term in terms]), tuple(terms), unknown)


def _signs(candidate: Candidate) -> Iterator[tuple[str, float, float]]:
    """The signs that the node turns bad sooner than others: name, value and weight."""
    corrected, before, age = candidate.corrected_per_hour, candidate.corrected_before_per_hour, candidate.age_days
    if corrected:
        yield "corrected_per_hour", corrected, CORRECTED_WEIGHT
        if before is not None and corrected > RISING_RATIO * before:
            yield "corrected_rise_per_hour", corrected - before, RISING_WEIGHT
    if candidate.failures:
        yield "failures", candidate.failures, FAILURE_WEIGHT * min(candidate.failures, MOST_FAILURES)
    if candidate.quarantines:
        yield "quarantines", candidate.quarantines, QUARANTINE_WEIGHT * min(candidate.quarantines, MOST_QUARANTINES)
    if age is not None and (age < NEW_DAYS or age >= OLD_DAYS):
        yield "age_days", age, NEW_WEIGHT if age < NEW_DAYS else OLD_WEIGHT
    if candidate.neighbour_failed:
        yield "neighbour_failed", 1.0, NEIGHBOUR_WEIGHT
