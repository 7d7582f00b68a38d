"""
What this node does in one group that nccom-test runs over: the first of its nodes runs it, the others let it in.

The main node runs one nccom-test for each check and judges what it says. In mode `carried` its mpirun calls
`healthd-rsh` for each other node; what that hands over is judged and reported, and comes to the other node as an order.
There it is judged again, by the node's own order of the group, and only then started. However a round ends, no process
is left.

Unverified on hardware: that the real nccom-test hands its environment on to mpirun and srun. Proved with Open MPI
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
from healthd.node.nccom.main_node import Main
from healthd.node.nccom.process_tree import Tree, drop_folder, make_folder, start_tree
from healthd.runner import RefusedError

log = logging.getLogger(__name__)

# mpirun ends its daemons itself, a moment before the main node asks for the next.
_LEAVE_SECONDS = 2.0
_NOT_CARRIED = "nothing is started here for other nodes: nccom_carried of [node] is false"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a round has to say up to now: see `OrderReport`."""

    message: str = ""
    launches: tuple[Launch, ...] = ()
    findings: Mapping[str, tuple[Finding, ...]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """
    `node` is this one's name in the fleet; `carried` False: nothing is ever started here for another node. `lnc` tells
    the logical core configuration of the node's cores as it was seen last, None where that is not known.
    """

    node: str
    host: Host
    limits: Mapping[str, Limit]
    carried: bool = True
    lnc: Callable[[], int | None] = lambda: None


OnTold = Callable[[Told], None]


class NccomRound:
    """Made for one order. `run` is called once; `launch` and `cancel` come on the event loop meanwhile."""

    def __init__(self, order: CollectiveOrder, settings: RoundSettings, on_told: OnTold, *, seconds: float) -> None:
        """`seconds` are left of the order's time."""
        self._order = order
        self._settings = settings
        self._on_told = on_told
        self._deadline = time.monotonic() + seconds
        self._asked: asyncio.Queue[tuple[str, Plan, Accepted, Report]] = asyncio.Queue()
        self._taken: list[Launch] = []
        self._called_off: dict[str, str] = {}
        self._now: tuple[str, Tree, Report] | None = None
        self._open = True

    async def run(self) -> Told:
        """To the end of the group, as far as this node can tell. Raises RefusedError; cancelled, it leaves nothing."""
        try:
            return await self._run()
        finally:
            self._open = False
            while not self._asked.empty():
                self._asked.get_nowait()[3](OrderReport(status=OrderStatus.CANCELLED, message="the round is over"))

    async def _run(self) -> Told:
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
            main = Main(
                order,
                nccom,
                self._settings.host,
                self._settings.limits,
                self._heard,
                deadline=self._deadline,
                lnc=self._settings.lnc(),
            )
            return Told(findings=await main.run())
        if nccom.mode == "carried" and not self._settings.carried:
            raise RefusedError(_NOT_CARRIED)
        return await self._let_in()

    def launch(self, order_id: str, order: LaunchOrder, report: Report) -> None:
        """Start mpirun's daemon, if that is what is planned, as soon as what was started before it is gone."""
        nccom = self._order.nccom
        if not self._open or nccom is None:
            report(OrderReport(status=OrderStatus.REFUSED, message=f"group {self._order.group} has ended here"))
            return
        if not self._settings.carried:
            report(OrderReport(status=OrderStatus.REFUSED, message=_NOT_CARRIED))
            return
        launch = as_launch(order, self._settings.node)
        found = judge(self._order, launch, self._taken)
        if isinstance(found, Refused):
            log.warning("group %s: a launch was refused: %s", self._order.group, found.reason)
            report(OrderReport(status=OrderStatus.REFUSED, message=f"will not start that: {found.reason}"))
            return
        self._taken.append(launch)
        report(OrderReport(status=OrderStatus.ACCEPTED))
        plan = plan_of(self._order, nccom, launch.check, job_id=found.job_id)
        self._asked.put_nowait((order_id, plan, found, report))

    async def cancel(self, order_id: str, why: str) -> None:
        """End what an order started, or see that it starts nothing."""
        self._called_off[order_id] = why
        if self._now is not None and self._now[0] == order_id:
            _, tree, report = self._now
            await tree.end()
            report(OrderReport(status=OrderStatus.CANCELLED, message=why))

    def _heard(self, launches: tuple[Launch, ...], findings: Mapping[str, tuple[Finding, ...]], now: str) -> None:
        self._on_told(Told(message=now, launches=launches, findings=findings))

    # --- the other nodes ----------------------------------------------------------------------------------------------

    async def _let_in(self) -> Told:
        """Be there until the time is up, or until each check has had its daemon here and that has ended."""
        folder = make_folder()
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                for _ in self._order.checks:
                    await self._start(*await self._asked.get(), folder)
                if self._now is not None:
                    await self._now[1].wait()
            return Told(message=f"{len(self._taken)} daemons of mpirun ran here")
        except TimeoutError:
            return Told(message="was still waiting for the main node when the time of the order was up")
        finally:
            self._open = False
            await self._end_now(0.0, "the round is over")
            drop_folder(folder)

    async def _start(self, order_id: str, plan: Plan, found: Accepted, report: Report, folder: Path) -> None:
        if order_id in self._called_off:
            report(OrderReport(status=OrderStatus.CANCELLED, message=self._called_off[order_id]))
            return
        await self._end_now(_LEAVE_SECONDS, "the next one of mpirun came")
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
        self._now = order_id, tree, report
        report(OrderReport(status=OrderStatus.RUNNING))

    async def _end_now(self, seconds: float, why: str) -> None:
        """What was started last ends by itself in so long, or is ended."""
        if self._now is None:
            return
        order_id, tree, report = self._now
        try:
            code = await tree.wait(seconds)
        finally:
            await tree.end()
            self._now = None
        if code is None or order_id in self._called_off:
            report(OrderReport(status=OrderStatus.CANCELLED, message=self._called_off.get(order_id, why)))
        else:
            report(OrderReport(status=OrderStatus.DONE, message=f"ended with {code}"))


def _changed(environment: Mapping[str, str]) -> dict[str, str]:
    """Of an environment only what does not come by inheritance: what is ours as it is and is not dropped on the way."""
    return {
        name: value
        for name, value in environment.items()
        if os.environ.get(name) != value or name.startswith(DROPPED_PREFIXES)
    }
