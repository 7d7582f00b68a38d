"""What the tests of engine, and those beside them, are made with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import sqlalchemy as sa

from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.gate.records import Gate, LeaseState
from healthd.aggregator.policy import Policy
from healthd.aggregator.store.store import Store
from healthd.core.model import Decision, GateRequest
from tests.aggregator.world import POLICY, World


@dataclasses.dataclass
class Running:
    """An engine with its store, and the world it looks at."""

    engine: Engine
    store: Store
    world: World

    async def settle(self, *, rounds: int = 6) -> None:
        """Let nodes hear and obey, and the engine take it in, until nothing moves any more."""
        for _ in range(rounds):
            for name in self.world.daemons:
                self.world.sync(name)
            await self.engine.run_once()

    async def admit(self, **request: object) -> tuple[Gate, Decision]:
        gate = await self.engine.ask(GateRequest(**{"job": "train", **request}))  # type: ignore[arg-type]
        await self.settle()
        return gate, await self.engine.wait(gate.id, 0)


@contextlib.asynccontextmanager
async def running(
    world: World, url: str = "sqlite://", policy: Policy = POLICY, *, hear: bool = True
) -> AsyncIterator[Running]:
    """An engine for as long as the block; leaving it is as abrupt as kill -9 is for what is in memory."""
    store = Store.open(url)
    world.issuer = store.store_id
    for daemon in world.daemons.values():
        daemon.orders = None
    world.callbacks.clear()
    engine = Engine(store=store, registry=world, policy=policy, clock=world.clock)
    task = asyncio.create_task(engine.run(), name="engine")
    try:
        if hear:
            for name in world.daemons:
                world.tell(name)
            await engine.run_once()
        yield Running(engine, store, world)
    finally:
        task.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            store.close()


def of_states(run: Running) -> dict[str, LeaseState]:
    return {row.node: row.state for row in run.engine.leases()}


async def full(store: Store, on: bool) -> None:
    """Let the database grow no further, as on a full disk; SQLite reports both in the same words."""

    def work(connection: sa.Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages if on else 10**6}")

    await store.run(work)
