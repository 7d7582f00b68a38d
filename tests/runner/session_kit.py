"""What the tests of session, and those beside them, are made with."""

from __future__ import annotations

from checks.collective.judge import judge_ranks
from checks.contract import Evidence, Finding, Missing, Progress, Status
from healthd.core.model import RankReport


def accused(reports: list[RankReport]) -> list[tuple[str, str | None]]:
    """Whom the judge of a collective names, from nothing but what all ranks reported."""
    evidence = [
        Evidence(target=f"rank:{one.rank}", key=one.key, data=one.data)
        for one in reports
        if one.key is not None and one.data is not None
    ]
    missing = [
        Missing(
            target=f"rank:{one.rank}",
            reason=one.reason,
            message=one.message,
            progress=progress_of(one),
        )
        for one in reports
        if one.reason is not None
    ]
    findings: list[Finding] = list(judge_ranks(reports[0].check, evidence, missing))
    return [(finding.target, finding.reason) for finding in findings if finding.status is not Status.PASS]


def progress_of(report: RankReport) -> tuple[Progress, ...]:
    """As many signs of life as were counted; of all but the newest nothing is known."""
    step, _, event = report.last.rpartition(" ")
    unknown = Progress(step="", event="", monotonic_seconds=0.0)
    return (*(unknown for _ in range(report.events - 1)), Progress(step=step, event=event, monotonic_seconds=0.0))[
        : report.events
    ]
