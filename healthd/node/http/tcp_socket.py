"""
The node's TCP port, which is read-only: no request can make the node do work, except rendering.

All answers are rendered from the one snapshot and cached until it changes, so that frequent probes cost nothing.

Also here:

- makes the answers of the node's HTTP servers: JSON of the model, and errors as application/problem+json.
"""

from __future__ import annotations

import difflib
import http
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from healthd.core import wire
from healthd.core.errors import BadInputError, ConfigError, HealthdError
from healthd.core.http.addresses import host_of
from healthd.core.http.server import exposition
from healthd.core.model import NodeState, Problem
from healthd.node.http.health import MEDIA_TYPE, Demand, document, parse_query, parse_question, readiness
from healthd.node.http.health import readiness_document as readiness_document
from healthd.node.http.metrics import registry_of
from healthd.node.services import StepSource
from healthd.node.state.store import NodeStore

ExceptionHandler = Callable[[Request, Exception], Awaitable[Response]]

PATHS = "/health, /livez, /readyz, /metrics, /v1/node, /v1/checks, /v1/results/{check}"
MAX_BODY_BYTES = 64 * 1024
# Different queries whose answers are cached; ordinary clients make few.
MAX_CACHED = 32

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class NodeApi:
    """The ASGI application."""

    def __init__(
        self,
        store: NodeStore,
        task_errors: Mapping[str, int] | None = None,
        steps: StepSource | None = None,
    ) -> None:
        """`task_errors` are those of `Tasks.errors`; None where no tasks run."""
        self._store = store
        self._registry = registry_of(store, {} if task_errors is None else task_errors, steps)
        self._cached_of: NodeState | None = None
        self._cache: dict[tuple[Demand | None, bool, bool], tuple[int, bytes]] = {}
        self._app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/v1/node", self._node),
                Route("/v1/checks", self._checks),
                Route("/v1/results/{check}", self._results),
            ],
            exception_handlers=dict(handlers(PATHS)),
        )
        self._app.router.redirect_slashes = False  # a redirect would use the Host header of the request

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request; no path takes a body, so a large one is not even read."""
        headers = dict(scope.get("headers", ()))
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit() or int(length[:20]) > MAX_BODY_BYTES:
            answer = problem(413, "requests have no body here", {"connection": "close"})
            await answer(scope, receive, send)
            return
        try:
            host_of(headers.get(b"host", b"").decode("latin-1"))
        except BadInputError as error:
            await problem(400, str(error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        demand, verbose = parse_query(_query(request))
        read_by_eye = _is_read_by_eye(request)
        state = self._store.snapshot()
        if state is not self._cached_of or len(self._cache) > MAX_CACHED:
            self._cached_of, self._cache = state, {}
        asked = (demand, verbose, read_by_eye)
        found = self._cache.get(asked)
        if found is None:
            status, content = document(state, demand, verbose=verbose)
            body = wire.encode(content)
            found = self._cache[asked] = (status, wire.indented(body) if read_by_eye else body)
        headers = {"cache-control": "no-store", "vary": "accept, user-agent"}
        return Response(found[1], found[0], headers, MEDIA_TYPE)

    async def _livez(self, request: Request) -> Response:
        """An answer is the proof that the daemon is alive."""
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        question = parse_question(_query(request))
        state = self._store.snapshot()
        conditions = readiness(
            state,
            question,
            workloads=self._store.scheduled.workloads,
            quarantine_unknown=self._store.quarantine_unknown,
            unwritable=self._store.unwritable,
        )
        ready, text = readiness_document(state, conditions, question)
        return PlainTextResponse(text, 200 if ready else 503, {"cache-control": "no-store"})

    async def _metrics(self, request: Request) -> Response:
        body, content_type = exposition(self._registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _node(self, request: Request) -> Response:
        return json_response(self._store.snapshot())

    async def _checks(self, request: Request) -> Response:
        return json_response({"checks": self._store.specs})

    async def _results(self, request: Request) -> Response:
        check = request.path_params["check"]
        names = [spec.name for spec in self._store.specs]
        if check not in names:
            near = difflib.get_close_matches(check, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(names)}"
            return problem(404, f"no check {check[:80]!r} is enabled on {self._store.settings.name}; {hint}")
        current = self._store.result(check)
        return json_response(
            {
                "check": check,
                "current": current.as_of(self._store.clock.boot()) if current is not None else None,
                "results": self._store.history(check),
            }
        )


def json_response(value: object, *, status: int = 200, media_type: str = "application/json") -> Response:
    """A record of the model; never cached, because it is about the present."""
    return Response(wire.encode(value), status, {"cache-control": "no-store"}, media_type)


def handlers(paths: str) -> Mapping[type[Exception] | int, ExceptionHandler]:
    """The answers to exceptions; `paths` lists the paths that there are, for a 404."""

    async def on_http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        if status == 404:
            # A person or a hook may have taken this address for the aggregator's.
            return problem(404, f"this daemon has no path {request.scope['path'][:200]}; choose from: {paths}")
        if status == 405:
            return problem(405, f"method {request.method[:20]} is not supported for this path", headers)
        detail = error.detail if isinstance(error, HTTPException) else "an internal error of healthd; see its log"
        return problem(status, detail, headers)

    async def on_ours(request: Request, error: Exception) -> Response:
        return problem(400 if isinstance(error, (BadInputError, ConfigError)) else 503, str(error))

    return {HTTPException: on_http, HealthdError: on_ours, 500: on_http}


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error with one clear sentence."""
    record = Problem(title=http.HTTPStatus(status).phrase, status=status, detail=detail)
    content = {key: value for key, value in wire.plain(record).items() if key != "extra"}
    return Response(wire.encode(content), status, headers, "application/problem+json")


def _is_read_by_eye(request: Request) -> bool:
    """Whether a person has typed `curl URL`: programs that use curl say what they accept, or take JSON as it comes."""
    return request.headers.get("accept") == "*/*" and request.headers.get("user-agent", "").startswith("curl/")


def _query(request: Request) -> dict[str, list[str]]:
    """The query; BadInputError when it cannot be parsed."""
    try:
        query = request.scope["query_string"].decode("latin-1")
        return urllib.parse.parse_qs(query, keep_blank_values=True, max_num_fields=20, errors="strict")
    except ValueError as error:
        raise BadInputError(f"the query cannot be read: {error}") from None
