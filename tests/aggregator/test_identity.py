"""
A credential says for which nodes it may speak: another's claim to a name is refused and changes nothing. With tokens
of a file, whose entries name the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import httpx

from healthd.aggregator.identity.tokens import Scope, new_token
from tests.aggregator.api_kit import POLICY, living
from tests.aggregator.api_kit import running as aggregator
from tests.aggregator.identity_kit import sync
from tests.patience import PATIENCE

OTHER_KEY = "another-key-another-key"
TOKENS: Mapping[str, tuple[tuple[Scope, ...], tuple[str, ...]]] = {
    "all": ((Scope.SYNC, Scope.ADMIN), ()),
    "a-nodes": ((Scope.SYNC,), ("trn-a-*", "head")),
    "b-nodes": ((Scope.SYNC,), ("trn-b-?",)),
    "a-hooks": ((Scope.GATE,), ("trn-a-*",)),
    "b-hooks": ((Scope.GATE,), ("trn-b-*",)),
    "hooks": ((Scope.GATE,), ()),
}


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Callable[[str], httpx.AsyncClient]]:
    """An aggregator whose token file has TOKENS; gives a client for each of them."""
    made = {name: new_token(name, scopes, nodes) for name, (scopes, nodes) in TOKENS.items()}
    file = folder / "tokens.toml"
    file.write_text("".join(entry for _, entry in made.values()))
    file.chmod(0o600)
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(aggregator(folder, POLICY, token_table=file))
        clients = dict[str, httpx.AsyncClient]()
        for name, (token, _) in made.items():
            headers = {"authorization": f"Bearer {token}"}
            one = httpx.AsyncClient(base_url=first.base_url, timeout=60.0, headers=headers)
            clients[name] = await stack.enter_async_context(one)
        yield clients.__getitem__


def scenario(test: Callable[[Callable[[str], httpx.AsyncClient]], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        async with running(folder) as client:
            await test(client)

    asyncio.run(asyncio.wait_for(run(), 30 * PATIENCE))


def test_sync_under_a_name_that_the_token_does_not_cover_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        assert (await sync(client("a-nodes"), "trn-a-1")).status_code == 200
        before = (await client("all").get("/v1/nodes/trn-a-1")).json()
        for node in ("trn-a-1", "trn-b-10", "trn-a-2"):
            refused = await sync(client("b-nodes"), node, OTHER_KEY, "i9")
            assert refused.status_code == 403
            assert refused.json()["detail"] == (
                f"token 'b-nodes' may not act for node '{node}', only for trn-b-?; use a token of that node"
            )
        after = (await client("all").get("/v1/nodes/trn-a-1")).json()
        assert not after["duplicate"]
        assert [one["code"] for one in after["reasons"]] == [one["code"] for one in before["reasons"]]
        assert [one["node"] for one in (await client("all").get("/v1/nodes")).json()["nodes"]] == ["trn-a-1"]
        assert (await client("all").post("/v1/nodes/trn-a-1/rekey")).status_code == 409, "no other key is waiting"

    scenario(test, tmp_path)


def test_claim_within_the_tokens_own_names_is_judged_by_keys_as_ever(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        assert (await sync(client("a-nodes"), "trn-a-1")).status_code == 200
        assert (await sync(client("a-nodes"), "trn-a-1", OTHER_KEY, "i9")).status_code == 409
        assert (await client("all").get("/v1/nodes/trn-a-1")).json()["duplicate"]

    scenario(test, tmp_path)


def test_other_names_count_where_the_token_covers_them(tmp_path: Path) -> None:
    """Else a node could make another's instance id ambiguous, and stop the gates that ask by it."""

    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        await sync(client("all"), "trn-c-1", aliases=("i-0c1",))
        await sync(client("a-nodes"), "trn-a-1", aliases=("i-0c1", "head"))
        assert (await client("all").get("/v1/nodes/i-0c1")).json()["node"] == "trn-c-1"
        assert (await client("all").get("/v1/nodes/head")).json()["node"] == "trn-a-1"
        await sync(client("all"), "trn-c-2", aliases=("i-0c1",))
        assert (await client("all").get("/v1/nodes/i-0c1")).status_code == 409, "an unrestricted token may"

    scenario(test, tmp_path)


def test_hook_that_executes_speaks_for_the_tokens_nodes_alone(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        refused = await sync(client("b-hooks"), "trn-a-1", OTHER_KEY, query="?wait=0&executor=pod-1")
        assert refused.status_code == 403
        own = await sync(client("b-hooks"), "trn-b-1", OTHER_KEY, query="?wait=0&executor=pod-1")
        assert own.json()["title"] == "NotExecutor", "its own is judged by the gate"

    scenario(test, tmp_path)


def test_gates_and_validations_are_asked_for_the_tokens_nodes_alone(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        await sync(client("all"), "trn-a-1", aliases=("i-0a1",))
        await sync(client("all"), "trn-b-1", aliases=("i-0b1",))
        join = {"group": "g", "size": 1, "rank": 0, "member": "m", "node": "trn-b-1"}
        for asked in (
            {"nodes": ["trn-a-1", "trn-b-1"]},
            {"nodes": ["i-0b1"]},
            {"nodes": ["unheard-of"]},
            {"pool": "train", "count": 1},
            {"join": join},
        ):
            refused = await client("a-hooks").post("/v1/gates", json={"job": "train", **asked})
            assert refused.status_code == 403, asked
            assert "token 'a-hooks'" in refused.json()["detail"]
            assert "\n" not in refused.json()["detail"]
        for asked in ({"nodes": ["trn-a-1", "trn-b-1"]}, {"pool": "train", "count": 2}):
            assert (await client("a-hooks").post("/v1/validations", json=asked)).status_code == 403
        assert (await client("all").get("/v1/gates")).json()["gates"] == []
        for job, asked in (("named", {"nodes": ["trn-a-1"]}), ("called", {"nodes": ["i-0a1"]})):
            assert (await client("a-hooks").post("/v1/gates", json={"job": job, **asked})).status_code == 200

    scenario(test, tmp_path)


def test_token_of_some_nodes_stops_nobody_by_many_open_gates_and_held_requests(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        for number in range(1, 10):
            await sync(client("all"), f"trn-a-{number}")

        async def asked(who: str, job: str, node: str, wait: float = 0.0) -> httpx.Response:
            body = {"job": job, "nodes": [node], "tier": "deep", "wait_seconds": 86400.0}
            return await client(who).post(f"/v1/gates?wait={wait:g}", json=body)

        for number in range(64):
            opened = await asked("a-hooks", f"a-{number}", f"trn-a-{1 + number % 8}")
            assert (opened.status_code, opened.json()["decision"]) == (200, "hold")
        node = await asked("a-hooks", "one-more-of-the-node", "trn-a-1")
        token = await asked("a-hooks", "one-more-of-the-token", "trn-a-9")
        assert (node.status_code, token.status_code) == (429, 429)
        assert "policy.open_gates_per_token" in token.json()["detail"]
        assert (await asked("a-hooks", "a-0", "trn-a-1")).status_code == 200, "the same gate again"
        held = [asyncio.create_task(asked("a-hooks", f"a-{number}", "trn-a-1", 20.0)) for number in range(0, 64, 8)]
        held += [asyncio.create_task(client("a-hooks").get("/v1/gates/a-0?wait=20")) for _ in range(57)]
        done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        (more,) = (one.result() for one in done)
        assert (more.status_code, "64 requests are waiting" in more.text) == (429, True)
        for number in range(65):  # of all nodes
            assert (await asked("hooks", f"other-{number}", "trn-a-1")).status_code == 200
        for job in ("a-0", "a-8"):
            assert (await client("a-hooks").delete(f"/v1/gates/lease?job={job}")).status_code == 200
        assert (await asked("a-hooks", "now", "trn-a-9")).status_code == 200
        for task in held:
            task.cancel()
        await asyncio.wait(held)

    scenario(test, tmp_path)


def test_node_has_few_open_gates_of_tokens_of_some_nodes(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        await sync(client("all"), "trn-a-1")
        statuses = []
        for number in range(9):
            body = {"job": f"a-{number}", "nodes": ["trn-a-1"], "tier": "deep"}
            answer = await client("a-hooks").post("/v1/gates", json=body)
            statuses.append(answer.status_code)
        assert statuses == [200] * 8 + [429]
        assert "policy.open_gates_per_node" in answer.json()["detail"]

    scenario(test, tmp_path)


def test_gates_leases_and_outcomes_of_others_nodes_are_left_alone(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        async with living(client("all"), "trn-a-1", "trn-a-2", "trn-b-1"):
            asked = {"job": "train", "nodes": ["trn-a-1", "trn-a-2"]}
            gate = (await client("a-hooks").post("/v1/gates?wait=5", json=asked)).json()
            assert gate["decision"] == "admit", gate
            pool = {"job": "pooled", "pool": "train", "count": 1}
            pooled = (await client("hooks").post("/v1/gates?wait=5", json=pool)).json()
            assert pooled["decision"] == "admit", pooled
            step = {"node": "trn-a-1", "event": "acknowledge"}

            def requests(who: str, gate: str, job: str) -> list[Awaitable[httpx.Response]]:
                to = client(who)
                return [
                    to.post(f"/v1/gates/{gate}/outcome", json={"status": "ok"}),
                    to.post(f"/v1/gates/{gate}/handshake", json=step),
                    to.delete(f"/v1/gates/{gate}/lease"),
                    to.delete("/v1/gates/lease", params={"job": job}),
                ]

            for told in [*requests("b-hooks", gate["id"], "train"), *requests("b-hooks", pooled["id"], "pooled")]:
                assert (await told).status_code == 403
            leases = (await client("all").get("/v1/nodes/trn-a-1")).json()["grants"]
            assert [row["state"] for row in leases] == ["acknowledged"]
            answers = [(await told).status_code for told in requests("a-hooks", gate["id"], "train")]
            assert answers[:3] == [200, 200, 200]
            assert answers[3] in (200, 404), "its leases may have ended by then"
            assert (await client("b-hooks").delete("/v1/gates/lease", params={"job": "none"})).status_code == 404

    scenario(test, tmp_path)


def test_later_attempt_ends_the_leases_of_its_callers_nodes_and_waits_for_the_others(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        async with living(client("all"), "trn-a-1", "trn-a-2", "trn-b-1"):
            asked = {"job": "train", "nodes": ["trn-a-1", "trn-b-1"]}
            assert (await client("hooks").post("/v1/gates?wait=5", json=asked)).json()["decision"] == "admit"
            later = {"job": "train", "attempt": 1, "nodes": ["trn-a-2"]}
            gate = (await client("a-hooks").post("/v1/gates", json=later)).json()["id"]
            at_once = {"job": "other", "nodes": ["trn-b-1"], "wait_seconds": 0}
            assert (await client("b-hooks").post("/v1/gates?wait=5", json=at_once)).json()["decision"] == "reject"
            held = (await client("a-hooks").get(f"/v1/gates/{gate}")).json()
            assert held["decision"] == "hold"
            assert [(why["code"], why["node"]) for why in held["reasons"]] == [("Allocated", "trn-b-1")]
            assert "waiting for attempt 0 of job train on trn-b-1 to end" in held["reasons"][0]["message"]
            states = {
                node: [row["state"] for row in (await client("all").get(f"/v1/nodes/{node}")).json()["grants"]]
                for node in ("trn-a-1", "trn-b-1")
            }
            assert states["trn-b-1"] == ["acknowledged"]
            assert "acknowledged" not in states["trn-a-1"], "its own node is given back"
            assert (await client("hooks").delete("/v1/gates/lease?job=train&attempt=0")).status_code == 404, (
                "superseded"
            )
            first = (await client("hooks").get("/v1/gates?job=train")).json()["gates"][-1]["id"]
            assert (await client("hooks").delete(f"/v1/gates/{first}/lease")).status_code == 200
            assert (await client("a-hooks").get(f"/v1/gates/{gate}?wait=5")).json()["decision"] == "admit"

    scenario(test, tmp_path)


def test_member_of_a_group_is_taken_out_by_a_token_of_its_node_alone(tmp_path: Path) -> None:
    async def test(client: Callable[[str], httpx.AsyncClient]) -> None:
        async with living(client("all"), "trn-a-1", "trn-b-1"):
            for who, rank, node in (("a-hooks", 0, "trn-a-1"), ("b-hooks", 1, "trn-b-1")):
                join = {"group": "g", "size": 3, "rank": rank, "member": f"m{rank}", "node": node}
                asked = await client(who).post("/v1/gates", json={"job": "train", "join": join})
                assert asked.status_code == 200, asked.text
            gate = asked.json()["id"]
            assert (await client("b-hooks").delete(f"/v1/gates/{gate}/members/m0")).status_code == 403
            assert (await client("a-hooks").delete(f"/v1/gates/{gate}/lease")).status_code == 403, "it is b's as well"
            assert (await client("a-hooks").delete(f"/v1/gates/{gate}/members/m0")).status_code == 200

    scenario(test, tmp_path)
