"""Makes the answers of the node's HTTP servers: JSON of the model, and errors as application/problem+json."""

from __future__ import annotations

import http
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from healthd.core import wire
from healthd.core.errors import BadInputError, ConfigError, HealthdError
from healthd.core.model import Problem

ExceptionHandler = Callable[[Request, Exception], Awaitable[Response]]


def json_response(value: object, *, status: int = 200, media_type: str = "application/json") -> Response:
    """A record of the model; never cached, because it is about the present."""
    return Response(wire.encode(value), status, {"cache-control": "no-store"}, media_type)


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error with one clear sentence."""
    record = Problem(title=http.HTTPStatus(status).phrase, status=status, detail=detail)
    content = {key: value for key, value in wire.plain(record).items() if key != "extra"}
    return Response(wire.encode(content), status, headers, "application/problem+json")


def handlers(paths: str) -> Mapping[type[Exception] | int, ExceptionHandler]:
    """The answers to exceptions; `paths` lists the paths that there are, for a 404."""

    async def on_http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        if status == 404:
            # A person or a hook may have taken this address for the aggregator's.
            return problem(404, f"a node's daemon has no such path: {request.scope['path'][:200]}; there are: {paths}")
        if status == 405:
            return problem(405, f"{request.method[:20]} is not for this path", headers)
        detail = error.detail if isinstance(error, HTTPException) else "an error of healthd's own; see its log"
        return problem(status, detail, headers)

    async def on_ours(request: Request, error: Exception) -> Response:
        return problem(400 if isinstance(error, (BadInputError, ConfigError)) else 503, str(error))

    return {HTTPException: on_http, HealthdError: on_ours, 500: on_http}
