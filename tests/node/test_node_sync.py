"""The line to the aggregator, against a real HTTP server: who answers, what is lost, old, large or late."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from checks.contract import Status
from healthd.core import wire
from healthd.core.errors import ConfigError
from healthd.core.evidence import reason
from healthd.core.http import server as web
from healthd.core.model import Order, Quarantine, Reason, SyncAnswer, SyncRequest
from healthd.node import sync
from healthd.node.settings import ActiveSettings, SyncSettings, Unprompted
from healthd.node.sync import FIRST_PAUSE_SECONDS, GATHER_SECONDS, SyncClient, why_not_followed
from tests.node.node_kit import World, eventually, finding, lease, lease_order, quiet, result, run, run_order
from tests.patience import PATIENCE

KEY = "k" * 64
ON_ORDER = ActiveSettings(unprompted=Unprompted.OFF)
Message = MutableMapping[str, Any]


class Aggregator:
    """A server that records what it is asked and answers what a test wants; held requests wait for `release`."""

    def __init__(self, issuer: str = "db1") -> None:
        self.issuer = issuer
        self.requests: list[tuple[float, SyncRequest]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.orders: tuple[Order, ...] | None = ()
        self.acknowledged: tuple[str, ...] = ()
        self.quarantine: Quarantine | None = None
        self.accused: Reason | None = None
        self.known: str | None = None
        self.hold_seconds: float | None = None
        self.seq = 0
        self.raw: tuple[int, bytes] | None = None
        self.said = [(b"x", b"y")]
        self.release = asyncio.Event()
        self.sock = web.bind("127.0.0.1:0")
        self.url = f"http://{web.address_of(self.sock)}"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Aggregator]:
        async with web.Server(self, [self.sock], limits=web.Limits(stop_seconds=0.1)):
            try:
                yield self
            finally:
                self.release.set()

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        assert scope["path"] == "/v1/nodes/n1/sync"
        wait = float(parse_qs(scope["query_string"].decode())["wait"][0])
        request = wire.decode(body, SyncRequest, what="request")
        self.headers.append(dict(scope["headers"]))
        if request.state is not None or (request.use is not None and request.use.since == self.known):
            self.known = request.digest
        send_all = request.digest != self.known
        self.requests.append((wait, request))
        if wait and not send_all:
            await self.release.wait()
            self.release.clear()
        status, content = self.raw or (200, wire.encode(self.answer(send_all=send_all)))
        await send({"type": "http.response.start", "status": status, "headers": self.said})
        await send({"type": "http.response.body", "body": content})

    def answer(self, *, send_all: bool = False, seq: int | None = None) -> SyncAnswer:
        self.seq += 1
        return SyncAnswer(
            answer=f"a{self.seq}",
            seq=self.seq if seq is None else seq,
            issuer=self.issuer,
            orders=self.orders,
            acknowledged=self.acknowledged,
            send_all=send_all,
            retry_after_seconds=0.0,
            quarantine=self.quarantine,
            accused=self.accused,
            hold_seconds=self.hold_seconds,
        )

    def tell(self, *orders: Order) -> None:
        """Answer the held request with these orders."""
        self.orders = orders
        self.release.set()

    @property
    def last(self) -> SyncRequest:
        return self.requests[-1][1]


def ended(request: SyncRequest, order_id: str) -> bool:
    return order_id in request.orders and request.orders[order_id].status == "done"


def line_of(
    world: World, *urls: str, on_error: Callable[[Exception], None] = lambda _: None, **changes: Any
) -> SyncClient:
    line = SyncClient(
        world.book,
        world.orders,
        SyncSettings(aggregators=urls, **changes),
        key=KEY,
        clock=world.time.clock,
        seed=1,
        on_error=on_error,
    )
    world.book.listen(line.notify)
    world.orders.on_change = line.notify
    return line


@contextlib.asynccontextmanager
async def connected(folder: Path, **changes: Any) -> AsyncIterator[tuple[World, Aggregator, SyncClient]]:
    async with Aggregator().serving() as aggregator, World(folder, active=ON_ORDER) as world:
        await quiet()
        line = line_of(world, aggregator.url, **changes)
        world.tasks.supervise("held", line.run_held)
        world.tasks.supervise("urgent", line.run_urgent)
        await eventually(lambda: [wait for wait, _ in aggregator.requests] == [0.0, 25.0])
        yield world, aggregator, line


def test_first_contact_sends_all_at_once_and_the_next_names_the_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (_, aggregator, line):
            (_, first), (_, second) = aggregator.requests
            assert first.state is not None
            assert (first.last_answer, first.since_answer_seconds, first.issuer) == (None, None, None)
            assert second.state is None
            assert (second.last_answer, second.since_answer_seconds, second.issuer) == ("a1", 0.0, "db1")
            assert (second.digest, second.seq) == (first.digest, first.seq + 1)
            assert set(second.ages) == {"disk", "load"}
            assert aggregator.headers[0][b"x-healthd-node-key"] == KEY.encode()
            assert line.connected_to == aggregator.url

    run(main())


def test_what_is_new_while_it_connects_goes_with_the_first_word_and_not_beside_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with Aggregator().serving() as aggregator, World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            with ThreadPoolExecutor(1) as pool:
                asyncio.get_running_loop().set_default_executor(pool)
                slow = threading.Event()
                pool.submit(slow.wait)  # the look for our own address takes its time
                line = line_of(world, aggregator.url)
                world.tasks.supervise("held", line.run_held)
                world.tasks.supervise("urgent", line.run_urgent)
                await quiet()
                world.book.record(result("disk", finding(Status.FAIL)))
                await asyncio.sleep(4 * GATHER_SECONDS)
                assert aggregator.requests == []
                slow.set()
                await eventually(lambda: [wait for wait, _ in aggregator.requests] == [0.0, 25.0])
                assert aggregator.requests[0][1].state.health.value == "unhealthy"

    run(main())


def test_change_of_state_goes_at_once_beside_the_held_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (world, aggregator, _):
            world.book.record(result("disk", finding(Status.FAIL)))
            await eventually(lambda: len(aggregator.requests) == 3)
            wait, request = aggregator.requests[-1]
            assert wait == 0.0
            assert request.state is not None
            assert request.state.health.value == "unhealthy"

    run(main())


def test_new_measured_values_alone_are_not_urgent(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (world, aggregator, _):
            world.book.record(result("disk"))
            await asyncio.sleep(0.15)
            assert len(aggregator.requests) == 2

    run(main())


def test_order_comes_with_the_held_answer_and_its_end_carries_the_results(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (world, aggregator, _):
            aggregator.tell(run_order())
            await eventually(lambda: any(ended(r, "R1") for _, r in aggregator.requests))
            done = next(r for _, r in aggregator.requests if ended(r, "R1"))
            states = [r.state for _, r in aggregator.requests if r.state is not None and r.seq <= done.seq]
            assert any(one.check == "matmul" for one in states[-1].results)
            assert len(world.probes.active_plans()) == 1

    run(main())


def test_lease_is_accepted_together_with_the_state_that_shows_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (_, aggregator, _line):
            aggregator.tell(run_order())  # a node without evidence has other reasons once it is in use
            await eventually(lambda: any(ended(r, "R1") for _, r in aggregator.requests))
            aggregator.tell(lease_order(lease()))
            await eventually(
                lambda: "L1" in aggregator.last.orders and aggregator.last.orders["L1"].status == "accepted"
            )
            assert aggregator.last.use is not None, "the whole state, though nothing but its user has changed"
            assert [one.id for one in aggregator.last.use.leases] == ["L1"]
            aggregator.known, before = "another", len(aggregator.requests)
            aggregator.tell(dataclasses.replace(lease_order(lease()), withdrawn=True))
            await eventually(lambda: any(r.state is not None for _, r in aggregator.requests[before:]))
            whole = next(r.state for _, r in aggregator.requests[before:] if r.state is not None)
            assert whole.leases == (), "an aggregator that does not know what changed gets the whole"

    run(main())


def test_requests_are_held_as_long_as_the_aggregator_says_and_the_node_allows(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path, wait_seconds=45.0) as (_, aggregator, _line):
            for wanted, held in ((40.0, 40.0), (55.0, 45.0), (None, 25.0)):
                aggregator.hold_seconds, before = wanted, len(aggregator.requests)
                aggregator.release.set()
                await eventually(lambda: len(aggregator.requests) > before)  # noqa: B023
                assert aggregator.requests[-1][0] == held

    run(main())


def test_whole_state_goes_when_the_other_side_does_not_know_it_and_every_so_often(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path, full_seconds=60.0) as (world, aggregator, _):
            aggregator.known = "forgotten"
            aggregator.release.set()
            await eventually(lambda: len(aggregator.requests) == 4)
            assert [r.state is not None for _, r in aggregator.requests] == [True, False, False, True]
            for _ in range(2):
                before = len(aggregator.requests)
                world.time.move(31)
                aggregator.release.set()
                await eventually(lambda: len(aggregator.requests) == before + 1)  # noqa: B023
            assert [r.state is not None for _, r in aggregator.requests[-3:]] == [True, False, True]

    run(main())


def test_answers_that_were_overtaken_are_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        async with Aggregator().serving() as aggregator, World(tmp_path, active=ON_ORDER) as world:
            line = line_of(world, aggregator.url)
            aggregator.orders = (lease_order(lease()),)
            old, new = line.compose(), line.compose()
            assert line.apply(new, aggregator.answer(seq=8), world.time.at)
            await quiet()
            world.time.move(1)
            aggregator.orders = (dataclasses.replace(lease_order(lease()), withdrawn=True),)
            assert not line.apply(old, aggregator.answer(seq=7), world.time.at - 2)
            assert world.status("L1") == "accepted"  # the older answer has released nothing
            # Counting from the start again, but to a request that was sent after the newest answer: it is newer.
            assert line.apply(line.compose(), aggregator.answer(seq=1), world.time.at)
            assert world.status("L1") == "cancelled"

    run(main())


def test_time_since_the_last_answer_counts_while_the_process_is_frozen(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (world, _, line):
            world.time.move(600)
            world.time.wall_offset -= 86400
            request = line.compose()
            assert request.since_answer_seconds == 600.0
            assert set(request.ages.values()) == {600.0}

    run(main())


def test_answer_that_lay_about_for_ten_minutes_is_not_acted_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (world, aggregator, _):
            world.time.move(600)
            aggregator.tell(run_order())
            aggregator.orders = ()
            before = len(aggregator.requests)
            await eventually(lambda: len(aggregator.requests) > before)
            assert world.probes.active_plans() == []

    run(main())


def test_aggregator_that_is_away_cancels_nothing_and_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            async with Aggregator().serving() as aggregator:
                line = line_of(world, aggregator.url, backoff_max_seconds=0.02)
                world.tasks.supervise("held", line.run_held)
                world.tasks.supervise("urgent", line.run_urgent)
                await eventually(lambda: len(aggregator.requests) == 2)
                aggregator.tell(lease_order(lease()))
                await eventually(lambda: world.status("L1") == "accepted")
                url = aggregator.url
            await eventually(lambda: line.connected_to is None)
            world.time.move(3600)
            await asyncio.sleep(0.2)
            assert world.status("L1") == "accepted"
            lines = [message for message in caplog.messages if "cannot be reached" in message]
            assert 1 <= len(lines) <= 2  # how it was lost, and that it is away
            back = Aggregator()
            back.sock.close()
            back.sock, back.url = web.bind(url.removeprefix("http://")), url
            back.orders = None  # it does not know the node again yet
            async with back.serving():
                await eventually(lambda: len(back.requests) >= 2)
                assert back.requests[0][1].state is not None
                assert back.requests[0][1].since_answer_seconds is not None
                assert back.requests[0][1].since_answer_seconds >= 3600
                assert back.requests[0][1].orders["L1"].status == "accepted"
                assert world.status("L1") == "accepted"

    run(main())


def test_next_aggregator_of_the_list_takes_over(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            async with Aggregator("db2").serving() as second, World(tmp_path, active=ON_ORDER) as world:
                line = line_of(world, dead, second.url)
                world.tasks.supervise("held", line.run_held)
                await eventually(lambda: len(second.requests) == 2)
                assert line.connected_to == second.url

    run(main())


def stands_by(aggregator: Aggregator, leader: str) -> None:
    aggregator.raw, aggregator.said = (421, b"{}"), [(b"leader", leader.encode())]


def test_node_goes_to_the_leader_that_a_listed_aggregator_names_if_it_is_listed_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            Aggregator("db1").serving() as standby,
            Aggregator("db1").serving() as leader,
            World(tmp_path, active=ON_ORDER) as world,
        ):
            stands_by(standby, leader.url)
            line = line_of(world, standby.url, leader.url)
            world.tasks.supervise("held", line.run_held)
            await eventually(lambda: len(leader.requests) == 2)
            assert (line.connected_to, len(standby.requests)) == (leader.url, 1)
            # It loses the lead: the held request is answered so, and the way is found anew.
            stands_by(leader, standby.url)
            standby.raw = None
            leader.release.set()
            await eventually(lambda: line.connected_to == standby.url)

    run(main())


def test_token_goes_to_no_address_that_is_not_listed_whoever_names_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-secret\n")
    token.chmod(0o600)

    async def main() -> None:
        async with (
            Aggregator().serving() as standby,
            Aggregator().serving() as stranger,
            World(tmp_path, active=ON_ORDER) as world,
        ):
            stands_by(standby, stranger.url)
            line = line_of(world, standby.url, token_file=token, backoff_max_seconds=0.01)
            world.tasks.supervise("held", line.run_held)
            await eventually(lambda: len(standby.requests) >= 3)
            assert stranger.requests == []
            await eventually(lambda: line.connected_to is None)

    run(main())


@pytest.mark.parametrize(
    ("leader", "told_by", "ca", "followed"),
    [
        ("https://b:8090", "https://a:8090", True, True),
        ("https://listed:8090/", "http://a:8090", False, True),
        ("https://b:8090", "https://a:8090", False, False),
        ("https://b:8090", "http://a:8090", True, False),
        ("http://b:8090", "https://a:8090", True, False),
        ("https://listed:8090@b/", "https://a:8090", False, False),
        ("file:///etc/passwd", "https://a:8090", True, False),
    ],
)
def test_leader_that_is_not_listed_is_followed_by_what_the_ca_of_the_settings_vouches_for(
    tmp_path: Path, leader: str, told_by: str, ca: bool, followed: bool
) -> None:
    settings = SyncSettings(aggregators=("https://listed:8090",), ca_file=tmp_path / "ca.pem" if ca else None)
    assert (why_not_followed(leader, told_by, settings) is None) == followed


def test_node_that_is_asked_to_wait_asks_again_no_later(tmp_path: Path) -> None:
    """Nobody leads for a moment: a pause that has grown to half a minute would outlast the takeover by far."""

    async def main() -> None:
        async with Aggregator().serving() as standby, World(tmp_path, active=ON_ORDER) as world:
            standby.raw, standby.said = (503, b"{}"), [(b"retry-after", b"0")]
            line = line_of(world, standby.url)
            world.tasks.supervise("held", line.run_held)
            began = time.monotonic()
            await eventually(lambda: len(standby.requests) >= 6)
            assert time.monotonic() - began < 6 * FIRST_PAUSE_SECONDS * PATIENCE
            standby.raw = None
            await eventually(lambda: line.connected_to == standby.url)

    run(main())


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ((401, json.dumps({"detail": "this token is unknown"}).encode()), "refuses: HTTP 401: this token is"),
        ((409, json.dumps({"title": "Conflict"}).encode()), "refuses: HTTP 409: Conflict"),
        ((200, b"<html>"), "its answer"),
        ((200, b'{"answer": 1}'), "its answer"),
        ((502, b"\xff"), "refuses: HTTP 502"),
        ((200, b"x" * (3 << 20)), "larger than"),
        ((200, b"[" * 50_000), "its answer: nested more than 64 deep"),
        ((200, b'{"extra": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "its answer: nested more than 64 deep"),
        ((409, b"[" * 50_000), "refuses: HTTP 409"),
    ],
)
def test_answer_that_cannot_be_used_is_said_clearly_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raw: tuple[int, bytes], said: str
) -> None:
    async def main() -> None:
        async with Aggregator().serving() as aggregator, World(tmp_path, active=ON_ORDER) as world:
            aggregator.raw = raw
            line = line_of(world, aggregator.url, backoff_max_seconds=0.01)
            world.tasks.supervise("held", line.run_held)
            await eventually(lambda: said in caplog.text)
            await eventually(lambda: line.connected_to is None)  # it is tried again soon
            aggregator.raw = None
            await eventually(lambda: line.connected_to is not None)

    run(main())


def test_answer_that_comes_byte_by_byte_without_an_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sync, "SLACK_SECONDS", 0.2)

    over = asyncio.Event()
    dribbling: set[asyncio.Task[None] | None] = set()

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dribbling.add(asyncio.current_task())
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while not over.is_set():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(dribble, "127.0.0.1", 0) as server:
            async with World(tmp_path, active=ON_ORDER) as world:
                line = line_of(world, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
                world.tasks.supervise("held", line.run_held)
                await eventually(lambda: "its answer does not end" in caplog.text)
            over.set()
            await asyncio.gather(*filter(None, dribbling))

    run(main())


def test_answer_cut_on_its_way_is_asked_for_again_and_nothing_is_done_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path, backoff_max_seconds=0.01) as (world, aggregator, _):
            aggregator.raw = (200, wire.encode(aggregator.answer())[:40])
            aggregator.tell(run_order())
            await asyncio.sleep(0.05)
            assert world.probes.active_plans() == []
            aggregator.raw = None
            aggregator.release.set()
            await eventually(lambda: world.status("R1") == "done")
            aggregator.release.set()
            await quiet()
            assert len(world.probes.active_plans()) == 1

    run(main())


def test_aggregator_that_never_holds_is_not_asked_as_fast_as_we_can(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (_, aggregator, _line):
            end = asyncio.get_running_loop().time() + 0.4
            while asyncio.get_running_loop().time() < end:
                aggregator.release.set()
                await asyncio.sleep(0)
            assert len(aggregator.requests) < 20

    run(main())


def test_word_on_quarantine_is_taken_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (world, aggregator, _):
            word = Quarantine(reason="fan", owner="ops", owner_kind="person", since=1.0, until=None)
            aggregator.quarantine = word
            aggregator.accused = reason("CollectiveFault", "gate g-1 of job train: n1 fails", status=Status.WARN)
            aggregator.release.set()
            await eventually(lambda: world.book.snapshot().quarantine == word)
            assert world.book.snapshot().accused == aggregator.accused
            await eventually(lambda: getattr(aggregator.last.state, "accused", None) == aggregator.accused)

    run(main())


def test_aggregator_that_makes_no_statement_ends_no_quarantine(tmp_path: Path) -> None:
    async def main() -> None:
        async with connected(tmp_path) as (world, aggregator, _):
            word = Quarantine(reason="fan", owner="ops", owner_kind="person", since=1.0, until=None)
            world.book.set_quarantine(word)
            aggregator.orders = None
            count = len(aggregator.requests)
            aggregator.release.set()
            await eventually(lambda: len(aggregator.requests) > count)
            assert world.book.snapshot().quarantine == word

    run(main())


def test_token_is_read_again_for_each_request(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "token"
        file.write_text("first\n")
        async with connected(tmp_path, token_file=file) as (_, aggregator, _line):
            file.write_text("second\n")
            aggregator.release.set()
            sent = [headers[b"authorization"] for headers in aggregator.headers]
            assert set(sent) == {b"Bearer first"}
            await eventually(lambda: aggregator.headers[-1][b"authorization"] == b"Bearer second")

    run(main())


def test_settings_that_cannot_work_are_one_clear_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            with pytest.raises(ConfigError, match="'agg:8090' is not a URL"):
                line_of(world, "agg:8090")
            with pytest.raises(ConfigError, match="not a CA file"):
                line_of(world, "https://agg:8090", ca_file=tmp_path / "none.pem")

    run(main())


def test_answer_that_makes_our_own_code_raise_is_logged_counted_and_never_confirmed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = []

    async def main() -> None:
        async with Aggregator().serving() as aggregator, World(tmp_path, active=ON_ORDER) as world:
            await quiet()
            line = line_of(world, aggregator.url, backoff_max_seconds=0.01, on_error=lambda _: errors.append(1))

            def listen() -> None:
                if world.book.quarantine is not None and not errors:
                    raise KeyError("nobody thought of this")

            world.book.listen(listen)
            aggregator.quarantine = Quarantine(reason="x", owner="p", owner_kind="person", since=1.0, until=None)
            world.tasks.supervise("held", line.run_held)
            await eventually(lambda: aggregator.last.last_answer is not None if aggregator.requests else False)
            assert [request.last_answer for _, request in aggregator.requests] == [None, None, "a2"]
            assert errors == [1]
            assert "nobody thought of this" in caplog.text
            assert line.connected_to == aggregator.url

    run(main())
