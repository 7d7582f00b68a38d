"""Nodes with devices, as a real kubelet and a device plug-in have it: who gets the daemon, and who has the devices."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.device_plugin import DevicePlugin
from tests.kubernetes.kit import CHART, SYSTEM, Cluster, until, values

pytestmark = pytest.mark.kubernetes

NODE = "node-1"
TYPE = "node.kubernetes.io/instance-type"
NEURON, EFA, GPU = "aws.amazon.com/neuron", "vpc.amazonaws.com/efa", "nvidia.com/gpu"
PLATFORMS = {
    "eks-neuron": ({TYPE: "trn1.32xlarge"}, {NEURON: 16, EFA: 8}),
    "eks-gpu": ({TYPE: "p5.48xlarge", "nvidia.com/gpu.present": "true"}, {GPU: 8, EFA: 32}),
}


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest, nodes_of_ours: Cluster) -> Iterator[str]:
    """The first node is one of this platform: its labels, and its devices by a device plug-in for each resource."""
    labels, resources = PLATFORMS[request.param]
    cluster, folder = nodes_of_ours, nodes_of_ours.folder
    assert folder is not None
    cluster.kubectl("label", "node", NODE, *(f"{key}={value}" for key, value in labels.items()))
    try:
        with ExitStack() as plugins:
            for resource, count in resources.items():
                plugins.enter_context(DevicePlugin(folder / NODE / "kubelet", resource, count))
            until("the kubelet advertises them", lambda: allocatable(cluster).items() >= resources.items())
            yield request.param
    finally:
        cluster.kubectl("label", "node", NODE, *(f"{key}-" for key in labels))


def allocatable(cluster: Cluster) -> dict[str, int]:
    found = cluster.get("node", NODE)["status"]["allocatable"]
    return {key: int(value) for key, value in found.items() if "/" in key}


def train(**devices: int) -> dict[str, Any]:
    """A pod that was given devices, and the huge pages that EFA wants, and shows them."""
    limits = {"cpu": "100m", "memory": "64Mi", "hugepages-2Mi": "5120Mi", **{key: str(n) for key, n in devices.items()}}
    container = {
        "name": "train",
        "image": "localhost/pause:1",
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "env; exec sleep 600"],
        "resources": {"limits": limits},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "train", "namespace": SYSTEM},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]},
    }


def said(cluster: Cluster, path: str) -> str:
    """What the daemon of the node answers, with whatever status."""
    try:
        with urllib.request.urlopen(f"http://{cluster.address(NODE)}:8080{path}", timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError as error:
        return str(error)


@pytest.mark.nightly
def test_daemon_runs_where_devices_are_and_sees_who_was_given_them(
    nodes_of_ours: Cluster, platform: str, image: str, system: Path
) -> None:
    """The node has a driver nowhere: that is a fault of it, and never a node without accelerators."""
    cluster = nodes_of_ours
    cluster.helm("install", "healthd", CHART, "-n", SYSTEM, *values(image, platform=platform))
    cluster.kubectl("rollout", "status", "daemonset/healthd-node", "-n", SYSTEM, "--timeout=300s")
    assert set(cluster.conditions()) <= {NODE}, "no daemon runs on the nodes of other types"
    until("a node without its driver is not fit", lambda: cluster.conditions().get(NODE) in ("False", "Unknown"))
    assert "pod:" not in said(cluster, "/readyz?verbose")

    resource, count = next(iter(PLATFORMS[platform][1].items()))
    cluster.apply(train(**{resource: count}))
    until("the pod runs", lambda: cluster.get("pod", "train", "-n", SYSTEM)["status"]["phase"] == "Running")
    variable = resource.replace(".", "_").replace("/", "_").replace("-", "_").upper()
    line = next(one for one in cluster.kubectl("logs", "train", "-n", SYSTEM).splitlines() if one.startswith(variable))
    assert len(line.partition("=")[2].split(",")) == count
    until("the daemon sees the pod", lambda: f"pod:{SYSTEM}/train" in said(cluster, "/readyz?verbose"))
    cluster.kubectl("delete", "pod", "train", "-n", SYSTEM)
    until("and that it is gone", lambda: f"pod:{SYSTEM}/train" not in said(cluster, "/readyz?verbose"))


@pytest.mark.nightly
def test_device_that_the_plug_in_calls_sick_is_not_given_away(nodes_of_ours: Cluster) -> None:
    cluster = nodes_of_ours
    assert cluster.folder is not None
    with DevicePlugin(cluster.folder / NODE / "kubelet", "example.com/chip", 2) as plugin:
        until("both are there", lambda: allocatable(cluster).get("example.com/chip") == 2)
        plugin.set_healthy(plugin.ids[0], False)
        until("one is left", lambda: allocatable(cluster).get("example.com/chip") == 1)
