"""What the aggregator gives to learn limits from, and stragglers, over real HTTP with real syncs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.contract import Finding, Measurement, Status, Tier
from healthd.aggregator.fleet.slow import Peers
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.baselines import MOST_SAMPLES, Kind, Sample
from healthd.core.evidence import judge_health
from healthd.core.model import Allocation, DeviceRecord, Inventory, NodeState, SyncAnswer, SyncRequest
from healthd.core.wire import decode, encode
from tests.aggregator import parts
from tests.aggregator.api_kit import POLICY
from tests.aggregator.parts import KEY
from tests.cli.cli_kit import healthd
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
    """A node that speaks sync."""

    def __init__(self, client: httpx.AsyncClient, name: str, **changes: Any) -> None:
        self.client, self.name, self.changes = client, name, changes
        self.seq = 0
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
        )
        response = await self.client.post(
            f"/v1/nodes/{self.name}/sync?wait=0", content=encode(request), headers={"x-healthd-node-key": KEY}
        )
        assert response.status_code == 200, response.text
        self.answer, self.received = decode(response.content, SyncAnswer, what="answer"), time.monotonic()
        return self.answer


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    where = AggregatorSettings(listen="127.0.0.1:0", state_dir=folder)
    async with (
        aggregator(where, POLICY) as (address, _),
        httpx.AsyncClient(base_url=f"http://{address}", timeout=60.0, verify=False) as client,
    ):
        yield client


def scenario(test: Callable[[httpx.AsyncClient], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        async with running(folder) as client:
            await test(client)

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))


async def nodes(client: httpx.AsyncClient, *names: str, **changes: Any) -> None:
    for one in [Daemon(client, name, **changes) for name in names]:
        await one.sync()
        await one.sync()


async def series_once(client: httpx.AsyncClient, wanted: Callable[[list[Any]], bool]) -> list[Any]:
    """The series of the aggregator as soon as they are as wanted: nodes are looked at soon after they report."""
    while True:
        response = await client.get("/v1/fleet/samples")
        assert response.status_code == 200, response.text
        found: list[Any] = response.json()["series"]
        if wanted(found):
            return found
        await asyncio.sleep(0.05)


def test_what_healthy_nodes_measure_is_given_by_kind_of_machine_and_learned_by_the_command(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await nodes(client, "n0", "n1", "n2", "n3")
        await nodes(client, "newer", torch="2.10")
        await nodes(client, "split", devices=2)
        found = await series_once(client, lambda some: sum(one["devices"] for one in some) == 22)
        assert [
            (one["hardware"], one["versions"], one["name"], one["devices"], len(one["values"])) for one in found
        ] == [
            ("t1.large x2", {"torch": "2.9"}, MATMUL, 2, 2),
            ("t1.large x4", {"torch": "2.10"}, MATMUL, 4, 4),
            ("t1.large x4", {"torch": "2.9"}, MATMUL, 16, 16),
        ]
        said = await asyncio.to_thread(healthd, tmp_path, "baseline", "--aggregator", str(client.base_url))
        assert said.code == 0, said.err
        learned = [one for one in tomllib.loads(said.out)["baselines"].values() if "limits" in one]
        assert [(one["hardware"], one["accelerator"], one["versions"]) for one in learned] == [
            ("t1.large x4", "cpu", {"torch": "2.9"})
        ]
        assert learned[0]["limits"][MATMUL]["lower"] == pytest.approx(0.9e12, rel=0.03)
        assert "4 samples of 4 devices are too few" in said.out

    scenario(test, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"allocated": (Allocation(by="process", holder="pid 7"),)},
        {"faults": ("matmul=slow:2",)},
        {"versions": {}},
        {"inventory": None},
    ],
)
def test_nodes_that_are_used_or_not_known_teach_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await nodes(client, "n0", "n1", **changes)
        await nodes(client, "witness")  # looked at after the others
        (one,) = await series_once(client, bool)
        assert one["devices"] == 4

    scenario(test, tmp_path)


def test_a_quarantined_node_teaches_nothing(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        path = "/v1/nodes/n0/quarantine?unseen=true"
        assert (await client.put(path, json={"reason": "it is odd"})).status_code == 200
        await nodes(client, "n0", "witness")
        (one,) = await series_once(client, bool)
        assert one["devices"] == 4

    scenario(test, tmp_path)


def test_where_nothing_was_measured_no_limit_is_learned_and_that_is_said(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        said = await asyncio.to_thread(healthd, tmp_path, "baseline", "--aggregator", str(client.base_url))
        assert (said.code, said.out) == (1, "")
        assert "no limit can be learned: no healthy, idle node has measured anything in the last day" in said.err

    scenario(test, tmp_path)


def test_of_many_devices_a_draw_is_given_that_is_the_same_again() -> None:
    kind = Kind(hardware="h x1", accelerator="cpu", versions=())
    peers = Peers()
    for index in range(1000):
        sample = Sample(name=MATMUL, node=f"n{index}", target="cpu:0", began=0.0, day=1, value=1.0 + index)
        peers.take_in(kind, f"n{index}", [sample])
    (one,) = asyncio.run(peers.series())
    assert (one.devices, len(set(one.values))) == (1000, MOST_SAMPLES)
    assert 400 < sum(one.values) / MOST_SAMPLES < 600
    assert asyncio.run(peers.series()) == (one,)


def test_of_one_run_a_straggler_is_suspect_and_nobody_is_named(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for index in range(12):
            await nodes(client, f"n{index}", value=0.7e12 if index == 5 else 1e12)
        await series_once(client, lambda some: [one["devices"] for one in some] == [48])
        found = (await client.get("/v1/fleet/stragglers")).json()
        assert found["confirmed"] == []
        assert {one["node"] for one in found["suspects"]} == {"n5"}
        assert found["nodes"] == 12

    scenario(test, tmp_path)
