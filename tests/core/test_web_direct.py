"""Requests that are answered below ASGI: which ones, in which order, and what becomes of them when a peer goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from healthd.core.http import server as web
from tests.patience import PATIENCE


class Holding:
    """Wants `/direct`; holds what says `hold`, hands over what says `over`, and answers the rest with its body."""

    def __init__(self) -> None:
        self.held: list[web.DirectRequest] = []
        self.gone = asyncio.Event()
        self.came = asyncio.Event()

    def wants(self, url: bytes) -> bool:
        return url.startswith(b"/direct")

    def take(self, request: web.DirectRequest) -> None:
        if request.body == b"over":
            request.hand_over()
        elif request.body == b"hold":
            request.on_gone = self.gone.set
            self.held.append(request)
            self.came.set()
        else:
            request.respond(b"direct " + request.body)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with all that it was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    said = [scope["method"], scope["path"], scope["query_string"].decode(), len(scope["headers"]), body.decode()]
    text = json.dumps(said).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


def post(body: bytes, path: bytes = b"/direct", *, head: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%scontent-length: %d\r\n\r\n%s" % (path, head, len(body), body)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Holding, web.Server, tuple[str, int]]]:
    holding, sock = Holding(), web.bind("127.0.0.1:0")
    server = web.Server(application, [sock], direct=holding)
    async with asyncio.timeout(20 * PATIENCE), server:
        yield holding, server, sock.getsockname()


@contextlib.asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))


async def test_whole_requests_are_answered_below_and_all_others_by_the_application() -> None:
    async with serving() as (_, _, address), connected(address) as (reader, writer):
        writer.write(post(b"a"))
        assert await answer(reader) == b"direct a"
        writer.write(post(b"over", b"/direct/a%20b?c=d"))
        assert json.loads(await answer(reader)) == ["POST", "/direct/a b", "c=d", 2, "over"]
        writer.write(post(b"b", b"/other"))
        assert json.loads(await answer(reader)) == ["POST", "/other", "", 2, "b"]
        writer.write(b"GET /direct HTTP/1.1\r\nhost: x\r\n\r\n")
        assert json.loads(await answer(reader)) == ["GET", "/direct", "", 1, ""]
        whole = post(b"in pieces")
        writer.write(whole[:-4])
        await writer.drain()
        await asyncio.sleep(0.05)  # so that they are two packets
        writer.write(whole[-4:])
        assert json.loads(await answer(reader)) == ["POST", "/direct", "", 2, "in pieces"]
        writer.write(post(b"c"))
        assert await answer(reader) == b"direct c", "the connection goes on as before"
        writer.write(post(b"last", head=b"connection: close\r\n"))
        assert await answer(reader) == b"direct last"
        assert await reader.read() == b""


async def test_answers_keep_the_order_of_requests() -> None:
    async with serving() as (holding, _, address), connected(address) as (reader, writer):
        writer.write(post(b"hold") + post(b"second") + post(b"over"))
        await holding.came.wait()
        holding.held[0].respond(b"first")
        assert await answer(reader) == b"first"
        assert json.loads(await answer(reader))[-1] == "second"
        assert json.loads(await answer(reader))[-1] == "over"


async def test_a_peer_that_goes_is_told_and_gets_no_answer() -> None:
    async with serving() as (holding, _, address), connected(address) as (_, writer):
        writer.write(post(b"hold"))
        await holding.came.wait()
        writer.transport.abort()
        await holding.gone.wait()
        holding.held[0].respond(b"late")
        holding.held[0].hand_over()


async def test_a_server_that_stops_answers_what_is_held_first() -> None:
    async with serving() as (holding, server, address), connected(address) as (reader, writer):
        writer.write(post(b"hold"))
        await holding.came.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        holding.held[0].respond(b"bye")
        assert await answer(reader) == b"bye"
        assert await reader.read() == b""
        await stopping


async def test_a_request_is_answered_once_though_it_is_handed_over_late() -> None:
    async with serving() as (holding, _, address), connected(address) as (reader, writer):
        writer.write(post(b"hold"))
        await holding.came.wait()
        (request,) = holding.held
        request.hand_over()
        assert holding.gone.is_set(), "who held it forgets it"
        assert json.loads(await answer(reader))[-1] == "hold"
        request.respond(b"twice")
        request.hand_over()
        writer.write(post(b"next"))
        assert await answer(reader) == b"direct next"


async def test_chunked_bodies_are_the_applications() -> None:
    async with serving() as (_, _, address), connected(address) as (reader, writer):
        head = b"POST /direct HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
        assert json.loads(await answer(reader))[-1] == "ab"
