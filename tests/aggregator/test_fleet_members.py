"""Who is a member of the fleet: nodes that sync, and those that a person lists. And how one stops being one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.aggregator.store.reading import read_history
from healthd.core.errors import ConflictError
from healthd.core.model import Quarantine
from tests.aggregator.api_kit import POLICY, living, scenario
from tests.aggregator.engine_kit import running
from tests.aggregator.parts import KEY, Clock, Node, fleet, state
from tests.aggregator.registry_kit import joined
from tests.aggregator.world import World

QUARANTINE = Quarantine(reason="link flaps", owner="ops", owner_kind="person", since=0.0, until=None)


async def members(client: httpx.AsyncClient) -> list[str]:
    listed = (await client.get("/v1/nodes")).json()["nodes"]
    summary = (await client.get("/v1/fleet")).json()
    assert summary["nodes"] == sum(summary["health"].values()) == len(listed)
    return [node["node"] for node in listed]


@pytest.mark.parametrize(
    "question",
    [
        {"nodes": ["nosuch"]},
        {"nodes": ["n1", "nosuch"]},
        {"nodes": ["nosuch"], "mode": "observe"},
        {"join": {"group": "g", "size": 1, "rank": 0, "member": "m", "node": "nosuch"}},
        {"join": {"group": "g", "size": 1, "rank": 0, "member": "m", "node": "nosuch", "execute": True}},
        {"join": {"group": "g", "size": 2, "rank": 0, "member": "m", "node": "nosuch", "execute": True}},
    ],
    ids=["a typing error", "beside a good one", "observed", "joined", "to run its checks", "in a group"],
)
def test_a_name_in_a_gate_makes_no_member_of_the_fleet(tmp_path: Path, question: dict[str, Any]) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"):
            gate = (await client.post("/v1/gates", json={"job": "typo", **question})).json()["id"]
            assert await members(client) == ["n1"], "while the gate is open"
            assert 'healthd_fleet_nodes{health="unknown",injected="false"} 0.0' in (await client.get("/metrics")).text
            await client.delete(f"/v1/gates/{gate}/lease")
            assert (await client.get(f"/v1/gates/{gate}")).json()["decision"] != "hold"
            assert await members(client) == ["n1"], "after it"
            assert (await client.get("/v1/nodes/nosuch")).status_code == 404

    scenario(test, tmp_path)


def test_a_name_in_a_gate_is_no_member_after_a_restart_either(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/gates", json={"job": "typo", "nodes": ["nosuch"]})).status_code == 200

    async def after(client: httpx.AsyncClient) -> None:
        decision = (await client.get("/v1/gates/typo?wait=5")).json()
        assert decision["decision"] == "reject"
        assert await members(client) == []

    scenario(test, tmp_path)
    scenario(after, tmp_path)


def test_a_person_lists_a_node_before_it_has_come_until_they_let_it_in(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        kept = await client.put("/v1/nodes/new/quarantine?unseen=true", json={"reason": "burn-in"})
        assert (kept.status_code, await members(client)) == (200, ["new"])
        assert (await client.delete("/v1/nodes/new/quarantine")).status_code == 200
        assert await members(client) == []
        async with living(client, "new"):
            assert await members(client) == ["new"]
            await client.put("/v1/nodes/new/quarantine", json={"reason": "burn-in"})
            await client.delete("/v1/nodes/new/quarantine")
            assert await members(client) == ["new"], "it has reported: it stays one"

    scenario(test, tmp_path)


async def test_names_of_gates_take_no_room_of_nodes_and_a_hook_that_speaks_makes_its_node_a_member() -> None:
    clock = Clock()
    registry = fleet(clock, max_nodes=2)
    registry.set_executors({f"n{number}": "m" for number in range(5)})
    assert list(registry.names()) == []
    await joined(registry, clock, "real")
    hook = Node(registry, clock, name="n0")
    await registry.sync_executor("n0", "m", KEY, hook.request(state("n0")), 0.0)
    assert list(registry.names()) == ["n0", "real"]
    assert (registry.view("n1"), registry.near("n00")) == (None, "; did you mean n0?")
    registry.set_executors({})
    assert list(registry.names()) == ["n0", "real"]
    assert registry.node("n1") is None, "nothing is left of a name that never spoke"


def test_a_quarantined_node_that_reports_is_not_forgotten(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"):
            await client.put("/v1/nodes/n1/quarantine", json={"reason": "link flaps", "owner": "ops"})
            refused = await client.delete("/v1/nodes/n1")
            assert refused.status_code == 409
            assert "n1 is quarantined by ops (link flaps) and still reports" in refused.json()["detail"]
            assert "healthd fleet release n1" in refused.json()["detail"]
            assert (await client.get("/v1/nodes/n1")).json()["quarantine"]["reason"] == "link flaps"
            assert await members(client) == ["n1"]
            await client.delete("/v1/nodes/n1/quarantine")
            assert (await client.delete("/v1/nodes/n1")).status_code == 200, "it is let in first, and by name"

    scenario(test, tmp_path)


async def test_a_quarantined_node_that_is_silent_is_forgotten_and_its_quarantine_is_told() -> None:
    async with running(World("n1", "n2")) as run:
        await run.engine.quarantine("n1", QUARANTINE)
        run.world.now += POLICY.silent_seconds
        with pytest.raises(ConflictError, match=r"still reports \(last report 60 s ago\)"):
            await run.engine.forget("n1", "ops")
        run.world.now += 1
        assert (await run.engine.forget("n1", "ops")).quarantine == QUARANTINE
        assert run.engine.quarantines() == {}
        lifted = await run.store.read(lambda connection: read_history(connection, "n1", limit=10))
        assert ("quarantine lifted", "the node was forgotten by ops") in [(one.kind, one.message) for one in lifted]


def test_what_goes_with_a_node_that_is_forgotten_is_said(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"):
            admitted = (await client.post("/v1/gates?wait=5", json={"job": "train", "nodes": ["n1"]})).json()
            assert admitted["decision"] == "admit"
        # Its daemon is gone: the lease that is given back is never seen to end.
        assert (await client.delete("/v1/nodes/n1")).status_code == 409, "a job uses it"
        await client.delete(f"/v1/gates/{admitted['id']}/lease")
        said = (await client.delete("/v1/nodes/n1")).json()
        assert [row["lease"]["job"] for row in said["leases"]] == ["train"]
        assert (said["quarantine"], said["rules"], said["accused"]) == (None, None, None)

    scenario(test, tmp_path)
