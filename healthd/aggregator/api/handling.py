"""
What all handlers of the aggregator use: its parts, the caller, and their kind of route; and the answers of the API that
are no records of the model: lists, summaries, and results of changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer, SecurityScopes
from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, ValidationError
from starlette.responses import Response

from checks.json_text import TooDeepError, require_shallow
from checks.printable import printable_bytes, printable_line
from healthd.aggregator.api.problems import MEDIA_TYPE, HttpError
from healthd.aggregator.api.sync import WAIT_PATTERN, parse_wait, read_body
from healthd.aggregator.drain.controller import DrainController
from healthd.aggregator.engine import Engine, Handshakes, RollCall
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.fleet.slow import Stragglers
from healthd.aggregator.gate.records import LeaseRow, Override, Phase
from healthd.aggregator.identity.tokens import Caller, Guard, Scope, is_loopback
from healthd.aggregator.jobs.postmortem_records import PostmortemState
from healthd.aggregator.jobs.postmortems import Postmortems
from healthd.aggregator.jobs.ungated import UngatedJobs
from healthd.aggregator.metrics import FleetMetrics
from healthd.aggregator.policy import Policy
from healthd.aggregator.quarantine import Accusation, Accusations
from healthd.aggregator.quarantine.records import Breaker, RuleRecord
from healthd.aggregator.quarantine.repair_records import Repair
from healthd.aggregator.screening.records import Listed
from healthd.aggregator.screening.service import Screening
from healthd.aggregator.settings import AggregatorSettings
from healthd.aggregator.store import HistoryEvent, PutOutcome
from healthd.aggregator.validation.records import Validation
from healthd.core.config import nearest
from healthd.core.errors import BadInputError, LimitError
from healthd.core.http.addresses import host_of, split_header
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

MOST_ERRORS = 100
"""More errors of a body are only counted: two megabytes can hold 150,000; to tell them takes a third of a second."""
STATUSES = {
    400: "The request is invalid: a parameter, a header or a member of the body is wrong.",
    401: "The token is missing or unknown.",
    403: "The token lacks the scope, or may not ask a gate for so little, or a page of another site made the request.",
    404: "Nothing with this name exists.",
    405: "The path is written differently: a name contains a slash.",
    408: "The body did not arrive in time.",
    409: "The request contradicts an earlier request or the current state.",
    413: "The body is too large.",
    429: "The caller has reached its limit of open gates or waiting requests; try again later.",
    421: "This aggregator is a standby; the header `Leader` has the URL of the leader.",
    431: "The headers are too large.",
    500: "An internal error; see the aggregator's log.",
    503: "The database cannot be written, or there are too many connections or nodes; try again later.",
}
"""What the status of a problem means; its text says it of the case."""
BY_CONNECTION = (400, 431, 500, 503)
"""Every path may answer these; where a request does not reach the application, as plain text."""

TOKEN = HTTPBearer(
    scheme_name="token",
    auto_error=False,
    description="A token from the aggregator's token file. Its scopes are read, sync, gate (includes read) and admin "
    "(all). An aggregator on loopback without a token table requires none.",
)


class HeldRequests:
    """How many requests are held for each caller that speaks for some nodes alone, and for each node of theirs."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, policy: Policy, caller: Caller, wait: float, node: str | None = None) -> Iterator[None]:
        """One more, meanwhile, of a member of a group on `node`, else of the caller; LimitError for one too many."""
        who = caller.limited_as
        if who is None or wait <= 0:
            yield
            return
        name, limit, most = who, "open_gates_per_token", policy.open_gates_per_token
        if node is not None:
            name, limit, most = f"node {node}", "open_gates_per_node", policy.open_gates_per_node
        if self._held[name] >= most:
            raise LimitError(f"{name}: {most} requests are waiting already (policy.{limit}); wait until one has ended")
        self._held[name] += 1
        try:
            yield
        finally:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """
    What the handlers work with; `stopping` is set when the aggregator stops, so that nobody is held any longer.

    `drain` takes bad nodes out of the scheduler's way; None: nothing outside of healthd is touched. `screening` is None
    where it is off. `callers_may` are the terms in which a token of scope `gate` may ask for less than the policy does.
    """

    settings: AggregatorSettings
    guard: Guard
    fleet: Fleet
    engine: Engine
    metrics: FleetMetrics
    handshakes: Handshakes
    stragglers: Stragglers
    ungated: UngatedJobs
    accusations: Accusations
    postmortems: Postmortems
    drain: DrainController | None = None
    screening: Screening | None = None
    callers_may: frozenset[GateTerm] = frozenset()
    held: HeldRequests = field(default_factory=HeldRequests)
    tasks: Tasks = field(default_factory=Tasks)
    rollcall: RollCall = field(default_factory=RollCall)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


def parts_of(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


async def caller(request: Request, needed: SecurityScopes, _: Annotated[object, Depends(TOKEN)]) -> Caller:
    """A dependency: the caller, who may do what the scope of the path allows."""
    return await parts_of(request).guard.admit(request.headers.get("authorization"), Scope(needed.scope_str))


READ = Security(caller, scopes=[Scope.READ.value])
GATE = Security(caller, scopes=[Scope.GATE.value])
SYNC = Security(caller, scopes=[Scope.SYNC.value])
Reader = Annotated[Caller, READ]
GateCaller = Annotated[Caller, GATE]
Admin = Annotated[Caller, Security(caller, scopes=[Scope.ADMIN.value])]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Problems that a path may answer, for `responses=`. `ApiRoute` adds those of its token, names and body."""
    told: dict[str, Any] = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    by_connection = {**told, "text/plain": {"schema": {"type": "string"}}}
    return {
        status: {"description": STATUSES[status], "content": by_connection if status in BY_CONNECTION else told}
        for status in statuses
    }


# --- how a path is served --------------------------------------------------------------------------------------------


def check_origin(request: Request) -> None:
    """HttpError 403 for a request that another site made the browser send."""
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    if site not in (None, "same-origin") or (origin is not None and split_header("Origin", origin).netloc != host):
        raise HttpError(403, "the request was sent from another site; use this aggregator's page, or the command line")
    parts = parts_of(request)
    if parts.guard.open and is_loopback(parts.settings.address[0]) and not _names_no_one(host_of(host)):
        # Another site may have its own name point here (DNS rebinding): then its pages count as ours.
        raise HttpError(403, f"changes are only accepted under localhost or an IP address, not as {host[:80]!r}")


def _names_no_one(name: str) -> bool:
    """Whether a Host header holds localhost or an address, which no other site can be known by."""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_request(request: Request, dependant: Dependant) -> None:
    """
    What holds on every path, before anything else is done: BadInputError, or HttpError 403.

    A parameter that the path does not have is an error: a filter with a typo would answer something else. Where no
    token is asked for, no web page of another site may change anything through a browser on this host.
    """
    if request.query_params:
        known = dict.fromkeys(_query_names(dependant))
        for name in request.query_params:
            if name not in known:
                raise BadInputError(f"unknown query parameter {name[:80]!r}{nearest(name, known)}")
    host_of(request.headers.get("host", ""))  # one that holds no host is refused on every path
    if parts_of(request).guard.open and request.method not in ("GET", "HEAD"):
        check_origin(request)


def _query_names(dependant: Dependant) -> Iterator[str]:
    """The query parameters of a path and of all that it depends on."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_names(inner)


class ApiRoute(APIRoute):
    """
    A path for programs: FastAPI's, with models in and models out, but that

    - the caller is known before a body is read, which is bounded in size and time (FastAPI reads it first);
    - a body is validated as JSON, strictly: "1" is no number, and no member is unknown. FastAPI validates the objects
      that Python has read from it, of which pydantic's strict mode takes neither lists for tuples nor texts for enums;
    - control characters in an answer are escaped (see `checks.printable`);
    - the first sentence of its docstring is the summary, and the description names the scope, which most viewers hide.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.operation_id = f"{self.tags[0]}_{self.name}"
        first, _, rest = self.description.partition("\n\n")
        self.summary = " ".join(first.split()).replace("`", "")
        self.description = "\n\n".join([rest, *(f"Scope: `{scope.value}`." for scope in self.scopes)]).strip()
        self.responses = self.responses | problems(
            *(status for status in BY_CONNECTION if status not in self.responses),
            *((401, 403) if self.scopes else ()),
            *((404, 405) if self.param_convertors else ()),
            *((408, 413) if self.body_field else ()),
        )

    @property
    def scopes(self) -> list[Scope]:
        """What a caller's token must have."""
        asked = (one for one in self.dependant.dependencies if one.call is caller)
        return [Scope(name) for one in asked for name in one.own_oauth_scopes or ()]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handle, scopes = super().get_route_handler(), self.scopes
        body = None if self.body_field is None else _Body(self.body_field.field_info.annotation)

        async def handler(request: Request) -> Response:
            check_request(request, self.dependant)
            if body is not None:
                for scope in scopes:
                    await parts_of(request).guard.admit(request.headers.get("authorization"), scope)
                request = _Validated(request, await body.read(request))
            answer = await handle(request)
            if answer.media_type == "application/json":
                answer.body = printable_bytes(bytes(answer.body))
                answer.headers["content-length"] = str(len(answer.body))
            return answer

        return handler


class _Validated(Request):
    """A request whose body is a record already: FastAPI hands an instance of the type that it wants on as it is."""

    def __init__(self, request: Request, record: object) -> None:
        super().__init__(request.scope, request.receive)
        self._record = record

    async def body(self) -> Any:
        return self._record

    async def json(self) -> Any:
        return self._record


class _Body:
    """Reads the bodies of one path. `wanted` is a dataclass."""

    def __init__(self, wanted: Any) -> None:
        self._validator = SchemaValidator(_at_first(TypeAdapter(wanted).core_schema))
        self._known = {one.name: None for one in dataclasses.fields(wanted)}

    async def read(self, request: Request) -> object:
        """The body as a record; BadInputError names the member and what is wrong with it."""
        settings = parts_of(request).settings
        body = await read_body(
            request.receive,
            dict(request.scope["headers"]),
            max_bytes=settings.max_body_bytes,
            timeout_seconds=settings.read_timeout_seconds,
        )
        try:
            require_shallow(body)
            return self._validator.validate_json(body)
        except TooDeepError as error:
            raise BadInputError(f"body: {error}") from None
        except ValidationError as error:
            raise BadInputError(f"body: {self._text(error)}") from None

    def _text(self, error: ValidationError) -> str:
        if error.error_count() > MOST_ERRORS:
            return f"{error.error_count()} members are unknown or invalid"
        found = error.errors(include_url=False, include_input=False)
        # A member with a typo is also one that is missing.
        first = next((one for one in found if one["type"] == "unexpected_keyword_argument"), found[0])
        text, place = first["msg"], first["loc"]
        if first["type"] == "unexpected_keyword_argument":
            name, place = str(place[-1]), place[:-1]
            text = f"unknown member {name[:80]!r}" + ("" if place else nearest(name, self._known))
        where = "".join(f"[{one}]" if isinstance(one, int) else f".{one[:80]}" for one in place)
        return printable_line(f"{text} - at `${where}`" if where else text)


def _at_first(schema: Any) -> Any:
    """A schema of pydantic in which a collection is refused at its first wrong item, of which it may have a million."""
    if isinstance(schema, list):
        return [_at_first(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _at_first(one) for key, one in schema.items()}
    return {**inner, "fail_fast": True} if schema.get("type") in ("tuple", "list", "dict") else inner


async def wait_seconds(
    request: Request,
    wait: Annotated[
        str, Query(description="Maximum seconds to wait for an answer.", json_schema_extra={"pattern": WAIT_PATTERN})
    ] = "0",
) -> float:
    """A dependency: how long the answer may be held back."""
    return min(parse_wait(wait), parts_of(request).settings.hold_max_seconds)


Wait = Annotated[float, Depends(wait_seconds)]


# --- answers about gates ----------------------------------------------------------------------------------------------


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
class Evidence:
    """A gate with all that is stored of it. `gate` has the members with which it is kept, and they may change."""

    gate: Mapping[str, Any]
    states: tuple[NodeState, ...]
    leases: tuple[LeaseRow, ...]
    outcome: PutOutcome | None


@dataclass(frozen=True, kw_only=True)
class OutcomeKept:
    """How a job ended, as it was written down."""

    gate: str
    status: str


@dataclass(frozen=True, kw_only=True)
class PostmortemList:
    """Bad ends of jobs, newest gate first; `next` is the `before` of the next page, None on the last."""

    postmortems: tuple[PostmortemState, ...]
    next: str | None


@dataclass(frozen=True, kw_only=True)
class ValidationState:
    """How far a validation is: `validations` has one for each set of nodes, the newest last."""

    id: str
    job: str
    phase: Phase
    decision: Decision
    validations: tuple[Validation, ...]


# --- answers about nodes ----------------------------------------------------------------------------------------------


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
    newest accusation by a validation that stands; `removed` why the node is out of the scheduler's way; `maintenance`
    by what it shows that it is in maintenance. What only the node can tell is None or empty until it has.
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
    maintenance: str | None


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
    hold them. There are none where an open gate was withdrawn before it granted any, nor once the nodes have let go
    after an earlier release. `released_at` is the time of the first release.
    """

    decision: Decision | None
    released: tuple[LeaseRow, ...]
    released_at: float


@dataclass(frozen=True, kw_only=True)
class Rekeyed:
    """Another key is the node's from now on."""

    node: str
    rekeyed: bool = True


# --- answers about what people decide ---------------------------------------------------------------------------------


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


@dataclass(frozen=True, kw_only=True)
class RepairList:
    """Repairs that healthd advises: the open ones, oldest finding first, then closed ones, newest first."""

    repairs: tuple[Repair, ...]


@dataclass(frozen=True, kw_only=True)
class ScreeningList:
    """
    Nodes in the order of their risk, the highest first; `more` are left out. `tier` is what free nodes run, null where
    screening is off: then no node is listed.
    """

    tier: str | None
    nodes: tuple[Listed, ...]
    more: int


# --- answers for machines ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TargetGroup:
    """A target of Prometheus' http_sd."""

    targets: tuple[str, ...]
    labels: Mapping[str, str]
