"""
The gate: the question of one job and attempt, how far its answer is, what a step of it may see and wants done. Frozen
data; nothing here acts.

Times named `*_at` and `deadline` are seconds of the engine's clock: seconds since the epoch when the process started,
from there on by CLOCK_BOOTTIME, so that a clock that jumps moves no deadline.

What belongs to one phase alone is in the record of that phase, which is also how it is stored: `{"name": "granting",
"reserved": [...], "granted": {...}}`. Which phase may follow which is in `healthd.aggregator.gate.transitions`.

Also here:

- effects: what a step wants done, applied to memory and committed with gate' in one transaction; each may be
  repeated;
- who has a node, by the engine: claims, leases as the aggregator keeps them, and overrides.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from checks.contract import Tier
from healthd.aggregator.fleet.records import FleetNode
from healthd.aggregator.validation.records import NO_CHANCE_SEEN, ChanceSeen, Validation
from healthd.core.model import Decision, GateRequest, Lease, Mode, Reason


class Phase(str, enum.Enum):
    """Where a gate is, in the order in which gates go through them."""

    COLLECTING = "collecting"
    WAITING = "waiting"
    CHECKING = "checking"
    VALIDATING = "validating"
    GRANTING = "granting"
    DECIDED = "decided"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """
    A request with the policy filled in: what this gate goes by, whatever the policy becomes later.

    `checks` are what its validations run over its nodes; empty: the policy's collectives.
    """

    tier: Tier
    max_age_seconds: float
    wait_seconds: float
    mode: Mode
    wanted: int
    needed: int
    collective: bool
    checks: tuple[str, ...] = ()
    runtime_seconds: float = 0.0
    lease_seconds: float = 86400.0


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
    earlier_rounds: int = 0
    """Rounds before the node was given back, as `round` counts them: not counted towards `eligibility.MOST_RUNS`."""

    @property
    def counted_rounds(self) -> int:
        """Rounds that count towards `eligibility.MOST_RUNS`."""
        return self.round - self.earlier_rounds


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


class Collecting(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="collecting"):
    """The members of a `join` come together; which nodes are asked for is not known yet. See `GateGroup`."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="waiting"):
    """No node is reserved: there are too few that could be."""


class Checking(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="checking"):
    """Nodes are `reserved`, in the order of their ranks; each is ready, or its evidence is being renewed."""

    reserved: tuple[str, ...]


class Validating(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="validating"):
    """The reserved nodes run collectives together. `validation` has no verdict yet."""

    reserved: tuple[str, ...]
    validation: Validation


class Granting(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="granting"):
    """Leases are `granted`, by node; the nodes store and acknowledge them. A reserved node may have none yet."""

    reserved: tuple[str, ...]
    granted: Mapping[str, Grant]


class Decided(msgspec.Struct, frozen=True, kw_only=True, tag_field="name", tag="decided"):
    """Answered, for good. `granted` are the leases of an admitted job, by node."""

    decision: Decision
    granted: Mapping[str, Grant] = {}


def phase_of(progress: Progress) -> Phase:
    return _PHASES[type(progress)]


@dataclass(frozen=True, kw_only=True)
class GateGroup:
    """The members of a `join`, as far as the gate has them. See `healthd.aggregator.gate.rendezvous`."""

    asked_attempt: int
    """What its members asked for, while `request.attempt` counts on with every gate of the group."""
    members: tuple[Member, ...] = ()
    """All who have asked, in that order."""
    roster: tuple[str, ...] = ()
    """The members that are checked now, by rank; `request.nodes` are their nodes. Empty while they come together."""
    generation: int = 0
    """How many members were replaced."""
    gone: tuple[Member, ...] = ()
    """Members that stopped asking and whose rank nobody has taken."""
    restarts: int = 0
    """How often the gate began anew because a member was replaced."""
    began_at: float | None = None
    """When its members were last complete; None while they come together."""
    former: Mapping[str, int] = field(default_factory=dict)
    """The ranks of leases of the group's gate before this one."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The question of one job and attempt, and how far its answer is."""

    id: str
    request: GateRequest
    """As it was asked, but with the own names of the nodes; of a group: with the nodes of its members."""
    terms: Terms
    created_at: float
    deadline: float
    progress: Progress = field(default_factory=Waiting)
    """The phase, with what only that phase has."""
    ordered: Mapping[str, OrderedRun] = field(default_factory=dict)
    """The newest run on each node that had to renew its evidence for this gate, also where it was given back."""
    failed: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    """Nodes that this gate is done with (unknown after a run of its own, lease not acknowledged) and why. Other
    exclusions are judged anew at each step."""
    ended: tuple[Validation, ...] = ()
    """Validations that have a verdict or were stopped, oldest first."""
    returned: Mapping[str, float] = field(default_factory=dict)
    """When nodes were last given back. Others may have had them since: what was found out before counts no more."""
    replaced: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    """Nodes of a pool that it had and that turned out unfit, and why: a decision names them beside those it took."""
    grants: int = 0
    """Rounds of granting, for ids of leases that are never used twice."""
    group: GateGroup | None = None
    """None unless the gate was asked for by a `join`."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """The names by which nodes of `request.nodes` were asked for, where those are not their own."""
    asker: str | None = None
    """Who opened it, where that credential speaks for some nodes alone: how many gates it may open is limited."""
    past: str | None = None
    """The gate of a job that has died and whose nodes this one only checks: leases of that gate are no obstacle."""
    unfinished: Mapping[str, str] = field(default_factory=dict)
    """What of earlier attempts no caller of this gate may end: leases, by id with their nodes, and open gates, by id
    with "". It holds until they have ended."""
    waiting: tuple[Reason, ...] = ()
    """What it waits for: for people who follow it; not kept on disk."""

    @property
    def phase(self) -> Phase:
        return phase_of(self.progress)

    @property
    def reserved(self) -> tuple[str, ...]:
        """The nodes that are reserved for the job, in the order of their ranks."""
        return self.progress.reserved if isinstance(self.progress, Checking | Validating | Granting) else ()

    @property
    def granted(self) -> Mapping[str, Grant]:
        """The leases that the gate has granted and not taken back, by node."""
        return self.progress.granted if isinstance(self.progress, Granting | Decided) else {}

    @property
    def validation(self) -> Validation | None:
        return self.progress.validation if isinstance(self.progress, Validating) else None

    @property
    def validations(self) -> tuple[Validation, ...]:
        """All validations, the one under way last."""
        return self.ended if self.validation is None else (*self.ended, self.validation)

    @property
    def decision(self) -> Decision | None:
        """The answer, once there is one."""
        return self.progress.decision if isinstance(self.progress, Decided) else None

    @property
    def held(self) -> tuple[str, ...]:
        """All nodes that no other gate may reserve: the reserved ones, and partners borrowed for a search."""
        return self.reserved if self.validation is None else (*self.reserved, *self.validation.partners)

    @property
    def as_asked(self) -> GateRequest:
        if not self.asked:
            return self.request
        return replace(self.request, nodes=tuple(self.asked.get(name, name) for name in self.request.nodes))

    @property
    def validated(self) -> bool:
        """Whether collectives over its nodes were run to a verdict; false where the gate ended before that."""
        return any(run.verdict is not None for run in self.validations)

    @property
    def since(self) -> float:
        """Since when its nodes are known, which is what bounds of waiting count from."""
        began_at = None if self.group is None else self.group.began_at
        return self.created_at if began_at is None else began_at

    @property
    def tag(self) -> str:
        """What ids of orders begin with: another one after each restart, since an id is never used twice."""
        return f"{self.id}.{self.group.restarts}" if self.group is not None and self.group.restarts else self.id

    @property
    def members(self) -> tuple[Member, ...]:
        """All who have asked, in that order; empty unless it is the gate of a group."""
        return () if self.group is None else self.group.members

    def workload_on(self, node: str) -> str | None:
        """What the host's scheduler calls the job on this node, where the hook could tell."""
        if self.group is None:
            return self.request.workload
        found = (m.workload for m in self.group.members if m.node == node and m.member in self.group.roster)
        return next(found, self.request.workload)

    def asker_on(self, node: str) -> str:
        """The job by the name under which the scheduler of this node may know it."""
        return self.workload_on(node) or self.request.job


class Closing(str, enum.Enum):
    """Why a gate is closed from outside: the asker withdrew it, or a later attempt takes its place."""

    RELEASED = "Released"
    SUPERSEDED = "Superseded"


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
class Accuse:
    """A validation found the node at fault."""

    node: str
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class WakeAt:
    """Step the gate again at this time, if nothing wakes it before."""

    at: float


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
    GRANTED: on disk here, the node has not confirmed it. ACKNOWLEDGED: the node has stored it. ENDING: withdrawn,
    but the node may still hold it. CLOSED: gone on both sides; on disk for as long as its gate.
    """

    GRANTED = "granted"
    ACKNOWLEDGED = "acknowledged"
    ENDING = "ending"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class LeaseRow:
    """
    One lease on one node, as the aggregator keeps it. `lease.age_seconds` is 0; the age follows from `granted_at`.

    `adopted` marks one that this database learned of from the node: another one granted it, or this one before an old
    copy was put back. `why` says why it ended, `ended_at` when that was decided, `closed_at` when its node had let go.
    """

    node: str
    lease: Lease
    state: LeaseState
    granted_at: float
    adopted: bool = False
    closed_at: float | None = None
    why: str | None = None
    ended_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Override:
    """A person admits a job by hand, whatever its nodes are; `until` is in seconds since the epoch."""

    job: str
    reason: str
    owner: str
    since: float
    until: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The fleet at one moment: all that a step of a gate may see. Nothing in it changes."""

    now: float
    """The only time that a step goes by, in seconds since the epoch by the engine's clock."""
    nodes: Mapping[str, FleetNode]
    """By name, with ages as of `now`. A step looks up only those it needs."""
    pools: Mapping[str, Sequence[str]]
    """The names of the nodes of each pool, sorted; no entry for an unknown pool."""
    called: Mapping[str, Sequence[str]]
    """The nodes that are known by a name, their own or another, sorted."""
    claims: Mapping[str, Claim]
    """Who has which node."""
    overrides: Mapping[str, Override]
    """Overrides by job; those whose time is over may still be among them."""
    recovering: str | None
    """Why nothing may be admitted; None in good days."""
    settling: str | None
    """Why nothing may be called impossible yet: nodes have not had time to report. None later on."""
    leases: Mapping[str, LeaseRow] = field(default_factory=dict)
    """Leases that have not ended on their nodes, by id."""
    gates: Mapping[str, Gate] = field(default_factory=dict)
    """The open gates, by id."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Nodes that a gate's reject has taken out of the scheduler's way, and until when, in words."""
    doubted: frozenset[str] = frozenset()
    """Nodes that a validation named lately and that nothing has spoken for since."""
    chance: ChanceSeen = NO_CHANCE_SEEN
    """How often healthy pairs have failed in past validations of the pool, since memory was last built from disk."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """When a pass began, had worked out its changes, and had them on disk, by `time.perf_counter`."""

    began: float
    computed: float
    stored: float


Progress = Collecting | Waiting | Checking | Validating | Granting | Decided


_PHASES: Mapping[type, Phase] = {
    Collecting: Phase.COLLECTING,
    Waiting: Phase.WAITING,
    Checking: Phase.CHECKING,
    Validating: Phase.VALIDATING,
    Granting: Phase.GRANTING,
    Decided: Phase.DECIDED,
}


Effect = Accuse | GrantLease | RevokeLease | WakeAt
