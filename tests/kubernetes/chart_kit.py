"""What the tests of chart, and those beside them, are made with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kubernetes.kit import CHART, SYSTEM, Cluster, secrets, values


def rolled_out(cluster: Cluster) -> None:
    """The aggregator, or all of several, and the node daemons run in the newest version."""
    ours = ("-n", SYSTEM, "-l", "app.kubernetes.io/name in (healthd-aggregator,healthd-node)")
    for item in cluster.items("deployments,statefulsets,daemonsets", *ours):
        name = f"{item['kind'].lower()}/{item['metadata']['name']}"
        cluster.kubectl("rollout", "status", name, "-n", SYSTEM, "--timeout=300s")


@contextmanager
def gating(
    cluster: Cluster, image: str, jobs: str, folder: Path, objects: Sequence[dict[str, Any]] = (), **more: str
) -> Iterator[None]:
    """
    The chart on every node, its gates in earnest, and `jobs`, a namespace with what their hooks need.

    `folder` gets the certificates and the token of an administrator; `objects` are there before the chart, and
    `more` are further values of it.
    """
    chosen = {
        "aggregator.settings.HEALTHD_POLICY_MODE": "enforce",
        "aggregator.settings.HEALTHD_GATE_CALLERS_MAY": "tier\\,collective",
        **more,
    }
    with cluster.namespace(SYSTEM), cluster.namespace(jobs):
        secrets(cluster, folder)
        cluster.authority(folder, jobs)
        if objects:
            cluster.apply(*objects)
        cluster.helm("install", "healthd", CHART, "-n", SYSTEM, *values(image, **chosen))
        try:
            rolled_out(cluster)
            cluster.admin(folder)
            yield
        finally:
            cluster.helm("uninstall", "healthd", "-n", SYSTEM)
    cluster.empty_nodes()
