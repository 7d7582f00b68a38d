"""Taking the devices for active checks: only while we have the lock, nobody holds them and no job has the node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from checks.contract import Scope, Status
from healthd.runner.device_checks import Devices
from healthd.runner.device_lock import DeviceLock, LockBusyError, read_leased
from healthd.runner.run_record import Account
from healthd.runner.settings import CheckInfo
from healthd.runner.workers.node_lane import NodeLane
from healthd.runner.workers.outcome import HOLDERS_CHECK, Outcome, hidden_holders
from healthd.runner.workers.workers import Workers, worker_targets


class Taking:
    """Of one run. What may not have the devices is refused, with the reason."""

    def __init__(self, workers: Workers, account: Account, node: NodeLane, devices: Devices) -> None:
        self._workers = workers
        self._account = account
        self._node = node
        self._devices = devices

    async def run(self, infos: Sequence[CheckInfo], surveyed: Outcome, tasks: asyncio.TaskGroup) -> None:
        """Where devices are found, the lock is ours and nobody holds them."""
        if surveyed.missing is not None:
            text = f"the devices could not be found: {surveyed.missing.message}"
            self._account.refuse(infos, surveyed.missing.reason, text)
            return
        if not self._workers.inventory.get("devices"):
            infos = self._account.refuse_devices(
                infos, "MissingDevice", "no devices were found, so nothing was measured"
            )
        elif not worker_targets(self._workers.inventory):
            text = "the devices are there and which cores could be probed is not known; see the passive checks"
            infos = self._account.refuse_devices(infos, "NoData", text)
        if not infos:
            return
        run_dir = self._workers.settings.run_dir
        if run_dir is None:
            await self._if_free(infos, surveyed, tasks)
            return
        lock = DeviceLock(
            run_dir / f"{self._workers.inventory['accelerator']}.lock", self._workers.settings.lock_wait_seconds
        )
        try:
            async with lock:
                # While we waited, somebody else's workers had the devices: what was seen then is old.
                await self._if_free(infos, await self._node.survey() if lock.waited else surveyed, tasks)
        except LockBusyError as error:
            self._account.refuse(infos, "Busy", str(error), Status.SKIP)
        except OSError as error:
            text = f"cannot lock {lock.path}: {error.strerror or error}; set run_dir to a directory of ours"
            self._account.refuse(infos, "NoPermission", text)

    async def _if_free(self, infos: Sequence[CheckInfo], surveyed: Outcome, tasks: asyncio.TaskGroup) -> None:
        attempt = 0
        if taken := self._account.plan.taken or await self._hidden():
            self._account.refuse(infos, "Busy", taken, Status.SKIP)
            return
        while busy := self._leased() or busy_by(surveyed):
            attempt += 1
            if attempt > self._workers.settings.retries:
                self._account.refuse(infos, "Busy", busy, Status.SKIP)
                return
            # It may be somebody who is just leaving, such as the probes of a run before.
            await self._workers.back_off(attempt)
            surveyed = await self._node.survey()
        programs = [info for info in infos if info.scope is Scope.NODE]
        if programs:
            for info in programs:
                self._node.submit_check(info)
            await self._node.idle()  # they may use the devices, so no worker does meanwhile, and the lock is kept
        if len(programs) == len(infos):
            await self._node.survey()
            return
        held = await self._held_after(programs)
        if held is not None:
            self._account.refuse([info for info in infos if info not in programs], "Busy", held, Status.SKIP)
            return
        await self._devices.run([info for info in infos if info.scope is not Scope.NODE], tasks)
        await self._node.survey()  # the devices are free again, or it is known who has them

    async def _hidden(self) -> str | None:
        """Why the devices may be taken although /proc shows nobody, where this run has the check that can tell."""
        if self._workers.inventory.get("accelerator") != "cuda" or HOLDERS_CHECK not in self._account.plan.checks:
            return None
        return hidden_holders(await self._account.told(HOLDERS_CHECK))

    async def _held_after(self, programs: Sequence[CheckInfo]) -> str | None:
        """
        Why the workers cannot have the devices, once node checks may have used them; None when they are free.

        What such a check has started may need a moment to let go, and a device takes one process at a time.
        """
        names = {info.name for info in programs}
        if all(self._account.results[name].status is Status.SKIP for name in names & self._account.results.keys()):
            return None  # none of them did anything
        attempt = 0
        while held := busy_by(await self._node.survey()):
            attempt += 1
            if attempt > self._workers.settings.retries:
                return f"after {', '.join(sorted(names))}: {held}"
            await self._workers.back_off(attempt)
        return None

    def _leased(self) -> str | None:
        """Why the node is a job's although nobody holds devices, as its daemon says."""
        settings = self._workers.settings
        if settings.run_dir is None or not settings.heed_leases:
            return None
        return read_leased(settings.run_dir, self._node.boot_id)


def busy_by(surveyed: Outcome) -> str | None:
    """Why the devices are not ours to use; None when they are free."""
    holders = surveyed.answers[0]["holders"] if surveyed.answers else None
    if holders is None:
        return "who holds the devices cannot be seen: run as root, in a container in the host's PID namespace"
    return f"in use by {', '.join(holders[:4])}{' and others' if len(holders) > 4 else ''}" if holders else None
