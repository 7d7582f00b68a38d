"""What the tests of api, and those beside them, are made with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.process import aggregator
from healthd.aggregator.screening.settings import ScreeningSettings
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.model import Allocation, Lease, NodeState, Order, OrderReport, SyncAnswer, SyncRequest
from healthd.core.wire import decode, encode
from tests.aggregator.described import check_later
from tests.aggregator.parts import KEY, state
from tests.patience import PATIENCE

POLICY = Policy(
    collective=False, tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0, node_grace_seconds=0.2, wait_seconds=5.0
)


class Daemon:
    """A node that speaks sync over HTTP: stores leases, and answers ordered runs with fresh results."""

    def __init__(self, client: httpx.AsyncClient, name: str, **changes: Any) -> None:
        self.client, self.name, self.changes = client, name, changes
        self.reports: dict[str, OrderReport] = {}
        self.leases: dict[str, Lease] = {}
        self.answer: SyncAnswer | None = None
        self.seq = 0
        self.received = 0.0
        self.on_run: Callable[[], None] = lambda: None
        self.orders: list[Order] = []
        """All that it was ever asked to run."""
        self.ended: set[str] = set()

    def state(self) -> NodeState:
        held = tuple(Allocation(by="lease", holder=lease.job) for lease in self.leases.values())
        return state(self.name, leases=tuple(self.leases.values()), allocated=held, **self.changes)

    async def sync(self, wait: float = 0.0) -> SyncAnswer:
        self.seq += 1
        request = SyncRequest(
            protocol=1,
            incarnation="i1",
            seq=self.seq,
            last_answer=self.answer.answer if self.answer else None,
            since_answer_seconds=time.monotonic() - self.received if self.answer else None,
            state=self.state(),
            digest=f"d{self.seq}",
            ages={},
            orders=self.reports,
            issuer=self.answer.issuer if self.answer else None,
        )
        response = await self.client.post(
            f"/v1/nodes/{self.name}/sync?wait={wait:g}", content=encode(request), headers={"x-healthd-node-key": KEY}
        )
        assert response.status_code == 200, response.text
        self.answer, self.received = decode(response.content, SyncAnswer, what="answer"), time.monotonic()
        self.reports = {i: r for i, r in self.reports.items() if i not in self.answer.acknowledged}
        if self.answer.orders is not None:
            self.take({order.id: order for order in self.answer.orders})
        return self.answer

    def end_leases(self) -> None:
        """Their workloads have ended: it says so for as long as it is asked."""
        self.ended |= self.leases.keys()
        for lease_id in self.leases:
            self.reports[lease_id] = OrderReport(status="done", message="its workload has ended")
        self.leases.clear()

    def take(self, orders: dict[str, Any]) -> None:
        for order_id, order in orders.items():
            if order.withdrawn:
                self.leases.pop(order_id, None)
                self.reports[order_id] = OrderReport(status="cancelled")
            elif order_id in self.ended:
                self.reports[order_id] = OrderReport(status="done", message="its workload has ended")
            elif order.kind == "lease":
                self.leases[order_id] = order.lease
                self.reports[order_id] = OrderReport(status="accepted")
            else:
                self.orders.append(order)
                self.changes["age"] = 0.0
                self.on_run()
                self.reports[order_id] = OrderReport(status="done")
        for lease_id in set(self.leases) - set(orders):
            del self.leases[lease_id]
            self.reports[lease_id] = OrderReport(status="cancelled")

    async def live(self) -> None:
        while True:
            await self.sync(wait=0.3)


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, policy: Policy = POLICY, screening: ScreeningSettings | None = None, **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    settings = AggregatorSettings(**({"listen": "127.0.0.1:0", "state_dir": tmp_path} | changes))
    async with (
        aggregator(settings, policy, screening=screening) as (address, _),
        httpx.AsyncClient(
            base_url=f"http://{address}", timeout=60.0, verify=False, event_hooks={"response": [check_later]}
        ) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def living(client: httpx.AsyncClient, *names: str, **changes: Any) -> AsyncIterator[list[Daemon]]:
    daemons = [Daemon(client, name, **changes) for name in names]
    for daemon in daemons:
        await daemon.sync()
        await daemon.sync()
    tasks = [asyncio.create_task(daemon.live()) for daemon in daemons]
    try:
        yield daemons
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, (asyncio.CancelledError, httpx.TransportError)) for r in results), results


def scenario(test: Callable[[httpx.AsyncClient], Awaitable[None]], tmp_path: Path, **changes: Any) -> None:
    async def run() -> None:
        async with running(tmp_path, **changes) as client:
            await test(client)

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))
