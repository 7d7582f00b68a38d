"""
What lines of the kernel log mean: known faults, and lines that look like faults and are none.

Texts of the Linux kernel (the version does not matter much: they have stood for years) and of the vendors' drivers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from checks.contract import Action, Status

HOUR = 3600.0
DAY = 24 * HOUR
MAX_CHARACTERS = 1000  # of a line; the kernel's own end there (LOG_LINE_MAX), and searching stays quick


@dataclass(frozen=True)
class Pattern:
    """
    A kind of line. `status` FAIL marks the node, WARN is shown.

    `window_seconds` is for how long a line counts: None until the next boot, because the damage stays; else what
    lasts says so again (the kernel repeats it, or `processes` sees it), and what has passed is no fault any more.
    """

    name: str
    regex: str
    status: Status
    action: Action
    window_seconds: float | None = None


_FAIL, _WARN = Status.FAIL, Status.WARN

PATTERNS = (
    # Memory and processor.
    Pattern("machine check", r"Uncorrected hardware memory error|Memory failure: 0x", _FAIL, Action.REPLACE),
    Pattern("machine check", r"mce: \[Hardware Error\]|Machine check events logged", _WARN, Action.INSPECT),
    Pattern("uncorrected ECC", r"EDAC \S+: [1-9]\d* UE\b", _FAIL, Action.REPLACE),
    Pattern("corrected ECC", r"EDAC \S+: [1-9]\d* CE\b", _WARN, Action.INSPECT, DAY),
    Pattern("overheating", r"temperature above threshold|critical temperature reached", _WARN, Action.INSPECT, HOUR),
    # The kernel itself.
    Pattern("hung task", r"blocked for more than \d+ seconds", _FAIL, Action.REBOOT, HOUR),
    Pattern("lockup", r"soft lockup|hard LOCKUP|rcu.*detected (expedited )?stall", _FAIL, Action.REBOOT, HOUR),
    Pattern(
        "kernel bug",
        r"^(BUG: |Oops: |general protection fault\b|kernel BUG at |Internal error: )",
        _FAIL,
        Action.REBOOT,
    ),
    Pattern("out of memory", r"Out of memory: Killed process|oom-kill:", _WARN, Action.INSPECT, HOUR),
    # Disks and file systems.
    Pattern("disk error", r"(critical (medium|target) error|I/O error), dev \w+", _FAIL, Action.REPLACE),
    Pattern("disk error", r"nvme.*(controller is down|Removing after probe failure)", _FAIL, Action.REPLACE),
    Pattern("slow disk", r"nvme.*(timeout, (aborting|reset controller)|Abort status)", _WARN, Action.INSPECT, HOUR),
    Pattern("file system error", r"EXT4-fs error|EXT4-fs .*Remounting filesystem read-only", _FAIL, Action.INSPECT),
    Pattern(
        "file system error",
        r"XFS .*([Cc]orruption|has been shut down)|BTRFS (error|critical)",
        _FAIL,
        Action.INSPECT,
    ),
    # The PCI bus: PCIe AER, fatal ones only.
    Pattern(
        "PCIe fatal",
        r"AER: .*(Uncorrect(ed|able) \(Fatal\)|Fatal error)|severity=Uncorrect(ed|able) \(Fatal\)",
        _FAIL,
        Action.REPLACE,
    ),
    # aws-neuronx-dkms and its runtime write these when hardware fails under a job.
    Pattern("Neuron hardware error", r"NEURON_HW_ERR=\w+", _FAIL, Action.REPLACE),
    # NVIDIA, "XID Errors": 48 double-bit ECC, 63 and 64 row remapping, 74 NVLink, 79 off the bus, 94 and 95 ECC, 119
    # and 120 GSP.
    Pattern("GPU Xid", r"NVRM: Xid \(.*?\): (48|63|64|74|79|94|95|119|120)\b", _FAIL, Action.RESET_DEVICE),
)

# They win over the patterns.
BENIGN = (
    r"temperature/speed normal",
    r"Failed to process command DEREG_MR \(opcode 8\)",
    r"npid_detach",
    r"ndma_memcpy_wait_for_completion .* completion timeout",
    r"mc_alloc: device mempool",
    # A container that hits its own limit is no fault of the node.
    r"Memory cgroup out of memory|constraint=CONSTRAINT_MEMCG",
    # Devices that come and go, and images.
    r"I/O error,? (on )?dev (loop|sr|fd)\d+",
)


def find_fault(text: str, benign: tuple[str, ...] = ()) -> Pattern | None:
    """The kind of fault that a line tells of; None for an ordinary or a benign one."""
    text = text[:MAX_CHARACTERS]
    if _INTERESTING.search(text) is None:
        return None
    if any(re.search(line, text) for line in (*BENIGN, *benign)):
        return None
    return next((pattern for pattern in PATTERNS if re.search(pattern.regex, text)), None)


# One pass over a line finds out whether it can be of any kind: nearly none is.
_INTERESTING = re.compile("|".join(f"(?:{pattern.regex})" for pattern in PATTERNS))
