"""Known faults in the kernel log. Lines that are there stay faults until the next boot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Action, Context, Finding, Measurement, Status, check
from checks.host import HostError

WORST = 16


@dataclass(frozen=True)
class Pattern:
    """A kind of line. `status` FAIL marks the node, WARN is shown."""

    name: str
    regex: re.Pattern[str]
    status: Status
    action: Action


def _pattern(name: str, regex: str, status: Status, action: Action) -> Pattern:
    return Pattern(name, re.compile(regex), status, action)


# Texts of the Linux kernel and of the vendors' drivers; the source is named where it is not the kernel's own.
PATTERNS = (
    _pattern("machine check", r"mce: \[Hardware Error\]|Machine check events logged", Status.WARN, Action.INSPECT),
    _pattern("machine check", r"Uncorrected hardware memory error|Memory failure: 0x", Status.FAIL, Action.REPLACE),
    _pattern("uncorrected ECC", r"EDAC .*\bUE\b", Status.FAIL, Action.REPLACE),
    _pattern("corrected ECC", r"EDAC .*\bCE\b", Status.WARN, Action.INSPECT),
    _pattern("hung task", r"blocked for more than \d+ seconds", Status.FAIL, Action.REBOOT),
    _pattern("lockup", r"soft lockup|hard LOCKUP|rcu.*detected stalls", Status.FAIL, Action.REBOOT),
    _pattern("kernel bug", r"^(BUG|Oops|general protection fault|kernel BUG at)\b", Status.FAIL, Action.REBOOT),
    _pattern("out of memory", r"Out of memory: Killed process|oom-kill:", Status.WARN, Action.INSPECT),
    _pattern("disk error", r"(critical medium error|I/O error), dev \w+", Status.FAIL, Action.REPLACE),
    _pattern("disk error", r"nvme\w+: .*(controller is down|Abort status|Removing after)", Status.FAIL, Action.REPLACE),
    _pattern("file system error", r"EXT4-fs error|XFS .*[Cc]orruption|BTRFS.*error", Status.FAIL, Action.INSPECT),
    _pattern(
        "PCIe fatal", r"AER: .*(Uncorrected \(Fatal\)|Fatal error)|pcieport.*Link Down", Status.FAIL, Action.REPLACE
    ),
    _pattern("overheating", r"temperature above threshold|thermal.*critical temperature", Status.WARN, Action.INSPECT),
    # aws-neuronx-dkms and its runtime write these when hardware fails under a job.
    _pattern("Neuron hardware error", r"NEURON_HW_ERR=\w+", Status.FAIL, Action.REPLACE),
    # NVIDIA, "XID Errors": 48 double-bit ECC, 74 NVLink, 79 off the bus, 94 and 95 ECC, 119 and 120 GSP.
    _pattern("GPU Xid", r"NVRM: Xid .*: (48|63|64|74|79|94|95|119|120)\b", Status.FAIL, Action.RESET_DEVICE),
)

# Lines that look like faults and are none; they win over the patterns.
BENIGN = (
    r"mce: CPU.*: Core temperature/speed normal",
    r"EDAC MC: Ver:",
    r"EDAC .*: Giving out device",
    r"Failed to process command DEREG_MR \(opcode 8\)",
    r"npid_detach",
    r"ndma_memcpy_wait_for_completion .* completion timeout",
    r"mc_alloc: device mempool",
    r"ACPI BIOS Error \(bug\)",
    r"Buffer I/O error on dev (loop|sr|fd)\d+",
    r"I/O error, dev (loop|sr|fd)\d+",
)


@dataclass(frozen=True)
class Params:
    """More benign lines, and whether the log must be readable."""

    benign: tuple[str, ...] = ()  # regular expressions
    required: bool = False  # True: not being able to read the log is unknown instead of a warning


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def kernel_log(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The kernel has logged no known fault since boot.

    Every kind is told once, with the number of its lines and the last of them. A log that may not be read is a warning:
    unprivileged containers see none, and the active checks stand for themselves. Set `required` where the daemon runs
    as root.

    Reads:   /dev/kmsg without waiting.
    Judges:  fail or warn KernelFault by kind, with what to do | warn NoPermission, or unknown if `required`.
    Cost:    about 1 ms for a thousand lines; harmless to jobs.
    """
    try:
        lines = ctx.host.kernel_log()
    except HostError as error:
        yield Finding(
            status=Status.UNKNOWN if ctx.params.required else Status.WARN,
            reason=error.reason,
            message=f"the kernel log cannot be read, so faults in it go unseen: {error}",
            target="node",
        )
        return
    counted: dict[str, tuple[Pattern, int, str]] = {}
    for _, text in lines:
        pattern = judge_line(text, ctx.params.benign)
        if pattern is not None:
            key = f"{pattern.name}/{pattern.status.value}"
            counted[key] = (pattern, counted.get(key, (pattern, 0, ""))[1] + 1, text)
    for pattern, count, text in list(counted.values())[:WORST]:
        yield Finding(
            status=pattern.status,
            reason="KernelFault",
            message=f"{pattern.name}: {count} lines since boot, the last: {text.strip()[:200]}",
            target="node",
            action=pattern.action,
        )
    if not counted:
        measured = Measurement(
            name="kernel_log_lines_count", value=float(len(lines)), lower=None, upper=None, origin="none"
        )
        yield Finding(
            status=Status.PASS,
            reason=None,
            message=f"no known fault in {len(lines)} lines since boot",
            target="node",
            measurements=(measured,),
        )


def judge_line(text: str, benign: tuple[str, ...] = ()) -> Pattern | None:
    """The kind of fault that a line tells of; None for an ordinary or a benign one."""
    if _INTERESTING.search(text) is None:
        return None
    if any(re.search(line, text) for line in (*BENIGN, *benign)):
        return None
    return next((pattern for pattern in PATTERNS if pattern.regex.search(text)), None)


# One pass over a line finds out whether it can be of any kind: nearly none is.
_INTERESTING = re.compile("|".join(f"(?:{pattern.regex.pattern})" for pattern in PATTERNS))
