"""
One run of a plan: node checks and judging in one child, device checks in one worker a device, then the collectives.

Whatever is not passive runs only while we have the lock, nobody holds devices and no job has the node.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.contract import Evidence, Finding, Previous, Scope, Status, Tier
from checks.faults import Fault
from checks.learned import hardware_in
from checks.protocol import from_evidence, from_missing, from_previous, shorten
from healthd.model import CheckResult
from healthd.runner.group import Collective
from healthd.runner.lane import Job, Lane
from healthd.runner.lock import DeviceLock, LockBusyError, read_leased
from healthd.runner.outcome import Outcome, compose, in_order_of_end, unmeasured
from healthd.runner.settings import CheckInfo, OnResult, Plan
from healthd.runner.subgroups import Subgroups, Unclear, is_open
from healthd.runner.warm import Warming, lost_like, seconds_of
from healthd.runner.workers import Workers, worker_targets

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


class Execution:
    """Of one plan. `perform` may raise; `give_up`, `clean_up` and `results` put that right."""

    def __init__(self, request: Request, workers: Workers) -> None:
        self.workers = workers
        self._request = request
        self._plan = request.plan
        self._results: dict[str, CheckResult] = {}
        self._held: dict[str, CheckResult] = {}  # known, and told once smaller groups have said who it was
        self._began = time.monotonic()
        self._folder: Path | None = None
        self._boot_id: str | None = None
        self._node = Lane(workers, None)
        self._warming = Warming(workers, request.plan)
        self._lanes: list[Lane] = []

    async def perform(self, catalogue: Mapping[str, CheckInfo]) -> None:
        """Run all checks of the plan."""
        infos = [catalogue[name] for name in dict.fromkeys(self._plan.checks) if name in catalogue]
        for name in self._plan.checks:
            if name not in catalogue:
                self._emit(self._unmeasured(name, "CheckError", f"no such check: {name}; see `healthd checks`"))
        if not infos:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._node.serve(), name="lane of the node")
            surveyed = self._submit_survey()
            for info in infos:
                if info.tier is Tier.PASSIVE:
                    self._submit_node_check(info)
            active = [info for info in infos if info.tier is not Tier.PASSIVE]
            if active:
                await self._run_active(active, await surveyed, tasks)
            self._node.close()

    def give_up(self, reason: str, message: str) -> None:
        """Every check that has no result yet is unknown, for this reason."""
        for name in self._plan.checks:
            if name in self._held:
                self._emit(self._held.pop(name))
            elif name not in self._results:
                self._emit(self._unmeasured(name, reason, message))

    async def clean_up(self) -> None:
        """Kill what is left, wait a moment for it, remove what was written."""
        for name in list(self._held):  # cut short while groups were asked: what the whole has shown stands
            self._emit(self._held.pop(name))
        self.workers.kill_all()
        for lane in self._lanes:
            lane.count_seconds()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        await self.workers.bury_all(self.workers.settings.kill_grace_seconds)

    def results(self) -> tuple[CheckResult, ...]:
        """In the order of the plan."""
        return tuple(self._results[name] for name in dict.fromkeys(self._plan.checks))

    # --- the node -----------------------------------------------------------------------------------------------------

    def _submit_survey(self) -> asyncio.Future[Outcome]:
        """Ask for inventory and holders; the child's later commands see what it found."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def finish(outcome: Outcome) -> None:
            if outcome.answers:
                found = outcome.answers[0]
                self.workers.inventory = {**found["inventory"], "holders": found["holders"]}
                self.workers.identity = {
                    "hardware": hardware_in(found["instance_type"], found["inventory"]),
                    "accelerator": found["inventory"]["accelerator"],
                    "versions": found["versions"],
                }
                self._boot_id = found["boot_id"]
            self._request.on_survey(outcome)
            if not answer.done():
                answer.set_result(outcome)

        self._node.submit(
            Job(
                check="survey",
                command={"kind": "survey"},
                timeout_seconds=self.workers.settings.survey_timeout_seconds,
                finish=finish,
            )
        )
        return answer

    def _submit_node_check(self, info: CheckInfo) -> None:
        corpse = self.workers.stuck(f"node/{info.name}")
        if corpse is not None:
            lost = Outcome(target="node").lost("Stuck", corpse.message)
            self._emit(compose(info, self._plan, [lost], judgement=None, injected=self._injected(info)))
            return

        def finish(outcome: Outcome) -> None:
            if outcome.missing is None and outcome.evidence:
                self._request.on_evidence(info.name, tuple(outcome.evidence), self._boot_id)
            if info.judged and outcome.missing is None and outcome.evidence:
                self._submit_judge(info, [outcome])
            else:
                self._emit(compose(info, self._plan, [outcome], judgement=None, injected=self._injected(info)))

        self._node.submit(self._job(info, self._command(info, ("node",), None), finish))

    def _submit_judge(self, info: CheckInfo, outcomes: Sequence[Outcome]) -> None:
        """Let the node's child compare what was measured, and make the result of it."""

        def finish(judgement: Outcome) -> None:
            self._emit(compose(info, self._plan, outcomes, judgement=judgement, injected=self._injected(info)))

        self._ask_judge(info, outcomes, finish)

    def _ask_judge(self, info: CheckInfo, outcomes: Sequence[Outcome], finish: Callable[[Outcome], None]) -> None:
        command = {
            "kind": "judge",
            "evidence": [from_evidence(item) for outcome in outcomes for item in outcome.evidence],
            "missing": [from_missing(item) for item in in_order_of_end(outcomes)],
        }
        self._node.submit(
            Job(
                check=info.name,
                command=command,
                timeout_seconds=self.workers.settings.judge_timeout_seconds,
                finish=finish,
                retry=False,  # pure arithmetic that dies once dies again
            )
        )

    # --- active checks ------------------------------------------------------------------------------------------------

    async def _run_active(self, infos: Sequence[CheckInfo], surveyed: Outcome, tasks: asyncio.TaskGroup) -> None:
        """Where devices are found, the lock is ours and nobody holds them."""
        if surveyed.missing is not None:
            text = f"the devices could not be found: {surveyed.missing.message}"
            self._refuse(infos, surveyed.missing.reason, text)
            return
        if not self.workers.inventory.get("devices"):
            infos = self._refuse_devices(infos, "MissingDevice", "no devices were found, so nothing was measured")
        elif not worker_targets(self.workers.inventory):
            text = "the devices are there and which cores could be probed is not known; see the passive checks"
            infos = self._refuse_devices(infos, "NoData", text)
        if not infos:
            return
        run_dir = self.workers.settings.run_dir
        if run_dir is None:
            await self._if_free(infos, surveyed, tasks)
            return
        lock = DeviceLock(
            run_dir / f"{self.workers.inventory['accelerator']}.lock", self.workers.settings.lock_wait_seconds
        )
        try:
            async with lock:
                # While we waited, somebody else's workers had the devices: what was seen then is old.
                await self._if_free(infos, await self._submit_survey() if lock.waited else surveyed, tasks)
        except LockBusyError as error:
            self._refuse(infos, "Busy", str(error), Status.SKIP)
        except OSError as error:
            text = f"cannot lock {lock.path}: {error.strerror or error}; set run_dir to a directory of ours"
            self._refuse(infos, "NoPermission", text)

    async def _if_free(self, infos: Sequence[CheckInfo], surveyed: Outcome, tasks: asyncio.TaskGroup) -> None:
        attempt = 0
        while busy := self._leased() or busy_by(surveyed):
            attempt += 1
            if attempt > self.workers.settings.retries:
                self._refuse(infos, "Busy", busy, Status.SKIP)
                return
            # It may be somebody who is just leaving, such as the probes of a run before.
            await self.workers.back_off(attempt)
            surveyed = await self._submit_survey()
        programs = [info for info in infos if info.scope is Scope.NODE]
        if programs:
            for info in programs:
                self._submit_node_check(info)
            await self._node.idle()  # they may use the devices, so no worker does meanwhile, and the lock is kept
        if len(programs) == len(infos):
            await self._submit_survey()
            return
        held = await self._held_after(programs)
        if held is not None:
            self._refuse([info for info in infos if info not in programs], "Busy", held, Status.SKIP)
            return
        self._lanes = [Lane(self.workers, target) for target in worker_targets(self.workers.inventory)]
        serving = [tasks.create_task(lane.serve(), name=f"lane of {lane.target}") for lane in self._lanes]
        devices = [info for info in infos if info.scope is Scope.DEVICE]
        groups = [info for info in infos if info.scope is Scope.GROUP]
        await self._run_devices(devices, keep=bool(groups))
        if groups:
            await self._run_groups(groups)
        for lane in self._lanes:
            lane.close()
        await asyncio.gather(*serving)
        await self._submit_survey()  # the devices are free again, or it is known who has them

    async def _held_after(self, programs: Sequence[CheckInfo]) -> str | None:
        """
        Why the workers cannot have the devices, once node checks may have used them; None when they are free.

        What such a check has started may need a moment to let go, and a device takes one process at a time.
        """
        names = {info.name for info in programs}
        if all(self._results[name].status is Status.SKIP for name in names & self._results.keys()):
            return None  # none of them did anything
        attempt = 0
        while held := busy_by(await self._submit_survey()):
            attempt += 1
            if attempt > self.workers.settings.retries:
                return f"after {', '.join(sorted(names))}: {held}"
            await self.workers.back_off(attempt)
        return None

    def _leased(self) -> str | None:
        """Why the node is a job's although nobody holds devices, as its daemon says."""
        settings = self.workers.settings
        if settings.run_dir is None or not settings.heed_leases:
            return None
        return read_leased(settings.run_dir, self._boot_id)

    async def _run_devices(self, infos: Sequence[CheckInfo], *, keep: bool) -> None:
        """Each worker takes its checks in order and waits for no other. `keep` them when ranks are wanted next."""
        places = asyncio.Semaphore(self.workers.settings.max_workers_at_once)
        keep = keep and len(self._lanes) <= self.workers.settings.max_workers_at_once
        # What one device has compiled serves all of its kind.
        lanes = self._lanes[:1] if self._plan.warm and self._warming.active else self._lanes
        collectors = {info.name: _Collector(len(lanes)) for info in infos}
        self._warming.announce(infos)

        def finish(info: CheckInfo, rank: int, outcome: Outcome) -> None:
            if outcomes := collectors[info.name].take(rank, outcome):
                if info.judged:
                    self._submit_judge(info, outcomes)
                else:
                    self._emit(compose(info, self._plan, outcomes, judgement=None, injected=self._injected(info)))

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
        lane.submit(self._job(info, self._command(info, names, None), lambda outcome: finish(info, rank, outcome)))

    async def _run_groups(self, infos: Sequence[CheckInfo]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="healthd-"))
        collective = Collective(self.workers, self._lanes, self._folder, self._warming)
        search = self._plan.localize or self._plan.tier.rank >= Tier.DEEP.rank
        unclear: list[Unclear] = []
        for info in infos:
            faults = [fault for fault in self._request.faults if fault.check == info.name]
            outcomes, whole = await collective.run(info, self._timeout_seconds(info), self._command, faults)
            if not (info.judged and whole):
                self._emit(compose(info, self._plan, outcomes, judgement=None, injected=self._injected(info)))
            elif not search:
                self._submit_judge(info, outcomes)
            else:
                judgement = await self._judged(info, outcomes)
                result = compose(info, self._plan, outcomes, judgement=judgement, injected=self._injected(info))
                if is_open(judgement):
                    self._held[info.name] = result
                    unclear.append(
                        Unclear(
                            info=info,
                            outcomes=outcomes,
                            judgement=judgement,
                            faults=tuple(faults),
                            timeout_seconds=self._timeout_seconds(info),
                        )
                    )
                else:
                    self._emit(result)
        if unclear:
            await self._search(unclear)

    async def _search(self, unclear: Sequence[Unclear]) -> None:
        """Let smaller groups of ranks say who is at fault in collectives that failed, and add it to their results."""
        within = self.workers.settings.search_seconds
        if self._plan.timeout_seconds is not None:  # what is known must be told before the run's time is up
            within = min(within, 0.8 * (self._began + self._plan.timeout_seconds - time.monotonic()))
        assert self._folder is not None
        groups = Subgroups(self.workers, self._lanes, self._folder, command=self._command, judge=self._judged)
        found = await groups.search(unclear, self._results.values(), deadline=time.monotonic() + within)
        for one in unclear:
            one.judgement.findings.extend(found)
            del self._held[one.info.name]
            injected = self._injected(one.info)
            self._emit(compose(one.info, self._plan, one.outcomes, judgement=one.judgement, injected=injected))

    async def _judged(self, info: CheckInfo, outcomes: Sequence[Outcome]) -> Outcome:
        """What the node's child says of the ranks' outcomes."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def finish(judgement: Outcome) -> None:
            if not answer.done():
                answer.set_result(judgement)

        self._ask_judge(info, outcomes, finish)
        return await answer

    # --- what they share ----------------------------------------------------------------------------------------------

    def _job(self, info: CheckInfo, command: dict[str, Any], finish: Callable[[Outcome], None]) -> Job:
        return Job(
            check=info.name,
            command=command,
            timeout_seconds=self._timeout_seconds(info),
            finish=finish,
            retry=not self._injected(info),
        )

    def _command(self, info: CheckInfo, names: Sequence[str], group: dict[str, Any] | None) -> dict[str, Any]:
        """`names` are those under which a fault may mean this worker."""
        return {
            "kind": "run",
            "tier": self._plan.tier.value,
            "params": dict(self.workers.settings.params.get(info.name, {})),
            "group": group,
            "previous": from_previous(self._request.previous.get(info.name)),
            "faults": [
                [fault.check, fault.target, fault.kind, fault.value]
                for fault in self._request.faults
                if fault.hits(info.name, names) or (info.scope is Scope.NODE and fault.check == info.name)
            ],
        }

    def _timeout_seconds(self, info: CheckInfo) -> float:
        return self.workers.settings.timeouts_seconds.get(info.name, info.timeout_seconds)

    def _injected(self, info: CheckInfo) -> bool:
        return any(fault.check == info.name for fault in self._request.faults)

    def _refuse_devices(self, infos: Sequence[CheckInfo], reason: str, message: str) -> list[CheckInfo]:
        """Refuse what needs a device; what is left."""
        self._refuse([info for info in infos if info.scope is not Scope.NODE], reason, message)
        return [info for info in infos if info.scope is Scope.NODE]

    def _refuse(self, infos: Sequence[CheckInfo], reason: str, message: str, status: Status = Status.UNKNOWN) -> None:
        for info in infos:
            self._emit(self._unmeasured(info.name, reason, message, status))

    def _unmeasured(self, name: str, reason: str, message: str, status: Status = Status.UNKNOWN) -> CheckResult:
        finding = Finding(status=status, reason=reason, message=shorten(message), target="node")
        injected = any(fault.check == name for fault in self._request.faults)
        return unmeasured(name, self._plan, finding, injected=injected, error=message)

    def _emit(self, result: CheckResult) -> None:
        self._results[result.check] = result
        if self._request.on_result is not None:
            try:
                self._request.on_result(result)
            except Exception:
                log.exception("a listener failed on the result of %s", result.check)


class _Collector:
    """Gathers the outcomes of one check from all devices."""

    def __init__(self, count: int) -> None:
        self._outcomes: dict[int, Outcome] = {}
        self._count = count

    def take(self, rank: int, outcome: Outcome) -> list[Outcome]:
        """All outcomes in the order of the devices once the last is there; before that, nothing."""
        self._outcomes[rank] = outcome
        return [self._outcomes[i] for i in range(self._count)] if len(self._outcomes) == self._count else []


def busy_by(surveyed: Outcome) -> str | None:
    """Why the devices are not ours to use; None when they are free."""
    if not surveyed.answers:
        return "who holds the devices cannot be seen"
    holders = surveyed.answers[0]["holders"]
    if holders is None:
        return "who holds the devices cannot be seen"
    return f"in use by {', '.join(holders[:4])}{' and others' if len(holders) > 4 else ''}" if holders else None
