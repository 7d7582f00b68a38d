"""A turn of the engine sees each node once: at a thousand syncs a second that is most of what it does."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from checks.contract import Tier
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.fleet.node_record import CompactState
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.fleet.registry import Fleet, boottime
from healthd.aggregator.policy import Policy, Tuning
from healthd.aggregator.store.store import Store
from healthd.core.model import GateRequest, SyncRequest
from healthd.core.wire import decode
from tests.aggregator.parts import Clock, Node, enrol_anybody, state
from tests.benchmarks.simulated import SimulatedNode


class Counting(Fleet):
    """Counts how often each node is looked up."""

    def __init__(self, issuer: str, clock: Clock | None = None) -> None:
        super().__init__(
            issuer=issuer, enrol=enrol_anybody, silent_seconds=60.0, max_nodes=100, clock=clock or boottime
        )
        self.looks: Counter[str] = Counter()

    def node(self, name: str, now: float | None = None) -> FleetNode | None:
        self.looks[name] += 1
        return super().node(name, now)


async def test_each_node_that_was_heard_is_looked_up_once_a_turn(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/a.db")
    try:
        fleet = Counting(store.store_id)
        engine = Engine(
            store=store, registry=fleet, policy=Policy(tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0)
        )
        nodes = [SimulatedNode(f"n{number}", 0, 10.0) for number in range(3)]
        for full in (True, False):
            fleet.looks.clear()
            for node in nodes:
                request = decode(node.body(full=full), SyncRequest, what="sync")
                await fleet.sync(node.name, "key", request, 0.0)
            await engine.run_once()
            assert fleet.looks == {"n0": 1, "n1": 1, "n2": 1}
    finally:
        store.close()


async def test_a_node_that_is_as_it_was_brings_no_turn_unless_a_gate_or_a_lease_waits_for_it(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path}/a.db")
    try:
        clock = Clock()
        fleet = Counting(store.store_id, clock)
        policy = Policy(tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0)
        engine = Engine(store=store, registry=fleet, policy=policy, clock=clock)
        nodes = {name: Node(fleet, clock, name=name) for name in ("n1", "n2")}
        for node in nodes.values():
            await node.join(state(node.name))
            await node.say()
        await engine.run_once()
        for node in nodes.values():
            await node.say()
        await engine.run_once()

        async def looked_at() -> list[str]:
            fleet.looks.clear()
            for node in nodes.values():
                await node.say()
            await engine.run_once()
            return sorted(fleet.looks)

        assert await looked_at() == []
        asked = asyncio.create_task(engine.ask(GateRequest(job="j", nodes=("n1",), tier=Tier.PASSIVE)))
        await asyncio.sleep(0)
        await engine.run_once()
        assert await looked_at() == ["n1"], "it has to store its lease"
        held = asyncio.create_task(engine.ask(GateRequest(job="k", nodes=("n1", "n2"), tier=Tier.PASSIVE)))
        await asyncio.sleep(0)
        await engine.run_once()
        assert await looked_at() == ["n1", "n2"], "a gate that waits for n1 names n2 too"
        for task in (asked, held):
            task.cancel()
        await asyncio.wait([asked, held])
    finally:
        store.close()


def test_the_oldest_age_follows_every_sync() -> None:
    kept = CompactState(state(age=5.0), at=100.0)
    assert kept.oldest_seconds == kept.oldest_seconds == 5.0
    kept.refresh({}, at=103.0)
    assert kept.oldest_seconds == 8.0
    kept.refresh(dict.fromkeys((result.check for result in kept.open().results), 1.0), at=104.0)
    assert kept.oldest_seconds == 1.0
