"""The risk of a node: how urgent its screening is. Pure."""

from __future__ import annotations

from healthd.aggregator.screening.records import Candidate, Risk, Term

NEVER_DAYS = 365.0
"""A node that has never passed counts as one whose last pass is a year ago."""


def risk(candidate: Candidate) -> Risk:
    """The risk of a node with its terms. It is called for each node of a fleet, so it makes no sentences."""
    days = NEVER_DAYS if candidate.days_since_pass is None else candidate.days_since_pass
    terms = (Term(name="days_since_pass", value=days, points=days),)
    return Risk(total=days, terms=terms)
