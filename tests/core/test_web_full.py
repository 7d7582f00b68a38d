"""A server that is full: who waits for nothing but the peer goes first, and what works is never cut off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from healthd.core.http import server as web
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.state.store import NodeStore
from tests.node.node_kit import BOOT, MovedClock, settings, specs
from tests.patience import PATIENCE

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc"
# The record of a ClientHello that is longer than what follows it: its sender is expected to go on.
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100
MORE_THAN_ANY_BUFFER_BYTES = 16 << 20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Full:
    """An application that reads the body, holds `/hold` back until `release`, and answers `/large` with megabytes."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.holding = 0
        self.begun = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.set()
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/hold":
            self.holding += 1
            await self.release.wait()
        if scope["path"] == "/known":
            web.keep_connection(scope)
        body = b"ok" if scope["path"] != "/large" else b"x" * MORE_THAN_ANY_BUFFER_BYTES
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


def bound() -> socket.socket:
    """Accepts silent connections at once, as the kernel otherwise does after a while or when it holds too many."""
    sock = web.bind("127.0.0.1:0")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 0)
    return sock


@contextlib.asynccontextmanager
async def served(connections: int, *, tls: Path | None = None) -> AsyncIterator[tuple[Full, Any]]:
    """The application, and what connects to it, sends and reads. `tls`: certificate and key."""
    sock, app = bound(), Full()
    limits = web.Limits(connections=connections, pending=8, header_seconds=60.0, stop_seconds=0.1)
    async with asyncio.timeout(30), web.Server(app, [sock], limits=limits, tls_cert=tls, tls_key=tls):
        opened: list[asyncio.StreamWriter] = []

        async def connect(text: bytes, *, read: bytes = b"", **more: Any) -> Streams:
            reader, writer = await asyncio.open_connection(*sock.getsockname(), **more)
            opened.append(writer)
            writer.write(text)
            if read:
                assert (await reader.read(100)).endswith(read)
            return reader, writer

        try:
            yield app, connect
        finally:
            app.release.set()
            for writer in opened:
                writer.close()


async def is_closed(streams: Streams) -> bool:
    """Whether the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        return await streams[0].read(1) == b""
    return True


@pytest.mark.parametrize(
    ("text", "read"),
    [(GET, b"ok"), (BODY, b""), (LARGE, b"x")],
    ids=["keep-alive", "slow body", "slow reader"],
)
async def test_oldest_that_waits_for_its_peer_makes_room_for_a_question(text: bytes, read: bytes) -> None:
    async with served(3) as (app, connect):
        old = [await connect(text, read=read) for _ in range(3)]
        if text in (BODY, LARGE):
            await app.begun.wait()
        for _ in range(5):
            assert (await (await connect(GET))[0].read(100)).startswith(b"HTTP/1.1 200 ")
        if text != LARGE:  # there the end comes behind megabytes
            assert [await is_closed(one) for one in old] == [True, True, True]


async def test_requests_that_are_held_are_never_cut_off() -> None:
    async with served(4) as (app, connect):
        held = [await connect(HOLD) for _ in range(3)]
        while app.holding < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        idle = [await connect(b"") for _ in range(50)]
        assert (await (await connect(GET))[0].read(100)).startswith(b"HTTP/1.1 200 ")
        assert await is_closed(idle[0])
        app.release.set()
        for reader, _ in held:
            assert (await reader.read(100)).startswith(b"HTTP/1.1 200 ")


async def test_server_whose_connections_all_work_answers_503_and_takes_up_again() -> None:
    async with served(3) as (app, connect):
        held = [await connect(HOLD) for _ in range(3)]
        while app.holding < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (await (await connect(GET))[0].read(100)).startswith(b"HTTP/1.1 503 ")
        app.release.set()
        for reader, _ in held:
            assert (await reader.read(100)).startswith(b"HTTP/1.1 200 ")
        assert (await (await connect(GET))[0].read(100)).startswith(b"HTTP/1.1 200 ")


async def test_idle_connections_do_not_keep_a_node_from_answering(tmp_path: Path) -> None:
    """The attack as it was seen: as many idle connections as a daemon takes, then somebody asks."""
    sock = bound()
    book = NodeStore(settings(tmp_path), specs(), clock=MovedClock().clock, boot_id=BOOT)
    limits = web.Limits(connections=64, pending=32, stop_seconds=0.1)
    async with asyncio.timeout(30), web.Server(NodeApi(book), [sock], limits=limits):
        idle = [await asyncio.open_connection(*sock.getsockname()) for _ in range(100)]
        for path, status in ((b"/livez", b"200"), (b"/health", b"503"), (b"/metrics", b"200")):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status), head
            assert b"text/plain; charset=utf-8" not in head or path != b"/health", "the server's own 503"
            writer.close()
        for _, writer in idle:
            writer.close()


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The server's certificate with its key, and how a client connects that trusts it."""
    ca, pem = trustme.CA(), tmp_path / "server.pem"
    ca.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pem))
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return pem, {"ssl": context, "server_hostname": "localhost"}


@pytest.mark.parametrize("begin", [b"", HELLO[:20]], ids=["never begin", "begin a handshake"])
async def test_tls_connections_count_from_accept_on(begin: bytes, tls: tuple[Path, dict[str, Any]]) -> None:
    pem, trusting = tls

    async with served(3, tls=pem) as (_, connect):
        idle = [await connect(begin) for _ in range(50)]
        assert (await (await connect(GET, **trusting))[0].read(100)).endswith(b"ok")
        assert all([await is_closed(one) for one in idle[:40]])
        assert (await (await connect(GET, **trusting))[0].read(100)).endswith(b"ok")


async def test_address_that_has_most_connections_loses_them_first() -> None:
    """A slow client of one address keeps its place while another address opens connection after connection."""
    async with served(3) as (_, connect):
        slow = await connect(GET[:20])
        flood = [await connect(b"G", local_addr=("127.0.0.2", 0)) for _ in range(40)]
        assert all([await is_closed(one) for one in flood[:30]])
        slow[1].write(GET[20:])
        assert (await slow[0].read(100)).endswith(b"ok")


async def test_who_has_sent_a_byte_stays_before_those_who_have_not() -> None:
    async with served(3) as (_, connect):
        slow = await connect(GET[:20])
        idle = [await connect(b"") for _ in range(40)]
        assert all([await is_closed(one) for one in idle[:30]])
        slow[1].write(GET[20:])
        assert (await slow[0].read(100)).endswith(b"ok")


async def test_peer_that_the_application_knows_keeps_its_connection() -> None:
    async with served(3) as (_, connect):
        known = await connect(GET.replace(b"/", b"/known", 1), read=b"ok")
        for _ in range(10):
            await connect(GET, read=b"ok")
        known[1].write(GET)
        assert (await known[0].read(100)).endswith(b"ok")
        known[1].write(GET)  # the last request was none of a known peer
        assert (await known[0].read(100)).endswith(b"ok")
        for _ in range(10):
            await connect(GET, read=b"ok")
        assert await is_closed(known)


async def test_end_of_the_server_is_the_end_of_pending_connections(tls: tuple[Path, dict[str, Any]]) -> None:
    async with asyncio.timeout(10):
        async with served(3, tls=tls[0]) as (app, connect):
            pending = [await connect(text) for text in (b"", HELLO[:20], HELLO)]
            assert (await (await connect(GET, **tls[1]))[0].read(100)).endswith(b"ok")
            assert app.begun.is_set()
        for reader, _ in pending:
            with contextlib.suppress(ConnectionError):
                await reader.read()


SERVICE = """
import asyncio, resource, socket, sys
from pathlib import Path
from healthd.core.http import server as web

async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

async def main(files, places, pem=None):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    sock = web.bind("127.0.0.1:0", backlog=1000)
    if pem is None:  # accept silent connections at once
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 0)
    limits = web.Limits(connections=places, pending=places)
    async with web.Server(hello, [sock], limits=limits, tls_cert=pem, tls_key=pem):
        print(sock.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:])))
"""

# Holds 900 connections to a port, which all begin like this, and opens another for each that is closed.
FLOOD = """
import select, socket, sys

port, begin = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
events, opened = select.epoll(), {}

def connect():
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind(("127.0.0.2", 0))
    sock.connect_ex(("127.0.0.1", port))
    opened[sock.fileno()] = sock
    events.register(sock, select.EPOLLOUT | select.EPOLLRDHUP)

for _ in range(900):
    connect()
begun = 0
while True:
    for file, event in events.poll():
        if event & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
            opened.pop(file).close()
            connect()
            continue
        try:
            opened[file].send(begin)
        except OSError:
            pass
        events.modify(file, select.EPOLLRDHUP)
        begun += 1
        if begun == 900:
            print("begun", flush=True)
"""


@pytest.mark.parametrize(
    ("places", "lines"),
    [(40, ["were closed to make room"]), (500, ["Too many open files", "were closed to make room"])],
    ids=["files for all places", "fewer files than places"],
)
def test_burst_of_idle_connections_costs_a_line_and_keeps_nobody_out(places: int, lines: list[str]) -> None:
    """The attack as it was seen: connections beyond the limit of files, accepted before any of them is counted."""
    argv = [sys.executable, "-c", SERVICE, "140", str(places)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, **pipes) as process, contextlib.ExitStack() as stack:  # type: ignore[call-overload]
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        for _ in range(4):
            for _ in range(200):
                idle = stack.enter_context(socket.socket())
                idle.setblocking(False)
                idle.connect_ex(("127.0.0.1", port))
            with socket.create_connection(("127.0.0.1", port), timeout=20 * PATIENCE) as asking:
                asking.sendall(GET)
                with asking.makefile("rb") as answer:
                    assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
        _, said = process.communicate("", timeout=20 * PATIENCE)
    assert len(said.splitlines()) == len(lines), said[:2000]
    for line in lines:
        assert line in said


def client_hello() -> bytes:
    """What a client sends first."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0], ids=["silent", "half a hello", "a hello and no more"])
def test_flood_without_tls_handshakes_delays_no_other_address(part: float, tls: tuple[Path, dict[str, Any]]) -> None:
    """The attack as it was seen: 900 connections, reopened when dropped, and 600 files. One request opens one more."""
    pem, trusting = tls
    hello = client_hello()
    begin = hello[: int(len(hello) * part)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

    def median_seconds(port: int) -> float:
        took = []
        for _ in range(15):
            began = time.monotonic()
            with (
                socket.create_connection(("127.0.0.1", port), timeout=20 * PATIENCE) as plain,
                trusting["ssl"].wrap_socket(plain, server_hostname="localhost") as asking,
            ):
                asking.sendall(GET)
                assert asking.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
            took.append(time.monotonic() - began)
        return statistics.median(took)

    argv = [sys.executable, "-c", SERVICE, "600", "100", str(pem)]
    with (
        subprocess.Popen(argv, text=True, stderr=subprocess.DEVNULL, **pipes) as process,
        contextlib.ExitStack() as stack,
    ):  # type: ignore[call-overload]
        stack.callback(process.kill)
        port = int(process.stdout.readline())
        quiet = median_seconds(port)
        files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        argv = [sys.executable, "-c", FLOOD, str(port), begin.hex()]
        flood = stack.enter_context(subprocess.Popen(argv, text=True, **pipes))  # type: ignore[call-overload]
        stack.callback(flood.kill)
        assert flood.stdout.readline() == "begun\n"
        if not begin:
            assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) <= files, "the kernel keeps silent connections"
        # A gate opens a handful of connections and takes 1.8 s, which may double.
        assert median_seconds(port) < 2 * quiet + 0.25


async def test_hello_that_comes_in_pieces_is_served_and_half_a_hello_is_closed(
    tls: tuple[Path, dict[str, Any]],
) -> None:
    pem, trusting = tls
    async with served(3, tls=pem) as (_, connect):
        sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting["ssl"].wrap_bio(received, sent, server_hostname="localhost")
        reader, writer = await connect(b"")
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ended = False
        while not ended:
            try:
                client.do_handshake()
                client.write(GET)
                ended = True
            except ssl.SSLWantReadError:
                pass
            text = sent.read()
            for piece in (text[:1], text[1:7], text[7:]):
                writer.write(piece)
                await asyncio.sleep(0.01)
            if not ended:
                received.write(await reader.read(1 << 14))
        answer = b""
        while not answer.endswith(b"ok"):
            received.write(await reader.read(1 << 14))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += client.read(1 << 14)
        for begin in (HELLO[:3], HELLO, b"GET"):
            half = await connect(begin)
            half[1].write_eof()
            assert await is_closed(half)


async def test_connection_that_never_ends_its_tls_handshake_is_cut_off(tls: tuple[Path, dict[str, Any]]) -> None:
    pem, trusting = tls

    sock = bound()
    limits = web.Limits(header_seconds=0.1, stop_seconds=0.1)
    async with asyncio.timeout(10), web.Server(Full(), [sock], limits=limits, tls_cert=pem, tls_key=pem):
        silent = await asyncio.open_connection(*sock.getsockname())
        assert await is_closed(silent)
        silent[1].close()
        reader, writer = await asyncio.open_connection(*sock.getsockname(), **trusting)
        writer.write(GET)
        assert (await reader.read(100)).endswith(b"ok")
        writer.close()
