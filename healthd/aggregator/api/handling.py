"""What all handlers of the aggregator use: its parts, the caller, bodies in, records out."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec
from fastapi import Depends, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from healthd.aggregator.api.sync import WAIT_PATTERN, parse_wait, read_body
from healthd.aggregator.auth import Caller, Guard, Scope
from healthd.aggregator.controller.controller import Engine
from healthd.aggregator.controller.handshakes import Handshakes
from healthd.aggregator.controller.roll_call import RollCall
from healthd.aggregator.drain.controller import DrainController
from healthd.aggregator.inventory.accusations import Accusations
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.inventory.ungated import UngatedJobs
from healthd.aggregator.metrics.fleet_metrics import FleetMetrics
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store.store import Store
from healthd.aggregator.stragglers import Stragglers
from healthd.core.config.schema import nearest
from healthd.core.errors import BadInputError
from healthd.core.model import GateTerm
from healthd.core.tasks import Tasks
from healthd.core.wire import decode, encode

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """
    What the handlers work with; `stopping` is set when the aggregator stops, so that nobody is held any longer.

    `hand` takes bad nodes out of the scheduler's way; None: nothing outside of healthd is touched. `callers_may` are
    the terms in which a token of scope `gate` may ask for less than the policy does.
    """

    settings: AggregatorSettings
    fleet: Fleet
    store: Store
    engine: Engine
    guard: Guard
    metrics: FleetMetrics
    handshakes: Handshakes
    stragglers: Stragglers
    ungated: UngatedJobs
    accusations: Accusations
    hand: DrainController | None = None
    callers_may: frozenset[GateTerm] = frozenset()
    tasks: Tasks = field(default_factory=Tasks)
    rollcall: RollCall = field(default_factory=RollCall)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


def parts_of(request: Request) -> Parts:
    """The parts of this aggregator."""
    parts: Parts = request.app.state.parts
    return parts


@dataclass(frozen=True)
class Needs:
    """A dependency: the caller, who may do what `scope` allows."""

    scope: Scope

    async def __call__(self, request: Request) -> Caller:
        return parts_of(request).guard.require(request.headers.get("authorization"), self.scope)


READ = Depends(Needs(Scope.READ))
GATE = Depends(Needs(Scope.GATE))
GateCaller = Annotated[Caller, Depends(Needs(Scope.GATE))]
Admin = Annotated[Caller, Depends(Needs(Scope.ADMIN))]


class ApiRoute(APIRoute):
    """
    A path for programs. Its records are coded by `healthd.core.wire`; FastAPI reads parameters alone.

    A handler names its record by `Body[Record]` and its answer by `-> Answer[Record]`: what these decode and encode is
    what `healthd.aggregator.api.openapi` describes.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **{**options, "response_model": None})


class Answer(Response, Generic[T]):
    """A record as JSON."""

    media_type = "application/json"

    def __init__(self, value: T, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode(value), headers=headers)


class BodyOf(Generic[T]):
    """A dependency: the JSON body as a record. An unknown member is an error, since a typo must not be lost."""

    def __init__(self, wanted: type[T]) -> None:
        self.wanted = wanted

    async def __call__(self, request: Request) -> T:
        settings = parts_of(request).settings
        body = await read_body(
            request.receive,
            dict(request.scope["headers"]),
            max_bytes=settings.max_body_bytes,
            timeout_seconds=settings.read_timeout_seconds,
        )
        members = decode(body, dict[str, msgspec.Raw], what="body")
        for name in members:
            if name not in self._known:
                raise BadInputError(f"body: unknown member {name[:80]!r}{nearest(name, self._known)}")
        return decode(body, self.wanted, what="body")

    @functools.cached_property
    def _known(self) -> dict[str, None]:
        info = msgspec.inspect.type_info(self.wanted)
        return {item.name: None for item in info.fields}  # type: ignore[attr-defined]


if TYPE_CHECKING:
    Body = Annotated[T, "of the request"]
else:

    class Body:
        """`Body[Record]` is the record to the type checker, and to FastAPI the dependency that decodes it."""

        def __class_getitem__(cls, wanted: type) -> Any:
            return Annotated[wanted, Depends(BodyOf(wanted))]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may answer beside what its dependencies do (see `openapi`): for `responses=`."""
    return {status: {} for status in statuses}


def wait_seconds(
    request: Request,
    wait: Annotated[
        str, Query(description="Seconds to hold the answer back.", json_schema_extra={"pattern": WAIT_PATTERN})
    ] = "0",
) -> float:
    """A dependency: how long the answer may be held back."""
    return min(parse_wait(wait), parts_of(request).settings.hold_seconds)


Wait = Annotated[float, Depends(wait_seconds)]
