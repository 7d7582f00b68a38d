"""
The aggregator over HTTP: the application, its errors, and the paths for machines (liveness, metrics, targets).

Paths for programs are in `api`, those for people in `ui`; syncs are answered before all of this, in
`healthd.aggregator.api.sync`. What the former take and answer is described by `healthd.aggregator.api.openapi`.
"""

from __future__ import annotations

import http
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from checks.printable import printable_line
from healthd.aggregator.api import gates, peers
from healthd.aggregator.api import gates as api_gates
from healthd.aggregator.api import gates as api_preflight
from healthd.aggregator.api import nodes as api_nodes
from healthd.aggregator.api.handling import READ, Answer, ApiRoute, Parts, TargetGroup, parts_of
from healthd.aggregator.api.problems import MEDIA_TYPE, HttpError, problem_of
from healthd.aggregator.controller.bulkheads import Fault, Where
from healthd.aggregator.ui import ROUTERS as PAGE_ROUTERS
from healthd.aggregator.ui import add_to as add_page_to
from healthd.aggregator.ui.session import check_origin
from healthd.core.config import nearest
from healthd.core.errors import BadInputError, HealthdError
from healthd.core.http.addresses import host_of
from healthd.core.model import Problem
from healthd.core.tasks import TaskFailure
from healthd.core.wire import encode

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%a-z]+\]):[0-9]{1,5}")


class Application(FastAPI):
    """All paths but syncs; `routers` are those for programs."""

    routers: Sequence[APIRouter] = ()

    def openapi(self) -> dict[str, Any]:
        """The description of the API; it takes a tenth of a second to make, once."""
        if self.openapi_schema is None:
            from healthd.aggregator.api.openapi import describe

            self.openapi_schema = describe(route for one in self.routers for route in one.routes)
        return self.openapi_schema


def make_app(parts: Parts) -> Application:
    """The application: every path but syncs."""
    # FastAPI's documentation pages load scripts from elsewhere and need no token; ours: `healthd.aggregator.ui.docs`.
    # A path with a slash at its end is no other path: nobody is sent to where a Host header points.
    app = Application(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.parts = parts
    known = [Depends(_only_known_query), Depends(_from_here)]
    app.routers = [*ROUTERS, api_preflight.preflight_router] if parts.settings.preflight else ROUTERS
    for one in app.routers:
        app.include_router(one, dependencies=known)
    add_page_to(app, parts, known)
    app.add_exception_handler(HealthdError, _on_known_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unforeseen)
    return app


async def _only_known_query(request: Request) -> None:
    """A parameter that a path does not have is an error: a filter with a typo would answer something else."""
    if not request.query_params:
        return
    route = request.scope["route"]
    known = dict.fromkeys(_query_names(route.dependant)) if isinstance(route, APIRoute) else {}
    for name in request.query_params:
        if name not in known:
            raise BadInputError(f"unknown query parameter {name[:80]!r}{nearest(name, known)}")


async def _from_here(request: Request) -> None:
    """Where no token is asked for, no web page of another site may change anything through a browser on this host."""
    host_of(request.headers.get("host", ""))  # one that holds no host is refused on every path
    if parts_of(request).guard.open and request.method not in ("GET", "HEAD"):
        check_origin(request)


def _query_names(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a path and of all that it depends on."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


# --- errors ----------------------------------------------------------------------------------------------------------


def _problem(problem: Problem, headers: dict[str, str]) -> Response:
    return Response(encode(problem), status_code=problem.status, media_type=MEDIA_TYPE, headers=headers)


async def _on_known_error(request: Request, error: Exception) -> Response:
    problem, headers = problem_of(error if isinstance(error, HealthdError) else HealthdError(str(error)))
    if problem.status >= 500:
        log.warning("%s %s: %s", request.method, request.scope["path"], error)
    return _problem(problem, headers)


async def _on_invalid(_request: Request, error: Exception) -> Response:
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
    place = " ".join(str(part) for part in first["loc"])
    return _problem(problem_of(BadInputError(f"{place}: {first['msg']}"))[0], {})


async def _on_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.scope["path"]
    text, headers = http.HTTPStatus(status).phrase, {}
    if status == 404:
        text = f"no such path: {path[:200]}"
    elif status == 405:
        headers = {"allow": _methods(request.app, path)}
        text = f"{request.method} is not for {path[:200]}; it has: {headers['allow']}"
    return _problem(problem_of(HttpError(status, text))[0], headers)


def _methods(app: Application, path: str) -> str:
    """The methods that a path has, of all routes: the framework names those of the first one alone."""
    routes = [route for one in (*app.routers, *PAGE_ROUTERS) for route in one.routes if isinstance(route, APIRoute)]
    found = (route.methods or () for route in routes if route.path_regex.match(path))
    return ", ".join(sorted({method for methods in found for method in methods}))


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    log.error("%s %s: internal error: %r", request.method, request.scope["path"], error, exc_info=error)
    return _problem(problem_of(HttpError(500, "internal error; the aggregator's log has more"))[0], {})


# --- for machines ----------------------------------------------------------------------------------------------------

router = APIRouter(route_class=ApiRoute, tags=["service"])
TEXT = {"text/plain": {"schema": {"type": "string"}}}


@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_class=PlainTextResponse)
async def livez() -> Response:
    """200 while the loop turns."""
    return PlainTextResponse("ok\n")


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    response_class=PlainTextResponse,
    responses={503: {"description": "It takes nothing now, or admits nothing; the text says why.", "content": TEXT}},
)
async def readyz(request: Request, verbose: str | None = None) -> Response:
    """
    200 while it takes syncs and questions and its database takes writes (tried every two seconds, not here).

    What keeps it from admitting is said, but is no reason to send nobody. `?verbose` names each gate and node that an
    internal error of the aggregator stops, and each task that has failed since the start.
    """
    parts = parts_of(request)
    if parts.stopping.is_set():
        return PlainTextResponse("stopping\n", status_code=503)
    if (trouble := parts.store.trouble()) is not None:
        return PlainTextResponse(f"{printable_line(trouble)}\n", status_code=503)
    recovering = parts.engine.recovering()
    said = f"ok, but holds every gate: {recovering}\n" if recovering else "ok\n"
    if trouble := parts.guard.trouble():
        said += f"tokens of service accounts cannot be reviewed: {printable_line(trouble)}\n"
    reasons = (printable_line(breaker.reason) for breaker in parts.engine.breakers().values())
    tripped = "".join(f"the breaker of the rules is open: {reason}\n" for reason in reasons)
    faults, failures = parts.engine.faults(), parts.tasks.failures()
    if verbose is None:
        stopped = _stopped(faults)
        if waiting := [failure.task for failure in failures if not failure.running]:
            stopped += f"failed and not started again yet: {', '.join(waiting)}; ?verbose says why\n"
    else:
        stopped = "".join(
            printable_line(f"{f.where.value} {f.name}: internal error ({f.message}), {f.times} times") + "\n"
            for f in faults
        ) + "".join(printable_line(_told(failure)) + "\n" for failure in failures)
    all_stand = any(fault.where is Where.TURN for fault in faults)
    return PlainTextResponse(said + tripped + stopped, status_code=503 if all_stand else 200)


def _stopped(faults: Sequence[Fault]) -> str:
    """What internal errors stop, in a line each; empty: nothing."""
    turns = sum(fault.where is Where.TURN for fault in faults)
    others = len(faults) - turns
    all_gates = "an internal error stops all gates; ?verbose says why\n" if turns else ""
    return all_gates + (f"internal errors stop gates or nodes ({others}); ?verbose names them\n" if others else "")


def _told(failure: TaskFailure) -> str:
    now = "runs again" if failure.running else "is started again soon"
    return f"task {failure.task} {now} after {failure.times} failures; the last: {failure.message}"


@router.head("/metrics", dependencies=[READ], include_in_schema=False)
@router.get(
    "/metrics",
    dependencies=[READ],
    response_class=PlainTextResponse,
    responses={200: {"content": {"application/openmetrics-text": TEXT["text/plain"]}}},
)
async def metrics(request: Request) -> Response:
    """Prometheus text or OpenMetrics."""
    body, content_type = parts_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@router.get("/v1/sd/prometheus", dependencies=[READ])
async def targets(request: Request, pool: str | None = None) -> Answer[list[TargetGroup]]:
    """
    Every node as a target of Prometheus' http_sd.

    Nodes that fell silent stay, so that `up` tells of them; a node is believed about its own address as about its
    health, but only when it is one.
    """
    found = []
    for state in parts_of(request).fleet.states():
        own = {"node": state.node, "pool": state.labels.get("pool", ""), "instance_type": state.instance_type or ""}
        if state.address and _ADDRESS.fullmatch(state.address) and pool in (None, own["pool"]):
            found.append(TargetGroup(targets=(state.address,), labels=own))
    return Answer(found)


ROUTERS = [
    router,
    api_gates.router,
    gates.validation_router,
    api_nodes.router,
    gates.override_router,
    peers.router,
    gates.report_router,
]
