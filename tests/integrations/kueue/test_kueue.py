"""`healthd kueue` on a real API server with Kueue's own definitions, and a real aggregator with real node daemons."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.clients.kubernetes import ApiServer
from tests.aggregator.cluster import AGGREGATOR, HEALTHD
from tests.aggregator.cluster import Cluster as Fleet
from tests.aggregator.service import Service
from tests.deploy.manifests import ROOT
from tests.integrations.kueue import player
from tests.integrations.kueue.kueue_kit import BASE, Kueue, kueue
from tests.kubernetes.kit import Cluster, until

pytestmark = pytest.mark.kubernetes

NODES = ("n1", "n2")
GATE = "healthd.internal/gate"
# One processor for all ranks of a test: the nodes are daemons of this machine, without torch.
CONFIG = AGGREGATOR.replace("[policy]", '[policy]\ncollective = false\nmode = "enforce"')


@pytest.fixture(scope="module", name="installed")
def _installed(oldest: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    with kueue(oldest, tmp_path_factory.mktemp("kueue"), NODES) as found:
        yield found


@pytest.fixture
def queues(installed: Kueue) -> Iterator[Kueue]:
    yield dataclasses.replace(installed, holding=set(), taken=[])
    installed.empty()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    folder = tmp_path / "fleet"
    folder.mkdir()
    with Fleet(folder) as made:
        made.fleet(*NODES, config=CONFIG)
        yield made


def controller(fleet: Fleet, queues: Kueue) -> Service:
    """The description of `healthd kueue`; `start` it."""
    command = [*HEALTHD, "kueue", "--aggregator", fleet.services["aggregator"].url, "--api-server", queues.url]
    env = {**fleet.env, "HEALTHD_KUEUE_SERVICE_ACCOUNT": str(queues.account)}
    pattern = r"Workloads of Kueue are gated by aggregator (\S+)"
    service = Service("kueue", command, folder=fleet.folder, env=env, pattern=pattern)
    fleet.services["kueue"] = service
    assert sys.executable in command
    return service


def make_check(queues: Kueue, **annotations: str) -> None:
    named = {f"healthd.internal/{key}": text for key, text in annotations.items()}
    metadata = {"name": "healthd", "annotations": named}
    queues.create(
        f"{BASE}/admissionchecks", {"kind": "AdmissionCheck", "metadata": metadata, "spec": {"controllerName": GATE}}
    )


def active(queues: Kueue) -> dict[str, Any]:
    """The condition Active of the AdmissionCheck; empty where it has none."""
    return player.condition(queues.get(f"{BASE}/admissionchecks/healthd"), "Active")


def labelled(queues: Kueue) -> dict[str, str]:
    nodes = queues.get("/api/v1/nodes")["items"]
    return {
        one["metadata"]["name"]: one["metadata"]["labels"][GATE] for one in nodes if GATE in one["metadata"]["labels"]
    }


def leased(fleet: Fleet) -> list[str]:
    found = fleet.services["aggregator"].get("/v1/claims", params={"workload": "kueue:"}).json()
    return sorted(node for claim in found["claims"] for node in claim["nodes"])


def test_a_workload_with_quota_is_admitted_with_the_nodes_that_were_checked(queues: Kueue, fleet: Fleet) -> None:
    make_check(queues)
    controller(fleet, queues).start()
    until("the check is active", lambda: active(queues).get("status") == "True", told=fleet.services["kueue"].said)
    queues.submit("train", count=2)
    found = queues.admitted("train")
    state = player.check_of(found)
    gate = state["podSetUpdates"][0]["nodeSelector"][GATE]
    assert state["state"] == "Ready"
    assert gate in state["message"]
    assert labelled(queues) == dict.fromkeys(NODES, gate)
    assert leased(fleet) == list(NODES)
    assert not player.conflict(found)

    queues.submit("next", count=1)
    queues.quota = 2
    queues.wait("next", "says what it waits for", lambda _: "in use by other jobs" in queues.state("next")["message"])
    queues.change("train", lambda after: player.finished(after, 0))
    queues.admitted("next")
    queues.delete("next")
    until("nothing is held", lambda: not leased(fleet) and not labelled(queues), told=fleet.services["kueue"].said)


def test_a_bad_node_is_a_retry_with_its_sentence_and_the_next_time_is_another_question(
    queues: Kueue, fleet: Fleet
) -> None:
    make_check(queues, wait="30s")
    controller(fleet, queues).start()
    quarantine(fleet, "n2")
    queues.holding = {"evict for Retry"}
    queues.submit("train", count=2)
    found = queues.wait("train", "is to be tried again", lambda one: player.check_of(one).get("state") == "Retry")
    first = player.check_of(found)
    assert "n2" in first["message"]
    assert first["requeueAfterSeconds"] == 5
    assert leased(fleet) == []

    release(fleet, "n2")
    found = queues.admitted("train")
    assert "retryCount" not in player.check_of(found), "a Retry that Kueue has not acted on is taken back"
    assert sorted(labelled(queues)) == list(NODES)


@pytest.mark.nightly
def test_what_is_impossible_is_deactivated_and_a_running_job_evicted_where_the_check_says_so(
    queues: Kueue, fleet: Fleet
) -> None:
    make_check(queues, **{"after-admission": "retry"})
    controller(fleet, queues).start()
    queues.submit("huge", count=3)
    found = queues.wait("huge", "is deactivated", lambda one: not one["spec"]["active"] and not queues.step())
    assert "pool a has 2 nodes, 3 were requested" in str(found["status"]) or "Previously: Rejected" in str(
        found["status"]
    )

    queues.submit("train", count=1)
    queues.ahead_seconds = 6.0
    found = queues.admitted("train")
    ((before, gate),) = labelled(queues).items()
    pod = {"nodeName": before, "containers": [{"name": "train", "image": "registry.example.com/train:1"}]}
    metadata = {"name": "train", "namespace": "default", "labels": {GATE: gate}}
    queues.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
    quarantine(fleet, before)
    queues.wait("train", "is evicted", lambda one: player.check_of(one).get("retryCount") == 1)
    queues.cluster.kubectl("delete", "pod", "train", "-n", "default", "--grace-period=0", "--force")
    queues.admitted("train")
    (after,) = labelled(queues)
    assert after != before
    assert leased(fleet) == [after]


def test_the_controller_is_killed_at_every_step_and_what_it_missed_is_done_at_its_start(
    queues: Kueue, fleet: Fleet
) -> None:
    make_check(queues)
    service = controller(fleet, queues)
    queues.submit("train", count=2)
    for _ in range(20):
        service.start()
        state = queues.state("train")
        if player.holds(queues.workload("train"), "QuotaReserved") and state.get("state") != "Ready":
            until("the gate admits", lambda: queues.state("train").get("state") == "Ready", told=service.said)
        service.kill()
        if not queues.step():
            break
    found = queues.workload("train")
    assert player.holds(found, "Admitted"), (found, queues.taken)
    gate = player.check_of(found)["podSetUpdates"][0]["nodeSelector"][GATE]
    assert labelled(queues) == dict.fromkeys(NODES, gate)
    assert leased(fleet) == list(NODES)

    service.start()
    until("it has looked", lambda: active(queues).get("status") == "True")
    assert leased(fleet) == list(NODES), "a job that runs keeps its nodes"
    service.kill()
    queues.delete("train")
    service.start()
    until("nothing is held", lambda: not leased(fleet) and not labelled(queues), told=service.said)


@pytest.mark.nightly
def test_without_the_aggregator_kueue_is_told_to_reserve_nothing_and_nobody_is_admitted(
    queues: Kueue, fleet: Fleet
) -> None:
    make_check(queues)
    aggregator = fleet.services["aggregator"]
    service = controller(fleet, queues).start()
    until("the check is active", lambda: active(queues).get("status") == "True", told=service.said)
    aggregator.kill()
    queues.submit("train", count=2)
    until("the check is not active", lambda: active(queues).get("reason") == "AggregatorUnreachable", told=service.said)
    queues.wait("train", "has quota", lambda one: player.holds(one, "QuotaReserved"))
    assert queues.state("train")["state"] == "Pending"
    aggregator.start()
    queues.admitted("train")
    until("the check is active again", lambda: active(queues).get("status") == "True", told=service.said)

    patch = {"metadata": {"annotations": {"healthd.internal/tier": "best"}}}
    queues.cluster.kubectl(
        "patch", "admissionchecks.kueue.x-k8s.io", "healthd", "--type=merge", "-p", json.dumps(patch)
    )
    until("the slip is named", lambda: active(queues).get("reason") == "BadAnnotation", told=service.said)
    assert "'best'" in active(queues)["message"]


def test_the_example_is_taken_by_the_definitions(queues: Kueue) -> None:
    example = ROOT / "deploy/kubernetes/examples/kueue.yaml"
    dry = ("apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f")
    queues.cluster.kubectl(*dry, example)
    wrong = example.read_text().replace("controllerName", "controller")
    assert "controller" in queues.cluster.kubectl(*dry, "-", text=wrong, wrong=True)


async def test_a_long_list_comes_in_pages_and_is_watched_from_there(queues: Kueue) -> None:
    for name in ("a", "b", "c"):
        queues.submit(name)
    server, listed = ApiServer(url=queues.url, service_account=queues.account), []
    told = server.follow(f"{BASE}/workloads", {"limit": "1"}, seconds=30, needs="list and watch on workloads")
    async with contextlib.aclosing(told) as answers:
        async for answer in answers:
            listed += [one["metadata"]["name"] for one in answer.get("items", ())]
            if "items" in answer and not answer["metadata"].get("continue"):
                assert listed == ["a", "b", "c"]
                queues.submit("d")
            if "items" not in answer:
                assert (answer["type"], answer["object"]["metadata"]["name"]) == ("ADDED", "d")
                break


def quarantine(fleet: Fleet, node: str) -> None:
    url = f"{fleet.services['aggregator'].url}/v1/nodes/{node}/quarantine"
    body = {"reason": "link flaps", "owner": "somebody"}
    assert httpx.put(url, json=body, trust_env=False).status_code == 200


def release(fleet: Fleet, node: str) -> None:
    url = f"{fleet.services['aggregator'].url}/v1/nodes/{node}/quarantine"
    assert httpx.delete(url, trust_env=False).status_code == 200
