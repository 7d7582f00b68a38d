"""How often healthy groups have failed in past validations: what a search takes for known of chance. Pure."""

from __future__ import annotations

from healthd.aggregator.model.validations import ChanceSeen, Validation
from healthd.localize.model import Outcome, Verdict

MOST_TESTS = 2000.0
"""Tests that are remembered; of more, all counts are halved, so that a network that was mended is believed in time."""


def add(seen: ChanceSeen, validation: Validation) -> ChanceSeen:
    """The counts with those of a validation that has ended."""
    new_failed, new_tests = _count(validation)
    failed, tests = seen.failed + new_failed, seen.tests + new_tests
    share = 0.5 if tests > MOST_TESTS else 1.0
    return ChanceSeen(failed=failed * share, tests=tests * share)


def _count(validation: Validation) -> tuple[int, int]:
    """
    How many groups of healthy members failed by chance, and how many had an outcome.

    Only where all that remain passed together: else a cause that was not found is counted. Only pairs; of those that
    failed, the ones that passed too, and those with a member in common once, since that member may be the cause.
    """
    verdict = validation.verdict
    if verdict is None or verdict.rest_passed is not True or verdict.scale is not None:
        return 0, 0
    if any(one.injected for one in validation.history):  # a fault that was lifted meanwhile looks like chance
        return 0, 0
    named, used = _named(verdict), set[str]()
    known = [one for one in validation.history if len(one.members) == 2 and named.isdisjoint(one.members)]
    passed = [frozenset(one.members) for one in known if one.outcome is Outcome.PASS]
    failed = 0
    for one in known:
        mended = one.outcome is Outcome.FAIL and frozenset(one.members) in passed
        if mended and used.isdisjoint(one.members):
            used.update(one.members)
            failed += 1
    return failed, len(passed) + failed


def _named(verdict: Verdict) -> frozenset[str]:
    """All members that a verdict gives a cause of failures for."""
    return frozenset(one.member for one in verdict.culprits).union(
        verdict.not_measured,
        *(path.ends for path in verdict.paths),
        *(group.members for group in verdict.groups),
        *(side for trunk in verdict.trunks for side in trunk.members),
    )
