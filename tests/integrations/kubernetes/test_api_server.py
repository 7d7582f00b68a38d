"""What the real API server does to clients of ours: it refuses for load, forgets versions, and goes away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from healthd.aggregator.drain.controller import DrainController
from healthd.aggregator.drain.settings import ActuatorSettings
from healthd.clients.kubernetes import ApiServer, KubernetesError, pods_path
from healthd.core.tasks import Tasks
from healthd.core.workload import Pod
from healthd.integrations.kubernetes.actuator import KubernetesActuator
from healthd.integrations.kubernetes.condition_writer import ConditionWriter
from healthd.integrations.kubernetes.pods import PodWatch
from healthd.integrations.kubernetes.settings import KubernetesSettings
from healthd.node.clock import system_clock
from healthd.node.settings import AllocationSettings
from healthd.node.state.store import NodeStore
from tests.aggregator.actuators_kit import fleet_of, kept, suspect
from tests.kubernetes.kit import CONDITION, KEY, Cluster, answers, until
from tests.kubernetes.writers_kit import NAMESPACE, account, calls
from tests.node.node_kit import BOOT, eventually, settings, specs
from tests.patience import PATIENCE

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

NODE = "api-server-1"


@pytest.fixture
def server(oldest: Cluster, tmp_path: Path) -> Iterator[ApiServer]:
    with account(oldest, tmp_path) as made:
        oldest.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        yield made
        oldest.kubectl("delete", "node", NODE)


@asynccontextmanager
async def nothing_let_through(cluster: Cluster, server: ApiServer) -> AsyncIterator[None]:
    """
    API priority and fairness has one seat for the account of the tests, no queue, and somebody on the seat.

    A level without a seat lets single calls through. The call on the seat waits for a webhook that never answers.
    """
    flow, hooks = "flowcontrol.apiserver.k8s.io/v1", "admissionregistration.k8s.io/v1"
    none = {"nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0}
    level = {"type": "Limited", "limited": {**none, "limitResponse": {"type": "Reject"}}}
    subject = {"kind": "ServiceAccount", "serviceAccount": {"name": "writer", "namespace": NAMESPACE}}
    every = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": True}
    schema = {
        "priorityLevelConfiguration": {"name": NAMESPACE},
        "matchingPrecedence": 2,
        "rules": [{"subjects": [subject], "resourceRules": [every]}],
    }
    events = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["events"]}
    named = {"name": NAMESPACE}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        webhook = {
            "name": "silent.tests.internal",
            "clientConfig": {"url": f"https://127.0.0.1:{silent.getsockname()[1]}/"},
            "rules": [events],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}},
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "timeoutSeconds": 30,
            "failurePolicy": "Ignore",
        }
        cluster.apply(
            {"apiVersion": flow, "kind": "PriorityLevelConfiguration", "metadata": named, "spec": level},
            {"apiVersion": flow, "kind": "FlowSchema", "metadata": named, "spec": schema},
            {
                "apiVersion": hooks,
                "kind": "ValidatingWebhookConfiguration",
                "metadata": named,
                "webhooks": [webhook],
            },
        )
        sitting = asyncio.create_task(sit(server))
        try:
            yield
        finally:
            sitting.cancel()
            await asyncio.gather(sitting, return_exceptions=True)
            kinds = "flowschema,prioritylevelconfiguration,validatingwebhookconfiguration"
            cluster.kubectl("delete", kinds, NAMESPACE)


async def sit(server: ApiServer) -> None:
    """One call after the other that takes half a minute, as soon as the webhook is known."""
    path = f"/api/v1/namespaces/{NAMESPACE}/events"
    of = {"kind": "Namespace", "name": NAMESPACE, "namespace": NAMESPACE}
    body = {"metadata": {"generateName": "seat."}, "involvedObject": of, "reason": "Seat", "type": "Normal"}
    while True:
        with suppress(KubernetesError):  # its client gives up before the server does, which goes on
            await server.create(path, body, needs="create on events")
        await asyncio.sleep(0.2)


async def refusal(server: ApiServer) -> KubernetesError:
    """The error of a call, once the server knows its new configuration."""
    async with asyncio.timeout(30 * PATIENCE):
        while True:
            try:
                await server.get(f"/api/v1/nodes/{NODE}", needs="get on nodes")
            except KubernetesError as error:
                return error
            await asyncio.sleep(0.2)


async def test_what_priority_and_fairness_refuses_is_written_later_and_asked_seldom_meanwhile(
    oldest: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    async def note(_node: str, _kind: str, _message: str) -> None:
        return

    drain = DrainController(
        KubernetesActuator(server, key=KEY, owner="healthd"),
        ActuatorSettings(kind="kubernetes", mode="act"),
        look=lambda _: fleet_of(suspect(NODE, kept(since=time.time()))),
        note=note,
    )
    book = NodeStore(settings(tmp_path / "node"), specs(), clock=system_clock(), boot_id=BOOT)
    writer = ConditionWriter(book, KubernetesSettings(condition=CONDITION, node=NODE), server, clock=system_clock())
    tasks = []
    try:
        async with nothing_let_through(oldest, server):
            error = await refusal(server)
            assert error.status == 429
            assert error.retry_after_seconds
            began = time.monotonic()
            tasks = [asyncio.create_task(drain.run()), asyncio.create_task(writer.run())]
            await eventually(lambda: sum(drain.failures.values()) >= 4, 30.0)
            assert time.monotonic() - began > 4.0, "it pauses for 1, 2 and 4 s"
        await eventually(lambda: tainted(oldest) and NODE in oldest.conditions(), 60.0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tainted(cluster: Cluster) -> bool:
    return KEY in {taint["key"] for taint in cluster.get("node", NODE)["spec"].get("taints", ())}


def compact(cluster: Cluster) -> None:
    """etcd forgets every version but the last."""
    assert cluster.folder is not None
    server = Path("/proc", (cluster.folder / "kube-apiserver.pid").read_text().strip(), "cmdline").read_text()
    etcd = next(word for word in server.split("\0") if word.startswith("--etcd-servers=")).partition("=")[2]

    def ask(path: str, **body: object) -> dict[str, dict[str, str]]:
        request = urllib.request.Request(f"{etcd}{path}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, dict[str, str]] = json.load(answer)
        return found

    revision = ask("/v3/maintenance/status")["header"]["revision"]
    ask("/v3/kv/compaction", revision=revision, physical=True)


async def test_end_of_a_pod_is_seen_by_a_watch_whose_versions_etcd_has_forgotten(
    oldest: Cluster, server: ApiServer
) -> None:
    """The server goes away under the watch and comes again with nothing of before."""
    container = {"name": "main", "image": "localhost/pause:1"}
    meta = {"name": "train-0", "namespace": NAMESPACE}
    until("accounts are made", lambda: "default" in oldest.kubectl("get", "serviceaccounts", "-n", NAMESPACE))
    oldest.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [container]}})
    made = oldest.get("pod", "train-0", "-n", NAMESPACE)["metadata"]
    pod = Pod(namespace=NAMESPACE, name="train-0", uid=made["uid"])
    tasks = Tasks()
    watch = PodWatch(server, None, AllocationSettings(read=False), tasks=tasks, look_seconds=1.0)
    watch.follow((pod,))
    running = asyncio.create_task(watch.run())
    try:
        await eventually(lambda: seen(watch, pod) is True, 30.0)
        before = calls(oldest)
        with oldest.down("kube-apiserver"):
            await eventually(lambda: seen(watch, pod) is None, 30.0)
        until("the API server answers", lambda: answers(oldest))
        oldest.kubectl("label", "pod", "train-0", "-n", NAMESPACE, "tests=again")
        compact(oldest)
        first = "watch=1&timeoutSeconds=5&resourceVersion=1"
        assert '"code":410' in oldest.kubectl("get", "--raw", f"{pods_path(NAMESPACE)}?{first}")
        oldest.kubectl("delete", "pod", "train-0", "-n", NAMESPACE, "--grace-period=0", "--force")
        await eventually(lambda: seen(watch, pod) is False, 60.0)
        assert calls(oldest) - before < 20
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await tasks.stop(5.0)


def seen(watch: PodWatch, pod: Pod) -> bool | None:
    """Whether the pod is there by the API server's word; None: it does not answer."""
    look = watch.looks.get(pod.full_name)
    if look is None or not look.api_answers:
        return None
    return look.api is not None
