"""Known faults in the kernel log (`fault_lines` says which)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checks.contract import DEVICE_RESETS, Context, Evidence, Finding, Measurement, Previous, Status, check
from checks.host.kernel import LogLine
from checks.host.machine import Host, HostError
from checks.system.bounds import is_required
from checks.system.kernel.fault_lines import MAX_CHARACTERS, Pattern, find_fault
from checks.system.kernel.fault_stages import Seen, Stage, find_stages, staged, to_stage
from checks.system.neuron.neuron_log import NODE, Devices, devices_of, last_resets, target_of

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
