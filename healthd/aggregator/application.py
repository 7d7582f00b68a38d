"""
The aggregator over HTTP: the application and its description, its errors, and the paths for machines (liveness,
metrics, targets).

Paths for programs are in `api`, those for people in `ui`; syncs are answered before all of this, in
`healthd.aggregator.api.sync`.
"""

from __future__ import annotations

import http
import json
import logging
import re
import threading
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from checks.printable import printable_line
from healthd import __version__
from healthd.aggregator.api import (
    KEY_HEADER,
    MEDIA_TYPE,
    MIN_KEY_LENGTH,
    PROGRAM_ROUTERS,
    READ,
    SYNC,
    ApiRoute,
    HttpError,
    Parts,
    TargetGroup,
    Wait,
    gates,
    parts_of,
    problem_of,
    problems,
)
from healthd.aggregator.engine import Fault, Where
from healthd.aggregator.page import ROUTERS as PAGE_ROUTERS
from healthd.aggregator.page import add_to as add_page_to
from healthd.core.errors import BadInputError, HealthdError
from healthd.core.model import Problem, SyncAnswer, SyncRequest
from healthd.core.tasks import TaskFailure
from healthd.core.wire import encode

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%a-z]+\]):[0-9]{1,5}")

ABOUT = """The aggregator answers whether a job may start on nodes now, and shows what it knows about them.

Every error is one record, `Problem` (`application/problem+json`, RFC 9457); `detail` says what is wrong and what to do.
An unknown parameter or member of a body is an error. Times are in seconds since the epoch. A request with `wait` is
answered as soon as there is something to report, and at the latest after that time. `None` in a text is null."""

TAGS = {
    "gates": "May this job start on these nodes, now?",
    "validations": "Run collectives over nodes by hand, without a lease.",
    "nodes": "The state of each node, and quarantines.",
    "fleet": "The fleet as a whole.",
    "overrides": "Jobs that an operator admits by hand.",
    "peers": "Nodes compared with their peers, and the samples from which limits are learned.",
    "preflight": "The roll call of a preflight; only the preflight's own aggregator has it.",
    "service": "For load balancers, Prometheus and the daemons of nodes.",
}

router = APIRouter(route_class=ApiRoute, tags=["service"])
TEXT = {"text/plain": {"schema": {"type": "string"}}}

ROUTERS = [router, *PROGRAM_ROUTERS]


def make_app(parts: Parts) -> Application:
    """The application: every path but syncs."""
    app = Application(preflight=parts.settings.preflight)
    app.state.parts = parts
    add_page_to(app, parts)
    app.add_exception_handler(HealthdError, _on_known_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unforeseen)
    return app


class Application(FastAPI):
    """All paths but syncs, which it describes only."""

    def __init__(self, *, preflight: bool) -> None:
        routers = (*ROUTERS, *((gates.preflight_router,) if preflight else ()), *PAGE_ROUTERS)
        # FastAPI's documentation pages load scripts from elsewhere and need no token: `/openapi.json` is what there is.
        # A path with a slash at its end is no other path: nobody is sent to where a Host header points.
        super().__init__(
            title="healthd aggregator",
            version=__version__,
            description=ABOUT,
            openapi_tags=[{"name": name, "description": text} for name, text in TAGS.items()],
            separate_input_output_schemas=False,
            # As they are: `include_router` would build each anew for this application, all in a fifth of a second.
            routes=[route for one in routers for route in one.routes],
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        self._describing = threading.Lock()

    def openapi(self) -> dict[str, Any]:
        """
        FastAPI's description of the API, but: what is only ever answered has all of its members, and no path answers
        422, which is a 400 here. Threads may ask for it.
        """
        with self._describing:
            made = self.openapi_schema
            found = super().openapi()
            if made is None:
                schemas = found["components"]["schemas"]
                schemas["Problem"] = TypeAdapter(Problem).json_schema()
                operations = [one for path in found["paths"].values() for one in path.values()]
                for one in operations:
                    one["responses"].pop("422", None)
                for name in ("HTTPValidationError", "ValidationError"):
                    schemas.pop(name, None)
                taken = _reached([one.get("requestBody") for one in operations], schemas)
                for name in schemas.keys() - taken:
                    if "properties" in schemas[name]:
                        schemas[name]["required"] = list(schemas[name]["properties"])
        return found


@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_class=PlainTextResponse)
async def livez() -> Response:
    """200 while the event loop runs."""
    return PlainTextResponse("ok\n")


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    response_class=PlainTextResponse,
    responses={503: {"description": "It accepts or admits nothing now; the text says why.", "content": TEXT}},
)
async def readyz(request: Request, verbose: str | None = None) -> Response:
    """
    200 while it accepts syncs and requests and its database accepts writes (tested every two seconds, not here); also
    on a standby that reaches the leader.

    What prevents admissions is reported, but does not change the status. `?verbose` lists each gate and node that an
    internal error of the aggregator stops, and each task that has failed since the start.
    """
    parts = parts_of(request)
    if parts.stopping.is_set():
        return PlainTextResponse("stopping\n", status_code=503)
    if (trouble := parts.engine.trouble()) is not None:
        return PlainTextResponse(f"{printable_line(trouble)}\n", status_code=503)
    recovering = parts.engine.recovering()
    said = "leader" + (f", but holds every gate: {recovering}\n" if recovering else "\n")
    if trouble := parts.guard.trouble():
        said += f"tokens of service accounts cannot be reviewed: {printable_line(trouble)}\n"
    reasons = (printable_line(breaker.reason) for breaker in parts.engine.breakers().values())
    tripped = "".join(f"the breaker of the rules is open: {reason}\n" for reason in reasons)
    faults, failures = parts.engine.faults(), parts.tasks.failures()
    if verbose is None:
        stopped = _stopped(faults)
        if waiting := [failure.task for failure in failures if not failure.running]:
            stopped += f"failed and not restarted yet: {', '.join(waiting)}; ?verbose says why\n"
    else:
        stopped = "".join(
            printable_line(f"{f.where.value} {f.name}: internal error ({f.message}), {f.times} times") + "\n"
            for f in faults
        ) + "".join(printable_line(_told(failure)) + "\n" for failure in failures)
    all_stand = any(fault.where is Where.TURN for fault in faults)
    return PlainTextResponse(said + tripped + stopped, status_code=503 if all_stand else 200)


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
async def targets(request: Request, pool: str | None = None) -> list[TargetGroup]:
    """
    Every node as a target for Prometheus' http_sd.

    Silent nodes stay in the list, so that `up` shows them. A node's own address is trusted as its health is, but only
    if it is a valid address.
    """
    found = []
    for state in parts_of(request).fleet.states():
        own = {"node": state.node, "pool": state.labels.get("pool", ""), "instance_type": state.instance_type or ""}
        if state.address and _ADDRESS.fullmatch(state.address) and pool in (None, own["pool"]):
            found.append(TargetGroup(targets=(state.address,), labels=own))
    return found


@router.post("/v1/nodes/{node}/sync", dependencies=[SYNC], responses=problems(409, 421))
async def sync(
    node: str,
    wait: Wait,
    said: SyncRequest,
    key: Annotated[
        str,
        Header(
            alias=KEY_HEADER.decode(),
            min_length=MIN_KEY_LENGTH,
            description="The node's own key. The first key used with a node name owns that name.",
        ),
    ],
    executor: Annotated[
        str | None,
        Query(description="The member of a gate's group that runs the node's checks instead of its daemon."),
    ] = None,
) -> SyncAnswer:
    """
    A node reports its state and receives the aggregator's orders.

    Used by `healthd node`. Orders repeat until they are cancelled, reports until they are acknowledged.
    """
    raise NotImplementedError("this describes what SyncEndpoint answers before the application is asked")


def _reached(value: object, schemas: dict[str, Any]) -> set[str]:
    """The names of all schemas that are used in it."""
    found: set[str] = set()
    left = [value]
    while left:
        for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(left.pop())):
            if name not in found:
                found.add(name)
                left.append(schemas[name])
    return found


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
        text = f"{request.method} is not supported for {path[:200]}; use: {headers['allow']}"
    return _problem(problem_of(HttpError(status, text))[0], headers)


def _methods(app: Application, path: str) -> str:
    """The methods that a path has, of all routes: the framework names those of the first one alone."""
    routes = (route for route in app.routes if isinstance(route, APIRoute) and route.path_regex.match(path))
    found = (route.methods or () for route in routes)
    return ", ".join(sorted({method for methods in found for method in methods}))


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    log.error("%s %s: internal error: %r", request.method, request.scope["path"], error, exc_info=error)
    return _problem(problem_of(HttpError(500, "internal error; see the aggregator's log"))[0], {})


def _stopped(faults: Sequence[Fault]) -> str:
    """What internal errors stop, in a line each; empty: nothing."""
    turns = sum(fault.where is Where.TURN for fault in faults)
    others = len(faults) - turns
    all_gates = "an internal error stops all gates; ?verbose says why\n" if turns else ""
    return all_gates + (f"internal errors stop gates or nodes ({others}); ?verbose lists them\n" if others else "")


def _told(failure: TaskFailure) -> str:
    now = "runs again" if failure.running else "restarts soon"
    return f"task {failure.task} {now} after {failure.times} failures; the last: {failure.message}"
