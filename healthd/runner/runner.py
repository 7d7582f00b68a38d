"""
The runner: one object for a service's life, one Execution for each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checks.contract import Check, Evidence, Previous, Scope, Tier
from checks.discover import HOST_PACKAGES, PACKAGES, builtin_checks
from checks.worker.faults import COUNTING_CHECK, Fault, without_missing
from healthd.core.errors import ConfigError
from healthd.core.model import CheckResult, DeviceRecord, Inventory
from healthd.runner.execution import Execution
from healthd.runner.run_record import Request
from healthd.runner.settings import CheckInfo, OnProgress, OnResult, Plan, RunnerSettings, Survey
from healthd.runner.workers.child import Child
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, Lane
from healthd.runner.workers.workers import Corpses, Workers

if TYPE_CHECKING:
    from healthd.runner.collective.session import Session

log = logging.getLogger(__name__)

BUILT_IN = "built-in"
_CATALOGUE_SECONDS = 30.0  # importing other people's checks
NO_INVENTORY = Inventory(
    accelerator="unknown", device_count=None, core_count=None, memory_bytes=None, efa_count=None, devices=()
)


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """The last evidence of a node check, and when (CLOCK_BOOTTIME) and in which boot it was measured."""

    check: str
    evidence: tuple[Evidence, ...]
    measured_at: float
    boot_id: str | None


class Runner:
    """Runs plans of checks. Lives in the main thread of its process, because its workers die with that thread."""

    def __init__(self, settings: RunnerSettings, *, popen: type[subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        """`popen` starts the workers; tests have one that forks them from a process in which torch is imported."""
        self.settings = settings
        self._popen = popen
        self.probe_device_seconds = 0.0
        """How long workers have had devices, over all runs: what we cost."""
        self.latest: Survey | None = None
        """The survey of the last run or call; every run makes one before anything else, and after active checks."""
        self.learned = settings.learned
        """Approved baselines that the next run judges by; the daemon changes them."""
        self._corpses = Corpses()
        self._ahead: Child | None = None
        self._versions: dict[str, str] = {}
        self._catalogue: dict[str, CheckInfo] | None = None
        self._catalogue_tier = Tier.PASSIVE  # the heaviest of which all checks are in it
        self._previous: dict[str, Remembered] = {}

    def stuck(self) -> tuple[str, ...]:
        """Where a killed worker is still there: device targets, and `node/CHECK`."""
        return self._corpses.keys()

    async def catalogue(self, tier: Tier = Tier.SOAK) -> Mapping[str, CheckInfo]:
        """
        The checks that could be enabled, by name: at least those of `tier` and lighter ones. Read once.

        Raises ConfigError, in one line, when a check that is configured cannot be loaded.
        """
        if self._catalogue is None or tier.rank > self._catalogue_tier.rank:
            self._catalogue_tier = Tier.SOAK
            if self.settings.third_party or self.settings.directories or self.settings.programs:
                self._catalogue = await self._ask_catalogue()
            elif tier is Tier.PASSIVE:
                self._catalogue, self._catalogue_tier = builtin_catalogue(HOST_PACKAGES), Tier.PASSIVE
            else:
                self._catalogue = builtin_catalogue()
        return self._catalogue

    @contextlib.asynccontextmanager
    async def ahead(self) -> AsyncIterator[None]:
        """
        The node's child of the next run starts now, so that it imports while the caller still reads what to ask for.

        A child that no run has taken over is ended on leaving.
        """
        with contextlib.suppress(OSError):  # the run will say why there can be none
            self._ahead = self._workers(None).spawn_ahead()
        try:
            yield
        finally:
            if self._ahead is not None:
                child, self._ahead = self._ahead, None
                child.kill()
                await child.gone(self.settings.kill_grace_seconds)

    async def survey(self, *, faults: Sequence[Fault] = ()) -> Survey:
        """The machine as it is now; what cannot be told is None, and holders None count as taken."""
        workers = self._workers(None)
        outcome = await self._ask(workers, {"kind": "survey"}, "survey", self.settings.survey_timeout_seconds)
        return self._surveyed(outcome, faults)

    async def run(
        self,
        plan: Plan,
        *,
        faults: Sequence[Fault] = (),
        on_result: OnResult | None = None,
        on_progress: OnProgress | None = None,
        previous: Mapping[str, Previous] | None = None,
    ) -> tuple[CheckResult, ...]:
        """
        One result for each check of the plan, in its order; `on_result` hears of each as soon as it is complete.

        `previous` is the last evidence by check; without it the runner's own memory of node checks serves.
        Raises nothing but CancelledError, and then no worker is left.
        """
        workers = self._workers(on_progress)
        if self._ahead is not None:
            workers.take_over(self._ahead)
            self._ahead = None
        execution = Execution(
            Request(
                plan=plan,
                faults=tuple(faults),
                previous={**self._remembered(), **(previous or {})},
                on_result=on_result,
                on_evidence=self._remember,
                on_survey=lambda outcome: self._surveyed(outcome, ()),
            ),
            workers,
        )
        limit = asyncio.timeout(plan.timeout_seconds)
        try:
            async with limit:
                await execution.perform(await self.catalogue(plan.tier))
        except ConfigError as error:
            execution.give_up("CheckError", str(error))
        except Exception as error:  # the one place where any error of our own becomes a result
            if isinstance(error, TimeoutError) and limit.expired():
                execution.give_up("Timeout", f"the run's time of {plan.timeout_seconds or 0.0:g} s was up")
            else:
                log.exception("the runner failed; the checks that were not done are unknown")
                execution.give_up("CheckError", f"internal error of healthd: {_innermost(error)}")
        finally:
            await execution.clean_up()
            self.probe_device_seconds += execution.workers.device_seconds
        return execution.results()

    def session(self, faults: Sequence[Fault] = ()) -> Session:
        """Ranks for the rounds of one validation over several nodes. `Session.open` comes first."""
        from healthd.runner.collective.session import Session

        settings = self.settings.between_nodes()
        return Session(
            make_workers=lambda on_progress: self._workers_of(settings, on_progress),
            catalogue=self.catalogue,
            on_survey=lambda outcome: self._surveyed(outcome, ()),
            on_device_seconds=self._spent,
            faults=faults,
        )

    def _spent(self, device_seconds: float) -> None:
        self.probe_device_seconds += device_seconds

    # --- children that only answer ------------------------------------------------------------------------------------

    def _workers(self, on_progress: OnProgress | None) -> Workers:
        return self._workers_of(dataclasses.replace(self.settings, learned=self.learned), on_progress)

    def _workers_of(self, settings: RunnerSettings, on_progress: OnProgress | None) -> Workers:
        return Workers(settings, self._corpses, self._versions, on_progress, popen=self._popen)

    async def _ask(self, workers: Workers, command: dict[str, Any], name: str, timeout_seconds: float) -> Outcome:
        """One command to a child of its own. Raises nothing but CancelledError."""
        answers: list[Outcome] = []
        lane = Lane(workers, None)
        lane.submit(Job(check=name, command=command, timeout_seconds=timeout_seconds, finish=answers.append))
        lane.close()
        try:
            await lane.serve()
        finally:
            workers.kill_all()
            await workers.bury_all(self.settings.kill_grace_seconds)
        return answers[0] if answers else Outcome(target="node").lost("Cancelled", "nothing was asked")

    async def _ask_catalogue(self) -> dict[str, CheckInfo]:
        outcome = await self._ask(self._workers(None), {"kind": "catalogue"}, "catalogue", _CATALOGUE_SECONDS)
        if outcome.missing is not None:
            raise ConfigError(f"checks: {outcome.missing.message}")
        return {
            answer["name"]: CheckInfo(
                name=answer["name"],
                tier=Tier(answer["tier"]),
                scope=Scope(answer["scope"]),
                interval_seconds=answer["interval_seconds"],
                timeout_seconds=answer["timeout_seconds"],
                judged=answer["judged"],
                doc=answer["doc"],
                origin=answer["origin"],
            )
            for answer in outcome.answers
        }

    def _surveyed(self, outcome: Outcome, faults: Sequence[Fault]) -> Survey:
        self.latest = to_survey(outcome, self._versions, [f for f in faults if f.check == COUNTING_CHECK])
        return self.latest

    # --- memory of counters -------------------------------------------------------------------------------------------

    def remembered(self) -> tuple[Remembered, ...]:
        """What node checks have left for their next look; those of other people are read anew at each start."""
        known = self._catalogue or {}
        return tuple(
            one for one in self._previous.values() if one.check in known and known[one.check].origin == BUILT_IN
        )

    def recall(self, earlier: Sequence[Remembered]) -> None:
        """Take up what an earlier runner on this machine has `remembered`; what was heard since stands."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        # A stamp ahead of the clock is none of this boot.
        self._previous = {**{one.check: one for one in earlier if one.measured_at <= now}, **self._previous}

    def _remember(self, check: str, evidence: tuple[Evidence, ...], boot_id: str | None) -> None:
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._previous[check] = Remembered(check=check, evidence=evidence, measured_at=at, boot_id=boot_id)

    def _remembered(self) -> dict[str, Previous]:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return {
            check: Previous(evidence=one.evidence, elapsed_seconds=now - one.measured_at, boot_id=one.boot_id)
            for check, one in self._previous.items()
        }


def info_of(check: Check, origin: str) -> CheckInfo:
    """What others need to know of a check."""
    return CheckInfo(
        name=check.name,
        tier=check.tier,
        scope=check.scope,
        interval_seconds=check.interval_seconds,
        timeout_seconds=check.timeout_seconds,
        judged=check.judge is not None,
        doc=check.doc,
        origin=origin,
    )


def builtin_catalogue(packages: Sequence[str] = PACKAGES) -> dict[str, CheckInfo]:
    """The checks that come with healthd; imported here, which costs some tens of milliseconds and no torch."""
    return {name: info_of(check, BUILT_IN) for name, check in builtin_checks(packages).items()}


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def nearest_check(name: str, known: Mapping[str, object]) -> str:
    """A hint for a name that matches nothing."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_survey(outcome: Outcome, versions: Mapping[str, str], lost: Sequence[Fault]) -> Survey:
    """A survey from what the child answered; all unknown when it did not."""
    if outcome.missing is not None or not outcome.answers:
        return Survey(
            inventory=NO_INVENTORY,
            boot_id=None,
            instance_id=None,
            instance_type=None,
            versions=dict(versions),
            holders=None,
            raw={"error": outcome.missing.message if outcome.missing else "no answer"},
        )
    answer = outcome.answers[0]
    plain = without_missing(answer["inventory"], lost)
    holders = answer["holders"]
    return Survey(
        inventory=Inventory(
            accelerator=plain["accelerator"],
            device_count=plain["device_count"],
            core_count=plain["core_count"],
            memory_bytes=plain["memory_bytes"],
            efa_count=plain["efa_count"],
            devices=tuple(
                DeviceRecord(**{field.name: device.get(field.name) for field in dataclasses.fields(DeviceRecord)})
                for device in plain["devices"]
            ),
            workers=tuple(plain.get("workers") or ()),
        ),
        boot_id=answer["boot_id"],
        instance_id=answer["instance_id"],
        instance_type=answer["instance_type"],
        versions={**versions, **answer["versions"]},
        holders=None if holders is None else tuple(holders),
        raw={key: value for key, value in answer.items() if key not in ("kind", "id")},
    )
