"""The runner: one object for the life of a service, with one `Execution` for each run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checks.contract import BUILT_IN, DEVICE_RESETS, CheckInfo, Evidence, Previous, Tier
from checks.discover import HOST_PACKAGES, builtin_checks
from checks.worker.faults import COUNTING_CHECK, Fault
from healthd.core import wire
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.model import CheckResult
from healthd.runner.execution import Execution
from healthd.runner.run_record import RunRequest
from healthd.runner.settings import OnProfile, OnProgress, OnResult, Plan, RunnerSettings, Survey
from healthd.runner.survey import SeenDevices, to_survey
from healthd.runner.workers.node_lane import ask_node, ask_prestarted
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.process import WorkerProcess
from healthd.runner.workers.workers import Unreaped, Workers

if TYPE_CHECKING:
    from healthd.runner.collective.session import Session

log = logging.getLogger(__name__)

_CATALOGUE_SECONDS = 30.0  # importing third-party checks


@dataclass(frozen=True, kw_only=True)
class LastEvidence:
    """The last evidence of a node check."""

    check: str
    evidence: tuple[Evidence, ...]
    measured_at: float
    """In seconds of CLOCK_BOOTTIME."""
    boot_id: str | None
    """The boot in which it was measured; None where it is unknown."""


class Runner:
    """Runs plans of checks. Lives in the main thread of its process, because its workers die with their thread."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self.probe_device_seconds = 0.0
        """How long workers have had devices, over all runs: the cost of the checks."""
        self.latest: Survey | None = None
        """The survey that looked last; every run makes one before anything else, and one after active checks."""
        self.on_profile: OnProfile | None = None
        """Keeps the profiles of what is slow; None: nobody does, and their sentences alone remain."""
        self.seen = SeenDevices()
        """Since when each device is there, by all surveys."""
        self._unreaped = Unreaped()
        self._prestarted: WorkerProcess | None = None
        self._versions: dict[str, str] = {}
        self._catalogue: Mapping[str, CheckInfo] | None = None
        self._catalogue_tier = Tier.PASSIVE  # it has all checks of this tier and lighter ones
        self._evidence: dict[str, LastEvidence] = {}

    def stuck(self) -> tuple[str, ...]:
        """Where a killed worker is still there: device targets, and `node/CHECK`."""
        return self._unreaped.keys()

    async def catalogue(self, tier: Tier = Tier.SOAK) -> Mapping[str, CheckInfo]:
        """
        The checks that can be enabled, by name: at least those of `tier` and lighter ones. Read once.

        Raises ConfigError, in one line, when a configured check cannot be loaded.
        """
        if self._catalogue is None or tier.rank > self._catalogue_tier.rank:
            self._catalogue_tier = Tier.SOAK
            if self.settings.third_party or self.settings.directories or self.settings.programs:
                outcome = await self._ask("catalogue", _CATALOGUE_SECONDS)
                if outcome.missing is not None:
                    raise ConfigError(f"checks: {outcome.missing.message}")
                self._catalogue = _catalogue_of(outcome.answers)
            elif tier is Tier.PASSIVE:
                self._catalogue, self._catalogue_tier = await self._host_catalogue(), Tier.PASSIVE
            else:
                self._catalogue = {name: check.info() for name, check in builtin_checks().items()}
        return self._catalogue

    async def _host_catalogue(self) -> Mapping[str, CheckInfo]:
        """The built-in checks of the host: a prestarted worker has imported them already, and lists them."""
        if self._prestarted is not None:
            settings = self.settings
            outcome = await ask_prestarted(self._prestarted, "host_catalogue", settings.start_timeout_seconds)
            if outcome.missing is None:
                return _catalogue_of(outcome.answers)
            if outcome.worker_lost:  # the run starts another
                process, self._prestarted = self._prestarted, None
                await process.wait_gone(settings.kill_grace_seconds)
        return {name: check.info() for name, check in builtin_checks(HOST_PACKAGES).items()}

    @contextlib.asynccontextmanager
    async def prestarted(self) -> AsyncIterator[None]:
        """
        Start the node's worker of the next run now, so that it imports while the caller still reads what to ask for.

        A worker that no run has used is killed on leaving.
        """
        with contextlib.suppress(OSError):  # the run reports why there can be none
            self._prestarted = self._workers(None).prestart()
        try:
            yield
        finally:
            if self._prestarted is not None:
                process, self._prestarted = self._prestarted, None
                process.kill()
                await process.wait_gone(self.settings.kill_grace_seconds)

    async def survey(self, *, faults: Sequence[Fault] = ()) -> Survey:
        """Look at the machine now; what cannot be seen is None, and holders None count as there. Never raises."""
        return self._note_survey(await self._ask("survey", self.settings.survey_timeout_seconds), faults)

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
        One result for each check of the plan, in its order; `on_result` receives each as soon as it is complete.

        `previous` is the last evidence by check; without it, that of the runner's last runs is used.
        Raises nothing but CancelledError, and then no worker is left.
        """
        workers = self._workers(on_progress)
        if self._prestarted is not None:
            workers.adopt(self._prestarted)
            self._prestarted = None
        execution = Execution(
            RunRequest(
                plan=plan,
                faults=tuple(faults),
                previous={**self._previous(), **(previous or {})},
                on_result=on_result,
                on_profile=self.on_profile,
                on_evidence=self._note_evidence,
                on_survey=lambda outcome: self._note_survey(outcome, ()),
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
            self._add_device_seconds(execution.workers.device_seconds)
        return execution.results()

    def session(self, faults: Sequence[Fault] = ()) -> Session:
        """The ranks of this node in one validation over several nodes. Call `Session.open` first."""
        from healthd.runner.collective.session import Session

        settings = self.settings.between_nodes()
        return Session(
            make_workers=lambda on_progress: self._make_workers(settings, on_progress),
            catalogue=self.catalogue,
            on_survey=lambda outcome: self._note_survey(outcome, ()),
            on_device_seconds=self._add_device_seconds,
            faults=faults,
        )

    def _add_device_seconds(self, seconds: float) -> None:
        self.probe_device_seconds += seconds

    def _workers(self, on_progress: OnProgress | None) -> Workers:
        return self._make_workers(self.settings, on_progress)

    def _make_workers(self, settings: RunnerSettings, on_progress: OnProgress | None) -> Workers:
        return Workers(settings, self._unreaped, self._versions, on_progress)

    async def _ask(self, kind: str, timeout_seconds: float) -> Outcome:
        """The answer of a worker of its own to one command. Raises nothing but CancelledError."""
        workers = self._workers(None)
        try:
            return await ask_node(workers, kind, timeout_seconds)
        finally:
            await workers.kill_all()

    def _note_survey(self, outcome: Outcome, faults: Sequence[Fault]) -> Survey:
        survey = to_survey(outcome, self._versions, [f for f in faults if f.check == COUNTING_CHECK], self.seen)
        if self.latest is None or survey.looked_at >= self.latest.looked_at:
            self.latest = survey
        return survey

    # --- evidence of node checks, for their next run ------------------------------------------------------------------

    def last_evidence(self) -> tuple[LastEvidence, ...]:
        """The last evidence of the built-in node checks; third-party checks begin anew at each start."""
        known = self._catalogue or {}
        return tuple(
            one for one in self._evidence.values() if one.check in known and known[one.check].origin == BUILT_IN
        )

    def restore_evidence(self, earlier: Sequence[LastEvidence]) -> None:
        """Use the `last_evidence` of an earlier runner on this machine, where there is no newer one."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        # A stamp ahead of the clock is not of this boot.
        self._evidence = {**{one.check: one for one in earlier if one.measured_at <= now}, **self._evidence}

    def _note_evidence(self, check: str, evidence: tuple[Evidence, ...], boot_id: str | None, began: float) -> None:
        at = time.clock_gettime(time.CLOCK_BOOTTIME) - max(0.0, time.monotonic() - began)
        self._evidence[check] = LastEvidence(check=check, evidence=evidence, measured_at=at, boot_id=boot_id)
        known = (self._catalogue or {}).get(check)
        for one in evidence if known is not None and known.origin == BUILT_IN else ():
            if one.key == DEVICE_RESETS and self.latest is not None:
                self.seen.note_resets(one.data, at)
                devices = tuple(map(self.seen.stamp, self.latest.inventory.devices))
                inventory = dataclasses.replace(self.latest.inventory, devices=devices)
                self.latest = dataclasses.replace(self.latest, inventory=inventory)

    def _previous(self) -> dict[str, Previous]:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return {
            check: Previous(evidence=one.evidence, elapsed_seconds=now - one.measured_at, boot_id=one.boot_id)
            for check, one in self._evidence.items()
        }


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _catalogue_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, CheckInfo]:
    """The catalogue as a worker lists it, by name. ConfigError names a check whose declaration has a wrong type."""
    found = {}
    for answer in answers:
        try:
            info = wire.convert(answer, CheckInfo, what=f"check {answer.get('name')} of {answer.get('origin')}")
        except BadInputError as error:
            raise ConfigError(f"checks: {error}; mend what @check is given") from None
        found[info.name] = info
    return found
