"""
The network between clients and aggregators, request by request: it delays, loses, repeats, reorders and cuts.

What serves is an ASGI application that belongs to a process; a request that it holds when it is killed fails.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from healthd.aggregator.forwarding import FORWARDED
from tests.simulation.loop import Process, VirtualLoop

Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[MutableMapping[str, Any]], Awaitable[None]]],
    Awaitable[None],
]

ONE_WAY_SECONDS = (0.0002, 0.004)
REFUSED_SECONDS = 0.01
REPEAT_SECONDS = 3.0


class NetworkError(Exception):
    """No answer came: refused, reset, or nothing in time. Whether the request has arrived is not known."""


class BrokenPromiseError(AssertionError):
    """What the simulation is there to find."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as it goes over the network."""

    source: str
    method: str
    path: str
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An answer."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(kw_only=True)
class Trouble:
    """What is wrong between a client and a server: probabilities, and most seconds of delay each way."""

    lose_request: float = 0.0
    lose_answer: float = 0.0
    repeat: float = 0.0
    delay_seconds: float = 0.0
    cut: bool = False


@dataclass(eq=False)
class _Server:
    process: Process
    application: Application
    under_way: dict[asyncio.Future[Answered], None] = field(default_factory=dict)


WELL = Trouble()


class Network:
    """
    See the module. `log` is told of everything that arrives, and `on_answer` of every answer: by whom, what `leads`
    said of it when it was asked, the request and the status.
    """

    def __init__(self, loop: VirtualLoop, chance: random.Random, log: Callable[[str], None]) -> None:
        self._loop, self._chance, self._log = loop, chance, log
        self._servers: dict[str, _Server] = {}
        self._former: list[_Server] = []
        self._world = contextvars.Context()
        self.troubles: dict[tuple[str, str], Trouble] = {}
        self.leads: Callable[[Process], bool] = lambda _: True
        self.on_answer: Callable[[Process, bool, Asked, int], None] = lambda _process, _led, _asked, _status: None

    def broken(self, what: str) -> None:
        """End the simulation: a promise was not kept."""
        self._loop.errors.append(BrokenPromiseError(what))

    def listen(self, name: str, process: Process, application: Application) -> None:
        """From now on this process serves under the name; who served before answers what it has."""
        if name in self._servers:
            self._former.append(self._servers[name])
        self._servers[name] = _Server(process, application)

    def reset(self, name: str, process: Process) -> None:
        """A process behind the name has died: whoever waits for it is told by its machine."""
        for server in (*self._former, *filter(None, [self._servers.get(name)])):
            if server.process is process:
                for waiting in list(server.under_way):
                    self._later(REFUSED_SECONDS, _fail, waiting, "connection reset")
        if name in self._servers and self._servers[name].process is process:
            del self._servers[name]
        self._former = [server for server in self._former if server.process is not process]

    async def ask(self, to: str, asked: Asked, *, seconds: float) -> Answered:
        """The answer; NetworkError where none comes within `seconds`."""
        waiting: asyncio.Future[Answered] = self._loop.create_future()
        trouble = self.troubles.get((asked.source, to), WELL)
        if not trouble.cut and not self._drawn(trouble.lose_request):
            self._later(self._delay(trouble), self._arrive, to, asked, waiting)
            if self._drawn(trouble.repeat):
                self._later(self._chance.uniform(0, REPEAT_SECONDS), self._arrive, to, asked, waiting)
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except TimeoutError:
            raise NetworkError(f"no answer within {seconds:g} s") from None

    def _arrive(self, to: str, asked: Asked, waiting: asyncio.Future[Answered]) -> None:
        server = self._servers.get(to)
        if server is None:
            self._later(REFUSED_SECONDS, _fail, waiting, "connection refused")
            return
        self._log(f"{asked.source} > {to} {asked.method} {asked.path}?{asked.query} {asked.body.decode()}")
        server.under_way[waiting] = None
        server.process.start(self._serve(to, server, asked, waiting), f"request of {asked.source}")

    async def _serve(self, to: str, server: _Server, asked: Asked, waiting: asyncio.Future[Answered]) -> None:
        status, parts = 0, []
        headers: tuple[tuple[bytes, bytes], ...] = ()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await self._loop.create_future()  # the client stays connected
            sent = True
            return {"type": "http.request", "body": asked.body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], tuple(message["headers"])
            else:
                parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": asked.method,
            "scheme": "http",
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "root_path": "",
            "query_string": asked.query.encode(),
            "headers": [
                (b"host", b"127.0.0.1:8090"),
                (b"content-length", str(len(asked.body)).encode()),
                *((name.lower().encode(), value.encode()) for name, value in asked.headers),
            ],
            "client": ("10.0.0.1", 40000),
            "server": ("10.0.1.1", 8090),
            "state": {},
        }
        led = self.leads(server.process)
        try:
            await server.application(scope, receive, send)
            self.on_answer(server.process, led, asked, status)
        except Exception as error:
            self._loop.errors.append(error)
            raise
        server.under_way.pop(waiting, None)
        trouble = self.troubles.get((asked.source, to), WELL)
        answered = Answered(status=status, body=b"".join(parts), headers=headers)
        if not trouble.cut and not self._drawn(trouble.lose_answer):
            self._later(self._delay(trouble), self._answer, to, asked, answered, waiting)

    def _answer(self, to: str, asked: Asked, answered: Answered, waiting: asyncio.Future[Answered]) -> None:
        if not waiting.done():
            self._log(f"{asked.source} < {to} {answered.status} {answered.body.decode()}")
            waiting.set_result(answered)

    # --- chance -------------------------------------------------------------------------------------------------------

    def _drawn(self, probability: float) -> bool:
        return probability > 0 and self._chance.random() < probability

    def _delay(self, trouble: Trouble) -> float:
        return self._chance.uniform(*ONE_WAY_SECONDS) + self._chance.random() * trouble.delay_seconds

    def _later(self, seconds: float, work: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_later(seconds, work, *arguments, context=self._world)


class Transport(httpx.AsyncBaseTransport):
    """The way from one server to the others: the host of a URL is the name that a server listens at."""

    def __init__(self, network: Network, source: str) -> None:
        self._network, self._source = network, source

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As of a transport."""
        own = ("host", "content-length")  # the network adds them
        if [name for name, _ in request.headers.raw].count(FORWARDED) > 1:
            self._network.broken(f"{self._source} sends on what was forwarded to it: {request.method} {request.url}")
        bounds, to = request.extensions["timeout"], request.url.host
        asked = Asked(
            source=self._source,
            method=request.method,
            path=request.url.path,
            query=request.url.query.decode(),
            headers=tuple((name, value) for name, value in request.headers.items() if name not in own),
            body=await request.aread(),
        )
        if self._network.troubles.get((self._source, to), WELL).cut:
            await asyncio.sleep(bounds["connect"])
            raise httpx.ConnectTimeout("no answer")
        try:
            answered = await self._network.ask(to, asked, seconds=bounds["read"])
        except NetworkError as error:
            raise httpx.ReadError(str(error)) from None
        return httpx.Response(answered.status, headers=list(answered.headers), stream=httpx.ByteStream(answered.body))


def _fail(waiting: asyncio.Future[Answered], why: str) -> None:
    if not waiting.done():
        waiting.set_exception(NetworkError(why))
