"""The state of one node: its devices, their users, and the record that contains all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from healthd.core.model.reasons import Health, Reason
from healthd.core.model.results import CheckResult, CheckSpec


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """
    One device. `serial` is its lasting identity (None where the hardware tells none); `cores` its logical cores;
    `bdf` is its PCI address, as `0000:10:1c.0` (None where that cannot be told).

    `since` is when it was first seen as it is now (seconds of the node's CLOCK_BOOTTIME): later again once it was gone,
    swapped or reset. A result that began earlier says nothing of it. None where nobody has watched the devices.
    """

    target: str
    kind: str
    serial: str | None
    cores: int | None
    memory_bytes: int | None
    since: float | None = None
    bdf: str | None = None


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
    for the workload to be seen, `max_seconds` the bound for the time in which nobody can see it. `workload` names it
    where the host can watch it (see `healthd.core.workload`), else None. `proof` lets the issuer recognize a lease that
    it granted, also when its database is a copy from before; it is not secret, since it is valid for the one lease and
    node in `id`. Empty: there is none.
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
    proof: str = ""


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """
    A node kept out of admissions. `owner_kind` is rule or person; `until` None means until somebody releases it.

    `injected`: whatever caused it was injected, in a drill. `devices` are the targets of the devices that are at fault
    where nothing else of the node is; empty: the node. `number` counts the quarantines that a database has given the
    node, whatever clocks show; two that say the same are equal.
    """

    reason: str
    owner: str
    owner_kind: str
    since: float
    until: float | None
    injected: bool = False
    devices: tuple[str, ...] = ()
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """
    All that is known of one node, by the node itself: the one snapshot that feeds every outlet.

    `checks` lists what is enabled: evidence is complete only against this list. `results` holds the last result of
    each check that has run. `faults` lists the injected faults in force. `peer_address` is the IP address by which the
    ranks of other nodes reach this one's; None where it cannot be told.
    `hostname` is what its machine calls itself; None where it cannot be told. `compile_seconds` is how much longer an
    ordered run may take here, because it compiles what is not compiled yet; 0 where it says so instead. `maintenance`
    says by what the node's platform shows that it is in maintenance; None where it does not, or is not asked. `accused`
    is what a validation said of the node, by the last answer of its aggregator: a warning.
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
    hostname: str | None = None
    compile_seconds: float = 0.0
    maintenance: str | None = None
    accused: Reason | None = None
