"""
The seam of the aggregator: what the registry tells the gate, what the gate is, and what a step of it wants done.

Frozen data and two protocols; nothing here acts. `registry` implements `Registry`, `engine` uses it, `gate` sees
only `FleetView`. Times named `*_at` and `deadline` are seconds of the engine's clock: seconds since the epoch when the
process started, from there on by CLOCK_BOOTTIME, so that a clock that jumps moves no deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checks.contract import Tier
from healthd.evidence import aged
from healthd.fleet.validation.model import Validation
from healthd.model import (
    Decision,
    GateRequest,
    Health,
    Lease,
    Mode,
    NodeState,
    Order,
    OrderReport,
    Quarantine,
    Reason,
)

# --- what the registry knows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FleetNode:
    """
    One node as the aggregator sees it now.

    `state` is as it was received: `behind_seconds` is to be added to every age in it (None of a state: the node is
    known from the store only). `version` is another number whenever the evidence is another, and `oldest_seconds` the
    age of the oldest result, as it was received; None where nobody counted: then `version` must be
    another for new ages too. `judged` are verdicts by tier that leave ages out. `machine` and `failing` say what the
    rules would read of the state (`healthd.fleet.rules.machine`), None where nobody has looked. `heard_seconds` is how
    long ago the node was last heard, None: never since this aggregator started. `confirmed` means two-way contact, so
    that its ages are bounded; a node that is not confirmed is never admitted. `quarantine` is the aggregator's word.
    `orders` holds the last report on every order that is not yet acknowledged. `issuer` is the database that the node
    took orders from before its last sync.
    """

    node: str
    state: NodeState | None
    version: int
    behind_seconds: float
    heard_seconds: float | None
    confirmed: bool
    duplicate: bool
    quarantine: Quarantine | None
    orders: Mapping[str, OrderReport]
    issuer: str | None
    oldest_seconds: float | None = None
    judged: Mapping[Tier, Judged] = field(default_factory=dict)
    machine: str | None = None
    failing: bool | None = None

    def current(self) -> NodeState | None:
        """The state with ages as of now."""
        return None if self.state is None else aged(self.state, self.behind_seconds)


class Registry(Protocol):
    """
    The fleet in memory, as the engine uses it. All calls are made on the event loop and return at once.

    A node knows orders from answers to its syncs. Until `set_orders` was called for it in this process, the registry
    makes no statement (`SyncAnswer.orders` None), so that nothing is cancelled by an aggregator that does not know yet.
    """

    def node(self, name: str) -> FleetNode | None:
        """The node as of now; None when nobody ever heard of it."""

    def names(self) -> Sequence[str]:
        """All known names, sorted: heard of in this process, or known from the store."""

    def pool(self, pool: str) -> Sequence[str]:
        """The names whose label `pool` has this value, sorted; empty when there are none."""

    def set_orders(self, node: str, orders: tuple[Order, ...]) -> None:
        """
        The open orders of the node from now on, all of them; wakes its held sync when they changed.

        The same again changes nothing. Also for a node that is not known yet.
        """

    def set_quarantine(self, node: str, quarantine: Quarantine | None) -> None:
        """The aggregator's word on the node from now on; also for a node that is not known yet."""

    def set_executors(self, members: Mapping[str, str]) -> None:
        """Which member runs the checks of which node now, instead of its daemon."""

    def has_daemon(self, node: str) -> bool:
        """Whether a daemon of this name was ever heard of, here or by the store."""

    def acknowledge(self, node: str, order_ids: Sequence[str]) -> None:
        """These final reports are on disk: the node need not repeat them, and `FleetNode.orders` forgets them."""

    def listen(self, callback: Callable[[str], None]) -> None:
        """
        Call `callback(node)` on the event loop after every sync that brought something, before it is answered.

        Something: a first sync, a new state, new ages, a new report, a node that became confirmed or a duplicate.
        """


# --- claims, by the engine ------------------------------------------------------------------------------------------


class ClaimKind(str, enum.Enum):
    """RESERVED by an open gate, or LEASED to an admitted job."""

    RESERVED = "reserved"
    LEASED = "leased"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Who has a node, so that no other gate may take it."""

    kind: ClaimKind
    gate: str
    job: str
    attempt: int


class LeaseState(str, enum.Enum):
    """
    GRANTED: on disk here, the node has not confirmed it. ACKNOWLEDGED: the node has stored it. ENDING: no longer
    listed among the node's orders, but the node may still hold it. CLOSED: gone on both sides.
    """

    GRANTED = "granted"
    ACKNOWLEDGED = "acknowledged"
    ENDING = "ending"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class LeaseRow:
    """
    One lease on one node, as the aggregator keeps it. `lease.age_seconds` is 0; the age follows from `granted_at`.

    `adopted` marks one that another database issued and that we learned of from the node. `why` says why it ended.
    """

    node: str
    lease: Lease
    state: LeaseState
    granted_at: float
    adopted: bool = False
    closed_at: float | None = None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Override:
    """A person admits a job by hand, whatever its nodes are; `until` is in seconds since the epoch."""

    job: str
    reason: str
    owner: str
    since: float
    until: float


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the evidence of a node says of one tier: `age_seconds` is that of the oldest result that was counted."""

    health: Health
    reasons: tuple[Reason, ...]
    age_seconds: float | None


Judge = Callable[[FleetNode, Tier, float, tuple[str, ...]], Judged]
"""(node, tier, max_age_seconds, required checks) -> verdict: `healthd.fleet.standing.judge`, or a memory of it."""


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """
    All that a step of a gate may see. `nodes` may be lazy: a step looks up only the nodes it needs.

    `pool` gives the names of a pool, sorted, empty for an unknown one. `recovering` (why) means that nothing may be
    admitted; `settling` (why) that nothing may be called impossible yet, because nodes have not had time to report.
    `doubted`: whether a validation named this node lately and nothing has spoken for it since.
    """

    nodes: Mapping[str, FleetNode]
    pool: Callable[[str], Sequence[str]]
    claims: Mapping[str, Claim]
    overrides: Mapping[str, Override]
    recovering: str | None
    settling: str | None
    judge: Judge
    doubted: Callable[[str], bool] = lambda _: False


# --- the gate -------------------------------------------------------------------------------------------------------


class Phase(str, enum.Enum):
    """
    Where a gate is. COLLECTING: members of a `join` come together. WAITING: nothing is reserved. CHECKING: nodes are
    reserved, ordered runs may be under way. VALIDATING: the reserved nodes run collectives together. GRANTING: leases
    are granted, acknowledgements come in. DECIDED: answered, for good.
    """

    COLLECTING = "collecting"
    WAITING = "waiting"
    CHECKING = "checking"
    VALIDATING = "validating"
    GRANTING = "granting"
    DECIDED = "decided"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A request with the policy filled in: what this gate goes by, whatever the policy becomes later."""

    tier: Tier
    max_age_seconds: float
    wait_seconds: float
    mode: Mode
    wanted: int
    needed: int
    collective: bool


class RunStatus(str, enum.Enum):
    """Of an ordered run. OPEN: the node is to do it. CLOSED: it is over or called off; a later one is a new round."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class OrderedRun:
    """The newest run that a gate ordered on a node."""

    order_id: str
    round: int
    ordered_at: float
    deadline_seconds: float
    status: RunStatus = RunStatus.OPEN


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A lease that a gate granted and that its node may not have acknowledged yet."""

    lease_id: str
    granted_at: float


@dataclass(frozen=True, kw_only=True)
class Member:
    """
    A hook that has joined a gate. `member` names its process, `workload` what the host's scheduler calls its pod.

    `heard_at` is when it last asked; it is not kept on disk. `execute`: it runs the checks of its node itself.
    """

    member: str
    rank: int
    node: str
    workload: str | None
    joined_at: float
    heard_at: float
    execute: bool = False


@dataclass(frozen=True, kw_only=True)
class Gate:
    """
    The question of one job and attempt, and how far its answer is.

    `failed` holds nodes that this gate is done with (unknown after a run of its own, lease not acknowledged) and why;
    other exclusions are judged anew at each step. `ready_at` is when the first leases were granted; `grants` counts
    rounds of granting, for ids never used twice. `validation` is the newest, with its verdict once it has one; `past`
    are those before it, of other sets of nodes.

    Of a `join` (see `collecting`): `asked_attempt` is what its members asked for, while `request.attempt` counts on
    with every gate of the group. `members` are all who have asked, in that order; `roster` those that are checked now,
    by rank, empty while they come together, and then `request.nodes` are their nodes. `generation` counts members that
    were replaced, `restarts` how often the gate began anew for that, `began_at` is when it did last. `former` are the
    ranks of leases of the group's gate before this one.
    `waiting` is what it waits for: for people who follow it; it is not kept on disk.
    """

    id: str
    request: GateRequest
    terms: Terms
    created_at: float
    deadline: float
    phase: Phase = Phase.WAITING
    reserved: tuple[str, ...] = ()
    ordered: Mapping[str, OrderedRun] = field(default_factory=dict)
    failed: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    granted: Mapping[str, Grant] = field(default_factory=dict)
    grants: int = 0
    ready_at: float | None = None
    validation: Validation | None = None
    past: tuple[Validation, ...] = ()
    waiting: tuple[Reason, ...] = ()
    decision: Decision | None = None
    asked_attempt: int = 0
    members: tuple[Member, ...] = ()
    roster: tuple[str, ...] = ()
    generation: int = 0
    restarts: int = 0
    began_at: float | None = None
    former: Mapping[str, int] = field(default_factory=dict)

    @property
    def collecting(self) -> bool:
        """Whether members are still coming together, so that it is not known yet which nodes are asked for."""
        return self.request.join is not None and not self.roster

    @property
    def since(self) -> float:
        """Since when its nodes are known, which is what bounds of waiting count from."""
        return self.created_at if self.began_at is None else self.began_at

    @property
    def tag(self) -> str:
        """What ids of orders begin with: another one after each restart, since an id is never used twice."""
        return f"{self.id}.{self.restarts}" if self.restarts else self.id

    def workload_on(self, node: str) -> str | None:
        """What the host's scheduler calls the job on this node, where the hook could tell."""
        found = (m.workload for m in self.members if m.node == node and m.member in self.roster)
        return next(found, self.request.workload)

    def asker_on(self, node: str) -> str:
        """The job by the name under which the scheduler of this node may know it."""
        return self.workload_on(node) or self.request.job

    @property
    def held(self) -> tuple[str, ...]:
        """All nodes that nobody else may take meanwhile: the reserved ones, and partners borrowed for a search."""
        v = self.validation
        return self.reserved if v is None or v.verdict is not None else (*self.reserved, *v.partners)


class Closing(str, enum.Enum):
    """Why a gate is closed from outside: the asker withdrew it, or a later attempt takes its place."""

    RELEASED = "Released"
    SUPERSEDED = "Superseded"


# --- effects: committed with gate' in one transaction, then carried out; each may be repeated ------------------------


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """These nodes belong to this gate until Unreserve."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Unreserve:
    """These nodes are anybody's again (those with a lease stay with the lease)."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OrderRun:
    """The node is to run a tier; an order of an earlier round is cancelled by it."""

    node: str
    order_id: str
    tier: Tier
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True)
class GrantLease:
    """The node is to store this lease."""

    node: str
    lease_id: str


@dataclass(frozen=True, kw_only=True)
class RevokeLease:
    """The node is to forget this lease; `why` is for people."""

    node: str
    lease_id: str
    why: str


@dataclass(frozen=True, kw_only=True)
class StartGroups:
    """Nodes get the orders of the groups that the gate's validation tests now; earlier ones are called off."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Accuse:
    """A validation found the node at fault."""

    node: str
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The gate is decided: tell who asked."""

    decision: Decision


@dataclass(frozen=True, kw_only=True)
class WakeAt:
    """Step the gate again at this time, if nothing wakes it before."""

    at: float


Effect = Reserve | Unreserve | OrderRun | StartGroups | Accuse | GrantLease | RevokeLease | Answer | WakeAt


class Observer(Protocol):
    """Told of what the engine did, after it is on disk: for metrics."""

    def gate_ready(self, gate: Gate, seconds: float) -> None:
        """The first leases of a gate were granted, `seconds` after it was asked."""

    def gate_decided(self, gate: Gate) -> None:
        """`gate.decision` is on disk."""
