"""Active checks on devices that are ours: each worker by itself, then all as ranks, then the search among them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checks.contract import Scope, Tier
from healthd.runner.collective.group import Collective
from healthd.runner.run_record import Account
from healthd.runner.settings import CheckInfo
from healthd.runner.warm import Warming, lost_like, seconds_of
from healthd.runner.workers.node_lane import NodeLane
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Lane
from healthd.runner.workers.workers import Workers, worker_targets

if TYPE_CHECKING:
    from healthd.runner.collective.subgroups import Unclear


class Devices:
    """Of one run: one worker a device. `node` judges."""

    def __init__(self, workers: Workers, account: Account, node: NodeLane) -> None:
        self._workers = workers
        self._account = account
        self._request = account.request
        self._plan = account.plan
        self._node = node
        self._folder: Path | None = None
        self._warming = Warming(workers, account.plan)
        self._lanes: list[Lane] = []

    async def run(self, infos: Sequence[CheckInfo], tasks: asyncio.TaskGroup) -> None:
        """Run these checks, and let the workers go."""
        self._lanes = [Lane(self._workers, target) for target in worker_targets(self._workers.inventory)]
        serving = [tasks.create_task(lane.serve(), name=f"lane of {lane.target}") for lane in self._lanes]
        devices = [info for info in infos if info.scope is Scope.DEVICE]
        groups = [info for info in infos if info.scope is Scope.GROUP]
        await self._run_devices(devices, keep=bool(groups))
        if groups:
            await self._run_groups(groups)
        for lane in self._lanes:
            lane.close()
        await asyncio.gather(*serving)

    def clean_up(self) -> None:
        """Once the workers are killed: count what they took, remove what was written."""
        for lane in self._lanes:
            lane.count_seconds()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _run_devices(self, infos: Sequence[CheckInfo], *, keep: bool) -> None:
        """Each worker takes its checks in order and waits for no other. `keep` them when ranks are wanted next."""
        places = asyncio.Semaphore(self._workers.settings.max_workers_at_once)
        keep = keep and len(self._lanes) <= self._workers.settings.max_workers_at_once
        # What one device has compiled serves all of its kind.
        lanes = self._lanes[:1] if self._plan.warm and self._warming.active else self._lanes
        collectors = {info.name: _Collector(len(lanes)) for info in infos}
        self._warming.announce(infos)

        def finish(info: CheckInfo, rank: int, outcome: Outcome) -> None:
            if outcomes := collectors[info.name].take(rank, outcome):
                if info.judged:
                    self._node.submit_judge(info, outcomes)
                else:
                    self._account.tell(self._account.result_of(info, outcomes, judgement=None))

        async def work(rank: int, lane: Lane) -> None:
            async with places:
                warmed = await self._warming.warm(lane, infos)
                seconds = seconds_of(warmed)

                def end(info: CheckInfo, rank: int, outcome: Outcome) -> None:
                    outcome.compile_seconds += seconds.get(info.name, 0.0)
                    finish(info, rank, outcome)

                for info in infos:
                    if warmed is not None and warmed.missing is not None:
                        finish(info, rank, lost_like(warmed, lane.target))
                    else:
                        self._submit_device_check(info, rank, lane, end)
                await lane.idle()
                if not keep:
                    await lane.retire()

        if infos:
            await asyncio.gather(*(work(rank, lane) for rank, lane in enumerate(lanes)))

    def _submit_device_check(
        self, info: CheckInfo, rank: int, lane: Lane, finish: Callable[[CheckInfo, int, Outcome], None]
    ) -> None:
        names = (lane.target, f"rank:{rank}")
        if any(fault.kind == "missing" and fault.hits(info.name, names) for fault in self._request.faults):
            gone = Outcome(target=lane.target)
            finish(info, rank, gone.lost("MissingDevice", f"no such device: {lane.target}"))
            return
        lane.submit(
            self._account.job(
                info, self._account.command(info, names, None), lambda outcome: finish(info, rank, outcome)
            )
        )

    async def _run_groups(self, infos: Sequence[CheckInfo]) -> None:
        from healthd.runner.collective.subgroups import Unclear, is_open

        folder = self._folder = Path(tempfile.mkdtemp(prefix="healthd-"))
        collective = Collective(self._workers, self._lanes, self._folder, self._warming, learns=True)
        search = self._plan.localize or self._plan.tier.rank >= Tier.DEEP.rank
        unclear: list[Unclear] = []
        for info in infos:
            faults = [fault for fault in self._request.faults if fault.check == info.name]
            outcomes, whole = await collective.run(
                info, self._account.timeout_seconds(info), self._account.command, faults
            )
            if not (info.judged and whole):
                self._account.tell(self._account.result_of(info, outcomes, judgement=None))
            elif not search:
                self._node.submit_judge(info, outcomes)
            else:
                judgement = await self._node.judged(info, outcomes)
                result = self._account.result_of(info, outcomes, judgement=judgement)
                if is_open(judgement):
                    self._account.hold(result)
                    unclear.append(
                        Unclear(
                            info=info,
                            outcomes=outcomes,
                            judgement=judgement,
                            faults=tuple(faults),
                            timeout_seconds=self._account.timeout_seconds(info),
                        )
                    )
                else:
                    self._account.tell(result)
        if unclear:
            await self._search(unclear, folder)

    async def _search(self, unclear: Sequence[Unclear], folder: Path) -> None:
        """Let smaller groups of ranks say who is at fault in collectives that failed, and add it to their results."""
        from healthd.runner.collective.subgroups import Subgroups

        within = self._workers.settings.search_seconds
        if self._plan.timeout_seconds is not None:  # what is known must be told before the run's time is up
            within = min(within, 0.8 * (self._account.began + self._plan.timeout_seconds - time.monotonic()))
        groups = Subgroups(self._workers, self._lanes, folder, command=self._account.command, judge=self._node.judged)
        found = await groups.search(unclear, self._account.results.values(), deadline=time.monotonic() + within)
        for one in unclear:
            one.judgement.findings.extend(found)
            self._account.tell(self._account.result_of(one.info, one.outcomes, judgement=one.judgement))


class _Collector:
    """Gathers the outcomes of one check from all devices."""

    def __init__(self, count: int) -> None:
        self._outcomes: dict[int, Outcome] = {}
        self._count = count

    def take(self, rank: int, outcome: Outcome) -> list[Outcome]:
        """All outcomes in the order of the devices once the last is there; before that, nothing."""
        self._outcomes[rank] = outcome
        return [self._outcomes[i] for i in range(self._count)] if len(self._outcomes) == self._count else []
