"""
The pages over the whole fleet at an aggregator of several shards, which may lead some of them or none.

They are those of `overview`; their views come from the leaders, and so does what changes: the streams of all leaders
become one, whose cursor has that of each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import Response

from healthd.aggregator.api import Door, ValidationBody
from healthd.aggregator.auth import AuthError
from healthd.aggregator.ui import overview
from healthd.aggregator.ui.actions import PageRoute, end_of, reason_of, to
from healthd.aggregator.ui.events import BEAT_SECONDS, MOST_STREAMS, FullError, live
from healthd.aggregator.ui.session import visitor_of
from healthd.aggregator.ui.views import Source, cursor_of, cursors_in
from healthd.core import wire
from healthd.core.errors import BadInputError, HealthdError
from healthd.core.model import ValidationKind
from healthd.core.tasks import Tasks

AGAIN_SECONDS = 2.0
"""The pause before a leader whose stream has ended is asked again."""
MOST_WAITING = 64
"""Chunks of the leaders that wait for a slow reader; then the leaders wait."""
EVENT_BYTES = 1 << 20
LONGEST_CURSOR = 8000
"""Of 64 shards with long names."""
SIDE_BY_SIDE = 8
"""How many nodes are changed at the same time."""


class Leaders(Source, Protocol):
    """The leaders of all shards, as an aggregator reaches them with what the visitor has sent."""

    @property
    def names(self) -> Collection[str]:
        """The shards that are known now."""

    async def follow(
        self, request: Request, shard: str, topic: str, after: str, take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Read the stream of changes of a shard until it ends; `take` gets it as it comes."""

    async def call(self, request: Request, method: str, path: str, body: bytes, query: Mapping[str, str]) -> bytes:
        """What the API answers to the visitor. HealthdError for anything but a good answer."""


def pages_of(door: Door, leaders: Leaders) -> FastAPI:
    """The application of these pages; what is of one node or gate is not among them."""
    app = FastAPI(
        routes=[*overview.pages.routes, *router.routes],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.door, app.state.source, app.state.changes = door, leaders, Changes(leaders)
    return app


router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/events")
async def events(
    request: Request,
    topic: Annotated[str, Query(pattern="^(fleet|gates)$")],
    after: Annotated[str, Query(max_length=LONGEST_CURSOR)] = "",
    only: overview.OfShard = "",
) -> Response:
    """The stream of what changes in all shards, or in one."""
    visitor_of(request)
    changes: Changes = request.app.state.changes
    return live(changes.stream(request, topic, request.headers.get("last-event-id") or after, only))


@router.post("/several")
async def act(request: Request) -> Response:
    """What the form says, on all nodes that were chosen, each by the leader of its shard."""
    choice = await overview.choice_of(request)
    leaders: Leaders = request.app.state.source
    if choice.doing == "validate":
        body = wire.encode(ValidationBody(nodes=choice.nodes, kind=ValidationKind.COLLECTIVES))
        found = wire.decode(await leaders.call(request, "POST", "/v1/validations", body, {}), _Id, what="validation")
        return to(f"/gates/{quote(found.id, safe='')}")
    reason = reason_of(choice.fields.get("reason", ""))
    if choice.doing == "quarantine":
        seconds = end_of(choice.fields.get("end", ""))
        method, body, query = "PUT", wire.encode({"reason": reason, "for_seconds": seconds}), dict[str, str]()
    else:
        method, body, query = "DELETE", b"", {"reason": reason}
    failed: list[str] = []

    async def change(node: str) -> None:
        try:
            async with places:
                await leaders.call(request, method, f"/v1/nodes/{node}/quarantine", body, query)
        except HealthdError as error:
            failed.append(f"{node}: {error}")

    places = asyncio.Semaphore(SIDE_BY_SIDE)
    await asyncio.gather(*(change(node) for node in choice.nodes))
    if failed:
        done = len(choice.nodes) - len(failed)
        raise BadInputError(f"done for {done} of {len(choice.nodes)} nodes; {'; '.join(failed[:3])}")
    return choice.answer


@dataclass(frozen=True, kw_only=True)
class _Id:
    id: str


# --- what changes in all shards ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of one stream: where it goes on after it, what it is, and what it carries, as JSON."""

    cursor: str
    kind: str
    data: str


def events_in(text: bytes) -> tuple[list[Event], bytes]:
    """The whole events in what has come of a stream, and the beginning of the next one. Pure."""
    *whole, rest = text.split(b"\n\n")
    found = []
    for one in whole:
        lines = dict(line.partition(": ")[::2] for line in one.decode("utf-8", "replace").splitlines())
        if "event" in lines:
            found.append(Event(cursor=lines.get("id", ""), kind=lines["event"], data=lines.get("data", "null")))
    return found, rest


class Changes:
    """The streams of the leaders, each visitor's as one."""

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders
        self._streams = 0

    def stream(self, request: Request, topic: str, after: str, only: str) -> AsyncIterator[bytes]:
        """The changes of a topic from a cursor on, until the visitor's token is no longer good. FullError."""
        if self._streams >= MOST_STREAMS:
            raise FullError(f"{MOST_STREAMS} pages are live already; this one shows how it was when it was loaded")
        return self._stream(request, topic, cursors_in(after), only)

    async def _stream(self, request: Request, topic: str, cursors: dict[str, str], only: str) -> AsyncIterator[bytes]:
        loop, tasks = asyncio.get_running_loop(), Tasks()
        come: asyncio.Queue[tuple[str, Event]] = asyncio.Queue(MOST_WAITING)
        followed: set[str] = set()
        self._streams += 1
        due = loop.time() + BEAT_SECONDS
        try:
            yield b"retry: 2000\n\n"
            while _may_see(request):
                for shard in {only} if only else set(self._leaders.names) - followed:
                    if shard not in followed:
                        followed.add(shard)
                        tasks.start(f"changes of {shard}", self._follow(request, shard, topic, cursors, come))
                try:
                    async with asyncio.timeout_at(due):
                        shard, event = await come.get()
                except TimeoutError:
                    due = loop.time() + BEAT_SECONDS
                    yield _told("beat", "null", cursors)
                    continue
                if event.cursor:
                    cursors[shard] = event.cursor
                if event.kind != "beat":
                    yield _told(event.kind, event.data, cursors)
        finally:
            self._streams -= 1
            await tasks.stop(1.0)

    async def _follow(
        self,
        request: Request,
        shard: str,
        topic: str,
        cursors: Mapping[str, str],
        come: asyncio.Queue[tuple[str, Event]],
    ) -> None:
        """The stream of one shard, again and again; that it has ended is a change: the shard may not answer now."""
        while True:
            reader = _Reader(shard, come)
            with contextlib.suppress(HealthdError):
                await self._leaders.follow(request, shard, topic, cursors.get(shard, ""), reader.take)
            if reader.heard:
                await come.put((shard, Event(cursor="", kind="changed", data="null")))
            await asyncio.sleep(AGAIN_SECONDS)


class _Reader:
    """Cuts the stream of a shard into its events."""

    def __init__(self, shard: str, come: asyncio.Queue[tuple[str, Event]]) -> None:
        self.heard = False
        self._shard, self._come, self._rest = shard, come, b""

    async def take(self, chunk: bytes) -> None:
        """More of the stream."""
        self.heard = True
        found, self._rest = events_in(self._rest + chunk)
        if len(self._rest) > EVENT_BYTES:
            raise HealthdError(f"an event of shard {self._shard} has no end")
        for event in found:
            await self._come.put((self._shard, event))


def _told(kind: str, data: str, cursors: Mapping[str, str]) -> bytes:
    return f"id: {cursor_of(cursors)}\nevent: {kind}\ndata: {data}\n\n".encode()


def _may_see(request: Request) -> bool:
    try:
        visitor_of(request)
    except AuthError:
        return False
    return True
