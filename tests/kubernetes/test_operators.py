"""
The examples of deploy/kubernetes/examples with their real operators: admitted and finished; a bad node rejected and
avoided by the next attempt.

What they need of a large machine is taken out: devices, huge pages, their image, the checks that need torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import ROOT, templates
from tests.kubernetes.chart_kit import gating
from tests.kubernetes.jobs_kit import JOBS, node_of
from tests.kubernetes.kit import Cluster, until
from tests.kubernetes.site_kit import Site, installed

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly, pytest.mark.timeout(900)]

SETTINGS = {
    "actuator.enabled": "true",
    "aggregator.settings.HEALTHD_ACTUATOR_MODE": "act",
    "aggregator.settings.HEALTHD_POLICY_TIER": "passive",
    "aggregator.settings.HEALTHD_POLICY_COLLECTIVE": "off",
}
OPERATORS = {
    "jobset": ("jobset",),
    "trainjob": ("jobset", "trainer"),
    "pytorchjob": ("training-operator",),
    "mpijob": ("mpi-operator",),
    "raycluster": ("kuberay",),
}
SECONDS = 150.0
# In the places of programs that the image does not have: `ray start` stays, `mpirun` runs its command as one rank.
RAY = """#!/bin/sh
case "$1" in start) exec sleep infinity ;; esac
"""
INIT = """- name: init-pytorch
  image: {{.InitContainerImage}}
  imagePullPolicy: IfNotPresent
  command: ['sh', '-c', 'true']
"""
MPIRUN = """#!/bin/sh
while [ $# -gt 0 ]; do case "$1" in -np | --map-by) shift 2 ;; *) break ;; esac; done
exec "$@"
"""


class Operated(Site):
    """Without Kueue."""

    def told(self) -> str:
        pods = self.cluster.kubectl("get", "pods,jobs", "-n", JOBS, "-o", "wide")
        events = self.cluster.kubectl("get", "events", "-n", JOBS, "--sort-by=.lastTimestamp")[-3000:]
        logs = self.cluster.kubectl(
            *("logs", "-n", JOBS, "-l", "app", "--all-containers", "--tail=8", "--prefix", "--ignore-errors"),
            wrong=None,
        )
        return pods + events + logs


@pytest.fixture(scope="module", name="fleet")
def _fleet(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    keys = tmp_path_factory.mktemp("operators")
    with gating(cluster, image, JOBS, keys, **SETTINGS):
        made = Operated(cluster, image, keys)
        until("every node has reported", lambda: len(made.ask("/v1/nodes")["nodes"]) == len(cluster.nodes()))
        programs = {"ray": RAY, "mpirun": MPIRUN}
        metadata = {"name": "programs", "namespace": JOBS}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": programs})
        yield made


def small(name: str, image: str, pods: int) -> list[dict[str, Any]]:
    """An example for so many pods of this image, with what a node of the tests has."""
    text = (ROOT / f"deploy/kubernetes/examples/{name}.yaml").read_text(encoding="utf-8")
    for before, after in {
        "/opt/healthd/bin/healthd": "healthd",
        "--execute": "--tier=passive --no-collective" if "exec /opt" in text or "code=$?" in text else "--tier=passive",
        "python train.py": "sleep 3",
        "python, train.py": "sleep, '3'",
        "torchrun, train.py": "sleep, '3'",
        "registry.example.com/train:1": image,
        "--size=4": f"--size={pods}",
        "numNodes: 4": f"numNodes: {pods}",
        "preflight, --,": "preflight, --tier=passive, --no-collective, --,",
    }.items():
        text = text.replace(before, after)
    items = [json.loads(json.dumps(item)) for item in yaml.safe_load_all(text)]  # an alias of YAML is one object
    for item in items:
        item["metadata"]["namespace"] = JOBS
        for template in templates(item["spec"]):
            _shrink(template["spec"])
    return items


def _shrink(pod: dict[str, Any]) -> None:
    pod.pop("tolerations", None)
    pod.setdefault("terminationGracePeriodSeconds", 2)
    pod.setdefault("volumes", []).append({"name": "programs", "configMap": {"name": "programs", "defaultMode": 0o755}})
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        container["imagePullPolicy"] = "IfNotPresent"
        container["resources"] = {"requests": {"cpu": "50m"}}
        container.pop("securityContext", None)
        mounts = container.setdefault("volumeMounts", [])
        mounts += [
            {"name": "programs", "mountPath": f"/usr/local/bin/{one}", "subPath": one} for one in ("ray", "mpirun")
        ]


def no_waiting_for_the_master(cluster: Cluster) -> None:
    """Workers of a PyTorchJob first look the Master up in DNS, by an nslookup that the pause image does not have."""
    metadata = {"name": "init", "namespace": "kubeflow"}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"init.yaml": INIT}})
    pod = "/spec/template/spec"
    option = "--pytorch-init-container-template-file=/init/init.yaml"
    added = {
        f"{pod}/volumes/-": {"name": "init", "configMap": {"name": "init"}},
        f"{pod}/containers/0/volumeMounts/-": {"name": "init", "mountPath": "/init"},
        f"{pod}/containers/0/args/-": option,
    }
    patch = json.dumps([{"op": "add", "path": path, "value": value} for path, value in added.items()])
    operator = ("deployment", "training-operator", "-n", "kubeflow")
    cluster.kubectl("patch", *operator, "--type=json", "-p", patch)
    cluster.kubectl("rollout", "status", *operator, "--timeout=120s")


@contextmanager
def running(fleet: Site, name: str, pods: int) -> Iterator[list[dict[str, Any]]]:
    """The objects of an example in the cluster; gone at the end."""
    items = sized(name, small(name, fleet.image, pods), pods)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    until("the operator's webhook answers", lambda: "rror" not in apply(fleet, text), told=lambda: apply(fleet, text))
    try:
        yield items
    finally:
        fleet.cluster.kubectl("delete", "-f", "-", "--ignore-not-found", "--timeout=120s", text=text)
        until("no pod is left", lambda: not fleet.cluster.items("pods", "-n", JOBS), SECONDS, told=fleet.told)
        fleet.free()


def apply(fleet: Site, text: str) -> str:
    return fleet.cluster.kubectl("apply", "-f", "-", text=text, wrong=None)


def sized(name: str, items: list[dict[str, Any]], pods: int) -> list[dict[str, Any]]:
    """So many pods, where a number says it."""
    spec = items[0]["spec"]
    if name == "pytorchjob":
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] = pods - 1
        spec["runPolicy"]["cleanPodPolicy"] = "None"
    if name == "raycluster":
        spec["workerGroupSpecs"][0] |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), pods)
    if name == "mpijob":
        spec["mpiReplicaSpecs"]["Worker"]["replicas"] = pods
        (worker,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        worker["command"] = ["sleep", "infinity"]  # for sshd
    if name == "jobset":
        (workers,) = spec["replicatedJobs"]
        workers["replicas"] = pods
        workers["template"]["spec"] |= {"completions": 1, "parallelism": 1}
        (gate,) = workers["template"]["spec"]["template"]["spec"]["initContainers"]
        gate["args"] = [gate["args"][0].replace("JOB_INDEX*2", "JOB_INDEX*1")]
    return items


def finished(fleet: Site, item: dict[str, Any]) -> str:
    """How an object has ended, by its conditions; empty while it has not. A RayCluster is done once it is up."""
    name, kind = item["metadata"]["name"], item["kind"].lower()
    status = fleet.cluster.get(kind, name, "-n", JOBS).get("status", {})
    kinds = {one["type"] for one in status.get("conditions", ()) if one["status"] == "True"}
    return next((one for one in ("Complete", "Completed", "Succeeded", "Failed") if one in kinds), "")


def job_of(items: list[dict[str, Any]]) -> dict[str, Any]:
    return items[-1]


@pytest.mark.parametrize("name", ["jobset", "trainjob", "pytorchjob"])
def test_example_is_admitted_finishes_and_avoids_a_bad_node(fleet: Site, name: str) -> None:
    with installed(fleet.cluster, *OPERATORS[name]):
        if name == "pytorchjob":
            no_waiting_for_the_master(fleet.cluster)
        with running(fleet, name, 3) as items:
            began = time.time()
            ended = until(f"{name} ends", lambda: finished(fleet, job_of(items)), SECONDS, told=fleet.told)
            print(f"{name}: {ended} after {time.time() - began:.0f} s")
            assert ended in ("Complete", "Completed", "Succeeded"), fleet.told()
            gates = [one for one in fleet.gates() if one["decision"] == "admit"]
            assert gates, fleet.gates()
            fleet.free()
        fleet.fault("node-2")
        try:
            with running(fleet, name, 2) as items:
                ended = until(f"{name} ends", lambda: finished(fleet, job_of(items)), SECONDS, told=fleet.told)
                assert ended in ("Complete", "Completed", "Succeeded"), fleet.told()
                done = [one for one in fleet.cluster.items("pods", "-n", JOBS) if one["status"]["phase"] == "Succeeded"]
                assert "node-2" not in {node_of(one) for one in done}
        finally:
            fleet.healthy()


def test_ray_workers_come_up_on_good_nodes_alone(fleet: Site) -> None:
    with installed(fleet.cluster, *OPERATORS["raycluster"]):
        fleet.fault("node-2")
        try:
            with running(fleet, "raycluster", 2):

                def up() -> set[str]:
                    items = fleet.cluster.items("pods", "-n", JOBS, "-l", "ray.io/node-type=worker")
                    running = [one for one in items if one["status"]["phase"] == "Running"]
                    return {node_of(one) for one in running} if len(running) == 2 else set()

                assert until("two workers run", up, SECONDS, told=fleet.told) == {"node-1", "node-3"}
        finally:
            fleet.healthy()


def test_launcher_of_an_mpijob_that_is_sent_away_is_started_again(fleet: Site) -> None:
    """`mpirun` is a stand-in that runs the preflight as one rank: what is tested is the operator."""
    with installed(fleet.cluster, *OPERATORS["mpijob"]), running(fleet, "mpijob", 2) as items:
        ended = until("the MPIJob ends", lambda: finished(fleet, job_of(items)), SECONDS, told=fleet.told)
        assert ended == "Succeeded", fleet.told()
