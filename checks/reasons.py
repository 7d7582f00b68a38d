"""
The one catalogue of reason codes: what each means, whose fault it is unless said otherwise, and what to do.

Codes are stable: hooks, dashboards and people's scripts rely on them.
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
    Reason("WrongResult", "A computation or transfer gave a value that cannot be right.", Blame.NODE, Action.REPLACE),
    Reason(
        "SilentCorruption",
        "The digest of fixed work differs from its repeats or its peers.",
        Blame.NODE,
        Action.REPLACE,
    ),
    Reason(
        "DigestMismatch",
        "Devices, or nodes, disagree and no majority can say which is wrong: one of them.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason(
        "ParityLost",
        "The loss of training steps on a device leaves that of the reference.",
        Blame.NODE,
        Action.REPLACE,
    ),
    Reason("MemoryCorruption", "Memory did not give back what was written.", Blame.NODE, Action.REPLACE),
    Reason("SlowDevice", "A device is slower than its limit.", Blame.NODE, Action.INSPECT),
    Reason("MissingDevice", "A device that should be there is not.", Blame.NODE, Action.REBOOT),
    Reason("MissingDriver", "A device is on the bus and no driver has it.", Blame.NODE, Action.INSPECT),
    Reason("DeviceLost", "A device was there and failed or vanished under the probe.", Blame.NODE, Action.RESET_DEVICE),
    Reason("Stuck", "A probe could not be killed: the device or the kernel holds it.", Blame.NODE, Action.REBOOT),
    # Memory, clocks and links of devices and interfaces.
    Reason("EccErrors", "Memory of a device had errors that could not be corrected.", Blame.NODE, Action.RESET_DEVICE),
    Reason("CorrectedErrors", "Memory of a device corrects more errors than its limit.", Blame.NODE, Action.INSPECT),
    Reason("HardwareErrors", "Work on a device failed by hardware, says its driver.", Blame.NODE, Action.INSPECT),
    Reason("UnhealthyComponent", "The firmware of a device calls a part of it unhealthy.", Blame.NODE, Action.INSPECT),
    Reason("Throttled", "A device runs at lower clocks to protect itself.", Blame.NODE, Action.INSPECT),
    Reason("Overheating", "A device is as hot as it may become, or hotter.", Blame.NODE, Action.INSPECT),
    Reason("LinkDown", "A link of a device or of a network interface is not up.", Blame.NODE, Action.INSPECT),
    Reason("LinkErrors", "A link has more errors or repeats than its limit.", Blame.NODE, Action.INSPECT),
    Reason("LinkDegraded", "A link has fewer lanes or is slower than both its ends allow.", Blame.NODE, Action.INSPECT),
    Reason("NetworkUnusable", "The network library cannot use interfaces that are there.", Blame.NODE, Action.INSPECT),
    Reason(
        "VersionMismatch", "Versions of software are installed that do not work together.", Blame.NODE, Action.INSPECT
    ),
    Reason(
        "StuckCores",
        "Cores are reserved for a process that is gone, and nothing will release them.",
        Blame.NODE,
        Action.RESET_DEVICE,
    ),
    Reason(
        "StuckMemory",
        "Memory of a device is in use although no process has the device open.",
        Blame.NODE,
        Action.RESET_DEVICE,
    ),
    Reason(
        "RecoveryNeeded",
        "The driver of a device says what must be done before it is used again.",
        Blame.NODE,
        Action.RESET_DEVICE,
    ),
    Reason("WrongTopology", "The driver lists other links than the instance type has.", Blame.NODE, Action.INSPECT),
    # Collectives.
    Reason("CollectiveMismatch", "A rank holds a wrong value after a collective.", Blame.NODE, Action.INSPECT),
    Reason(
        "CollectiveFailed",
        "The vendor's own test of a collective failed on this node.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason("RankAbsent", "A rank never joined its group.", Blame.NODE, Action.INSPECT),
    Reason("RankHung", "A rank did not enter or leave an operation in time.", Blame.NODE, Action.INSPECT),
    Reason("RankDied", "The process of a rank ended in the middle of a collective.", Blame.NODE, Action.INSPECT),
    Reason("SlowLink", "A collective is slower than its limit.", Blame.NODE, Action.INSPECT),
    Reason("RankFault", "Collectives of a node fail with this rank, and not without it.", Blame.NODE, Action.INSPECT),
    Reason(
        "SlowRank",
        "A rank is slow: collectives of a node with it and not without, or the steps of a job by its own time.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason(
        "DeviceLinkFault", "Two devices of a node fail together and both pass with others.", Blame.NODE, Action.INSPECT
    ),
    Reason(
        "RanksAmbiguous",
        "One of several ranks of a node is at fault, not known which.",
        Blame.NODE,
        Action.INSPECT,
    ),
    # The host.
    Reason("LowMemory", "Too little memory is free, or too much swap is used.", Blame.NODE, Action.INSPECT),
    Reason("DiskFull", "A file system has too little space or too few inodes.", Blame.NODE, Action.INSPECT),
    Reason("ReadOnlyMount", "A file system that must be writable is mounted read-only.", Blame.NODE, Action.REBOOT),
    Reason("SharedMemorySmall", "/dev/shm is missing or too small for a training job.", Blame.NODE, Action.INSPECT),
    Reason("ClockOffset", "The clock is off by more than its limit.", Blame.NODE, Action.INSPECT),
    Reason("ClockUnsynchronized", "The kernel says that nobody keeps the clock right.", Blame.NODE, Action.INSPECT),
    Reason(
        "KernelFault", "The kernel log holds a line of a known hardware or kernel fault.", Blame.NODE, Action.REBOOT
    ),
    Reason("LoadByOthers", "Processes that are not part of a job use the processors.", Blame.NODE, Action.INSPECT),
    Reason(
        "StuckProcesses",
        "Processes wait in the kernel without end (D state), or zombies pile up.",
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
        "NameResolution", "The node cannot resolve its own name to an address it holds.", Blame.NODE, Action.INSPECT
    ),
    Reason(
        "ScheduledEvent",
        "AWS has said in advance that it will stop, retire, reboot or interrupt the instance.",
        Blame.CONTROL,
        Action.INSPECT,
    ),
    Reason("ProgramFailed", "A configured program reported a problem.", Blame.NODE, Action.INSPECT),
    # Where jobs save and read.
    Reason("StoreNoSpace", "A store has no space left, or less than a save needs.", Blame.PATH, Action.INSPECT),
    Reason("StoreQuota", "The quota on a store is used up.", Blame.PATH, Action.INSPECT),
    Reason("StoreNoInodes", "A store has space and no inodes left.", Blame.PATH, Action.INSPECT),
    Reason("StoreReadOnly", "A store that jobs write to is mounted read-only.", Blame.NODE, Action.INSPECT),
    Reason(
        "StoreNoPermission", "The user of the jobs may not do on a store what a job does.", Blame.PATH, Action.INSPECT
    ),
    Reason("StoreStale", "The server of a store no longer knows what the node has mounted.", Blame.NODE, Action.REBOOT),
    Reason(
        "StoreNotMounted", "A store is not mounted: writes go to the local disk beneath.", Blame.NODE, Action.INSPECT
    ),
    Reason("StoreNotShared", "A node does not see, or not whole, what another one wrote.", Blame.PATH, Action.INSPECT),
    Reason(
        "StoreHangs", "A store did not answer in time, and the process on it was killed.", Blame.PATH, Action.INSPECT
    ),
    Reason("StoreDisconnected", "The connection to a server of a store was lost.", Blame.PATH, Action.INSPECT),
    Reason("StoreSlow", "A store is slower than its limit.", Blame.PATH, Action.INSPECT),
    Reason("StoreMissing", "The path or URL of a store is not there.", Blame.PATH, Action.INSPECT),
    Reason("StoreCorruption", "A store gave back other bytes than were written.", Blame.PATH, Action.INSPECT),
    Reason("StoreError", "A store of jobs failed with another error.", Blame.PATH, Action.RETRY),
    Reason("ShardEmpty", "A file of a checkpoint is empty.", Blame.PATH, Action.INSPECT),
    Reason("ShardShort", "A file of a checkpoint is shorter than its metadata says.", Blame.PATH, Action.INSPECT),
    Reason("ShardMissing", "A file of a checkpoint is not there.", Blame.PATH, Action.INSPECT),
    Reason("ShardUnreadable", "A file of a checkpoint cannot be loaded.", Blame.PATH, Action.INSPECT),
    Reason("CheckpointTorn", "A checkpoint's metadata is missing or not whole.", Blame.PATH, Action.INSPECT),
    # What we could not know.
    Reason("NotYetRun", "The check has not run yet.", Blame.CHECK, Action.RETRY),
    Reason("Stale", "The result is older than it may be.", Blame.CHECK, Action.RETRY),
    Reason("NoData", "The check ran and found no number to judge.", Blame.CHECK, Action.INSPECT),
    Reason("Timeout", "The check did not end in its time.", Blame.CHECK, Action.INSPECT),
    Reason("Crashed", "The process of the check ended in the middle of it.", Blame.CHECK, Action.INSPECT),
    Reason("Garbage", "The process of the check sent something that is not a result.", Blame.CHECK, Action.INSPECT),
    Reason("CheckError", "The check raised an error.", Blame.CHECK, Action.INSPECT),
    Reason(
        "StartFailed",
        "The process of the check could not be started or did not get ready.",
        Blame.CHECK,
        Action.INSPECT,
    ),
    Reason("MissingTool", "A program or library that the check needs is not installed.", Blame.CHECK, Action.INSPECT),
    Reason("NoPermission", "The check may not read what it needs.", Blame.CHECK, Action.INSPECT),
    Reason("CannotAllocate", "The probe could not get the memory that it needs.", Blame.CHECK, Action.RETRY),
    Reason("UnknownInstanceType", "What this node should have is not known.", Blame.CHECK, Action.INSPECT),
    Reason("ColdCache", "The probe's graphs are not compiled yet.", Blame.CHECK, Action.RETRY),
    Reason(
        "CompileFailed",
        "The probe's graphs could not be compiled, or a compilation waits for a lock whose owner is gone.",
        Blame.CHECK,
        Action.INSPECT,
    ),
    Reason("HostFallback", "The host's processor did work that was to test the device.", Blame.CHECK, Action.INSPECT),
    Reason("Busy", "Somebody uses the devices, so the check did not run.", Blame.CHECK, Action.RETRY),
    Reason("NotApplicable", "The check does not concern this node.", Blame.CHECK, Action.NONE),
    Reason("Cancelled", "The run was called off before the check ended.", Blame.CHECK, Action.RETRY),
    Reason("InjectedFault", "A fault that an operator injected.", Blame.NODE, Action.NONE),
    # The fleet.
    Reason("NoChecks", "No check is enabled, so nothing is known.", Blame.CHECK, Action.INSPECT),
    Reason("Silent", "The node has not been heard of for too long.", Blame.CONTROL, Action.INSPECT),
    Reason("UnknownNode", "No node of this name has ever reported.", Blame.CONTROL, Action.NONE),
    Reason("UnknownPool", "No node has ever reported this pool.", Blame.CONTROL, Action.NONE),
    Reason("TooFewNodes", "More nodes are asked for than there are.", Blame.CONTROL, Action.NONE),
    Reason("Quarantined", "The node is kept out of admissions.", Blame.NODE, Action.NONE),
    Reason("InMaintenance", "The node's platform says that it is in maintenance.", Blame.CONTROL, Action.RETRY),
    Reason("Allocated", "A job has the node's devices or is about to.", Blame.CONTROL, Action.RETRY),
    Reason("Reserved", "Another gate has the node.", Blame.CONTROL, Action.RETRY),
    Reason("LeaseNotAcknowledged", "The node did not confirm its lease in time.", Blame.CONTROL, Action.RETRY),
    Reason("DuplicateNode", "Two daemons claim one node name.", Blame.CONTROL, Action.INSPECT),
    Reason(
        "Removing",
        "The gate is rejected; nodes at fault are taken out of the scheduler's way before it says so.",
        Blame.CONTROL,
        Action.RETRY,
    ),
    Reason(
        "Removed",
        "A gate's reject has taken the node out of the scheduler's way for a while.",
        Blame.CONTROL,
        Action.RETRY,
    ),
    Reason("Expired", "The gate's time was up.", Blame.CONTROL, Action.RETRY),
    Reason("MemberMissing", "A member of the group did not come, or stopped polling.", Blame.CONTROL, Action.RETRY),
    Reason("MemberConflict", "Two members claim one rank or one node at once.", Blame.CONTROL, Action.INSPECT),
    # Collectives over several nodes.
    Reason(
        "CollectiveFault",
        "Collectives fail with this node, and its partners pass without it.",
        Blame.NODE,
        Action.INSPECT,
    ),
    Reason("SlowNode", "Collectives are slow with this node, and not without it.", Blame.NODE, Action.INSPECT),
    Reason("PathFault", "Two nodes fail together and both pass with others.", Blame.PATH, Action.INSPECT),
    Reason("TopologyFault", "All nodes that share a switch or another label fail.", Blame.PATH, Action.INSPECT),
    Reason("ScaleFault", "Small groups pass and large ones fail.", Blame.PATH, Action.INSPECT),
    Reason("Ambiguous", "One of several nodes is at fault, and nobody can say which.", Blame.PATH, Action.INSPECT),
    Reason("Undecided", "The collectives failed and nothing more could be found out.", Blame.PATH, Action.RETRY),
    Reason("CheckUnknown", "A node does not know a check that nodes run together.", Blame.CONTROL, Action.INSPECT),
    Reason("PassingFault", "The collectives failed once and passed when repeated.", Blame.PATH, Action.INSPECT),
    Reason("Superseded", "A later attempt of the same job has taken the gate's place.", Blame.CONTROL, Action.NONE),
    Reason("Released", "The one who asked withdrew the gate.", Blame.CONTROL, Action.NONE),
    Reason("Recovering", "The aggregator does not know its fleet again yet.", Blame.CONTROL, Action.RETRY),
    Reason("Override", "A person admitted the job by hand.", Blame.CONTROL, Action.NONE),
    Reason("Observed", "Observe mode admits whatever it sees.", Blame.CONTROL, Action.NONE),
    Reason("Unreachable", "The aggregator cannot be reached.", Blame.CONTROL, Action.RETRY),
    Reason("StoreFailed", "The aggregator cannot write to its database.", Blame.CONTROL, Action.RETRY),
    Reason("InternalError", "The aggregator failed in a way that nobody foresaw.", Blame.CONTROL, Action.RETRY),
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
