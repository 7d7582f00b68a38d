"""
Runs this node's part of one group of nccom-test: the first of its nodes runs nccom-test, the others start its daemons.

The main node runs one nccom-test for each check and judges its output. In mode `carried` its mpirun calls
`healthd-rsh` for each other node. The launch that it asks for is judged and reported, and reaches the other node as an
order. There it is judged again, by the node's own order of the group, and only then started. However a round ends, no
process is left.

Unverified on hardware: that the real nccom-test passes its environment on to mpirun and srun. Proved with Open MPI
4.1.4 and a stand-in for nccom-test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checks.collective.nccom.environment import DROPPED_PREFIXES, environment_of
from checks.collective.nccom.launch import MPI_PREFIX, Plan, daemon_environment
from checks.collective.nccom.vector import Accepted, Refused
from checks.contract import Finding, Limit
from checks.host.machine import Host
from healthd.core.model import CollectiveOrder, Launch, LaunchOrder, OrderReport, OrderStatus
from healthd.core.model.launch_permission import as_launch, judge, own_node, plan_of
from healthd.node.checks.active_run import Report
from healthd.node.nccom.main_node import MainNode
from healthd.node.nccom.process_tree import Tree, drop_folder, make_folder, start_tree
from healthd.runner.collective.session import RefusedError

log = logging.getLogger(__name__)

# mpirun ends its daemons itself, a moment before the main node asks for the next.
_LEAVE_SECONDS = 2.0
_NOT_CARRIED = "nothing is started here for other nodes: nccom_carried of [node] is false"


@dataclass(frozen=True, kw_only=True)
class RoundProgress:
    """The progress of a round: see `OrderReport`."""

    message: str = ""
    launches: tuple[Launch, ...] = ()
    findings: Mapping[str, tuple[Finding, ...]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """What rounds on this node need."""

    node: str
    """The name of this node in the fleet."""
    host: Host
    limits: Mapping[str, Limit]
    carried: bool = True
    """False: nothing is ever started here for another node."""
    lnc: Callable[[], int | None] = lambda: None
    """The logical core configuration of the node's cores by the last survey; None where it is not known."""


OnProgress = Callable[[RoundProgress], None]


class NccomRound:
    """The round of one order. `run` is called once; `launch` and `cancel` are called on the event loop meanwhile."""

    def __init__(
        self, order: CollectiveOrder, settings: RoundSettings, on_progress: OnProgress, *, seconds: float
    ) -> None:
        """`seconds` is the time that is left to the order."""
        self._order = order
        self._settings = settings
        self._on_progress = on_progress
        self._deadline = time.monotonic() + seconds
        self._queued: asyncio.Queue[tuple[str, Plan, Accepted, Report]] = asyncio.Queue()
        self._accepted: list[Launch] = []
        self._cancelled: dict[str, str] = {}
        self._running: tuple[str, Tree, Report] | None = None
        self._open = True

    async def run(self) -> RoundProgress:
        """Run to the end of the group, as far as this node sees it. Raises RefusedError; no process is left."""
        try:
            return await self._run()
        finally:
            self._open = False
            while not self._queued.empty():
                self._queued.get_nowait()[3](OrderReport(status=OrderStatus.CANCELLED, message="the round is over"))

    async def _run(self) -> RoundProgress:
        order, nccom = self._order, self._order.nccom
        if nccom is None:
            raise RefusedError("it is no order for nccom-test")
        node = own_node(order, nccom)
        if node is None or node != self._settings.node:
            raise RefusedError(
                f"group {order.group}: the order is for {node or 'nobody'}, and this is {self._settings.node}"
            )
        if not order.checks:
            raise RefusedError("it names no check")
        if node == nccom.nodes[0]:
            main = MainNode(
                order,
                nccom,
                self._settings.host,
                self._settings.limits,
                self._on_news,
                deadline=self._deadline,
                lnc=self._settings.lnc(),
            )
            return RoundProgress(findings=await main.run())
        if nccom.mode == "carried" and not self._settings.carried:
            raise RefusedError(_NOT_CARRIED)
        return await self._serve_launches()

    def launch(self, order_id: str, order: LaunchOrder, report: Report) -> None:
        """Start mpirun's daemon, if the plan has it, as soon as the one before it has ended."""
        nccom = self._order.nccom
        if not self._open or nccom is None:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"group {self._order.group} has ended here"))
            return
        if not self._settings.carried:
            report(OrderReport(status=OrderStatus.REFUSED, message=_NOT_CARRIED))
            return
        launch = as_launch(order, self._settings.node)
        found = judge(self._order, launch, self._accepted)
        if isinstance(found, Refused):
            log.warning("group %s: a launch was refused: %s", self._order.group, found.reason)
            report(OrderReport(status=OrderStatus.REFUSED, message=f"will not start that: {found.reason}"))
            return
        self._accepted.append(launch)
        report(OrderReport(status=OrderStatus.ACCEPTED))
        plan = plan_of(self._order, nccom, launch.check, job_id=found.job_id)
        self._queued.put_nowait((order_id, plan, found, report))

    async def cancel(self, order_id: str, why: str) -> None:
        """End what an order started, or keep it from starting anything."""
        self._cancelled[order_id] = why
        if self._running is not None and self._running[0] == order_id:
            _, tree, report = self._running
            await tree.end()
            report(OrderReport(status=OrderStatus.CANCELLED, message=why))

    def _on_news(self, launches: tuple[Launch, ...], findings: Mapping[str, tuple[Finding, ...]], now: str) -> None:
        self._on_progress(RoundProgress(message=now, launches=launches, findings=findings))

    # --- the other nodes ----------------------------------------------------------------------------------------------

    async def _serve_launches(self) -> RoundProgress:
        """Start daemons until each check has had one here and that has ended, or until the time is up."""
        folder = make_folder()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                for _ in self._order.checks:
                    order_id, plan, found, report = await self._queued.get()
                    try:
                        await self._start(order_id, plan, found, report, folder)
                    except BaseException:
                        report(OrderReport(status=OrderStatus.CANCELLED, message="the round is over"))
                        raise
                if self._running is not None:
                    await self._running[1].wait()
            return RoundProgress(message=f"{len(self._accepted)} daemons of mpirun ran here")
        except TimeoutError:
            return RoundProgress(message="was still waiting for the main node when the time of the order was up")
        finally:
            self._open = False
            await self._end_running(0.0, "the round is over")
            drop_folder(folder)

    async def _start(self, order_id: str, plan: Plan, found: Accepted, report: Report, folder: Path) -> None:
        if order_id in self._cancelled:
            report(OrderReport(status=OrderStatus.CANCELLED, message=self._cancelled[order_id]))
            return
        await self._end_running(_LEAVE_SECONDS, "the next one of mpirun came")
        own = environment_of(os.environ, {"HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C"})
        environment = _changed(daemon_environment(plan, os.uname().release, own, self._settings.lnc()))
        program = shutil.which(found.argv[0], path=environment["PATH"])
        if program is None:
            text = f"no {found.argv[0]} in PATH or {MPI_PREFIX}/bin; install Open MPI, the one of the main node"
            report(OrderReport(status=OrderStatus.REFUSED, message=text))
            return
        try:
            tree = await start_tree([program, *found.argv[1:]], environment, folder, f"daemon-{plan.round}")
        except OSError as error:
            report(
                OrderReport(
                    status=OrderStatus.REFUSED, message=f"{program} cannot be started: {error.strerror or error}"
                )
            )
            return
        self._running = order_id, tree, report
        report(OrderReport(status=OrderStatus.RUNNING))

    async def _end_running(self, seconds: float, why: str) -> None:
        """Wait so long for the end of what was started last, then kill it."""
        if self._running is None:
            return
        order_id, tree, report = self._running
        try:
            code = await tree.wait(seconds)
        finally:
            await tree.end()
            self._running = None
        if code is None or order_id in self._cancelled:
            report(OrderReport(status=OrderStatus.CANCELLED, message=self._cancelled.get(order_id, why)))
        else:
            report(OrderReport(status=OrderStatus.DONE, message=f"ended with {code}"))


def _changed(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is not inherited anyway: variables that differ from ours, or are dropped."""
    return {
        name: value
        for name, value in environment.items()
        if os.environ.get(name) != value or name.startswith(DROPPED_PREFIXES)
    }
