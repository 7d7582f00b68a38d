"""What the tests of node collectives, and those beside them, are made with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks.worker.faults import Fault
from healthd.core.model import CollectiveOrder, Order, OrderReport, RankReport
from healthd.node.orders import collectives
from healthd.node.orders.collectives import Collectives
from healthd.node.orders.orders import Orders
from healthd.node.settings import ActiveSettings, Unprompted
from healthd.runner.collective.ranks import OnReport, RefusedError
from tests.node.node_kit import World
from tests.runner.ranks_kit import orders

ON_ORDER = ActiveSettings(unprompted=Unprompted.OFF)


def collective(name: str = "C1", *, validation: str = "v1", deadline: float = 60.0, **changes: Any) -> Order:
    (wanted,) = orders(1, **{"size": 2, "validation": validation, **changes})
    return Order(id=name, kind="collective", deadline_seconds=deadline, collective=wanted)


def report(order: CollectiveOrder, **changes: Any) -> RankReport:
    values: dict[str, Any] = {"rank": order.first_rank, "target": "cpu:0", "check": order.checks[0], "events": 1}
    return RankReport(**{**values, **changes})


class ScriptedSession:
    """The edge to the runner: rounds take as long as `gate` is closed."""

    def __init__(self, script: Script, faults: Sequence[Fault]) -> None:
        self.script = script
        self.faults = tuple(str(fault) for fault in faults)
        self.events: list[str] = []

    async def open(self) -> None:
        self.events.append("open")
        if self.script.refusal:
            raise RefusedError(self.script.refusal)

    async def join(
        self, order: CollectiveOrder, on_report: OnReport, *, interface: str | None, deadline_seconds: float
    ) -> tuple[RankReport, ...]:
        self.events.append(f"join {order.group} by {interface} in {deadline_seconds:g}")
        on_report((report(order),))
        try:
            await self.script.gate.wait()
        except asyncio.CancelledError:
            try:
                await self.script.kill_gate.wait()
            except asyncio.CancelledError:
                self.events.append("disturbed")
                raise
            self.events.append("killed")
            on_report((report(order, reason="Cancelled"),))
            raise
        if self.script.error is not None:
            raise self.script.error
        return (report(order, events=7, key="k", data={"rank": 0}),)

    async def check_free(self) -> None:
        self.events.append("look")

    async def warm(self) -> None:
        """Nothing."""

    async def close(self) -> None:
        self.events.append("close")
        try:
            await self.script.close_gate.wait()
        except asyncio.CancelledError:
            self.events.append("disturbed")
            raise


class Script:
    """What the sessions of a test do, and which there were."""

    def __init__(self) -> None:
        self.sessions: list[ScriptedSession] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.kill_gate = asyncio.Event()
        self.kill_gate.set()
        self.close_gate = asyncio.Event()
        self.close_gate.set()
        self.refusal = ""
        self.error: Exception | None = None

    def open(self, faults: Sequence[Fault]) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self, faults))
        return self.sessions[-1]

    @property
    def events(self) -> list[str]:
        return [event.split()[0] for session in self.sessions for event in session.events]


class Site(World):
    """A node that takes orders to be ranks."""

    def __init__(
        self,
        folder: Path,
        *,
        active: ActiveSettings = ON_ORDER,
        idle_seconds: float = collectives.IDLE_SECONDS,
        interface: str | None = "lo",
    ) -> None:
        super().__init__(folder, active=active)
        self.interface = interface
        self.idle_seconds = idle_seconds
        self.script = Script()
        self.use(self.script.open)

    def use(self, open_session: collectives.OpenSession) -> None:
        ranks = Collectives(
            self.book,
            self.scheduler,
            open_session,
            interface=self.interface,
            clock=self.time.clock,
            tasks=self.tasks,
            idle_seconds=self.idle_seconds,
        )
        self.orders = Orders(
            self.book,
            self.scheduler,
            self.ledger,
            self.settings,
            clock=self.time.clock,
            tasks=self.tasks,
            collectives=ranks,
        )

    def report(self, order_id: str) -> OrderReport:
        return self.orders.reports()[order_id]
