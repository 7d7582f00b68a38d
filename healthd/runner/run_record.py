"""The account of one run: what is asked of each check, what became of it, and who is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import Evidence, Finding, Previous, Scope, Status
from checks.worker.faults import Fault
from checks.worker.protocol import from_previous, shorten
from healthd.core.model import CheckResult
from healthd.runner.settings import CheckInfo, OnResult, Plan, RunnerSettings
from healthd.runner.workers.outcome import Outcome, compose, unmeasured
from healthd.runner.workers.worker_lane import Job

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of one run, and who wants to hear of it."""

    plan: Plan
    faults: tuple[Fault, ...]
    previous: Mapping[str, Previous]
    on_result: OnResult | None
    on_evidence: Callable[[str, tuple[Evidence, ...], str | None], None]
    on_survey: Callable[[Outcome], object]


class Account:
    """Of one run. `results` are those that were told; one that is held is known, and waits for more to be said."""

    def __init__(self, request: Request, settings: RunnerSettings) -> None:
        self.request = request
        self.plan = request.plan
        self.results: dict[str, CheckResult] = {}
        self.began = time.monotonic()
        self._settings = settings
        self._held: dict[str, CheckResult] = {}  # told once smaller groups have said who it was
        self._news = asyncio.Event()

    # --- what is asked ------------------------------------------------------------------------------------------------

    def job(self, info: CheckInfo, command: dict[str, Any], finish: Callable[[Outcome], None]) -> Job:
        """A command as one of this check."""
        return Job(
            check=info.name,
            command=command,
            timeout_seconds=self.timeout_seconds(info),
            finish=finish,
            retry=not self.injected(info),
        )

    def command(self, info: CheckInfo, names: Sequence[str], group: dict[str, Any] | None) -> dict[str, Any]:
        """`names` are those under which a fault may mean this worker."""
        return {
            "kind": "run",
            "tier": self.plan.tier.value,
            "params": dict(self._settings.params.get(info.name, {})),
            "group": group,
            "previous": from_previous(self.request.previous.get(info.name)),
            "faults": [
                [fault.check, fault.target, fault.kind, fault.value]
                for fault in self.request.faults
                if fault.hits(info.name, names) or (info.scope is Scope.NODE and fault.check == info.name)
            ],
        }

    def timeout_seconds(self, info: CheckInfo) -> float:
        """The operator's time limit of a check, else its own."""
        return self._settings.timeouts_seconds.get(info.name, info.timeout_seconds)

    def injected(self, info: CheckInfo) -> bool:
        """Whether faults are injected into a check, anywhere."""
        return any(fault.check == info.name for fault in self.request.faults)

    # --- what became of it --------------------------------------------------------------------------------------------

    def result_of(self, info: CheckInfo, outcomes: Sequence[Outcome], *, judgement: Outcome | None) -> CheckResult:
        """The result of a check from what its workers said, and its judge if it has one."""
        return compose(info, self.plan, outcomes, judgement=judgement, injected=self.injected(info))

    def unmeasured(self, name: str, reason: str, message: str, status: Status = Status.UNKNOWN) -> CheckResult:
        """The result of a check that did not run."""
        finding = Finding(status=status, reason=reason, message=shorten(message), target="node")
        injected = any(fault.check == name for fault in self.request.faults)
        return unmeasured(name, self.plan, finding, injected=injected, error=message)

    def refuse_devices(self, infos: Sequence[CheckInfo], reason: str, message: str) -> list[CheckInfo]:
        """Refuse what needs a device; what is left."""
        self.refuse([info for info in infos if info.scope is not Scope.NODE], reason, message)
        return [info for info in infos if info.scope is Scope.NODE]

    def refuse(self, infos: Sequence[CheckInfo], reason: str, message: str, status: Status = Status.UNKNOWN) -> None:
        """Tell that these checks do not run."""
        for info in infos:
            self.tell(self.unmeasured(info.name, reason, message, status))

    def tell(self, result: CheckResult) -> None:
        """A result is complete: it is kept, and the one who asked hears of it."""
        self._held.pop(result.check, None)
        self.results[result.check] = result
        self._news.set()
        if self.request.on_result is not None:
            try:
                self.request.on_result(result)
            except Exception:
                log.exception("a listener failed on the result of %s", result.check)

    async def told(self, name: str) -> CheckResult:
        """The result of a check of the plan, as soon as it is there."""
        while name not in self.results:
            self._news.clear()
            await self._news.wait()
        return self.results[name]

    def hold(self, result: CheckResult) -> None:
        """Keep a result until `tell` has a better one of its check."""
        self._held[result.check] = result

    def tell_held(self) -> None:
        """What is held is all that will be known."""
        for result in list(self._held.values()):
            self.tell(result)

    def give_up(self, reason: str, message: str) -> None:
        """Every check that has no result yet is unknown, for this reason."""
        for name in self.plan.checks:
            if name in self._held:
                self.tell(self._held[name])
            elif name not in self.results:
                self.tell(self.unmeasured(name, reason, message))

    def in_order(self) -> tuple[CheckResult, ...]:
        """The results, in the order of the plan."""
        return tuple(self.results[name] for name in dict.fromkeys(self.plan.checks))
