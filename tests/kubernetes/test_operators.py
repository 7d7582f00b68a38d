"""
The examples of deploy/kubernetes/examples with their real operators: admitted and finished; a bad node rejected, and
the job retried elsewhere; a job that fails by itself.

What they need of a large machine is taken out: devices, huge pages, their image, the checks that need torch. Ray is a
stand-in. Open MPI is real, the machine's own, with a stand-in for sshd.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import ROOT, templates
from tests.fakes import remote_shell
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
OPERATORS = ("jobset", "trainer", "mpi-operator", "kuberay")
"""Beside the training operator, which defines MPIJob too, as mpi-operator does: its test is the first here."""
SECONDS = 150.0
TRAINS, FAILS = "sleep 3", "exit 3"
RAY = """#!/bin/sh
[ "$1" = start ] || exit 0
while [ ! -e /tmp/crash ]; do sleep 1; done
exit 1
"""
INIT = """- name: init-pytorch
  image: {{.InitContainerImage}}
  imagePullPolicy: IfNotPresent
  command: ['sh', '-c', 'true']
"""
# The rank on the bad node finds a fault.
PREFLIGHT = """#!/bin/sh
[ "$NODE_NAME" != "${BAD_NODE:-none}" ] || set -- --fault=memory_free=fail "$@"
exec healthd preflight --tier=passive --no-collective "$@"
"""
OPEN_MPI = ("/usr/bin", "/usr/lib", "/usr/share")


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


@pytest.fixture(scope="module", name="site")
def _site(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    keys = tmp_path_factory.mktemp("operators")
    with gating(cluster, image, JOBS, keys, **SETTINGS):
        made = Operated(cluster, image, keys)
        until("every node has reported", lambda: len(made.ask("/v1/nodes")["nodes"]) == len(cluster.nodes()))
        server = f"#!/opt/healthd/bin/python\n{Path(remote_shell.__file__).read_text(encoding='utf-8')}"
        programs = {"ray": RAY, "ssh": server, "preflight": PREFLIGHT}
        metadata = {"name": "programs", "namespace": JOBS}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": programs})
        yield made


@pytest.fixture(scope="module", name="fleet")
def _fleet(site: Site) -> Iterator[Site]:
    """The site with the operators that can be there together."""
    with installed(site.cluster, *OPERATORS):
        yield site


def small(name: str, image: str, pods: int, command: str) -> list[dict[str, Any]]:
    """An example for so many pods of this image that run a command of the shell, with what a node of the tests has."""
    text = (ROOT / f"deploy/kubernetes/examples/{name}.yaml").read_text(encoding="utf-8")
    checks = "--tier=passive --no-collective" if "exec /opt" in text or "code=$?" in text else "--tier=passive"
    for before, after in {
        "/opt/healthd/bin/healthd, preflight": "/programs/preflight",
        "/opt/healthd/bin/healthd": "healthd",
        "--execute": checks,
        "python train.py": f"sh -c '{command}'",
        "python, train.py": f"sh, -c, {command}",
        "torchrun, train.py": f"sh, -c, {command}",
        "registry.example.com/train:1": image,
        "--size=4": f"--size={pods}",
        "numNodes: 4": f"numNodes: {pods}",
        "maxRestarts: 3": "maxRestarts: 1",
        "backoffLimit: 6": "backoffLimit: 1",
        "mpirun,": "mpirun.openmpi,",
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
        container.setdefault("volumeMounts", []).append({"name": "programs", "mountPath": "/programs"})


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


def example(fleet: Site, name: str, pods: int, command: str = TRAINS) -> list[dict[str, Any]]:
    """The objects of an example; the last is the job."""
    return sized(name, small(name, fleet.image, pods, command), pods)


@contextmanager
def running(fleet: Site, items: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The objects in the cluster; gone at the end."""
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
    """So many pods, where a number says it; and what the stand-ins need."""
    spec = items[0]["spec"]
    if name == "pytorchjob":
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] = pods - 1
        spec["runPolicy"]["cleanPodPolicy"] = "None"
    if name == "raycluster":
        spec["workerGroupSpecs"][0] |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), pods)
        for template in templates(spec):
            (container,) = template["spec"]["containers"]
            mount = {"name": "programs", "mountPath": "/usr/local/bin/ray", "subPath": "ray"}  # a login shell sets PATH
            container["volumeMounts"].append(mount)
    if name == "mpijob":
        spec["mpiReplicaSpecs"]["Worker"]["replicas"] = pods
        for template in templates(spec):
            open_mpi(template["spec"])
        (worker,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        worker["command"] = ["/programs/ssh", "serve"]
    if name == "jobset":
        (workers,) = spec["replicatedJobs"]
        workers["replicas"] = pods
        workers["template"]["spec"] |= {"completions": 1, "parallelism": 1}
        (gate,) = workers["template"]["spec"]["template"]["spec"]["initContainers"]
        gate["args"] = [gate["args"][0].replace("JOB_INDEX*2", "JOB_INDEX*1")]
    return items


def open_mpi(pod: dict[str, Any]) -> None:
    """This machine's Open MPI in a pod, with all that it is linked with."""
    (container,) = pod["containers"]
    for path in OPEN_MPI:
        name = path[1:].replace("/", "-")
        pod["volumes"].append({"name": name, "hostPath": {"path": path}})
        container["volumeMounts"].append({"name": name, "mountPath": path, "readOnly": True})
    container.setdefault("env", []).append({"name": "OMPI_MCA_plm_rsh_agent", "value": "/programs/ssh"})


def state(fleet: Site, item: dict[str, Any]) -> str:
    """How an object has ended, by its conditions; empty while it has not."""
    name, kind = item["metadata"]["name"], item["kind"].lower()
    status = fleet.cluster.get(kind, name, "-n", JOBS).get("status", {})
    kinds = {one["type"] for one in status.get("conditions", ()) if one["status"] == "True"}
    return next((one for one in ("Complete", "Completed", "Succeeded", "Failed") if one in kinds), "")


def ended(fleet: Site, items: list[dict[str, Any]], *expected: str) -> None:
    """The job, which is the last of its objects, ends like this."""
    job, began = items[-1], time.time()
    assert until(f"{job['kind']} ends", lambda: state(fleet, job), SECONDS, told=fleet.told) in expected, fleet.told()
    print(f"{job['kind']}: {expected[0]} after {time.time() - began:.0f} s")


def completed(fleet: Site, items: list[dict[str, Any]]) -> None:
    ended(fleet, items, "Complete", "Completed", "Succeeded")


def decided(fleet: Site, decision: str, of: str) -> list[dict[str, Any]]:
    return [one for one in fleet.gates() if one["decision"] == decision and one["job"].startswith(f"{JOBS}/{of}")]


def in_phase(fleet: Site, phase: str, *selector: str) -> set[str]:
    """The nodes of pods in this phase."""
    items = fleet.cluster.items("pods", "-n", JOBS, *selector)
    return {node_of(one) for one in items if one["status"]["phase"] == phase}


@contextmanager
def bad_node(fleet: Site, of: str) -> Iterator[None]:
    """
    node-2 is bad, and node-3 is closed until a gate has rejected node-2: so that a pod is there at first.

    In the block the job has been made; after it, it goes on.
    """
    fleet.cluster.kubectl("cordon", "node-3")
    try:
        fleet.fault("node-2")
        before = len(decided(fleet, "reject", of))
        yield
        until("node-2 is rejected", lambda: len(decided(fleet, "reject", of)) > before, SECONDS, told=fleet.told)
    finally:
        fleet.cluster.kubectl("uncordon", "node-3")


def one_gate(fleet: Site, name: str, job: str, restarts: int) -> None:
    """A job whose pods all ask one gate is admitted and finishes, avoids a bad node, and fails by itself."""
    with running(fleet, example(fleet, name, 3)) as items:
        completed(fleet, items)
        assert len(decided(fleet, "admit", job)) == 1

    with ExitStack() as stack:
        stack.callback(fleet.healthy)
        with bad_node(fleet, job):
            items = stack.enter_context(running(fleet, example(fleet, name, 2)))
        completed(fleet, items)
        assert in_phase(fleet, "Succeeded") == {"node-1", "node-3"}

    admitted = len(decided(fleet, "admit", job))
    with running(fleet, example(fleet, name, 2, FAILS)) as items:
        ended(fleet, items, "Failed")
        assert len(decided(fleet, "admit", job)) - admitted == 1 + restarts, fleet.gates()


def test_pytorchjob(site: Site) -> None:
    """The operator restarts nothing that ends with a code below 128."""
    with installed(site.cluster, "training-operator"):
        no_waiting_for_the_master(site.cluster)
        one_gate(site, "pytorchjob", "train-pytorch", restarts=0)


@pytest.mark.parametrize(("name", "job"), [("jobset", "train-jobset"), ("trainjob", "train-torch")])
def test_jobset_and_trainjob(fleet: Site, name: str, job: str) -> None:
    """A restart of the JobSet asks its gate again."""
    one_gate(fleet, name, job, restarts=1)


def test_raycluster(fleet: Site) -> None:
    """Workers come up on good nodes alone; one that crashes comes again through its gate."""
    selector = ("-l", "ray.io/node-type=worker")
    with ExitStack() as stack:
        stack.callback(fleet.healthy)
        with bad_node(fleet, "train-ray"):
            stack.enter_context(running(fleet, example(fleet, "raycluster", 2)))
        good = {"node-1", "node-3"}
        until("two workers run", lambda: in_phase(fleet, "Running", *selector) == good, SECONDS, told=fleet.told)
        admitted = len(decided(fleet, "admit", "train-ray"))
        first = fleet.cluster.items("pods", "-n", JOBS, *selector)[0]["metadata"]["name"]
        fleet.cluster.kubectl("exec", first, "-n", JOBS, "-c", "ray-worker", "--", "touch", "/tmp/crash")

        def again() -> bool:
            return (
                in_phase(fleet, "Running", *selector) == good and len(decided(fleet, "admit", "train-ray")) > admitted
            )

        until("the worker is made again", again, SECONDS, told=fleet.told)


@pytest.mark.system("mpirun", "orted")
def test_mpijob(fleet: Site) -> None:
    """Real mpirun, and real ranks on workers that stay where they are until somebody deletes their pods."""
    if not Path("/usr/bin/python3.11").exists():
        pytest.skip("this machine's Open MPI goes into pods whose image is a Debian 12: needs Debian 12")
    cluster, launchers = fleet.cluster, ("-l", "training.kubeflow.org/job-role=launcher")
    with running(fleet, example(fleet, "mpijob", 2)) as items:
        completed(fleet, items)

    made = example(fleet, "mpijob", 2)
    made[0]["spec"]["runPolicy"]["backoffLimit"] = 6
    (worker,) = made[0]["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    worker["env"] += [node, {"name": "BAD_NODE", "value": "node-2"}]
    cluster.kubectl("cordon", "node-3")
    try:
        with running(fleet, made) as items:
            until("a launcher fails", lambda: in_phase(fleet, "Failed", *launchers), SECONDS, told=fleet.told)
            cluster.kubectl("uncordon", "node-3")
            cluster.kubectl("cordon", "node-2")
            there = ("-l", "training.kubeflow.org/job-role=worker", "--field-selector", "spec.nodeName=node-2")
            cluster.kubectl("delete", "pods", "-n", JOBS, *there)
            completed(fleet, items)
    finally:
        cluster.kubectl("uncordon", "node-2", "node-3")

    with running(fleet, example(fleet, "mpijob", 2, FAILS)) as items:
        ended(fleet, items, "Failed")
        assert len(cluster.items("pods", "-n", JOBS, *launchers)) == 2
