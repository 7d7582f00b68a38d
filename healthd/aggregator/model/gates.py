"""The gate: the question of one job and attempt, and how far its answer is."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from checks.contract import Tier
from healthd.aggregator.model.validations import Validation
from healthd.core.model import Decision, GateRequest, Mode, Reason


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
    were replaced, `gone` are those that ask no more and whose rank nobody has taken, `restarts` how often the gate
    began anew for that, `began_at` is when it did last. `former` are the ranks of leases of the group's gate before
    this one.
    `asked` are the names by which nodes of `request.nodes` were asked for, where those are not their own.
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
    gone: tuple[Member, ...] = ()
    restarts: int = 0
    began_at: float | None = None
    former: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def as_asked(self) -> GateRequest:
        """The request with the names that it came with."""
        if not self.asked:
            return self.request
        return replace(self.request, nodes=tuple(self.asked.get(name, name) for name in self.request.nodes))

    @property
    def collecting(self) -> bool:
        """Whether members are still coming together, so that it is not known yet which nodes are asked for."""
        return self.request.join is not None and not self.roster

    @property
    def validated(self) -> bool:
        """Whether collectives over its nodes were run to a verdict; false where the gate ended before that."""
        return any(run.verdict is not None for run in (*self.past, self.validation) if run is not None)

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
