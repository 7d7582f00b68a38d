"""Which nodes are to be out of the scheduler's way, and which are not though something says so, and why: pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from checks.contract import Blame, Status, Tier
from checks.printable import printable_line
from healthd.core.errors import HealthdError
from healthd.core.model import Decision, DeviceRecord, NodeState, Quarantine, Reason, Verdict

# What the drain controller wants of a scheduler, and what it is told: frozen data and one protocol.


class Why(str, enum.Enum):
    """What a node is out for. QUARANTINE: until it is lifted. GATE: a gate rejected it just now; for a while."""

    QUARANTINE = "quarantine"
    GATE = "gate"


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


class Done(str, enum.Enum):
    """
    What came of it. OUT: nothing new is placed on the node, by our mark. LEFT: somebody else's mark keeps it out, or
    the scheduler does not know it; nothing was touched. BACK: our mark is gone.
    """

    OUT = "out"
    LEFT = "left"
    BACK = "back"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`note` is one line for people: what was done, or why nothing was."""

    done: Done
    note: str


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
class RejectedNode:
    """
    A gate found the node at fault just now. `quarantined`: for nothing but its quarantine, so that it counts as long as
    that stands. `check` and `tier` say what evidence could show the same again: None where only a validation could.
    """

    gate: str
    reason: str
    injected: bool
    since: float
    until: float
    quarantined: bool = False
    check: str | None = None
    tier: Tier = Tier.PASSIVE

    def refuted_by(self, state: NodeState, now: float) -> bool:
        """Whether newer evidence in this state, with ages as of `now`, could have shown the fault and is healthy."""
        result = next((one for one in state.results if one.check == self.check), None)
        spec = next((one for one in state.checks if one.name == self.check), None)
        if result is None or spec is None:
            return False
        if spec.tier is not Tier.PASSIVE and result.tier.rank < self.tier.rank:
            return False
        return result.age_seconds < now - self.since and result.status in (Status.PASS, Status.WARN)


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


def _anybody(_name: str) -> bool:
    return True


@dataclass(frozen=True)
class PoolSize:
    """How many nodes a pool has, and how many of them may be out without a person's word (`Policy.most_out`)."""

    nodes: int
    most_out: int


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
class Plan:
    """`out` by node; `kept_back` says for others why they stay in though they are bad."""

    out: Mapping[str, Removal] = field(default_factory=dict)
    kept_back: Mapping[str, str] = field(default_factory=dict)


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
            kept_back[removal.node] = "it was not heard for a day"
        elif pool in sight.breakers and removal.node not in out_now:
            kept_back[removal.node] = (
                f"the breaker of the rules is open ({where}); `healthd fleet breaker reset` closes it"
            )
        elif by_pool.get(pool, 0) >= size.most_out:
            kept_back[removal.node] = (
                f"{size.most_out} of {size.nodes} nodes are out already ({where}), and no more may be (out_ratio)"
            )
        else:
            by_pool[pool] = by_pool.get(pool, 0) + 1
            out[removal.node] = removal
    return Plan(out=out, kept_back=kept_back)


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


def culprits(decision: Decision) -> Mapping[str, Reason]:
    """
    Nodes that a retryable reject left out for a fault of their own, with the worst of it; empty for any other answer.

    Unknown nodes are none: not knowing is no ground to act on a machine.
    """
    if decision.decision is not Verdict.REJECT or not decision.retryable:
        return {}
    found: dict[str, Reason] = {}
    for excluded in decision.excluded:
        for reason in excluded.reasons:
            if reason.blame is Blame.NODE and reason.status is Status.FAIL:
                known = found.get(excluded.node)
                # A real fault says more than an injected one, or than that somebody keeps the node out.
                if known is None or (known.injected or known.code == "Quarantined") > (
                    reason.injected or reason.code == "Quarantined"
                ):
                    found[excluded.node] = reason
    return found


def why_not_terminated(removal: Removal, terminate: bool, tasks: int) -> str | None:
    """Why a drained machine is not terminated; None where it may be. Nothing can undo it, so all must speak for it."""
    if not terminate:
        return "terminate is off"
    if removal.injected:
        return "not terminated: its fault is injected"
    if removal.by_person:
        return "not terminated: a person took it out, and may want to look at it"
    if removal.why is not Why.QUARANTINE:
        return "not terminated: a gate's reject alone is not enough"
    if removal.allocated:
        return "not terminated: a job has it"
    return f"not terminated: {tasks} tasks run on it" if tasks else None


# What an operator can set of the drain controller.


_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_OWNER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesActuatorSettings:
    """The taint on nodes of Kubernetes."""

    taint_key: str = "healthd.internal/removed"
    """Key of the taint. `.internal` is reserved for private use, so it is nobody else's domain."""

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Directory with `token` and `ca.crt`, where Kubernetes puts it. Both are read again for each request."""

    api_server: str | None = None
    """URL of the API server; None: as the variables say that every pod has (KUBERNETES_SERVICE_HOST)."""

    device_taints: Literal["off", "None", "NoSchedule"] = "off"
    """Effect of the DeviceTaintRule for a device that is all that is wrong with a node, where devices are given by DRA.
    None: the rule only shows, and the node is tainted as without it. NoSchedule: new claims get other devices, and the
    node is not tainted. off: no rules, and none of the rights that they need. Begin with None."""

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.taint_key):
            raise ValueError(f"taint_key: {self.taint_key!r} is no key of a taint; write domain/name")


@dataclass(frozen=True, kw_only=True)
class BatchActuatorSettings:
    """Draining of ECS container instances, for AWS Batch. At least one cluster or compute environment must be named."""

    clusters: tuple[str, ...] = ()
    """ECS clusters by name or ARN."""

    compute_environments: tuple[str, ...] = ()
    """Compute environments of Batch by name; Batch is asked for their clusters."""

    region: str | None = None
    """AWS region; None: as boto3 finds it (AWS_DEFAULT_REGION, its files)."""

    terminate: bool = False
    """Terminate a machine that a rule has quarantined, once it is drained and empty, so that another takes its place.
    Off: nothing is done that a person cannot undo."""


@dataclass(frozen=True, kw_only=True)
class ActuatorSettings:
    """Settings of the drain controller. ValueError names a value that is not allowed."""

    kind: Literal["none", "kubernetes", "slurm", "batch"] = "none"
    """Which scheduler. none: nothing outside of healthd is ever touched, and a gate alone keeps jobs off a node."""

    mode: Literal["observe", "act"] = "observe"
    """observe: only say what would be done. The default, so that an operator sees what would be done first."""

    owner: str = "healthd"
    """Whose marks are ours. Two aggregators on one scheduler need two owners, or each undoes the other's marks."""

    look_seconds: float = 10.0
    """How often wanted and real are compared. Rejects of gates and changes of quarantines are acted on at once."""

    answer_seconds: float = 20.0
    """How long the reject of a gate is held back until the nodes at fault are out of the way, so that the retry lands
    elsewhere. Two calls take milliseconds; more than this and the scheduler is away, which must not hang the job."""

    gate_seconds: float = 600.0
    """How long a node is out because of a gate's reject alone. Ten minutes: the retry has been placed by then, and a
    node that goes on failing is quarantined by rule."""

    removals_per_minute: int = 10
    """How fast nodes are taken out, in nodes a minute: what is wrong with all at once is hardly the nodes. How many may
    be out at a time is `out_ratio` of the policy."""

    backoff_max_seconds: float = 300.0
    """The longest pause after calls that failed. Five minutes: a scheduler that is back is soon in step again."""

    kubernetes: KubernetesActuatorSettings = field(default_factory=KubernetesActuatorSettings)
    """Where `kind` is kubernetes."""

    batch: BatchActuatorSettings = field(default_factory=BatchActuatorSettings)
    """Where `kind` is batch."""

    def __post_init__(self) -> None:
        if not _OWNER.fullmatch(self.owner):
            raise ValueError(f"owner: {self.owner!r} must be 1 to 63 letters, digits, '.', '-', '_'")
        if self.removals_per_minute < 1:
            raise ValueError(f"removals_per_minute: must be at least 1, not {self.removals_per_minute}")
        for name in ("look_seconds", "gate_seconds", "backoff_max_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name.removesuffix('_seconds')}: must be more than 0, not {getattr(self, name)}")
        if not 0 <= self.answer_seconds <= 120:
            raise ValueError(f"answer: must be from 0 s to 120 s, not {self.answer_seconds:g} s")
