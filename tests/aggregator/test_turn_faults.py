"""Turns that fail: a fault counts as cured only by a turn that went through, and who asked is always told."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from healthd.aggregator.application import make_app
from healthd.aggregator.engine.bulkheads import Fault
from healthd.aggregator.gate.rendezvous import with_group
from healthd.aggregator.store.database import RefusedWorkError
from healthd.aggregator.store.rows import PutEvidence, PutOutcome
from healthd.core.errors import HealthdError, NotFoundError, StoreError
from healthd.core.model import GateRequest, Join, Quarantine, Verdict
from tests.aggregator.application import parts_of_test
from tests.aggregator.engine_kit import Running, full, running
from tests.aggregator.parts import fleet
from tests.aggregator.store_kit import QUARANTINE
from tests.aggregator.world import World
from tests.node.node_kit import eventually

ORPHAN = PutEvidence(gate="gone", states=())
"""Its row refers to a gate that is not there: the database refuses it."""


class Unreadable:
    """What was planted in a member of a gate."""

    def __bool__(self) -> bool:
        raise ZeroDivisionError("planted")


class Broken(World):
    """A registry that fails as a whole while `broken`."""

    broken = False

    def set_executors(self, members: Mapping[str, str]) -> None:
        if self.broken:
            raise ZeroDivisionError("planted")
        super().set_executors(members)


def turn_faults(run: Running) -> list[Fault]:
    return [fault for fault in run.engine.faults() if fault.where.value == "turn"]


async def test_write_that_fails_leaves_no_gate_and_times_of_members_outlive_it(tmp_path: Path) -> None:
    async with running(World("n1", "n2"), f"sqlite:///{tmp_path}/a.db") as run:
        join = Join(group="g", rank=0, size=2, member="m0", node="n1")
        request = GateRequest(job="j", join=join, wait_seconds=600.0)
        gate = await run.engine.ask(request)
        run.world.now += 40
        heard = await run.engine.ask(request)
        await full(run.store, True)
        with pytest.raises(StoreError):
            await run.engine.quarantine("n2", dataclasses.replace(QUARANTINE, reason="x" * 100_000))
        assert run.engine.quarantines() == run.store.load().quarantines
        assert (await run.engine.get(gate.id)).members == heard.members
        assert run.engine._memory.reconciler.settling(run.world.now) is None, "nodes were heard all the time"


async def ask(run: Running, job: str, node: str, **more: object) -> str:
    request = GateRequest(**{"job": job, "nodes": (node,), "wait_seconds": 600.0, **more})  # type: ignore[arg-type]
    return (await run.engine.ask(request)).id


async def test_fault_of_a_turn_stays_until_a_turn_goes_through_and_rests_longer_each_time() -> None:
    world = Broken("n1")
    async with running(world) as run:
        world.broken = True
        with pytest.raises(HealthdError, match="internal error"):
            async with asyncio.timeout(2):  # not only when the time for an answer is over
                await ask(run, "j", "n1")
        assert [fault.times for fault in turn_faults(run)] == [1]
        for _ in range(20):
            run.engine._wake.set()
            await asyncio.sleep(0)
        assert [fault.times for fault in turn_faults(run)] == [1], "nothing ran since"
        world.broken = False
        world.now += 2
        run.engine._wake.set()
        await eventually(lambda: not turn_faults(run))


async def test_readiness_and_page_say_that_a_fault_of_the_turn_stops_all(tmp_path: Path) -> None:
    world = Broken("n1")
    async with running(world) as run:
        parts = parts_of_test(tmp_path, store=run.store, fleet=fleet(), engine=run.engine)
        transport = httpx.ASGITransport(app=make_app(parts), client=("127.0.0.1", 1))
        world.broken = True
        with pytest.raises(HealthdError):
            await ask(run, "j", "n1")
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.text.splitlines()[1:]) == (
                503,
                ["an internal error stops all gates; ?verbose says why"],
            )
            assert "Internal errors of the aggregator stop all gates" in (await client.get("/")).text


def test_what_one_request_may_not_write_is_refused_to_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(World("n1", "n2")) as run:
            results = await asyncio.gather(
                run.engine.quarantine("n1", QUARANTINE),
                run.engine.submit(lambda batch: batch.changes.append(ORPHAN)),
                run.engine.quarantine("n2", QUARANTINE),
                return_exceptions=True,
            )
            assert [type(one) for one in results] == [Quarantine, RefusedWorkError, Quarantine]
            assert run.store.load().quarantines.keys() == {"n1", "n2"}
            assert turn_faults(run) == []
            with pytest.raises(StoreError):
                await run.engine.submit(lambda batch: batch.changes.append(ORPHAN))

    asyncio.run(main())
    assert sum("FOREIGN KEY" in record.message for record in caplog.records) == 1, "each text is logged once"


async def test_rows_that_are_refused_turn_after_turn_are_a_fault_of_the_turn() -> None:
    async with running(World("n1")) as run:
        for _ in range(3):
            with pytest.raises(StoreError):
                await run.engine.submit(lambda batch: batch.changes.append(ORPHAN))
        (fault,) = turn_faults(run)
        assert "FOREIGN KEY" in fault.message
        await run.engine.note("n1", "kind", "message")
        assert turn_faults(run) == []


async def test_outcome_of_a_gate_that_was_dropped_fails_nobody_else() -> None:
    async with running(World("n1")) as run:
        gate, _ = await run.admit(nodes=("n1",))
        late = PutOutcome(gate="gone", job="j", attempt=0, status="COMPLETED", message="", told_at=1.0)
        await run.store.write([late, dataclasses.replace(late, gate=gate.id)])
        explained = await run.engine.explain(gate.id)
        assert explained.outcome is not None
        await run.store.run(lambda c: c.exec_driver_sql("DELETE FROM gates"))
        with pytest.raises(NotFoundError):  # memory still has it
            await run.engine.outcome(gate.id, "COMPLETED", "")


async def test_gate_whose_executors_cannot_be_told_is_held_alone() -> None:
    async with running(World("n1", "n2")) as run:
        join = Join(group="g", rank=0, size=2, member="m0", node="n1")
        bad = (await run.engine.ask(GateRequest(job="bad", join=join, wait_seconds=600.0))).id
        gates = run.engine._memory.fleet_state.gates
        planted = dataclasses.replace(gates[bad].members[0], execute=Unreadable())  # type: ignore[arg-type]
        gates[bad] = with_group(gates[bad], members=(planted,))
        good = await ask(run, "good", "n2")
        await run.settle()
        assert (await run.engine.wait(good, 0)).decision is Verdict.ADMIT
        assert [fault.name for fault in run.engine.faults()] == [bad]


async def test_quarantine_that_cannot_end_keeps_no_other_from_ending() -> None:
    async with running(World("n1", "n2", "n3")) as run:
        ended = dataclasses.replace(QUARANTINE, until=run.world.now + 1)
        for name in ("n1", "n2"):
            await run.engine.quarantine(name, ended)
        kept = run.engine._memory.fleet_state.quarantines
        kept["n1"] = dataclasses.replace(ended, until="soon")  # type: ignore[arg-type]
        run.world.now += 1
        await run.engine.run_once()
        assert run.engine.quarantines().keys() == {"n1"}, "memory is what is on disk again; its end waits"
        assert [(fault.where.value, fault.name) for fault in run.engine.faults()] == [("node", "n1")]
        await run.engine.note("n3", "kind", "message")
        run.world.now += 2
        await run.engine.run_once()
        assert run.engine.quarantines() == {}
