"""What all handlers of the aggregator use: its parts, the caller, bodies in, records out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from fastapi import Query, Request
from starlette.responses import Response

from healthd.aggregator.api.auth import Caller, Guard, Scope
from healthd.aggregator.api.sync import parse_wait, read_body
from healthd.aggregator.baselines.service import Learner
from healthd.aggregator.controller.controller import Engine
from healthd.aggregator.controller.handshakes import Handshakes
from healthd.aggregator.controller.roll_call import RollCall
from healthd.aggregator.drain.controller import Hand
from healthd.aggregator.inventory.accusations import Accusations
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.inventory.ungated import UngatedJobs
from healthd.aggregator.metrics import FleetMetrics
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store.store import Store
from healthd.core.config import nearest
from healthd.core.errors import BadInputError
from healthd.core.tasks import Tasks
from healthd.core.wire import decode, encode

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """
    What the handlers work with; `stopping` is set when the aggregator stops, so that nobody is held any longer.

    `hand` takes bad nodes out of the scheduler's way; None: nothing outside of healthd is touched.
    """

    settings: AggregatorSettings
    fleet: Fleet
    store: Store
    engine: Engine
    guard: Guard
    metrics: FleetMetrics
    handshakes: Handshakes
    learner: Learner
    ungated: UngatedJobs
    accusations: Accusations
    hand: Hand | None = None
    tasks: Tasks = field(default_factory=Tasks)
    rollcall: RollCall = field(default_factory=RollCall)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


def parts_of(request: Request) -> Parts:
    """The parts of this aggregator."""
    parts: Parts = request.app.state.parts
    return parts


def needs(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """A dependency: the caller, who may do what `scope` allows."""

    async def caller(request: Request) -> Caller:
        return parts_of(request).guard.require(request.headers.get("authorization"), scope)

    return caller


def answer(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A record or plain value as JSON."""
    return Response(encode(value), status_code=status, media_type="application/json", headers=headers)


async def body_of(request: Request, wanted: type[T]) -> T:
    """The JSON body as a record; a member that the record does not have is an error, since a typo must not be lost."""
    settings = parts_of(request).settings
    body = await read_body(
        request.receive,
        dict(request.scope["headers"]),
        max_bytes=settings.max_body_bytes,
        timeout_seconds=settings.read_timeout_seconds,
    )
    known = {item.name: None for item in msgspec.inspect.type_info(wanted).fields}  # type: ignore[attr-defined]
    members = decode(body, dict[str, msgspec.Raw], what="body")
    for name in members:
        if name not in known:
            raise BadInputError(f"body: unknown member {name[:80]!r}{nearest(name, known)}")
    return decode(body, wanted, what="body")


def wait_seconds(
    request: Request, wait: Annotated[str, Query(description="Seconds to hold the answer.")] = "0"
) -> float:
    """A dependency: how long the answer may be held back."""
    return min(parse_wait(wait), parts_of(request).settings.hold_seconds)
