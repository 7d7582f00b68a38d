"""Assembles what one worker reported from its events, and the result of a check from what all its workers reported."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from checks.contract import (
    SEVERITY,
    Action,
    Evidence,
    Finding,
    Missing,
    Profile,
    Progress,
    Scope,
    Status,
    make_finding,
    worst,
)
from checks.worker.profile_parts import ProfileParts
from checks.worker.protocol import (
    MAX_FINDINGS,
    MAX_PROGRESS,
    ProtocolError,
    shorten,
    to_evidence,
    to_finding,
    to_progress,
)
from healthd.core.model import CheckResult
from healthd.core.model.work_digests import digests_of
from healthd.runner.settings import CheckInfo, Plan
from healthd.runner.workers.process import Ended, Event, WorkerProcess

MAX_ERROR_CHARACTERS = 4000
MAX_ANSWERS = 1024
MAX_EVIDENCE = 64

# Reasons that say no more than that it failed: the output of the device's runtime may know why.
_VAGUE = frozenset({"Crashed", "CheckError", "StartFailed", "Timeout"})
# Reasons that an error raised in a check may carry: the machine did not let the check see something.
_REASONS_OF_THE_HOST = frozenset({"NoData", "NoPermission", "MissingTool", "Timeout", "ColdCache"})

# Reasons that prove a fault of the node; all others for having no outcome mean that its state is unknown.
_FAILURES = frozenset({"Stuck", "MissingDevice", "DeviceLost"})

OnStep = Callable[[str, str], None]


@dataclass(kw_only=True)
class Outcome:
    """What one worker reported for one check, or why it reported nothing."""

    target: str
    """The device of the worker, `rank:N`, or `node`."""
    findings: list[Finding] = field(default_factory=list)
    """What the check found, in order."""
    evidence: list[Evidence] = field(default_factory=list)
    """What a judge compares."""
    progress: list[Progress] = field(default_factory=list)
    """The first and the latest signs of progress."""
    profile_parts: ProfileParts = field(default_factory=ProfileParts, repr=False)
    """The profiles of what was slow."""
    program: str | None = None
    """The compiled program that the check timed, where it can be profiled once its worker is gone."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Answers that are no findings: surveys, catalogue entries, compiled graphs."""
    missing: Missing | None = None
    """Why there is no complete outcome; None when there is one."""
    worker_lost: bool = False
    """The worker process is dead or cannot be trusted any more."""
    compile_seconds: float = 0.0
    """How long compilation took; 0 where nothing was compiled."""
    error: str | None = None
    """The last output of the worker, or a traceback; None without an error."""
    attempts: int = 1
    """How many attempts were made, this one included."""
    crashes: tuple[str, ...] = ()
    """How earlier attempts ended."""
    started_at: float = 0.0
    """When the check began, in seconds since the epoch; 0 when it never began."""
    began: float = field(default_factory=time.monotonic)
    """When the check began (monotonic)."""
    ended: float = field(default_factory=time.monotonic)
    """When the check ended (monotonic)."""

    def fail(self, reason: str, message: str, *, error: str | None = None, action: Action | None = None) -> Outcome:
        """Record why the outcome is incomplete; what was reported before stays. Returns itself."""
        self.ended = time.monotonic()
        self.missing = Missing(
            target=self.target, reason=reason, message=shorten(message), progress=tuple(self.progress), action=action
        )
        self.error = (error or message)[-MAX_ERROR_CHARACTERS:]
        return self

    def fail_with_worker(
        self, reason: str, message: str, *, error: str | None = None, action: Action | None = None
    ) -> Outcome:
        """As `fail`, when the worker process is lost too."""
        self.worker_lost = True
        return self.fail(reason, message, error=error, action=action)

    def add_event(self, event: Event, command_id: int, process: WorkerProcess, on_step: OnStep) -> bool:
        """
        Add one event of the worker; returns whether it was the last one of the command.

        Raises ProtocolError for an event that does not belong here: the worker cannot be trusted any more.
        """
        if isinstance(event, Ended):
            output = process.last_output()
            line = last_line(output)
            reason, message, action = explain(event.reason, f"{event.message}{': ' if line else ''}{line}", output)
            self.fail_with_worker(reason, message, error=output or None, action=action)
            return True
        if event.get("id") != command_id:
            raise ProtocolError(f"an answer to command {event.get('id')!r} instead of {command_id}")
        match event["kind"]:
            case "started":
                self.started_at, self.began = time.time(), time.monotonic()
                on_step("started", "")
            case "progress":
                # The first says that a rank has joined, the last where it is; those in between can be dropped.
                del self.progress[1 : max(1, len(self.progress) - MAX_PROGRESS + 2)]
                self.progress.append(to_progress(event.get("progress")))
                on_step("step", self.last_step)
            case "finding" if len(self.findings) < MAX_FINDINGS:
                self.findings.append(to_finding(event.get("finding")))
            case "evidence" if len(self.evidence) < MAX_EVIDENCE:
                self.evidence.append(to_evidence(event.get("evidence")))
            case "profile":
                self.profile_parts.add(event.get("profile"))
            case "catalogue" | "warmed" if len(self.answers) < MAX_ANSWERS:
                self.answers.append(event)
            case "surveyed":
                self.answers.append(event)
                return True
            case "raised":
                self._add_raised(event, process.last_output())
                return True
            case "done":
                self._add_done(event)
                return True
            case kind:
                raise ProtocolError(f"an unexpected or surplus {kind[:32]!r}")
        return False

    def _add_raised(self, event: dict[str, Any], output: str) -> None:
        reason, raised_at = event.get("reason"), event.get("monotonic_seconds")
        message = str(event.get("message"))
        if reason not in _REASONS_OF_THE_HOST:
            reason, message = "CheckError", f"{event.get('type')}: {message}"
        reason, message, action = explain(str(reason), message, output)
        self.fail(reason, message, error=str(event.get("traceback")), action=action)
        if isinstance(raised_at, float):  # by the worker's clock: we may have read the event much later
            self.ended = min(self.ended, raised_at)

    def _add_done(self, event: dict[str, Any]) -> None:
        seconds, dropped = event.get("compile_seconds"), event.get("dropped")
        if isinstance(seconds, float) and 0.0 < seconds < float("inf"):
            self.compile_seconds += seconds
        programs = event.get("programs")
        if isinstance(programs, list) and programs and isinstance(programs[0], str):
            self.program = programs[0]
        if isinstance(dropped, int) and dropped > 0:
            self.error = f"{dropped} findings beyond {MAX_FINDINGS} were dropped; the worst of them was kept"

    @property
    def profiles(self) -> list[Profile]:
        """The profiles that are complete."""
        return self.profile_parts.whole

    @property
    def last_step(self) -> str:
        """The last known position of a rank; empty without progress."""
        return f"{self.progress[-1].event} {self.progress[-1].step}" if self.progress else ""


def explain(reason: str, message: str, output: str) -> tuple[str, str, Action | None]:
    """
    The reason and message of a failure, more precise ones where the output of a device's runtime explains it.

    `output` is the last output of the worker. The action is None where the default action of the reason holds.
    """
    if reason not in _VAGUE:
        return reason, message, None
    from checks.accelerators.neuron.errors import diagnose, telling_line  # slow, and only for what failed

    text = f"{message}\n{output}"
    found = diagnose(text)
    if found is None:
        return reason, message, None
    return found.reason, shorten(found.message(telling_line(text))), found.action


def last_line(output: str) -> str:
    """The most telling line of a process's output: that of a fatal error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")


# --- from outcomes to a result: pure. What is missing, silent or passed only after a crash is never a pass -----------


def compose(
    info: CheckInfo,
    plan: Plan,
    outcomes: Sequence[Outcome],
    *,
    judgement: Outcome | None,
    injected: bool,
    machine: Callable[[], str | None] = lambda: None,
) -> CheckResult:
    """
    The result of a check from the outcomes of all its workers and of its judge.

    In a group the judge speaks for the ranks without an outcome; where it names no culprit, they are unknown.
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
    result = result_of(info.name, plan, found, [*outcomes, *([judgement] if judgement else [])], injected=injected)
    digests = digests_of([item for outcome in outcomes for item in outcome.evidence], machine)
    return dataclasses.replace(result, digests=digests) if digests else result


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


def _no_data(target: str, message: str) -> Finding:
    return make_finding(Status.UNKNOWN, "NoData", message, target)


def _none_bad(findings: Sequence[Finding]) -> bool:
    return all(SEVERITY[finding.status] < SEVERITY[Status.UNKNOWN] for finding in findings)


def result_of(
    check: str, plan: Plan, found: Sequence[Finding], outcomes: Sequence[Outcome], *, injected: bool
) -> CheckResult:
    """A result with these findings; times, attempts and errors are those of the outcomes."""
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
