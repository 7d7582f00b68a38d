"""
Who answers a request: this aggregator's own parts while it leads, else the aggregator that does.

A request of a hook or a person is forwarded there, one hop and never two; a node is told where to go (421, `Leader:`).
What load balancers and Prometheus ask is answered here in either role.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from prometheus_client import CollectorRegistry

from checks.printable import printable_line
from healthd.aggregator.api import (
    MEDIA_TYPE,
    ASGIApp,
    ASGIScope,
    HttpError,
    Receive,
    Send,
    problem_of,
    read_body,
    respond,
    scope_of,
)
from healthd.aggregator.identity.tokens import PEER, Guard, Scope
from healthd.aggregator.metrics import LOOP_LAG, LeadershipCollector, tasks_metric
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.errors import HealthdError, connection_words
from healthd.core.http.server import Direct, DirectRequest, exposition
from healthd.core.http.trust import trusting
from healthd.core.tasks import Tasks
from healthd.core.wire import encode

log = logging.getLogger(__name__)

FORWARDED = b"x-healthd-forwarded"
"""The header of a request that an aggregator has forwarded: it is answered where it comes to, or refused."""
LEADER = "leader"
"""The header that tells a node where the leader is."""
NOT_LEADER = 421
"""Misdirected Request: the status that goes with it."""
TAKEOVER_SECONDS = 8.0
"""How long a request waits for somebody to lead: a takeover is over by then, and who asked waits 10 s for an answer."""
SLACK_SECONDS = 130.0
"""How long a leader may take beyond what it was asked to hold: it may take nodes out of a scheduler's way first."""
CONNECT_SECONDS = 3.0
STREAM_SECONDS = 600.0
"""From the first byte of an answer to its last. The page follows what happens in one answer, and asks anew."""
STREAM_BYTES = 256 << 20
PROBE_SECONDS = 5.0
"""How often one that stands by looks whether it can reach the leader."""
MOST_FORWARDED = 2000
ANONYMOUS_BYTES = 16 * 1024
"""Largest body of a request without a token: the form by which people log in."""

_SYNC = re.compile(r"/v1/nodes/[^/]+/sync")
_RELEASE = re.compile(r"/v1/gates/(?:[^/]+/)?lease")
_OWN = ("/livez", "/readyz", "/metrics")
# Of one connection and not of a request (RFC 9110, 7.6.1); the length is that of the body that is read here.
_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """
    What answers while this aggregator leads: its application, what answers some syncs before it (None: nothing),
    whether its lease still holds, and why the database takes no renewal.
    """

    app: ASGIApp
    direct: Direct | None = None
    leads: Callable[[], bool]
    trouble: Callable[[], str | None]


class Front:
    """
    The ASGI application of the process. It is told who leads (`lead`, `stand_by`, `follow`); run `probe` as a task.

    `own_url` is where this aggregator itself is reached. `trust` verifies the others; None: nobody else is asked.
    `transport` None: by HTTP.
    """

    def __init__(
        self,
        *,
        guard: Guard,
        settings: AggregatorSettings,
        own_url: str,
        trust: ssl.SSLContext | None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._guard = guard
        self._settings = settings
        self._own_url = own_url
        self._serving: Serving | None = None
        self._leader: str | None = None
        self._term = 0
        self._why = "it has just started"
        self._unreachable = ""
        self._stopping = False
        self._changed = asyncio.Event()
        self._active = 0
        self._idle = asyncio.Event()
        self._tasks = Tasks()
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(LeadershipCollector(lambda: False, lambda: self._term))
        self._metrics.register(tasks_metric())
        self._metrics.register(LOOP_LAG)
        self._http = httpx.AsyncClient(
            verify=trust if trust is not None else False,  # never used without TLS
            trust_env=False,
            transport=transport,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=MOST_FORWARDED, keepalive_expiry=30.0),
        )

    # --- who leads ----------------------------------------------------------------------------------------------------

    def lead(self, serving: Serving) -> None:
        """From now on it leads itself."""
        self._serving, self._leader, self._why = serving, None, ""
        self._tell()

    def stand_by(self, why: str) -> None:
        """It does not lead any more; whoever does is not known yet."""
        self._serving, self._leader, self._why = None, None, why
        self._tell()

    def follow(self, leader: str | None, term: int, why: str) -> None:
        """Another one leads, at this URL; None: nobody that is known, and `why`."""
        self._why = why
        if (leader, term) != (self._leader, self._term):
            self._leader, self._term, self._unreachable = leader, term, ""
            self._tell()

    def stop(self) -> None:
        """The process ends: who asks from now on is sent away."""
        self._stopping = True
        self.stand_by("it is stopping")

    async def drained(self, seconds: float) -> None:
        """Until what this aggregator itself was asked is answered; at most so long."""
        if self._active:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()

    async def close(self) -> None:
        """Give up what is asked elsewhere."""
        await self._tasks.stop(1.0)
        await self._http.aclose()

    async def probe(self) -> None:
        """Look for ever whether the leader can be reached."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            if (leader := self._leader) is None:
                continue
            try:
                if (told := self._forbidden(leader)) is None:
                    answer = await self._http.get(f"{leader}/livez", timeout=CONNECT_SECONDS)
                    told = "" if answer.status_code == 200 else f"HTTP {answer.status_code}"
            except httpx.HTTPError as error:
                told = connection_words(error)
            if leader == self._leader:
                self._unreachable = told

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- requests -----------------------------------------------------------------------------------------------------

    def wants(self, url: bytes) -> bool:
        """Whether it is answered without ASGI, because this aggregator leads; see `Direct`."""
        serving = self._serving
        return serving is not None and serving.direct is not None and serving.direct.wants(url) and serving.leads()

    def take(self, request: DirectRequest) -> None:
        """See `Direct`."""
        if self._serving is None or self._serving.direct is None:
            request.hand_over()
        else:
            self._serving.direct.take(request)

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        PEER.set(str((scope.get("client") or ("",))[0]))
        serving = self._serving
        if serving is None or not (serving.leads() or scope["path"] in _OWN):
            await self._elsewhere(scope, receive, send)
            return
        if scope["path"] == "/readyz" and not serving.leads():
            await self._ready(send)
            return
        self._active += 1
        try:
            await serving.app(scope, receive, send)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _elsewhere(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Answer as one that stands by."""
        path, method = scope["path"], scope["method"]
        try:
            if path in _OWN:
                if method not in ("GET", "HEAD"):
                    raise HttpError(405, f"{method} is not supported for {path}; use GET", {"allow": "GET, HEAD"})
                await self._own(path, scope, send)
            elif _SYNC.fullmatch(path):
                await self._send_on(scope, receive)
            else:
                await self._forward(scope, receive, send)
        except HealthdError as error:
            problem, headers = problem_of(error)
            await respond(send, problem.status, encode(problem), MEDIA_TYPE, headers)

    async def _own(self, path: str, scope: ASGIScope, send: Send) -> None:
        if path == "/livez":
            await respond(send, 200, b"ok\n", "text/plain; charset=utf-8", {})
        elif path == "/readyz":
            await self._ready(send)
        else:
            headers = dict(scope["headers"])
            await self._guard.admit(_text(headers.get(b"authorization")), Scope.READ)
            body, media_type = exposition(self._metrics, headers.get(b"accept", b"").decode("latin-1"))
            await respond(send, 200, body, media_type, {})

    async def _ready(self, send: Send) -> None:
        status, said = self._readiness()
        await respond(send, status, f"{printable_line(said)}\n".encode(), "text/plain; charset=utf-8", {})

    def _readiness(self) -> tuple[int, str]:
        if self._stopping:
            return 503, "stopping"
        if (serving := self._serving) is not None:
            why = serving.trouble() or "the database accepts no renewal"
            return 503, f"leader until its lease was over: {why}"
        if self._leader is None:
            return 503, f"neither leads nor knows the leader: {self._why}"
        if self._unreachable:
            return 503, f"standby that cannot reach the leader ({self._leader}): {self._unreachable}"
        return 200, f"standby (leader: {self._leader})"

    async def _send_on(self, scope: ASGIScope, receive: Receive) -> None:
        """Tell a node where the leader is."""
        headers = dict(scope["headers"])
        await self._check_caller(headers.get(b"authorization"), required=True)
        most, seconds = self._settings.max_body_bytes, self._settings.read_timeout_seconds
        await read_body(receive, headers, max_bytes=most, timeout_seconds=seconds)
        if self._leader is None:
            raise self._nobody(3)
        text = f"this aggregator is a standby; {self._leader} leads"
        raise HttpError(NOT_LEADER, text, {LEADER: self._leader})

    def _nobody(self, retry_seconds: int = 1) -> HttpError:
        return HttpError(503, f"{self._readiness()[1]}; ask again", {"retry-after": str(retry_seconds)})

    async def _check_caller(self, authorization: bytes | None, *, required: bool) -> None:
        """AuthError for a token that is not known. What a page or a node may do is judged where it is answered."""
        if authorization is None and not required:
            return
        said = _text(authorization)
        await self._guard.review(said)
        self._guard.identify(said)

    # --- one hop ------------------------------------------------------------------------------------------------------

    async def _forward(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Have the leader answer. One that is taken over from meanwhile is asked no longer."""
        headers = dict(scope["headers"])
        if FORWARDED in headers:
            raise HttpError(
                503,
                "this aggregator does not lead, although another aggregator forwarded to it; ask again",
                {"retry-after": "1"},
            )
        authorization = headers.get(b"authorization")
        if (needed := scope_of(scope["method"], scope["path"])) is not None:
            await self._guard.admit(_text(authorization), needed)
        else:
            await self._check_caller(authorization, required=False)
        known = authorization is not None or self._guard.open
        body = await read_body(
            receive,
            headers,
            max_bytes=self._settings.max_body_bytes if known else ANONYMOUS_BYTES,
            timeout_seconds=self._settings.read_timeout_seconds,
        )
        until = asyncio.get_running_loop().time() + TAKEOVER_SECONDS
        former: tuple[str, int] | None = None
        while True:
            where = await self._whereto(former, until)
            if where is None:
                await self._answer_here(scope, body, receive, send)
                return
            asked = _Forwarded(scope, body, where[0], self._settings.hold_max_seconds + SLACK_SECONDS)
            failed = await self._ask(asked, receive, send)
            if failed is None:
                return
            if asked.begun:
                return  # the caller has a part of the answer; the server cuts the connection, so that it sees that
            if not _repeatable(scope):
                raise HttpError(503, f"{failed}; ask again", {"retry-after": "1"})
            log.debug("%s %s: %s; it is sent again once an aggregator leads", scope["method"], scope["path"], failed)
            former, until = where, asyncio.get_running_loop().time() + TAKEOVER_SECONDS

    async def _whereto(self, former: tuple[str, int] | None, until: float) -> tuple[str, int] | None:
        """
        URL and term of the leader, another one than `former`; None: it is this aggregator. Waits until somebody leads.
        """
        while True:
            changed, serving, leader = self._changed, self._serving, self._leader
            if serving is not None and serving.leads():
                return None
            if leader is not None and (leader, self._term) != former:
                if told := self._forbidden(leader):
                    raise HttpError(503, f"the leader is not asked: {told}")
                return leader, self._term
            if self._stopping:
                raise self._nobody()
            try:
                async with asyncio.timeout_at(until):
                    await changed.wait()
            except TimeoutError:
                raise self._nobody() from None

    def _forbidden(self, leader: str) -> str | None:
        """Why no token may be sent to this address; None where it may."""
        if leader == self._own_url:
            return f"its address {leader} is this aggregator's own; give each aggregator its own advertise_url"
        if self._settings.tls_cert is not None and not leader.startswith("https://"):
            return f"its address {leader} is plain HTTP, but this aggregator uses TLS; give it a certificate too"
        return None

    async def _answer_here(self, scope: ASGIScope, body: bytes, receive: Receive, send: Send) -> None:
        """While the request waited, this aggregator has come to lead."""
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> dict[str, object]:
            return first.pop() if first else dict(await receive())

        await self(scope, again, send)

    async def _ask(self, asked: _Forwarded, receive: Receive, send: Send) -> str | None:
        """
        Send it on and its answer back; why that failed, None where it did not, or nobody waits for it any more.
        """
        answer = self._tasks.start("forwarded request", asked.run(self._http, send))
        gone = self._tasks.start("client of a forwarded request", _gone(receive))
        other = self._tasks.start("change of the leader", self._changed.wait())
        waiting: set[asyncio.Task[object]] = {answer, gone, other}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            return None if gone.done() else "the leader that was asked no longer leads"
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)


class _Forwarded:
    """One request on its way to `leader`; `begun` once its answer has begun to go back."""

    def __init__(self, scope: ASGIScope, body: bytes, leader: str, seconds: float) -> None:
        self.begun = False
        self._leader, self._seconds, self._body = leader, seconds, body
        query = scope["query_string"]
        self._url = httpx.URL(leader).copy_with(raw_path=scope["raw_path"] + (b"?" + query if query else b""))
        self._method: str = scope["method"]
        named = {name.strip() for value in _values(scope, b"connection") for name in value.lower().split(b",")}
        drop = _HOP | named | {b"content-length"}
        # With its Host: whether a form comes from a page of ours is judged by it.
        self._headers = [(name, value) for name, value in scope["headers"] if name not in drop]
        self._headers.append((FORWARDED, b"1"))

    async def run(self, http: httpx.AsyncClient, send: Send) -> str | None:
        """Ask, and send the answer back as it comes; why it failed, None where it did not."""
        loop = asyncio.get_running_loop()
        timeout = httpx.Timeout(CONNECT_SECONDS, read=self._seconds)
        # Not of the client, which would add headers of its own: the leader hears what the caller said.
        request = httpx.Request(
            self._method,
            self._url,
            headers=self._headers,
            content=self._body or None,
            extensions={"timeout": timeout.as_dict()},
        )
        try:
            async with asyncio.timeout(self._seconds) as bound, contextlib.AsyncExitStack() as stack:
                answer = await http.send(request, stream=True)
                stack.push_async_callback(answer.aclose)
                bound.reschedule(loop.time() + STREAM_SECONDS)
                headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _HOP]
                self.begun = True
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                size = 0
                async for chunk in answer.aiter_raw():
                    size += len(chunk)
                    if size > STREAM_BYTES:
                        return f"the answer of the leader ({self._leader}) does not end"
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return f"the leader ({self._leader}) did not respond in time"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return f"the leader ({self._leader}) cannot be reached: {connection_words(error)}"
        return None


def trust_of(settings: AggregatorSettings) -> ssl.SSLContext:
    """What verifies the other aggregators. ConfigError."""
    return trusting(settings.ca_file)


def _repeatable(scope: ASGIScope) -> bool:
    """Whether asking twice is as asking once: a gate is one for each job and attempt, and so is its release."""
    method, path = scope["method"], scope["path"]
    return (
        method in ("GET", "HEAD", "PUT")
        or (method == "POST" and path == "/v1/gates")
        or (method == "DELETE" and _RELEASE.fullmatch(path) is not None)
    )


def _values(scope: ASGIScope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")


async def _gone(receive: Receive) -> None:
    """Until the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
