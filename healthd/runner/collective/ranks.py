"""
Workers as ranks of one group: in one round, in the checks of one order over several nodes, and over all rounds of one
validation.

Also here:

- runs the ranks of this node in one group over several nodes: the checks of one order, one after the other;
- runs the ranks of this node over the rounds of one validation: claims the devices once, and imports torch once.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, replace
from typing import Any
from urllib.parse import quote

from checks.contract import SEVERITY, CheckInfo, Missing, Scope, Status
from checks.printable import some
from checks.worker.faults import Fault
from checks.worker.protocol import shorten
from healthd.core.errors import HealthdError
from healthd.core.model import RANK_READY, CollectiveOrder, RankReport
from healthd.runner.compilation import compile_over_nodes
from healthd.runner.device_claim import ClaimError, DeviceClaim
from healthd.runner.settings import OnProgress, RunProgress, Survey
from healthd.runner.workers.node_lane import ask_node
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, WorkerLane
from healthd.runner.workers.workers import Workers

# Beyond our own deadline: the operation must not give up before we have looked which rank is where.
BEYOND_DEADLINE_SECONDS = 30.0

REPORT_SECONDS = 0.5
# Part of a message of `checks.collective.ranks`: a port that is taken is no failure of a rank, and another one will do.
_PORT_TAKEN = "is in use on this node"

OnReport = Callable[[tuple[RankReport, ...]], None]

FRESH_SURVEY_SECONDS = 1.0
MAX_RANKS = 1 << 20  # of a group: beyond it the sums of the checks would no longer be exact


def group_of(targets: Sequence[str]) -> dict[str, Any]:
    """
    What ranks inside a node must know before they open their devices: who is who, and the runtime's meeting point.

    The port is free now. Where another process takes it before the first rank does, the group fails, and the next one
    has another port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"size": len(targets), "targets": list(targets), "root_comm": f"127.0.0.1:{port}"}


class Session:
    """Made by `Runner.session`. One `join` at a time; after `close` it cannot be used any more."""

    def __init__(
        self,
        *,
        make_workers: Callable[[OnProgress | None], Workers],
        catalogue: Callable[[], Awaitable[Mapping[str, CheckInfo]]],
        on_survey: Callable[[Outcome], Survey],
        on_device_seconds: Callable[[float], None],
        faults: Sequence[Fault] = (),
    ) -> None:
        self._workers = make_workers(self._note_progress)
        self._claim = DeviceClaim(self._workers, self._survey)
        self._catalogue = catalogue
        self._on_survey = on_survey
        self._on_device_seconds = on_device_seconds
        self._faults = tuple(faults)
        self._claimed = AsyncExitStack()
        self._targets: tuple[str, ...] = ()
        self._lanes: list[WorkerLane] = []
        self._ranks: OrderRanks | None = None
        self._seen_free_at = self._looked_at = -math.inf

    # --- the devices --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Claim the devices. Raises RefusedError when there are none, or they are in use; close the session then."""
        self._workers.expect_devices()
        surveyed = await self._survey()
        if not self._targets:
            raise RefusedError("no devices were found, so no rank can run")
        try:
            await self._claimed.enter_async_context(self._claim.held(surveyed))
        except ClaimError as error:
            raise _refused(error) from None
        self._seen_free_at = self._looked_at
        together = self._kind == "together"
        targets = [",".join(self._targets)] if together else self._targets
        self._lanes = [WorkerLane(self._workers, target) for target in targets]

    async def check_free(self) -> None:
        """See that no other process uses the devices, which are claimed. Raises RefusedError."""
        if time.monotonic() - self._seen_free_at > FRESH_SURVEY_SECONDS:
            try:
                await self._claim.check_free(await self._survey())
            except ClaimError as error:
                raise _refused(error) from None
            self._seen_free_at = self._looked_at

    async def _survey(self) -> Outcome:
        """The devices and their holders. Raises RefusedError when they cannot be found."""
        self._looked_at = time.monotonic()
        outcome = await ask_node(self._workers, "survey", self._workers.settings.survey_timeout_seconds)
        survey = self._on_survey(outcome)
        if outcome.missing is not None or not outcome.answers:
            why = outcome.missing.message if outcome.missing else "no answer"
            raise RefusedError(f"the devices could not be found: {why}")
        self._workers.note_survey(outcome.answers[0])
        self._targets = survey.inventory.rank_targets
        return outcome

    @property
    def _kind(self) -> str:
        """How ranks become a group: see `NodeCollective`."""
        return str(self._workers.inventory.get("ranks", "kept"))

    # --- rounds -------------------------------------------------------------------------------------------------------

    async def join(
        self, order: CollectiveOrder, on_report: OnReport, *, interface: str | None, deadline_seconds: float
    ) -> tuple[RankReport, ...]:
        """
        Run the ranks of an order; the reports of all ranks in all checks that were begun.

        `on_report` receives the progress of all ranks about twice a second, and at once when one is lost. At the
        deadline the ranks that are left are killed, and are `Timeout`; on cancellation they are killed as well, and
        `on_report` has received their last reports. Raises RefusedError for an order that this node cannot follow.
        """
        deadline = time.monotonic() + deadline_seconds  # to load the checks of others takes of it too
        round_ = Round(
            order=order,
            checks=self._checks_of(order, await self._catalogue()),
            interface=interface,
            faults=self._faults,
            deadline=deadline,
        )
        self._workers.compile = compile_over_nodes(order, round_.checks, self._workers)
        if self._kind == "fresh":
            self._workers.group = group_over_nodes(order, self._targets)
        self._ranks = ranks = OrderRanks(round_, self._workers, self._lanes, self._targets, on_report)
        try:
            return await ranks.run()
        finally:
            self._ranks = None
            if self._kind != "kept":
                await self._retire()

    async def warm(self) -> None:
        """Start the ranks of the next round, where a round before has lost its own."""
        if self._kind == "kept":
            await asyncio.gather(*(lane.start() for lane in self._lanes))

    def _checks_of(self, order: CollectiveOrder, catalogue: Mapping[str, CheckInfo]) -> tuple[CheckInfo, ...]:
        """The checks of an order. Raises RefusedError for an order that this node cannot follow."""
        own = len(self._targets)
        if order.ranks != own:
            raise RefusedError(f"it asks for {order.ranks} ranks, and this node has {own} ({some(self._targets)})")
        if not (0 <= order.first_rank <= order.first_rank + order.ranks <= order.size <= MAX_RANKS):
            last = order.first_rank + order.ranks - 1
            raise RefusedError(f"ranks {order.first_rank} to {last} do not exist in a group of {order.size}")
        if self._kind == "together" and order.size > own:
            accelerator = self._workers.inventory.get("accelerator")
            raise RefusedError(
                f"one process drives all devices of {accelerator!r}, so its ranks cannot form a group with other "
                f"nodes: {order.size} ranks were requested, {own} of them on this node"
            )
        if not order.checks:
            raise RefusedError("it names no check")
        if not 0 < order.port < 65536:
            raise RefusedError(f"{order.port} is not a port")
        for name in order.checks:
            if name not in catalogue:
                raise RefusedError(f"no such check: {name!r}")
            if catalogue[name].scope is not Scope.GROUP or not catalogue[name].judged:
                raise RefusedError(f"{name} does not compare ranks; use a collective, such as all_reduce")
        return tuple(catalogue[name] for name in dict.fromkeys(order.checks))

    def _note_progress(self, progress: RunProgress) -> None:
        if self._ranks is not None:
            self._ranks.note_progress(progress)

    async def _retire(self) -> None:
        await asyncio.gather(*(lane.retire() for lane in self._lanes))

    async def close(self) -> None:
        """Let the ranks end, and kill those that do not; returns when the devices are free, or known to be stuck."""
        try:
            await self._retire()
        finally:
            try:
                for lane in self._lanes:
                    lane.count_seconds()
                await self._workers.kill_all()
            finally:
                self._on_device_seconds(self._workers.device_seconds)
                await self._claimed.aclose()


def group_over_nodes(order: CollectiveOrder, targets: Sequence[str]) -> dict[str, Any]:
    """
    The same for `targets` as a part of a group over several nodes, whose order says where its rank 0 is.

    The order's own port is that of torch's store; the runtime's port is next to it.
    """
    port = order.port + 1 if order.port < 65535 else order.port - 1
    return {
        "size": order.size,
        "first_rank": order.first_rank,
        "targets": list(targets),
        "root_comm": f"{url_host(order.main)}:{port}",
    }


class OrderRanks:
    """The ranks of one round; `run` is called once. `note_progress` receives the progress of the workers."""

    def __init__(
        self,
        round_: Round,
        workers: Workers,
        lanes: Sequence[WorkerLane],
        targets: Sequence[str],
        on_report: OnReport,
    ) -> None:
        self._round = round_
        self._order = round_.order
        self._params = workers.settings.params
        self._on_report = on_report
        share = len(targets) // len(lanes)
        self._ranks = [
            OrderRank(
                lane=lane,
                first=self._order.first_rank + index * share,
                targets=tuple(targets[index * share : (index + 1) * share]),
                names=tuple(
                    name
                    for rank in range(index * share, (index + 1) * share)
                    for name in (targets[rank], f"rank:{self._order.whole_rank + rank}")
                ),
            )
            for index, lane in enumerate(lanes)
        ]
        self._group = RankGroup(workers, self._ranks)
        self._check: CheckInfo | None = None
        self._joined = False
        self._ended: list[RankReport] = []
        self._reported: tuple[RankReport, ...] | None = None
        self._reported_at = 0.0

    async def run(self) -> tuple[RankReport, ...]:
        """
        The reports of all ranks in all checks that were begun.

        When it is cancelled, the ranks are gone and the last reports have been sent.
        """
        try:
            for info in self._round.checks:
                self._begin(info)
                outcomes = await self._start(info) or await self._attempt(info)
                self._end(info, outcomes)
                if not self._whole:
                    await self._group.kill(info.name)
                    break
        except asyncio.CancelledError:
            if self._check is not None:
                self._ended.extend(map(_cancelled, self._reports_under_way()))
                await self._group.kill(self._check.name)
                self._check = None
            self._report(at_once=True)
            raise
        return self._reports()

    @property
    def _whole(self) -> bool:
        """Whether all ranks have completed what they began."""
        return all(report.reason is None for report in self._ended)

    # --- reports ------------------------------------------------------------------------------------------------------

    def note_progress(self, progress: RunProgress) -> None:
        """Record a sign of progress of a worker."""
        if self._check is None or progress.event != "step" or progress.check != self._check.name:
            return
        event, _, step = progress.text.partition(" ")
        for rank in self._ranks:
            if rank.lane.target == progress.target:
                rank.events += 1
                rank.last = f"{step} {event}"

    def _begin(self, info: CheckInfo) -> None:
        self._check, self._joined = info, False
        for rank in self._ranks:
            rank.events, rank.last = 0, ""
        self._report(at_once=True)

    def _end(self, info: CheckInfo, outcomes: Sequence[Outcome]) -> None:
        for rank, outcome in zip(self._ranks, outcomes, strict=True):
            self._ended.extend(self._reports_of(rank, info, outcome))
        self._check = None
        self._report(at_once=not self._whole)

    def _report(self, *, at_once: bool) -> None:
        reports = self._reports()
        if reports == self._reported or not (at_once or time.monotonic() - self._reported_at >= REPORT_SECONDS):
            return
        self._reported, self._reported_at = reports, time.monotonic()
        self._on_report(reports)

    def _reports(self) -> tuple[RankReport, ...]:
        """The reports of the checks that have ended, and of the one under way."""
        return (*self._ended, *self._reports_under_way())

    def _reports_under_way(self) -> list[RankReport]:
        if self._check is None:
            return []
        return [report for rank in self._ranks for report in self._blank_reports(rank, self._check)]

    def _blank_reports(self, rank: OrderRank, info: CheckInfo) -> list[RankReport]:
        """Reports of the progress of a worker, one for each of its ranks."""
        return [
            RankReport(
                rank=rank.first + index,
                target=target,
                check=info.name,
                events=rank.events,
                last=rank.last,
                injected=bool(self._faults(info, rank)),
                cold=rank.lane.cold,
            )
            for index, target in enumerate(rank.targets)
        ]

    def _reports_of(self, rank: OrderRank, info: CheckInfo, outcome: Outcome) -> list[RankReport]:
        blanks = self._blank_reports(rank, info)
        reason, message = _why_lost(outcome)
        if reason is not None:
            return [replace(blank, reason=reason, message=message) for blank in blanks]
        found = {item.target: item for item in outcome.evidence}
        reports = []
        for index, blank in enumerate(blanks):
            # One process that is several ranks counts them from 0.
            item = found.get(f"rank:{index if len(blanks) > 1 else blank.rank}")
            if item is None:
                reports.append(replace(blank, reason="NoData", message="it ended without evidence"))
            else:
                reports.append(replace(blank, key=item.key, data=dict(item.data)))
        return reports

    # --- one check ----------------------------------------------------------------------------------------------------

    async def _start(self, info: CheckInfo) -> list[Outcome]:
        """Make all workers ready; when one cannot be, the outcomes of all: a group cannot be whole without it."""
        lost: list[Missing | None]
        try:
            async with asyncio.timeout(max(0.0, self._round.deadline - time.monotonic())):
                lost = await self._group.start(info, self._round.faults)
        except TimeoutError:
            text = "was not ready when the order's time was over"
            return [Outcome(target=rank.lane.target).fail("StartFailed", text) for rank in self._ranks]
        if not any(lost):
            return []
        gone = ", ".join(rank.lane.target for rank, missing in zip(self._ranks, lost, strict=True) if missing)
        return [
            Outcome(target=rank.lane.target).fail(missing.reason, missing.message, action=missing.action)
            if missing
            else Outcome(target=rank.lane.target).fail("Cancelled", f"did not begin because {gone} could not take part")
            for rank, missing in zip(self._ranks, lost, strict=True)
        ]

    async def _attempt(self, info: CheckInfo) -> list[Outcome]:
        for rank in self._ranks:
            rank.last = RANK_READY
        self._report(at_once=True)
        join_seconds = self._order.join_seconds
        deadline = Deadline(join_seconds, f"the group was not complete within {join_seconds:g} s")
        return await self._group.run(info, lambda rank: self._command(rank, info), deadline, self._watch)

    def _watch(self, deadline: Deadline, ended: Mapping[int, Outcome]) -> float:
        """Once all ranks of this node are in the group, the time of the collective counts; see `Watch`."""
        failed = any(outcome.missing is not None for outcome in ended.values())
        # A rank has found the others when it has left the rendezvous or entered an operation.
        joined = all(
            index in ended or rank.last.endswith((" left", " entered")) for index, rank in enumerate(self._ranks)
        )
        if joined and not failed and not self._joined:
            # The ranks of another node may be those that compile, and ours then wait for them.
            within = self._order.timeout_seconds + self._order.compile_seconds
            self._joined = True
            deadline.restart(within, f"did not end within {within:g} s")
        left = self._round.deadline - time.monotonic()
        deadline.shorten(left, "did not end before the order's time was over")
        self._report(at_once=failed)
        return REPORT_SECONDS / 2

    def _faults(self, info: CheckInfo, rank: Rank) -> list[Fault]:
        return [fault for fault in self._round.faults if fault.hits(info.name, rank.names)]

    def _command(self, rank: Rank, info: CheckInfo) -> dict[str, Any]:
        order, together = self._order, len(rank.targets) > 1
        address = f"tcp://{url_host(order.main)}:{order.port}?group={quote(order.group)}"
        return {
            "kind": "run",
            "tier": info.tier.value,
            "params": dict(self._params.get(info.name, {})),
            "group": {
                "rank": 0 if together else rank.first,
                "size": order.size,
                "rendezvous": "in-process" if together else address,
                "interface": self._round.interface,
                "seed": order.seed,
                "timeout_seconds": (
                    order.join_seconds + order.timeout_seconds + order.compile_seconds + BEYOND_DEADLINE_SECONDS
                ),
                "targets": list(rank.targets) if together else [],
                "leave": info is self._round.checks[-1],
            },
            "previous": None,
            "faults": [astuple(fault) for fault in self._faults(info, rank)],
        }


class RankGroup:
    """The ranks of one group on this node, in the order of their numbers."""

    def __init__(self, workers: Workers, ranks: Sequence[Rank]) -> None:
        self._grace_seconds = workers.settings.peer_grace_seconds
        self.ranks = ranks

    async def start(self, info: CheckInfo, faults: Sequence[Fault]) -> list[Missing | None]:
        """Make all workers ready; for each rank None, or why it cannot take part."""

        async def start(rank: Rank) -> Missing | None:
            for fault in faults:
                if fault.kind == "missing" and fault.hits(info.name, rank.names):
                    target = rank.target_of(fault.target)
                    return Missing(target=target, reason="MissingDevice", message=f"no such device: {target}")
            return await rank.lane.start()

        return list(await asyncio.gather(*(start(rank) for rank in self.ranks)))

    async def run(
        self, info: CheckInfo, command: Callable[[Rank], dict[str, Any]], deadline: Deadline, watch: Watch
    ) -> list[Outcome]:
        """The outcomes of one check on all ranks, in their order. Ranks that are late are killed."""
        jobs = [Job(check=info.name, command=command(rank), timeout_seconds=math.inf) for rank in self.ranks]
        tasks = [
            asyncio.create_task(rank.lane.run_now(job), name=f"rank {rank.first} of {info.name}")
            for rank, job in zip(self.ranks, jobs, strict=True)
        ]
        try:
            await self._supervise(tasks, deadline, watch)
            return await self._end_late(tasks, deadline.why)
        finally:
            for task in tasks:
                task.cancel()

    async def _supervise(self, tasks: Sequence[asyncio.Task[Outcome]], deadline: Deadline, watch: Watch) -> None:
        """Wait for all until the deadline, which comes soon once a rank has failed: the others wait for it in vain."""
        failed = False
        while pending := [task for task in tasks if not task.done()]:
            ended = {index: task.result() for index, task in enumerate(tasks) if task.done()}
            look_seconds = watch(deadline, ended)
            left = deadline.at - time.monotonic()
            if left <= 0:
                return
            done, _ = await asyncio.wait(pending, timeout=min(left, look_seconds), return_when=asyncio.FIRST_COMPLETED)
            if not failed and any(task.result().missing is not None for task in done):
                failed = True
                why = f"was still waiting {self._grace_seconds:g} s after another rank of its node had exited"
                deadline.shorten(self._grace_seconds, why)

    async def _end_late(self, tasks: Sequence[asyncio.Task[Outcome]], why: str) -> list[Outcome]:
        """
        Kill the ranks that have not ended; the outcomes of all, late ones with their last known position.

        All that are late are noted before the first is killed, so that the kill of one is not taken for the failure of
        another.
        """
        late = [index for index, task in enumerate(tasks) if not task.done()]
        output: dict[int, str] = {}
        for index in late:
            process = self.ranks[index].lane.process
            if process is not None:
                output[index] = process.last_output()
                process.kill()
        outcomes = [await task for task in tasks]
        for index in late:
            outcome = outcomes[index]
            seen = f"; last seen: {outcome.last_step}" if outcome.progress else "; it never joined"
            error = f"{why}{seen}\n{output.get(index, '')}".strip()
            outcome.fail_with_worker("Timeout", why + seen, error=error)
        return outcomes

    async def kill(self, check: str) -> None:
        """Kill all workers."""
        await asyncio.gather(*(rank.lane.kill(check) for rank in self.ranks))

    async def retire(self) -> None:
        """Let all workers end by themselves."""
        await asyncio.gather(*(rank.lane.retire() for rank in self.ranks))


class Deadline:
    """When the ranks that are still running are killed (monotonic), and the reason that is given for it."""

    def __init__(self, seconds: float, why: str) -> None:
        self.restart(seconds, why)

    def restart(self, seconds: float, why: str) -> None:
        """Replace it by one that counts from now."""
        self.at, self.why = time.monotonic() + seconds, why

    def shorten(self, seconds: float, why: str) -> None:
        """Replace it by one that counts from now, if that one is earlier."""
        if time.monotonic() + seconds < self.at:
            self.restart(seconds, why)


def url_host(address: str) -> str:
    """An IP address as it is written before a port."""
    return f"[{address}]" if ":" in address else address


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one order asks of this node."""

    order: CollectiveOrder
    checks: tuple[CheckInfo, ...]
    interface: str | None
    """Network interface to the other nodes; None leaves it to the library."""
    faults: tuple[Fault, ...]
    """The injected faults in force."""
    deadline: float
    """When the time of the order is up (monotonic)."""


@dataclass(kw_only=True)
class Rank:
    """One worker of a group: one rank, or several where one process drives several devices."""

    lane: WorkerLane
    first: int
    """Its first rank in the group."""
    targets: tuple[str, ...]
    """Its devices, one for each of its ranks."""
    names: tuple[str, ...]
    """The names by which injected faults can refer to it, a device and a rank for each target: `cpu:1`, `rank:1`."""

    def target_of(self, name: str | None) -> str:
        """The device that one of its names stands for; all of its devices for None or a name that is not its own."""
        return self.targets[self.names.index(name) // 2] if name in self.names else self.lane.target


@dataclass(kw_only=True)
class OrderRank(Rank):
    """A worker as a rank of the group, or as several."""

    events: int = 0
    """Signs of progress in the check under way."""
    last: str = ""
    """The last known position in it."""


class RefusedError(HealthdError):
    """The node cannot take part; the message says why in one sentence."""


def _cancelled(report: RankReport) -> RankReport:
    """Whether a rank that was never ready was slow, or had no time, is seen where all ranks of the group are known."""
    message = "called off" if report.last else "was not ready when the group was cancelled"
    return replace(report, reason="Cancelled", message=message)


def _why_lost(outcome: Outcome) -> tuple[str | None, str]:
    """Why there is no evidence, or none that counts; None and no text when there is."""
    missing = outcome.missing
    if missing is not None:
        if _PORT_TAKEN in missing.message:
            return "StartFailed", missing.message.removeprefix("CheckError: ").removeprefix("RuntimeError: ")
        return missing.reason, missing.message
    finding = max(outcome.findings, key=lambda one: SEVERITY[one.status], default=None)
    if finding is not None and (finding.status is not Status.PASS or not outcome.evidence):
        return finding.reason or "NoData", shorten(finding.message)
    return None, ""


def _refused(error: ClaimError) -> RefusedError:
    return RefusedError(f"the devices are taken: {error}" if error.reason == "Busy" else str(error))


Watch = Callable[[Deadline, Mapping[int, Outcome]], float]
"""Called with the outcomes of the workers that have ended, by index: first, after each end, and whenever the seconds
that it returns have passed. It can move the deadline."""
