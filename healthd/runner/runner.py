"""
The runner: one object for the life of a service, with one `Execution` for each run.

Also here:

- runs one plan: checks of the node and judging in one worker, device checks in a worker each, then collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checks.accelerators import find_descriptor, holders_checks
from checks.contract import BUILT_IN, DEVICE_RESETS, CheckInfo, Evidence, Previous, Scope, Status, Tier
from checks.discover import HOST_PACKAGES, builtin_checks
from checks.worker.faults import COUNTING_CHECK, Fault
from healthd.core import wire
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.model import CheckResult
from healthd.runner.device_claim import SeenDevices, to_survey
from healthd.runner.run_record import RunRecord, RunRequest, hidden_holders
from healthd.runner.settings import OnProfile, OnProgress, OnResult, Plan, RunnerSettings, Survey
from healthd.runner.workers.fork_server import ForkServers
from healthd.runner.workers.node_lane import NodeLane, ask_node, ask_prestarted
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.workers import Unreaped, WorkerProcess, Workers, worker_targets

if TYPE_CHECKING:
    from healthd.runner.device_checks import DeviceChecks
    from healthd.runner.device_claim import DeviceClaim
if TYPE_CHECKING:
    from healthd.runner.collective.ranks import Session

log = logging.getLogger(__name__)

_CATALOGUE_SECONDS = 30.0  # importing third-party checks


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
        self._fork_servers = ForkServers(settings)
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
    async def prestarted(self, *, devices: bool = False) -> AsyncIterator[None]:
        """
        Start the node's worker of the next run now, so that it imports while the caller still reads what to ask for;
        with `devices` the process that forks the workers of devices, too.

        What no run has used is killed on leaving.
        """
        with contextlib.suppress(OSError):  # the run reports why there can be none
            self._prestarted = self._workers(None).prestart()
        if devices:
            self._fork_servers.start()
        try:
            yield
        finally:
            if self._prestarted is not None:
                process, self._prestarted = self._prestarted, None
                process.kill()
                await process.wait_gone(self.settings.kill_grace_seconds)
            await self._fork_servers.close()

    def preload(self, wanted: bool) -> None:
        """
        Keep the process that forks the workers of devices from now on, also between runs; or end it, for a job that
        needs the memory.
        """
        self._fork_servers.preload(wanted)

    def keep_host_server(self) -> None:
        """
        Keep a process that forks the worker of the node, from the first run on: a round of passive checks then costs no
        new interpreter.
        """
        self._fork_servers.keep_host = True

    async def close(self) -> None:
        """End what is kept between runs."""
        await self._fork_servers.close_host()
        self._fork_servers.keep = False
        await self._fork_servers.close()

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
                execution.give_up("Timeout", f"the run's time of {plan.timeout_seconds or 0.0:g} s was over")
            else:
                log.exception("the runner failed; unfinished checks are unknown")
                execution.give_up("CheckError", f"internal error of healthd: {_innermost(error)}")
        finally:
            await execution.clean_up()
            self._add_device_seconds(execution.workers.device_seconds)
        return execution.results()

    def session(self, faults: Sequence[Fault] = ()) -> Session:
        """The ranks of this node in one validation over several nodes. Call `Session.open` first."""
        from healthd.runner.collective.ranks import Session

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
        return Workers(settings, self._unreaped, self._versions, on_progress, self._fork_servers)

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


class Execution:
    """The run of one plan. `perform` may raise; then `give_up`, `clean_up` and `results` still give every result."""

    def __init__(self, request: RunRequest, workers: Workers) -> None:
        self.workers = workers
        self._plan = request.plan
        self._record = RunRecord(request, workers.settings, workers.machine)
        self._node = NodeLane(workers, self._record)
        self._devices: DeviceChecks | None = None

    async def perform(self, catalogue: Mapping[str, CheckInfo]) -> None:
        """Run all checks of the plan."""
        infos = [catalogue[name] for name in dict.fromkeys(self._plan.checks) if name in catalogue]
        for name in self._plan.checks:
            if name not in catalogue:
                self._record.refuse_unknown(name)
        if not infos:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._node.serve(), name="lane of the node")
            survey = self._node.survey()
            active = [info for info in infos if info.tier is not Tier.PASSIVE]
            if self._plan.allocated is None and any(info.scope is not Scope.NODE for info in active):
                self.workers.expect_devices()
            # A check that can tell that the devices are in use comes first: active checks wait for its result.
            first = holders_checks() if active else frozenset()
            passive = [info for info in infos if info.tier is Tier.PASSIVE]
            for info in sorted(passive, key=lambda info: info.name not in first):
                self._node.submit_check(info)
            if active:
                await self._run_active(active, await survey, tasks)
                await self.workers.end_server()
            self._node.close()

    async def _run_active(self, infos: Sequence[CheckInfo], surveyed: Outcome, tasks: asyncio.TaskGroup) -> None:
        """Claim the devices and run active checks; refuse those that cannot run, with the reason."""
        from healthd.runner.device_claim import ClaimError, DeviceClaim  # not needed, and slow, in a passive round

        record = self._record
        if surveyed.missing is not None:
            text = f"the devices could not be found: {surveyed.missing.message}"
            record.refuse(infos, surveyed.missing.reason, text)
            return
        if not self.workers.inventory.get("devices"):
            infos = record.refuse_devices(infos, "MissingDevice", "no devices were found, so nothing was measured")
        elif not worker_targets(self.workers.inventory):
            text = "the devices are present, but which of their cores can be probed is unknown; see the passive checks"
            infos = record.refuse_devices(infos, "NoData", text)
        if not infos:
            return
        if allocated := self._plan.allocated or await self._hidden_holders():
            record.refuse(infos, "Busy", allocated, Status.SKIP)
            return
        claim = DeviceClaim(self.workers, self._node.survey)
        try:
            async with claim.held(surveyed):
                await self._run_claimed(infos, claim, tasks)
        except ClaimError as error:
            record.refuse(infos, error.reason, str(error), error.status)

    async def _hidden_holders(self) -> str | None:
        """Processes on the devices that /proc does not show, where this run has the check that can tell."""
        described = find_descriptor(self.workers.inventory.get("accelerator"))
        check = described.holders_check if described is not None else None
        if check is None or check not in self._plan.checks:
            return None
        return hidden_holders(await self._record.wait_for(check))

    async def _run_claimed(self, infos: Sequence[CheckInfo], claim: DeviceClaim, tasks: asyncio.TaskGroup) -> None:
        from healthd.runner.device_checks import DeviceChecks
        from healthd.runner.device_claim import ClaimError

        programs = [info for info in infos if info.scope is Scope.NODE]
        others = [info for info in infos if info.scope is not Scope.NODE]
        for info in programs:
            self._node.submit_check(info)
        if programs:
            await self._node.wait_idle()  # programs may use the devices, so no other worker does meanwhile
        if others:
            if names := self._names_run(programs):
                # What a program started may need a moment to release the devices, which take one process at a time.
                try:
                    await claim.check_free(await self._node.survey())
                except ClaimError as error:
                    self._record.refuse(others, "Busy", f"after {', '.join(names)}: {error}", Status.SKIP)
                    return
            self._devices = DeviceChecks(self.workers, self._record, self._node)
            await self._devices.run(others, tasks)
        await self._node.survey()  # the devices are free again, or it is known who has them

    def _names_run(self, infos: Sequence[CheckInfo]) -> list[str]:
        """The names of these checks, when at least one of them was not skipped."""
        results = [self._record.results.get(info.name) for info in infos]
        ran = any(result is not None and result.status is not Status.SKIP for result in results)
        return sorted(info.name for info in infos) if ran else []

    def give_up(self, reason: str, message: str) -> None:
        """Publish that every check without a result is unknown, for this reason."""
        self._record.give_up(reason, message)

    async def clean_up(self) -> None:
        """Kill the workers that are left, wait a short time for them, and remove temporary files."""
        self._record.publish_deferred()  # a search was cut short: the result without it stands
        if self._devices is not None:
            self._devices.clean_up()
        await self.workers.kill_all()

    def results(self) -> tuple[CheckResult, ...]:
        """The results, in the order of the plan."""
        return self._record.in_order()


@dataclass(frozen=True, kw_only=True)
class LastEvidence:
    """The last evidence of a node check."""

    check: str
    evidence: tuple[Evidence, ...]
    measured_at: float
    """In seconds of CLOCK_BOOTTIME."""
    boot_id: str | None
    """The boot in which it was measured; None where it is unknown."""


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
            raise ConfigError(f"checks: {error}; correct the arguments of @check") from None
        found[info.name] = info
    return found
