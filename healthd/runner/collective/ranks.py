"""
The ranks of this node in one group over several nodes: one check after the other, under the deadlines of one order.

What becomes of the whole group is not known here: each rank is reported as far as it came, with what it measured, and
whoever hears of all nodes judges. After the first check that a rank of ours has lost there is no group any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from checks.contract import SEVERITY, Missing, Status
from checks.worker.faults import Fault
from checks.worker.protocol import shorten
from healthd.core.model import RANK_READY, CollectiveOrder, RankReport
from healthd.runner.collective.group import BEYOND_DEADLINE_SECONDS, end_late
from healthd.runner.settings import CheckInfo, RunnerSettings, RunProgress
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import Job, Lane

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
# Words of `checks.collective.store`: a port that somebody else has is nobody's failure, and another one will do.
_PORT_TAKEN = "is in use on this node"

OnReport = Callable[[tuple[RankReport, ...]], None]


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one order asks of this node. `deadline` is monotonic; `faults` are those in force."""

    order: CollectiveOrder
    checks: tuple[CheckInfo, ...]
    interface: str | None
    faults: tuple[Fault, ...]
    deadline: float


@dataclass(kw_only=True)
class Seat:
    """
    The worker of a lane as rank `first` of the group, or as all of the ranks from `first` on when it drives `targets`.

    `names` are those under which faults may mean it; `events` and `last` are of the check under way.
    """

    lane: Lane
    first: int
    targets: tuple[str, ...]
    names: tuple[str, ...]
    events: int = 0
    last: str = ""


class Ranks:
    """Made for one round; `run` is called once. `heard` takes the signs of life of the workers."""

    def __init__(
        self,
        round_: Round,
        lanes: Sequence[Lane],
        targets: Sequence[str],
        settings: RunnerSettings,
        on_report: OnReport,
    ) -> None:
        self._round = round_
        self._order = round_.order
        self._settings = settings
        self._on_report = on_report
        self._lanes = lanes
        share = len(targets) // len(lanes)
        self._seats = [
            Seat(
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
        self._check: CheckInfo | None = None
        self._ended: list[RankReport] = []
        self._told: tuple[RankReport, ...] | None = None
        self._told_at = 0.0

    async def run(self) -> tuple[RankReport, ...]:
        """
        The reports of all ranks and checks that were begun; whether the group is still good, `whole` says.

        When it is cancelled the ranks are gone, and what was known has been reported.
        """
        try:
            for info in self._round.checks:
                self._begin(info)
                outcomes = await self._gather(info) or await self._attempt(info)
                self._end(info, outcomes)
                if not self.whole:
                    await self._bury(info)
                    break
        except asyncio.CancelledError:
            await self._cancelled()
            raise
        return self.reports()

    @property
    def whole(self) -> bool:
        """Whether all ranks have ended well what they began."""
        return all(report.reason is None for report in self._ended)

    def reports(self) -> tuple[RankReport, ...]:
        """Of the checks that have ended, and of the one under way."""
        return (*self._ended, *self._under_way())

    def heard(self, progress: RunProgress) -> None:
        """A sign of life of a worker."""
        if self._check is None or progress.event != "step" or progress.check != self._check.name:
            return
        event, _, step = progress.text.partition(" ")
        for seat in self._seats:
            if seat.lane.target == progress.target:
                seat.events += 1
                seat.last = f"{step} {event}"

    # --- what is told -------------------------------------------------------------------------------------------------

    def _begin(self, info: CheckInfo) -> None:
        self._check = info
        for seat in self._seats:
            seat.events, seat.last = 0, ""
        self._tell(at_once=True)

    def _end(self, info: CheckInfo, outcomes: Sequence[Outcome]) -> None:
        for seat, outcome in zip(self._seats, outcomes, strict=True):
            self._ended.extend(self._reports_of(seat, info, outcome))
        self._check = None
        self._tell(at_once=not self.whole)

    def _tell(self, *, at_once: bool) -> None:
        reports = self.reports()
        if reports == self._told or not (at_once or time.monotonic() - self._told_at >= REPORT_SECONDS):
            return
        self._told, self._told_at = reports, time.monotonic()
        self._on_report(reports)

    def _under_way(self) -> list[RankReport]:
        if self._check is None:
            return []
        return [report for seat in self._seats for report in self._blank(seat, self._check)]

    def _blank(self, seat: Seat, info: CheckInfo) -> list[RankReport]:
        """Of all ranks of a seat, as far as they have been heard of."""
        return [
            RankReport(
                rank=seat.first + index,
                target=target,
                check=info.name,
                events=seat.events,
                last=seat.last,
                injected=bool(self._faults(info, seat.names)),
                cold=seat.lane.cold,
            )
            for index, target in enumerate(seat.targets)
        ]

    def _reports_of(self, seat: Seat, info: CheckInfo, outcome: Outcome) -> list[RankReport]:
        blanks = self._blank(seat, info)
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

    async def _gather(self, info: CheckInfo) -> list[Outcome]:
        """Have all workers ready; when one cannot be, the outcomes of all: a group cannot be whole without it."""
        limit = max(0.0, self._round.deadline - time.monotonic())
        lost: list[Missing | None]
        try:
            async with asyncio.timeout(limit):
                lost = list(await asyncio.gather(*(self._ready(seat, info) for seat in self._seats)))
        except TimeoutError:
            text = "was not ready when the time of the order was up"
            return [Outcome(target=seat.lane.target).lost("StartFailed", text) for seat in self._seats]
        if not any(lost):
            return []
        gone = ", ".join(seat.lane.target for seat, missing in zip(self._seats, lost, strict=True) if missing)
        return [
            Outcome(target=seat.lane.target).lost(missing.reason, missing.message, action=missing.action)
            if missing
            else Outcome(target=seat.lane.target).lost("Cancelled", f"did not begin, since {gone} could not take part")
            for seat, missing in zip(self._seats, lost, strict=True)
        ]

    async def _ready(self, seat: Seat, info: CheckInfo) -> Missing | None:
        if any(fault.kind == "missing" for fault in self._faults(info, seat.names)):
            target = seat.lane.target
            return Missing(target=target, reason="MissingDevice", message=f"no such device: {target}")
        return await seat.lane.ensure()

    async def _attempt(self, info: CheckInfo) -> list[Outcome]:
        for seat in self._seats:
            seat.last = RANK_READY
        self._tell(at_once=True)
        tasks = [
            asyncio.create_task(self._rank(seat, info), name=f"rank {seat.first} of {info.name}")
            for seat in self._seats
        ]
        try:
            return await self._supervise(tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _rank(self, seat: Seat, info: CheckInfo) -> Outcome:
        job = Job(check=info.name, command=self._command(seat, info), timeout_seconds=0.0, finish=lambda _: None)
        if seat.lane.child is not None:
            seat.lane.child.send(seat.lane.line(job, seat.lane.child))
        return await seat.lane.collect(job, None)

    async def _supervise(self, tasks: Sequence[asyncio.Task[Outcome]]) -> list[Outcome]:
        """
        Wait for all of ours: first until they are in the group, then until they have ended.

        When the time is up, or one has ended badly and the others have had their grace, those that are left are killed.
        """
        order, pending = self._order, set(tasks)
        deadline = time.monotonic() + order.join_seconds
        why = f"the group was not whole within {order.join_seconds:g} s"
        inside = ended_badly = False
        while pending:
            if self._round.deadline < deadline:
                deadline, why = self._round.deadline, "did not end before the time of the order was up"
            left = deadline - time.monotonic()
            if left <= 0:
                break
            done, pending = await asyncio.wait(
                pending, timeout=min(left, REPORT_SECONDS / 2), return_when=asyncio.FIRST_COMPLETED
            )
            bad = any(task.result().missing is not None for task in done)
            if not inside and not ended_badly and self._all_inside(tasks):
                # Another node's ranks may be those that compile, and ours then wait for them.
                within = order.timeout_seconds + order.compile_seconds
                inside, deadline = True, time.monotonic() + within
                why = f"did not end within {within:g} s"
            if bad and not ended_badly:
                ended_badly, grace_seconds = True, self._settings.peer_grace_seconds
                if time.monotonic() + grace_seconds < deadline:
                    deadline = time.monotonic() + grace_seconds
                    why = f"was still waiting {grace_seconds:g} s after another rank of its node had ended"
            self._tell(at_once=bad)
        return await end_late(self._lanes, tasks, why)

    def _all_inside(self, tasks: Sequence[asyncio.Task[Outcome]]) -> bool:
        """Whether all of ours have found the others: they say that they left the rendezvous, or entered something."""
        return all(
            task.done() or seat.last.endswith((" left", " entered"))
            for seat, task in zip(self._seats, tasks, strict=True)
        )

    def _faults(self, info: CheckInfo, names: Sequence[str]) -> list[Fault]:
        return [fault for fault in self._round.faults if fault.hits(info.name, names)]

    def _command(self, seat: Seat, info: CheckInfo) -> dict[str, Any]:
        order, together = self._order, len(seat.targets) > 1
        host = f"[{order.main}]" if ":" in order.main else order.main
        return {
            "kind": "run",
            "tier": info.tier.value,
            "params": dict(self._settings.params.get(info.name, {})),
            "group": {
                "rank": 0 if together else seat.first,
                "size": order.size,
                "rendezvous": "in-process" if together else f"tcp://{host}:{order.port}?group={quote(order.group)}",
                "interface": self._round.interface,
                "seed": order.seed,
                "timeout_seconds": (
                    order.join_seconds + order.timeout_seconds + order.compile_seconds + BEYOND_DEADLINE_SECONDS
                ),
                "targets": list(seat.targets) if together else [],
                "leave": info is self._round.checks[-1],
            },
            "previous": None,
            "faults": [[f.check, f.target, f.kind, f.value] for f in self._faults(info, seat.names)],
        }

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _bury(self, info: CheckInfo) -> None:
        await asyncio.gather(*(lane.bury(info.name) for lane in self._lanes))

    async def _cancelled(self) -> None:
        """Kill all ranks, and tell how far they were."""
        if self._check is not None:
            self._ended.extend(map(_called_off, self._under_way()))
            await self._bury(self._check)
            self._check = None
        self._tell(at_once=True)


def _called_off(report: RankReport) -> RankReport:
    """Whether a rank that was never up was slow, or had no time, is seen where all ranks of the group are heard."""
    message = "called off" if report.last else "was not ready when the group was called off"
    return replace(report, reason="Cancelled", message=message)


def _why_lost(outcome: Outcome) -> tuple[str | None, str]:
    """Why there is no evidence, or none to be believed: None and no words when there is."""
    missing = outcome.missing
    if missing is not None:
        if _PORT_TAKEN in missing.message:
            return "StartFailed", missing.message.removeprefix("CheckError: ").removeprefix("RuntimeError: ")
        return missing.reason, missing.message
    finding = max(outcome.findings, key=lambda one: SEVERITY[one.status], default=None)
    if finding is not None and (finding.status is not Status.PASS or not outcome.evidence):
        return finding.reason or "NoData", shorten(finding.message)
    return None, ""
