"""
From what one worker came to (Outcome) to what a check came to (CheckResult): pure.

Whatever is missing, silent, not finite or only passed after a crash is never a pass here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from checks.accelerators.neuron.errors import diagnose, telling_line
from checks.contract import SEVERITY, Action, Evidence, Finding, Missing, Progress, Status, worst
from checks.worker.protocol import shorten
from healthd.core.model import CheckResult
from healthd.runner.settings import CheckInfo, Plan

MAX_ERROR_CHARACTERS = 4000

# What is known for certain of the node; all other reasons for having no outcome mean that we do not know.
_FAILURES = frozenset({"Stuck", "MissingDevice", "DeviceLost"})
_BY_THEMSELVES = frozenset({"Crashed", "Garbage", "DeviceLost"})  # ends of a worker that nobody else brought about
# The check that knows of processes on devices which /proc does not show.
HOLDERS_CHECK = "gpu_driver"
# Reasons that say no more than that it failed: the words of the device's runtime may know why.
_VAGUE = frozenset({"Crashed", "CheckError", "StartFailed", "Timeout"})


@dataclass(kw_only=True)
class Outcome:
    """
    What one worker said of one check, or why it did not (`missing`).

    `error` holds the last words; `crashes` what happened in attempts before this one; `started_at` is the epoch time, 0
    where it never began; `began` and `ended` are monotonic. `answers` holds what is no finding (surveys, catalogues).
    `worker_lost` says that the worker is of no more use. `compile_seconds` is what compilation took.
    """

    target: str
    findings: list[Finding] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    missing: Missing | None = None
    worker_lost: bool = False
    compile_seconds: float = 0.0
    error: str | None = None
    attempts: int = 1
    crashes: tuple[str, ...] = ()
    started_at: float = 0.0
    began: float = field(default_factory=time.monotonic)
    ended: float = field(default_factory=time.monotonic)

    def lost(self, reason: str, message: str, *, error: str | None = None, action: Action | None = None) -> Outcome:
        """Say why there is no outcome; what was said before stands. Returns itself."""
        self.ended = time.monotonic()
        self.missing = Missing(
            target=self.target, reason=reason, message=shorten(message), progress=tuple(self.progress), action=action
        )
        self.error = (error or message)[-MAX_ERROR_CHARACTERS:]
        return self

    def worker_gone(
        self, reason: str, message: str, *, error: str | None = None, action: Action | None = None
    ) -> Outcome:
        """The same, when the worker went with it."""
        self.worker_lost = True
        return self.lost(reason, message, error=error, action=action)


def finding_of(missing: Missing) -> Finding:
    """What a target that gave no outcome means: unknown, but where we know that the node is at fault."""
    status = Status.UNKNOWN
    if missing.reason in _FAILURES:
        status = Status.FAIL
    elif missing.reason == "Busy":
        status = Status.SKIP
    return Finding(
        status=status,
        reason=missing.reason,
        message=missing.message,
        target=missing.target,
        action=missing.action,
    )


def explain(reason: str, message: str, words: str) -> tuple[str, str, Action | None]:
    """
    The reason and message of a failure, better ones where the words of a device's runtime say what it was.

    `words` are the last ones of the worker; the action is None where the reason's own holds.
    """
    text = f"{message}\n{words}"
    found = diagnose(text) if reason in _VAGUE else None
    if found is None:
        return reason, message, None
    return found.reason, shorten(found.message(telling_line(text))), found.action


def findings_of(outcome: Outcome, *, judged: bool) -> list[Finding]:
    """The findings of one worker. `judged` says that evidence alone is enough, because somebody else judges it."""
    found = list(outcome.findings)
    if outcome.missing is not None:
        found.append(finding_of(outcome.missing))
    elif not found and not (judged and outcome.evidence):
        found.append(nothing(outcome.target, "the check ended without a word"))
    if outcome.crashes and outcome.missing is None:
        # A probe that was killed is no healthier for having got through once: at best a warning, with both attempts.
        text = f"attempt 1: {outcome.crashes[0]}; attempt {outcome.attempts} ended well"
        found.append(Finding(status=Status.WARN, reason="Crashed", message=shorten(text), target=outcome.target))
    return found


def nothing(target: str, message: str) -> Finding:
    """There is nothing to judge."""
    return Finding(status=Status.UNKNOWN, reason="NoData", message=message, target=target)


def compose(
    info: CheckInfo,
    plan: Plan,
    outcomes: Sequence[Outcome],
    *,
    judgement: Outcome | None,
    injected: bool,
) -> CheckResult:
    """
    The result of a check from all its workers and its judge.

    In a group the judge speaks for the ranks that gave nothing; where it accuses nobody, they are unknown.
    """
    grouped = info.scope.value == "group"
    judged = judgement is not None
    found: list[Finding] = []
    for outcome in outcomes:
        if grouped and judged and outcome.missing is not None:
            found.extend(outcome.findings)
        else:
            found.extend(findings_of(outcome, judged=judged))
    if judgement is not None:
        found.extend(judgement.findings)
        # Ranks that all say that they have nothing to compare, as the only one of a node does, leave nothing to judge.
        compared = any(outcome.evidence or outcome.missing is not None for outcome in outcomes)
        silent = compared and not judgement.findings and judgement.missing is None
        if silent and all(SEVERITY[f.status] < SEVERITY[Status.UNKNOWN] for f in found):
            found.append(nothing("node", "its judge compared what was measured and said nothing"))
        if judgement.missing is not None:
            text = f"comparing what was measured: {judgement.missing.message}"
            found.append(Finding(status=Status.UNKNOWN, reason=judgement.missing.reason, message=text, target="node"))
        lost = [outcome.missing for outcome in outcomes if outcome.missing is not None]
        if grouped and lost and all(SEVERITY[f.status] < SEVERITY[Status.UNKNOWN] for f in judgement.findings):
            found.extend(finding_of(missing) for missing in lost)
    if not found:
        found.append(nothing("node", "nothing was measured"))
    return _result(info.name, plan, found, [*outcomes, *([judgement] if judgement else [])], injected=injected)


def _result(
    check: str, plan: Plan, found: Sequence[Finding], outcomes: Sequence[Outcome], *, injected: bool
) -> CheckResult:
    begun = [outcome for outcome in outcomes if outcome.started_at]
    errors = [f"{outcome.target}: {outcome.error}" for outcome in outcomes if outcome.error]
    return CheckResult(
        check=check,
        tier=plan.tier,
        status=worst(finding.status for finding in found),
        findings=tuple(found),
        age_seconds=0.0,
        started_at=min((outcome.started_at for outcome in begun), default=time.time()),
        duration_seconds=(
            max(outcome.ended for outcome in begun) - min(outcome.began for outcome in begun) if begun else 0.0
        ),
        attempts=max((outcome.attempts for outcome in outcomes), default=1),
        compile_seconds=max((outcome.compile_seconds for outcome in outcomes), default=0.0),
        error="\n".join(errors)[:MAX_ERROR_CHARACTERS] if errors else None,
        injected=injected,
        executor=plan.executor,
    )


def unmeasured(check: str, plan: Plan, finding: Finding, *, injected: bool, error: str | None = None) -> CheckResult:
    """The result of a check that did not run at all."""
    result = _result(check, plan, [finding], [], injected=injected)
    return result if error is None else _with_error(result, error)


def _with_error(result: CheckResult, error: str) -> CheckResult:
    import dataclasses

    return dataclasses.replace(result, error=error[-MAX_ERROR_CHARACTERS:])


def in_order_of_end(outcomes: Iterable[Outcome]) -> list[Missing]:
    """
    The ranks that gave nothing, numbered in the order in which they ended by themselves.

    A death is seen a moment later than what it does to the others, who then raise: a rank that raised came first only
    when it did so clearly before.
    """
    import dataclasses

    lost = [(outcome, outcome.missing) for outcome in outcomes if outcome.missing is not None]
    by_themselves = [(o, m) for o, m in lost if m.reason in _BY_THEMSELVES or not o.worker_lost]
    by_themselves.sort(key=lambda item: item[0].ended - (0.25 if item[1].reason in _BY_THEMSELVES else 0.0))
    rank = {id(outcome): number for number, (outcome, _) in enumerate(by_themselves)}
    return [dataclasses.replace(missing, order=rank.get(id(outcome))) for outcome, missing in lost]


def hidden_holders(result: CheckResult | None) -> str | None:
    """What a result of HOLDERS_CHECK says of processes on devices that cannot be seen; None where it tells of none."""
    if result is None or result.check != HOLDERS_CHECK:
        return None
    told = (item for item in result.findings if item.status is Status.UNKNOWN and item.reason == "Busy")
    return next((f"{item.target}: {item.message}" for item in told), None)


def last_line(words: str) -> str:
    """The line of somebody's last words that tells most: of a fatal error, else the last one."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
