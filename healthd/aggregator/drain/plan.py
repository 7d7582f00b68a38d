"""
Which nodes the actuator should take out of scheduling, which it must leave, and why. Pure.

Also here:

- what the drain controller wants of a scheduler, and what it is told: frozen data and one protocol.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from checks.contract import Blame, Status, Tier
from checks.printable import printable_line
from healthd.core.errors import HealthdError
from healthd.core.model import Decision, DeviceRecord, NodeState, Quarantine, Reason, Verdict


class ActuatorError(HealthdError):
    """The scheduler could not be asked or refused. `retry_after_seconds`: not before; None: when we like."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Actuator(Protocol):
    """
    One scheduler. Every method may be repeated at any time, must end within seconds, and raises ActuatorError alone.

    Marks carry an owner, so that only what we did is undone: a person's drain or taint survives, also on a node that we
    had marked before. A mark never ends a job that runs.
    """

    name: str

    async def marked(self) -> Mapping[str, str]:
        """Nodes (by their name in the fleet) that bear our mark now, and its text: read from the scheduler itself."""

    async def remove(self, removal: Removal) -> Outcome:
        """Nothing new is to be placed on the node: OUT or LEFT. Called again now and then while it is out."""

    async def restore(self, node: str) -> Outcome:
        """Take our mark away and nothing else. BACK or LEFT."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`note` is one line for people: what was done, or why nothing was."""

    done: Done
    note: str


class Done(str, enum.Enum):
    """
    What came of it. OUT: nothing new is placed on the node, by our mark. LEFT: somebody else's mark keeps it out, or
    the scheduler does not know it; nothing was touched. BACK: our mark is gone.
    """

    OUT = "out"
    LEFT = "left"
    BACK = "back"


def make_plan(
    now: float,
    sight: Observed,
    out_now: AbstractSet[str],
    *,
    left: AbstractSet[str] = frozenset(),
) -> Plan:
    """
    The same seen twice gives the same twice. What a person said is always done; what rules and gates say stays within
    the share of the pool, those first that are out already, then the oldest; nothing new where the breaker is open.

    Nodes of `left`, which are not ours to take out, come last, so that they take nobody's place. One that is gone
    stays where it is and takes none at all: a machine that was terminated never speaks again.
    """
    out: dict[str, Removal] = {}
    kept_back: dict[str, str] = {}
    by_pool: dict[str, int] = {}
    removals = [(suspect, removal) for suspect in sight.suspects if (removal := _removal(now, suspect)) is not None]
    removals.sort(key=lambda pair: (pair[1].node not in out_now, pair[1].node in left, pair[1].since, pair[1].node))
    for suspect, removal in removals:
        pool = suspect.pool
        where = f"pool {pool}" if pool else "nodes without a pool"
        size = sight.pools.get(pool, PoolSize(0, 0))
        if removal.by_person or (suspect.gone and removal.node in out_now):
            out[removal.node] = removal
        elif suspect.gone:
            kept_back[removal.node] = "it has not reported for a day"
        elif pool in sight.breakers and removal.node not in out_now:
            kept_back[removal.node] = (
                f"the breaker of the rules is open ({where}); `healthd fleet breaker reset` closes it"
            )
        elif by_pool.get(pool, 0) >= size.most_out:
            kept_back[removal.node] = (
                f"{size.most_out} of {size.nodes} nodes are out already ({where}), which is the limit (out_ratio)"
            )
        else:
            by_pool[pool] = by_pool.get(pool, 0) + 1
            out[removal.node] = removal
    return Plan(out=out, kept_back=kept_back)


def _anybody(_name: str) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Observed:
    """
    What is seen of the fleet: suspects, the size of their pools (without nodes that are gone) with how many of each may
    be out, and where the rules' breaker is open.

    `unsure`: the aggregator does not know its fleet yet, so that a node is no suspect proves nothing. `knows`: whether
    a node of this name was ever heard of; of one that was not, that it is no suspect proves nothing either. `refuted`:
    nodes of which newer evidence says the contrary of what a gate said.
    """

    suspects: tuple[Candidate, ...]
    pools: Mapping[str, PoolSize]
    breakers: AbstractSet[str]
    unsure: bool
    knows: Callable[[str], bool] = _anybody
    refuted: AbstractSet[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """
    A node that somebody or something says is bad, and what else is known of it.

    `pool` is "" for a node without one. `faults`: faults are injected on it. `allocated`: a job has it, or nobody
    knows. `gone`: it was not heard for a day. `devices` are those of its quarantine, as far as they are known.
    """

    node: str
    aliases: tuple[str, ...]
    instance_id: str | None
    pool: str
    quarantine: Quarantine | None
    rejected: RejectedNode | None
    faults: bool
    allocated: bool
    gone: bool = False
    devices: tuple[DeviceRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RejectedNode:
    """
    A gate found the node at fault just now: for all of `faults`. `quarantined`: for nothing but its quarantine, so that
    it counts as long as that stands.
    """

    gate: str
    reason: str
    injected: bool
    since: float
    until: float
    quarantined: bool = False
    faults: tuple[NodeFault, ...] = ()

    def refuted_by(self, state: NodeState, now: float) -> bool:
        """Whether newer evidence in this state, with ages as of `now`, speaks against each of its faults."""
        return bool(self.faults) and all(fault.refuted_by(state, now) for fault in self.faults)


@dataclass(frozen=True, kw_only=True)
class NodeFault:
    """
    One fault for which a gate rejected a node at `since`. `check` and `tier` say what evidence could show it again:
    None where only a validation could.
    """

    check: str | None
    tier: Tier
    since: float

    def refuted_by(self, state: NodeState, now: float) -> bool:
        """Whether newer evidence in this state, with ages as of `now`, could have shown the fault and is healthy."""
        result = next((one for one in state.results if one.check == self.check), None)
        spec = next((one for one in state.checks if one.name == self.check), None)
        if result is None or spec is None:
            return False
        if spec.tier is not Tier.PASSIVE and result.tier.rank < self.tier.rank:
            return False
        return result.age_seconds < now - self.since and result.status in (Status.PASS, Status.WARN)


@dataclass(frozen=True)
class PoolSize:
    """How many nodes a pool has, and how many of them may be out without a person's word (`Policy.most_out`)."""

    nodes: int
    most_out: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`out` by node; `kept_back` says for others why they stay in though they are bad."""

    out: Mapping[str, Removal] = field(default_factory=dict)
    kept_back: Mapping[str, str] = field(default_factory=dict)


def culprits(decision: Decision) -> Mapping[str, tuple[Reason, ...]]:
    """
    Nodes that a retryable reject left out for faults of their own, with these, the worst first; empty for any other
    answer.

    Unknown nodes are none: not knowing is no ground to act on a machine.
    """
    if decision.decision is not Verdict.REJECT or not decision.retryable:
        return {}
    found: dict[str, list[Reason]] = {}
    for excluded in decision.excluded:
        for reason in excluded.reasons:
            if reason.blame is Blame.NODE and reason.status is Status.FAIL:
                found.setdefault(excluded.node, []).append(reason)
    # A real fault says more than an injected one, or than that somebody keeps the node out.
    return {
        node: tuple(sorted(reasons, key=lambda one: one.injected or one.code == "Quarantined"))
        for node, reasons in found.items()
    }


def why_not_terminated(removal: Removal, terminate: bool, tasks: int) -> str | None:
    """Why a drained machine is not terminated; None where it may be. Nothing can undo it, so all must speak for it."""
    if not terminate:
        return "terminate is off"
    if removal.injected:
        return "not terminated: its fault is injected"
    if removal.by_person:
        return "not terminated: an operator took it out and may want to inspect it"
    if removal.why is not Why.QUARANTINE:
        return "not terminated: a gate's rejection alone is not enough"
    if removal.allocated:
        return "not terminated: a job uses it"
    return f"not terminated: {tasks} tasks run on it" if tasks else None


@dataclass(frozen=True, kw_only=True)
class Removal:
    """
    One node that is to be out of the way.

    `node` is its name in the fleet; `aliases` and `instance_id` (None where unknown) are what a scheduler may know it
    by. `reason` is a sentence for people. `by_person`: somebody said so, no rule. `injected`: only an injected fault is
    behind it, so nothing may be done that cannot be undone. `allocated`: a job has the node, as far as anybody knows,
    so nothing may be done that ends it. `devices` are all that is wrong with it, where that is known (empty: the node
    is); with `whole` the node is to be out for now although the scheduler could leave out these devices alone.
    """

    node: str
    aliases: tuple[str, ...]
    instance_id: str | None
    why: Why
    reason: str
    by_person: bool
    injected: bool
    allocated: bool
    since: float
    devices: tuple[DeviceRecord, ...] = ()
    whole: bool = True

    @property
    def scope(self) -> tuple[frozenset[str], bool]:
        """What of the node is to be out: when it changes, what was done so far is not enough."""
        return frozenset(device.target for device in self.devices), self.whole

    @property
    def names(self) -> tuple[str, ...]:
        """All names to look for, the most likely first."""
        known = (self.node, *self.aliases, *((self.instance_id,) if self.instance_id else ()))
        return tuple(dict.fromkeys(known))


class Why(str, enum.Enum):
    """What a node is out for. QUARANTINE: until it is lifted. GATE: a gate rejected it just now; for a while."""

    QUARANTINE = "quarantine"
    GATE = "gate"


def _removal(now: float, suspect: Candidate) -> Removal | None:
    quarantine, rejected = suspect.quarantine, suspect.rejected
    person, faults, devices = False, suspect.faults, suspect.devices
    stands = quarantine is not None and (quarantine.until is None or quarantine.until > now)
    told = rejected is not None and rejected.until > now and (stands or not rejected.quarantined)
    if quarantine is not None and stands:
        why, reason, since = Why.QUARANTINE, f"{quarantine.owner}: {quarantine.reason}", quarantine.since
        person = quarantine.owner_kind != "rule"
        # Which fault a rule's word is about is not told: while any is injected, it may be that one.
        injected = faults and not person
    elif rejected is not None and told:
        devices = ()  # a gate speaks of the node
        why, reason, since = Why.GATE, f"gate {rejected.gate}: {rejected.reason}", rejected.since
        injected = rejected.injected or faults
    else:
        return None
    return Removal(
        node=suspect.node,
        aliases=suspect.aliases,
        instance_id=suspect.instance_id,
        why=why,
        reason=printable_line(reason),
        by_person=person,
        injected=injected,
        allocated=suspect.allocated,
        since=since,
        devices=devices,
        # The next attempt of a rejected job must start elsewhere: no gate admits the node, whatever device is left out.
        whole=told or not devices,
    )
