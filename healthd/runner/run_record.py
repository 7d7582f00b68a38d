"""
Records one run: what each check is asked, and the results that are made of the outcomes of its workers.

Also here:

- makes the result of a check from the outcomes of its workers and of its judge: pure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import (
    SEVERITY,
    CheckInfo,
    Evidence,
    Finding,
    Missing,
    Previous,
    Profile,
    Scope,
    Status,
    make_finding,
    worst,
)
from checks.worker.faults import Fault
from checks.worker.protocol import from_evidence, shorten
from healthd.core.model import CheckResult
from healthd.core.model.results import digests_of
from healthd.runner.settings import OnProfile, OnResult, Plan, RunnerSettings
from healthd.runner.workers.outcome import MAX_ERROR_CHARACTERS, Outcome
from healthd.runner.workers.worker_lane import Job

log = logging.getLogger(__name__)

# Reasons that prove a fault of the node; all others for having no outcome mean that its state is unknown.
_FAILURES = frozenset({"Stuck", "MissingDevice", "DeviceLost"})


class RunRecord:
    """The record of one run. A deferred result is known but not published, because more may be learned about it."""

    def __init__(
        self, request: RunRequest, settings: RunnerSettings, machine: Callable[[], str | None] = lambda: None
    ) -> None:
        """`machine` names hardware and versions of this run for comparisons of bits: see `digests_of`."""
        self.request = request
        self.plan = request.plan
        self.results: dict[str, CheckResult] = {}
        """Published results, by check."""
        self.surveyed: tuple[str, ...] = ()
        """The devices by the last survey: what checks of the node look at."""
        self.probed: tuple[str, ...] = ()
        """The devices whose workers measure them."""
        self.began = time.monotonic()
        self._as_of = time.clock_gettime(time.CLOCK_BOOTTIME)  # of the elapsed times in `previous`
        self._settings = settings
        self._machine = machine
        self._deferred: dict[str, tuple[CheckResult, float]] = {}  # with when it was composed (monotonic)
        self._kept: dict[str, bool] = {}  # by the id of a profile: a result may be composed more than once
        self._published = asyncio.Event()

    # --- what is asked ------------------------------------------------------------------------------------------------

    def job(self, info: CheckInfo, command: dict[str, Any], finish: Callable[[Outcome], None]) -> Job:
        """The job of a check for one worker."""
        return Job(
            check=info.name,
            command=command,
            timeout_seconds=self.timeout_seconds(info),
            finish=finish,
            retry=not self.injected(info.name),
        )

    def command(self, info: CheckInfo, names: Sequence[str], group: dict[str, Any] | None) -> dict[str, Any]:
        """The command to run a check on one worker. `names` are those by which faults can refer to that worker."""
        previous = self.request.previous.get(info.name)
        return {
            "kind": "run",
            "tier": self.plan.tier.value,
            "params": dict(self._settings.params.get(info.name, {})),
            "group": group,
            "profile": self._settings.profile,
            "timeout_seconds": self.timeout_seconds(info),
            # Not asdict: it copies the evidence, leaf by leaf, while all else of the daemon waits.
            "previous": previous
            and {
                **vars(previous),
                "as_of": self._as_of,
                "evidence": [from_evidence(one) for one in previous.evidence],
            },
            "faults": [
                dataclasses.astuple(fault)
                for fault in self.request.faults
                if fault.hits(info.name, names) or (info.scope is Scope.NODE and fault.check == info.name)
            ],
        }

    def timeout_seconds(self, info: CheckInfo) -> float:
        """The configured time limit of a check, else its own."""
        return self._settings.timeouts_seconds.get(info.name, info.timeout_seconds)

    def injected(self, check: str) -> bool:
        """Whether a fault is injected into a check, on any target."""
        return any(fault.check == check for fault in self.request.faults)

    # --- results ------------------------------------------------------------------------------------------------------

    def compose(self, info: CheckInfo, outcomes: Sequence[Outcome], judgement: Outcome | None = None) -> CheckResult:
        """The result of a check from the outcomes of its workers and of its judge; None where nothing is judged."""
        injected = self.injected(info.name)
        devices = self.probed if info.scope is not Scope.NODE else self.surveyed if info.accelerators else ()
        result = compose(
            info,
            self.plan,
            outcomes,
            judgement=judgement,
            injected=injected,
            machine=self._machine,
            devices=devices,
        )
        named = {finding.profile for finding in result.findings if finding.profile is not None}
        if not named:
            return result
        kept = {profile.id for outcome in outcomes for profile in outcome.profiles if self._keep(profile)}
        return dataclasses.replace(
            result,
            findings=tuple(
                one if one.profile in kept else dataclasses.replace(one, profile=None) for one in result.findings
            ),
        )

    def _keep(self, profile: Profile) -> bool:
        if self.request.on_profile is None:
            return False
        if profile.id not in self._kept:
            try:
                self._kept[profile.id] = self.request.on_profile(profile)
            except Exception:
                log.exception("the profile %s could not be kept", profile.id)
                self._kept[profile.id] = False
        return self._kept[profile.id]

    def publish(self, result: CheckResult) -> None:
        """Record a complete result and pass it to the listener."""
        self._deferred.pop(result.check, None)
        self.results[result.check] = result
        self._published.set()
        if self.request.on_result is not None:
            try:
                self.request.on_result(result)
            except Exception:
                log.exception("a listener failed on the result of %s", result.check)

    async def wait_for(self, check: str) -> CheckResult:
        """The result of a check of the plan, once it is published."""
        while check not in self.results:
            self._published.clear()
            await self._published.wait()
        return self.results[check]

    def defer(self, result: CheckResult) -> None:
        """Keep a result back until a better one of its check is published."""
        self._deferred[result.check] = result, time.monotonic()

    def publish_deferred(self) -> None:
        """Publish what was deferred: nothing more will be learned about it."""
        for result, at in list(self._deferred.values()):
            self.publish(dataclasses.replace(result, age_seconds=result.age_seconds + time.monotonic() - at))

    def refuse(self, infos: Sequence[CheckInfo], reason: str, message: str, status: Status = Status.UNKNOWN) -> None:
        """Publish that these checks do not run."""
        for info in infos:
            self._publish_unmeasured(info.name, reason, message, status)

    def refuse_devices(self, infos: Sequence[CheckInfo], reason: str, message: str) -> list[CheckInfo]:
        """Refuse the checks that need a device; returns the others."""
        self.refuse([info for info in infos if info.scope is not Scope.NODE], reason, message)
        return [info for info in infos if info.scope is Scope.NODE]

    def refuse_unknown(self, name: str) -> None:
        """Publish that there is no such check."""
        self._publish_unmeasured(name, "CheckError", f"no such check: {name}; see `healthd checks`", Status.UNKNOWN)

    def give_up(self, reason: str, message: str) -> None:
        """Publish that every check without a result is unknown, for this reason."""
        self.publish_deferred()
        for name in self.plan.checks:
            if name not in self.results:
                self._publish_unmeasured(name, reason, message, Status.UNKNOWN)

    def _publish_unmeasured(self, check: str, reason: str, message: str, status: Status) -> None:
        finding = make_finding(status, reason, shorten(message))
        result = result_of(check, self.plan, [finding], [], injected=self.injected(check))
        self.publish(dataclasses.replace(result, error=message[-MAX_ERROR_CHARACTERS:]))

    def in_order(self) -> tuple[CheckResult, ...]:
        """The results, in the order of the plan."""
        return tuple(self.results[name] for name in dict.fromkeys(self.plan.checks))


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
            found.append(_no_data("node", "its judge returned no finding"))
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


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What one run is asked, and its listeners."""

    plan: Plan
    faults: tuple[Fault, ...]
    previous: Mapping[str, Previous]
    """The last evidence, by check."""
    on_result: OnResult | None
    on_profile: OnProfile | None = None
    """Keeps profiles; None: nobody does."""
    on_evidence: Callable[[str, tuple[Evidence, ...], str | None, float], None]
    """Receives the check, its new evidence, the boot id, and when the check began (monotonic)."""
    on_survey: Callable[[Outcome], object]


def hidden_holders(result: CheckResult | None) -> str | None:
    """Processes on the devices that /proc does not show, by a result of its `holders_check`; None: none."""
    if result is None:
        return None
    busy = (item for item in result.findings if item.status is Status.UNKNOWN and item.reason == "Busy")
    return next((f"{item.target}: {item.message}" for item in busy), None)


def _findings_of(outcome: Outcome, *, judged: bool) -> list[Finding]:
    """The findings of one worker. With `judged`, evidence alone is enough, because a judge compares it."""
    found = list(outcome.findings)
    if outcome.missing is not None:
        found.append(_finding_of(outcome.missing))
    elif not found and not (judged and outcome.evidence):
        found.append(_no_data(outcome.target, "the check ended without a finding"))
    if outcome.crashes and outcome.missing is None:
        # A probe that crashed is no healthier for having passed once: at best a warning, with both attempts.
        text = f"attempt 1: {outcome.crashes[0]}; attempt {outcome.attempts} succeeded"
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
