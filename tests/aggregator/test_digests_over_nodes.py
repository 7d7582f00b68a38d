"""A node whose devices all err alike agrees with itself, and only other nodes show it: real daemons, real torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.aggregator.cluster import Cluster, ask, release
from tests.aggregator.service import Service, until

pytestmark = pytest.mark.timeout(600)

FAULT = "train_step.block1.gelu=corrupt:1e-6/1"
EXTRA = """
[checks.train_step]
dtypes = ["fp32"]
repeats = 2
parity_steps = 2
timed = 1
"""
NAMED = "layer block1, operation gelu"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Service]]:
    with Cluster(tmp_path_factory.mktemp("digests"), checks=("memory_free", "train_step")) as one:
        aggregator = one.aggregator().start()
        one.node("n1", aggregator=aggregator.url, extra=EXTRA).start(ready=False)
        one.node("n2", "--fault", FAULT, aggregator=aggregator.url, extra=EXTRA).start(ready=False)
        one.healthy("n1", "n2")  # each by itself: repeats, float64, the loss
        yield one, aggregator


def shown(aggregator: Service, node: str) -> dict[str, Any]:
    record: dict[str, Any] = aggregator.get(f"/v1/nodes/{node}").json()
    return record


def reasons(aggregator: Service, node: str) -> list[tuple[str, bool]]:
    """The codes of a node's reasons, and whether they name the operation."""
    return [(one["code"], NAMED in one["message"]) for one in shown(aggregator, node)["reasons"]]


def inject(cluster: Cluster, node: str, *words: str) -> None:
    said = cluster.healthd("fault", *words, "--run-dir", str(cluster.run_dir(node)))
    assert said.code == 0, said.err


@pytest.mark.thorough
def test_only_its_peers_show_a_node_that_errs_alike_on_all_devices(fleet: tuple[Cluster, Service]) -> None:
    cluster, aggregator = fleet
    # Of two that differ neither is accused. A fault is injected on one, so the other is no suspect.
    until(lambda: reasons(aggregator, "n2") == [("DigestMismatch", True)], 20, lambda: str(reasons(aggregator, "n2")))
    assert reasons(aggregator, "n1") == []
    told = shown(aggregator, "n2")
    assert told["health"] == "unknown"
    assert told["reasons"][0]["injected"] is True
    assert "no majority can say which are wrong: n2 on one side, n1 on the other" in told["reasons"][0]["message"]
    held = ask(aggregator.url, "both", ["n1", "n2"], wait=30)
    assert held["decision"] == "reject"
    assert [(one["node"], one["reasons"][0]["code"]) for one in held["excluded"]] == [("n2", "DigestMismatch")]

    # A third tells which it is.
    cluster.node("n3", aggregator=aggregator.url, extra=EXTRA).start(ready=False)
    cluster.healthy("n3")
    until(lambda: reasons(aggregator, "n2") == [("SilentCorruption", True)], 60)
    assert reasons(aggregator, "n1") == reasons(aggregator, "n3") == []
    assert shown(aggregator, "n2")["health"] == "unhealthy"
    assert shown(aggregator, "n2")["reasons"][0]["injected"] is True
    decision = ask(aggregator.url, "third", ["n1", "n2", "n3"], wait=30, min_nodes=2)
    assert decision["decision"] == "admit", decision
    assert [one["node"] for one in decision["nodes"]] == ["n1", "n3"]
    (excluded,) = decision["excluded"]
    assert excluded["reasons"][0]["code"] == "SilentCorruption"
    assert "differs from 2 of 3 nodes of its kind (n1, n3)" in excluded["reasons"][0]["message"]
    release(aggregator.url, decision["id"])

    # All who ask are told the same.
    said = cluster.healthd("fleet", "digests", "--aggregator", aggregator.url)
    assert said.code == 1
    assert said.out.startswith("n2 cpu:0: fp32 step 1: layer block1, operation gelu differs from 2 of 3")
    listed = cluster.healthd("fleet", "status", "--aggregator", aggregator.url, "--json").json["nodes"]
    assert {one["node"]: one["health"] for one in listed} == {"n1": "healthy", "n2": "unhealthy", "n3": "healthy"}
    explained = cluster.healthd("fleet", "explain", decision["id"], "--aggregator", aggregator.url)
    assert "SilentCorruption" in explained.out or "differs from" in explained.out
    assert 'healthd_fleet_digests_differing_nodes{standing="minority"} 1.0' in aggregator.get("/metrics").text
    page = aggregator.get("/nodes/n2")
    assert NAMED in page.text

    # What was injected is taken back; the next run agrees, and the node is free.
    inject(cluster, "n2", "clear")
    until(lambda: reasons(aggregator, "n2") == [], 60, lambda: str(shown(aggregator, "n2")["reasons"]))
    free = ask(aggregator.url, "again", ["n2"], wait=60)
    assert free["decision"] == "admit", free
    kinds: list[str] = []

    def told() -> bool:
        kinds[:] = [one["kind"] for one in aggregator.get("/v1/nodes/n2/history").json()["events"]]
        return {"digest differs", "digest agrees"} <= {*kinds}

    until(told, 10, lambda: str(kinds))
