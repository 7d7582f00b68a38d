"""The aggregator with a hand: a real one over HTTP, nodes that speak sync, and a stand-in of the API server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from checks.contract import Status
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.integrations.kubernetes.settings import KubernetesActuatorSettings
from tests.aggregator.actuators_fleet_kit import until
from tests.aggregator.api_kit import POLICY, living
from tests.aggregator.world import POLICY as WORLDS
from tests.clients.api_server_kit import Cluster, cluster
from tests.patience import PATIENCE

KEY = "healthd.internal/removed"


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path,
    kube: Cluster,
    mode: str = "act",
    answer: float = 5.0,
    look: float = 0.1,
    policy: Policy = POLICY,
) -> AsyncIterator[httpx.AsyncClient]:
    where = KubernetesActuatorSettings(service_account=kube.folder, api_server=kube.url)
    actuator = ActuatorSettings(
        kind="kubernetes",
        mode=mode,  # type: ignore[arg-type]
        look_seconds=look,
        answer_seconds=answer,
        gate_seconds=60.0,
        integrations={"kubernetes": where},
    )
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path)
    async with (
        asyncio.timeout(20.0 * PATIENCE),
        aggregator(settings, policy, actuator=actuator) as (address, _),
        httpx.AsyncClient(base_url=f"http://{address}", timeout=60.0, verify=False) as client,
    ):
        yield client
    with warnings.catch_warnings():
        # A call to the API server that was cancelled while it connected leaves its socket to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_reject_comes_when_the_node_is_tainted_and_the_retry_is_admitted_elsewhere(tmp_path: Path) -> None:
    async def play(kube: Cluster) -> None:
        async with (
            running(tmp_path, kube) as client,
            living(client, "n1", "n3"),
            living(client, "n2", status=Status.FAIL),
        ):
            got = (await client.post("/v1/gates?wait=25", json={"job": "train", "nodes": ["n1", "n2"]})).json()
            assert got["decision"] == "reject", got
            assert [taint["key"] for taint in kube.taints("n2")] == [KEY], "at the moment of the answer"
            assert kube.taints("n1") == []
            again = {"job": "train", "attempt": 1, "nodes": ["n1", "n3"]}
            assert (await client.post("/v1/gates?wait=25", json=again)).json()["decision"] == "admit"
            told = (await client.get("/v1/nodes/n2/history")).json()["events"]
            assert any(event["kind"] == "removed from scheduling" for event in told), told

    with cluster(tmp_path / "account") as kube:
        for name in ("n1", "n2", "n3"):
            kube.add(name)
        asyncio.run(play(kube))


def test_newer_evidence_or_a_person_brings_a_node_back_that_a_gate_has_rejected(tmp_path: Path) -> None:
    async def play(kube: Cluster) -> None:
        policy = dataclasses.replace(POLICY, rules_observe=("hard", "soft"))  # what a gate says is all that counts
        async with (
            running(tmp_path, kube, look=0.05, policy=policy) as client,
            living(client, "n1"),
            living(client, "n2") as (bad,),
        ):
            bad.on_run = lambda: bad.changes.update(status=Status.FAIL)
            for job in ("first", "second"):
                asked = {"job": job, "nodes": ["n2"], "max_age_seconds": 0.001}
                assert (await client.post("/v1/gates?wait=25", json=asked)).json()["decision"] == "reject"
                assert kube.taints("n2")
                if job == "first":
                    bad.changes.update(status=Status.PASS, age=0.0)
                    await until(lambda: kube.taints("n2") == [])
                    pool = {"job": "pool", "pool": "train", "count": 2}
                    got = (await client.post("/v1/gates?wait=25", json=pool)).json()
                    assert [one["node"] for one in got["nodes"]] == ["n1", "n2"], got
                    assert (await client.delete(f"/v1/gates/{got['id']}/lease")).status_code == 200
            assert (await client.delete("/v1/nodes/n2/quarantine")).status_code == 200
            await until(lambda: kube.taints("n2") == [])
        async with running(tmp_path, kube, look=0.05, policy=policy) as client, living(client, "n1"):
            word = {"reason": "fan noise", "owner": "ada"}
            assert (await client.put("/v1/nodes/n1/quarantine", json=word)).status_code == 200
            await until(lambda: kube.taints("n1") != [])  # n2 would have been first
            assert kube.taints("n2") == [], "a person released it"

    with cluster(tmp_path / "account") as kube:
        for name in ("n1", "n2"):
            kube.add(name)
        asyncio.run(play(kube))


def test_node_is_out_of_the_way_as_soon_as_it_is_quarantined_and_back_when_it_is_released(tmp_path: Path) -> None:
    """Long before the aggregator would compare by itself."""

    async def play(kube: Cluster) -> None:
        async with running(tmp_path, kube, look=3600.0) as client, living(client, "n1", "n2", "n3"):
            await until(lambda: bool(kube.calls))
            path = "/v1/nodes/n1/quarantine"
            assert (await client.put(path, json={"reason": "the fan is loud"})).status_code == 200
            await until(lambda: [taint["key"] for taint in kube.taints("n1")] == [KEY])
            assert (await client.delete(path)).status_code == 200
            await until(lambda: kube.taints("n1") == [])

    with cluster(tmp_path / "account") as kube:
        for name in ("n1", "n2", "n3"):
            kube.add(name)
        asyncio.run(play(kube))


def test_who_does_not_wait_is_told_to_ask_again_until_the_node_is_out(tmp_path: Path) -> None:
    async def play(kube: Cluster) -> None:
        async with running(tmp_path, kube, answer=8.0) as client, living(client, "n2", status=Status.FAIL):
            seen = set()
            async with asyncio.timeout(10.0 * PATIENCE):
                while "reject" not in seen:
                    got = (await client.post("/v1/gates", json={"job": "train", "nodes": ["n2"]})).json()
                    seen.add(got["decision"])
                    if got["decision"] == "reject":
                        assert kube.taints("n2")
                    await asyncio.sleep(0.01)
            assert "admit" not in seen

    with cluster(tmp_path / "account") as kube:
        kube.add("n2")
        asyncio.run(play(kube))


def test_reject_is_answered_in_time_though_the_right_is_missing(tmp_path: Path) -> None:
    async def play(kube: Cluster) -> None:
        async with running(tmp_path, kube, answer=1.0) as client, living(client, "n2", status=Status.FAIL):
            began = time.monotonic()
            got = (await client.post("/v1/gates?wait=25", json={"job": "train", "nodes": ["n2"]})).json()
            assert got["decision"] == "reject"
            assert time.monotonic() - began < 20.0

    with cluster(tmp_path / "account") as kube:
        kube.add("n2")
        kube.rights.discard("patch on nodes")
        asyncio.run(play(kube))
        assert kube.taints("n2") == []


def test_persons_quarantine_taints_and_their_release_takes_it_away(tmp_path: Path) -> None:
    async def play(kube: Cluster) -> None:
        async with running(tmp_path, kube) as client, living(client, "n1"):
            word = {"reason": "fan noise", "owner": "ada"}
            assert (await client.put("/v1/nodes/n1/quarantine", json=word)).status_code == 200
            await until(lambda: bool(kube.taints("n1")))
            assert kube.nodes["n1"]["metadata"]["annotations"][f"{KEY}-reason"] == "ada: fan noise"
            assert (await client.delete("/v1/nodes/n1/quarantine")).status_code == 200
            await until(lambda: not kube.taints("n1"))

    with cluster(tmp_path / "account") as kube:
        kube.add("n1")
        asyncio.run(play(kube))


def test_observing_hand_touches_nothing(tmp_path: Path) -> None:
    async def play(kube: Cluster) -> None:
        async with running(tmp_path, kube, mode="observe") as client, living(client, "n2", status=Status.FAIL):
            got = (await client.post("/v1/gates?wait=25", json={"job": "train", "nodes": ["n2"]})).json()
            assert got["decision"] == "reject"

    with cluster(tmp_path / "account") as kube:
        kube.add("n2")
        asyncio.run(play(kube))
        assert kube.calls == []


def test_aggregator_that_has_lost_its_database_leaves_the_marks_of_the_one_before_it(tmp_path: Path) -> None:
    async def main(kube: Cluster) -> None:
        policy, look = dataclasses.replace(WORLDS, recovery_seconds=600.0), 0.05
        async with running(tmp_path / "first", kube, look=look, policy=policy) as client, living(client, "n1"):
            assert (await client.put("/v1/nodes/n1/quarantine", json={"reason": "fan"})).status_code == 200
            await until(lambda: bool(kube.taints("n1")))
        listed = len(kube.calls)
        async with running(tmp_path / "second", kube, look=look, policy=policy) as client:
            await until(lambda: len(kube.calls) > listed)
            await asyncio.sleep(10 * look)
            assert kube.taints("n1"), "nobody has said anything for it"
            async with living(client, "n1"):
                await asyncio.sleep(10 * look)
                assert kube.taints("n1"), "others may yet tell who took it out"
                assert (await client.post("/v1/fleet/recover")).status_code == 200
                await until(lambda: not kube.taints("n1"))

    with cluster(tmp_path / "account") as kube:
        kube.add("n1")
        asyncio.run(asyncio.wait_for(main(kube), 30 * PATIENCE))
