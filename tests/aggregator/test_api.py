"""The aggregator over real HTTP with a real database: gates, nodes, people's words, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.contract import Status
from healthd.aggregator.policy import Policy
from healthd.aggregator.process import aggregator
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.model import PROTOCOL, OrderReport, SyncRequest
from healthd.core.wire import encode
from tests.aggregator.api_kit import POLICY, Daemon, living, running, scenario
from tests.aggregator.described import check_now
from tests.aggregator.parts import KEY, state
from tests.patience import PATIENCE


def test_a_gate_admits_names_its_nodes_and_gives_them_back(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", "n2"):
            question = {"job": "train", "nodes": ["n1", "n2"]}
            response = await client.post("/v1/gates?wait=5", json=question)
            decision = response.json()
            assert (response.status_code, decision["decision"]) == (200, "admit"), decision
            assert [node["node"] for node in decision["nodes"]] == ["n1", "n2"]
            assert response.headers["server-timing"].startswith("grant;dur=")
            # The same again, by POST, by id and by job: the same answer.
            assert (await client.post("/v1/gates", json=question)).json() == decision
            for name in (decision["id"], "train"):
                assert (await client.get(f"/v1/gates/{name}")).json() == decision
            held = (await client.get("/v1/nodes/n1")).json()
            assert held["allocated"][0]["by"] == "lease"
            assert held["grants"][0]["lease"]["job"] == "train"
            other = await client.post("/v1/gates", json={"job": "other", "nodes": ["n1"]})
            assert other.json()["decision"] == "hold"
            assert other.headers["retry-after"] == "1"
            assert "train" in other.json()["reasons"][0]["message"]
            listed = (await client.get("/v1/gates")).json()["gates"][0]
            assert listed["reasons"] == other.json()["reasons"], "the list says what holds it now"
            assert (await client.delete(f"/v1/gates/{decision['id']}/lease")).status_code == 200
            got = await client.get(f"/v1/gates/{other.json()['id']}?wait=5")
            assert got.json()["decision"] == "admit", got.json()

    scenario(test, tmp_path)


@pytest.mark.parametrize("started_again", [False, True], ids=["its nodes have its leases", "a node was started again"])
def test_an_admission_is_repeated_once_its_nodes_say_that_they_still_hold_its_leases(
    tmp_path: Path, started_again: bool
) -> None:
    """Whoever asks again may never have heard of it, and a machine that was started again has no evidence."""

    async def test(client: httpx.AsyncClient) -> None:
        question = {"job": "train", "nodes": ["n1", "n2"]}
        async with living(client, "n1", "n2") as daemons:
            admitted = (await client.post("/v1/gates?wait=5", json=question)).json()
            assert admitted["decision"] == "admit", admitted
        held = (await client.post("/v1/gates?wait=0.2", json=question)).json()
        assert (held["decision"], held["id"], held["reasons"][0]["code"]) == ("hold", admitted["id"], "Silent"), held
        assert (await client.post("/v1/gates", json=question)).json() == admitted, "what was decided stands"
        if started_again:
            done = OrderReport(status="done", message="the machine was started again")
            daemons[0].reports, daemons[0].leases = dict.fromkeys(daemons[0].leases, done), {}
            daemons[0].take = lambda _orders: None  # type: ignore[method-assign]  # an order that was seen is not done twice
        asking = asyncio.create_task(client.post(f"/v1/gates?wait={4 * PATIENCE}", json=question))
        lives = [asyncio.create_task(daemon.live()) for daemon in daemons]
        told = await asking
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        assert told.status_code == (409 if started_again else 200), told.text
        assert ("its lease on n1 has ended" in told.text) if started_again else (told.json() == admitted)

    scenario(test, tmp_path)


def test_claims_are_open_gates_and_leases_of_the_workloads_that_are_asked_for(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async def claims(prefix: str) -> list[dict[str, Any]]:
            answer = await client.get("/v1/claims", params={"workload": prefix})
            assert answer.status_code == 200, answer.text
            found: list[dict[str, Any]] = answer.json()["claims"]
            return found

        async with living(client, "n1", "n2"):
            asked = {"job": "ml/a", "attempt": 7, "nodes": ["n1"], "workload": "kueue:c/ml/a/u1"}
            has = (await client.post("/v1/gates?wait=5", json=asked)).json()
            await client.post("/v1/gates?wait=5", json={"job": "other", "nodes": ["n2"], "workload": "slurm:7"})
            more = {"job": "ml/b", "nodes": ["n1"], "workload": "kueue:c/ml/b/u2"}
            waits = (await client.post("/v1/gates", json=more)).json()
            found = {one["gate"]: one for one in await claims("kueue:c/")}
            assert set(found) == {has["id"], waits["id"]}
            held = found[has["id"]]
            assert (held["job"], held["attempt"], held["workload"]) == ("ml/a", 7, "kueue:c/ml/a/u1")
            assert (held["open"], held["nodes"]) == (False, ["n1"])
            assert 0 <= held["age_seconds"] < 60
            assert (found[waits["id"]]["open"], found[waits["id"]]["nodes"]) == (True, [])
            assert await claims("kueue:other/") == []
            again = (await client.post("/v1/gates", json={**asked, "attempt": 9})).json()
            assert again["decision"] == "hold"
            assert {one["gate"] for one in await claims("kueue:c/ml/a")} == {has["id"], again["id"]}, "its pods may run"
            await client.delete(f"/v1/gates/{has['id']}/lease", params={"node": ["n2"]})
            assert has["id"] in {one["gate"] for one in await claims("kueue:c/")}, "its node is another"
            await client.delete(f"/v1/gates/{has['id']}/lease", params={"node": ["n2", "n1"]})
            assert has["id"] not in {one["gate"] for one in await claims("kueue:c/")}, "one that ends is none"
            assert (await client.get("/v1/claims")).status_code == 400

    scenario(test, tmp_path)


def test_a_bad_node_is_rejected_by_name_and_the_evidence_is_kept(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"), living(client, "n2", status=Status.FAIL):
            got = (await client.post("/v1/gates?wait=5", json={"job": "train", "nodes": ["n1", "n2"]})).json()
            assert (got["decision"], got["retryable"]) == ("reject", True)
            assert got["excluded"][0]["node"] == "n2"
            assert "matmul" in got["reasons"][0]["message"]
            kept = (await client.get("/v1/gates/train/evidence")).json()
            assert {s["node"] for s in kept["states"]} >= {"n2"}
            outcome = {"status": "failed", "message": "exit 1"}
            assert (await client.post(f"/v1/gates/{got['id']}/outcome", json=outcome)).status_code == 200
            assert (await client.get("/v1/gates/train/evidence")).json()["outcome"]["status"] == "failed"
            page = (await client.get("/v1/gates?limit=1")).json()
            assert (page["gates"][0]["id"], page["gates"][0]["decision"]) == (got["id"], "reject")
            rest = (await client.get(f"/v1/gates?limit=1&before={got['id']}")).json()
            assert rest == {"gates": [], "next": None}

    scenario(test, tmp_path)


def test_a_person_keeps_a_node_out_overrides_and_lets_it_in_again(tmp_path: Path) -> None:
    """Rival fault 19: what a person said stands until a person or its end lifts it."""

    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"):
            word = {"reason": "fan is loud", "owner": "ops", "for_seconds": 60}
            assert (await client.put("/v1/nodes/n1/quarantine", json=word)).json()["owner"] == "ops"
            question = {"job": "a", "nodes": ["n1"]}
            got = (await client.post("/v1/gates?wait=5", json=question)).json()
            assert (got["decision"], got["reasons"][0]["code"]) == ("reject", "Quarantined")
            assert "fan is loud" in got["reasons"][0]["message"]
            override = {"reason": "deadline", "owner": "ops", "for_seconds": 60}
            assert (await client.put("/v1/overrides/b", json=override)).status_code == 200
            assert (await client.get("/v1/overrides/b")).json()["reason"] == "deadline"
            got = (await client.post("/v1/gates?wait=5", json={"job": "b", "nodes": ["n1"]})).json()
            assert (got["decision"], got["would"]) == ("admit", "reject"), got
            text = (await client.get("/metrics")).text
            assert "healthd_overrides_active 1.0" in text
            assert 'healthd_quarantined_nodes{owner_kind="person"} 1.0' in text
            assert (await client.delete("/v1/overrides/b")).status_code == 200
            assert (await client.get("/v1/overrides/b")).status_code == 404
            for _ in range(2):
                assert (await client.delete("/v1/nodes/n1/quarantine")).status_code == 200
            assert (await client.get("/v1/nodes/n1")).json()["quarantine"] is None
            assert (await client.get("/v1/nodes/n1")).json()["events"]

    scenario(test, tmp_path)


async def test_a_web_page_of_another_site_changes_nothing_where_no_token_is_asked_for(tmp_path: Path) -> None:
    """Also under a name of its own that it lets point here (DNS rebinding); reading stays free."""
    async with running(tmp_path) as client:
        body = {"reason": "r", "owner": "o"}
        for headers in (
            {"origin": "https://elsewhere.example"},
            {"sec-fetch-site": "cross-site"},
            {"host": "elsewhere.example:8090"},
        ):
            refused = await client.put("/v1/nodes/n1/quarantine", json=body, headers=headers)
            assert refused.status_code == 403, headers
            read = await client.get("/v1/fleet", headers=headers)
            assert read.status_code == 200
        assert (await client.put("/v1/nodes/n1/quarantine?unseen=true", json=body)).status_code < 300


def test_nodes_are_paged_and_filtered(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for name in ("a", "b", "c", "d"):
            daemon = Daemon(
                client, name, pool="x" if name < "c" else "y", status=Status.FAIL if name == "d" else Status.PASS
            )
            await daemon.sync()
            await daemon.sync()

        async def names(query: str) -> tuple[list[str], str | None]:
            page = (await client.get(f"/v1/nodes?{query}")).json()
            return [node["node"] for node in page["nodes"]], page["next"]

        assert await names("") == (["a", "b", "c", "d"], None)
        assert await names("limit=2") == (["a", "b"], "b")
        assert await names("limit=2&after=b") == (["c", "d"], None)
        assert await names("pool=y") == (["c", "d"], None)
        assert await names("label=pool=x&limit=1") == (["a"], "a")
        assert await names("health=unhealthy") == (["d"], None)
        assert await names("pool=none") == ([], None)
        summary = (await client.get("/v1/fleet")).json()
        assert (summary["nodes"], summary["pools"]) == (4, {"x": 2, "y": 2})
        assert summary["health"] == {"healthy": 3, "degraded": 0, "unknown": 0, "unhealthy": 1}
        found = (await client.get("/v1/sd/prometheus?pool=y")).json()
        assert found[0] == {
            "targets": ["10.0.0.1:8080"],
            "labels": {"node": "c", "pool": "y", "instance_type": "t1.large"},
        }
        assert len(found) == 2

    scenario(test, tmp_path)


def test_a_targets_address_that_is_none_is_left_out(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for name, address in (("a", "http://evil/?"), ("b", None), ("c", "[fd00::1]:8080")):
            await Daemon(client, name, address=address).sync()
        assert [t["targets"] for t in (await client.get("/v1/sd/prometheus")).json()] == [["[fd00::1]:8080"]]

    scenario(test, tmp_path)


MANY_NODES = json.dumps({"job": "j", "nodes": [f"n{number}" for number in range(100_000)]}).encode()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("GET", "/nowhere", None, 404, "no such path"),
        ("DELETE", "/v1/fleet", None, 405, "DELETE is not supported for"),
        ("GET", "/v1/nodes/none", None, 404, "no node 'none'"),
        ("GET", "/v1/gates/none", None, 404, "no gate and no job 'none'"),
        ("GET", "/v1/nodes?limit=0", None, 400, "limit"),
        ("GET", "/v1/nodes?limit=1001", None, 400, "limit"),
        ("GET", "/v1/nodes?health=well", None, 400, "health"),
        ("GET", "/v1/nodes?helth=healthy", None, 400, "did you mean 'health'"),
        ("GET", "/v1/nodes?label=x", None, 400, "name=value"),
        ("POST", "/v1/gates?wait=x", b'{"job":"j"}', 400, "wait='x'"),
        ("POST", "/v1/gates", b"", 400, "body: "),
        ("POST", "/v1/gates", b"[]", 400, "body: "),
        ("POST", "/v1/gates", b'{"job":"j","nods":["a"]}', 400, "did you mean 'nodes'"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":"a"}', 400, "$.nodes"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":["a",1]}', 400, "$.nodes[1]"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":["a"],"attempt":"1"}', 400, "$.attempt"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":["a"],"attempt":true}', 400, "$.attempt"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":["a"],"lease":1}', 400, "$.lease"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":["a"],"wait_seconds":NaN}', 400, "$.wait_seconds"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":["a"],"wait_seconds":1e999}', 400, "$.wait_seconds"),
        ("POST", "/v1/gates", b'{"job":"j","join":{"member":"m","sise":2}}', 400, "unknown member 'sise'"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":[' + b"1," * 500_000 + b"1]}", 400, "string - at `$.nodes[0]`"),
        ("POST", "/v1/gates", b"{" + b",".join(b'"x%d":1' % n for n in range(10_000)) + b"}", 400, "10001 members"),
        ("POST", "/v1/gates", b'{"job":"\xff"}', 400, "body: "),
        ("POST", "/v1/gates", b'{"job":"j","' + b"\x01\n\x9b" * 2000 + b'":1}', 400, "body: "),
        ("POST", "/v1/gates", b'{"job":"j","\\n\\u001b' + b"x" * 900 + b'":1}', 400, "unknown member"),
        ("POST", "/v1/gates", b'{"job":"j","pool":"p","count":-1}', 400, "not -1"),
        ("POST", "/v1/gates", b'{"job":"j","nodes":["a"],"max_age_seconds":-1}', 400, "max_age"),
        ("POST", "/v1/gates", b'{"job":"","nodes":["a"]}', 400, "job"),
        ("POST", "/v1/gates", b'{"job":"j"}', 400, "nodes"),
        ("POST", "/v1/gates", MANY_NODES, 400, "nodes"),
        ("POST", "/v1/gates", b'{"job":"' + b"x" * 3_000_000 + b'"}', 413, "at most"),
        ("PUT", "/v1/nodes/a%2Fb/quarantine", b'{"reason":"x"}', 404, ""),
        ("PUT", "/v1/nodes/a%20b/quarantine", b'{"reason":"x"}', 400, "cannot name a node"),
        ("PUT", "/v1/nodes/a/quarantine", b'{"reason":" "}', 400, "'reason'"),
        ("PUT", "/v1/nodes/a/quarantine", b'{"reason":"a\\nb"}', 400, "one line"),
        ("PUT", "/v1/nodes/a/quarantine", b'{"reason":"x","for_seconds":-1}', 400, "in the past"),
        ("PUT", "/v1/nodes/a/quarantine", b'{"reason":"x","for_seconds":1,"until":9e9}', 400, "either"),
        ("PUT", "/v1/nodes/a/quarantine", b'{"reason":"x"}', 404, "--unseen"),
        ("DELETE", "/v1/nodes/a/quarantine", None, 404, "no node 'a'"),
        ("PUT", "/v1/overrides/j", b'{"reason":"x"}', 400, "within 30 days"),
        ("PUT", "/v1/overrides/j", b'{"reason":"x","for_seconds":1e9}', 400, "within 30 days"),
        ("GET", "/v1/overrides/j", None, 404, "no active override"),
        ("POST", "/v1/gates/none/outcome", b'{"status":"ok"}', 404, "no gate"),
        ("POST", "/v1/gates/none/outcome", b'{"status":""}', 400, "$.status"),
        ("DELETE", "/v1/gates/none/lease", None, 404, "no gate"),
        ("DELETE", "/v1/nodes/none", None, 404, "no node"),
        ("POST", "/v1/nodes/none/rekey", None, 404, "no node"),
    ],
    ids=lambda value: value[:40].decode(errors="replace") if isinstance(value, bytes) else str(value),
)  # fmt: skip
def test_bad_input_is_one_clear_problem(
    shared: httpx.Client, method: str, path: str, body: bytes | None, status: int, text: str
) -> None:
    response = shared.request(method, path, content=body)
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem = response.json()
    assert (response.status_code, problem["status"]) == (status, status), problem
    assert text in problem["detail"], problem
    assert "\n" not in problem["detail"]
    assert len(problem["detail"]) < 500


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One aggregator in a thread of its own, for tests that change nothing."""
    import threading

    ready: list[Any] = []
    up = threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()
        settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path_factory.mktemp("shared"))
        async with aggregator(settings, POLICY) as (address, _):
            ready.extend((address, asyncio.get_running_loop(), stop))
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(10)
    hooks = {"response": [check_now]}
    with httpx.Client(base_url=f"http://{ready[0]}", timeout=60.0, verify=False, event_hooks=hooks) as client:
        yield client
    ready[1].call_soon_threadsafe(ready[2].set)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PATCH", "/v1/nodes/n1", "DELETE, GET"),
        ("POST", "/v1/nodes/n1/quarantine", "DELETE, PUT"),
        ("DELETE", "/nodes/n1", "GET"),
        ("GET", "/v1/nodes/n1/sync", "POST"),
    ],
)
def test_who_takes_the_wrong_method_is_told_all_right_ones(
    shared: httpx.Client, method: str, path: str, allowed: str
) -> None:
    response = shared.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)


def test_a_different_question_under_the_same_key_is_a_conflict(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/gates", json={"job": "j", "nodes": ["a"], "wait_seconds": 5})).status_code == 200
        response = await client.post("/v1/gates", json={"job": "j", "nodes": ["b"], "wait_seconds": 5})
        assert response.status_code == 409
        assert response.headers["content-type"] == "application/problem+json"

    scenario(test, tmp_path)


def test_a_duplicate_is_settled_by_an_admin(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        first = Daemon(client, "n1")
        await first.sync()
        await first.sync()
        request = encode(SyncRequest(
            protocol=1, incarnation="i9", seq=1, last_answer=None, since_answer_seconds=None, state=state("n1"),
            digest="d", ages={}, orders={}, issuer=None,
        ))  # fmt: skip
        other = {"x-healthd-node-key": "another-key-another-key"}
        assert (await client.post("/v1/nodes/n1/sync", content=request, headers=other)).status_code == 409
        got = (await client.get("/v1/nodes/n1")).json()
        assert (got["duplicate"], got["health"], got["reasons"][0]["code"]) == (True, "unknown", "DuplicateNode")
        assert (await client.post("/v1/nodes/n1/rekey")).status_code == 200
        assert (await client.post("/v1/nodes/n1/sync", content=request, headers=other)).status_code == 200
        own = {"x-healthd-node-key": KEY}
        assert (await client.post("/v1/nodes/n1/sync", content=request, headers=own)).status_code == 409
        assert (await client.delete("/v1/nodes/n1")).status_code == 200
        assert (await client.get("/v1/nodes/n1")).status_code == 404
        assert (await client.post("/v1/nodes/n1/sync", content=request, headers=own)).status_code == 200

    scenario(test, tmp_path)


def test_a_node_whose_protocol_is_not_spoken_here_is_told_to_update(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        request = encode(SyncRequest(
            protocol=PROTOCOL + 1, incarnation="i1", seq=1, last_answer=None, since_answer_seconds=None,
            state=state("n1"), digest="d", ages={}, orders={}, issuer=None,
        ))  # fmt: skip
        headers = {"x-healthd-node-key": KEY}
        refused = await client.post("/v1/nodes/n1/sync", content=request, headers=headers)
        assert refused.status_code == 400
        assert f"protocol {PROTOCOL + 1} is not supported, only {PROTOCOL}; update the older side" in refused.text
        assert (await client.get("/v1/nodes/n1")).status_code == 404

    scenario(test, tmp_path)


def test_a_leased_node_is_not_forgotten(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"):
            await client.post("/v1/gates?wait=5", json={"job": "train", "nodes": ["n1"]})
            response = await client.delete("/v1/nodes/n1")
            assert response.status_code == 409
            assert "leased to job 'train'" in response.json()["detail"]

    scenario(test, tmp_path)


def test_keys_pools_and_words_survive_a_restart(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient) -> None:
        await Daemon(client, "n1").sync()
        await client.put("/v1/nodes/n1/quarantine", json={"reason": "loud", "owner": "ops"})

    async def second(client: httpx.AsyncClient) -> None:
        node = (await client.get("/v1/nodes/n1")).json()
        assert (node["health"], node["quarantine"]["reason"]) == ("unknown", "loud")
        response = await client.post(
            "/v1/nodes/n1/sync", content=b"{}", headers={"x-healthd-node-key": "another-key-another-key"}
        )
        assert response.status_code == 400  # makes no sense at all, before the key counts
        daemon = Daemon(client, "n1")
        await daemon.sync()
        assert daemon.answer is not None
        assert daemon.answer.quarantine is not None

    scenario(first, tmp_path)
    scenario(second, tmp_path)


def test_leases_of_nodes_that_have_yet_to_report_are_shown_after_a_restart(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"):
            await client.post("/v1/gates?wait=5", json={"job": "train", "nodes": ["n1"]})

    async def second(client: httpx.AsyncClient) -> None:
        (row,) = (await client.get("/v1/nodes")).json()["nodes"]
        assert (row["health"], [one["job"] for one in row["leases"]]) == ("unknown", ["train"])

    scenario(first, tmp_path)
    scenario(second, tmp_path)


def test_liveness_readiness_and_metrics(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        await Daemon(client, "n1").sync()
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200
            assert (await client.head(path)).status_code == 200
        assert (await client.get("/livez")).text == "ok\n"

    scenario(test, tmp_path)


def test_held_gates_are_answered_when_the_aggregator_stops(tmp_path: Path) -> None:
    async def run() -> None:
        stack = contextlib.AsyncExitStack()
        settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path)
        address, _ = await stack.enter_async_context(aggregator(settings, Policy()))
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60.0, verify=False) as client:
            question = {"job": "j", "nodes": ["nobody"], "wait_seconds": 60}
            waiting = asyncio.create_task(client.post("/v1/gates?wait=25", json=question))
            while not (await client.get("/v1/gates")).json()["gates"]:  # noqa: ASYNC110 - the state of a server
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await stack.aclose()
            assert time.monotonic() - began < 4 * PATIENCE
            assert (await waiting).json()["decision"] == "hold"

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))


def test_a_preflight_ends_for_all_or_for_none(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "rank-0", "rank-1"):
            question = {"job": "p", "nodes": ["rank-0", "rank-1"]}
            gate = (await client.post("/v1/gates?wait=5", json=question)).json()
            assert gate["decision"] == "admit"

            async def step(node: str, event: str, wait: float = 5.0) -> dict[str, Any]:
                path = f"/v1/gates/{gate['id']}/handshake?wait={wait}"
                got = await client.post(path, json={"node": node, "event": event})
                assert got.status_code == 200, got.text
                answer: dict[str, Any] = got.json()
                return answer

            first = asyncio.create_task(step("rank-0", "acknowledge"))
            early = await step("rank-1", "wait", wait=0.0)
            assert (early["go"], early["missing"][-1]) == (None, "rank-1")
            assert (await step("rank-1", "acknowledge"))["go"] is True
            assert (await first)["go"] is True
            assert not (await step("rank-0", "told"))["all_told"]
            assert (await step("rank-1", "told"))["all_told"]
            assert not (await step("rank-0", "ended"))["over"]
            assert (await step("rank-1", "ended"))["over"]
            for body in ({"node": "x", "event": "wait"}, {"node": "rank-0", "event": "dance"}):
                assert (await client.post(f"/v1/gates/{gate['id']}/handshake", json=body)).status_code == 400

    scenario(test, tmp_path)


def test_one_that_does_not_acknowledge_stops_the_start_of_all(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "rank-0", "rank-1"):
            question = {"job": "p", "nodes": ["rank-0", "rank-1"]}
            gate = (await client.post("/v1/gates?wait=5", json=question)).json()
            path = f"/v1/gates/{gate['id']}/handshake?wait=5"
            got = (await client.post(path, json={"node": "rank-0", "event": "acknowledge"})).json()
            assert (got["go"], got["missing"], got["over"]) == (False, ["rank-1"], True)

    scenario(test, tmp_path, handshake_seconds=0.2)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"nodes": ["n1"]},
        {"nodes": ["n1", "n2"], "min_nodes": 1},
        {"pool": "train", "count": 1},
        {"pool": "train", "count": 4, "min_nodes": 1},
    ],
)
def test_a_validation_by_hand_that_could_end_without_any_collective_is_refused(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1", "n2"):
            answer = await client.post("/v1/validations", json=asked)
            assert (answer.status_code, "at least two nodes" in answer.text) == (400, True)

    scenario(test, tmp_path)


def test_body_that_is_nested_too_deep_is_a_400_that_says_so(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        async with living(client, "n1"):
            deep = b"[" * 50_000
            for path in ("/v1/gates", "/v1/nodes/n1/sync?wait=0"):
                for body in (deep, b'{"extra": ' + deep + b"]" * 50_000 + b"}"):
                    answer = await client.post(path, content=body, headers={"x-healthd-node-key": KEY})
                    assert answer.status_code == 400, (path, answer.text)
                    assert "nested more than 64 deep" in answer.json()["detail"]

    scenario(test, tmp_path)


def test_control_characters_of_a_node_are_escaped_in_an_answer(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        evil = "\x1b[2J \x9b1A \x7f \u202e"
        async with living(client, "n1", versions={"driver": evil}):
            answer = await client.get("/v1/nodes/n1")
            assert answer.json()["state"]["versions"] == {"driver": evil}
            assert answer.text.isprintable()

    scenario(test, tmp_path)
