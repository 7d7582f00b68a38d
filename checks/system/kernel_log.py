"""
Known faults in the kernel log: which lines mean which, and which of them a reset of the device cures.

Also here:

- what lines of the kernel log mean: known faults, and lines that look like faults and are none;
- which device a line is about;
- faults that a reset of the device cures: reset it first, probe it again, and replace it only when the fault comes
  back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from checks.contract import (
    DEVICE_RESETS,
    Action,
    Blame,
    Context,
    Evidence,
    Finding,
    Measurement,
    ParameterError,
    Previous,
    Status,
    check,
    load_params,
)
from checks.durations import parse_duration
from checks.host.machine import Host, HostError, LogLine, parse_record
from checks.reasons import REASONS, action_of
from checks.system.bounds import is_required
from checks.system.neuron.neuron_log import NODE, Devices, ResetReader, devices_of, last_resets, target_of

TEN_MINUTES = 600.0
HOUR = 3600.0
DAY = 24 * HOUR
GONE = "errors of a disk that is gone"
MAX_CHARACTERS = 1000  # of a line; the kernel's own end there (LOG_LINE_MAX), and searching stays quick

_FAIL, _WARN = Status.FAIL, Status.WARN

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

_OF_DISKS = ("disk error", "file system error")
# `error, dev nvme1n1`, `EXT4-fs error (device nvme1n1)`, `EXT4-fs (nvme1n1)`, `XFS (dm-0)`, `BTRFS error (device sdb`.
_BLOCK_DEVICE = re.compile(r"(?:error, dev |\(device |(?:EXT4-fs|XFS) \()([\w-]+)", re.ASCII)

ALL_DEVICES = Devices({}, {}, whole=True)
# `PCI:0000:3b:00`, `0000:3b:00.0`, and `00000000:3b:00.0` as NVML writes it.
_ADDRESS = re.compile(
    r"(?<![0-9a-f.])([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?(?!:?[0-9a-f])", re.IGNORECASE
)
_MAX_NAME = 64  # of a device that an operator's regular expression finds

Stage = Literal["new", "reset", "again"]
Key = tuple[str, str]  # name of the pattern, target

MAX_FINDINGS = 32
MAX_REMEMBERED = 24  # lines of MAX_CHARACTERS, each twice as long where it is quoted: a line of the protocol holds them


def watched_for(params: Mapping[str, Any]) -> Callable[[str], bool]:
    """
    Says of a record of /dev/kmsg whether it is worth a run of the check, with these parameters of it.

    Where the parameters cannot be read every record is: the check then says what is wrong with them.
    """
    try:
        rules: Rules = load_params(Params, params).rules()
    except ParameterError:
        return lambda _record: True
    return lambda record: any(find_kinds(text, rules, None) for _, text in map(parse_record, record.splitlines()))


@check(
    tier="passive",
    interval_seconds=30,
    timeout_seconds=5,
    accelerator_faults=("KernelFault: Neuron ", "KernelFault: GPU "),  # all else in the log is the host's
)
def kernel_log(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The kernel has logged no known fault.

    Each kind of fault is reported once per device, with the number of its lines and the last one. Damage counts until
    the next boot, even if newer lines have pushed its lines out of the log. Faults that pass by themselves (a hung
    task, memory that ran out, errors of a disk that was removed) count for an hour after their last line. Resets of an
    ENA interface are a warning; five in ten minutes are a fault. A lost connection to a Lustre server is a warning that
    accuses no node. So is a hang in collectives of Neuron devices, because its cause may be on another node. A DMA
    abort of a Neuron device, or a device that its driver could not reset, becomes a warning once a reset of the device
    or loading the driver has succeeded. If it returns after that, the advice is to replace the device. A Neuron device
    that was reset is untested: earlier results of active checks do not count for it. In a container with a part of the
    host's devices, lines about the others do not count. A log that cannot be read is unknown. On a plain CPU node it is
    a warning, because containers and unprivileged users cannot read the log.

    A line concerns the device whose number, serial number or bus address it contains. The address of an unknown device,
    such as a network card, is a separate target (`pci:0000:10:00.0`).

    To judge other lines, add `[checks.kernel_log.patterns.NAME]`. Try a pattern with `healthd check kernel_log
    --host-root DIR`, where DIR has a file `dev/kmsg` as `dmesg` prints it.

    Reads:   /dev/kmsg without waiting, the names in /sys/class/block.
    Judges:  fail or warn KernelFault by kind, with what to do, warn StoreDisconnected; on the device that a line names
             | unknown (or warn) NoPermission, NoData.
    Cost:    about 1 ms for a thousand lines; harmless to jobs.
    Unverified on hardware: the lines of faults are those of the kernel's and the drivers' sources and of documentation;
             no device was at hand that logs one.
    """
    rules, machine = ctx.params.rules(), see_machine(ctx.host, ctx.inventory)
    lines: Sequence[LogLine] = ()
    unread: Finding | None = None
    try:
        lines = ctx.host.kernel_log()
    except HostError as error:
        unread = _unread(ctx, error.reason, f"the kernel log cannot be read, so faults in it go unseen: {error}")
    else:
        if not lines:
            unread = _unread(ctx, "NoData", "the kernel log is empty, so faults in it go unseen")
    now = count_faults(lines, _now_seconds(ctx.host, lines), rules, machine) if lines else []
    earlier = recall_faults(ctx.previous, ctx.host.boot_id(), rules, machine)
    found = stage_faults(join_faults(now, earlier), lines, earlier, machine.neuron, rules.benign)
    if unread is not None:
        yield unread
    judged = sorted(filter(None, map(_settled, found)), key=lambda fault: fault.pattern.status is not Status.FAIL)
    for fault in judged[:MAX_FINDINGS]:
        yield _finding(fault)
    if not judged and unread is None:
        yield Finding(
            status=Status.PASS,
            reason=None,
            message=f"no known fault in {len(lines)} lines",
            target="node",
            measurements=(_counted("kernel_log_lines_count", len(lines)),),
        )
    if lines and machine.neuron.by_host_index:
        resets = last_resets(lines, machine.neuron)
        yield Evidence(target="node", key=DEVICE_RESETS, data={"now": ctx.host.uptime_seconds(), "resets": resets})
    lasting = [fault for fault in found if fault.pattern.window_seconds is None][:MAX_REMEMBERED]
    if lasting:
        kept = [_as_data(fault) for fault in lasting]
        yield Evidence(target="node", key="kernel_log", data={"faults": kept})


def see_machine(host: Host, inventory: Mapping[str, Any]) -> Machine:
    """The machine of an inventory."""
    devices = inventory.get("devices") or ()
    by_address = {str(device["bdf"]).lower(): str(device["target"]) for device in devices if device.get("bdf")}
    targets = {str(device["target"]): str(device["target"]) for device in devices}
    for device in devices:
        target = str(device["target"])
        names = (device.get("serial"), device.get("host_index", target.rpartition(":")[2]))
        targets |= {str(name): target for name in names if name is not None}
    others = inventory.get("not_given") or ()
    return Machine(_disks(host), devices_of(host, inventory), by_address, others, targets)


def staged(pattern: Pattern, stage: Stage) -> tuple[Pattern, str]:
    """How a fault of this stage is judged, and what is said of it."""
    if stage == "reset":
        note = "; the device was reset since: run the active checks"
        return replace(pattern, status=Status.WARN, action=Action.INSPECT), note
    if stage == "again":
        return replace(pattern, action=Action.REPLACE), "; it came back after a reset"
    return pattern, ""


@dataclass(frozen=True)
class Params:
    """More benign lines, more kinds of faults, and whether the log must be readable."""

    benign: tuple[str, ...] = ()  # regular expressions, searched for in the line
    required: bool | None = None  # None: everywhere but on plain CPU nodes; False: cannot be read = warning
    patterns: Mapping[str, OwnPattern] = field(default_factory=dict)  # by any name

    def __post_init__(self) -> None:
        for expression in self.benign:
            _compiled(expression, "benign")

    def rules(self) -> Rules:
        """What they add."""
        return Rules(self.benign, tuple(own.kind(name) for name, own in self.patterns.items()))


@dataclass(frozen=True, kw_only=True)
class OwnPattern:
    """A kind of line that is a fault on your machines, beside those that healthd knows."""

    pattern: str
    """A regular expression (Python's), searched for in the line without its time."""

    status: str = "fail"
    """fail keeps jobs off the node, warn is shown."""

    reason: str = "KernelFault"
    """A code of the [catalogue](runbooks/reasons.md), which has its blame and action."""

    count: int = 1
    """From so many lines on it is a fault; fewer are none."""

    within: str | float | None = None
    """For how long a line counts: `10m`, `1h`. None: until the next boot."""

    device_group: str | int | None = None
    """The number or name of the group that has the device: its bus address, serial number or index, or another name.
    None: a bus address in the line, else the node."""

    def __post_init__(self) -> None:
        compiled = _compiled(self.pattern, "pattern")
        if self.status not in ("fail", "warn"):
            raise ParameterError(f"must be fail or warn, not {self.status!r}", "status")
        if self.reason not in REASONS:
            raise ParameterError(f"no reason {self.reason!r}; docs/runbooks/reasons.md lists them", "reason")
        if self.count < 1:
            raise ParameterError(f"must be at least 1, not {self.count}", "count")
        try:
            if self.within is not None and parse_duration(self.within) == 0:
                raise ValueError("must be more than 0")
        except ValueError as error:
            raise ParameterError(str(error), "within") from None
        group = self.device_group
        known = group in compiled.groupindex if isinstance(group, str) else 1 <= (group or 0) <= compiled.groups
        if group is not None and not known:
            raise ParameterError(f"the pattern has no group {group!r}", "device_group")

    def kind(self, name: str) -> Pattern:
        """The kind of line, as the known ones."""
        return Pattern(
            f"pattern {name}",
            self.pattern,
            Status(self.status),
            action_of(self.reason),
            None if self.within is None else parse_duration(self.within),
            device="pci",
            reason=self.reason,
            least_count=self.count,
            group=self.device_group,
        )


def count_faults(lines: Sequence[LogLine], now_seconds: float, rules: Rules, machine: Machine) -> list[Fault]:
    """Each kind of line that counts now and its target."""
    counted: dict[tuple[str, Status, str], Fault] = {}
    for stamp, text in lines:
        for pattern in find_kinds(text, rules, machine.disks):
            window = pattern.window_seconds
            # A line without a time may be of now.
            if window is not None and stamp is not None and now_seconds - stamp > window:
                continue
            target = machine.target(pattern, text)
            if target is None:
                continue
            fault = Fault(pattern, target, 1, text, stamp)
            before = counted.get(_key(fault))
            counted[_key(fault)] = fault if before is None else replace(fault, count=before.count + 1)
    return list(counted.values())


def stage_faults(
    found: Sequence[Fault],
    lines: Sequence[LogLine],
    earlier: Sequence[Fault],
    devices: Devices,
    benign: Sequence[str],
) -> list[Fault]:
    """The faults with their stages; the log is read for them only where there is a fault that a reset cures."""
    if not any(fault.pattern.reset_cures for fault in found):
        return list(found)
    seen = {(fault.pattern.name, fault.target): Seen(fault.stage, fault.seconds) for fault in earlier}
    stages = find_stages(lines, seen, devices, benign)
    return [replace(fault, stage=stages.get((fault.pattern.name, fault.target), fault.stage)) for fault in found]


def find_stages(
    lines: Sequence[LogLine], earlier: Mapping[Key, Seen], devices: Devices, benign: Sequence[str]
) -> dict[Key, Stage]:
    """
    The stage of each fault that a reset cures.

    If the lines that an earlier look saw have left the log, what it saw counts, because all that is in the log now came
    later. Otherwise the log itself is read again.
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


class Seen(NamedTuple):
    """What an earlier look knew of a fault; `seconds` is when its last line came, None where that is not known."""

    stage: Stage
    seconds: float | None


def recall_faults(previous: Previous | None, boot_id: str | None, rules: Rules, machine: Machine) -> list[Fault]:
    """The damage that earlier looks of this boot have seen, as it would be judged today."""
    if previous is None or not previous.evidence or boot_id is None or previous.boot_id != boot_id:
        return []
    entries = previous.evidence[-1].data.get("faults")
    found: dict[tuple[str, Status, str], Fault] = {}
    for entry in entries if isinstance(entries, list) else ():
        line, count = (entry.get("line"), entry.get("count")) if isinstance(entry, dict) else (None, None)
        if not isinstance(line, str) or not isinstance(count, int):
            continue
        seconds = entry.get("seconds")
        seconds = float(seconds) if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) else None
        for pattern in find_kinds(line, rules, machine.disks):
            target = machine.target(pattern, line)
            another = pattern.window_seconds is not None or entry.get("kind", pattern.name) != pattern.name
            if target is not None and not another:
                fault = Fault(pattern, target, count, line, seconds, gone=True, stage=to_stage(entry.get("stage")))
                found.setdefault(_key(fault), fault)
    return list(found.values())


def find_kinds(text: str, rules: Rules, disks: Sequence[str] | None) -> list[Pattern]:
    """The kinds of fault that a line tells of: the known one, and all of the operator's own."""
    known = find_fault(text, rules.benign, disks)
    found = [] if known is None else [known]
    if rules.own:
        text = text[:MAX_CHARACTERS]
        own = [pattern for pattern in rules.own if re.search(pattern.regex, text)]
        if own and not any(re.search(line, text) for line in rules.benign):
            found += own
    return found


class Rules(NamedTuple):
    """What an operator adds: lines that are no fault, and kinds of lines that are one."""

    benign: tuple[str, ...] = ()
    own: tuple[Pattern, ...] = ()


def find_fault(text: str, benign: Sequence[str] = (), disks: Sequence[str] | None = None) -> Pattern | None:
    """
    The known kind of fault that a line tells of; None for an ordinary or a benign one.

    Errors of a block device that is none of `disks` any more, and of the file system on it, are a warning: a volume
    that was taken away while it was in use has them as well. None: it is not known which there are.
    """
    text = text[:MAX_CHARACTERS]
    if _INTERESTING.search(text) is None:
        return None
    if any(re.search(line, text) for line in (*BENIGN, *benign)):
        return None
    pattern = next((pattern for pattern in PATTERNS if re.search(pattern.regex, text)), None)
    named = _BLOCK_DEVICE.search(text) if pattern is not None and pattern.name in _OF_DISKS else None
    if pattern is None or named is None or disks is None or named[1] in disks:
        return pattern
    return replace(pattern, name=GONE, status=_WARN, action=Action.INSPECT, window_seconds=HOUR)


class Machine(NamedTuple):
    """
    What the lines of the log may be about.

    `disks`: the block devices that there are; None: not known. `by_address`: the GPUs that may be used here, by bus
    address; `others`: addresses of those that may not, because a container was not given them. `targets`: devices by
    index, serial number and target.
    """

    disks: Sequence[str] | None = None
    neuron: Devices = ALL_DEVICES
    by_address: Mapping[str, str] = MappingProxyType({})
    others: Collection[str] = ()
    targets: Mapping[str, str] = MappingProxyType({})

    def target(self, pattern: Pattern, text: str) -> str | None:
        """The device that a line names, as far as its kind names any; else the node. None: one that is not ours."""
        text = text[:MAX_CHARACTERS]
        if pattern.device == "neuron":
            return target_of(text, self.neuron)
        if pattern.group is not None:
            found = re.search(pattern.regex, text)
            name = found[pattern.group] if found is not None else None
            return self._named(name) if name else NODE
        addresses = [_canonical(found) for found in _ADDRESS.finditer(text)]
        if ours := [self.by_address[address] for address in addresses if address in self.by_address]:
            return ours[-1]  # of a bridge and the device behind it, the device comes last
        if any(address in self.others for address in addresses):
            return None
        return f"pci:{addresses[0]}" if addresses and pattern.device == "pci" else NODE

    def _named(self, name: str) -> str:
        """The device of a name: bus address, serial number, index or target; else the name itself."""
        if (address := _ADDRESS.search(name)) is not None:
            return self.by_address.get(_canonical(address), f"pci:{_canonical(address)}")
        return self.targets.get(name) or _plain(name)[:_MAX_NAME]


def to_stage(value: object) -> Stage:
    """A stage out of evidence; `new` where it has none."""
    return next((stage for stage in get_args(Stage) if stage == value), "new")


def join_faults(now: Iterable[Fault], earlier: Iterable[Fault]) -> list[Fault]:
    """Both. Lines of one kind that were pushed out and those that are left are not told apart."""
    joined = {_key(fault): fault for fault in earlier}
    for fault in now:
        before = joined.get(_key(fault))
        joined[_key(fault)] = fault if before is None else replace(fault, count=max(before.count, fault.count))
    return list(joined.values())


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


@dataclass(frozen=True)
class Pattern:
    """
    A kind of line. `status` FAIL marks the node, WARN is shown.

    `window_seconds` is for how long a line counts: None until the next boot, because the damage stays; else what
    lasts says so again (the kernel repeats it, or `processes` sees it), and what has passed is no fault any more.
    `blame` None is the reason's own. `device` says how the line names its device: "neuron", as the Neuron runtime and
    driver do; "pci", by a bus address. `group`: the group of the regular expression that has the device. `reset_cures`:
    a reset of the device ends it (`find_stages`). With fewer lines than `least_count` in the window, the status is
    `below`; None: then they are no fault.
    """

    name: str
    regex: str
    status: Status
    action: Action
    window_seconds: float | None = None
    blame: Blame | None = None
    device: str | None = None
    reset_cures: bool = False
    reason: str = "KernelFault"
    least_count: int = 1
    below: Status | None = None
    group: str | int | None = None


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


def _gpu(
    name: str, regex: str, action: Action, status: Status = Status.FAIL, window_seconds: float | None = None
) -> Pattern:
    return Pattern(f"GPU {name}", regex, status, action, window_seconds, device="pci")


def _xid(codes: str) -> str:
    return rf"NVRM: Xid \(.*?\): ({codes})\b"


def _ena(name: str, regex: str) -> Pattern:
    """Once is a hiccup; again and again, nothing that runs over the network gets anywhere."""
    return Pattern(
        f"ENA {name}",
        rf"ena [0-9a-f]{{4}}:.*{regex}",
        Status.FAIL,
        Action.INSPECT,
        TEN_MINUTES,
        device="pci",
        least_count=5,
        below=Status.WARN,
    )


def _canonical(found: re.Match[str]) -> str:
    """`0000:3b:00.0`, whatever was left out."""
    domain, bus, device, function = found.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or 0}".lower()


def _compiled(expression: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ParameterError(f"{expression!r} is not a regular expression: {error}", key) from None


def _settled(fault: Fault) -> Fault | None:
    """The fault as its number of lines makes it; None where there are too few for any."""
    pattern = fault.pattern
    if fault.count >= pattern.least_count:
        return fault
    return None if pattern.below is None else replace(fault, pattern=replace(pattern, status=pattern.below))


def _key(fault: Fault) -> tuple[str, Status, str]:
    return fault.pattern.name, fault.pattern.status, fault.target


def _as_data(fault: Fault) -> dict[str, Any]:
    """JSON values for the evidence."""
    kept: dict[str, Any] = {"kind": fault.pattern.name, "line": _plain(fault.line), "count": fault.count}
    if fault.pattern.reset_cures:
        kept |= {"seconds": fault.seconds, "stage": fault.stage}
    return kept


def _finding(fault: Fault) -> Finding:
    (pattern, note), count = staged(fault.pattern, fault.stage), fault.count
    gone = " (the log does not go back so far any more)" if fault.gone else ""
    line = fault.line.strip()[:200]
    return Finding(
        status=pattern.status,
        reason=pattern.reason,
        message=f"{pattern.name}: {count} {'line' if count == 1 else 'lines'}, the last: {line}{gone}{note}",
        target=fault.target,
        measurements=(_counted("kernel_log_faults_count", count, kind=pattern.name.replace(" ", "_")),),
        blame=pattern.blame,
        action=pattern.action,
    )


def _now_seconds(host: Host, lines: Sequence[LogLine]) -> float:
    """Now by the log's clock: since boot; of a log alone, the time of its last line."""
    try:
        return host.uptime_seconds()
    except HostError:
        return max((stamp for stamp, _ in lines if stamp is not None), default=0.0)


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
    _gpu("Xid remapping failed", _xid("64"), Action.REPLACE),
    # 79: off the bus, 151: key rotation; 154 names what is needed.
    _gpu("Xid reboot", _xid(r"79|151|154\b.*\bto 0x\w+ \(Node Reboot Required"), Action.REBOOT),
    _gpu("Xid power", _xid("54"), Action.INSPECT),
    # 46 and 62 stopped, 48 and 95 and 140 memory, 74 and 155 and 144 to 150 NVLink, 109 and 110 and 158 time-out and
    # security, 119 and 120 GSP, 136 link training, 143 start, 156 retirement.
    _gpu(
        "Xid",
        _xid(
            r"46|48|62|74|95|109|110|119|120|136|140|143|155|156|158|(14[4-9]|150)\b.*\bFatal"
            r"|154\b.*\bto 0x\w+ \((GPU Reset Required|Drain and Reset)"
        ),
        Action.RESET_DEVICE,
    ),
    # 142: an encoder; NVIDIA says to contact support, and AWS's node agents count it as fatal. 171 and 172: the memory
    # (DRAM, that is HBM, or SRAM) of an error that cannot be corrected; the catalogue gives no action of their own.
    _gpu("Xid support", _xid("142|171|172"), Action.INSPECT),
    # The driver could not start the GPU, or holds it until it is reset, and there need be no Xid. Source:
    # open-gpu-kernel-modules, osinit.c (RmInitAdapter), nvstatuscodes.h (NV_ERR_RESET_REQUIRED, 0x62).
    _gpu("that does not start", r"NVRM: (.*\b)?RmInitAdapter failed!", Action.RESET_DEVICE),
    _gpu("that needs a reset", r"NVRM: .*\bNV_ERR_RESET_REQUIRED\b", Action.RESET_DEVICE),
    # Of an NVSwitch. Source: NVIDIA Fabric Manager User Guide, SXid errors: after a fatal one GPUs and switches need a
    # reset; each error has other lines with its data, and others are `Non-fatal`. 20034 is a link that went down, also
    # because the GPU at its other end was reset: `gpu_links` sees whether it is up.
    _gpu("Xid of an NVSwitch", r"SXid \(.*?\): (?!20034\b)\d+, Fatal\b", Action.REBOOT),
    # 63: a row will be remapped at the next reset (`gpu_memory` says whether it waits); 92: many errors that could be
    # corrected; 94: an error that hit one program alone.
    _gpu("Xid memory", _xid("63|92|94"), Action.INSPECT, _WARN),
    _gpu("Xid NVLink", _xid("14[4-9]|150"), Action.INSPECT, _WARN, HOUR),
    # Network cards. Source: Linux, mlx5/core/health.c (poll_health, check_fatal_sensors). Sensors 3 and 4 say that
    # somebody disabled or reset the card, as where virtual functions are taken away.
    Pattern(
        "network card",
        r"mlx5_core .*(\bhealth compromised|Fatal error (?![34] detected))",
        _FAIL,
        Action.INSPECT,
        device="pci",
    ),
    # Source: amzn-drivers, ena_netdev.c (check_for_missing_keep_alive, ena_restore_device).
    _ena("without a sign of life", r"Keep alive watchdog timeout"),
    _ena("reset", r"(Device reset completed|Reset attempt failed)"),
    # Lustre (FSx): each client of a server that went away writes it, and waits. Source: lustre/ptlrpc/import.c.
    Pattern(
        "storage server",
        r"Lustre.*: Connection to \S+ \(at \S+\) was lost|Lustre.*This client was evicted by",
        _WARN,
        Action.INSPECT,
        HOUR,
        reason="StoreDisconnected",
    ),
)


# One pass over a line finds out whether it can be of any kind: nearly none is. It leaves out the anchors (^ and \b), so
# that every alternative begins with a letter: the engine then skips to such letters, which is five times as fast.
_INTERESTING = re.compile("|".join(re.sub(r"\\b|\^", "", pattern.regex) for pattern in PATTERNS))
