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

from checks.collective.nccom_guard import environment_of
from checks.collective.nccom_launch import MPI_PREFIX, daemon_environment
from checks.collective.nccom_vector import Refused
from checks.contract import Finding, Limit
from checks.host import Host
from healthd.launching import as_launch, judge, own_node, plan_of
from healthd.model import CollectiveOrder, Launch, LaunchOrder, NccomGroup, OrderReport
from healthd.node.flight import Report
from healthd.node.nccom_main import Main
from healthd.node.tree import Tree, drop_folder, make_folder, start_tree
from healthd.runner import RefusedError

log = logging.getLogger(__name__)

# mpirun ends its daemons itself, a moment before the main node asks for the next.
_LEAVE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a round has to say up to now: see `OrderReport`."""

    message: str = ""
    launches: tuple[Launch, ...] = ()
    findings: Mapping[str, tuple[Finding, ...]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """`node` is this one's name in the fleet; `carried` False: nothing is ever started here for another node."""

    node: str
    host: Host
    limits: Mapping[str, Limit]
    carried: bool = True


OnTold = Callable[[Told], None]


class NccomRound:
    """Made for one order. `run` is called once; `launch` and `cancel` come on the event loop meanwhile."""

    def __init__(self, order: CollectiveOrder, settings: RoundSettings, on_told: OnTold, *, seconds: float) -> None:
        """`seconds` are left of the order's time."""
        self._order = order
        self._settings = settings
        self._on_told = on_told
        self._deadline = time.monotonic() + seconds
        self._asked: asyncio.Queue[tuple[str, LaunchOrder, Report]] = asyncio.Queue()
        self._taken: list[Launch] = []
        self._now: tuple[str, Tree, Report] | None = None
        self._open = True

    async def run(self) -> Told:
        """To the end of the group, as far as this node can tell. Raises RefusedError; cancelled, it leaves nothing."""
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
            main = Main(order, nccom, self._settings.host, self._settings.limits, self._heard, deadline=self._deadline)
            return Told(findings=await main.run())
        if nccom.mode == "carried" and not self._settings.carried:
            raise RefusedError("nothing is started here for other nodes: nccom_carried of [node] is false")
        return await self._let_in(nccom)

    def launch(self, order_id: str, order: LaunchOrder, report: Report) -> None:
        """Start mpirun's daemon as soon as what was started before it is gone."""
        if not self._open:
            report(OrderReport(status="refused", message=f"group {self._order.group} has ended here"))
            return
        report(OrderReport(status="accepted"))
        self._asked.put_nowait((order_id, order, report))

    async def cancel(self, order_id: str, why: str) -> None:
        """End what an order started."""
        if self._now is not None and self._now[0] == order_id:
            _, tree, report = self._now
            await tree.end()
            report(OrderReport(status="cancelled", message=why))

    def _heard(self, launches: tuple[Launch, ...], findings: Mapping[str, tuple[Finding, ...]], now: str) -> None:
        self._on_told(Told(message=now, launches=launches, findings=findings))

    # --- the other nodes ----------------------------------------------------------------------------------------------

    async def _let_in(self, nccom: NccomGroup) -> Told:
        """Be there until the time is up, or until each check has had its daemon here and that has ended."""
        folder = make_folder()
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._deadline - time.monotonic()):
                for _ in self._order.checks:
                    order_id, asked, report = await self._asked.get()
                    await self._start(nccom, order_id, asked, report, folder)
                if self._now is not None:
                    await self._now[1].wait()
            return Told(message=f"{len(self._taken)} daemons of mpirun ran here")
        except TimeoutError:
            return Told(message="was still waiting for the main node when the time of the order was up")
        finally:
            self._open = False
            await self._end_now(0.0, "the round is over")
            while not self._asked.empty():
                self._asked.get_nowait()[2](OrderReport(status="cancelled", message="the round is over"))
            drop_folder(folder)

    async def _start(self, nccom: NccomGroup, order_id: str, asked: LaunchOrder, report: Report, folder: Path) -> None:
        launch = as_launch(asked, self._settings.node)
        found = judge(self._order, launch, self._taken)
        if isinstance(found, Refused):
            log.warning("group %s: a launch was refused: %s", self._order.group, found.reason)
            report(OrderReport(status="refused", message=f"will not start that: {found.reason}"))
            return
        await self._end_now(_LEAVE_SECONDS, "")
        own = environment_of(os.environ, {"HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C"})
        plan = plan_of(self._order, nccom, asked.check, job_id=found.job_id)
        environment = _changed(daemon_environment(plan, os.uname().release, own))
        program = shutil.which(found.argv[0], path=environment["PATH"])
        if program is None:
            text = f"no {found.argv[0]} in PATH or {MPI_PREFIX}/bin; install Open MPI, the one of the main node"
            report(OrderReport(status="refused", message=text))
            return
        self._taken.append(launch)
        try:
            tree = await start_tree([program, *found.argv[1:]], environment, folder, f"daemon-{len(self._taken)}")
        except OSError as error:
            report(OrderReport(status="refused", message=f"{program} cannot be started: {error.strerror or error}"))
            return
        self._now = order_id, tree, report
        report(OrderReport(status="running"))

    async def _end_now(self, seconds: float, why: str) -> None:
        """What was started last ends by itself in so long, or is ended."""
        if self._now is None:
            return
        _, tree, report = self._now
        try:
            code = await tree.wait(seconds) if seconds else None
        finally:
            await tree.end()
            self._now = None
        ended = OrderReport(status="done" if code is not None else "cancelled", message=why)
        report(ended if code is None else OrderReport(status="done", message=f"ended with {code}"))


def _changed(environment: Mapping[str, str]) -> dict[str, str]:
    """Of an environment only what is not ours as it is: that comes by inheritance."""
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}
