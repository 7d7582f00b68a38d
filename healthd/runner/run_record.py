"""Records one run: what each check is asked, and the results that are made of the outcomes of its workers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import CheckInfo, Evidence, Previous, Profile, Scope, Status, make_finding
from checks.worker.faults import Fault
from checks.worker.protocol import from_evidence, shorten
from healthd.core.model import CheckResult
from healthd.runner.composition import compose, result_of
from healthd.runner.settings import OnProfile, OnResult, Plan, RunnerSettings
from healthd.runner.workers.outcome import MAX_ERROR_CHARACTERS, Outcome
from healthd.runner.workers.worker_lane import Job

log = logging.getLogger(__name__)


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


def hidden_holders(result: CheckResult | None) -> str | None:
    """Processes on the devices that /proc does not show, by a result of its `holders_check`; None: none."""
    if result is None:
        return None
    busy = (item for item in result.findings if item.status is Status.UNKNOWN and item.reason == "Busy")
    return next((f"{item.target}: {item.message}" for item in busy), None)
