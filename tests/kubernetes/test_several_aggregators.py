"""Two aggregators of the chart on one PostgreSQL: the leader's pod goes, then its node, while a gate is held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest

from tests.aggregator.postgres import Server, connected, serving
from tests.kubernetes.chart_kit import gating
from tests.kubernetes.jobs_kit import AGGREGATOR, FOR_EVER, JOB_SECONDS, JOBS, Fleet, node_of
from tests.kubernetes.kit import SYSTEM, Cluster, until

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

TAKEOVER_SECONDS = 10.0
"""The lease, and the look after it (docs/high_availability.md)."""


@dataclass(frozen=True)
class Several:
    """A fleet whose aggregators are two, and their database."""

    fleet: Fleet
    server: Server

    def leader(self) -> tuple[int, str, str]:
        """The term, and the pod and the node of the aggregator that leads."""
        with connected(self.server.url) as database:
            term, url = database.exec_driver_sql("SELECT term, url FROM leadership").one()
        name = str(url).removeprefix("https://").partition(".")[0]
        pods = self.fleet.cluster.items("pods", "-n", SYSTEM, "-l", AGGREGATOR)
        return int(term), name, next((node_of(pod) for pod in pods if pod["metadata"]["name"] == name), "")

    def decisions(self) -> dict[str, str]:
        """What each gate was answered."""
        return {gate["id"]: gate["decision"] for gate in self.fleet.gates() if gate["decision"] != "hold"}


@pytest.fixture(scope="module")
def several(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """The chart with two of them, and PostgreSQL on this machine."""
    if not cluster.ours:
        pytest.skip("cuts a node off, and pods reach a database of this machine: KUBEBUILDER_ASSETS, not KUBECONFIG")
    gateway = f"{cluster.address(cluster.nodes()[0]).rpartition('.')[0]}.1"  # this machine, as nodes and pods see it
    keys = tmp_path_factory.mktemp("several")
    with serving(gateway) as server:
        url = f"postgresql+psycopg://healthd@{gateway}:{server.port}/postgres"
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "healthd-database", "namespace": SYSTEM},
            "stringData": {"url": url},
        }
        chosen = {"aggregator.replicas": "2", "aggregator.database.urlSecret.name": "healthd-database"}
        with gating(cluster, image, JOBS, keys, [secret], **chosen):
            fleet = Fleet(cluster, image, keys)
            until("every node has reported", lambda: len(fleet.ask("/v1/nodes")["nodes"]) == len(cluster.nodes()))
            yield Several(fleet, server)


@contextmanager
def without_pod(cluster: Cluster, pod: str, node: str) -> Iterator[None]:
    """The leader's pod is deleted, and nobody waits for its end."""
    cluster.kubectl("delete", "pod", pod, "-n", SYSTEM, "--grace-period=0", "--force", "--wait=false")
    yield


def without_node(cluster: Cluster, pod: str, node: str) -> AbstractContextManager[None]:
    """The leader's node, with its kubelet and all that runs there, is not heard of any more."""
    return cluster.cut_off(node)


@pytest.mark.parametrize("gone", [without_pod, without_node])
def test_gate_that_is_held_is_answered_by_the_next_leader_and_nothing_answered_is_lost(
    several: Several, gone: Callable[[Cluster, str, str], AbstractContextManager[None]]
) -> None:
    fleet, cluster = several.fleet, several.fleet.cluster
    term, pod, node = several.leader()
    nodes = {node_of(item) for item in cluster.items("pods", "-n", SYSTEM, "-l", AGGREGATOR)}
    assert len(nodes) == 2, "each is on a node of its own"
    name = gone.__name__.replace("_", "-")
    fleet.start(f"runs-{name}", 1, command=FOR_EVER, prefer=node)
    leases = until("it runs", fleet.leases, JOB_SECONDS, told=fleet.told)
    cluster.kubectl("cordon", node)
    fleet.start(name, 2, running=1)
    gate = fleet.waits(name, 1)["id"]
    before = several.decisions()
    began = time.monotonic()
    with gone(cluster, pod, node):
        until("another one leads", lambda: several.leader()[0] > term, TAKEOVER_SECONDS, told=fleet.told)
        led = time.monotonic() - began
        fleet.patch(name, parallelism=2)  # whom the gate waits for
        until("the gate is answered", lambda: several.decisions().get(gate) == "admit", JOB_SECONDS, told=fleet.told)
        answered = time.monotonic() - began
        fleet.completes(name)
        assert leases.items() <= fleet.leases().items(), "a lease was lost"
        after = several.decisions()
        assert before.items() <= after.items(), "an answer was lost"
    print(f"{name}: another aggregator led after {led:.1f} s, the gate was answered after {answered:.1f} s")
    cluster.kubectl("uncordon", node)
    fleet.delete(f"runs-{name}")
    fleet.delete(name)
    standing = ("rollout", "status", "statefulset/healthd-aggregator", "-n", SYSTEM, "--timeout=120s")
    cluster.kubectl(*standing)
