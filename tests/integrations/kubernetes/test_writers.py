"""
The actuator's taint and the node's condition beside everybody else who writes nodes, on a real API server.

Nothing of others is undone, no taint of ours is lost, and nobody fights. TESTS_WRITES says how many writes of ours one
run makes (10,000 take some minutes); the nodes are objects without a machine, so the node controller writes them too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.aggregator.drain.plan import ActuatorError, Done
from healthd.clients.kubernetes import ApiServer, KubernetesError
from healthd.core.model import Quarantine
from healthd.integrations.kubernetes.actuator import EFFECT, KubernetesActuator
from healthd.integrations.kubernetes.condition_writer import ConditionWriter
from healthd.integrations.kubernetes.settings import KubernetesSettings
from healthd.node.state.store import NodeStore
from tests.kubernetes.kit import CONDITION, KEY, Cluster, answers, until, url_of
from tests.kubernetes.writers_kit import NAMESPACE, account, removal
from tests.node.node_kit import BOOT, MovedClock, settings, specs
from tests.patience import PATIENCE

pytestmark = pytest.mark.kubernetes

NODES = tuple(f"writers-{number}" for number in range(6))
WRITES = int(os.environ.get("TESTS_WRITES", "120"))


@pytest.fixture
def server(oldest: Cluster, tmp_path: Path) -> Iterator[ApiServer]:
    """A server whose nodes have no machine."""
    with account(oldest, tmp_path) as made:
        oldest.apply(*({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} for name in NODES))
        yield made
        oldest.kubectl("delete", "nodes", *NODES)


def own_taints(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in node["spec"].get("taints", ()) if one["key"] == KEY]


@dataclass
class Others:
    """People, an autoscaler and a second controller, each of whom writes what is theirs; `kept` is what they wrote."""

    client: httpx.AsyncClient
    chance: random.Random
    kept: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in NODES})
    writes: int = 0

    async def cordon(self, node: str) -> None:
        """As `kubectl cordon` and `uncordon` do: a patch of one field, whatever the version."""
        wanted = self.chance.random() < 0.5
        await self._patch(node, {"spec": {"unschedulable": wanted or None}}, "strategic-merge-patch+json")
        self.kept[node]["unschedulable"] = wanted

    async def taint(self, node: str) -> None:
        """As controllers do: the list of taints, read and written whole with its version."""
        wanted = self.chance.random() < 0.5
        for _ in range(50):
            found = (await self.client.get(f"/api/v1/nodes/{node}")).json()
            taints = [one for one in found["spec"].get("taints", ()) if one["key"] != "example.com/full"]
            taints += [{"key": "example.com/full", "effect": "NoSchedule"}] if wanted else []
            version = {"resourceVersion": found["metadata"]["resourceVersion"]}
            if await self._patch(node, {"metadata": version, "spec": {"taints": taints}}, "merge-patch+json"):
                self.kept[node]["taint"] = wanted
                return

    async def label(self, node: str) -> None:
        """By server-side apply, as an owner of one label."""
        wanted = str(self.chance.randrange(1000))
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": {"example.com/rack": wanted}}}
        await self._patch(node, body, "apply-patch+yaml", "?fieldManager=racks&force=true")
        self.kept[node]["rack"] = wanted

    async def heartbeat(self, node: str) -> None:
        """A condition of the kubelet."""
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": iso()}
        await self._patch(f"{node}/status", {"status": {"conditions": [ready]}}, "strategic-merge-patch+json")
        self.kept[node]["ready"] = True

    async def _patch(self, node: str, body: object, kind: str, query: str = "") -> bool:
        answer = await self.client.patch(
            f"/api/v1/nodes/{node}{query}",
            content=json.dumps(body),
            headers={"Content-Type": f"application/{kind}"},
        )
        assert answer.status_code in (200, 409), answer.text
        self.writes += answer.status_code == 200
        return answer.status_code == 200

    async def write_for_ever(self, node: str) -> None:
        while True:
            for write in (self.cordon, self.taint, self.label, self.heartbeat):
                await write(node)
                await asyncio.sleep(self.chance.uniform(0.0, 0.02))

    def undone(self, node: dict[str, Any]) -> list[str]:
        """What somebody else has changed of what they wrote last."""
        kept, spec = self.kept[node["metadata"]["name"]], node["spec"]
        found = {
            "unschedulable": bool(spec.get("unschedulable")),
            "taint": any(one["key"] == "example.com/full" for one in spec.get("taints", ())),
            "rack": node["metadata"]["labels"].get("example.com/rack"),
            "ready": any(one["type"] == "Ready" for one in node["status"].get("conditions", ())),
        }
        return [f"{what}: {found[what]} instead of {kept[what]}" for what in kept if found[what] != kept[what]]


def iso() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@asynccontextmanager
async def others(cluster: Cluster) -> AsyncIterator[Others]:
    assert cluster.folder is not None
    pki = cluster.folder / "pki"
    tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    async with httpx.AsyncClient(
        base_url=url_of(cluster), verify=tls, timeout=30 * PATIENCE, trust_env=False
    ) as client:
        yield Others(client, random.Random(7))


@pytest.mark.nightly
async def test_many_writers_of_one_node_undo_nothing_of_each_other(oldest: Cluster, server: ApiServer) -> None:
    actuator = KubernetesActuator(server, key=KEY, owner="healthd")
    out: dict[str, bool] = dict.fromkeys(NODES, False)
    conflicts = writes = 0

    async def ours(node: str) -> None:
        nonlocal conflicts, writes
        while writes < WRITES:
            wanted = not out[node]
            try:
                outcome = await (actuator.remove(removal(node)) if wanted else actuator.restore(node))
            except ActuatorError as error:  # it lost a few races in a row, says so, and is asked again
                if "changed" not in str(error):
                    raise
                conflicts += 1
                continue
            assert outcome.done is (Done.OUT if wanted else Done.BACK), outcome.note
            out[node], writes = wanted, writes + 1

    async with others(oldest) as them:
        tasks = [asyncio.create_task(them.write_for_ever(name)) for name in NODES]
        await asyncio.gather(*(ours(name) for name in NODES))
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
        # What was cut off in the middle of a write is known to nobody.
        for node, write in itertools.product(NODES, (them.cordon, them.taint, them.label, them.heartbeat)):
            await write(node)
    assert them.writes > 2 * len(NODES)
    print(f"{writes} writes of ours beside {them.writes} of others, {conflicts} times given up and asked again")
    for node in (item for item in oldest.items("nodes") if item["metadata"]["name"] in NODES):
        name = node["metadata"]["name"]
        assert them.undone(node) == [], name
        assert len(own_taints(node)) == (1 if out[name] else 0), name
        assert (node["metadata"]["labels"].get(KEY) == "healthd") is out[name]


async def test_condition_of_ours_leaves_those_of_others(oldest: Cluster, server: ApiServer, tmp_path: Path) -> None:
    chosen = KubernetesSettings(condition=CONDITION, node=NODES[0])
    clock = MovedClock().clock
    book = NodeStore(settings(tmp_path / "node"), specs(), clock=clock, boot_id=BOOT)
    writer = ConditionWriter(book, chosen, server, clock=clock)
    kept_out = Quarantine(reason="fan", owner="operator", owner_kind="person", since=0.0, until=None)
    async with others(oldest) as them:
        task = asyncio.create_task(them.write_for_ever(NODES[0]))
        for number in range(20):
            book.set_quarantine(kept_out if number % 2 else None)
            await writer.write()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await them.heartbeat(NODES[0])
    found = oldest.get("node", NODES[0])["status"]["conditions"]
    assert {one["type"] for one in found} >= {"Ready", CONDITION}
    assert len({one["type"] for one in found}) == len(found)


@pytest.mark.nightly
async def test_api_server_that_is_down_and_comes_again_is_told_in_one_line_and_written_then(
    oldest: Cluster, server: ApiServer
) -> None:
    actuator = KubernetesActuator(server, key=KEY, owner="healthd")
    node = NODES[1]
    with oldest.down("kube-apiserver"):
        with pytest.raises(ActuatorError, match="cannot be reached") as refused:
            await actuator.remove(removal(node))
        assert "\n" not in str(refused.value)
    until("the API server answers", lambda: answers(oldest))
    assert (await actuator.remove(removal(node))).done is Done.OUT
    assert EFFECT in str(own_taints(oldest.get("node", node)))
    # A new process of the aggregator knows by the label what is its own.
    assert node in await KubernetesActuator(server, key=KEY, owner="healthd").marked()


@pytest.mark.nightly
async def test_database_of_the_cluster_that_is_lost_for_a_while_costs_an_error_and_no_taint(
    oldest: Cluster, server: ApiServer
) -> None:
    actuator = KubernetesActuator(server, key=KEY, owner="healthd")
    node = NODES[2]
    assert (await actuator.remove(removal(node))).done is Done.OUT
    with oldest.down("etcd"), pytest.raises(ActuatorError):
        await actuator.restore(node)
    until("the API server answers", lambda: answers(oldest))
    assert len(own_taints(oldest.get("node", node))) == 1
    assert (await actuator.restore(node)).done is Done.BACK
    assert own_taints(oldest.get("node", node)) == []


async def test_token_that_is_no_longer_good_is_one_line(server: ApiServer) -> None:
    (server.service_account / "token").write_text("eyJhbGciOiJub25lIn0.e30.")
    with pytest.raises(KubernetesError, match="does not accept the token"):
        await server.get(f"/api/v1/nodes/{NODES[0]}", needs="get on nodes")


@pytest.mark.nightly
async def test_taint_of_ours_ends_no_pod_and_starts_no_loop_of_replacements(
    nodes_of_ours: Cluster, tmp_path: Path
) -> None:
    """The Job controller makes one pod for one that is gone, however many nodes are tainted."""
    cluster = nodes_of_ours
    with account(cluster, tmp_path) as server:
        actuator = KubernetesActuator(server, key=KEY, owner="healthd")
        cluster.apply(job_of_two())
        until("both pods run", lambda: len(of_phase(cluster, "Running")) == 2)
        running = of_phase(cluster, "Running")
        try:
            for node in cluster.nodes():
                await actuator.remove(removal(node))
            deleted = min(running)
            cluster.kubectl("delete", "pod", deleted, "-n", NAMESPACE, "--now")
            # The scheduler's word on the replacement comes after all that the taints may have set going.
            until("the replacement finds no node", lambda: no_node(cluster))
            assert of_phase(cluster, "Running") == running - {deleted}
            assert len(of_phase(cluster, "Pending")) == 1
            assert created(cluster) == 3
            await actuator.restore(cluster.nodes()[0])
            until("the replacement runs", lambda: len(of_phase(cluster, "Running")) == 2)
            assert created(cluster) == 3
        finally:
            for node in cluster.nodes():
                await actuator.restore(node)
    assert [own_taints(node) for node in cluster.items("nodes")] == [[]] * len(cluster.nodes())


def job_of_two() -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "localhost/pause:1",
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    spec = {"parallelism": 2, "completions": 2, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "two", "namespace": NAMESPACE}, "spec": spec}


def of_phase(cluster: Cluster, phase: str) -> set[str]:
    return {
        item["metadata"]["name"]
        for item in cluster.items("pods", "-n", NAMESPACE, "-l", "batch.kubernetes.io/job-name=two")
        if item["status"].get("phase") == phase and "deletionTimestamp" not in item["metadata"]
    }


def no_node(cluster: Cluster) -> bool:
    return any(
        condition.get("reason") == "Unschedulable"
        for item in cluster.items("pods", "-n", NAMESPACE)
        for condition in item["status"].get("conditions", ())
    )


def created(cluster: Cluster) -> int:
    """How many pods the Job controller has made."""
    return sum(
        item.get("count") or 1
        for item in cluster.items("events", "-n", NAMESPACE, "--field-selector", "reason=SuccessfulCreate")
    )
