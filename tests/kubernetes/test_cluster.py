"""The cluster of the tests is one: pods of several nodes reach each other by name, and nothing of it stays behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import ROOT
from tests.kubernetes.cluster import missing
from tests.kubernetes.cluster_kit import phase
from tests.kubernetes.kit import Cluster, until

pytestmark = pytest.mark.kubernetes


def pod(name: str, node: str, *command: str) -> dict[str, Any]:
    container = {"name": "main", "image": "localhost/pause:1", "imagePullPolicy": "Never", "command": list(command)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }


def test_pods_of_two_nodes_reach_each_other_by_the_name_of_a_service(nodes_of_ours: Cluster) -> None:
    cluster = nodes_of_ours
    with cluster.namespace("tests-reach") as namespace:
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "there"},
            "spec": {"selector": {"app": "there"}, "ports": [{"port": 80, "targetPort": 8000}]},
        }
        there = pod(
            "there", "node-1", "sh", "-c", "mkdir /www; echo found > /www/word; busybox httpd -f -p 8000 -h /www"
        )
        ask = "until wget -qO- http://there.tests-reach.svc.cluster.local/word; do sleep 1; done"
        for one in (service, there, pod("here", "node-2", "sh", "-c", ask)):
            one["metadata"]["namespace"] = namespace
            cluster.apply(one)
        until("the other node has answered", lambda: phase(cluster, namespace, "here") == "Succeeded")
        assert cluster.kubectl("logs", "here", "-n", namespace).endswith("found\n")


def test_run_that_is_killed_takes_its_cluster_with_it(tmp_path: Path) -> None:
    if reason := missing(nodes=0):
        pytest.skip(reason)
    line = f"{sys.executable} -m tests.kubernetes.cluster up {tmp_path} --nodes 0 --guarded & wait"
    with subprocess.Popen(["sh", "-c", line], cwd=ROOT) as run:
        until("the control plane answers", (tmp_path / "ready").exists)
        pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
        assert len(pids) == 4
        run.kill()
    until("its programs have ended", lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])


def test_oldest_control_plane_is_that_of_its_name(oldest: Cluster) -> None:
    assert oldest.version().startswith("v1.34.")
    assert oldest.nodes() == []
