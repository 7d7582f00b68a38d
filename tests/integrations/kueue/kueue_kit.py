"""Kueue on a real API server: its definitions, and the player that writes what Kueue's manager would."""

from __future__ import annotations

import base64
import os
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integrations.kueue import player
from tests.kubernetes.kit import CHART, HELM, SYSTEM, Cluster, until

DEFINITIONS = ("admissionchecks", "clusterqueues", "localqueues", "resourceflavors", "workloads")
BASE = "/apis/kueue.x-k8s.io/v1beta2"
RIGHTS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
FLAVOR = {"kind": "ResourceFlavor", "metadata": {"name": "trn"}, "spec": {"nodeLabels": {"pool": "a"}}}
POOL = {"healthd.internal/pool": "a"}


@dataclass
class Kueue:
    """
    The API server as an administrator, and Kueue's moves on it.

    `account` is the directory of the controller's service account. `holding` are moves that Kueue does not make yet,
    `ahead_seconds` is how much later it is on Kueue's clock.
    """

    cluster: Cluster
    http: httpx.Client
    account: Path
    quota: int = 1
    ahead_seconds: float = 0.0
    holding: set[str] = field(default_factory=set)
    taken: list[str] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def empty(self) -> None:
        """No Workload, no check, no label of a gate: as it was made."""
        for one in self.get(f"{BASE}/workloads")["items"]:
            self.delete(one["metadata"]["name"])
        self.http.delete(f"{BASE}/admissionchecks")
        self.cluster.kubectl("label", "nodes", "--all", "healthd.internal/gate-", "--overwrite")

    def get(self, path: str) -> dict[str, Any]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def put(self, path: str, body: dict[str, Any]) -> int:
        """The status of a whole write; 409: it has changed meanwhile."""
        answer = self.http.put(path, json=body)
        assert answer.status_code in (200, 404, 409), answer.text
        return answer.status_code

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json={"apiVersion": "kueue.x-k8s.io/v1beta2", **body})
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def workload(self, name: str) -> dict[str, Any]:
        return self.get(f"{BASE}/namespaces/default/workloads/{name}")

    def submit(self, name: str, **more: Any) -> None:
        body = player.workload(name, "", **more)
        body.pop("status")
        body["metadata"] = {"name": name, "namespace": "default"}
        self.create(f"{BASE}/namespaces/default/workloads", body)

    def delete(self, name: str) -> None:
        self.http.delete(f"{BASE}/namespaces/default/workloads/{name}")

    def change(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a Workload, in its spec and its status, however often Kueue writes in between."""

        def changed() -> bool:
            found = self.workload(name)
            after = player.copied(found)
            after.setdefault("status", {})
            change(after)
            return self._store(found, after)

        until(f"{name} is changed", changed)

    def _store(self, before: dict[str, Any], after: dict[str, Any]) -> bool:
        metadata = after["metadata"]
        path = f"{BASE}/namespaces/{metadata['namespace']}/workloads/{urllib.parse.quote(metadata['name'])}"
        if before["spec"] != after["spec"]:
            answer = self.http.put(path, json=after)
            if answer.status_code != 200:
                return False
            after = {**answer.json(), "status": after["status"]}
        return before.get("status") == after.get("status") or self.put(f"{path}/status", after) == 200

    def step(self) -> bool:
        """Kueue makes one of its moves, if there is one."""
        with self._lock:
            objects = self.get(f"{BASE}/workloads")["items"]
            taken = sum(player.holds(one, "QuotaReserved") and not player.holds(one, "Finished") for one in objects)
            for found in objects:
                found = {**found, "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload"}
                made = player.moves(found, time.time() + self.ahead_seconds, quota=taken < self.quota)
                for move, after in made.items():
                    if move not in self.holding and self._store(found, after):
                        self.taken.append(f"{found['metadata']['name']}: {move}")
                        return True
        return False

    def state(self, name: str) -> dict[str, Any]:
        return player.check_of(self.workload(name))

    def wait(self, name: str, what: str, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The Workload once something is true of it, while Kueue goes on."""

        def asked() -> dict[str, Any] | None:
            while self.step():
                pass
            found = self.workload(name)
            return found if true(found) else None

        made = until(f"{name}: {what}", asked, told=lambda: f"{self.workload(name).get('status')}\n{self.taken}")
        assert made is not None
        return made

    def admitted(self, name: str) -> dict[str, Any]:
        return self.wait(name, "is admitted", lambda found: player.holds(found, "Admitted"))


def definitions() -> Path:
    """The folder of TESTS_CRDS, which has the definitions of Kueue by their kubebuilder names."""
    folder = os.environ.get("TESTS_CRDS")
    if not folder or not (Path(folder) / "kueue.x-k8s.io_workloads.yaml").exists():
        pytest.skip("TESTS_CRDS names no folder with kueue.x-k8s.io_workloads.yaml")
    return Path(folder)


def install(cluster: Cluster) -> None:
    """Kueue's definitions, as its project publishes them."""
    for name in DEFINITIONS:
        cluster.kubectl("apply", "--server-side", "-f", definitions() / f"kueue.x-k8s.io_{name}.yaml")
    for name in DEFINITIONS:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", f"crd/{name}.kueue.x-k8s.io")


@contextmanager
def kueue(cluster: Cluster, folder: Path, nodes: tuple[str, ...]) -> Iterator[Kueue]:
    """Kueue with one flavor whose nodes are these, and the account of the controller with the rights of the chart."""
    install(cluster)
    words = ("template", "healthd", CHART, "--namespace", SYSTEM, "--set", "platform=cpu,kueue.enabled=true")
    made = cluster.helm(*words, "--show-only", "templates/kueue.yaml")
    assert HELM.exists()
    rights = [item for item in yaml.safe_load_all(made) if item and item["kind"] in RIGHTS]
    admin = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "kueue-player", "namespace": SYSTEM}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    subject = {"kind": "ServiceAccount", "name": "kueue-player", "namespace": SYSTEM}
    binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "roleRef": role}
    with cluster.namespace(SYSTEM):
        cluster.apply(*rights, admin, {**binding, "metadata": {"name": "kueue-player"}, "subjects": [subject]})
        labels = {"pool": "a"}
        cluster.apply(*({"apiVersion": "v1", "kind": "Node", "metadata": {"name": n, "labels": labels}} for n in nodes))
        config = yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
        authority = config.get("certificate-authority") or str(folder / "ca")
        if "certificate-authority-data" in config:
            Path(authority).write_bytes(base64.b64decode(config["certificate-authority-data"]))
        account = folder / "account"
        account.mkdir()
        (account / "ca.crt").write_bytes(Path(authority).read_bytes())
        (account / "token").write_text(cluster.kubectl("create", "token", "healthd-kueue", "-n", SYSTEM))
        token = cluster.kubectl("create", "token", "kueue-player", "-n", SYSTEM).strip()
        headers = {"Authorization": f"Bearer {token}"}
        trust = ssl.create_default_context(cafile=str(authority))
        url = str(config["server"])
        with httpx.Client(base_url=url, headers=headers, verify=trust, trust_env=False, timeout=30) as http:
            found = Kueue(cluster, http, account)
            for kind in DEFINITIONS:  # established is not served yet
                until(f"{kind} are served", lambda kind=kind: http.get(f"{BASE}/{kind}").status_code == 200)  # type: ignore[misc]
            found.create(f"{BASE}/resourceflavors", {**FLAVOR, "metadata": {"name": "trn", "annotations": POOL}})
            try:
                yield found
            finally:
                http.delete(f"{BASE}/resourceflavors")
                cluster.kubectl("delete", "node", *nodes)
                cluster.kubectl("delete", "clusterrole,clusterrolebinding", "healthd-kueue", "--ignore-not-found")
                cluster.kubectl("delete", "clusterrolebinding", "kueue-player")
