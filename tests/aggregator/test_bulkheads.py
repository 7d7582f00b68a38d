"""Exceptions that nobody foresaw: what they are planted in is held alone, and everything else goes on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from checks.contract import Blame
from healthd.aggregator.application import make_app
from healthd.aggregator.engine.memory import Batch
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.gate.records import Accuse
from healthd.aggregator.store.rows import PutEvent
from healthd.core.errors import HealthdError
from healthd.core.evidence import reason
from healthd.core.model import Decision, GateRequest, Mode, Order, Quarantine, Verdict
from tests.aggregator.application import parts_of_test
from tests.aggregator.engine_kit import Running, running
from tests.aggregator.parts import fleet
from tests.aggregator.postgres import connected
from tests.aggregator.store_kit import QUARANTINE
from tests.aggregator.world import World


class Faulty(World):
    """A registry that fails about `bad` nodes, and as often as `untold` says in telling one its orders."""

    def __init__(self, *names: str) -> None:
        self.bad: set[str] = set()
        self.untold = 0
        super().__init__(*names)

    def node(self, name: str, now: float | None = None) -> FleetNode | None:
        if name in self.bad:
            raise ZeroDivisionError(f"planted in {name}")
        return super().node(name, now)

    def set_orders(self, node: str, orders: tuple[Order, ...]) -> None:
        if self.untold:
            self.untold -= 1
            raise ZeroDivisionError("planted in telling")
        super().set_orders(node, orders)


async def nobody_gated(_: str) -> bool:
    return False


async def asked(run: Running, job: str, node: str, **more: object) -> str:
    request = GateRequest(**{"job": job, "nodes": (node,), "wait_seconds": 600.0, **more})  # type: ignore[arg-type]
    return (await run.engine.ask(request)).id


async def decisions(run: Running, gates: list[str]) -> list[Decision]:
    return [await run.engine.wait(gate, 0) for gate in gates]


def test_gates_with_planted_exceptions_are_held_alone_also_after_a_restart(tmp_path: Path) -> None:
    names = [f"n{index}" for index in range(100)]
    world, url = Faulty(*names), f"sqlite:///{tmp_path}/a.db"
    world.bad = set(random.Random(7).sample(names, 30))  # more than one turn puts up with

    async def first() -> list[str]:
        async with running(world, url) as run:
            gates = [await asked(run, f"job-{name}", name) for name in names]
            await settled(run)
            return gates

    async def settled(run: Running) -> None:
        for _ in range(4):  # faults beyond the bound of a turn come in the next ones
            world.now += 1.5
            await run.settle(rounds=3)

    async def later(gates: list[str]) -> None:
        async with running(world, url) as run:
            await settled(run)
            for name, decision in zip(names, await decisions(run, gates), strict=True):
                if name not in world.bad:
                    assert decision.decision is Verdict.ADMIT, decision
                    continue
                assert decision.decision is Verdict.HOLD
                assert [(r.code, r.blame) for r in decision.reasons] == [("InternalError", Blame.CONTROL)]
                assert f"planted in {name}" in decision.reasons[0].message
            assert {f.name for f in run.engine.faults() if f.where.value == "node"} == world.bad
            assert run.engine.internal_errors()["gate"] >= 30
            world.bad = set()
            world.now += 61
            await run.settle()
            assert {d.decision for d in await decisions(run, gates)} == {Verdict.ADMIT}
            assert run.engine.faults() == ()

    asyncio.run(later(asyncio.run(first())))


@pytest.mark.parametrize(("mode", "verdict"), [(Mode.ENFORCE, Verdict.REJECT), (Mode.OBSERVE, Verdict.ADMIT)])
async def test_gate_that_cannot_be_stepped_ends_with_its_time(mode: Mode, verdict: Verdict) -> None:
    world = Faulty("n1", "n2")
    world.add("n3", results=())
    async with running(world) as run:
        world.daemons["n3"].deaf = True
        gate = await asked(run, "j", "n3", mode=mode, wait_seconds=30.0)
        world.bad = {"n3"}
        world.now += 700
        await run.engine.run_once()
        decision = await run.engine.wait(gate, 0)
        assert (decision.decision, decision.retryable) == (verdict, verdict is Verdict.REJECT), decision
        assert "InternalError" in [reason.code for reason in decision.reasons]


async def test_request_that_fails_is_told_and_changes_nothing_and_its_neighbours_are_carried_out() -> None:
    async with running(World("n1", "n2")) as run:

        def breaks(batch: Batch) -> None:
            run.engine._memory.fleet_state.put_quarantine(batch, "n1", QUARANTINE)
            raise ZeroDivisionError("planted")

        results = await asyncio.gather(
            run.engine.quarantine("n2", QUARANTINE),
            run.engine.submit(breaks),
            run.engine.note("n2", "kind", "message"),
            return_exceptions=True,
        )
        assert [type(one) for one in results] == [Quarantine, HealthdError, type(None)]
        assert "internal error" in str(results[1])
        assert run.engine.quarantines().keys() == {"n2"} == run.store.load().quarantines.keys()
        assert run.engine.internal_errors()["request"] == 1


async def test_accusation_that_cannot_be_judged_stops_its_node_alone() -> None:
    async with running(World("n1", "n2")) as run:
        planted = Accuse(node="n1", reason=None)  # type: ignore[arg-type]
        await run.engine.submit(lambda batch: batch.accused.append(planted))
        assert run.engine.internal_errors()["node"] == 1
        _, decision = await run.admit(nodes=("n2",))
        assert decision.decision is Verdict.ADMIT


async def test_accusation_of_a_node_that_cannot_be_looked_up_stops_it_alone() -> None:
    world = Faulty("n1", "n2")
    async with running(world) as run:
        world.bad = {"n1"}
        planted = Accuse(node="n1", reason=reason("WrongResult", "wrong", node="n1"))
        await run.engine.submit(lambda batch: batch.accused.append(planted))
        assert run.engine.internal_errors() == {"gate": 0, "node": 1, "request": 0, "turn": 0}


async def test_node_that_could_not_be_told_is_told_later() -> None:
    world = Faulty("n1")
    async with running(world) as run:
        world.untold = 2
        gate = await asked(run, "j", "n1")
        for _ in range(4):
            world.now += 5
            await run.settle()
        (decision,) = await decisions(run, [gate])
        assert decision.decision is Verdict.ADMIT
        assert run.engine.internal_errors()["turn"] == 2
        assert run.engine.faults() == ()


async def test_pruning_is_one_transaction(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    world = World("n1")
    async with running(world, url) as run:
        await run.store.write([PutEvent(at=-1e9, subject="n9", kind="old", message="")])
        with connected(url) as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER full BEFORE UPDATE ON nodes BEGIN SELECT RAISE(ABORT, 'planted'); END"
            )
        world.now += 86400.0  # the node's last word is to be written down
        world.sync("n1")
        await run.engine.run_once()
        await run.engine._prune()
        count = sa.text("SELECT count(*) FROM events WHERE subject = 'n9'")
        assert await run.store.read(lambda c: c.execute(count).scalar()) == 1, "only a part of it was committed"
        with connected(url) as connection:
            connection.exec_driver_sql("DROP TRIGGER full")
        await run.engine._prune()
        assert await run.store.read(lambda c: c.execute(count).scalar()) == 0


async def test_readiness_page_and_metrics_tell_of_internal_errors(tmp_path: Path) -> None:
    world = Faulty("n1")
    async with running(world) as run:
        registry = fleet()
        parts = parts_of_test(tmp_path, store=run.store, fleet=registry, engine=run.engine)
        transport = httpx.ASGITransport(app=make_app(parts), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/readyz?verbose")).text == (await client.get("/readyz")).text == "leader\n"
            world.bad = {"n1"}
            gate = await asked(run, "j", "n1")
            await run.engine.run_once()
            plain, told = await client.get("/readyz"), await client.get("/readyz?verbose")
            assert (plain.status_code, told.status_code) == (200, 200)
            assert "internal errors stop gates or nodes (1)" in plain.text
            assert f"gate {gate}: internal error (ZeroDivisionError: planted in n1)" in told.text
            assert 'healthd_internal_errors_total{where="gate"} 1.0' in (await client.get("/metrics")).text
            page = (await client.get("/")).text
            assert "Internal errors of the aggregator stop" in page
            assert gate in page
