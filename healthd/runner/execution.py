"""
Runs one plan: checks of the node and judging in one worker, device checks in a worker each, then collectives.

Active checks run only while this run has claimed the devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from checks.accelerators import find_descriptor, holders_checks
from checks.contract import CheckInfo, Scope, Status, Tier
from healthd.core.model import CheckResult
from healthd.runner.run_record import RunRecord, RunRequest, hidden_holders
from healthd.runner.workers.node_lane import NodeLane
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.workers import Workers, worker_targets

if TYPE_CHECKING:
    from healthd.runner.device_checks import DeviceChecks
    from healthd.runner.device_claim import DeviceClaim


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
            # A check that can tell that the devices are in use comes first: active checks wait for its result.
            first = holders_checks() if active else frozenset()
            passive = [info for info in infos if info.tier is Tier.PASSIVE]
            for info in sorted(passive, key=lambda info: info.name not in first):
                self._node.submit_check(info)
            if active:
                await self._run_active(active, await survey, tasks)
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
            text = "the devices are there and which cores could be probed is not known; see the passive checks"
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
