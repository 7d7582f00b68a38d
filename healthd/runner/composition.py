"""
Makes the result of a check from the outcomes of its workers and of its judge: pure.

What is missing, silent or passed only after a crash is never a pass.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from checks.contract import SEVERITY, CheckInfo, Finding, Missing, Scope, Status, make_finding, worst
from checks.worker.protocol import shorten
from healthd.core.model import CheckResult
from healthd.core.model.work_digests import digests_of
from healthd.runner.settings import Plan
from healthd.runner.workers.outcome import MAX_ERROR_CHARACTERS, Outcome

# Reasons that prove a fault of the node; all others for having no outcome mean that its state is unknown.
_FAILURES = frozenset({"Stuck", "MissingDevice", "DeviceLost"})


def compose(
    info: CheckInfo,
    plan: Plan,
    outcomes: Sequence[Outcome],
    *,
    judgement: Outcome | None,
    injected: bool,
    machine: Callable[[], str | None] = lambda: None,
    devices: Collection[str] = (),
) -> CheckResult:
    """
    The result of a check from the outcomes of all its workers and of its judge.

    In a group the judge speaks for the ranks without an outcome; where it names no culprit, they are unknown.
    `devices` are those that its workers had.
    """
    grouped = info.scope is Scope.GROUP
    judged = judgement is not None
    found: list[Finding] = []
    for outcome in outcomes:
        if grouped and judged and outcome.missing is not None:
            found.extend(outcome.findings)
        else:
            found.extend(_findings_of(outcome, judged=judged))
    if judgement is not None:
        found.extend(judgement.findings)
        # Where all ranks say that they have nothing to compare, as the only rank of a node does, nothing is judged.
        compared = any(outcome.evidence or outcome.missing is not None for outcome in outcomes)
        if compared and not judgement.findings and judgement.missing is None and _none_bad(found):
            found.append(_no_data("node", "its judge compared what was measured and gave no finding"))
        if judgement.missing is not None:
            text = f"comparing what was measured: {judgement.missing.message}"
            found.append(make_finding(Status.UNKNOWN, judgement.missing.reason, text))
        if grouped and _none_bad(judgement.findings):
            found.extend(_finding_of(outcome.missing) for outcome in outcomes if outcome.missing is not None)
    if not found:
        found.append(_no_data("node", "nothing was measured"))
    found = _unknown_beside_known(found)
    result = result_of(info.name, plan, found, [*outcomes, *([judgement] if judgement else [])], injected=injected)
    digests = digests_of([item for outcome in outcomes for item in outcome.evidence], machine)
    measured = tuple(devices) if any(outcome.started_at for outcome in outcomes) else ()
    return dataclasses.replace(result, digests=digests, devices=measured)


def _findings_of(outcome: Outcome, *, judged: bool) -> list[Finding]:
    """The findings of one worker. With `judged`, evidence alone is enough, because a judge compares it."""
    found = list(outcome.findings)
    if outcome.missing is not None:
        found.append(_finding_of(outcome.missing))
    elif not found and not (judged and outcome.evidence):
        found.append(_no_data(outcome.target, "the check ended without a finding"))
    if outcome.crashes and outcome.missing is None:
        # A probe that crashed is no healthier for having passed once: at best a warning, with both attempts.
        text = f"attempt 1: {outcome.crashes[0]}; attempt {outcome.attempts} ended well"
        found.append(make_finding(Status.WARN, "Crashed", shorten(text), outcome.target))
    return found


def _finding_of(missing: Missing) -> Finding:
    """The finding for a target without an outcome: unknown, unless the reason proves a fault of the node."""
    status = Status.FAIL if missing.reason in _FAILURES else Status.UNKNOWN
    status = Status.SKIP if missing.reason == "Busy" else status
    return make_finding(status, missing.reason, missing.message, missing.target, missing.action)


def _unknown_beside_known(found: list[Finding]) -> list[Finding]:
    """What was busy is skipped only where all was: beside parts that were looked at it is unknown."""
    if all(finding.status is Status.SKIP for finding in found):
        return found
    return [
        dataclasses.replace(finding, status=Status.UNKNOWN)
        if finding.status is Status.SKIP and finding.reason == "Busy"
        else finding
        for finding in found
    ]


def _no_data(target: str, message: str) -> Finding:
    return make_finding(Status.UNKNOWN, "NoData", message, target)


def _none_bad(findings: Sequence[Finding]) -> bool:
    return all(SEVERITY[finding.status] < SEVERITY[Status.UNKNOWN] for finding in findings)


def result_of(
    check: str, plan: Plan, found: Sequence[Finding], outcomes: Sequence[Outcome], *, injected: bool
) -> CheckResult:
    """
    A result with these findings; times, attempts and errors are those of the outcomes.

    It is as old as the outcome that ended first: devices may be measured many minutes apart.
    """
    begun = [outcome for outcome in outcomes if outcome.started_at]
    now, now_boot = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    errors = [f"{outcome.target}: {outcome.error}" for outcome in outcomes if outcome.error]
    return CheckResult(
        check=check,
        tier=plan.tier,
        status=worst(finding.status for finding in found),
        findings=tuple(found),
        age_seconds=max(0.0, now - min(outcome.ended for outcome in begun)) if begun else 0.0,
        started_at=min((outcome.started_at for outcome in begun), default=time.time()),
        duration_seconds=(
            max(outcome.ended for outcome in begun) - min(outcome.began for outcome in begun) if begun else 0.0
        ),
        attempts=max((outcome.attempts for outcome in outcomes), default=1),
        compile_seconds=max((outcome.compile_seconds for outcome in outcomes), default=0.0),
        error="\n".join(errors)[:MAX_ERROR_CHARACTERS] if errors else None,
        injected=injected,
        executor=plan.executor,
        began_at=now_boot - max(0.0, now - min(outcome.began for outcome in begun)) if begun else None,
    )
