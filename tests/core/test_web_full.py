"""A server that is full: who waits for nothing but the peer goes first, and what works is never cut off."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from healthd.core.http import server as web
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.state.store import NodeStore
from tests.node.node_kit import BOOT, MovedClock, settings, specs

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc"
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
        body = b"ok" if scope["path"] != "/large" else b"x" * MORE_THAN_ANY_BUFFER_BYTES
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(connections: int) -> AsyncIterator[tuple[Full, Any]]:
    sock, app = web.bind("127.0.0.1:0"), Full()
    limits = web.Limits(connections=connections, stop_seconds=0.1)
    async with asyncio.timeout(30), web.Server(app, [sock], limits=limits):
        opened: list[asyncio.StreamWriter] = []

        async def connect(text: bytes, *, read: bytes = b"") -> Streams:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
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
    [(b"", b""), (GET, b"ok"), (b"GET / HTTP/1.1\r\nhost:", b""), (BODY, b""), (LARGE, b"x")],
    ids=["never asked", "keep-alive", "slow head", "slow body", "slow reader"],
)
def test_oldest_that_waits_for_its_peer_makes_room_for_a_question(text: bytes, read: bytes) -> None:
    async def main() -> None:
        async with served(3) as (app, connect):
            old = [await connect(text, read=read) for _ in range(3)]
            if text in (BODY, LARGE):
                await app.begun.wait()
            for _ in range(5):
                assert (await (await connect(GET))[0].read(100)).startswith(b"HTTP/1.1 200 ")
            if text != LARGE:  # there the end comes behind megabytes
                assert [await is_closed(one) for one in old] == [True, True, True]

    asyncio.run(main())


def test_requests_that_are_held_are_never_cut_off() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_server_whose_connections_all_work_answers_503_and_takes_up_again() -> None:
    async def main() -> None:
        async with served(3) as (app, connect):
            held = [await connect(HOLD) for _ in range(3)]
            while app.holding < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert (await (await connect(GET))[0].read(100)).startswith(b"HTTP/1.1 503 ")
            app.release.set()
            for reader, _ in held:
                assert (await reader.read(100)).startswith(b"HTTP/1.1 200 ")
            assert (await (await connect(GET))[0].read(100)).startswith(b"HTTP/1.1 200 ")

    asyncio.run(main())


def test_idle_connections_do_not_keep_a_node_from_answering(tmp_path: Path) -> None:
    """The attack as it was seen: as many idle connections as a daemon takes, then somebody asks."""

    async def main() -> None:
        sock = web.bind("127.0.0.1:0")
        book = NodeStore(settings(tmp_path), specs(), clock=MovedClock().clock, boot_id=BOOT)
        limits = web.Limits(connections=64, stop_seconds=0.1)
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

    asyncio.run(main())


def test_connection_that_never_ends_its_tls_handshake_is_cut_off(tmp_path: Path) -> None:
    ca, pem = trustme.CA(), tmp_path / "server.pem"
    ca.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pem))

    async def main() -> None:
        sock = web.bind("127.0.0.1:0")
        limits = web.Limits(header_seconds=0.1, stop_seconds=0.1)
        async with asyncio.timeout(10), web.Server(Full(), [sock], limits=limits, tls_cert=pem, tls_key=pem):
            silent = await asyncio.open_connection(*sock.getsockname())
            assert await is_closed(silent)
            silent[1].close()
            context = ssl.create_default_context()
            ca.configure_trust(context)
            reader, writer = await asyncio.open_connection(
                *sock.getsockname(), ssl=context, server_hostname="localhost"
            )
            writer.write(GET)
            assert (await reader.read(100)).endswith(b"ok")
            writer.close()

    asyncio.run(main())
