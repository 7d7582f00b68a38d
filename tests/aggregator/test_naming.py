"""Names: what a scheduler calls a node, what its daemon does, and names that nobody has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx

from healthd.aggregator.fleet.registry import Names
from healthd.core.node_name import names_of
from tests.aggregator.api_kit import POLICY, Daemon, living, scenario
from tests.aggregator.parts import state
from tests.every import every

INSTANCE = "i-0123456789abcdef0"


def names(**nodes: tuple[str, ...]) -> Names:
    known = Names()
    for node, others in nodes.items():
        known.put(node, others)
    return known


@every(
    ("asked", "found"),
    [
        ("trn7", ("trn7",)),
        (INSTANCE, ("trn7",)),
        ("ip-10-0-0-7.ec2.internal", ("trn7",)),
        ("ip-10-0-0-7", ("trn7",)),
        ("trn7.cluster.local", ("trn7",)),
        ("ip-10-0-0-7.us-west-2.compute.internal", ()),
        ("ip-10-0-0-8", ()),
        ("10.0.0.7", ()),
        ("trn", ()),
    ],
)
def test_a_node_is_found_by_each_of_its_names_and_by_no_other(asked: str, found: tuple[str, ...]) -> None:
    known = names(trn7=(INSTANCE, "ip-10-0-0-7.ec2.internal"), other=("10.0.0.9",))
    assert known.called(asked) == found


def test_names_with_other_domains_are_other_nodes_and_a_short_one_may_be_either() -> None:
    known = Names()
    known.put("n1.east.example")
    known.put("n1.west.example")
    assert known.called("n1.east.example") == ("n1.east.example",)
    assert known.called("n1.north.example") == ()
    assert known.called("n1") == ("n1.east.example", "n1.west.example")


def test_a_nodes_own_name_is_not_taken_by_another_that_claims_it() -> None:
    known = names(n1=(), n2=("n1",))
    assert known.called("n1") == ("n1",)


def test_names_follow_what_the_node_says_and_go_with_it() -> None:
    known = names(n1=("old",))
    known.put("n1", ("new",))
    assert (known.called("old"), known.called("new")) == ((), ("n1",))
    known.drop("n1")
    assert known.called("new") == known.called("n1") == ()


def test_a_machine_that_calls_itself_localhost_is_not_found_by_that() -> None:
    said = state("n1", aliases=("slurm-n1", "n1"), instance_id=INSTANCE, hostname="localhost")
    assert names_of(said) == ("slurm-n1", INSTANCE)


def ask(job: str, *nodes: str) -> dict[str, object]:
    return {"job": job, "nodes": list(nodes)}


def test_a_gate_finds_nodes_by_what_the_scheduler_calls_them_and_says_so(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", instance_id=INSTANCE), living(client, "n2", hostname="trn-2.example"):
            question = ask("train", INSTANCE, "trn-2")
            got = (await client.post("/v1/gates?wait=5", json=question)).json()
            assert got["decision"] == "admit", got
            assert [(node["node"], node["asked"]) for node in got["nodes"]] == [("n1", INSTANCE), ("n2", "trn-2")]
            assert (await client.get("/v1/nodes/n1")).json()["grants"][0]["lease"]["job"] == "train"
            # What was asked is what counts as the same question.
            assert (await client.post("/v1/gates", json=question)).json() == got
            assert (await client.post("/v1/gates", json=ask("train", "n1", "n2"))).status_code == 409
            other = (await client.post("/v1/gates", json=ask("other", "n1"))).json()
            assert "train" in other["reasons"][0]["message"], "the node is taken, by whichever name"

    scenario(test, tmp_path)


def test_a_bad_node_is_left_out_under_both_names(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", aliases=("slurm-1",)):
            await client.put("/v1/nodes/n1/quarantine", json={"reason": "fan is loud"})
            got = (await client.post("/v1/gates?wait=5", json=ask("train", "slurm-1"))).json()
            assert got["decision"] == "reject"
            assert [(out["node"], out["asked"]) for out in got["excluded"]] == [("n1", "slurm-1")]

    scenario(test, tmp_path)


def test_a_node_that_comes_later_is_found_by_its_other_name_at_once(tmp_path: Path) -> None:
    policy = dataclasses.replace(POLICY, node_grace_seconds=30.0, wait_seconds=30.0)

    async def test(client: httpx.AsyncClient) -> None:
        first = (await client.post("/v1/gates", json=ask("train", INSTANCE))).json()
        assert first["decision"] == "hold"
        async with living(client, "n1", instance_id=INSTANCE):
            got = (await client.get(f"/v1/gates/{first['id']}?wait=5")).json()
            assert (got["decision"], got["nodes"][0]["node"]) == ("admit", "n1"), got

    scenario(test, tmp_path, policy=policy)


def test_a_name_that_two_nodes_have_is_refused_with_both(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", "n2", aliases=("gpu-box",)):
            got = (await client.post("/v1/gates?wait=5", json=ask("train", "gpu-box"))).json()
            assert (got["decision"], got["retryable"]) == ("reject", False)
            assert "gpu-box: n1 and n2 both have this name" in got["reasons"][0]["message"]
            assert "own name" in got["reasons"][0]["message"]

    scenario(test, tmp_path)


def test_one_node_under_two_names_is_not_two_nodes(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", aliases=("slurm-1",)):
            for nodes in (("n1", "slurm-1"), ("slurm-1", "n1")):
                got = (await client.post("/v1/gates?wait=5", json=ask(f"to-{nodes[0]}", *nodes))).json()
                assert (got["decision"], got["retryable"]) == ("reject", False)
                assert "slurm-1 is another name of n1" in got["reasons"][0]["message"]

    scenario(test, tmp_path)


def test_a_slip_in_a_name_makes_no_node_and_one_that_has_yet_to_come_is_meant_on_purpose(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await Daemon(client, "trn-17", instance_id=INSTANCE).sync()
        word = {"reason": "smells of smoke"}
        refused = await client.put("/v1/nodes/trn-71/quarantine", json=word)
        assert (refused.status_code, refused.headers["content-type"]) == (404, "application/problem+json")
        detail = refused.json()["detail"]
        assert detail.startswith("no node 'trn-71' has ever reported; did you mean trn-17")
        assert "--unseen" in detail
        other = (await client.put(f"/v1/nodes/{INSTANCE}/quarantine", json=word)).json()["detail"]
        assert f"trn-17 is also known as '{INSTANCE}'" in other
        assert [node["node"] for node in (await client.get("/v1/nodes")).json()["nodes"]] == ["trn-17"]

        assert (await client.put("/v1/nodes/trn-71/quarantine?unseen=true", json=word)).status_code == 200
        await Daemon(client, "trn-71").sync()
        kept = (await client.get("/v1/nodes/trn-71")).json()
        assert kept["quarantine"]["reason"] == "smells of smoke"
        # Known by now: said again without more ado.
        assert (await client.put("/v1/nodes/trn-71/quarantine", json=word)).status_code == 200

    scenario(test, tmp_path)


def test_who_a_gate_was_asked_for_is_known_after_a_restart(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", aliases=("slurm-1",)):
            got = (await client.post("/v1/gates?wait=5", json=ask("train", "slurm-1"))).json()
            assert got["decision"] == "admit"

    async def second(client: httpx.AsyncClient) -> None:
        again = await client.post("/v1/gates?wait=5", json=ask("train", "slurm-1"))
        assert again.json()["nodes"][0]["asked"] == "slurm-1", again.text

    scenario(first, tmp_path)
    scenario(second, tmp_path)


def test_people_may_call_a_node_by_any_of_its_names_and_by_none_that_two_have(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", aliases=("slurm-1", "gpu-box")), living(client, "n2", aliases=("gpu-box",)):
            await client.put("/v1/nodes/n1/quarantine", json={"reason": "fan is loud"})
            shown = (await client.get("/v1/nodes/slurm-1")).json()
            assert (shown["node"], shown["quarantine"]["reason"]) == ("n1", "fan is loud")
            assert shown["events"], "its history is kept under its own name"
            for method, path in (("GET", "/v1/nodes/gpu-box"), ("DELETE", "/v1/nodes/gpu-box/quarantine")):
                refused = await client.request(method, path)
                assert refused.status_code == 409
                assert "gpu-box: n1 and n2 both have this name" in refused.json()["detail"]
            released = (await client.delete("/v1/nodes/slurm-1/quarantine")).json()
            assert (released["node"], released["quarantine"]) == ("n1", None)
            assert (await client.get("/v1/nodes/n1")).json()["quarantine"] is None
            assert (await client.get("/v1/nodes/nobody")).status_code == 404

    scenario(test, tmp_path)


SLASHES = "team%2Frun%201"


def test_a_job_with_slashes_in_its_name_is_overridden_explained_and_left_as_any_other(tmp_path: Path) -> None:
    """torchrun's run id is free text, and so is the name that a hook gives itself."""

    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", "n2"):
            word = {"reason": "deadline", "for_seconds": 60}
            assert (await client.put(f"/v1/overrides/{SLASHES}", json=word)).json()["job"] == "team/run 1"
            assert (await client.get(f"/v1/overrides/{SLASHES}")).json()["reason"] == "deadline"
            got = (await client.post("/v1/gates?wait=5", json=ask("team/run 1", "n1"))).json()
            assert (got["decision"], got["would"] is not None) == ("admit", True), got
            assert (await client.get(f"/v1/gates/{SLASHES}")).json()["id"] == got["id"]
            kept = (await client.get(f"/v1/gates/{SLASHES}/evidence")).json()
            assert kept["gate"]["id"] == got["id"]
            assert (await client.delete(f"/v1/overrides/{SLASHES}")).status_code == 200
            assert (await client.get(f"/v1/overrides/{SLASHES}")).status_code == 404

            join = {"group": "g", "size": 2, "rank": 0, "member": "ns/pod", "node": "n2"}
            gate = (await client.post("/v1/gates", json={"job": "g", "join": join})).json()["id"]
            assert (await client.delete(f"/v1/gates/{gate}/members/ns%2Fpod")).status_code == 200
            waits = (await client.get(f"/v1/gates/{gate}")).json()["reasons"][0]["message"]
            assert "0 of 2 members have joined" in waits

    scenario(test, tmp_path)
