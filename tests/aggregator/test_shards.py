"""Several aggregators that share the shards of a fleet on one PostgreSQL, as processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from tests.aggregator.cluster import Cluster, release
from tests.aggregator.service import Said, readiness, until
from tests.aggregator.sharded import Fleet
from tests.patience import PATIENCE

pytestmark = [pytest.mark.system, pytest.mark.parametrize("url", ["postgresql"], indirect=True)]

TAKEOVER_SECONDS = 10.0


@pytest.fixture
def fleet(tmp_path: Path, url: str) -> Iterator[Fleet]:
    with Cluster(tmp_path) as cluster:
        yield Fleet(cluster, url)


def test_two_aggregators_lead_a_shard_each_and_gate_in_it(fleet: Fleet) -> None:
    first, second = fleet.begin()
    for asked in (first, second):
        for node in ("n1", "n2"):
            admitted = fleet.cluster.gate(asked.url, f"{node}-by-{asked.name}", "--node", node, "--wait", "60s")
            assert admitted.code == 0, admitted.err + fleet.said()
            release(asked.url, admitted.json["id"])
    refused = fleet.cluster.gate(first.url, "both", "--node", "n1", "--node", "n2")
    assert refused.code == 2, refused
    assert "n2 is of b, n1 of default" in refused.err


def test_shards_are_shared_among_those_that_come_and_go(fleet: Fleet) -> None:
    first, second = fleet.add(), fleet.add()
    for node, part in (("n1", None), ("n2", "b"), ("n3", "c"), ("n4", "d")):
        fleet.node(node, part)
    fleet.wait_for_shares(first, [2, 2], 40)
    third = fleet.add()
    fleet.wait_for_shares(first, [1, 1, 2], 40)
    until(lambda: fleet.led(second) == fleet.led(third) and None not in fleet.led(third).values(), 5, fleet.said)
    for node in ("n1", "n2", "n3", "n4"):
        fleet.cluster.healthy(node)
    held = {}
    for node in ("n1", "n2", "n3", "n4"):
        admitted = fleet.cluster.gate(second.url, f"first-{node}", "--node", node, "--wait", "60s")
        assert admitted.code == 0, admitted.err + fleet.said()
        asked = ("gate", "--aggregator", second.url, "--job", f"next-{node}", "--node", node, "--wait", "90s")
        held[node] = (admitted.json["id"], fleet.cluster.start(*asked))
    summary = third.get("/v1/fleet").json()
    assert (summary["nodes"], summary["leased"], summary["unanswered"]) == (4, 4, {})
    assert [row["node"] for row in third.get("/v1/nodes?limit=3").json()["nodes"]] == ["n1", "n2", "n3"]
    assert [row["node"] for row in third.get("/v1/nodes?limit=3&after=n3").json()["nodes"]] == ["n4"]
    asked_for = {f"next-{node}" for node in held}
    until(lambda: {row["job"] for row in third.get("/v1/gates").json()["gates"]} >= asked_for, 15, fleet.said)
    shown = fleet.cluster.healthd("fleet", "status", "--aggregator", third.url)
    assert shown.code == 0, shown.err
    for shard, leader in fleet.led(third).items():
        assert f"shard {shard}: led by {leader}" in shown.out
    metrics = "".join(one.get("/metrics").text for one in fleet.aggregators)
    assert metrics.count("\nhealthd_aggregator_tasks ") == len(fleet.aggregators)
    for shard in ("default", "b", "c", "d"):
        assert f'healthd_aggregator_leader{{shard="{shard}"}} 1.0' in metrics

    first.kill()
    began = time.monotonic()
    until(lambda: first.url not in fleet.led(third).values(), TAKEOVER_SECONDS, fleet.said)
    until(lambda: None not in fleet.led(third).values(), TAKEOVER_SECONDS, fleet.said)
    assert time.monotonic() - began < TAKEOVER_SECONDS * PATIENCE
    fleet.wait_for_shares(third, [2, 2], 20)
    for gate, hook in held.values():
        release(third.url, gate)
        said = hook.said(60)
        assert said.code == 0, said.err + fleet.said()


def test_what_is_killed_with_its_shard_is_shown_as_unknown_and_never_as_healthy(fleet: Fleet) -> None:
    first, second = fleet.begin()
    led = fleet.led(first)
    (lost,) = (shard for shard, url in led.items() if url == second.url)
    until(lambda: f"leader of {lost}" in readiness(second))  # its row is there before it has read the database
    second.signal(signal.SIGSTOP)
    found = first.get("/v1/fleet").json()
    assert found["unanswered"].keys() == {lost}
    assert found["nodes"] == 1
    assert f"{lost} does not answer" in found["recovering"]
    until(lambda: first.get("/v1/fleet").json()["unanswered"] == {}, 20, fleet.said)
    assert fleet.led(first)[lost] == first.url
    second.signal(signal.SIGCONT)
    fleet.wait_for_shares(first, [1, 1], 30)


def test_label_of_the_shards_is_the_same_on_all_aggregators(fleet: Fleet, url: str) -> None:
    fleet.add()
    other = fleet.cluster.healthd("aggregator", "--database", url, "--listen", "127.0.0.1:0")
    assert other.code == 2
    assert 'made of the label "part"' in other.err
    config = fleet.cluster.folder / "lite.toml"
    config.write_text('[aggregator]\nshard_label = "part"\n')
    lite = fleet.cluster.healthd("aggregator", "--config", str(config), "--database", "sqlite://")
    assert lite.code == 2
    assert "SQLite has one shard" in lite.err


def test_requests_find_the_shard_by_what_they_name(fleet: Fleet) -> None:
    first, second = fleet.begin()
    of_b = first if fleet.led(first)["b"] == first.url else second
    other = second if of_b is first else first

    until(lambda: other.get("/v1/fleet").json()["pools"] == {"a": 2}, 20, fleet.said)
    pool = fleet.cluster.gate(other.url, "pool", "--pool", "a", "--count", "1")
    assert pool.code == 2
    assert "a node of pool a is of b, a node of pool a of default" in pool.err
    join = ("gate", "--aggregator", other.url, "--job", "group", "--join", "g", "--size", "2", "--wait", "60s")
    waits = fleet.cluster.start(*join, "--rank", "0", "--node", "n1")
    until(lambda: bool(other.get("/v1/gates?job=group").json()["gates"]), 15, fleet.said)
    late = fleet.cluster.healthd(*join, "--rank", "1", "--node", "n2")
    assert late.code == 2, late
    assert "n2 is of b, another member of the group of default" in late.err
    waits.process.send_signal(signal.SIGTERM)
    waits.said()

    admitted = fleet.cluster.gate(other.url, "train", "--node", "n2", "--wait", "60s")
    assert admitted.code == 0, admitted.err
    gate = admitted.json["id"]
    for name in (gate, "train"):
        assert other.get(f"/v1/gates/{name}").json()["id"] == gate
        assert other.get(f"/v1/gates/{name}/evidence").json()["gate"]["id"] == gate
    assert httpx.delete(f"{other.url}/v1/gates/lease?job=train", trust_env=False, timeout=30).status_code == 200
    assert other.get("/v1/gates/nothing").status_code == 404
    assert other.get("/v1/nodes/nobody").status_code == 404
    assert other.get("/v1/nodes?limt=1").status_code == 400
    assert "name it with ?shard= (--shard), one of: b, default" in other.get("/v1/report").json()["detail"]
    assert other.get("/v1/report?shard=b").status_code == 200
    assert [row["node"] for row in other.get("/v1/nodes?shard=b").json()["nodes"]] == ["n2"]
    assert "no shard is named 'x'; there are: b, default" in other.get("/v1/nodes?shard=x").json()["detail"]
    for name, lists in (
        ("stragglers", {"nodes", "confirmed", "suspects"}),
        ("digests", {"nodes", "compared", "accused", "suspects"}),
        ("steps", {"jobs", "slow"}),
    ):
        whole, one = (other.get(f"/v1/fleet/{name}{query}").json() for query in ("", "?shard=b"))
        assert whole.keys() == one.keys() == {*lists, "unanswered"}
    assert other.get("/v1/fleet/samples").json().keys() == {"series"}
    assert other.get("/v1/claims?workload=pod").json() == {"claims": []}
    at_other = ("--aggregator", other.url)
    missing = fleet.cluster.healthd("fleet", "report", *at_other)
    assert missing.code == 2
    assert "one of: b, default" in missing.err
    assert fleet.cluster.healthd("fleet", "report", "--shard", "b", *at_other).code == 0
    listed = fleet.cluster.healthd("fleet", "status", "--shard", "b", *at_other)
    assert ("n2" in listed.out, "n1" in listed.out, listed.code) == (True, False, 0)
    assert "b: leader of b" in of_b.get("/readyz").text
    assert f"b: standby (leader: {of_b.url})" in other.get("/readyz").text

    word = {"reason": "not yet"}
    ahead = httpx.put(f"{other.url}/v1/nodes/n9/quarantine?unseen=true", json=word, trust_env=False, timeout=30)
    assert ahead.status_code == 200, ahead.text
    fleet.node("n9", "c")
    until(lambda: other.get("/v1/nodes/n9").status_code == 200, 30, fleet.said)


def test_node_whose_label_changes_stays_until_it_is_forgotten(fleet: Fleet) -> None:
    first = fleet.add()
    fleet.node("n1", "b")
    fleet.cluster.healthy("n1")
    until(lambda: first.get("/v1/nodes?shard=b").json()["nodes"] != [], 20, fleet.said)
    node = fleet.cluster.services["n1"]
    node.kill()
    fleet.node("n1", "c")

    def history() -> str:
        return first.get("/v1/nodes/n1/history").text

    until(lambda: "stays in shard b until" in history(), 30, fleet.said)
    assert fleet.led(first).keys() == {"default", "b"}
    said = "is placed in shard b, and its label says c: it stays until 'healthd fleet forget n1'"
    for command in (("status",), ("show", "n1")):
        shown = fleet.cluster.healthd("fleet", *command, "--aggregator", first.url)
        assert said in " ".join(shown.out.split()), shown.out
    assert "its label says c" in first.get("/nodes/n1").text
    fleet.cluster.services["n1"].kill()
    assert fleet.cluster.healthd("fleet", "forget", "n1", "--aggregator", first.url).code == 0
    fleet.node("n1", "c")
    until(lambda: "c" in fleet.led(first), 30, fleet.said)
    until(lambda: first.get("/v1/nodes?shard=c").json()["nodes"] != [], 30, fleet.said)
    assert first.get("/v1/nodes?shard=b").json()["nodes"] == []


def test_shard_without_nodes_is_removed_and_one_with_something_is_not(fleet: Fleet, url: str) -> None:
    first, second = fleet.add(), fleet.add()
    fleet.node("n1", "b")
    fleet.wait_for_shares(first, [1, 1])
    fleet.cluster.healthy("n1")
    admitted = fleet.cluster.gate(first.url, "train", "--node", "n1", "--wait", "60s")
    assert admitted.code == 0, admitted.err
    gate = admitted.json["id"]

    def remove(shard: str = "b") -> Said:
        return fleet.cluster.healthd("aggregator", "--database", url, "--remove-shard", shard)

    with_nodes = remove()
    assert (with_nodes.code, "shard b has 1 node (n1); forget each" in with_nodes.err) == (1, True)
    release(first.url, gate)
    until(lambda: first.get("/v1/fleet").json()["leased"] == 0, 20, fleet.said)
    fleet.cluster.services["n1"].kill()
    forgotten = fleet.cluster.healthd("fleet", "forget", "n1", "--aggregator", first.url)
    assert forgotten.code == 0, forgotten.err + fleet.said()
    with_table(url, "INSERT INTO healthd_b.leases VALUES ('l', 'g', 'n', 'granted', 0, false, '{}')")
    assert "shard b has 1 lease; release" in remove().err
    with_table(url, "DELETE FROM healthd_b.leases WHERE id = 'l'; UPDATE healthd_b.gates SET phase = 'checking'")
    assert "shard b has 1 open gate; release" in remove().err
    with_table(url, "UPDATE healthd_b.gates SET phase = 'decided'")
    assert fleet.led(first).keys() == {"default", "b"}
    removed = remove()
    assert (removed.code, removed.out) == (0, "shard b is removed, and with it 1 decided gate\n"), removed.err
    for asked in (first, second):
        until(lambda asked=asked: fleet.led(asked).keys() == {"default"}, 10, fleet.said)
        assert asked.get("/v1/fleet").json()["unanswered"] == {}
    for shard, told in (("b", "has no shard 'b', but: default"), ("default", "cannot be removed")):
        refused = remove(shard)
        assert (refused.code, told in refused.err) == (2, True), refused.err
    fleet.node("n1", "b")
    until(lambda: "b" in fleet.led(first) and first.get("/v1/nodes?shard=b").json().get("nodes"), 30, fleet.said)


def with_table(url: str, statements: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statements)
    engine.dispose()
