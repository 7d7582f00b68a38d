"""Known faults in the kernel log: which lines mean which, and which of them a reset of the device cures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from checks.contract import (
    DEVICE_RESETS,
    Action,
    Blame,
    Context,
    Evidence,
    Finding,
    Measurement,
    Previous,
    Status,
    check,
)
from checks.host.machine import Host, HostError, LogLine
from checks.system.bounds import is_required
from checks.system.neuron.neuron_log import NODE, Devices, ResetReader, devices_of, last_resets, target_of

# What lines of the kernel log mean: known faults, and lines that look like faults and are none.


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


# Faults that a reset of the device cures: reset it first, probe it again, and replace it only when the fault comes
# back.


Stage = Literal["new", "reset", "again"]
Key = tuple[str, str]  # name of the pattern, target


class Seen(NamedTuple):
    """What an earlier look knew of a fault; `seconds` is when its last line came, None where that is not known."""

    stage: Stage
    seconds: float | None


def to_stage(value: object) -> Stage:
    """A stage out of evidence; `new` where it has none."""
    return next((stage for stage in get_args(Stage) if stage == value), "new")


def find_stages(
    lines: Sequence[LogLine], earlier: Mapping[Key, Seen], devices: Devices, benign: Sequence[str] = ()
) -> dict[Key, Stage]:
    """
    The stage of each fault that a reset cures.

    What an earlier look has seen counts where its lines are no longer in the log, because then all that is in the log
    came later; else the log itself is read anew.
    """
    first = next((stamp for stamp, _ in lines if stamp is not None), None)
    stages: dict[Key, Stage] = {}
    for key, seen in earlier.items():
        gone = seen.seconds is None or first is None or seen.seconds < first
        if gone or seen.stage == "again":
            stages[key] = seen.stage
    resets = ResetReader()
    for _, text in lines:
        if (reset := resets.read(text)) is not None:
            for key in [key for key, stage in stages.items() if stage == "new" and reset.covers(key[1], devices)]:
                stages[key] = "reset"
        pattern = find_fault(text, benign)
        if pattern is None or not pattern.reset_cures:
            continue
        target = target_of(text, devices)
        if target is not None:
            key = (pattern.name, target)
            stages[key] = "new" if stages.get(key, "new") == "new" else "again"
    return stages


def staged(pattern: Pattern, stage: Stage) -> tuple[Pattern, str]:
    """How a fault of this stage is judged, and what is said of it."""
    if stage == "reset":
        note = "; the device was reset since: run the active checks"
        return replace(pattern, status=Status.WARN, action=Action.INSPECT), note
    if stage == "again":
        return replace(pattern, action=Action.REPLACE), "; it came back after a reset"
    return pattern, ""


# The check: new lines of the log since the last look, judged by the table above.


MAX_FINDINGS = 32
MAX_REMEMBERED = 24  # lines of MAX_CHARACTERS, each twice as long where it is quoted: a line of the protocol holds them


ALL_DEVICES = Devices({}, {}, whole=True)


@dataclass(frozen=True)
class Params:
    """More benign lines, and whether the log must be readable."""

    benign: tuple[str, ...] = ()  # regular expressions, searched for in the line
    required: bool | None = None  # None: everywhere but on plain CPU nodes; False: cannot be read = warning


@dataclass(frozen=True)
class Fault:
    """
    One kind of fault of one target: how many lines, and the last, with its time since boot (None where it has none).

    `gone`: none of them is in the log any more. `stage` says whether a reset followed, where one cures it.
    """

    pattern: Pattern
    target: str
    count: int
    line: str
    seconds: float | None = None
    gone: bool = False
    stage: Stage = "new"


@check(
    tier="passive",
    interval_seconds=30,
    timeout_seconds=5,
    accelerator_faults=("KernelFault: Neuron ", "KernelFault: GPU Xid"),  # all else in the log is the host's
)
def kernel_log(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The kernel has logged no known fault.

    Every kind is told once for each device, with the number of its lines and the last of them. Damage counts until the
    next boot, also when newer lines have pushed its own out of the log; what passes by itself (a task that hung, memory
    that ran out, errors of a disk that was taken away) counts for an hour after its last line. A hang in collectives of
    Neuron devices is a warning that accuses nobody: its cause may sit on another node. A DMA abort of a Neuron device,
    and what its driver says of a device that it could not reset, is a warning once a reset of the device, or loading
    the driver, has succeeded; when it comes back after that, the advice is to replace. A Neuron device that was reset
    is untested: what active checks found before does not stand for it. In a container that has a part of the host's
    Neuron devices, lines about the others do not count. A log that cannot be read is unknown; on a plain CPU node it is
    a warning, because containers and users without rights see none.

    Reads:   /dev/kmsg without waiting, the names in /sys/class/block.
    Judges:  fail or warn KernelFault by kind, with what to do; on the device that a line of the Neuron runtime or
             driver names | unknown (or warn) NoPermission, NoData.
    Cost:    about 1 ms for a thousand lines; harmless to jobs.
    Unverified on hardware: the lines of faults are those of the kernel's and the drivers' sources and of documentation;
             no device was at hand that logs one.
    """
    benign, disks, devices = ctx.params.benign, _disks(ctx.host), devices_of(ctx.host, ctx.inventory)
    lines: Sequence[LogLine] = ()
    unread: Finding | None = None
    try:
        lines = ctx.host.kernel_log()
    except HostError as error:
        unread = _unread(ctx, error.reason, f"the kernel log cannot be read, so faults in it go unseen: {error}")
    else:
        if not lines:
            unread = _unread(ctx, "NoData", "the kernel log is empty, so faults in it go unseen")
    now = count_faults(lines, ctx.host.uptime_seconds(), benign, disks, devices) if lines else []
    earlier = recall_faults(ctx.previous, ctx.host.boot_id(), benign, disks, devices)
    found = stage_faults(join_faults(now, earlier), lines, earlier, devices, benign)
    if unread is not None:
        yield unread
    for fault in found[:MAX_FINDINGS]:
        yield _finding(fault)
    if not found and unread is None:
        yield Finding(
            status=Status.PASS,
            reason=None,
            message=f"no known fault in {len(lines)} lines",
            target="node",
            measurements=(_counted("kernel_log_lines_count", len(lines)),),
        )
    if lines and devices.by_host_index:
        resets = last_resets(lines, devices)
        yield Evidence(target="node", key=DEVICE_RESETS, data={"now": ctx.host.uptime_seconds(), "resets": resets})
    lasting = [fault for fault in found if fault.pattern.window_seconds is None][:MAX_REMEMBERED]
    if lasting:
        kept = [_as_data(fault) for fault in lasting]
        yield Evidence(target="node", key="kernel_log", data={"faults": kept})


def count_faults(
    lines: Sequence[LogLine],
    now_seconds: float,
    benign: Sequence[str] = (),
    disks: Sequence[str] | None = None,
    devices: Devices = ALL_DEVICES,
) -> list[Fault]:
    """Each kind of fault that counts now and its target."""
    counted: dict[tuple[str, Status, str], Fault] = {}
    for stamp, text in lines:
        pattern = find_fault(text, benign, disks)
        if pattern is None:
            continue
        window = pattern.window_seconds
        # A line without a time may be of now.
        if window is not None and stamp is not None and now_seconds - stamp > window:
            continue
        target = find_target(pattern, text, devices)
        if target is None:
            continue
        fault = Fault(pattern, target, 1, text, stamp)
        before = counted.get(_key(fault))
        counted[_key(fault)] = fault if before is None else replace(fault, count=before.count + 1)
    return list(counted.values())


def find_target(pattern: Pattern, text: str, devices: Devices = ALL_DEVICES) -> str | None:
    """The device that a line names, as far as its kind names any; else the node. None: a device that is not ours."""
    return target_of(text[:MAX_CHARACTERS], devices) if pattern.device == "neuron" else NODE


def stage_faults(
    found: Sequence[Fault],
    lines: Sequence[LogLine],
    earlier: Sequence[Fault],
    devices: Devices = ALL_DEVICES,
    benign: Sequence[str] = (),
) -> list[Fault]:
    """The faults with their stages; the log is read for them only where there is a fault that a reset cures."""
    if not any(fault.pattern.reset_cures for fault in found):
        return list(found)
    seen = {(fault.pattern.name, fault.target): Seen(fault.stage, fault.seconds) for fault in earlier}
    stages = find_stages(lines, seen, devices, benign)
    return [replace(fault, stage=stages.get((fault.pattern.name, fault.target), fault.stage)) for fault in found]


def recall_faults(
    previous: Previous | None,
    boot_id: str | None,
    benign: Sequence[str] = (),
    disks: Sequence[str] | None = None,
    devices: Devices = ALL_DEVICES,
) -> list[Fault]:
    """The damage that earlier looks of this boot have seen, as it would be judged today."""
    if previous is None or not previous.evidence or boot_id is None or previous.boot_id != boot_id:
        return []
    entries = previous.evidence[-1].data.get("faults")
    found = []
    for entry in entries if isinstance(entries, list) else ():
        line, count = (entry.get("line"), entry.get("count")) if isinstance(entry, dict) else (None, None)
        if not isinstance(line, str) or not isinstance(count, int):
            continue
        pattern = find_fault(line, benign, disks)
        if pattern is None or pattern.window_seconds is not None:
            continue
        target = find_target(pattern, line, devices)
        seconds = entry.get("seconds")
        seconds = float(seconds) if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) else None
        if target is not None:
            stage = to_stage(entry.get("stage"))
            found.append(Fault(pattern, target, count, line, seconds, gone=True, stage=stage))
    return found


def join_faults(now: Iterable[Fault], earlier: Iterable[Fault]) -> list[Fault]:
    """Both, the worst first. Lines of one kind that were pushed out and those that are left are not told apart."""
    joined = {_key(fault): fault for fault in earlier}
    for fault in now:
        before = joined.get(_key(fault))
        joined[_key(fault)] = fault if before is None else replace(fault, count=max(before.count, fault.count))
    return sorted(joined.values(), key=lambda fault: fault.pattern.status is not Status.FAIL)


def _key(fault: Fault) -> tuple[str, Status, str]:
    return fault.pattern.name, fault.pattern.status, fault.target


def _as_data(fault: Fault) -> dict[str, Any]:
    """JSON values for the evidence."""
    kept: dict[str, Any] = {"line": _plain(fault.line), "count": fault.count}
    if fault.pattern.reset_cures:
        kept |= {"seconds": fault.seconds, "stage": fault.stage}
    return kept


def _finding(fault: Fault) -> Finding:
    (pattern, note), count = staged(fault.pattern, fault.stage), fault.count
    gone = " (the log does not go back so far any more)" if fault.gone else ""
    line = fault.line.strip()[:200]
    return Finding(
        status=pattern.status,
        reason="KernelFault",
        message=f"{pattern.name}: {count} {'line' if count == 1 else 'lines'}, the last: {line}{gone}{note}",
        target=fault.target,
        measurements=(_counted("kernel_log_faults_count", count, kind=pattern.name.replace(" ", "_")),),
        blame=pattern.blame,
        action=pattern.action,
    )


def _unread(ctx: Context[Params], reason: str, text: str) -> Finding:
    status = Status.UNKNOWN if is_required(ctx, ctx.params.required) else Status.WARN
    return Finding(status=status, reason=reason, message=text, target="node")


def _disks(host: Host) -> list[str] | None:
    """The block devices that there are, with their partitions; None where they cannot be seen."""
    try:
        return host.listdir("/sys/class/block") or None
    except HostError:
        return None


def _plain(text: str) -> str:
    """A line as it can be kept in a known number of bytes."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:MAX_CHARACTERS])


def _counted(name: str, count: int, **labels: str) -> Measurement:
    return Measurement(name=name, value=float(count), lower=None, upper=None, origin="none", labels=labels)
