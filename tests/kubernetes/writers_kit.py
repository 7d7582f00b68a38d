"""What writes nodes on a real API server, as whom, and what it counts of that."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from healthd.aggregator.drain.plan import Removal, Why
from healthd.clients.kubernetes import ApiServer
from tests.kubernetes import kit
from tests.kubernetes.kit import Cluster

NAMESPACE = "tests-writers"
# What the two service accounts of the guide may do, in one.
RULES = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "patch"]},
    {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
]


def account(cluster: Cluster, folder: Path) -> AbstractContextManager[ApiServer]:
    """The API server as a service account with the rights of the guide sees it."""
    return kit.account(cluster, folder, NAMESPACE, RULES)


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


def calls(cluster: Cluster) -> int:
    """How many calls of the account the API server has answered, by its audit log."""
    assert cluster.folder is not None
    name = f'"username":"system:serviceaccount:{NAMESPACE}:writer"'
    return (cluster.folder / "audit.log").read_text(encoding="utf-8").count(name)
