"""What the tests of chart, and those beside them, are made with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kubernetes.kit import CHART, SYSTEM, Cluster, secrets, values


def rolled_out(cluster: Cluster) -> None:
    for kind in ("deployment/healthd-aggregator", "daemonset/healthd-node"):
        cluster.kubectl("rollout", "status", kind, "-n", SYSTEM, "--timeout=300s")


@contextmanager
def gating(cluster: Cluster, image: str, jobs: str, folder: Path, **more: str) -> Iterator[None]:
    """
    The chart on every node, its gates in earnest, and `jobs`, a namespace with what their hooks need.

    `folder` gets the certificates and the token of an administrator; `more` are further values of the chart.
    """
    chosen = {
        "aggregator.settings.HEALTHD_POLICY_MODE": "enforce",
        "aggregator.settings.HEALTHD_GATE_CALLERS_MAY": "tier\\,collective",
        **more,
    }
    with cluster.namespace(SYSTEM), cluster.namespace(jobs):
        secrets(cluster, folder)
        cluster.authority(folder, jobs)
        cluster.helm("install", "healthd", CHART, "-n", SYSTEM, *values(image, **chosen))
        try:
            rolled_out(cluster)
            cluster.admin(folder)
            yield
        finally:
            cluster.helm("uninstall", "healthd", "-n", SYSTEM)
    cluster.empty_nodes()
