"""
Serves local operators on a Unix socket: HTTP to run a tier now, to set and clear faults, and to read the state and
profiles.

The second half is the client, for the command line.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from checks.contract import Tier
from checks.worker.faults import check_of, check_target, parse_fault
from healthd.core import wire
from healthd.core.errors import BadInputError, HealthdError, UnreachableError
from healthd.core.model import FINAL_STATUSES, CheckSpec, Inventory, NodeState, OrderReport
from healthd.node.checks.scheduler import Scheduler
from healthd.node.http.tcp_socket import handlers, json_response, problem
from healthd.node.state.saving import ProfileFolder, ProfileRecord
from healthd.node.state.store import NodeStore

log = logging.getLogger(__name__)

PATHS = "/v1/node, /v1/faults, /v1/run, /v1/profiles, /v1/profiles/ID"
MAX_BODY_BYTES = 64 * 1024
MAX_FAULTS = 64
MAX_ANSWER_BYTES = 16 << 20
# How long a run may take that a person waits for: a deep tier on many devices.
RUN_SECONDS = 3600.0


class ControlApi:
    """The ASGI application behind the socket."""

    def __init__(
        self, store: NodeStore, scheduler: Scheduler, profiles: ProfileFolder, stopping: asyncio.Future[None]
    ) -> None:
        self._store = store
        self._profiles = profiles
        self._scheduler = scheduler
        self._stopping = stopping
        self._numbers = itertools.count(1)
        self.app = Starlette(
            routes=[
                Route("/v1/node", self._node),
                Route("/v1/faults", self._list, methods=["GET"]),
                Route("/v1/faults", self._set, methods=["POST"]),
                Route("/v1/faults", self._clear, methods=["DELETE"]),
                Route("/v1/run", self._run, methods=["POST"]),
                Route("/v1/profiles", self._list_profiles),
                Route("/v1/profiles/{id}", self._profile),
            ],
            exception_handlers=dict(handlers(PATHS)),
        )

    async def _node(self, request: Request) -> Response:
        return json_response(self._store.snapshot())

    async def _list(self, request: Request) -> Response:
        return json_response(FaultList(faults=self._store.faults))

    async def _set(self, request: Request) -> Response:
        asked = wire.decode(await _body(request), FaultList, what="body").faults
        if not asked:
            raise BadInputError("faults: name at least one, as CHECK[@TARGET]=KIND[:VALUE]")
        faults = check_faults((*self._store.faults, *asked), self._store.specs)
        check_targets(faults, self._store.inventory)
        log.warning("active faults: %s", ", ".join(faults))
        self._scheduler.set_faults(faults)
        return json_response(FaultList(faults=faults))

    async def _clear(self, request: Request) -> Response:
        body = await _body(request)
        asked = wire.decode(body, FaultList, what="body").faults if body else ()
        left = without(self._store.faults, asked)
        log.warning("faults cleared; active: %s", ", ".join(left) or "none")
        self._scheduler.set_faults(left)
        return json_response(FaultList(faults=left))

    async def _run(self, request: Request) -> Response:
        asked = wire.decode(await _body(request), RunRequest, what="body")
        order_id = f"local-{next(self._numbers)}"
        ended: asyncio.Future[OrderReport] = asyncio.get_running_loop().create_future()

        def report(report: OrderReport) -> None:
            if report.status in FINAL_STATUSES and not ended.done():
                ended.set_result(report)

        self._scheduler.order(order_id, asked.tier, asked.checks, report)
        either: set[asyncio.Future[Any]] = {ended, self._stopping}
        try:
            await asyncio.wait(either, timeout=RUN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not ended.done():
                self._scheduler.cancel(order_id, "its client has disconnected")
        if not ended.done():
            raise HTTPException(503, "the daemon is stopping")
        return json_response(ended.result())

    async def _list_profiles(self, request: Request) -> Response:
        return json_response(ProfileList(profiles=self._profiles.records()))

    async def _profile(self, request: Request) -> Response:
        name = request.path_params["id"]
        content = self._profiles.read(name)
        if content is None:
            return problem(404, f"no profile {name[:130]!r}; /v1/profiles lists them")
        return Response(
            content,
            media_type="application/gzip",
            headers={"Content-Disposition": f'attachment; filename="{name}.trace.json.gz"'},
        )


@dataclass(frozen=True, kw_only=True)
class ProfileList:
    """The profiles that are kept, the newest first."""

    profiles: tuple[ProfileRecord, ...] = ()


def check_faults(faults: Sequence[str], specs: Sequence[CheckSpec]) -> tuple[str, ...]:
    """The faults as they are shown everywhere, each once. BadInputError in one line for what makes no sense here."""
    scopes = {spec.name: spec.scope for spec in specs}
    try:
        found = tuple(dict.fromkeys(str(parse_fault(text, scopes)) for text in faults))
    except ValueError as error:
        raise BadInputError(str(error)) from None
    if len(found) > MAX_FAULTS:
        raise BadInputError(f"{len(found)} faults; at most {MAX_FAULTS} can be active")
    return found


def check_targets(faults: Sequence[str], inventory: Inventory | None) -> None:
    """BadInputError for a fault on a device that is not there; nothing is known before the first survey."""
    if inventory is None or not inventory.devices:
        return
    devices = [device.target for device in inventory.devices]
    try:
        for fault in map(parse_fault, faults):
            if not (fault.target or "").startswith("rank:"):  # it may be a rank of a group over several nodes
                check_target(fault, devices, inventory.workers)
    except ValueError as error:
        raise BadInputError(str(error)) from None


def without(faults: Sequence[str], cleared: Sequence[str]) -> tuple[str, ...]:
    """What is left in force; a bare name clears all faults of that check, and no name at all clears everything."""
    if not cleared:
        return ()
    left = list(faults)
    for text in cleared:
        gone = [fault for fault in left if fault == text.strip() or check_of(fault) == text]
        if not gone:
            raise BadInputError(f"{text[:100]!r} is not active; active: {', '.join(faults) or 'none'}")
        left = [fault for fault in left if fault not in gone]
    return tuple(left)


def set_faults(control_socket: Path, faults: Sequence[str]) -> tuple[str, ...]:
    """Add faults to those in force in the daemon behind a socket; all that are in force then."""
    body = call(control_socket, "POST", "/v1/faults", FaultList(faults=tuple(faults)))
    return wire.decode(body, FaultList, what="answer").faults


def clear_faults(control_socket: Path, faults: Sequence[str] = ()) -> tuple[str, ...]:
    """Clear faults, all when none is named; those that are left."""
    body = call(control_socket, "DELETE", "/v1/faults", FaultList(faults=tuple(faults)))
    return wire.decode(body, FaultList, what="answer").faults


@dataclass(frozen=True, kw_only=True)
class FaultList:
    """Faults as an operator writes them."""

    faults: tuple[str, ...] = ()


def run_now(control_socket: Path, tier: Tier, checks: Sequence[str] = ()) -> OrderReport:
    """Run a tier in the daemon and wait for its end."""
    body = call(control_socket, "POST", "/v1/run", RunRequest(tier=tier, checks=tuple(checks)), seconds=RUN_SECONDS)
    return wire.decode(body, OrderReport, what="answer")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Run a tier now, or only `checks` of it."""

    tier: Tier = Tier.QUICK
    checks: tuple[str, ...] = ()


def node_state(control_socket: Path) -> NodeState:
    return wire.decode(call(control_socket, "GET", "/v1/node"), NodeState, what="answer")


def call(control_socket: Path, method: str, path: str, body: object = None, *, seconds: float = 15.0) -> bytes:
    """
    The answer of the daemon behind a socket to one request.

    UnreachableError when no daemon answers, RefusedError with its sentence when it says no.
    """
    content = None if body is None else wire.encode(body)
    connection = _UnixConnection(control_socket, seconds)
    try:
        connection.request(method, path, body=content)
        answer = connection.getresponse()
        text = answer.read(MAX_ANSWER_BYTES)
    except PermissionError:
        raise UnreachableError(f"{control_socket}: only root and the daemon's user may use it") from None
    except (http.client.HTTPException, OSError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreachableError(
            f"{control_socket}: no daemon responds ({why}); is 'healthd node' running? (--run-dir)"
        ) from None
    finally:
        connection.close()
    if answer.status >= 400:
        try:
            detail = str(wire.decode(text, dict, what="problem").get("detail"))
        except BadInputError:
            detail = f"HTTP {answer.status}"
        raise RefusedError(detail)
    return text


class RefusedError(HealthdError):
    """The daemon understood and refused."""


async def _body(request: Request) -> bytes:
    body = b""
    async with asyncio.timeout(10.0):
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body may have at most {MAX_BODY_BYTES} bytes", {"connection": "close"})
    return body


class _UnixConnection(http.client.HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__("node", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        """Connect, or leave nothing open."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.close()
            raise
