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
from healthd.aggregator.controller.engine import Engine
from healthd.aggregator.controller.preflights import Handshakes, RollCall
from healthd.aggregator.drain.controller import DrainController
from healthd.aggregator.inventory.accusations import Accusation, Accusations
from healthd.aggregator.inventory.registry import Fleet
from healthd.aggregator.inventory.ungated import UngatedJobs
from healthd.aggregator.metrics import FleetMetrics
from healthd.aggregator.model.gates import LeaseRow, Override, Phase
from healthd.aggregator.model.quarantines import Breaker, RuleRecord
from healthd.aggregator.model.validations import Validation
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store.reading import HistoryEvent
from healthd.aggregator.store.store import Store
from healthd.aggregator.stragglers import Stragglers
from healthd.core.config import nearest
from healthd.core.errors import BadInputError
from healthd.core.model import (
    Allocation,
    Decision,
    GateTerm,
    Health,
    Lease,
    NodeState,
    Order,
    OrderReport,
    Quarantine,
    Reason,
    Verdict,
)
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
    drain: DrainController | None = None
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
        return await parts_of(request).guard.admit(request.headers.get("authorization"), self.scope)


READ = Depends(Needs(Scope.READ))
GATE = Depends(Needs(Scope.GATE))
Reader = Annotated[Caller, Depends(Needs(Scope.READ))]
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


# What the API answers where no record of the model is the answer: lists, summaries, and what a change came to.


# --- gates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """
    A gate in a list: what it is and what came of it; `nodes` and `excluded` are counts.

    Gates of a group count `attempt` on by themselves; `asked_attempt` is what its members said.
    """

    id: str
    job: str
    attempt: int
    asked_attempt: int
    phase: Phase
    created_at: float
    decision: Verdict
    would: Verdict | None
    reasons: tuple[Reason, ...]
    nodes: int
    excluded: int
    duration_seconds: float


@dataclass(frozen=True, kw_only=True)
class GateList:
    """Gates, newest first; `next` is the `before` of the next page, None on the last."""

    gates: tuple[GateRow, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class OutcomeKept:
    """How a job ended, as it was written down."""

    gate: str
    status: str


@dataclass(frozen=True, kw_only=True)
class ValidationState:
    """How far a validation is: `validations` has one for each set of nodes, the newest last."""

    id: str
    job: str
    phase: Phase
    decision: Decision
    validations: tuple[Validation, ...]


# --- nodes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FleetSummary:
    """
    The fleet in numbers, and what keeps it from admitting.

    `health` and `pools` count nodes. `issuer` is the identity of the database. `recovering` says why nothing is
    admitted after a start, None where that is over. `breakers` are the open ones, by pool.
    """

    issuer: str
    nodes: int
    health: Mapping[Health, int]
    pools: Mapping[str, int]
    quarantined: int
    accused: int
    leased: int
    gates_holding: int
    overrides: tuple[Override, ...]
    recovering: str | None
    breakers: Mapping[str, Breaker]


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """
    A node in a list. `heard_seconds` is how long ago it was heard last, None: never since the aggregator started.

    `confirmed`: it has answered the aggregator. `duplicate`: two daemons seem to have this name. `accused` is the
    newest accusation by a validation that stands; `removed` why the node is out of the scheduler's way. What only the
    node can tell is None or empty until it has.
    """

    node: str
    health: Health
    reasons: tuple[Reason, ...]
    heard_seconds: float | None
    confirmed: bool
    duplicate: bool
    quarantine: Quarantine | None
    accused: Accusation | None
    removed: str | None
    pool: str | None
    labels: Mapping[str, str]
    instance_type: str | None
    address: str | None
    allocated: tuple[Allocation, ...]
    leases: tuple[Lease, ...]
    faults: tuple[str, ...]
    running: str | None


@dataclass(frozen=True, kw_only=True)
class NodeList:
    """Nodes by name; `next` is the `after` of the next page, None on the last."""

    nodes: tuple[NodeRow, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class NodeDetail(NodeRow):
    """
    All that is known of a node. `state` is what it says itself, with ages as of now and the aggregator's verdict.

    `orders` are the open ones (None: no statement yet), `reports` how far the node is with them, `grants` its leases as
    the aggregator keeps them, `events` its newest history, `rules` what the rules remember of it.
    """

    state: NodeState | None
    orders: tuple[Order, ...] | None
    reports: Mapping[str, OrderReport]
    grants: tuple[LeaseRow, ...]
    events: tuple[HistoryEvent, ...]
    rules: RuleRecord | None


@dataclass(frozen=True, kw_only=True)
class History:
    """What happened on a node, newest first; `next` is the `before` of the next page, None on the last."""

    node: str
    events: tuple[HistoryEvent, ...]
    next: int | None


@dataclass(frozen=True, kw_only=True)
class Unquarantined:
    """The node is not kept out any more; `by` is who said so."""

    node: str
    by: str
    quarantine: None = None


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """
    The node is not known any more, nor what was kept of it besides its key: its quarantine, what the rules remembered,
    the accusation by a validation, leases that were ending.
    """

    node: str
    quarantine: Quarantine | None
    rules: RuleRecord | None
    accused: Accusation | None
    leases: tuple[LeaseRow, ...]
    forgotten: bool = True


@dataclass(frozen=True, kw_only=True)
class Released:
    """The leases that ended on a node."""

    node: str
    released: tuple[LeaseRow, ...]


@dataclass(frozen=True, kw_only=True)
class GateReleased:
    """
    The decision of the gate, null for one of a database that was lost; and the leases that end, with the nodes that
    hold them. There are none where an open gate was withdrawn before it granted any.
    """

    decision: Decision | None
    released: tuple[LeaseRow, ...]


@dataclass(frozen=True, kw_only=True)
class Rekeyed:
    """Another key is the node's from now on."""

    node: str
    rekeyed: bool = True


# --- what people decide ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OverrideEnded:
    """The override of a job was taken back."""

    job: str
    override: None = None


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """False when nothing was lost, or nodes have told it all again."""

    recovered: bool


@dataclass(frozen=True, kw_only=True)
class OpenBreakers:
    """Breakers of the rules that are open, by pool; the empty name stands for nodes without one."""

    open: Mapping[str, Breaker]


@dataclass(frozen=True, kw_only=True)
class BreakersReset:
    """The pools whose breaker was open."""

    reset: tuple[str, ...]


# --- for machines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TargetGroup:
    """A target of Prometheus' http_sd."""

    targets: tuple[str, ...]
    labels: Mapping[str, str]
