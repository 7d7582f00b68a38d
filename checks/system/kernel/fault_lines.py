"""
What lines of the kernel log mean: known faults, and lines that look like faults and are none.

Texts of the Linux kernel (the version does not matter much: they have stood for years) and of the vendors' drivers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from checks.contract import Action, Blame, Status

HOUR = 3600.0
DAY = 24 * HOUR
GONE = "errors of a disk that is gone"
MAX_CHARACTERS = 1000  # of a line; the kernel's own end there (LOG_LINE_MAX), and searching stays quick


@dataclass(frozen=True)
class Pattern:
    """
    A kind of line. `status` FAIL marks the node, WARN is shown.

    `window_seconds` is for how long a line counts: None until the next boot, because the damage stays; else what
    lasts says so again (the kernel repeats it, or `processes` sees it), and what has passed is no fault any more.
    `blame` None is the reason's own. `device` is the accelerator whose device the line may name. `reset_cures`: a reset
    of the device ends it (`fault_stages`).
    """

    name: str
    regex: str
    status: Status
    action: Action
    window_seconds: float | None = None
    blame: Blame | None = None
    device: str | None = None
    reset_cures: bool = False


def _neuron(
    name: str,
    kinds: str,
    action: Action,
    status: Status = Status.FAIL,
    window_seconds: float | None = None,
    blame: Blame | None = None,
    *,
    reset_cures: bool = False,
) -> Pattern:
    regex = rf"NEURON_HW_ERR={kinds}"
    return Pattern(f"Neuron {name}", regex, status, action, window_seconds, blame, "neuron", reset_cures)


def _driver(name: str, regex: str) -> Pattern:
    """The Neuron driver's own words, which need no job: it is loaded again, which resets all devices."""
    return Pattern(f"Neuron {name}", regex, Status.FAIL, Action.REBOOT, None, None, "neuron", reset_cures=True)


def _xid(codes: str) -> str:
    return rf"NVRM: Xid \(.*?\): ({codes})\b"


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
        r"^BUG: |^Oops: |^general protection fault\b|^kernel BUG at |^Internal error: ",
        _FAIL,
        Action.REBOOT,
    ),
    Pattern("out of memory", r"Out of memory: Killed process|oom-kill:", _WARN, Action.INSPECT, HOUR),
    # Disks and file systems.
    Pattern("disk error", r"critical (medium|target) error, dev \w+|I/O error, dev \w+", _FAIL, Action.REPLACE),
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
    # The Neuron runtime writes these through the driver when hardware fails under a job. Kinds: the configuration of
    # AWS's node problem detector; what to do: nrt-troubleshoot of the Neuron SDK.
    _neuron("SRAM error", r"SRAM_UNCORRECTABLE_ERROR\b", Action.REPLACE),
    _neuron("core error", r"NC_UNCORRECTABLE_ERROR\b", Action.REPLACE),
    _neuron("HBM error", r"HBM_UNCORRECTABLE_ERROR\b", Action.REPLACE),
    # AWS advises to replace. But a program can cause it, and a reset of the device cures it: aws-neuron-sdk issue 1390.
    _neuron("DMA error", r"DMA_(ERROR|ABORT)\b", Action.RESET_DEVICE, reset_cures=True),
    # Every node of a job that hangs may write it, for a cause that sits on another: so it accuses none, and passes.
    _neuron("hang in collectives", r"HANG_ON_COLLECTIVES\b", Action.INSPECT, _WARN, HOUR, Blame.PATH),
    _neuron("hardware error of an unknown kind", "", Action.INSPECT),
    # What the driver says itself. Source: aws-neuron-driver, neuron_cdev.c (ncdev_open), neuron_reset.c
    # (nr_reset_thread_fn), v2/neuron_dhal_v2.c and its successors (neuron_pci_get_device_id).
    _driver("device in an invalid state", r"\bnd\d+ is in an invalid state"),
    _driver(
        "device that could not be reset",
        r"\bnd\d+: (reset request \d+ (was initiated, but failed to complete|failed\b)|device didnt come out reset"
        r"|failed to (initialize dma after reset|complete post reset configuration))",
    ),
    _driver(
        "device without an index",
        r"neuron.*(Could not retrieve device index|duplicate routing id \d+ found|Invalid device index \d+)",
    ),
    # What to do is NVIDIA's, "Analyzing Xid Errors with the Xid Catalog". Those of programs (13, 31, 43, 45) are none.
    # 64: a row of memory could not be remapped.
    Pattern("GPU Xid remapping failed", _xid("64"), _FAIL, Action.REPLACE),
    # 79: off the bus, 151: key rotation; 154 names what is needed.
    Pattern("GPU Xid reboot", _xid(r"79|151|154\b.*\bto 0x\w+ \(Node Reboot Required"), _FAIL, Action.REBOOT),
    Pattern("GPU Xid power", _xid("54"), _FAIL, Action.INSPECT),
    # 46 and 62 stopped, 48 and 95 and 140 memory, 74 and 155 and 144 to 150 NVLink, 109 and 110 and 158 time-out and
    # security, 119 and 120 GSP, 136 link training, 143 start, 156 retirement.
    Pattern(
        "GPU Xid",
        _xid(
            r"46|48|62|74|95|109|110|119|120|136|140|143|155|156|158|(14[4-9]|150)\b.*\bFatal"
            r"|154\b.*\bto 0x\w+ \((GPU Reset Required|Drain and Reset)"
        ),
        _FAIL,
        Action.RESET_DEVICE,
    ),
    # Of an NVSwitch. Source: NVIDIA Fabric Manager User Guide, SXid errors: after a fatal one GPUs and switches need a
    # reset; each error has other lines with its data, and others are `Non-fatal`. 20034 is a link that went down, also
    # because the GPU at its other end was reset: `gpu_links` sees whether it is up.
    Pattern("GPU Xid of an NVSwitch", r"SXid \(.*?\): (?!20034\b)\d+, Fatal\b", _FAIL, Action.REBOOT),
    # 63: a row will be remapped at the next reset (`gpu_memory` says whether it waits); 92: many errors that could be
    # corrected; 94: an error that hit one program alone.
    Pattern("GPU Xid memory", _xid("63|92|94"), _WARN, Action.INSPECT),
    Pattern("GPU Xid NVLink", _xid("14[4-9]|150"), _WARN, Action.INSPECT, HOUR),
)

# They win over the patterns.
BENIGN = (
    r"temperature/speed normal",
    r"Failed to process command DEREG_MR \(opcode 8\)",
    r"npid_detach",
    r"ndma_memcpy_wait_for_completion\b.*\bcompletion timeout",
    r"mc_alloc: device mempool",
    # A container that hits its own limit is no fault of the node.
    r"Memory cgroup out of memory|constraint=CONSTRAINT_MEMCG",
    # Devices that come and go, and images.
    r"I/O error,? (on )?dev (loop|sr|fd)\d+",
    # What lies behind another device or the network, which tells itself what is wrong with it; and a hint that a device
    # did not take, which loses nothing.
    r"error,? (on )?dev (nbd|rbd|dm-)\d+",
    r"error, dev \w+, .*\bop 0x3:\(DISCARD\)",
)


def find_fault(text: str, benign: Sequence[str] = (), devices: Sequence[str] | None = None) -> Pattern | None:
    """
    The kind of fault that a line tells of; None for an ordinary or a benign one.

    Errors of a block device that is none of `devices` any more, and of the file system on it, are a warning: a volume
    that was taken away while it was in use has them as well. None: it is not known which there are.
    """
    text = text[:MAX_CHARACTERS]
    if _INTERESTING.search(text) is None:
        return None
    if any(re.search(line, text) for line in (*BENIGN, *benign)):
        return None
    pattern = next((pattern for pattern in PATTERNS if re.search(pattern.regex, text)), None)
    named = _BLOCK_DEVICE.search(text) if pattern is not None and pattern.name in _OF_DISKS else None
    if pattern is None or named is None or devices is None or named[1] in devices:
        return pattern
    return replace(pattern, name=GONE, status=_WARN, action=Action.INSPECT, window_seconds=HOUR)


_OF_DISKS = ("disk error", "file system error")
# `error, dev nvme1n1`, `EXT4-fs error (device nvme1n1)`, `EXT4-fs (nvme1n1)`, `XFS (dm-0)`, `BTRFS error (device sdb`.
_BLOCK_DEVICE = re.compile(r"(?:error, dev |\(device |(?:EXT4-fs|XFS) \()([\w-]+)", re.ASCII)

# One pass over a line finds out whether it can be of any kind: nearly none is. It leaves out the anchors (^ and \b), so
# that every alternative begins with a letter: the engine then skips to such letters, which is five times as fast.
_INTERESTING = re.compile("|".join(re.sub(r"\\b|\^", "", pattern.regex) for pattern in PATTERNS))
