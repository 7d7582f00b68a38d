"""
The catalogue of reason codes: the meaning of each, its default blame, and what to do.

Codes are stable: hooks, dashboards and scripts rely on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checks.contract import Action, Blame


@dataclass(frozen=True)
class Reason:
    """`meaning` is one sentence for the docs; `blame` and `action` are the defaults."""

    code: str
    meaning: str
    blame: Blame
    action: Action


_ALL = (
    # What a device or a node did wrong.
    Reason("WrongResult", "A computation or transfer returned an impossible value.", Blame.NODE, Action.REPLACE),
    Reason(
        "SilentCorruption",
        "The digest of a fixed computation differs between repeats or from its peers.",
        Blame.NODE,
        Action.REPLACE,
    ),
    Reason(
        "DigestMismatch",
        "Devices or nodes disagree, and no majority shows which of them is wrong.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason(
        "ParityLost",
        "The loss of training steps on a device diverges from the reference.",
        Blame.NODE,
        Action.REPLACE,
    ),
    Reason("MemoryCorruption", "Memory returned something other than what was written.", Blame.NODE, Action.REPLACE),
    Reason("SlowDevice", "A device is slower than its limit.", Blame.NODE, Action.INSPECT),
    Reason("MissingDevice", "An expected device is missing.", Blame.NODE, Action.REBOOT),
    Reason("MissingDriver", "A device is on the bus, but no driver is bound to it.", Blame.NODE, Action.INSPECT),
    Reason("DeviceLost", "A device failed or disappeared during the probe.", Blame.NODE, Action.RESET_DEVICE),
    Reason(
        "Stuck", "A probe could not be killed because the device or the kernel blocks it.", Blame.NODE, Action.REBOOT
    ),
    # Memory, clocks and links of devices and interfaces.
    Reason("EccErrors", "Device memory had uncorrectable errors.", Blame.NODE, Action.RESET_DEVICE),
    Reason("CorrectedErrors", "Device memory corrects more errors than its limit allows.", Blame.NODE, Action.INSPECT),
    Reason(
        "HardwareErrors",
        "The driver reports that work on a device failed because of hardware.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason(
        "UnhealthyComponent", "The firmware of a device reports an unhealthy component.", Blame.NODE, Action.INSPECT
    ),
    Reason("Throttled", "A device has lowered its clocks to protect itself.", Blame.NODE, Action.INSPECT),
    Reason("Overheating", "A device has reached or exceeded its maximum temperature.", Blame.NODE, Action.INSPECT),
    Reason("LinkDown", "A link of a device or network interface is down.", Blame.NODE, Action.INSPECT),
    Reason(
        "LinkErrors", "A link has more errors or retransmissions than its limit allows.", Blame.NODE, Action.INSPECT
    ),
    Reason(
        "LinkDegraded", "A link has fewer lanes or a lower speed than both ends support.", Blame.NODE, Action.INSPECT
    ),
    Reason(
        "NetworkUnusable", "The network library cannot use interfaces that are present.", Blame.NODE, Action.INSPECT
    ),
    Reason("VersionMismatch", "Incompatible software versions are installed.", Blame.NODE, Action.INSPECT),
    Reason(
        "StuckCores",
        "Cores are reserved for a process that has exited and are not released.",
        Blame.NODE,
        Action.RESET_DEVICE,
    ),
    Reason(
        "StuckMemory",
        "Device memory is in use although no process has the device open.",
        Blame.NODE,
        Action.RESET_DEVICE,
    ),
    Reason(
        "RecoveryNeeded",
        "The driver requests an action before the device is used again.",
        Blame.NODE,
        Action.RESET_DEVICE,
    ),
    Reason(
        "WrongTopology", "The links reported by the driver do not match the instance type.", Blame.NODE, Action.INSPECT
    ),
    # Collectives.
    Reason("CollectiveMismatch", "A rank holds a wrong value after a collective.", Blame.NODE, Action.INSPECT),
    Reason(
        "CollectiveFailed",
        "The vendor's own collective test failed on this node.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason("RankAbsent", "A rank never joined its group.", Blame.NODE, Action.INSPECT),
    Reason("RankHung", "A rank did not enter or leave an operation in time.", Blame.NODE, Action.INSPECT),
    Reason("RankDied", "The process of a rank exited during a collective.", Blame.NODE, Action.INSPECT),
    Reason("SlowLink", "A collective is slower than its limit.", Blame.NODE, Action.INSPECT),
    Reason("RankFault", "Collectives on a node fail with this rank and pass without it.", Blame.NODE, Action.INSPECT),
    Reason(
        "SlowRank",
        "A rank is slow: collectives are slow only with it, or its own time in a job's steps is longer than its "
        "peers'.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason(
        "DeviceLinkFault", "Two devices of a node fail together, and both pass with others.", Blame.NODE, Action.INSPECT
    ),
    Reason(
        "RanksAmbiguous",
        "One of several ranks of a node is at fault; which one is unknown.",
        Blame.NODE,
        Action.INSPECT,
    ),
    # The host.
    Reason("LowMemory", "Too little memory is free, or too much swap is in use.", Blame.NODE, Action.INSPECT),
    Reason("DiskFull", "A file system has too little space or too few inodes left.", Blame.NODE, Action.INSPECT),
    Reason("ReadOnlyMount", "A file system that must be writable is mounted read-only.", Blame.NODE, Action.REBOOT),
    Reason("SharedMemorySmall", "/dev/shm is missing or too small for a training job.", Blame.NODE, Action.INSPECT),
    Reason("ClockOffset", "The clock is off by more than its limit.", Blame.NODE, Action.INSPECT),
    Reason("ClockUnsynchronized", "The kernel reports that the clock is not synchronized.", Blame.NODE, Action.INSPECT),
    Reason("KernelFault", "The kernel log contains a known hardware or kernel fault.", Blame.NODE, Action.REBOOT),
    Reason("LoadByOthers", "Processes outside any job use the processors.", Blame.NODE, Action.INSPECT),
    Reason(
        "StuckProcesses",
        "Processes are stuck in the kernel (D state), or zombies accumulate.",
        Blame.NODE,
        Action.REBOOT,
    ),
    Reason(
        "LimitTooLow",
        "A process limit (memlock, open files) is too low for a training job.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason(
        "NameResolution", "The node cannot resolve its own name to one of its addresses.", Blame.NODE, Action.INSPECT
    ),
    Reason(
        "ScheduledEvent",
        "AWS has announced that it will stop, retire, reboot or interrupt the instance.",
        Blame.CONTROL,
        Action.INSPECT,
    ),
    Reason("ProgramFailed", "A configured program reported a problem.", Blame.NODE, Action.INSPECT),
    # Where jobs save and read.
    Reason("StoreNoSpace", "A store has no space left, or less than a checkpoint needs.", Blame.PATH, Action.INSPECT),
    Reason("StoreQuota", "The quota on a store is exhausted.", Blame.PATH, Action.INSPECT),
    Reason("StoreNoInodes", "A store has space left but no inodes.", Blame.PATH, Action.INSPECT),
    Reason("StoreReadOnly", "A store that jobs write to is mounted read-only.", Blame.NODE, Action.INSPECT),
    Reason(
        "StoreNoPermission", "The jobs' user lacks permissions on a store that jobs need.", Blame.PATH, Action.INSPECT
    ),
    Reason(
        "StoreStale", "The file handle on a store is stale: the server no longer knows it.", Blame.NODE, Action.REBOOT
    ),
    Reason("StoreNotMounted", "A store is not mounted, so writes go to the local disk.", Blame.NODE, Action.INSPECT),
    Reason(
        "StoreNotShared",
        "A node does not see what another node wrote, or sees only part of it.",
        Blame.PATH,
        Action.INSPECT,
    ),
    Reason(
        "StoreHangs", "A store did not respond in time; the process using it was killed.", Blame.PATH, Action.INSPECT
    ),
    Reason("StoreDisconnected", "The connection to a store's server was lost.", Blame.PATH, Action.INSPECT),
    Reason("StoreSlow", "A store is slower than its limit.", Blame.PATH, Action.INSPECT),
    Reason("StoreMissing", "The path or URL of a store does not exist.", Blame.PATH, Action.INSPECT),
    Reason("StoreCorruption", "A store returned different bytes than were written.", Blame.PATH, Action.INSPECT),
    Reason("StoreError", "A store failed with an error that has no code of its own.", Blame.PATH, Action.RETRY),
    Reason("ShardEmpty", "A file of a checkpoint is empty.", Blame.PATH, Action.INSPECT),
    Reason("ShardShort", "A file of a checkpoint is shorter than its metadata says.", Blame.PATH, Action.INSPECT),
    Reason("ShardMissing", "A file of a checkpoint is missing.", Blame.PATH, Action.INSPECT),
    Reason("ShardUnreadable", "A file of a checkpoint cannot be loaded.", Blame.PATH, Action.INSPECT),
    Reason("CheckpointTorn", "A checkpoint's metadata is missing or incomplete.", Blame.PATH, Action.INSPECT),
    # What we could not know.
    Reason("NotYetRun", "The check has not run yet.", Blame.CHECK, Action.RETRY),
    Reason("Stale", "The result is too old.", Blame.CHECK, Action.RETRY),
    Reason("NoData", "The check ran but found no value to judge.", Blame.CHECK, Action.INSPECT),
    Reason("Timeout", "The check did not finish in time.", Blame.CHECK, Action.INSPECT),
    Reason("Crashed", "The process of the check exited before it finished.", Blame.CHECK, Action.INSPECT),
    Reason("Garbage", "The process of the check sent something other than a result.", Blame.CHECK, Action.INSPECT),
    Reason("CheckError", "The check raised an error.", Blame.CHECK, Action.INSPECT),
    Reason(
        "StartFailed",
        "The process of the check could not be started or did not become ready.",
        Blame.CHECK,
        Action.INSPECT,
    ),
    Reason("MissingTool", "A program or library that the check needs is not installed.", Blame.CHECK, Action.INSPECT),
    Reason("NoPermission", "The check lacks permission to read what it needs.", Blame.CHECK, Action.INSPECT),
    Reason("CannotAllocate", "The probe could not allocate the memory it needs.", Blame.CHECK, Action.RETRY),
    Reason(
        "UnknownInstanceType",
        "The instance type is unknown, so its hardware cannot be verified.",
        Blame.CHECK,
        Action.INSPECT,
    ),
    Reason("ColdCache", "The probe's graphs have not been compiled yet.", Blame.CHECK, Action.RETRY),
    Reason(
        "CompileFailed",
        "The probe's graphs could not be compiled, or a compilation waits for the lock of a process that has exited.",
        Blame.CHECK,
        Action.INSPECT,
    ),
    Reason("HostFallback", "The host's processor did work that was meant for the device.", Blame.CHECK, Action.INSPECT),
    Reason("Busy", "The devices are in use, so the check did not run.", Blame.CHECK, Action.RETRY),
    Reason("NotApplicable", "The check does not apply to this node.", Blame.CHECK, Action.NONE),
    Reason("Cancelled", "The run was cancelled before the check finished.", Blame.CHECK, Action.RETRY),
    Reason("InjectedFault", "A fault that an operator injected.", Blame.NODE, Action.NONE),
    # The fleet.
    Reason("NoChecks", "No check is enabled, so the node's health is unknown.", Blame.CHECK, Action.INSPECT),
    Reason("Silent", "The node has not reported for too long.", Blame.CONTROL, Action.INSPECT),
    Reason("UnknownNode", "No node of this name has ever reported.", Blame.CONTROL, Action.NONE),
    Reason("UnknownPool", "No node has ever reported this pool.", Blame.CONTROL, Action.NONE),
    Reason("TooFewNodes", "More nodes were requested than exist.", Blame.CONTROL, Action.NONE),
    Reason("Quarantined", "The node is quarantined and receives no jobs.", Blame.NODE, Action.NONE),
    Reason("InMaintenance", "The node's platform reports that it is in maintenance.", Blame.CONTROL, Action.RETRY),
    Reason("Allocated", "A job is using the node's devices, or is about to.", Blame.CONTROL, Action.RETRY),
    Reason("Reserved", "Another gate has reserved the node.", Blame.CONTROL, Action.RETRY),
    Reason("LeaseNotAcknowledged", "The node did not confirm its lease in time.", Blame.CONTROL, Action.RETRY),
    Reason("DuplicateNode", "Two daemons use the same node name.", Blame.CONTROL, Action.INSPECT),
    Reason(
        "Removing",
        "The gate is rejected; it answers once the nodes at fault are out of the scheduler's reach.",
        Blame.CONTROL,
        Action.RETRY,
    ),
    Reason(
        "Removed",
        "A gate's rejection has temporarily taken the node out of the scheduler's reach.",
        Blame.CONTROL,
        Action.RETRY,
    ),
    Reason("Expired", "The gate timed out.", Blame.CONTROL, Action.RETRY),
    Reason("MemberMissing", "A member of the group did not arrive or stopped polling.", Blame.CONTROL, Action.RETRY),
    Reason("MemberConflict", "Two members claim the same rank or node.", Blame.CONTROL, Action.INSPECT),
    # Collectives over several nodes.
    Reason(
        "CollectiveFault",
        "Collectives fail with this node, and its partners pass without it.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason("SlowNode", "Collectives are slow with this node and not without it.", Blame.NODE, Action.INSPECT),
    Reason("PathFault", "Two nodes fail together, and both pass with others.", Blame.PATH, Action.INSPECT),
    Reason(
        "TopologyFault", "All nodes behind one switch, or with another shared label, fail.", Blame.PATH, Action.INSPECT
    ),
    Reason("ScaleFault", "Small groups pass, but large groups fail.", Blame.PATH, Action.INSPECT),
    Reason(
        "Ambiguous", "One of several nodes is at fault; which one cannot be determined.", Blame.PATH, Action.INSPECT
    ),
    Reason("Undecided", "The collectives failed, and the cause could not be determined.", Blame.PATH, Action.RETRY),
    Reason("CheckUnknown", "A node does not have a check that nodes run together.", Blame.CONTROL, Action.INSPECT),
    Reason(
        "PassingFault", "The collectives failed once and passed when they were repeated.", Blame.PATH, Action.INSPECT
    ),
    Reason("Superseded", "A later attempt of the same job replaced the gate.", Blame.CONTROL, Action.NONE),
    Reason("Released", "The caller withdrew the gate.", Blame.CONTROL, Action.NONE),
    Reason(
        "Recovering",
        "The aggregator has restarted and is waiting for its nodes to report.",
        Blame.CONTROL,
        Action.RETRY,
    ),
    Reason("Override", "An operator admitted the job by hand.", Blame.CONTROL, Action.NONE),
    Reason("Observed", "Observe mode admits every job.", Blame.CONTROL, Action.NONE),
    Reason("Unreachable", "The aggregator cannot be reached.", Blame.CONTROL, Action.RETRY),
    Reason("StoreFailed", "The aggregator cannot write to its database.", Blame.CONTROL, Action.RETRY),
    Reason("InternalError", "The aggregator failed with an unexpected internal error.", Blame.CONTROL, Action.RETRY),
)

REASONS: Mapping[str, Reason] = {reason.code: reason for reason in _ALL}


def blame_of(code: str | None) -> Blame:
    """The default blame of a reason; CHECK for a code that the catalogue does not have (third-party checks)."""
    known = REASONS.get(code or "")
    return known.blame if known else Blame.CHECK


def action_of(code: str | None) -> Action:
    """The default action of a reason; INSPECT for a code that the catalogue does not have."""
    known = REASONS.get(code or "")
    return known.action if known else Action.INSPECT
