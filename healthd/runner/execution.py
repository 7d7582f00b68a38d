"""
One run of a plan: node checks and judging in one child, device checks in one worker a device, then the collectives.

Whatever is not passive runs only while we have the lock, nobody holds devices and no job has the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from checks.contract import Tier
from healthd.core.model import CheckResult
from healthd.runner.run_record import Account, Request
from healthd.runner.settings import CheckInfo
from healthd.runner.workers.node_lane import NodeLane
from healthd.runner.workers.outcome import HOLDERS_CHECK, Outcome
from healthd.runner.workers.workers import Workers

if TYPE_CHECKING:
    from healthd.runner.device_checks import Devices


class Execution:
    """Of one plan. `perform` may raise; `give_up`, `clean_up` and `results` put that right."""

    def __init__(self, request: Request, workers: Workers) -> None:
        self.workers = workers
        self._plan = request.plan
        self._account = Account(request, workers.settings)
        self._node = NodeLane(workers, self._account)
        self._devices: Devices | None = None

    async def perform(self, catalogue: Mapping[str, CheckInfo]) -> None:
        """Run all checks of the plan."""
        infos = [catalogue[name] for name in dict.fromkeys(self._plan.checks) if name in catalogue]
        for name in self._plan.checks:
            if name not in catalogue:
                self._account.tell(
                    self._account.unmeasured(name, "CheckError", f"no such check: {name}; see `healthd checks`")
                )
        if not infos:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._node.serve(), name="lane of the node")
            surveyed = self._node.survey()
            # First what may tell that the devices are taken: active checks wait for its word.
            passive = [info for info in infos if info.tier is Tier.PASSIVE]
            for info in sorted(passive, key=lambda info: info.name != HOLDERS_CHECK):
                self._node.submit_check(info)
            active = [info for info in infos if info.tier is not Tier.PASSIVE]
            if active:
                await self._run_active(active, await surveyed, tasks)
            self._node.close()

    async def _run_active(self, infos: Sequence[CheckInfo], surveyed: Outcome, tasks: asyncio.TaskGroup) -> None:
        from healthd.runner.device_checks import Devices  # not needed for a passive round, which is to be quick
        from healthd.runner.device_claim import Taking

        self._devices = Devices(self.workers, self._account, self._node)
        await Taking(self.workers, self._account, self._node, self._devices).run(infos, surveyed, tasks)

    def give_up(self, reason: str, message: str) -> None:
        """Every check that has no result yet is unknown, for this reason."""
        self._account.give_up(reason, message)

    async def clean_up(self) -> None:
        """Kill what is left, wait a moment for it, remove what was written."""
        self._account.tell_held()  # cut short while groups were asked: what the whole has shown stands
        self.workers.kill_all()
        if self._devices is not None:
            self._devices.clean_up()
        await self.workers.bury_all(self.workers.settings.kill_grace_seconds)

    def results(self) -> tuple[CheckResult, ...]:
        """In the order of the plan."""
        return self._account.in_order()
