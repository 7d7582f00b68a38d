"""
A gated Job from `kubectl apply` to its exit code, on a real Kubernetes of three nodes: `make demo-kubernetes`.

Three pods check their nodes and run collectives with each other before they train a small model together; then one node
computes wrongly, and the next Job ends up on the others. What it shows was printed by the commands that it shows; what
does not come about ends it with an error. It ends by itself and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from healthd.cli.terminal.console import Terminal
from healthd.core.errors import HealthdError
from tests.deploy.images import PROGRAMS, workshop_with_service
from tests.deploy.manifests import ROOT
from tests.kubernetes.cluster import missing
from tests.kubernetes.kit import (
    CHART,
    IMAGE,
    KEY,
    SYSTEM,
    TORCH_IMAGE,
    TORCH_REPOSITORY,
    Cluster,
    gate_exit_code,
    gated_job,
    secrets,
    started,
    until,
)
from tests.patience import PATIENCE
from tests.system import missing as missing_program

NODES = 3
ARCHIVES = {"healthd.tar": IMAGE, "healthd-torch.tar": TORCH_IMAGE}
PLACE = Path(os.environ.get("TMPDIR", "/var/tmp"))
TRAIN = ("/opt/probe/bin/python", "-u", "/train/train.py")
TRAINING = ROOT / "tests/kubernetes/train.py"
NAMESPACE = "jobs"
FAULT = "matmul@cpu:0=corrupt"
# What Jobs, daemons and images take on two cores that are busy with each other.
JOB_SECONDS = 120.0
LEASE_SECONDS = 20.0
"""Within which a node is free after its pod has ended: the daemon sees it in 10 s, and tells of it."""
SHARED = {"HEALTHD_CPU_DEVICES": "1", "HEALTHD_PROBE_START": "3m"}
"""Of daemons and gates, whose nodes share the cores of one machine."""
VALUES = (
    "platform=cpu",
    "profile=active",
    f"images.service.repository={TORCH_REPOSITORY}",
    f"images.torch.repository={TORCH_REPOSITORY}",
    "actuator.enabled=true",
    "aggregator.settings.HEALTHD_POLICY_MODE=enforce",
    "aggregator.settings.HEALTHD_ACTUATOR_MODE=act",
    "aggregator.storage.size=1Gi",
    *(f"node.settings.{name}={value}" for name, value in SHARED.items()),
    "aggregator.settings.HEALTHD_POLICY_COLLECTIVE_START=3m",
    "aggregator.settings.HEALTHD_POLICY_COLLECTIVE_JOIN=90s",
)


def job(name: str, pods: int, *gate: str, prefer: str = "") -> list[dict[str, Any]]:
    """A gated Job that trains, and the Service by which its pods find each other."""
    made = gated_job(NAMESPACE, name, pods, TORCH_IMAGE, "--wait=8m", *gate, command=TRAIN, prefer=prefer)
    pod = made["spec"]["template"]["spec"]
    pod["subdomain"] = name
    pod["volumes"].append({"name": "train", "configMap": {"name": "train"}})
    pod["initContainers"][0]["env"] += [{"name": key, "value": value} for key, value in SHARED.items()]
    (train,) = pod["containers"]
    train["volumeMounts"] = [{"name": "train", "mountPath": "/train", "readOnly": True}]
    quiet = {"PYTHONWARNINGS": "ignore:Failed to initialize NumPy"}  # which nothing here needs
    given = quiet | {"WORLD_SIZE": str(pods), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": "29500"}
    train["env"] += [{"name": key, "value": value} for key, value in given.items()]
    peers = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": made["metadata"], "spec": peers}, made]


@dataclass
class Stage:
    """What the acts have: a cluster, a folder for the keys of an administrator, and a place to tell of it."""

    cluster: Cluster
    folder: Path
    console: Terminal = field(default_factory=lambda: Terminal(soft_wrap=True))
    began: float = field(default_factory=time.monotonic)
    aggregator: str = ""
    tested: float = 0.0
    """When all nodes had been tested."""

    def title(self, text: str) -> None:
        self.console.print(f"\n[bold cyan]{text}[/]  [dim]{time.monotonic() - self.began:.0f} s[/]")

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{text}[/]")

    def show(self, line: str, text: str, *, most: int = 24) -> None:
        """A command and what it printed."""
        self.console.print(f"[green]$[/] {line}")
        for one in text.rstrip().splitlines()[-most:]:
            self.console.print(f"  {one}", markup=False)

    def kubectl(self, *words: str, hide: bool = False, most: int = 24) -> str:
        """Run kubectl, and show it unless `hide`."""
        text = self.cluster.kubectl(*words)
        if not hide:
            self.show(shlex.join(["kubectl", *words]), text, most=most)
        return text

    def healthd(self, *words: str, most: int = 30) -> str:
        """Run healthd as an administrator who reaches the aggregator through a port-forward, and show it."""
        text = self._healthd(*words)
        self.show(shlex.join(["healthd", *words]), text, most=most)
        return text

    def _healthd(self, *words: str) -> str:
        named = ["--aggregator", self.aggregator, "--token-file", str(self.folder / "admin.token")]
        named += ["--ca-file", str(self.folder / "ca.pem")]
        done = subprocess.run(
            [sys.executable, "-m", "healthd", *words, *named],
            capture_output=True,
            text=True,
            timeout=60 * PATIENCE,
            check=False,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "150"},
        )
        if done.returncode:
            raise HealthdError(f"healthd {' '.join(words)}: {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    @contextmanager
    def forwarded(self) -> Iterator[None]:
        """`kubectl port-forward` to the aggregator meanwhile."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        line = [self.cluster.program, "port-forward", "-n", SYSTEM, "service/healthd-aggregator", f"{port}:8090"]
        process = subprocess.Popen(line, env=self.cluster.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.aggregator = f"https://localhost:{port}"
        try:
            until("the port-forward answers", lambda: _listens(port))
            yield
        finally:
            process.terminate()
            process.wait()

    def wait(self, what: str, ask: Any, seconds: float = JOB_SECONDS) -> Any:
        """Until it is so, with a spinner; fails with the pods there are."""
        with self.console.status(what):
            return until(what, ask, seconds, told=self.story)

    def story(self) -> str:
        """For an error: the pods, and the last words of the gates among them."""
        told = self.cluster.kubectl("get", "pods", "-A", "-o", "wide")
        for item in self.cluster.items("pods", "-n", NAMESPACE):
            name = item["metadata"]["name"]
            for container in ("gate", "train"):
                line = [self.cluster.program, "logs", name, "-n", NAMESPACE, "-c", container, "--tail=15"]
                done = subprocess.run(line, env=self.cluster.environ, capture_output=True, text=True, check=False)
                told += f"\n--- {name} {container}\n{done.stdout}{done.stderr}"
        return told

    # --- what is asked of a cluster -----------------------------------------------------------------------------------

    def pods_of(self, name: str) -> list[dict[str, Any]]:
        return self.cluster.items("pods", "-n", NAMESPACE, "-l", f"job-name={name}")

    def complete(self, name: str) -> bool:
        """Whether a Job has completed; HealthdError where it has failed."""
        for one in self.cluster.get("job", name, "-n", NAMESPACE)["status"].get("conditions", ()):
            if one["type"] == "Failed" and one["status"] == "True":
                raise HealthdError(f"job {name} failed: {one.get('message')}\n{self.story()}")
            if one["type"] == "Complete" and one["status"] == "True":
                return True
        return False

    def leases(self) -> dict[str, str]:
        """Which job has each node that is leased, as the aggregator tells it."""
        rows = json.loads(self._healthd("fleet", "status", "--json"))["nodes"]
        return {row["node"]: row["leases"][0]["job"] for row in rows if row["leases"]}

    def taints(self) -> dict[str, list[str]]:
        """The actuator's taints of the nodes that have any."""
        found = {}
        for item in self.cluster.items("nodes"):
            ours = [one["effect"] for one in item["spec"].get("taints", ()) if one["key"] == KEY]
            if ours:
                found[item["metadata"]["name"]] = ours
        return found


def _listens(port: int) -> bool:
    with socket.socket() as ask:
        return ask.connect_ex(("127.0.0.1", port)) == 0


def node_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"].get("nodeName", ""))


# --- the acts ---------------------------------------------------------------------------------------------------------


def play(cluster: Cluster, folder: Path) -> None:
    """All acts, in a cluster that has the images; what they made is gone at the end. HealthdError where one fails."""
    stage = Stage(cluster, folder)
    with cluster.namespace(SYSTEM), cluster.namespace(NAMESPACE):
        try:
            install(stage)
            with stage.forwarded():
                trained(stage)
                rejected(stage)
                told(stage)
        finally:
            cluster.helm("uninstall", "healthd", "-n", SYSTEM, "--ignore-not-found", "--wait")
    # What a node latched is its own, and outlives the chart.
    cluster.empty_nodes()
    stage.title("Done")


def install(stage: Stage) -> None:
    """The guide's way: the certificate, the chart, and its CA in the namespace of the jobs."""
    stage.title("1. Three nodes; the chart, with the profile that tests devices, in enforce mode, with the actuator")
    secrets(stage.cluster, stage.folder)
    line = ["install", "healthd", str(CHART.relative_to(ROOT)), "-n", SYSTEM]
    for value in VALUES:
        line += ["--set-string" if ".settings." in value else "--set", value]
    stage.cluster.helm(*line)
    stage.show(shlex.join(["helm", *line]), "")
    stage.cluster.admin(stage.folder)
    stage.cluster.authority(stage.folder, NAMESPACE)
    source = TRAINING.read_text(encoding="utf-8")
    meta = {"name": "train", "namespace": NAMESPACE}
    stage.cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"train.py": source}})
    stage.say("Each daemon runs the quick tier once: tensor operations on its devices, collectives between them ...")
    names = set(stage.cluster.nodes())
    fit = dict.fromkeys(names, "True")
    stage.wait("the nodes are tested", lambda: stage.cluster.conditions() == fit)
    stage.tested = time.monotonic()
    columns = r'NODE:.metadata.name,FIT:.status.conditions[?(@.type=="healthd.internal/Fit")].status'
    columns += r',WHY:.status.conditions[?(@.type=="healthd.internal/Fit")].message'
    stage.kubectl("get", "nodes", "-o", f"custom-columns={columns}")


def trained(stage: Stage) -> None:
    """A Job that is admitted, and its lease."""
    stage.title("2. A Job of three pods: its gate has them run all-gather, all-reduce and reduce-scatter together")
    stage.cluster.apply(*job("train-1", NODES, "--execute"))
    stage.wait("train-1 completes", lambda: stage.complete("train-1"))
    pods = stage.pods_of("train-1")
    first = pods[0]["metadata"]["name"]
    stage.kubectl("logs", first, "-n", NAMESPACE, "-c", "gate")
    stage.kubectl("logs", "-n", NAMESPACE, "-l", "job-name=train-1", "-c", "train", "--prefix=false")
    stage.kubectl("get", "pods", "-n", NAMESPACE, "-o", "wide")
    stage.healthd("fleet", "explain", f"{NAMESPACE}/train-1")
    stage.say("The pods have ended, and with them the lease of each on its node:")
    ended = time.monotonic()
    stage.wait("the leases end", lambda: not stage.leases(), LEASE_SECONDS)
    stage.say(f"free after {time.monotonic() - ended:.1f} s")


def rejected(stage: Stage) -> None:
    """A node that computes wrongly, and the Job that meets it."""
    bad = max(stage.cluster.nodes())
    (daemon,) = (
        item["metadata"]["name"]
        for item in stage.cluster.items("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/name=healthd-node")
        if node_of(item) == bad
    )
    stage.title(f"3. A fault: one bit of what cpu:0 of {bad} computes is flipped ({FAULT})")
    stage.kubectl("exec", "-n", SYSTEM, daemon, "--", "healthd", "fault", "set", FAULT)
    # What the daemons found before the fault is older, and a run takes less time than that on a slow machine too.
    seconds = int(time.monotonic() - stage.tested)
    stage.say(f"A Job of two pods, one of which prefers {bad}. It wants evidence of the last {seconds} s:")
    stage.cluster.apply(*job("train-2", 2, f"--max-age={seconds}s", prefer=bad))

    def turned_away() -> list[dict[str, Any]]:
        return [pod for pod in stage.pods_of("train-2") if gate_exit_code(pod) == 75]

    (first, *_) = stage.wait("the gate rejects", turned_away)
    tainted = stage.taints()
    name = first["metadata"]["name"]
    stage.kubectl("logs", name, "-n", NAMESPACE, "-c", "gate")
    path = "{.status.initContainerStatuses[0].state.terminated.exitCode}"
    stage.kubectl("get", "pod", name, "-n", NAMESPACE, "-o", f"jsonpath={path}")
    if bad not in tainted:
        raise HealthdError(f"{bad} has no taint though the gate has answered: {tainted}")
    stage.kubectl("get", "node", bad, "-o", "jsonpath={.spec.taints}")
    stage.say("The Job makes new pods, and the scheduler has two nodes left:")
    stage.wait("train-2 completes", lambda: stage.complete("train-2"))
    stage.kubectl("get", "pods", "-n", NAMESPACE, "-l", "job-name=train-2", "-o", "wide")
    done = [pod for pod in stage.pods_of("train-2") if pod["status"]["phase"] == "Succeeded"]
    if len(done) != 2 or bad in map(node_of, done):
        raise HealthdError(f"train-2 did not end on two other nodes than {bad}: {[node_of(pod) for pod in done]}")
    for pod in done:
        stage.kubectl("logs", pod["metadata"]["name"], "-n", NAMESPACE, "-c", "train")


def told(stage: Stage) -> None:
    """What an administrator finds afterwards."""
    stage.title("4. What has happened, where an administrator looks")
    columns = "custom-columns=OBJECT:.involvedObject.name,REASON:.reason,MESSAGE:.message"
    healthds = ("get", "events", "--field-selector", "source=healthd", "-o", columns)
    stage.kubectl(*healthds, "--sort-by=.lastTimestamp")
    jobs = ("get", "events", "-n", NAMESPACE, "--field-selector", "involvedObject.kind=Job", "-o", columns)
    stage.kubectl(*jobs, "--sort-by=.lastTimestamp")
    stage.healthd("fleet", "status")
    stage.healthd("fleet", "explain", f"{NAMESPACE}/train-2")


# --- the whole --------------------------------------------------------------------------------------------------------


def build(folder: Path) -> None:
    """Archives of the service's image and of the one with torch."""
    folder.mkdir(parents=True, exist_ok=True)
    with workshop_with_service("demo-images", torch=True) as shop:
        shop.build_torch()
        for name, image in ARCHIVES.items():
            (folder / name).unlink(missing_ok=True)
            shop.buildah("push", "--quiet", Path(name).stem, f"docker-archive:{folder / name}:{image}")


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends the demonstration as Ctrl-C does, so that nothing is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="FOLDER", help="build the images, and nothing else")
    what.add_argument("--images", type=Path, metavar="FOLDER", help="where --build has put them")
    given = parser.parse_args()
    if reason := missing_program(*PROGRAMS, root=True) if given.build else missing(nodes=NODES):
        parser.error(reason)
    console = Terminal(soft_wrap=True)
    try:
        with _signals():
            began = time.monotonic()
            if given.build:
                build(given.build)
                console.print(f"two images in {time.monotonic() - began:.0f} s")
                return 0
            with (
                tempfile.TemporaryDirectory(prefix="healthd-demo-", dir=PLACE) as name,
                started(Path(name) / "cluster", f"--nodes={NODES}") as cluster,
            ):
                console.print(f"[dim]Kubernetes {cluster.version()} in {time.monotonic() - began:.0f} s[/]")
                began = time.monotonic()
                for archive in ARCHIVES:
                    cluster.load(given.images / archive)
                console.print(f"[dim]images on {NODES} nodes in {time.monotonic() - began:.0f} s[/]")
                play(cluster, Path(name) / "keys")
    except (HealthdError, AssertionError, pytest.fail.Exception) as error:
        print(f"demo-kubernetes: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
