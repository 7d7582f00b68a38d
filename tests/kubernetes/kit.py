"""A cluster as tests use it: kubectl, Helm, waiting, the Secrets of the guide, and the image of this working tree."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

import healthd
from healthd.clients.kubernetes import ApiServer
from tests.deploy.manifests import ROOT
from tests.kubernetes.cluster import VARIABLE
from tests.patience import PATIENCE

HELM = Path(sys.executable).parent / "helm"
CHART = ROOT / "deploy/helm/healthd"
REPOSITORY = "localhost/healthd"
IMAGE = f"{REPOSITORY}:{healthd.__version__}"
TORCH_REPOSITORY = f"{REPOSITORY}-torch"
TORCH_IMAGE = f"{TORCH_REPOSITORY}:{healthd.__version__}"
SYSTEM = "healthd-system"
CONDITION = "healthd.internal/Fit"
KEY = "healthd.internal/removed"
# Not in memory: containerd keeps images and containers there.
PLACE = Path(os.environ.get("TMPDIR", "/var/tmp"))
# A call, and what has to come about in a cluster: pods are scheduled, started, probed.
CALL_SECONDS = 120.0
SECONDS = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """
    A cluster that answers, and whether its nodes are ours to do with as we like.

    `folder` is that of tests/kubernetes/cluster.py, None for a cluster that somebody has.
    """

    kubeconfig: Path
    folder: Path | None
    program: str

    @property
    def ours(self) -> bool:
        return self.folder is not None

    def kubectl(self, *words: str | Path, text: str | None = None, wrong: bool | None = False) -> str:
        """What it prints; with `wrong` it has to fail, and what it prints on stderr. None: either."""
        return self._run([self.program, *words], text, wrong)

    def helm(self, *words: str | Path, wrong: bool = False) -> str:
        return self._run([str(HELM), *words], None, wrong)

    def _run(self, line: list[str | Path], text: str | None, wrong: bool | None) -> str:
        done = subprocess.run(
            [str(word) for word in line],
            input=text,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS * PATIENCE,
            check=False,
            env=self.environ,
            cwd=ROOT,
        )
        told = " ".join(str(word) for word in line)
        failed = done.returncode != 0
        assert wrong in (failed, None), f"{told}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stderr if failed else done.stdout

    @property
    def environ(self) -> dict[str, str]:
        """The environment of an administrator of this cluster."""
        path = f"{Path(self.program).parent}:{HELM.parent}:{os.environ['PATH']}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def get(self, *words: str) -> dict[str, Any]:
        """An object, or a List of them."""
        made: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return made

    def items(self, *words: str) -> list[dict[str, Any]]:
        return list(self.get(*words)["items"])

    def apply(self, *items: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))

    def nodes(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.items("nodes")]

    def address(self, node: str) -> str:
        """Where other machines reach a node."""
        addresses = self.get("node", node)["status"]["addresses"]
        return str(next(one["address"] for one in addresses if one["type"] == "InternalIP"))

    def conditions(self) -> dict[str, str]:
        """What each node's own condition says, of the nodes that have it."""
        return {
            item["metadata"]["name"]: one["status"]
            for item in self.items("nodes")
            for one in item["status"].get("conditions", ())
            if one["type"] == CONDITION
        }

    def pods(self, namespace: str, selector: str) -> list[str]:
        """Names of pods that are not on their way out."""
        return [
            item["metadata"]["name"]
            for item in self.items("pods", "-n", namespace, "-l", selector)
            if "deletionTimestamp" not in item["metadata"]
        ]

    def version(self) -> str:
        return str(json.loads(self.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"])

    @contextmanager
    def forward(self, service: str, port: int, namespace: str = SYSTEM) -> Iterator[int]:
        """A port of this machine that leads to a service's."""
        line = [self.program, "port-forward", "-n", namespace, f"service/{service}", f":{port}"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=self.environ) as process:
            try:
                assert process.stdout is not None
                told = process.stdout.readline()
                found = re.search(r"127\.0\.0\.1:(\d+)", told)
                assert found is not None, f"port-forward said {told!r}"
                yield int(found[1])
            finally:
                process.terminate()

    def fleet(self, folder: Path, *words: str, namespace: str = SYSTEM, wrong: bool = False) -> str:
        """As `kubectl`, `healthd fleet` of a person who may do everything; `folder` is that of `secrets`."""
        self.admin(folder, namespace)
        with self.forward("healthd-aggregator", 8090, namespace) as port:
            options = ("--token-file", str(folder / "admin.token"), "--ca-file", str(folder / "ca.pem"))
            line = [
                sys.executable,
                "-m",
                "healthd",
                "fleet",
                *words,
                "--aggregator",
                f"https://localhost:{port}",
                *options,
            ]
            return self._run([*line], None, wrong)

    def admin(self, folder: Path, namespace: str = SYSTEM) -> None:
        """Write a token of a person who may do everything into `admin.token`, as the guide has it."""
        words = ("create", "token", "healthd-admin", "--audience", "healthd", "-n", namespace)
        (folder / "admin.token").write_text(self.kubectl(*words))

    def authority(self, folder: Path, namespace: str) -> None:
        """The ConfigMap of a namespace of jobs; `folder` is that of `secrets`."""
        words = ("create", "configmap", "healthd-ca", f"--from-file=ca.crt={folder / 'ca.pem'}")
        self.kubectl(*words, "-n", namespace)

    def load(self, archive: Path) -> None:
        """Bring an image to every node."""
        assert self.folder is not None
        subprocess.run([str(self.folder / "import"), "all", str(archive)], check=True, stdout=subprocess.DEVNULL)

    @contextmanager
    def down(self, program: str) -> Iterator[None]:
        """A program of the cluster is killed, and started again at the end of the block."""
        assert self.folder is not None
        pid = self.folder / f"{program}.pid"
        before, mark = int(pid.read_text()), self.folder / "down" / program
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        try:
            until(f"{program} is down", lambda: not Path(f"/proc/{before}").exists())
            yield
        finally:
            mark.unlink()
            until(f"{program} is started again", lambda: int(pid.read_text() or before) != before)

    @contextmanager
    def cut_off(self, node: str) -> Iterator[None]:
        """A node is off the network, with all that runs there, as one that has lost its power; and back at the end."""
        assert self.folder is not None
        pid = (self.folder / f"kubelet-{node.rpartition('-')[2]}.pid").read_text().strip()
        told = subprocess.run(
            ["nsenter", f"--target={pid}", "--net", "ip", "-o", "link", "show", "eth0"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        other = re.search(r"eth0@if(\d+)", told)
        assert other is not None, told
        links = Path("/sys/class/net").iterdir()
        (link,) = (one.name for one in links if (one / "ifindex").read_text().strip() == other[1])
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", "link", "set", link, "up"], check=True)

    @contextmanager
    def namespace(self, name: str, labels: Mapping[str, str] | None = None) -> Iterator[str]:
        """A namespace that is gone, with all in it, at the end."""
        metadata = {"name": name, "labels": dict(labels or {})}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        try:
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=120s")
            self.free_volumes()

    def empty_nodes(self) -> None:
        """Nodes know nothing of healthd any more: no condition; those of the tests' cluster no key and no result."""
        gone = json.dumps({"status": {"conditions": [{"$patch": "delete", "type": CONDITION}]}})
        for node in self.conditions():
            self.kubectl("patch", "node", node, "--subresource=status", "--type=strategic", "-p", gone)
        for path in self.folder.glob("node-*/*-healthd/*") if self.folder is not None else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def free_volumes(self) -> None:
        """Volumes of the tests' cluster whose claim is gone are emptied and free again; others have a provisioner."""
        for volume in self.items("persistentvolumes") if self.ours else ():
            if volume["status"]["phase"] == "Released":
                for path in Path(volume["spec"]["hostPath"]["path"]).iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                name = volume["metadata"]["name"]
                self.kubectl("patch", "persistentvolume", name, "-p", '{"spec":{"claimRef":null}}')


def until(what: str, ask: Callable[[], T], seconds: float = SECONDS, *, told: Callable[[], str] | None = None) -> T:
    """The first answer that is true; fails with `told()`."""
    end = time.monotonic() + seconds * PATIENCE
    while True:
        if answer := ask():
            return answer
        if time.monotonic() > end:
            pytest.fail(f"{what}: not within {seconds * PATIENCE:.0f} s\n{told() if told else ''}")
        time.sleep(0.25)


def values(image: str, **more: str) -> list[str]:
    """Of an installation on plain nodes, with an image that is there already."""
    repository, _, tag = image.rpartition(":")
    given = {
        "platform": "cpu",
        "images.service.repository": repository,
        "images.service.tag": tag,
        "images.pullPolicy": "IfNotPresent",
        **more,
    }
    return [word for key, value in given.items() for word in ("--set", f"{key}={value}")]


def volume_of_gate() -> dict[str, Any]:
    """The volume `gate` of a job's pod, as the guide has it: the pod's own token, and the CA of the aggregator."""
    sources = [
        {"serviceAccountToken": {"audience": "healthd", "expirationSeconds": 3600, "path": "token"}},
        {"configMap": {"name": "healthd-ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    ]
    return {"name": "gate", "projected": {"sources": sources}}


def traces(cluster: Cluster) -> list[str]:
    """What healthd has left on nodes."""
    found = []
    for item in cluster.items("nodes"):
        name, metadata = item["metadata"]["name"], item["metadata"]
        found += [f"{name}: condition" for one in item["status"]["conditions"] if one["type"].startswith("healthd")]
        found += [f"{name}: taint {one['key']}" for one in item["spec"].get("taints", ()) if "healthd" in one["key"]]
        marks = {**metadata["labels"], **metadata.get("annotations", {})}
        found += [f"{name}: {key}" for key in marks if key.startswith(KEY)]
    return found


def gated_job(
    namespace: str,
    name: str,
    pods: int,
    image: str,
    *gate: str,
    command: Sequence[str],
    prefer: str = "",
    running: int | None = None,
) -> dict[str, Any]:
    """
    An Indexed Job as deploy/kubernetes/examples/gated-job.yaml has it, whose pods run `command` once they are admitted.

    `gate`: options of the gate beyond those of the example. `prefer`: a node that one of the pods should be on.
    `running`: as many pods at a time, None: all.
    """
    fields = {
        "POD_NAMESPACE": "metadata.namespace",
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
        "NODE_NAME": "spec.nodeName",
        "RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    }
    env = [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()]
    ask = [
        *("healthd", "gate", f"--aggregator=https://healthd-aggregator.{SYSTEM}.svc:8090"),
        *("--token-file=/etc/healthd/gate/token", "--ca-file=/etc/healthd/gate/ca.crt"),
        *(f"--job={name}", f"--join={name}", f"--size={pods}", "--rank=$(RANK)", "--node=$(NODE_NAME)", *gate),
    ]
    every = {"image": image, "imagePullPolicy": "IfNotPresent"}
    mounts = [{"name": "gate", "mountPath": "/etc/healthd/gate", "readOnly": True}]
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"job-name": name}}}
    affinity: dict[str, Any] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    if prefer:
        there = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [prefer]}]}
        wish = [{"weight": 100, "preference": there}]
        affinity["nodeAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": wish}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "affinity": affinity,
        "initContainers": [{"name": "gate", **every, "command": ask, "env": env, "volumeMounts": mounts}],
        "containers": [{"name": "train", **every, "command": list(command), "env": list(env)}],
        "volumes": [volume_of_gate()],
    }
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "Ignore", "onExitCodes": {"containerName": "gate", "operator": "In", "values": [75]}},
        {"action": "Ignore", "onPodConditions": disrupted},
        {"action": "FailJob", "onExitCodes": {"containerName": "gate", "operator": "In", "values": [1, 2]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods if running is None else running,
        "backoffLimit": 0,
        "activeDeadlineSeconds": 900,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def gate_exit_code(pod: Mapping[str, Any]) -> int | None:
    """That of the gate of a pod of `gated_job`; None while it runs."""
    for status in pod["status"].get("initContainerStatuses", ()):
        ended = status["state"].get("terminated")
        return None if ended is None else int(ended["exitCode"])
    return None


def secrets(cluster: Cluster, folder: Path, namespace: str = SYSTEM) -> Path:
    """The Secret of the guide in a namespace; the folder has the certificates."""
    folder.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "healthd"]
    hosts = [f"healthd-aggregator.{namespace}.svc"]
    hosts += [f"healthd-aggregator-{number}.healthd-aggregator-pods.{namespace}.svc" for number in range(3)]
    subprocess.run([*program, "tls", "init", *hosts, "--dir", str(folder)], check=True, capture_output=True, cwd=ROOT)
    files = {"healthd-aggregator-tls": {"tls.crt": "cert.pem", "tls.key": "key.pem", "ca.crt": "ca.pem"}}
    cluster.apply(
        *(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": namespace},
                "data": {key: base64.b64encode((folder / file).read_bytes()).decode() for key, file in data.items()},
            }
            for name, data in files.items()
        )
    )
    return folder


@contextmanager
def started(folder: Path, *words: str) -> Iterator[Cluster]:
    """A cluster of tests/kubernetes/cluster.py; it ends with this process, however that ends."""
    folder.mkdir(parents=True)
    line = [sys.executable, "-m", "tests.kubernetes.cluster", "up", str(folder), "--guarded", *words]
    with (folder / "cluster.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
    try:
        while not (folder / "ready").exists():
            if process.poll() is not None:
                pytest.fail((folder / "cluster.log").read_text()[-3000:])
            time.sleep(0.2)
        yield Cluster(folder / "admin.kubeconfig", folder, str(Path(os.environ[VARIABLE], "kubectl")))
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def account(cluster: Cluster, folder: Path, namespace: str, rules: Sequence[Mapping[str, Any]]) -> Iterator[ApiServer]:
    """The API server as a service account with these rights sees it, in a namespace of its own."""
    name = {"name": "writer", "namespace": namespace}
    authorization = "rbac.authorization.k8s.io"
    with cluster.namespace(namespace):
        cluster.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
            {
                "apiVersion": f"{authorization}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": namespace},
                "rules": list(rules),
            },
            {
                "apiVersion": f"{authorization}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": namespace},
                "roleRef": {"kind": "ClusterRole", "name": namespace, "apiGroup": authorization},
                "subjects": [{"kind": "ServiceAccount", **name}],
            },
        )
        (folder / "token").write_text(cluster.kubectl("create", "token", "writer", "-n", namespace))
        assert cluster.folder is not None
        (folder / "ca.crt").write_text((cluster.folder / "pki/ca.crt").read_text())
        yield ApiServer(url=url_of(cluster), service_account=folder)
        cluster.kubectl("delete", "clusterrole,clusterrolebinding", namespace)


def url_of(cluster: Cluster) -> str:
    return cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")


def answers(cluster: Cluster) -> bool:
    try:
        return "ok" in cluster.kubectl("get", "--raw", "/readyz")
    except AssertionError:
        return False
