"""What must not stop the database for all: odd text, odd numbers, a job that fails, a commit without an answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from checks.contract import Blame, Status
from healthd.aggregator.application import make_app
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.jobs.outcome_records import Fault, GateEnding, GateFacts
from healthd.aggregator.store import reading
from healthd.aggregator.store.rows import Kind, PutEvent, PutGate, PutMeta, PutOutcome, PutRecord
from healthd.aggregator.store.store import Store
from healthd.core.errors import StoreError
from healthd.core.model import GateRequest, Verdict
from tests.aggregator.api_kit import living
from tests.aggregator.api_kit import running as serving
from tests.aggregator.application import parts_of_test
from tests.aggregator.engine_kit import running
from tests.aggregator.parts import fleet
from tests.aggregator.proxy import Proxy
from tests.aggregator.store_kit import ended
from tests.aggregator.world import NOW, POLICY, World, good_results, lease, result
from tests.patience import PATIENCE

ODD = "a\0b"


async def test_odd_text_of_one_node_is_written_and_does_not_stop_the_transaction(url: str) -> None:

    store = Store.open(url)
    fault = Fault(node="n1", check=f"{ODD}{'c' * 999}", code=f"{ODD}{'C' * 999}", out=True)
    facts = GateFacts(
        gate=ended(1).id,
        decided_at=NOW,
        way=GateEnding.REJECTED,
        would=Verdict.REJECT,
        alarmed=False,
        clean=False,
        wait_seconds=1.0,
        device_seconds=0.0,
        faults=(fault,),
    )
    told = PutOutcome(gate=ended(1).id, job="train", attempt=1, status="ok\0" * 99, message="x\0y", told_at=NOW)
    line = PutEvent(at=NOW, subject="n1\0" * 999, kind="failed\0" * 99, message="x\0y")
    await store.write([PutGate(gate=ended(1)), PutRecord(kind=Kind.FACTS, key=ended(1).id, record=facts), told, line])
    outcome = await store.run(lambda c: reading.read_outcome(c, ended(1).id))
    assert outcome is not None
    assert (outcome.status, outcome.message) == (("ok " * 99)[:64], "x y")
    kept = await store.run(lambda c: reading.read_facts(c, ended(1).id))
    assert kept is not None
    assert len(kept.faults) == 1
    store.close()


async def test_gate_with_a_nul_in_what_a_node_says_is_decided(url: str) -> None:

    wrong = result("matmul", status=Status.FAIL, code="Odd\0", message="is 3\0.0", blame=Blame.NODE)
    world = World("n1")
    world.add("n2", results=(*good_results()[:1], wrong, *good_results()[2:]))
    async with running(world, url) as run:
        gate, decision = await run.admit(nodes=("n2",))
        assert decision.decision is Verdict.REJECT, decision
        await run.engine.outcome(gate.id, "not\0started", "what\0ever")
        _, other = await run.admit(job="other", nodes=("n1",))
        assert other.decision is Verdict.ADMIT


async def test_job_that_fails_in_an_unforeseen_way_takes_no_other_down(url: str) -> None:

    store = Store.open(url)
    stand, go = threading.Event(), threading.Event()

    def hold(_: sa.Connection) -> None:
        stand.set()
        go.wait(10 * PATIENCE)

    first = asyncio.create_task(store.run(hold))
    await asyncio.to_thread(stand.wait, 10 * PATIENCE)
    waiting = [asyncio.create_task(store.write([PutMeta(key=f"k{i}", value="v")])) for i in range(5)]
    bad = asyncio.create_task(store.run(lambda _: 1 // 0))
    await asyncio.sleep(0)  # all of them wait for the writer now
    go.set()
    results = await asyncio.gather(first, *waiting, bad, return_exceptions=True)
    assert results[:-1] == [None] * 6
    assert "internal error" in str(results[-1])
    assert store.load().meta.keys() >= {f"k{i}" for i in range(5)}
    store.close()


def test_page_beyond_all_events_is_refused_before_it_reaches_the_database(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as client, living(client, "n1"):
            assert (await client.get(f"/nodes/n1?before={2**63 - 1}")).status_code == 200
            said = await client.get(f"/nodes/n1?before={10**30}")
            assert 400 <= said.status_code < 500, said.text

    asyncio.run(asyncio.wait_for(main(), 20 * PATIENCE))


# --- a commit whose answer is lost ----------------------------------------------------------------------------------


class LosesCommit(Proxy):
    """Once `armed`, the server's answer to the next COMMIT is lost, and the connection with it."""

    armed = False
    waiting = False

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not answers and self.armed and b"COMMIT" in data:
                    self.armed, self.waiting = False, True
                if answers and self.waiting:
                    self.waiting = False
                    self.lost += 1
                    break
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if answers:
            self._open -= {source, sink}
            source.close()
            sink.close()


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_gate_whose_commit_was_not_answered_is_found_again_by_who_asks_again(url: str) -> None:

    direct = sa.make_url(url)
    with LosesCommit(f"http://127.0.0.1:{direct.port}") as proxy:
        there = direct.set(port=int(proxy.url.rpartition(":")[2])).render_as_string(hide_password=False)
        async with running(World("n1", "n2"), there) as run:
            proxy.armed = True
            with pytest.raises(StoreError):
                await run.engine.ask(GateRequest(job="train", nodes=("n1",)))
            assert proxy.lost == 1
            run.world.now += 2
            gate, decision = await run.admit(nodes=("n1",))
            assert decision.decision is Verdict.ADMIT
            assert [one.id for one in await run.engine.gates(limit=9)] == [gate.id]
            _, other = await run.admit(job="other", nodes=("n2",))
            assert other.decision is Verdict.ADMIT


@pytest.mark.system
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_release_whose_commit_was_not_answered_has_happened(url: str) -> None:

    direct = sa.make_url(url)
    with LosesCommit(f"http://127.0.0.1:{direct.port}") as proxy:
        there = direct.set(port=int(proxy.url.rpartition(":")[2])).render_as_string(hide_password=False)
        async with running(World("n1"), there) as run:
            gate, _ = await run.admit(nodes=("n1",))
            proxy.armed = True
            with pytest.raises(StoreError):
                await run.engine.release(gate.id)
            run.world.now += 2
            await run.settle()
            assert run.engine.leases() == ()
            assert run.world.daemons["n1"].state.leases == (), "the node was told"


async def test_recovery_that_a_person_ended_goes_on_when_that_could_not_be_written(tmp_path: Path) -> None:
    world = World("n1")
    world.add("n2", leases=(lease("old-lease", job="big"),))
    for daemon in world.daemons.values():
        daemon.issuer = "store-lost"
    async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
        assert run.engine.recovering()
        moved = (tmp_path / "a.db").rename(tmp_path / "away.db")
        with pytest.raises(StoreError):
            await run.engine.recover("ana")
        assert run.engine.recovering(), "nothing is admitted on a word that is nowhere written"
        moved.rename(tmp_path / "a.db")
        world.now += 2
        assert await run.engine.recover("ana")
        assert run.engine.recovering() is None


# --- whose clock counts ---------------------------------------------------------------------------------------------


async def test_words_of_people_go_by_the_clock_of_the_engine(tmp_path: Path) -> None:
    """The machine's clock was set back by an hour after the start; the engine's does not jump."""
    store, registry = Store.open("sqlite://"), fleet()
    registry.load("n1", key_hash=None, pool=None)
    engine = Engine(store=store, registry=registry, policy=POLICY, clock=lambda: time.time() + 3600)

    parts = parts_of_test(tmp_path, store=store, fleet=registry, engine=engine)
    task = asyncio.create_task(engine.run())
    transport = httpx.ASGITransport(app=make_app(parts), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        word = {"reason": "fan", "for_seconds": 60}
        kept = (await client.put("/v1/nodes/n1/quarantine", json=word)).json()
        assert kept["since"] == pytest.approx(time.time() + 3600, abs=30 * PATIENCE)
        assert kept["until"] == kept["since"] + 60
        assert (await client.put("/v1/overrides/train", json=word)).status_code == 200
        assert [one.job for one in engine.overrides()] == ["train"], "it is in force"
        assert (await client.put("/v1/overrides/a%00b", json=word)).status_code == 400
    task.cancel()
    await asyncio.wait([task])
    store.close()
