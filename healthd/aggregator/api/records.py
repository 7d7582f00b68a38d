"""What the API answers where no record of the model is the answer: lists, summaries, and what a change came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from healthd.aggregator.inventory.accusations import Accusation
from healthd.aggregator.model.claims import LeaseRow, Override
from healthd.aggregator.model.gates import Phase
from healthd.aggregator.model.quarantines import Breaker, RuleRecord
from healthd.aggregator.model.validations import Validation
from healthd.aggregator.store.history import HistoryEvent
from healthd.core.model import (
    Allocation,
    Decision,
    Health,
    Lease,
    NodeState,
    Order,
    OrderReport,
    Quarantine,
    Reason,
    Verdict,
)

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
