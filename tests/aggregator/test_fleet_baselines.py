"""Baselines in the aggregator, over real HTTP with a real database: learned, approved, told, kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.contract import Finding, Measurement, Status, Tier
from healthd.aggregator.app import aggregator
from healthd.aggregator.baselines.service import Learner
from healthd.aggregator.inventory.node_record import NodeRecord
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import baseline_rows
from healthd.aggregator.store.store import Store
from healthd.aggregator.store.tables import BASELINES
from healthd.baselines.book import Book
from healthd.baselines.model import Kind, Sample, Series, State
from healthd.baselines.settings import BaselineSettings
from healthd.core.errors import StoreError
from healthd.core.evidence import judge_health
from healthd.core.model import (
    Allocation,
    DeviceRecord,
    Inventory,
    LearnedBounds,
    LearnedLimits,
    NodeState,
    SyncAnswer,
    SyncRequest,
)
from healthd.core.wire import decode, encode
from tests.aggregator import parts
from tests.aggregator.parts import KEY, fleet
from tests.aggregator.test_api import POLICY
from tests.patience import PATIENCE

MATMUL = "matmul_flops_per_second/bf16"


def state(node: str, *, torch: str = "2.9", devices: int = 4, value: float = 1e12, **changes: Any) -> NodeState:
    """A healthy node whose devices have all been measured just now."""
    chance = random.Random(node)
    targets = [f"cpu:{index}" for index in range(devices)]
    findings = tuple(
        Finding(
            status=Status.PASS,
            reason=None,
            message="measured",
            target=target,
            measurements=(
                Measurement(
                    name="matmul_flops_per_second",
                    value=value * chance.gauss(1, 0.01),
                    lower=None,
                    upper=None,
                    origin="none",
                    labels={"dtype": "bf16"},
                ),
            ),
        )
        for target in targets
    )
    one = parts.result("matmul")
    made = parts.state(
        node,
        versions={"torch": torch},
        inventory=Inventory(
            accelerator="cpu",
            device_count=devices,
            core_count=devices,
            memory_bytes=None,
            efa_count=None,
            devices=tuple(
                DeviceRecord(target=target, kind="cpu", serial=None, cores=1, memory_bytes=None) for target in targets
            ),
        ),
        results=(
            parts.result("memory_free", tier=Tier.PASSIVE),
            dataclasses.replace(one, findings=findings, started_at=changes.pop("began", 1.0)),
        ),
    )
    health, reasons = judge_health(made)
    return dataclasses.replace(made, **{"health": health, "reasons": reasons, **changes})


class Daemon:
    """A node that speaks sync and takes what it is told."""

    def __init__(self, client: httpx.AsyncClient, name: str, **changes: Any) -> None:
        self.client, self.name, self.changes = client, name, changes
        self.seq = 0
        self.has: str | None = ""
        self.told: list[LearnedLimits] = []
        self.answer: SyncAnswer | None = None
        self.received = 0.0

    async def sync(self) -> SyncAnswer:
        self.seq += 1
        request = SyncRequest(
            protocol=1,
            incarnation="i1",
            seq=self.seq,
            last_answer=self.answer.answer if self.answer else None,
            since_answer_seconds=time.monotonic() - self.received if self.answer else None,
            state=state(self.name, **self.changes),
            digest=f"d{self.seq}",
            ages={},
            orders={},
            issuer=None,
            baseline=self.has,
        )
        response = await self.client.post(
            f"/v1/nodes/{self.name}/sync?wait=0", content=encode(request), headers={"x-healthd-node-key": KEY}
        )
        assert response.status_code == 200, response.text
        self.answer, self.received = decode(response.content, SyncAnswer, what="answer"), time.monotonic()
        if self.answer.baseline is not None:
            self.told.append(self.answer.baseline)
            self.has = self.answer.baseline.digest if self.has is not None else None
        return self.answer


@contextlib.asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    where = AggregatorSettings(listen="127.0.0.1:0", state_dir=folder)
    async with (
        aggregator(where, POLICY, BaselineSettings(**settings)) as (address, _),
        httpx.AsyncClient(base_url=f"http://{address}", timeout=60.0, verify=False) as client,
    ):
        yield client


def scenario(test: Callable[[httpx.AsyncClient], Awaitable[None]], folder: Path, **settings: Any) -> None:
    async def run() -> None:
        async with running(folder, **settings) as client:
            await test(client)

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))


async def nodes(client: httpx.AsyncClient, count: int = 4, **changes: Any) -> list[Daemon]:
    found = [Daemon(client, f"n{index}", **changes) for index in range(count)]
    for one in found:
        await one.sync()
        await one.sync()
    return found


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, str]:
    response = await client.post(path, json=body)
    return response.status_code, str(response.json()["detail"])


def test_what_healthy_nodes_measure_is_learned_approved_by_a_person_and_told_once(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        daemons = await nodes(client)
        (entry,) = (await post(client, "/v1/baselines/learn"))["changed"]
        assert (entry["name"], entry["state"], entry["samples"], entry["sources"]) == (MATMUL, "candidate", 16, 16)
        for one in daemons:
            assert (await one.sync()).baseline is None  # nobody has agreed yet
        done = await post(client, "/v1/baselines/decide", state="approved", owner="ann")
        assert done["count"] == 1
        for one in daemons:
            told = (await one.sync()).baseline
            assert told is not None
            assert (told.hardware, told.accelerator, told.versions) == ("t1.large x4", "cpu", {"torch": "2.9"})
            bounds = told.limits[MATMUL]
            assert bounds.lower == pytest.approx(0.9e12, rel=0.03)
            assert (await one.sync()).baseline is None  # it has them
        found = (await client.get("/v1/baselines")).json()
        assert [(one["state"], one["by"], one["version"]) for one in found["baseline"]] == [("approved", "ann", 1)]
        assert found["drifts"] == []

    scenario(test, tmp_path)


def test_other_versions_old_nodes_and_other_splits_are_told_nothing(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await nodes(client)
        for one in (Daemon(client, "newer", torch="2.10"), Daemon(client, "split", devices=2)):
            await one.sync()
            await one.sync()
        old = Daemon(client, "old")
        old.has = None
        await old.sync()
        await old.sync()
        await post(client, "/v1/baselines/learn")
        assert (await refused(client, "/v1/baselines/decide", state="approved", names=[MATMUL]))[0] == 400
        assert (await post(client, "/v1/baselines/decide", state="approved"))["count"] == 1
        for name, changes in (("newer", {"torch": "2.10"}), ("split", {"devices": 2})):
            again = Daemon(client, name, **changes)
            again.seq = 10
            assert (await again.sync()).baseline is None
        assert (await old.sync()).baseline is None

    scenario(test, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"allocated": (Allocation(by="process", holder="pid 7"),)},
        {"faults": ("matmul=slow:2",)},
        {"torch": ""},
        {"inventory": None},
    ],
)
def test_nodes_that_are_used_or_not_known_teach_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    if changes.get("torch") == "":
        changes = {"versions": {}}

    async def test(client: httpx.AsyncClient) -> None:
        await nodes(client, **changes)
        assert (await post(client, "/v1/baselines/learn"))["changed"] == []
        assert (await client.get("/v1/baselines")).json()["learning"] == []

    scenario(test, tmp_path)


def test_a_quarantined_node_teaches_nothing(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for index in range(4):
            path = f"/v1/nodes/n{index}/quarantine?unseen=true"
            assert (await client.put(path, json={"reason": "it is odd"})).status_code == 200
        await nodes(client)
        assert (await post(client, "/v1/baselines/learn"))["changed"] == []

    scenario(test, tmp_path)


def test_baselines_survive_a_restart_with_their_samples(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient) -> None:
        await nodes(client)
        await post(client, "/v1/baselines/learn")
        await post(client, "/v1/baselines/decide", state="approved")
        await post(client, "/v1/baselines/decide", state="frozen")

    async def second(client: httpx.AsyncClient) -> None:
        found = (await client.get("/v1/baselines")).json()
        (entry,) = found["baseline"]
        assert (entry["state"], entry["samples"]) == ("frozen", 16)
        daemon = Daemon(client, "n1")
        await daemon.sync()
        # It is looked at within a second, and its next answer tells.
        for _ in range(50):
            if (await daemon.sync()).baseline is not None:
                break
            await asyncio.sleep(0.1)
        assert [one.limits for one in daemon.told]

    scenario(first, tmp_path)
    scenario(second, tmp_path)


def test_a_revoked_baseline_is_taken_back_from_the_nodes(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        daemons = await nodes(client)
        await post(client, "/v1/baselines/learn")
        await post(client, "/v1/baselines/decide", state="approved")
        await daemons[0].sync()
        assert await refused(client, "/v1/baselines/decide", state="revoked") == (400, "name what is to be revoked")
        await post(client, "/v1/baselines/decide", state="revoked", names=[MATMUL])
        told = (await daemons[0].sync()).baseline
        assert told is not None
        assert told.limits == {}
        # Who never had any need not hear of it.
        assert (await daemons[1].sync()).baseline is None
        assert (await client.get("/v1/baselines")).json()["revoked"]

    scenario(test, tmp_path)


def test_automatic_approval_is_a_setting(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        daemons = await nodes(client)
        await post(client, "/v1/baselines/learn")
        assert (await daemons[0].sync()).baseline is not None

    scenario(test, tmp_path, approve="auto")


def test_nothing_is_learned_where_the_operator_does_not_want_it(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await nodes(client)
        assert (await post(client, "/v1/baselines/learn"))["changed"] == []

    scenario(test, tmp_path, learn=False)


def test_an_import_judges_at_once_and_does_not_replace_what_is_frozen(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        (daemon, *_) = await nodes(client)
        await post(client, "/v1/baselines/learn")
        await post(client, "/v1/baselines/decide", state="approved")
        found = (await client.get("/v1/baselines")).json()
        entry = {**found["baseline"][0], "lower": 5e11}
        assert (await post(client, "/v1/baselines/import", format=1, baseline=[entry]))["count"] == 1
        told = (await daemon.sync()).baseline
        assert told is not None
        assert told.limits == {MATMUL: LearnedBounds(lower=5e11, upper=None)}
        (now,) = (await client.get("/v1/baselines")).json()["baseline"]
        assert now["version"] == 2
        await post(client, "/v1/baselines/decide", state="frozen")
        status, text = await refused(client, "/v1/baselines/import", format=1, baseline=[{**entry, "lower": 6e11}])
        assert status == 409
        assert "is frozen" in text
        status, text = await refused(client, "/v1/baselines/import", format=1, baseline=[{**entry, "lower": -1.0}])
        assert status == 400
        assert "makes no sense" in text
        status, text = await refused(client, "/v1/baselines/decide", state="candidate")
        assert status == 400

    scenario(test, tmp_path)


def test_stragglers_are_told_by_the_aggregator_and_of_one_run_nobody_is_named(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        daemons = [Daemon(client, f"n{i}", value=0.7e12 if i == 5 else 1e12, began=1.0) for i in range(12)]
        for _ in range(2):
            for one in daemons:
                await one.sync()
        await post(client, "/v1/baselines/learn")
        found = (await client.get("/v1/fleet/stragglers")).json()
        assert found["confirmed"] == []
        assert {one["node"] for one in found["suspects"]} == {"n5"}
        assert found["nodes"] == 12
        for one in daemons:
            one.changes["began"] = 2.0
            await one.sync()
        await post(client, "/v1/baselines/learn")
        found = (await client.get("/v1/fleet/stragglers")).json()
        assert {one["node"] for one in found["confirmed"]} == {"n5"}
        assert "n5 cpu:" in found["confirmed"][0]["message"]

    scenario(test, tmp_path)


# --- without HTTP -----------------------------------------------------------------------------------------------------


def learned_series() -> tuple[Series, tuple[Sample, ...]]:
    kind = Kind(hardware="h x2", accelerator="cpu", versions=(("torch", "2.9"),))
    book = Book()
    for index in range(12):
        book.add(kind, MATMUL, Sample(node=f"n{index}", target="cpu:0", day=20_000, value=1e12 + index))
    book.learn(now=20_000 * 86400.0)
    (series,) = book.all()
    return series, book.samples(series.id)


def test_rows_give_back_series_and_samples() -> None:
    async def main() -> None:
        store = Store.open("sqlite://")
        try:
            series, samples = learned_series()
            kept = baseline_rows.Kept(series=series, samples=samples)
            for _ in range(2):
                await store.run(lambda connection: baseline_rows.write(connection, [kept], (), ()))
            assert await store.run(baseline_rows.read) == (kept,)
            await store.run(lambda connection: baseline_rows.write(connection, (), (), [series.id]))
            assert await store.run(baseline_rows.read) == ()
        finally:
            store.close()

    asyncio.run(main())


def test_a_decision_that_the_disk_does_not_take_is_not_made() -> None:
    async def main() -> None:
        store = Store.open("sqlite://")
        learner = Learner(fleet(), store, BaselineSettings())
        series, samples = learned_series()
        learner.book.put(series, samples)
        store.close()
        with pytest.raises(StoreError):
            await learner.decide([series.id], State.APPROVED, by="ann")
        assert learner.book.get(series.id) == series
        assert learner.book.limits_of(series.kind) is None

    asyncio.run(main())


def test_who_asks_while_the_database_cannot_be_read_is_told_so_in_time() -> None:
    async def main() -> None:
        store = Store.open("sqlite://")
        series, samples = learned_series()
        kept = baseline_rows.Kept(series=series, samples=samples)
        await store.run(lambda connection: baseline_rows.write(connection, [kept], (), ()))
        await store.run(lambda connection: connection.execute(BASELINES.update().values(samples=b"cut")))
        learner = Learner(fleet(), store, BaselineSettings(), ready_seconds=0.1)
        running = asyncio.create_task(learner.run())
        try:
            async with asyncio.timeout(5):
                with pytest.raises(StoreError, match="samples of baseline"):
                    await learner.ready()
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.wait([running])
            store.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("has", "limits", "told"),
    [
        (None, True, False),
        ("", True, True),
        ("other", True, True),
        ("d", True, False),
        ("", False, False),
        ("x", False, True),
    ],
)
def test_a_node_is_told_what_it_does_not_have(has: str | None, limits: bool, told: bool) -> None:
    bounds = {MATMUL: LearnedBounds(lower=1.0, upper=None)} if limits else {}
    learned = LearnedLimits(digest="d", hardware="h", accelerator="cpu", versions={}, limits=bounds)
    record = NodeRecord(node="n1", baseline=has, learned=learned)
    assert (record.unknown_limits() is not None) is told
    assert NodeRecord(node="n1", baseline=has).unknown_limits() is None
