"""What checks came to, and what that says of a node: health, reasons, results."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from checks.contract import Action, Blame, Finding, Series, Status, Tier


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
class WorkDigest:
    """
    What fixed work came to, to the bit, on devices of a node that agree: for the comparison with other nodes.

    Only digests of one `key` may be compared. `label` says which work it was. `root` is the digest of all places,
    `places` a short one of each (see `healthd.core.model.work_digests`).
    """

    key: str
    label: str
    root: str
    places: str
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """
    What a run of one check came to. Made by the runner out of *anything* that a child did.

    `tier` is the tier of the run, not of the check. `error` holds the child's last words (None when it ended well).
    `injected` is true when a fault was injected into it. `executor` says who ran it: `daemon`, `check` or a hook.
    `compile_seconds` is what compiling its graphs took, of the device where it took longest; 0 where nothing was.
    `digests` are compared over nodes by the aggregator; empty for most checks.
    `devices` are the targets of the accelerators that it measured; empty where it measured none. `began_at` is when the
    first measurement began (seconds of the node's CLOCK_BOOTTIME; None where none did): the result stands for these
    devices as they were then, see `DeviceRecord.since`.
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
    digests: tuple[WorkDigest, ...] = ()
    devices: tuple[str, ...] = ()
    began_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckSpec:
    """A check that is enabled on a node, as the node tells others."""

    name: str
    tier: Tier
    """The lightest tier whose runs contain it."""
    interval_seconds: float
    """How often the daemon repeats it unprompted."""
    timeout_seconds: float
    """Its time limit on one worker."""
    expires_seconds: float | None
    """
    A result older than this is stale; None where nobody could renew it (boot-time checks), so it stands for as long as
    the machine is up.
    """
    scope: str
    """node, device or group."""
    doc: str
    """The first lines of its docstring."""
    accelerators: bool = False
    """It looks at accelerators and at nothing else."""
    accelerator_faults: tuple[str, ...] = ()
    """`CODE: words` of one that looks at more: its reasons that begin so are faults of accelerators."""
    collective: bool = False
    """It measures a collective, of which Prometheus gets bus bandwidth and time by size."""
    series: tuple[Series, ...] = ()
    """What Prometheus gets of its measurements of each device."""
