"""
What the Neuron driver counts of each device: ECC errors, executions that failed by hardware, unhealthy parts.

Also here:

- counters from one look to the next: what rose, what was set back, what an hour brought;
- what each counter of a Neuron device means: how it is judged, whose fault it is, what to do;
- neuron-monitor as the other source of ECC counters, where sysfs has none;
- DMA aborts as the driver counts them: whether the device was reset after the last one, and whether it came again;
- what the driver and the firmware say of a Neuron device as a whole: its state, and parts that are unhealthy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from checks.accelerators.neuron.monitor import Reading, read_monitor
from checks.accelerators.neuron.sysfs import COMPONENTS, CORRECTED, REQUIRED, DeviceCounters, read_counters
from checks.contract import Action, Blame, Context, Evidence, Finding, Measurement, Status, check
from checks.host.machine import Host, HostError, LogLine
from checks.limits import within
from checks.printable import some
from checks.system.bounds import bound
from checks.system.kernel_log import Stage, find_fault
from checks.system.neuron.neuron_log import Devices, ResetReader, target_of

WINDOW_SECONDS = 3600.0

Counts = dict[str, dict[str, int]]  # target -> name -> count; what is 0 may be left out

REPLACE_IT = "stop and start the instance, or replace it"

_ECC = ("neuron_uncorrected_errors_count", "max_uncorrected_count", "EccErrors")
_REPAIRABLE = ("neuron_repairable_errors_count", "max_repairable_count", "EccErrors")
_CORRECTED = ("neuron_corrected_errors_per_hour_count", "max_corrected_per_hour_count", "CorrectedErrors")
_HARDWARE = ("neuron_hardware_errors_count", "max_hardware_errors_count", "HardwareErrors")
_SUSPECT = ("neuron_suspect_errors_count", "max_suspect_errors_count", "HardwareErrors")
_RESET = f"reset the device and run the active checks; if it aborts again, {REPLACE_IT}"
_RELOAD = "reload the driver or reboot to repair it"
_WATCH = "watch whether the count rises"
_OTHERS = "look for the cause on the other nodes of the job"
_EITHER = "a program can also cause them: run the active checks"

# One number of the device that the driver shows at each of its cores: nsysfsmetric_inc_reset_fail_count.
_SHARED = frozenset({"reset_fail_count"})

ABORTS = "hw_dma_abort_error"
_LINE = "Neuron DMA error"

_LINKS = ("link_intraserver", "link_host", "link_efa", "link_interserver", "link_switch")
_PARTS = ("hbm", "sram", "firmware_service_api", "firmware_service_processor", *_LINKS, "axi_fabric")
_NONE = ("", "none")
# The driver's states of a device: enum neuron_device_state in neuron_device.h.
_RESETTING, _READY, _INVALID = 0, 1, 2


@check(tier="passive", interval_seconds=60, timeout_seconds=15, accelerators=True)
def neuron_counters(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The driver counts no uncorrectable memory error and no hardware error, holds every device ready, and the firmware
    calls no part unhealthy.

    Damage counts for as long as the driver is loaded. Counts from before a counter reset are a warning until the next
    boot. DMA aborts become a warning once the device was reset after them; if they return after that, the advice is to
    replace the device. Corrected errors are judged per hour. Time-outs, executions that ended with an error and hangs
    in collectives are judged by their increase between two looks, as warnings, because programs and other nodes cause
    them too. Counters that only a program can raise (bad input, full queues) are not read. A device is read under its
    host number, which a container may not know. If sysfs has no ECC counters, the check asks neuron-monitor for the
    errors of a moment. That is a warning, because earlier errors are not known.

    Reads:   /sys/devices/virtual/neuron_device/neuron*, else /sys/class/neuron_device; leaves by name, wherever they
             are. neuron-monitor, at most once a minute, only where these have no ECC counters. The kernel log, only
             where DMA aborts are counted, for resets.
    Judges:  fail EccErrors, HardwareErrors, UnhealthyComponent, DeviceLost (invalid state) | warn CorrectedErrors,
             HardwareErrors (suspicious, set back, or reset since), EccErrors (set back), NoData (neuron-monitor alone)
             | unknown NoData, NoPermission | skip NotApplicable (no Neuron devices in use).
    Cost:    4 ms for 32 cores, 9 ms for 128, where files cost nothing; neuron-monitor 1 s; harmless to jobs.
    Source:  aws-neuron-driver, neuron_sysfs_metrics.c, neuron_cdev.c; what to do: nrt-troubleshoot of the Neuron SDK,
             aws-neuron-sdk issue 1390 (DMA aborts).
    Unverified on hardware: read from trees made by the driver's description. healthcheck_heartbeat is not judged,
    because no source says what it counts.
    """
    if ctx.inventory.get("accelerator") != "neuron":
        text = "no Neuron devices are in use here"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    data = last_data(ctx)
    elapsed = ctx.previous.elapsed_seconds if ctx.previous else 0.0
    seen, why = _read(ctx)
    devices = choose(seen, ctx.inventory)
    untold = find_untold(ctx.inventory)
    known = {target: device for target, device in devices.items() if device is not None}
    history = next_history(
        data.get("history") if data else None,
        elapsed,
        {target: totals(device) for target, device in known.items()},
        {target: device.inode for target, device in known.items() if device.inode is not None},
    )
    aborts = read_aborts(ctx.host, known, data.get("aborts") if data else None)
    findings = [*_judge(ctx, known, history, aborts), *_judge_untold(untold)]
    lacking = find_lacking(devices)
    watch: Watch | None = None
    if lacking or not (devices or untold):
        watch = next_watch(ctx.host, data.get("watch") if data else None, elapsed, ctx.params)
        # Where nothing says which devices there are, those are judged that it names.
        findings += judge_watch(watch, lacking or dict.fromkeys(watch.seen, REQUIRED), why)
    yield from findings or [_all_well(known, history)]
    yield Evidence(
        target="node",
        key="neuron_counters",
        data={
            "history": history.as_data(),
            "watch": watch._asdict() if watch else None,
            "aborts": {target: abort._asdict() for target, abort in aborts.items()},
        },
    )


def next_history(
    data: Mapping[str, Any] | None, elapsed_seconds: float, counts: Counts, inodes: Mapping[str, int]
) -> History:
    """
    The history after a look that read `counts`; `data` is that of the last look (None: there was none in this boot).

    A target that was not seen last time has nothing to be compared with, and neither has a first look.
    """
    if data is None:
        return History(counts=_nonzero(counts), inodes=dict(inodes))
    # What another version of this check has left may have other members.
    last = History(**{one.name: data[one.name] for one in fields(History) if one.name in data})
    rises = {target: dict(names) for target, names in last.rises.items()}
    wiped = {target: dict(names) for target, names in last.wiped.items()}
    for target, names in counts.items():
        if target not in last.inodes:
            continue
        anew = last.inodes[target] != inodes.get(target, last.inodes[target])
        for name, count in names.items():
            held = last.counts.get(target, {}).get(name, 0)
            back = count < held or (anew and (count != held or "_ecc_" not in name))
            if back and held:
                _add(wiped, target, name, held)
            if count > (0 if back else held):
                _add(rises, target, name, count - (0 if back else held))
    history = History(
        # What could not be read this time keeps what it had.
        counts=_nonzero({**last.counts, **{t: {**last.counts.get(t, {}), **n} for t, n in counts.items()}}),
        inodes={**last.inodes, **inodes},
        seconds=last.seconds + elapsed_seconds,
        rises=rises,
        before_seconds=last.before_seconds,
        before=last.before,
        wiped=wiped,
    )
    if history.seconds >= WINDOW_SECONDS:
        history.before, history.before_seconds = history.rises, history.seconds
        history.rises, history.seconds = {}, 0.0
    return history


def next_watch(host: Host, data: Mapping[str, Any] | None, elapsed_seconds: float, params: Params) -> Watch:
    """The watch after this look: neuron-monitor is started where it has not been for a while."""
    last = Watch(float("inf"), 0.0, {}, 0, None, ())
    if data:  # what another version of this check has left may have other members
        last = last._replace(**{name: data[name] for name in Watch._fields if name in data})
    last = last._replace(age_seconds=last.age_seconds + elapsed_seconds)
    if not params.monitor:
        return last._replace(age_seconds=0.0, error=("NoData", "neuron-monitor is turned off (monitor = false)"))
    if last.age_seconds < params.monitor_interval_seconds:
        return last
    try:
        reading = read_monitor(host, timeout_seconds=params.monitor_timeout_seconds)
    except HostError as error:
        return last._replace(age_seconds=0.0, error=(error.reason, str(error)), skipped=())
    return add_reading(last._replace(age_seconds=0.0), reading)


def add_reading(last: Watch, reading: Reading | None) -> Watch:
    """The watch with one more object of the stream; events add up, because each object counts its own period."""
    if reading is None:
        return last._replace(error=("NoData", "the output of neuron-monitor is not understood"), skipped=())
    seen = {target: dict(names) for target, names in last.seen.items()}
    for index, counts in (reading.ecc or {}).items():
        names = seen.setdefault(f"neuron:{index}", {})
        for name, count in counts.items():
            if count is None:
                names.pop(name, None)
            else:
                names[name] = names.get(name, 0) + count
    return Watch(
        age_seconds=last.age_seconds,
        watched_seconds=last.watched_seconds + (reading.period_seconds or 0.0),
        seen=seen,
        hardware_errors=last.hardware_errors + (reading.hardware_errors or 0),
        error=None if reading.ecc is not None else ("NoData", "neuron-monitor reports no hardware counters"),
        skipped=reading.skipped,
    )


def judge_watch(watch: Watch, lacking: Mapping[str, Sequence[str]], why: str | None) -> Iterator[Finding]:
    """
    What neuron-monitor saw of the counters that sysfs lacks, by target.

    Events fail, as they would have been counted; a counter without events is a warning, none at all unknown.
    """
    for target, names in lacking.items():
        for name in names:
            if count := watch.seen.get(target, {}).get(name, 0):
                text = f"{name}: {count} seen by neuron-monitor; {REPLACE_IT}"
                yield Finding(
                    status=Status.FAIL, reason="EccErrors", message=text, target=target, action=Action.REPLACE
                )
    if watch.hardware_errors:
        text = f"{watch.hardware_errors} executions failed because of hardware while neuron-monitor was watching"
        yield Finding(status=Status.FAIL, reason="HardwareErrors", message=text, target="node")
    told = {
        target
        for target, names in lacking.items()
        if watch.error is None and all(name in watch.seen.get(target, {}) for name in names)
    }
    unseen = [target for target in lacking if target not in told]
    if told:
        text = (
            f"sysfs has no ECC counters of {some(sorted(told))}, so errors are seen only while neuron-monitor runs: "
            f"{watch.watched_seconds:.3g} s so far; check that /sys is the host's and which driver is loaded"
        )
        yield Finding(status=Status.WARN, reason="NoData", message=text, target="node")
    if unseen or not lacking:
        reason, text = watch.error or ("NoData", "neuron-monitor does not list it")
        skipped = f" ({'; '.join(watch.skipped)})" if watch.skipped else ""
        what = f"of {some(unseen)}" if unseen else "of any Neuron device"
        yield Finding(
            status=Status.UNKNOWN,
            reason=reason,
            message=f"sysfs has no ECC counters {what}{': ' if why else ''}{why or ''}; {text}{skipped}",
            target=unseen[0] if len(unseen) == 1 else "node",
        )


class Watch(NamedTuple):
    """
    What was seen so far in this boot.

    `age_seconds` since neuron-monitor was started last, `watched_seconds` of all its periods together; `seen` are the
    events by target and counter (0 included: it is what says that there is a counter at all); `error` is a reason and a
    text where the last start gave nothing.
    """

    age_seconds: float
    watched_seconds: float
    seen: dict[str, dict[str, int]]
    hardware_errors: int
    error: tuple[str, str] | None
    skipped: tuple[str, ...]


def read_aborts(
    host: Host, devices: Mapping[str, DeviceCounters], before: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, Abort]:
    """
    The devices that have counted aborts; `before` is what the last look of this boot has returned, as JSON.

    Of a device whose count cannot be read this time that is what is known of it still.
    """
    earlier = {target: Abort(**one) for target, one in (before or {}).items() if set(one) == set(Abort._fields)}
    counts = {target: _count(device) for target, device in devices.items()}
    found = {target: abort for target, abort in earlier.items() if counts.get(target) is None}
    if not any(counts.values()):
        return found
    try:
        lines = host.kernel_log()
    except HostError:  # `kernel_log` tells that; no reset is known then
        lines = []
    names = Devices({}, {device.number: target for target, device in devices.items()}, whole=True)
    for target, count in counts.items():
        if count:
            resets, aborts = read_times(lines, target, names)
            found[target] = next_abort(earlier.get(target), count, host.uptime_seconds(), resets, aborts)
    return found


def read_times(lines: list[LogLine], target: str, devices: Devices) -> tuple[list[float], list[float]]:
    """When a device was reset, and when the runtime logged aborts of it, in seconds since boot."""
    reader, resets, aborts = ResetReader(), [], []
    for stamp, text in lines:
        reset = reader.read(text)
        if stamp is None:
            continue
        if reset is not None and reset.covers(target, devices):
            resets.append(stamp)
        elif _is_abort(text) and target_of(text, devices) == target:
            aborts.append(stamp)
    return resets, aborts


def next_abort(before: Abort | None, count: int, now_seconds: float, resets: list[float], aborts: list[float]) -> Abort:
    """
    What is known after a look; pure. Without a line of the log the last abort came when its count was seen.

    The log forgets old lines: a reset that an earlier look has seen stays one.
    """
    logged = max(aborts, default=None)
    known_reset = before is not None and before.stage == "reset"
    if before is not None and count == before.total:
        seen, again = before.seen_seconds, before.again
    else:
        seen = now_seconds if logged is None else logged
        earlier = [stamp for stamp in aborts if stamp < seen]
        if before is not None and count > before.total:
            earlier.append(before.seen_seconds)
            again = before.again or known_reset
        else:
            again = False
        known_reset = False  # it was of the abort before
        again = again or (logged is not None and any(old < reset < logged for reset in resets for old in earlier))
    was_reset = known_reset or any(reset > seen for reset in resets)
    stage: Stage = "again" if again else "reset" if was_reset else "new"
    return Abort(count, seen, again, stage)


def judge_state(target: str, device: DeviceCounters) -> Iterator[Finding]:
    """What the leaf `reset` says, where it may be read: nobody can open a device that is not ready."""
    if device.state == _INVALID:
        text = (
            "the driver holds this device in an invalid state because a reset failed: no process can open it; reload "
            f"the driver or reboot, and {REPLACE_IT} if that does not help"
        )
        yield Finding(status=Status.FAIL, reason="DeviceLost", message=text, target=target, action=Action.REBOOT)
    elif device.state == _RESETTING:
        text = "the driver is resetting this device: processes that open it wait until the reset ends"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target, action=Action.RETRY)
    elif device.state not in (None, _READY):
        text = f"the driver reports the unknown device state {device.state}"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def judge_components(target: str, device: DeviceCounters) -> Iterator[Finding]:
    """The comma list of parts that the firmware calls unhealthy."""
    words = parse_components(device.components)
    strange = [word for word in words if word not in _PARTS]
    known = [word for word in words if word in _PARTS]
    if known:
        text = f"the firmware reports unhealthy components: {', '.join(known)}; {REPLACE_IT} if this persists"
        yield Finding(status=Status.FAIL, reason="UnhealthyComponent", message=text, target=target)
    if strange:
        text = f"{COMPONENTS} contains the unknown entry {' '.join(strange)[:100]!r}"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def parse_components(text: str | None) -> list[str]:
    """The words of the list; none where there is no such leaf (older drivers, Trainium1), or it is empty."""
    words = [word.strip().lower() for word in (text or "").split(",")]
    return [word for word in words if word not in _NONE]


def find_lacking(devices: Mapping[str, DeviceCounters | None]) -> dict[str, list[str]]:
    """The ECC counters that every driver should have and that are nowhere, by target."""
    lacking = {
        target: [name for name in REQUIRED if device is None or name not in device.counts]
        for target, device in devices.items()
    }
    return {target: names for target, names in lacking.items() if names}


def last_data(ctx: Context[Params]) -> Mapping[str, Any] | None:
    """The evidence of the last look in this boot."""
    previous = ctx.previous
    if previous is None or not previous.evidence or previous.boot_id != ctx.host.boot_id():
        return None
    return previous.evidence[-1].data


def choose(seen: Mapping[int, DeviceCounters], inventory: Mapping[str, Any]) -> dict[str, DeviceCounters | None]:
    """
    The devices to judge by target: those of the inventory, or all that sysfs shows where it names none.

    sysfs shows a container all devices of its host, also those that are not its own, under the host's numbers. None:
    sysfs does not show it. Those of which the host's number cannot be told are left out (`find_untold`).
    """
    named = {target: index for target, index in _host_indices(inventory).items() if index is not None}
    if not named and not find_untold(inventory):
        return {f"neuron:{index}": device for index, device in seen.items()}
    return {target: seen.get(index) for target, index in named.items()}


def find_untold(inventory: Mapping[str, Any]) -> list[str]:
    """The devices of which nobody says which of the host's they are."""
    return [target for target, index in _host_indices(inventory).items() if index is None]


def totals(device: DeviceCounters) -> dict[str, int]:
    """Each counter of a device, over its cores; without those of which a part could not be read."""
    found = {name: count for name, count in device.counts.items() if count is not None}
    for name, cores in device.cores.items():
        counts = [count for count in cores.values() if count is not None]
        if len(counts) == len(cores):
            found[name] = over_cores(name, counts)
    return found


def judge_counts(
    ctx: Context[Params], target: str, device: DeviceCounters, history: History, abort: Abort | None = None
) -> Iterator[Finding]:
    """What is beyond its limit, one finding for each counter."""
    for name in (*device.counts, *device.cores):
        kind = KINDS.get(name, UNKNOWN_KIND)
        if name == ABORTS and abort is not None:
            kind = abort_kind(abort.stage)
        # What could be read counts, also where another core's counter could not.
        counts = [c for c in (device.counts.get(name), *device.cores.get(name, {}).values()) if c is not None]
        total, recent = over_cores(name, counts), history.recent(target, name)
        wiped = history.wiped.get(target, {}).get(name, 0)
        value = float(total)
        if kind.recent:
            value = history.recent_per_hour(target, name) if name in CORRECTED else float(recent)
        finding = within(
            value,
            name=kind.measurement,
            target=target,
            limit=bound(ctx, kind.measurement, target, upper=kind.param),
            reason=kind.reason,
            subject=f"{kind.subject} ({name}{_cores(device.cores.get(name, {}))}{_recently(recent, total, wiped)}):",
            outside=kind.status,
            labels={"counter": name},
            blame=kind.blame,
            action=kind.action,
        )
        if finding.status is not Status.PASS:
            yield Finding(**{**vars(finding), "message": f"{finding.message}; {kind.advice}"})


def over_cores(name: str, counts: Sequence[int]) -> int:
    """A counter over the cores of a device."""
    return max(counts, default=0) if name in _SHARED else sum(counts)


class Abort(NamedTuple):
    """
    What is known of a device that has counted aborts, `total` in all. `seen_seconds` is when the last one came, since
    boot, as nearly as that is known; `again`: one came after a reset that had followed another.
    """

    total: int
    seen_seconds: float
    again: bool
    stage: Stage


def abort_kind(stage: Stage) -> Kind:
    """How the count is judged."""
    kind = KINDS[ABORTS]
    if stage == "reset":
        advice = "the device was reset since: run the active checks"
        return kind._replace(status=Status.WARN, action=Action.INSPECT, advice=advice)
    if stage == "again":
        return kind._replace(action=Action.REPLACE, advice=f"it came back after a reset: {REPLACE_IT}")
    return kind


class Kind(NamedTuple):
    """How a counter is judged: since the load of the driver, or by what the last hours brought (`recent`)."""

    subject: str
    measurement: str
    param: str
    reason: str
    action: Action
    advice: str
    status: Status = Status.FAIL
    blame: Blame | None = None
    recent: bool = False


@dataclass(frozen=True)
class Params:
    """Bounds, and whether neuron-monitor may be started where sysfs shows no counters."""

    max_uncorrected_count: int = 0  # since the driver was loaded; so the next two
    max_repairable_count: int = 0
    max_hardware_errors_count: int = 0
    max_corrected_per_hour_count: float = 100.0  # of a device; no source names a figure
    max_suspect_errors_count: int = 0  # within the last hours: time-outs and the like, which a program can cause too
    monitor: bool = True
    monitor_timeout_seconds: float = 5.0  # its first object comes after a period of one second
    monitor_interval_seconds: float = 55.0  # it is not started more often: it opens every device


def judge_wiped(history: History) -> Iterator[Finding]:
    """Damage that nothing but a new machine repairs, and whose count was set back since."""
    for target, names in history.wiped.items():
        for name, count in names.items():
            kind = KINDS.get(name, UNKNOWN_KIND)
            if kind.recent or kind.action is not Action.REPLACE or history.counts.get(target, {}).get(name):
                continue
            text = (
                f"{name} was {count} before the counters were reset (by a driver reload or by hand), which repairs "
                f"nothing; {kind.advice}"
            )
            yield Finding(
                status=Status.WARN,
                reason=kind.reason,
                message=text,
                target=target,
                action=kind.action,
                blame=kind.blame,
            )


@dataclass
class History:
    """
    What is carried from look to look.

    `counts` and `inodes` are those of the last look. `rises` are of the window that runs since `seconds`, `before` of
    the one before it, so that what rose within the last hour is in one of the two. `wiped` is what counters held that
    were set back: a reading of 0 does not mean that nothing was.
    """

    counts: Counts = field(default_factory=dict)
    inodes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    rises: Counts = field(default_factory=dict)
    before_seconds: float = 0.0
    before: Counts = field(default_factory=dict)
    wiped: Counts = field(default_factory=dict)

    def recent(self, target: str, name: str) -> int:
        """By how much a counter rose within the last one to two hours, as far as it was looked at."""
        return self.rises.get(target, {}).get(name, 0) + self.before.get(target, {}).get(name, 0)

    def recent_per_hour(self, target: str, name: str) -> float:
        """The same by hour; of less than an hour it is what there was so far, so that a second look is no rate."""
        return self.recent(target, name) / max(1.0, (self.seconds + self.before_seconds) / WINDOW_SECONDS)

    def as_data(self) -> dict[str, Any]:
        """JSON values for the evidence."""
        return {
            "counts": self.counts,
            "inodes": self.inodes,
            "seconds": self.seconds,
            "rises": self.rises,
            "before_seconds": self.before_seconds,
            "before": self.before,
            "wiped": self.wiped,
        }


def judge_gaps(target: str, device: DeviceCounters) -> Iterator[Finding]:
    """What is there and could not be read or understood; what is not there at all is `find_lacking`."""
    if device.denied is not None:
        yield Finding(status=Status.UNKNOWN, reason="NoPermission", message=device.denied, target=target)
        return
    dark = [name for name, count in device.counts.items() if count is None]
    numbers = sorted({core for row in device.cores.values() for core in row})
    dark += [f"{name} of core {n}" for name, row in device.cores.items() for n in numbers if row.get(n) is None]
    if dark:
        text = f"unreadable counters: {', '.join(dark[:4])}{' and others' if len(dark) > 4 else ''}"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def _add(counts: Counts, target: str, name: str, count: int) -> None:
    names = counts.setdefault(target, {})
    names[name] = names.get(name, 0) + count


def _nonzero(counts: Counts) -> Counts:
    kept = {target: {name: count for name, count in names.items() if count} for target, names in counts.items()}
    return {target: names for target, names in kept.items() if names}


def _count(device: DeviceCounters) -> int | None:
    """Over the cores of a device; None where one of them does not tell."""
    row, cores = device.cores.get(ABORTS, {}), {core for row in device.cores.values() for core in row}
    known = [count for core in cores if (count := row.get(core)) is not None]
    return sum(known) if cores and len(known) == len(cores) else None


def _is_abort(text: str) -> bool:
    pattern = find_fault(text)
    return pattern is not None and pattern.name == _LINE


def _judge(
    ctx: Context[Params], devices: Mapping[str, DeviceCounters], history: History, aborts: Mapping[str, Abort]
) -> Iterator[Finding]:
    """What sysfs shows that is not well."""
    for target, device in devices.items():
        yield from judge_counts(ctx, target, device, history, aborts.get(target))
        yield from judge_state(target, device)
        yield from judge_components(target, device)
        yield from judge_gaps(target, device)
    yield from judge_wiped(history)
    bare = [target for target, device in devices.items() if not device.cores.get("hw_error")]
    if bare:
        text = f"no hw_error counter found under {some(bare)}: does the driver put its counters elsewhere?"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")


def _host_indices(inventory: Mapping[str, Any]) -> dict[str, int | None]:
    devices = [device for device in inventory.get("devices") or () if device.get("target")]
    found = {str(device["target"]): device.get("host_index", device.get("index")) for device in devices}
    return {target: index if isinstance(index, int) else None for target, index in found.items()}


def _judge_untold(targets: Sequence[str]) -> Iterator[Finding]:
    if targets:
        text = (
            f"this container cannot determine which of the host's devices is {some(targets)}, so its counters are "
            "not read: they could be those of another tenant's device; run healthd on the host"
        )
        target = targets[0] if len(targets) == 1 else "node"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def _read(ctx: Context[Params]) -> tuple[dict[int, DeviceCounters], str | None]:
    """What sysfs shows, and why it shows nothing."""
    try:
        return read_counters(ctx.host), None
    except HostError as error:
        return {}, str(error)


def _all_well(devices: Mapping[str, DeviceCounters], history: History) -> Finding:
    cores = sum(len(device.cores.get("hw_error", {})) for device in devices.values())
    read = sum(len(device.counts) + sum(map(len, device.cores.values())) for device in devices.values())
    corrected = sum(history.counts.get(target, {}).get(name, 0) for target in devices for name in CORRECTED)
    errors = f", {corrected} corrected errors so far" if corrected else ""
    back = "; some were reset since monitoring began" if history.wiped else ""
    return Finding(
        status=Status.PASS,
        reason=None,
        message=f"{len(devices)} devices, {cores} cores: {read} counters show no damage{errors}{back}",
        target="node",
        measurements=(
            Measurement(name="neuron_counters_read_count", value=float(read), lower=None, upper=None, origin="none"),
        ),
    )


def _cores(cores: Mapping[int, int | None]) -> str:
    bad = [str(core) for core, count in sorted(cores.items()) if count]
    return f", core {' '.join(bad[:8])}" if bad else ""


def _recently(recent: int, total: int, wiped: int) -> str:
    before = f", reset after it reached {wiped}" if wiped else ""
    return f", {recent} of {total} within the last hours{before}" if recent else before


KINDS: Mapping[str, Kind] = {
    "mem_ecc_uncorrected": Kind("uncorrectable HBM errors", *_ECC, Action.REPLACE, REPLACE_IT),
    "sram_ecc_uncorrected": Kind("uncorrectable SRAM errors", *_ECC, Action.REPLACE, REPLACE_IT),
    "mem_ecc_repairable_uncorrected": Kind("repairable HBM errors", *_REPAIRABLE, Action.REBOOT, _RELOAD),
    "hw_nc_ue_error": Kind("uncorrectable core errors", *_HARDWARE, Action.REPLACE, REPLACE_IT),
    "hw_hbm_ue_error": Kind("executions that met HBM errors", *_HARDWARE, Action.REPLACE, REPLACE_IT),
    "hw_repairable_hbm_ue_error": Kind("executions that met repairable errors", *_HARDWARE, Action.REBOOT, _RELOAD),
    "hw_dma_abort_error": Kind("DMA aborts", *_HARDWARE, Action.RESET_DEVICE, _RESET),
    "hw_error": Kind("hardware errors", *_HARDWARE, Action.INSPECT, "see the runtime's log for the kind"),
    "reset_fail_count": Kind("resets that failed", *_HARDWARE, Action.REBOOT, "reboot", Status.WARN),
    "mem_ecc_corrected": Kind(
        "corrected HBM errors an hour", *_CORRECTED, Action.INSPECT, _WATCH, Status.WARN, recent=True
    ),
    "sram_ecc_corrected": Kind(
        "corrected SRAM errors an hour", *_CORRECTED, Action.INSPECT, _WATCH, Status.WARN, recent=True
    ),
    "hw_collectives_error": Kind(
        "hangs in collectives", *_SUSPECT, Action.INSPECT, _OTHERS, Status.WARN, Blame.PATH, recent=True
    ),
    "timeout": Kind("executions timed out", *_SUSPECT, Action.INSPECT, _EITHER, Status.WARN, recent=True),
    "execute_completed_with_error": Kind(
        "executions ended with an error", *_SUSPECT, Action.INSPECT, _EITHER, Status.WARN, recent=True
    ),
}


UNKNOWN_KIND = Kind("hardware errors of an unknown kind", *_HARDWARE, Action.INSPECT, "see the runtime's log")
