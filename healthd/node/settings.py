"""The settings of the daemon of a node, built by the command line from file, variables and arguments."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from healthd.core.config import tables_of
from healthd.core.integrations import allocation_tables, node_tables, table_of
from healthd.integrations import INTEGRATIONS

R = TypeVar("R")

DAEMON = "daemon"
"""The executor of a node's own daemon."""


class Unprompted(str, enum.Enum):
    """When active checks run without an order."""

    IDLE = "idle"
    BOOT = "boot"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class ActiveSettings:
    """When active checks run."""

    unprompted: Unprompted | None = None
    """idle: whenever the devices are seen to be free and the evidence is old. boot: once after each boot, for hosts
    whose scheduler hides its allocations. off: only on order. None: boot if the host has a job scheduler (Slurm,
    Kubernetes, ECS) whose allocations cannot be seen, because it may allocate the devices at any moment; otherwise
    idle."""

    interval_seconds: float = 3600.0
    """How often the quick tier repeats while the node is idle. One hour: about ten seconds of device time an hour are
    0.3 % of an idle machine, and a gate rarely has to wait for a fresh run."""

    jitter_ratio: float = 0.1
    """Random variation of the interval, so that nodes that booted together do not probe together."""

    retry_seconds: float = 120.0
    """How soon a quick tier that did not succeed is repeated. Two minutes: a repaired node is back soon, and a broken
    one is not worn out."""


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """Synchronization with the aggregator."""

    aggregators: tuple[str, ...] = ()
    """URLs in order of preference; the first that responds is used, or the leader that it names. Empty: the node stands
    alone."""

    token_file: Path | None = None
    """File whose first line is the bearer token with scope `sync`. Read again for each request."""

    instance_identity: bool = False
    """On EC2: instead of a token, send the identity document that AWS has signed for this instance. The daemon gets
    it from the metadata service when it starts. The aggregator needs `[aggregator.aws]`."""

    ca_file: Path | None = None
    """PEM file of the CA that signed the aggregator's certificate; None trusts the system's. With it the node also goes
    to a leader that `aggregators` does not list."""

    wait_seconds: float = 60.0
    """Longest time that the aggregator may wait before it answers a sync; it states the time it prefers, 25 s unless
    `aggregator.hold_max` allows more. Set less where a load balancer closes connections sooner."""

    full_seconds: float = 300.0
    """The whole state is sent at least this often, so that measured values in the fleet's views are never older: a
    change of what they say of the node is sent at once."""

    executor: str | None = field(default=None, metadata={"internal": True})
    """The member of a group as which a hook speaks beside the node's daemon; none in a daemon. No setting."""

    backoff_max_seconds: float = 30.0
    """Longest pause between attempts while no aggregator responds. Short, because a gate may be waiting for this
    node."""

    def __post_init__(self) -> None:
        if self.instance_identity and self.token_file is not None:
            raise ValueError("instance_identity: replaces a token; leave out token_file or instance_identity")


@dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """How the end of a job is seen."""

    settle_seconds: float = 60.0
    """If a lease names no process: how long devices must be free after a job held them until its lease ends. A minute:
    launchers restart their ranks faster."""

    watch_seconds: float = 5.0
    """How often a workload that is a process or a pod of this host is checked. It costs one read of /proc, or one call
    to the kubelet's socket."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """How long profiles of slow probes are kept, in `profiles` of the state directory; the oldest go first."""

    count: int = 200
    """Maximum number of profiles. A slow probe makes one for each device; 0 keeps none."""

    max_bytes: int = 64 << 20
    """Maximum size of all profiles together, in bytes. A profile usually has 50 to 100 kB, and at most 1 MiB."""

    age_seconds: float = 28 * 86400.0
    """Older profiles are removed. Four weeks, like the history of a node in the fleet."""


@dataclass(frozen=True, kw_only=True)
class AllocationSettings:
    """How the job schedulers of the host are asked for their allocations."""

    read: bool = True
    """Whether schedulers are queried at all. A hook started by a scheduler does not query it, because it would see its
    own job's allocation; one started by hand or over ssh does."""

    ignore: tuple[str, ...] = ()
    """Workloads that never use the devices, as patterns: `pod:NAMESPACE/NAME`, `ecs-family:FAMILY`, `slurm:ID`. Empty:
    every allocation counts."""

    timeout_seconds: float = 2.0
    """Time limit for a scheduler's answer. All run on this host and answer within milliseconds."""

    pause_seconds: float = 2.0
    """A reading younger than this is reused. Allocations are read with every round of checks and before active runs."""

    integrations: Mapping[str, Any] = tables_of(lambda: allocation_tables(INTEGRATIONS))
    """The tables of integrations that are set, by key; see `of`."""

    def of(self, key: str, record: type[R]) -> R:
        """The table of an integration; with its defaults where nothing is set."""
        return table_of(self.integrations, key, record)


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """All of the daemon. Every field is followed by its meaning, its unit and the reason for its default."""

    name: str
    """Name of the node in the fleet. Prefer the instance id, because host names get reused. There is no default here:
    two nodes with one name are an error that is found late."""

    state_dir: Path
    """Directory for everything that must survive the daemon: results, leases, the node's key."""

    run_dir: Path
    """Directory for everything that must not survive a reboot: the control socket, lock files, device files of CPU
    devices."""

    listen: str = "0.0.0.0:8080"
    """HOST:PORT of the read-only HTTP port, on all addresses by default, for Prometheus, load balancers and people."""

    address: str | None = None
    """HOST:PORT under which others reach that port. None: `listen`, or the host's name if it listens on all
    addresses."""

    interface: str | None = None
    """Network interface (`eth1`) that the ranks of this node use to reach other nodes. None: the interface of the route
    to them."""

    aliases: tuple[str, ...] = ()
    """Other names of the node that a gate may use, such as the scheduler's."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the node; gates choose nodes by `pool`."""

    host_root: Path | None = None
    """Directory that stands for the machine (recorded machines, containers with the host mounted); None is this one."""

    checks: tuple[str, ...] = ()
    """Names of the enabled checks; empty: all. An unknown name is an error at the start."""

    disabled: tuple[str, ...] = ()
    """Names of checks that are not run."""

    faults: tuple[str, ...] = ()
    """Faults to inject from the start, as `CHECK[@TARGET]=KIND[:VALUE]`."""

    passive_floor_seconds: float = 5.0
    """Minimum interval of passive checks. A new line in the kernel log that may be a fault runs `kernel_log` at once,
    at most once a second."""

    look_seconds: float = 30.0
    """The holders of the devices are read at least this often, so that the end of a job is seen whichever checks are
    enabled. Half a minute, like the passive checks that read them too."""

    active: ActiveSettings = field(default_factory=ActiveSettings)
    """When active checks run."""

    sync: SyncSettings = field(default_factory=SyncSettings)
    """Synchronization with the aggregator."""

    lease: LeaseSettings = field(default_factory=LeaseSettings)
    """How the end of a job is seen."""

    profiles: ProfileSettings = field(default_factory=ProfileSettings)
    """How long profiles of slow probes are kept."""

    allocations: AllocationSettings = field(default_factory=AllocationSettings)
    """How the job schedulers of the host are asked."""

    integrations: Mapping[str, Any] = tables_of(lambda: node_tables(INTEGRATIONS))
    """The tables of integrations that are set, by key; see `of`."""

    executor: str = field(default=DAEMON, metadata={"internal": True})
    """Who runs the checks, as results say it. No setting."""

    history_results: int = 16
    """Number of recent results kept per check, plus as many that did not pass. Shows a day of quick runs."""

    save_seconds: float = 60.0
    """Results of passive checks are written to the state directory at most this often, because disks are small and
    slow. Active results and leases are written at once."""

    stop_seconds: float = 3.0
    """Time for children and requests to end after SIGTERM. With the flush, the daemon stops in under 5 s."""

    def __post_init__(self) -> None:
        # Workers run in a directory of their own: a relative path would mean another place to them.
        for name in ("state_dir", "run_dir", "host_root"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, path.absolute())

    def of(self, key: str, record: type[R]) -> R:
        """The table of an integration; with its defaults where nothing is set."""
        return table_of(self.integrations, key, record)

    @property
    def control_socket(self) -> Path:
        """The Unix socket of local operators."""
        return self.run_dir / "node.sock"
