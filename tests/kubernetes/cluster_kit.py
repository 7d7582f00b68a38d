"""What the tests of cluster, and those beside them, are made with."""

from __future__ import annotations

from tests.kubernetes.kit import Cluster


def phase(cluster: Cluster, namespace: str, name: str) -> str:
    return str(cluster.get("pod", name, "-n", namespace)["status"]["phase"])
