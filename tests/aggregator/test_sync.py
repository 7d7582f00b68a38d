"""The sync line over real HTTP: held requests, orders, bounds, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from healthd.aggregator.api.sync import SyncEndpoint
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.identity.tokens import Guard, Scope, new_token
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.http.server import Limits, Server, address_of, bind
from healthd.core.model import Order, OrderReport, Quarantine, RankReport, SyncAnswer, SyncRequest
from healthd.core.wire import decode, encode
from tests.aggregator.lab import inventory
from tests.aggregator.parts import KEY, Node, fleet, state
from tests.aggregator.sync_kit import nothing_behind
from tests.patience import PATIENCE

LEASE = Order(id="o-1", kind="lease", deadline_seconds=30.0)


class Line:
    """A node on a real connection."""

    def __init__(self, registry: Fleet, client: httpx.AsyncClient, name: str = "n1") -> None:
        self.client, self.node = client, Node(registry, time.monotonic, name=name)  # type: ignore[arg-type]

    async def post(self, request: SyncRequest | bytes, wait: str = "", **headers: str) -> httpx.Response:
        body = request if isinstance(request, bytes) else encode(request)
        headers = {"x-healthd-node-key": KEY} | {k.replace("_", "-"): v for k, v in headers.items()}
        return await self.client.post(f"/v1/nodes/{self.node.name}/sync{wait}", content=body, headers=headers)

    async def say(self, *args: Any, wait: str = "", **changes: Any) -> SyncAnswer:
        response = await self.post(self.node.request(*args, **changes), wait)
        assert response.status_code == 200, response.text
        answer = decode(response.content, SyncAnswer, what="answer")
        self.node.answer, self.node.received_at = answer, time.monotonic()
        return answer

    async def join(self) -> None:
        await self.say(state(self.node.name))
        await self.say(None)


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, guard: Guard | None = None, limits: Limits | None = None, *, below: bool = True, **changes: Any
) -> AsyncIterator[tuple[Fleet, Line]]:
    import healthd.aggregator.fleet.registry as module

    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path, **changes)
    registry = fleet(module.boottime)  # type: ignore[arg-type]
    sock = bind(settings.listen)
    app = SyncEndpoint(nothing_behind, fleet=registry, guard=guard or Guard(None), settings=settings)
    async with (
        Server(app, [sock], limits=limits, direct=app if below else None),
        httpx.AsyncClient(base_url=f"http://{address_of(sock)}", timeout=60.0, verify=False) as client,
    ):
        yield registry, Line(registry, client)
        registry.release_all()


def scenario(test: Callable[[Fleet, Line], Awaitable[None]], tmp_path: Path, **changes: Any) -> None:
    """Run it twice: answered below ASGI, as in an aggregator, and all of it by ASGI."""

    async def run(*, below: bool) -> None:
        async with serving(tmp_path, below=below, **changes) as (registry, line):
            await test(registry, line)

    for below in (True, False):
        asyncio.run(asyncio.wait_for(run(below=below), 20 * PATIENCE))


async def soon(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.002)


def held(registry: Fleet, name: str = "n1") -> bool:
    return registry._records[name].held is not None


def test_the_first_contact_is_answered_at_once_and_the_next_is_held(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        answer = await line.say(state(), wait="?wait=25")
        assert (answer.orders, answer.send_all, answer.issuer) == (None, False, "db-1")
        waiting = asyncio.create_task(line.say(None, wait="?wait=25"))
        await soon(lambda: held(registry))
        registry.set_orders("n1", (LEASE,))
        answer = await waiting
        assert answer.orders == (LEASE,)
        assert answer.seq > 0

    scenario(test, tmp_path)


def test_a_held_request_is_woken_by_quarantine_acknowledgement_and_stop(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        await line.join()
        done = {"o-1": OrderReport(status="done")}
        quarantine = Quarantine(reason="noise", owner="me", owner_kind="person", since=0.0, until=None)
        for act, check in (
            (lambda: registry.set_quarantine("n1", quarantine), lambda a: a.quarantine == quarantine),
            (lambda: registry.acknowledge("n1", ["o-1"]), lambda a: a.acknowledged == ("o-1",)),
            (registry.release_all, lambda a: not a.send_all),
        ):
            waiting = asyncio.create_task(line.say(None, wait="?wait=25", orders=done))
            await soon(lambda: held(registry))
            act()
            assert check(await waiting)
        # Once the aggregator stops it holds nobody any more.
        await asyncio.wait_for(line.say(None, wait="?wait=25", orders=done), 2 * PATIENCE)

    scenario(test, tmp_path)


def test_a_newer_request_releases_the_older_one(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        await line.join()
        older = asyncio.create_task(line.post(line.node.request(None), "?wait=25"))
        await soon(lambda: held(registry))
        newer = asyncio.create_task(line.post(line.node.request(None), "?wait=25"))
        assert (await asyncio.wait_for(older, 2 * PATIENCE)).status_code == 200
        await soon(lambda: held(registry))
        assert not newer.done()
        registry.set_orders("n1", ())
        await newer

    scenario(test, tmp_path)


def test_an_urgent_request_is_answered_while_another_is_held(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        await line.join()
        waiting = asyncio.create_task(line.post(line.node.request(None), "?wait=25"))
        await soon(lambda: held(registry))
        answer = await line.say(state(age=2.0), digest="d2", wait="?wait=0")
        assert not answer.send_all
        assert not waiting.done()
        registry.release_all()
        await waiting

    scenario(test, tmp_path)


def test_orders_that_an_answer_lost_on_its_way_told_are_told_again_at_once(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        await line.join()
        registry.set_orders("n1", (LEASE,))
        kept = line.node.answer
        await line.say(None)
        line.node.answer = kept  # the answer with the order never arrived
        answer = await asyncio.wait_for(line.say(None, wait="?wait=25"), 2 * PATIENCE)
        assert answer.orders == (LEASE,)

    scenario(test, tmp_path)


def test_time_is_up_after_the_wait_and_never_later_than_hold(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        await line.join()
        began = time.monotonic()
        await line.say(None, wait="?wait=9999")
        assert 0.05 <= time.monotonic() - began < 5 * PATIENCE

    scenario(test, tmp_path, hold_max_seconds=0.1)


def test_final_reports_are_acknowledged_until_the_node_drops_them(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        taken: list[dict[str, OrderReport]] = []
        registry.listen(lambda name: taken.append(dict(registry.node(name).orders)))  # type: ignore[union-attr]
        registry.listen(lambda name: registry.acknowledge(name, [i for i in taken[-1] if i == "o-1"]))
        await line.join()
        done = {"o-1": OrderReport(status="done"), "o-2": OrderReport(status="running")}
        assert (await line.say(None, orders=done)).acknowledged == ("o-1",)
        assert taken[-1] == done
        assert (await line.say(None, orders=done)).acknowledged == ("o-1",)
        assert taken[-1] == {"o-2": done["o-2"]}
        assert (await line.say(None, orders={})).acknowledged == ()

    scenario(test, tmp_path)


def test_what_is_no_sync_gets_one_clear_problem(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        good = encode(line.node.request(state()))
        other = json.loads(good) | {"protocol": 99}
        cases: list[tuple[bytes, str, dict[str, str], int, str]] = [
            (b"", "", {}, 400, "sync: "),
            (b"{}", "", {}, 400, "protocol"),
            (good[:-20], "", {}, 400, "sync: "),
            (good.replace(b'"seq":1', b'"seq":"x"'), "", {}, 400, "$.seq"),
            (good.replace(b'"age_seconds":1.0', b'"age_seconds":NaN'), "", {}, 400, "sync: "),
            (good.replace(b'"age_seconds":1.0', b'"age_seconds":1e999'), "", {}, 400, "sync: "),
            (json.dumps(other).encode(), "", {}, 400, "protocol 99 is not supported"),
            (good, "?wait=soon", {}, 400, "wait='soon'"),
            (good, "?wait=-1", {}, 400, "wait="),
            (good, "?wiat=1", {}, 400, "'wiat'"),
            (good, "", {"x_healthd_node_key": "short"}, 401, "X-Healthd-Node-Key"),
            (b"x" * 400_000, "", {}, 413, "at most"),
        ]
        for body, wait, headers, status, text in cases:
            response = await line.post(body, wait, **headers)
            assert response.headers["content-type"] == "application/problem+json"
            problem = response.json()
            assert (response.status_code, problem["status"]) == (status, status), problem
            assert text in problem["detail"]
            assert "\n" not in problem["detail"]
        assert (await line.client.get("/v1/nodes/n1/sync")).status_code == 405
        assert registry.node("n1") is None
        assert (await line.client.get("/elsewhere")).status_code == 418

    scenario(test, tmp_path)


def test_node_with_many_ranks_may_report_them_all_at_once(tmp_path: Path) -> None:
    async def test(_registry: Fleet, line: Line) -> None:
        await line.say(dataclasses.replace(state(), inventory=inventory(64)))
        ranks = tuple(
            RankReport(rank=number, target="cpu:0", check=check, events=1, key="k", data={"told": "x" * 4000})
            for check in ("all_reduce", "all_gather", "data_parallel_step")
            for number in range(64)
        )
        report = OrderReport(status="done", ranks=ranks)
        assert len(encode(report)) > 700_000
        await line.say(None, orders={"o-1": report})
        assert (await line.post(b"x" * 1_500_000)).status_code == 413

    scenario(test, tmp_path)


def test_a_body_without_a_length_is_bounded_as_well(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    async def test(_registry: Fleet, line: Line) -> None:
        try:
            response = await line.client.post(
                "/v1/nodes/n1/sync", content=endless(), headers={"x-healthd-node-key": KEY}
            )
        except httpx.TransportError:
            return  # closed on us while we were still sending: bounded too
        assert response.status_code == 413

    scenario(test, tmp_path)


def test_half_a_body_is_answered_in_time_and_does_not_stay(tmp_path: Path) -> None:
    async def test(registry: Fleet, line: Line) -> None:
        host, port = line.client.base_url.host, line.client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/nodes/n1/sync HTTP/1.1\r\nhost: x\r\nx-healthd-node-key: {KEY}\r\ncontent-length: 500\r\n\r\n"
        writer.write(head.encode() + b'{"half":')
        answer = await asyncio.wait_for(reader.read(), 3 * PATIENCE)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"incomplete after 0.2 s" in answer
        writer.close()
        _, gone = await asyncio.open_connection(host, port)
        gone.write(head.encode() + b'{"half":')
        gone.close()
        await line.join()  # others are served meanwhile
        assert len(registry) == 1

    scenario(test, tmp_path, read_timeout_seconds=0.2)


def test_another_key_gets_409_duplicate_node(tmp_path: Path) -> None:
    async def test(_registry: Fleet, line: Line) -> None:
        await line.join()
        response = await line.post(line.node.request(None), x_healthd_node_key="another-key-another-key")
        assert (response.status_code, response.json()["title"]) == (409, "DuplicateNode")

    scenario(test, tmp_path)


def test_a_sync_needs_a_token_with_its_scope(tmp_path: Path) -> None:
    sync, lines = new_token("nodes", [Scope.SYNC])
    read, more = new_token("people", [Scope.READ])
    file = tmp_path / "tokens"
    file.write_text(lines + more)
    file.chmod(0o600)

    async def test(_registry: Fleet, line: Line) -> None:
        request = line.node.request(state())
        assert (await line.post(request)).status_code == 401
        assert (await line.post(request, authorization=f"Bearer {read}")).status_code == 403
        assert (await line.post(request, authorization=f"Bearer {sync}")).status_code == 200

    scenario(test, tmp_path, guard=Guard(file))


def test_hook_that_executes_syncs_with_the_token_of_its_gate(tmp_path: Path) -> None:
    """The guide gives hooks a token of scope `gate` alone; the daemon's is not theirs, nor theirs the daemon's."""
    made = {scope: new_token(scope.value, [scope]) for scope in (Scope.SYNC, Scope.GATE)}
    file = tmp_path / "tokens"
    file.write_text("".join(lines for _, lines in made.values()))
    file.chmod(0o600)

    async def test(registry: Fleet, line: Line) -> None:
        async def status(scope: Scope, executor: str = "") -> int:
            request = line.node.request(state())
            return (await line.post(request, executor, authorization=f"Bearer {made[scope][0]}")).status_code

        assert await status(Scope.GATE) == 403
        assert await status(Scope.SYNC) == 200
        assert await status(Scope.GATE, "?executor=m") == 409  # no gate has it
        registry.set_executors({line.node.name: "m"})
        assert await status(Scope.GATE, "?executor=m") == 200
        assert await status(Scope.SYNC, "?executor=m") == 403

    scenario(test, tmp_path, guard=Guard(file))


def test_strangers_never_take_the_connection_of_a_node_that_has_synced(tmp_path: Path) -> None:
    async def main() -> None:
        limits = Limits(connections=4, pending=4, stop_seconds=0.1)
        async with serving(tmp_path, limits=limits) as (_, line), contextlib.AsyncExitStack() as stack:
            await line.join()
            first = (await line.post(line.node.request(None))).extensions["network_stream"]
            connected = first.get_extra_info("client_addr")
            address = line.client.base_url
            for text in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", b"GET") * 10:
                reader, writer = await asyncio.open_connection(address.host, address.port)
                stack.callback(writer.close)
                writer.write(text)
                if text.endswith(b"\r\n"):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 418 ")
            before = await line.post(line.node.request(None))
            assert before.status_code == 200
            stream = before.extensions["network_stream"]
            assert stream.get_extra_info("client_addr") == connected

    asyncio.run(asyncio.wait_for(main(), 60 * PATIENCE))


@pytest.mark.parametrize("nodes", [400])
def test_more_than_330_nodes_are_kept_and_the_missing_are_known_by_name(tmp_path: Path, nodes: int) -> None:
    """Rival fault 20."""

    async def test(registry: Fleet, line: Line) -> None:
        registry._max_nodes = 1000
        for number in range(nodes):
            registry.load(f"n{number:04}", key_hash=None, pool="train")
        lines = [Line(registry, line.client, f"n{number:04}") for number in range(0, nodes, 2)]
        for start in range(0, len(lines), 50):
            await asyncio.gather(*(one.join() for one in lines[start : start + 50]))
        silent = [name for name in registry.pool("train") if (view := registry.view(name)) and view.reasons]
        assert silent == [f"n{number:04}" for number in range(1, nodes, 2)]

    scenario(test, tmp_path)


def test_syncs_leave_nothing_behind_for_the_garbage_collector(tmp_path: Path) -> None:
    """Full collections are put off for minutes (see `app`): what comes a thousand times a second must not need them."""

    async def test(registry: Fleet, line: Line) -> None:
        await line.join()
        url = line.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)

        async def sync() -> None:
            body = encode(line.node.request(None, ages={"matmul": 1.0}))
            head = f"POST /v1/nodes/n1/sync?wait=0.001 HTTP/1.1\r\nhost: x\r\nx-healthd-node-key: {KEY}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            line.node.answer = decode(await reader.readexactly(length), SyncAnswer, what="answer")
            line.node.received_at = time.monotonic()

        for _ in range(10):
            await sync()
        # What other parts of this process throw away meanwhile is not ours: the least of a few rounds counts.
        found = []
        gc.disable()
        try:
            for _ in range(4):
                gc.collect()
                for _ in range(100):
                    await sync()
                found.append(gc.collect())
        finally:
            gc.enable()
        assert min(found) < 100, found
        writer.close()

    scenario(test, tmp_path)


def test_what_waits_for_its_turn_when_the_lead_is_lost_takes_the_long_way(tmp_path: Path) -> None:
    async def run() -> None:
        settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=tmp_path)
        registry = fleet(time.monotonic)  # type: ignore[arg-type]
        answers: list[str] = []

        async def elsewhere(scope: Any, receive: Any, send: Any) -> None:
            answers.append(scope["path"])
            await send({"type": "http.response.start", "status": 421, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        node = Node(registry, time.monotonic)  # type: ignore[arg-type]
        await node.join(state())
        taken = registry.syncs
        app = SyncEndpoint(nothing_behind, fleet=registry, guard=Guard(None), settings=settings, leads=lambda: False)
        sock = bind(settings.listen)
        async with (
            Server(elsewhere, [sock], direct=app),
            httpx.AsyncClient(base_url=f"http://{address_of(sock)}", timeout=60.0) as client,
        ):
            response = await Line(registry, client).post(node.request(state()), "?wait=0")
        assert (response.status_code, answers) == (421, ["/v1/nodes/n1/sync"])
        assert registry.syncs == taken

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))
