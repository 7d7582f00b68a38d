"""
Runs checks on claimed devices: each worker by itself, then all as ranks, then the search for a rank at fault.

Also here:

- profiles of what ran as a compiled program: captured on a device that its worker has left, for what was slow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checks.accelerators import find_descriptor
from checks.contract import CheckInfo, Finding, Scope, Status, Tier
from healthd.runner.collective.node_collective import NodeCollective
from healthd.runner.compilation import Compilation, failed_like, seconds_by_check
from healthd.runner.run_record import RunRecord
from healthd.runner.workers.node_lane import NodeLane
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, WorkerLane
from healthd.runner.workers.workers import Workers, probed_devices, worker_targets

if TYPE_CHECKING:
    from healthd.runner.collective.node_collective import UnresolvedFailure

log = logging.getLogger(__name__)

SECONDS = 130.0
"""For one profile: capturing and reading it may take a minute each (see `checks.profiling.neuron`)."""
RUN_SECONDS = 2 * SECONDS
"""For all profiles of a run, from the beginning of the first: an ordered run has minutes, and waits for them."""
_SLOW = "SlowDevice"


class DeviceChecks:
    """The device checks of one run, with one worker a device. `node` judges."""

    def __init__(self, workers: Workers, record: RunRecord, node: NodeLane) -> None:
        self._workers = workers
        self._record = record
        self._request = record.request
        self._plan = record.plan
        self._node = node
        self._folder: Path | None = None
        self._compilation = Compilation(workers, record.plan)
        self._lanes = [WorkerLane(workers, target) for target in worker_targets(workers.inventory)]
        record.probed = probed_devices(workers.inventory)

    async def run(self, infos: Sequence[CheckInfo], tasks: asyncio.TaskGroup) -> None:
        """Run these checks, and let the workers end."""
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
        """Count the time for which the workers had devices, and remove temporary files."""
        for lane in self._lanes:
            lane.count_seconds()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _run_devices(self, infos: Sequence[CheckInfo], *, keep: bool) -> None:
        """Each worker runs its checks in order, independently of the others. `keep` them when ranks come next."""
        slots = asyncio.Semaphore(self._workers.settings.max_workers_at_once)
        keep = keep and len(self._lanes) <= self._workers.settings.max_workers_at_once
        # What one device has compiled serves all devices of its kind.
        lanes = self._lanes[:1] if self._plan.warm and self._compilation.active else self._lanes
        outcomes: dict[str, dict[int, Outcome]] = {info.name: {} for info in infos}
        self._compilation.announce(infos)

        open_profiles: Counter[str] = Counter()

        def finish(info: CheckInfo, rank: int, outcome: Outcome) -> None:
            outcomes[info.name][rank] = outcome
            if len(outcomes[info.name]) == len(lanes):
                complete = [outcomes[info.name][rank] for rank in range(len(lanes))]
                self._end(info, complete, last=not open_profiles[info.name])

        programs = ProgramProfiles(self._workers, self._record)

        async def work(rank: int, lane: WorkerLane) -> None:
            slow: list[tuple[CheckInfo, Outcome]] = []
            async with slots:
                compiled = await self._compilation.run(lane, infos)
                seconds = seconds_by_check(compiled)

                def end(info: CheckInfo, rank: int, outcome: Outcome) -> None:
                    outcome.compile_seconds += seconds.get(info.name, 0.0)
                    if programs.wants(outcome):
                        slow.append((info, outcome))
                        open_profiles[info.name] += 1
                    finish(info, rank, outcome)

                for info in infos:
                    if compiled is not None and compiled.missing is not None:
                        finish(info, rank, failed_like(compiled, lane.target))
                    else:
                        self._submit_device_check(info, rank, lane, end)
                await lane.wait_idle()
                if slow or not keep:
                    await lane.retire()
            for info, outcome in slow:  # the worker has left the device, and others may be measured
                await programs.add(info.name, outcome)
                open_profiles[info.name] -= 1
                finish(info, rank, outcome)

        # Not gather, which leaves the others behind when one is cancelled: they could start workers that nobody kills.
        async with asyncio.TaskGroup() as working:
            for rank, lane in enumerate(lanes if infos else ()):
                working.create_task(work(rank, lane), name=f"checks of {lane.target}")

    def _end(self, info: CheckInfo, outcomes: Sequence[Outcome], *, last: bool) -> None:
        if not last:
            # A profile may take minutes: a run that is cancelled meanwhile still says what was slow.
            self._record.defer(self._record.compose(info, outcomes))
        elif info.judged:
            self._node.submit_judge(info, outcomes)
        else:
            self._record.publish(self._record.compose(info, outcomes))

    def _submit_device_check(
        self, info: CheckInfo, rank: int, lane: WorkerLane, finish: Callable[[CheckInfo, int, Outcome], None]
    ) -> None:
        names = (lane.target, f"rank:{rank}")
        if any(fault.kind == "missing" and fault.hits(info.name, names) for fault in self._request.faults):
            outcome = Outcome(target=lane.target)
            finish(info, rank, outcome.fail("MissingDevice", f"no such device: {lane.target}"))
            return
        command = self._record.command(info, names, None)
        lane.submit(self._record.job(info, command, lambda outcome: finish(info, rank, outcome)))

    async def _run_groups(self, infos: Sequence[CheckInfo]) -> None:
        from healthd.runner.collective.node_collective import UnresolvedFailure, is_unresolved

        folder = self._folder = Path(tempfile.mkdtemp(prefix="healthd-"))
        collective = NodeCollective(self._workers, self._lanes, folder, self._compilation, learns=True)
        search = self._plan.localize or self._plan.tier.rank >= Tier.DEEP.rank
        unresolved: list[UnresolvedFailure] = []
        for info in infos:
            faults = tuple(fault for fault in self._request.faults if fault.check == info.name)
            timeout_seconds = self._record.timeout_seconds(info)
            outcomes, whole = await collective.run(info, timeout_seconds, self._record.command, faults)
            if not (info.judged and whole):
                self._record.publish(self._record.compose(info, outcomes))
            elif not search:
                self._node.submit_judge(info, outcomes)
            else:
                judgement = await self._node.judge(info, outcomes)
                result = self._record.compose(info, outcomes, judgement)
                if not is_unresolved(judgement):
                    self._record.publish(result)
                    continue
                self._record.defer(result)
                unresolved.append(
                    UnresolvedFailure(
                        info=info,
                        outcomes=outcomes,
                        judgement=judgement,
                        faults=faults,
                        timeout_seconds=timeout_seconds,
                    )
                )
        if unresolved:
            await self._search(unresolved, folder)

    async def _search(self, unresolved: Sequence[UnresolvedFailure], folder: Path) -> None:
        """Find the rank at fault in failed collectives by groups of fewer ranks, and add it to their results."""
        from healthd.runner.collective.node_collective import Subgroups

        within = self._workers.settings.search_seconds
        if self._plan.timeout_seconds is not None:  # what is known must be published before the run's time is up
            within = min(within, 0.8 * (self._record.began + self._plan.timeout_seconds - time.monotonic()))

        def make_group(ranks: tuple[int, ...], name: str) -> NodeCollective:
            lanes = [self._lanes[rank] for rank in ranks]
            (folder / name).mkdir()
            return NodeCollective(self._workers, lanes, folder / name, numbers=ranks)

        groups = Subgroups(self._workers, self._lanes, make_group, command=self._record.command, judge=self._node.judge)
        found = await groups.search(unresolved, self._record.results.values(), deadline=time.monotonic() + within)
        for one in unresolved:
            one.judgement.findings.extend(found)
            self._record.publish(self._record.compose(one.info, one.outcomes, one.judgement))


class ProgramProfiles:
    """The profiles of one run."""

    def __init__(self, workers: Workers, record: RunRecord) -> None:
        self._workers = workers
        self._record = record
        self._slots = asyncio.Semaphore(workers.settings.max_workers_at_once)
        self._until: float | None = None

    def wants(self, outcome: Outcome) -> bool:
        """Whether a profile of this outcome is to be had: of a check that ended, never of one that hangs or died."""
        if outcome.program is None or outcome.missing is not None:
            return False
        described = find_descriptor(self._workers.inventory.get("accelerator"))
        if described is None or not described.profiles_programs:
            return False
        limit = self._record.plan.timeout_seconds
        if limit is not None and self._record.began + limit - time.monotonic() < 2 * SECONDS:
            return False  # what is known must be published before the time of the run is up
        always = self._workers.settings.profile == "always"
        return any(_is_slow(finding) or (always and finding.status is Status.PASS) for finding in outcome.findings)

    async def add(self, check: str, outcome: Outcome) -> None:
        """Capture a profile and let the findings name it; where that fails, they stay as they are."""
        done: list[Outcome] = []
        async with self._slots:
            now = time.monotonic()
            self._until = self._until or now + RUN_SECONDS
            if now + SECONDS > self._until:
                log.warning("no profile of %s on %s: other profiles used up the time", check, outcome.target)
                return
            lane = WorkerLane(self._workers, None)
            command = {"kind": "capture", "program": outcome.program, "target": outcome.target}
            lane.submit(Job(check=check, command=command, timeout_seconds=SECONDS, finish=done.append, retry=False))
            lane.close()
            await lane.serve()
        (captured,) = done
        if captured.missing is not None or not captured.profiles:
            why = captured.missing.message if captured.missing is not None else "nothing was captured"
            log.warning("no profile of %s on %s: %s", check, outcome.target, why)
            return
        profile = captured.profiles[0]
        outcome.profile_parts.whole.append(profile)
        about = [one for one in outcome.findings if _is_slow(one)] or outcome.findings
        outcome.findings = [_named(one, profile.id, profile.said) if one in about else one for one in outcome.findings]


def _is_slow(finding: Finding) -> bool:
    return finding.status is not Status.PASS and finding.reason == _SLOW


def _named(finding: Finding, profile: str, said: str) -> Finding:
    message = f"{finding.message}; {said}" if _is_slow(finding) else finding.message
    return dataclasses.replace(finding, message=message, profile=profile)
