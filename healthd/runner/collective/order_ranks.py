"""
Runs the ranks of this node in one group over several nodes: the checks of one order, one after the other.

What becomes of the whole group is not known here: each rank is reported as far as it came, with what it measured, and
the aggregator, which hears of all nodes, judges. After the first check that a rank of this node has lost there is no
group any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any
from urllib.parse import quote

from checks.contract import SEVERITY, CheckInfo, Missing, Status
from checks.worker.faults import Fault
from checks.worker.protocol import shorten
from healthd.core.model import RANK_READY, CollectiveOrder, RankReport
from healthd.runner.collective.rank_group import BEYOND_DEADLINE_SECONDS, Deadline, Rank, RankGroup, url_host
from healthd.runner.settings import RunProgress
from healthd.runner.workers.outcome import Outcome
from healthd.runner.workers.worker_lane import WorkerLane
from healthd.runner.workers.workers import Workers

REPORT_SECONDS = 0.5
# Part of a message of `checks.collective.store`: a port that is taken is no failure of a rank, and another one will do.
_PORT_TAKEN = "is in use on this node"

OnReport = Callable[[tuple[RankReport, ...]], None]


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
class OrderRank(Rank):
    """A worker as a rank of the group, or as several."""

    events: int = 0
    """Signs of progress in the check under way."""
    last: str = ""
    """The last known position in it."""


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
            text = "was not ready when the time of the order was up"
            return [Outcome(target=rank.lane.target).fail("StartFailed", text) for rank in self._ranks]
        if not any(lost):
            return []
        gone = ", ".join(rank.lane.target for rank, missing in zip(self._ranks, lost, strict=True) if missing)
        return [
            Outcome(target=rank.lane.target).fail(missing.reason, missing.message, action=missing.action)
            if missing
            else Outcome(target=rank.lane.target).fail("Cancelled", f"did not begin, since {gone} could not take part")
            for rank, missing in zip(self._ranks, lost, strict=True)
        ]

    async def _attempt(self, info: CheckInfo) -> list[Outcome]:
        for rank in self._ranks:
            rank.last = RANK_READY
        self._report(at_once=True)
        join_seconds = self._order.join_seconds
        deadline = Deadline(join_seconds, f"the group was not whole within {join_seconds:g} s")
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
        deadline.shorten(left, "did not end before the time of the order was up")
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


def _cancelled(report: RankReport) -> RankReport:
    """Whether a rank that was never ready was slow, or had no time, is seen where all ranks of the group are known."""
    message = "called off" if report.last else "was not ready when the group was called off"
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
