"""One that stands by, in front of a leader that fails: what was asked is answered once, or by nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from healthd.aggregator.api import ASGIApp
from healthd.aggregator.forwarding import Front, Serving
from healthd.aggregator.identity.tokens import Guard
from healthd.aggregator.settings import AggregatorSettings

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 10\r\n\r\n"


async def asked(front: Front, method: str, path: str) -> list[dict[str, Any]]:
    """What the caller is sent; it stays until it has its answer."""
    sent: list[dict[str, Any]] = []
    request = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not request:
            await asyncio.Event().wait()
        return request.pop()

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    await front({**scope, "headers": [(b"host", b"a"), (b"content-length", b"2")]}, receive, send)
    return sent


class Leader:
    """Answers each connection with the next of `answers`, and closes it; `requests` are what came."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []

    async def __aenter__(self) -> Leader:
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2))
        writer.write(self.answers.pop(0))
        await writer.drain()
        writer.close()


@pytest.fixture
async def front(tmp_path: Path) -> Any:
    made = Front(
        guard=Guard(None),
        settings=AggregatorSettings(state_dir=tmp_path),
        own_url="http://127.0.0.1:1",
        trust=None,
    )
    yield made
    await made.close()


async def test_answer_that_breaks_off_on_its_way_is_not_begun_again(front: Front) -> None:
    async with Leader(HEAD + b"abc") as leader:
        front.follow(leader.url, 1, "")
        sent = await asked(front, "POST", "/v1/gates")
    assert [(one["type"], one.get("status"), one.get("body")) for one in sent] == [
        ("http.response.start", 200, None),
        ("http.response.body", None, b"abc"),
    ]
    assert len(leader.requests) == 1
    assert b"x-healthd-forwarded: 1" in leader.requests[0]


async def test_gate_and_release_are_asked_again_of_who_leads_next_and_other_changes_are_not(front: Front) -> None:
    async with Leader(b"", b"", b"") as dead, Leader(*[HEAD + b"0123456789"] * 2) as next_one:
        front.follow(dead.url, 1, "")
        gate = asyncio.create_task(asked(front, "POST", "/v1/gates"))
        release = asyncio.create_task(asked(front, "DELETE", "/v1/gates/lease"))
        other = await asked(front, "POST", "/v1/fleet/recover")
        assert other[0]["status"] == 503
        assert (b"retry-after", b"1") in other[0]["headers"]
        assert not gate.done()
        assert not release.done()
        front.follow(next_one.url, 2, "")
        sent, given_back = await gate, await release
    assert given_back[0]["status"] == 200
    assert (sent[0]["status"], b"".join(one.get("body", b"") for one in sent)) == (200, b"0123456789")


def serving(app: ASGIApp, *, leads: bool, trouble: str | None) -> Serving:
    return Serving(app=app, leads=lambda: leads, trouble=lambda: trouble)


async def test_request_that_waits_is_answered_here_once_this_one_leads(front: Front) -> None:
    async def own(_scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"own:" + body})

    waiting = asyncio.create_task(asked(front, "POST", "/v1/gates"))
    await asyncio.sleep(0)
    front.lead(serving(own, leads=True, trouble=None))
    assert (await waiting)[-1]["body"] == b"own:{}"


async def test_leader_whose_lease_is_over_answers_nobody_and_says_so(front: Front) -> None:
    async def own(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("it must not be asked")

    front.lead(serving(own, leads=False, trouble="the database is away"))
    ready = await asked(front, "GET", "/readyz")
    assert (ready[0]["status"], b"the database is away" in ready[1]["body"]) == (503, True)
    sync = await asked(front, "POST", "/v1/nodes/n1/sync")
    assert sync[0]["status"] == 503
