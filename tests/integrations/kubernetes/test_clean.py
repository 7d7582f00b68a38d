"""What is left on nodes after an uninstallation: nothing of ours, all of others; see also tests/kubernetes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.aggregator.drain.plan import ActuatorError, Removal, Why
from healthd.clients.kubernetes import STRATEGIC, node_path
from healthd.integrations.kubernetes.actuator import KubernetesActuator
from healthd.integrations.kubernetes.clean import Traces, clean
from tests.clients.api_server_kit import Cluster, cluster

KEY, FIT = "healthd.internal/removed", "healthd.internal/Fit"
TRACES = Traces(
    conditions=(FIT,),
    key=KEY,
    owner="healthd",
    namespace="healthd-system",
    pods=("app.kubernetes.io/name=healthd-node,healthd.internal/pool=trn",),
)


def removal(node: str) -> Removal:
    return Removal(
        node=node,
        aliases=(),
        instance_id=None,
        why=Why.QUARANTINE,
        reason="bad",
        by_person=False,
        injected=False,
        allocated=False,
        since=0.0,
    )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes with our condition; n1 has our taint beside one of another owner's on n2."""
    with cluster(tmp_path) as made:
        for name in ("n1", "n2", "n3"):
            made.add(name)
            condition = {"type": FIT, "status": "True"}
            body = {"status": {"conditions": [condition]}}
            asyncio.run(made.server.patch(node_path(name) + "/status", body, kind=STRATEGIC, needs=""))
        made.add("n4", taints=[{"key": KEY, "value": "healthd", "effect": "NoSchedule"}], **{KEY: "somebody"})
        actuator = KubernetesActuator(made.server, key=KEY, owner="healthd")
        asyncio.run(actuator.remove(removal("n1")))
        other = KubernetesActuator(made.server, key=KEY, owner="other")
        asyncio.run(other.remove(removal("n2")))
        yield made


def run(made: Cluster, traces: Traces = TRACES, wait_seconds: float = 0.0) -> tuple[str, ...]:
    return asyncio.run(clean(made.server, traces, wait_seconds=wait_seconds))


def test_condition_and_marks_go_and_those_of_others_stay(nodes: Cluster) -> None:
    done = run(nodes)
    assert len(done) == 4
    assert [nodes.condition(name, FIT) for name in ("n1", "n2", "n3")] == [None] * 3
    assert all(nodes.condition(name, "Ready") for name in ("n1", "n2", "n3"))
    assert nodes.taints("n1") == []
    assert KEY not in nodes.nodes["n1"]["metadata"]["labels"]
    assert nodes.taints("n2") == [{"key": KEY, "value": "other", "effect": "NoSchedule"}]
    before = len(nodes.writes())
    assert run(nodes) == ()
    assert len(nodes.writes()) == before, "what is clean is not written"


def test_nodes_of_another_installation_keep_their_condition(nodes: Cluster) -> None:
    nodes.pod("healthd-node-x", "n2", "other-namespace")
    run(nodes, dataclasses.replace(TRACES, owner=None))
    assert nodes.condition("n2", FIT) is not None
    assert nodes.condition("n1", FIT) is None
    assert nodes.taints("n1"), "the marks are those of another release"


def test_own_pods_end_first(nodes: Cluster) -> None:
    """A daemon that still runs would write its condition again."""
    nodes.pod("healthd-node-a", "n1", **{"healthd.internal/pool": "trn"})
    timer = threading.Timer(0.5, nodes.pods.clear)
    timer.start()
    run(nodes, wait_seconds=30.0)
    timer.join()
    assert nodes.condition("n1", FIT) is None


def test_pod_that_does_not_end_is_named_and_the_rest_is_done(nodes: Cluster) -> None:
    nodes.pod("healthd-node-a", "n1", **{"healthd.internal/pool": "trn"})
    with pytest.raises(ActuatorError, match=r"after 0 s .* healthd-system/healthd-node-a; run it again"):
        run(nodes)
    assert nodes.condition("n1", FIT) is not None
    assert nodes.condition("n2", FIT) is None


def test_right_that_is_missing_is_named(nodes: Cluster) -> None:
    nodes.rights.remove("list on pods")
    with pytest.raises(ActuatorError, match="list on pods"):
        run(nodes)


def test_labels_go_whatever_their_value_is(nodes: Cluster) -> None:
    nodes.add("n5", **{"healthd.internal/gate": "g-1"})
    done = run(nodes, Traces(labels=("healthd.internal/gate",), key=KEY, owner=None, namespace="healthd-system"))
    assert done == ("node n5: label healthd.internal/gate is removed",)
    assert run(nodes, Traces(labels=("healthd.internal/gate",), key=KEY, owner=None, namespace="healthd-system")) == ()
