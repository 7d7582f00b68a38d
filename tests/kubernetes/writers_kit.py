"""What writes nodes on a real API server, as whom, and what it counts of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from healthd.aggregator.drain.plan import Removal, Why
from healthd.core.platforms.kubernetes import ApiServer
from tests.kubernetes.kit import Cluster

KEY = "healthd.internal/removed"
NAMESPACE = "tests-writers"
# What the two service accounts of the guide may do, in one.
RULES = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "patch"]},
    {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
]


@contextmanager
def account(cluster: Cluster, folder: Path) -> Iterator[ApiServer]:
    """The API server as a service account with the rights of the guide sees it."""
    name = {"name": "writer", "namespace": NAMESPACE}
    authorization = "rbac.authorization.k8s.io"
    with cluster.namespace(NAMESPACE):
        cluster.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name},
            {
                "apiVersion": f"{authorization}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": NAMESPACE},
                "rules": RULES,
            },
            {
                "apiVersion": f"{authorization}/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": NAMESPACE},
                "roleRef": {"kind": "ClusterRole", "name": NAMESPACE, "apiGroup": authorization},
                "subjects": [{"kind": "ServiceAccount", **name}],
            },
        )
        (folder / "token").write_text(cluster.kubectl("create", "token", "writer", "-n", NAMESPACE))
        assert cluster.folder is not None
        (folder / "ca.crt").write_text((cluster.folder / "pki/ca.crt").read_text())
        yield ApiServer(url=url_of(cluster), service_account=folder)
        cluster.kubectl("delete", "clusterrole,clusterrolebinding", NAMESPACE)


def url_of(cluster: Cluster) -> str:
    return cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")


def removal(node: str) -> Removal:
    return Removal(
        node=node,
        aliases=(),
        instance_id=None,
        why=Why.QUARANTINE,
        reason="EccErrors on neuron:3",
        by_person=False,
        injected=False,
        allocated=False,
        since=0.0,
    )


def answers(cluster: Cluster) -> bool:
    try:
        return "ok" in cluster.kubectl("get", "--raw", "/readyz")
    except AssertionError:
        return False


def calls(cluster: Cluster) -> int:
    """How many calls of the account the API server has answered, by its audit log."""
    assert cluster.folder is not None
    name = f'"username":"system:serviceaccount:{NAMESPACE}:writer"'
    return (cluster.folder / "audit.log").read_text(encoding="utf-8").count(name)
