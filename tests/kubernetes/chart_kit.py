"""What the tests of chart, and those beside them, are made with."""

from __future__ import annotations

from tests.kubernetes.kit import SYSTEM, Cluster


def rolled_out(cluster: Cluster) -> None:
    for kind in ("deployment/healthd-aggregator", "daemonset/healthd-node"):
        cluster.kubectl("rollout", "status", kind, "-n", SYSTEM, "--timeout=300s")
