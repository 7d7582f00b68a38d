"""
`POST /v1/nodes/{node}/sync`: a thousand of these come each second, so nothing stands in their way.

Nearly all are answered below ASGI, in their turn (`SyncEndpoint.take`). What needs the database, a platform's word or a
problem as its answer takes the long way, as bare ASGI. All other paths go on to the application behind it. Also the one
place that reads bodies: bounded in size and time.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from healthd.aggregator.api.problems import MEDIA_TYPE, HttpError, problem_of
from healthd.aggregator.backlog import ARRIVED
from healthd.aggregator.fleet import ANYBODY, Fleet, Speaker
from healthd.aggregator.identity.tokens import AuthError, Caller, Guard, Scope, key_hash
from healthd.aggregator.settings import AggregatorSettings
from healthd.core.errors import BadInputError, HealthdError
from healthd.core.http.server import DirectRequest, keep_connection
from healthd.core.model import PROTOCOL, NodeState, SyncAnswer, SyncRequest
from healthd.core.wire import decode, encode

log = logging.getLogger(__name__)

# The types of ASGI, as starlette has them.
ASGIScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, Receive, Send], Awaitable[None]]

KEY_HEADER = b"x-healthd-node-key"
MIN_KEY_LENGTH = 16
# A sync holds a state, or ages and reports instead of one; this is for what is around the state.
AROUND_STATE_BYTES = 64 * 1024

# Each rank of a node says what it found in each check of an order, all in one sync: 2 KiB of a collective of four
# sizes, 5 KiB of 16 training steps.
REPORT_OF_RANK_BYTES = 16 * 1024
MOST_RANKS = 256

# How many times what is allowed is read and thrown away, so that a client that sends too much can read why not.
DRAINED_TIMES = 4

# What `float` reads and is finite; also what the API's description says of the parameter.
WAIT_PATTERN = r"^([0-9]{1,9}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][-+]?[0-9]{1,2})?s?$"

_WAIT = re.compile(WAIT_PATTERN)
_PATH = re.compile(r"/v1/nodes/([^/]+)/sync")
# What needs neither unquoting nor a second look; a query that is another takes the long way.
_DIRECT = re.compile(rb"/v1/nodes/([A-Za-z0-9._-]{1,253})/sync\?wait=([0-9]{1,4}(?:\.[0-9]{1,6})?)")
# A gate's caller waits for the nodes that have something to report.
_NO_REPORTS = b'"orders":{}'


class SyncEndpoint:
    """The ASGI application that answers syncs and leaves everything else to `behind`."""

    def __init__(
        self,
        behind: ASGIApp,
        *,
        fleet: Fleet,
        guard: Guard,
        settings: AggregatorSettings,
        on_state: Callable[[NodeState], None] = lambda _: None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        `on_state` hears each state that a node's daemon has sent and that was taken in. Once it does not lead any more,
        what has not had its turn takes the long way.
        """
        self._leads = leads
        self._backlog = fleet.backlog
        self._on_state = on_state
        self._behind = behind
        self._fleet = fleet
        self._guard = guard
        self._settings = settings
        self._most_seconds = min(settings.hold_max_seconds, fleet.hold_max_seconds)
        self._max_bytes = settings.max_state_bytes + AROUND_STATE_BYTES

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        match = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            ARRIVED.set(time.perf_counter())
            await self._behind(scope, receive, send)
            return
        try:
            body = await self._answer(match[1], scope, receive)
        except HealthdError as error:
            problem, headers = problem_of(error)
            if problem.status >= 500 and not isinstance(error, AuthError):  # who cannot be asked is said once
                log.warning("sync of %s: %s", match[1], error)
            await respond(send, problem.status, encode(problem), MEDIA_TYPE, headers)
        else:
            await respond(send, 200, body, "application/json", {})

    def wants(self, url: bytes) -> bool:
        """Whether a POST of this path and query is a plain sync of a daemon (see `Direct`)."""
        return _DIRECT.fullmatch(url) is not None

    def take(self, request: DirectRequest) -> None:
        """Answer a sync in its turn, or hand it over where it takes the long way; see `Direct`."""
        prior = _NO_REPORTS not in request.body
        self._backlog.do(lambda: self._take(request), prior=prior)

    def _take(self, request: DirectRequest) -> None:
        try:
            done = self._taken(request)
        except HealthdError:
            done = False  # the long way says so
        except Exception:
            log.exception("a sync failed unexpectedly")
            done = False
        if not done:
            request.hand_over()

    def _taken(self, request: DirectRequest) -> bool:
        """Whether it is answered, or will be; if not, nothing was changed."""
        match, headers = _DIRECT.fullmatch(request.url), dict(request.headers)
        if request.disconnected:
            return True
        if match is None or len(request.body) > self._max_bytes or not self._leads():
            return False
        node = match[1].decode("ascii")
        caller = self._guard.admit_at_once(_said(headers), Scope.SYNC)
        key = headers.get(KEY_HEADER, b"").decode("latin-1")
        if caller is None or len(key) < MIN_KEY_LENGTH:
            return False
        caller.check_speaks_for((node,))
        said = decode(request.body, SyncRequest, what="sync")
        if said.protocol != PROTOCOL:
            return False
        wait_seconds = min(float(match[2]), self._most_seconds)

        def respond(answer: SyncAnswer) -> None:
            keep_connection(request.scope)
            request.respond(encode(answer))

        gone = self._fleet.sync_at_once(
            node,
            key_hash(key),
            said,
            wait_seconds,
            respond,
            speaker=_speaker(caller),
        )
        if gone is None:
            return False
        request.on_gone = gone
        try:
            self._tell_of_state(node, said)
        except Exception:
            log.exception("%s: its state was taken in, and could not be looked at", node)
        return True

    def _tell_of_state(self, node: str, said: SyncRequest) -> None:
        # Not what was sent: of a node's former process, say, nothing is taken in.
        if said.state is None and said.use is None:
            return
        if (taken := self._fleet.node(node)) is not None and taken.state is not None:
            self._on_state(taken.state)

    async def _answer(self, node: str, scope: ASGIScope, receive: Receive) -> bytes:
        if scope["method"] != "POST":
            raise HttpError(405, f"{scope['method']} is not supported for this path; use POST", {"allow": "POST"})
        headers = dict(scope["headers"])
        wait_seconds, executor = _query(scope["query_string"])
        # A hook that executes has the token that it asked its gate with, and is heard for that gate alone.
        caller = await self._guard.admit(_said(headers), Scope.SYNC if executor is None else Scope.GATE)
        caller.check_speaks_for((node,))
        key = headers.get(KEY_HEADER, b"").decode("latin-1")
        if len(key) < MIN_KEY_LENGTH:
            raise HttpError(
                401, f"a sync needs the node's key in X-Healthd-Node-Key (at least {MIN_KEY_LENGTH} characters)"
            )
        wait_seconds = min(wait_seconds, self._most_seconds)
        body = await read_body(
            receive,
            headers,
            max_bytes=self._max_bytes_of(node, headers),
            timeout_seconds=self._settings.read_timeout_seconds,
        )
        request = decode(body, SyncRequest, what="sync")
        if request.protocol != PROTOCOL:
            raise BadInputError(f"protocol {request.protocol} is not supported, only {PROTOCOL}; update the older side")
        if executor is not None:
            executed = await self._fleet.sync_executor(node, executor, key_hash(key), request, wait_seconds)
            keep_connection(scope)
            return encode(executed)
        answer = await self._fleet.sync(node, key_hash(key), request, wait_seconds, speaker=_speaker(caller))
        keep_connection(scope)
        self._tell_of_state(node, request)
        return encode(answer)

    def _max_bytes_of(self, node: str, headers: Mapping[bytes, bytes]) -> int:
        """
        How long a body may be: more where ranks of the node may report.

        Nearly all are short and say so: to know the ranks, the node's state must be decoded.
        """
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) <= self._max_bytes:
            return self._max_bytes
        return self._max_bytes + REPORT_OF_RANK_BYTES * self._ranks_of(node)

    def _ranks_of(self, node: str) -> int:
        """How many ranks may report, of a node that has told of its devices; 0 of one that was not heard yet."""
        known = self._fleet.node(node)
        inventory = known.state.inventory if known is not None and known.state is not None else None
        return 0 if inventory is None else min(MOST_RANKS, len(inventory.rank_targets))


async def read_body(
    receive: Receive, headers: MutableMapping[bytes, bytes], *, max_bytes: int, timeout_seconds: float
) -> bytes:
    """
    The body of a request: HttpError 413 when it is larger, 408 when it is late, 400 when it will never come.

    After an error the connection closes, since the rest of the body may still come.
    """
    length = headers.get(b"content-length", b"")
    announced = int(length[:20]) if length.isdigit() else 0
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(400, "the client disconnected before its request was complete")
                chunk = message.get("body", b"")
                size += len(chunk)
                done = not message.get("more_body", False)
                if max(size, announced) > max_bytes:
                    # A client that is still sending would not see an answer: let it end, as far as that is bearable.
                    chunks.clear()
                    if done or size > DRAINED_TIMES * max_bytes:
                        raise HttpError(413, f"the body may have at most {max_bytes} bytes", {"connection": "close"})
                elif done:
                    return chunk if not chunks else b"".join((*chunks, chunk))
                else:
                    chunks.append(chunk)
    except TimeoutError:
        raise HttpError(408, f"the body was incomplete after {timeout_seconds:g} s", {"connection": "close"}) from None


async def respond(send: Send, status: int, body: bytes, media_type: str, headers: MutableMapping[str, str]) -> None:
    """Send a whole answer."""
    sent = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    sent += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


def _said(headers: Mapping[bytes, bytes]) -> str | None:
    """The `Authorization` header."""
    authorization = headers.get(b"authorization")
    return None if authorization is None else authorization.decode("latin-1")


def _speaker(caller: Caller) -> Speaker:
    if caller.nodes is None:
        return ANYBODY
    if caller.instance is not None:
        one = caller.instance
        return Speaker(
            speaks_for=caller.speaks_for,
            vouched=f"instance {one.id}",
            vouched_id=f"{one.id} {one.launched}",
            launched=one.launched,
        )
    pod = caller.pod
    return Speaker(
        speaks_for=caller.speaks_for,
        vouched=None if pod is None else f"pod {pod.full_name}",
        vouched_id=None if pod is None else pod.uid,
    )


def _query(query: bytes) -> tuple[float, str | None]:
    """
    Seconds of `?wait=`, 0 without; and `?executor=`, the member that runs the node's checks, None for its daemon.

    BadInputError for what is no such number, or an unknown parameter.
    """
    if query.startswith(b"wait=") and query[5:].isdigit():
        return float(query[5:12]), None
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    if unknown := values.keys() - {"wait", "executor"}:
        raise BadInputError(f"unknown query parameter {min(unknown)!r}; a sync has: wait, executor")
    return parse_wait(values.get("wait", ["0"])[-1]), values.get("executor", [None])[-1]


def parse_wait(text: str) -> float:
    """Seconds to wait, as a plain number or with a trailing s; BadInputError when it is not one."""
    if _WAIT.fullmatch(text) is None:
        raise BadInputError(f"wait={text[:40]!r} is not a number of seconds; write wait=25")
    return float(text.removesuffix("s"))
