"""
The data of healthd: frozen, one definition for memory and wire (JSON by `healthd.wire`).

Nothing here does anything. Ages cross the wire, not clocks: `age_seconds` counts up to the moment of sending;
times (`*_at`, seconds since the epoch) are for people to read and never decide anything.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checks.contract import Action, Blame, Finding, Status, Tier

PROTOCOL = 1


class Health(str, enum.Enum):
    """Of a node."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """
    Why a node is not healthy, or a gate did not admit: one sentence with its address.

    `node`, `target` and `check` are None where they do not apply.
    """

    code: str
    message: str
    status: Status
    blame: Blame
    action: Action
    node: str | None = None
    target: str | None = None
    check: str | None = None
    injected: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """
    What a run of one check came to. Made by the runner out of *anything* that a child did.

    `tier` is the tier of the run, not of the check. `error` holds the child's last words (None when it ended well).
    `injected` is true when a fault was injected into it. `executor` says who ran it: `daemon`, `check` or a hook.
    `compile_seconds` is what compiling its graphs took, of the device where it took longest; 0 where nothing was.
    """

    check: str
    tier: Tier
    status: Status
    findings: tuple[Finding, ...]
    age_seconds: float
    started_at: float
    duration_seconds: float
    attempts: int
    error: str | None
    injected: bool
    executor: str
    compile_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckSpec:
    """
    A check that is enabled on a node, as the node tells others.

    A result older than `expires_seconds` is stale; None where nobody could renew it (boot-time checks), so it stands
    for as long as the machine is up.
    """

    name: str
    tier: Tier
    interval_seconds: float
    timeout_seconds: float
    expires_seconds: float | None
    scope: str
    doc: str


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """One device. `serial` is its lasting identity (None where the hardware tells none); `cores` its logical cores."""

    target: str
    kind: str
    serial: str | None
    cores: int | None
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """
    What the accelerator's driver shows. None where it could not be told; never 0 for "do not know".

    `workers` are the targets that get a worker each and become the ranks of collectives: cores of the devices, or
    (empty) the devices themselves.
    """

    accelerator: str
    device_count: int | None
    core_count: int | None
    memory_bytes: int | None
    efa_count: int | None
    devices: tuple[DeviceRecord, ...]
    workers: tuple[str, ...] = ()

    @property
    def rank_targets(self) -> tuple[str, ...]:
        """What this node's ranks run on, in their order."""
        return self.workers or tuple(device.target for device in self.devices)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Who has the devices. `by` is process, lease, scheduler or unseen (nobody can tell, so it counts as taken)."""

    by: str
    holder: str


@dataclass(frozen=True, kw_only=True)
class Lease:
    """
    The claim of a job on a node.

    `issuer` is the identity of the aggregator's database that granted it. `grace_seconds` is how long the daemon waits
    for the workload to be seen, `max_seconds` the bound for a workload that nobody can see. `workload` names it where
    the host can watch it (`pid:123`, `slurm:123`, `pod:NAMESPACE/NAME`, `ecs:TASK-ARN`), else None.
    """

    id: str
    gate: str
    job: str
    attempt: int
    issuer: str
    workload: str | None
    grace_seconds: float
    max_seconds: float
    age_seconds: float


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A node kept out of admissions. `owner_kind` is rule or person; `until` None means until somebody releases it."""

    reason: str
    owner: str
    owner_kind: str
    since: float
    until: float | None


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """
    All that is known of one node, by the node itself: the one snapshot that feeds every outlet.

    `checks` lists what is enabled: evidence is complete only against this list. `results` holds the last result of
    each check that has run. `faults` lists the injected faults in force. `peer_address` is the IP address by which the
    ranks of other nodes reach this one's; None where it cannot be told. `carriers` are what may carry collectives
    between this node and others: torch, and nccom where its owner lets mpirun be started by another node's word.
    """

    node: str
    aliases: tuple[str, ...]
    instance_id: str | None
    boot_id: str | None
    labels: Mapping[str, str]
    instance_type: str | None
    inventory: Inventory | None
    versions: Mapping[str, str]
    health: Health
    reasons: tuple[Reason, ...]
    checks: tuple[CheckSpec, ...]
    results: tuple[CheckResult, ...]
    allocated: tuple[Allocation, ...]
    leases: tuple[Lease, ...]
    quarantine: Quarantine | None
    faults: tuple[str, ...]
    running: str | None
    address: str | None
    observed_at: float
    peer_address: str | None = None
    carriers: tuple[str, ...] = ("torch",)


# --- gates ----------------------------------------------------------------------------------------------------------


class Mode(str, enum.Enum):
    """ENFORCE means what it says; OBSERVE admits always and records what it would have said."""

    ENFORCE = "enforce"
    OBSERVE = "observe"


class Verdict(str, enum.Enum):
    """The answer of a gate. HOLD is "not yet" and never the last word."""

    ADMIT = "admit"
    HOLD = "hold"
    REJECT = "reject"


@dataclass(frozen=True, kw_only=True)
class Join:
    """
    A hook that knows only itself: number `rank` of the `size` members of `group`, on `node`.

    `member` names this very process: the same again is the same member asking once more, another one of the same rank
    takes its place. `execute`: the process itself is the executor of its node.
    """

    group: str
    size: int
    rank: int
    member: str
    node: str
    execute: bool = False


@dataclass(frozen=True, kw_only=True)
class GateRequest:
    """
    May this job start on these nodes, now?

    Either `nodes`, or `pool` and `count`, or `join`: then all who ask for one job, attempt and group are one gate.
    `min_nodes` None means all of them. None as `tier`, `max_age_seconds`, `wait_seconds`, `mode` or `collective` means
    the aggregator's policy. `workload` names the job's process or pod.
    `collective`: several nodes run collectives together before they are admitted. `lease` False asks for nothing but
    the answer: the nodes are free again as soon as it is given.
    """

    job: str
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    pool: str | None = None
    count: int | None = None
    min_nodes: int | None = None
    tier: Tier | None = None
    max_age_seconds: float | None = None
    wait_seconds: float | None = None
    mode: Mode | None = None
    workload: str | None = None
    collective: bool | None = None
    lease: bool = True
    join: Join | None = None


@dataclass(frozen=True, kw_only=True)
class AdmittedNode:
    """A node that a decision includes; `evidence_age_seconds` is that of its oldest result that was counted."""

    node: str
    evidence_age_seconds: float | None
    address: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    """A node that a decision leaves out, and why."""

    node: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """
    The answer of a gate, with all that explains it.

    `id` is the gate's. `retryable` tells the hook whether trying again, here or elsewhere, can help. `would` is what
    enforce mode would have said, where `policy.mode` is observe or a person overrode it, else None.
    """

    id: str
    decision: Verdict
    reasons: tuple[Reason, ...]
    nodes: tuple[AdmittedNode, ...]
    excluded: tuple[ExcludedNode, ...]
    policy: Mapping[str, Any]
    retryable: bool
    decided_at: float
    duration_seconds: float
    would: Verdict | None = None


# --- sync -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """
    Run a tier now (only `checks` of it when given). Accepting it is a short claim on the node until it ends.

    `workload` is the job that asks: that the host's scheduler has given it the devices is no obstacle. None: none is.
    """

    tier: Tier
    checks: tuple[str, ...] = ()
    workload: str | None = None


@dataclass(frozen=True, kw_only=True)
class NccomGroup:
    """
    That `nccom-test` runs over the nodes of a group, in place of ranks of torch.

    `mode` is how its processes get onto the nodes: carried (by this line), ssh or slurm. `hosts` are the addresses of
    `nodes`, both in the order of ranks; the first runs nccom-test.
    """

    mode: str
    hosts: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What mpirun on the main node wants to have started on `node` for `check`: its words, the host first."""

    check: str
    node: str
    argv: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """Start mpirun's daemon for `check` of a group, if `argv` is what the node's own order of that group plans."""

    validation: str
    group: str
    check: str
    argv: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CollectiveOrder:
    """
    Be the ranks from `first_rank` on, `ranks` of them, of a group of `size`, and run `checks` in it one by one.

    `group` is used once. The node's ranks stay for the next order of the same `validation`, and go when another one
    comes, when a job gets the node or when none comes for a while. Rank 0 is on the node that `main` is the address
    of, and waits on `port` there for the others for at most `join_seconds`; each check then has `timeout_seconds`.
    `whole_rank` is this node's first rank in the first whole group: injected faults name ranks by it. `seed` is common.
    `workload` is the job that asks, as in a `RunOrder`. `nccom` None: torch carries it.
    """

    validation: str
    group: str
    checks: tuple[str, ...]
    first_rank: int
    ranks: int
    size: int
    whole_rank: int
    main: str
    port: int
    seed: int
    join_seconds: float
    timeout_seconds: float
    workload: str | None = None
    nccom: NccomGroup | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """
    Something that a node is to do. The list of kinds is closed: `run`, `lease`, `collective` or `launch`.

    `deadline_seconds` counts from when the node first reads it. An order stays listed as long as it stands: one that
    is no longer listed is cancelled, and a lease no longer listed is released. One that is `withdrawn` is cancelled as
    well, and stays listed so that the node repeats how it ended until that is on disk.
    """

    id: str
    kind: str
    deadline_seconds: float
    withdrawn: bool = False
    run: RunOrder | None = None
    lease: Lease | None = None
    collective: CollectiveOrder | None = None
    launch: LaunchOrder | None = None


RANK_READY = "ready"
"""`RankReport.last` of a rank whose process is up and that has not given a sign of life in the check yet."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """
    What one rank of a group has said of one check.

    `events` counts its signs of life in the check (every rank passes the same ones) and `last` is the newest, as in
    `all_reduce/1024 entered`; before the first it is RANK_READY, or empty while the process starts. `key` and `data`
    are its evidence, None before it ended well. `reason` (Crashed, Timeout, CheckError, MissingDevice ... as of
    `checks.contract.Missing`) and `message` say why there will be none.
    """

    rank: int
    target: str
    check: str
    events: int
    last: str = ""
    key: str | None = None
    data: Mapping[str, Any] | None = None
    reason: str | None = None
    message: str = ""
    injected: bool = False


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """
    How far a node is with an order: accepted, running, done, refused or cancelled.

    `refused` and `done` are final. A lease is `accepted` once it is stored on the node, `done` when the node ended it
    because the workload is gone. `message` says why it was refused or ended. Results are in the node's state, but for
    those of a collective: `ranks` says for each rank and check how far it is, and what it found. Where nccom-test
    carries it, the main node says by check what it found in `findings`, and what it wants started in `launches`.
    """

    status: str
    message: str = ""
    ranks: tuple[RankReport, ...] = ()
    launches: tuple[Launch, ...] = ()
    findings: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LearnedBounds:
    """A learned limit of one measurement."""

    lower: float | None
    upper: float | None


@dataclass(frozen=True, kw_only=True)
class LearnedLimits:
    """
    The approved baselines of one kind of machine, by names of limits (`matmul_flops_per_second/bf16`).

    They hold for machines of this `hardware` (see `checks.learned`) and these library versions alone. `digest` names
    them; a node says which it has. Without limits: what was told before is revoked.
    """

    digest: str
    hardware: str
    accelerator: str
    versions: Mapping[str, str]
    limits: Mapping[str, LearnedBounds]


@dataclass(frozen=True, kw_only=True)
class SyncRequest:
    """
    What a node says to the aggregator.

    `incarnation` is new at every start of the daemon; `seq` counts requests within it. `last_answer` is the id of the
    newest answer received and `since_answer_seconds` how long ago that was, by CLOCK_BOOTTIME: what lies between is
    what the aggregator adds to all ages. `state` is None when nothing but ages changed; then `digest` names the state
    that was sent last, and `ages` maps checks to ages. `issuer` is the database the node last took orders from.
    `baseline` is the digest of the learned limits it has; empty: none; None: it does not take any.
    """

    protocol: int
    incarnation: str
    seq: int
    last_answer: str | None
    since_answer_seconds: float | None
    state: NodeState | None
    digest: str
    ages: Mapping[str, float]
    orders: Mapping[str, OrderReport]
    issuer: str | None
    baseline: str | None = None


@dataclass(frozen=True, kw_only=True)
class SyncAnswer:
    """
    What the aggregator answers.

    `seq` counts answers to this node: an older one than the newest read is dropped. `orders` lists all open orders, or
    is None when the aggregator makes no statement (it does not know the node again yet): then nothing is cancelled.
    `acknowledged` lists final order reports that need not be repeated. `quarantine` is the aggregator's word.
    `baseline` holds learned limits that the node has not; None makes no statement, and it keeps what it has.
    """

    answer: str
    seq: int
    issuer: str
    orders: tuple[Order, ...] | None
    acknowledged: tuple[str, ...]
    send_all: bool
    retry_after_seconds: float
    quarantine: Quarantine | None = None
    baseline: LearnedLimits | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error over HTTP: application/problem+json (RFC 9457)."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    extra: Mapping[str, Any] = field(default_factory=dict)
