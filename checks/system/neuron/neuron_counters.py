"""What the Neuron driver counts of each device: ECC errors, executions that failed by hardware, unhealthy parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.accelerators.neuron.leaves import (
    CORRECTED,
    REQUIRED,
    DeviceCounters,
    read_devices,
)
from checks.contract import Action, Context, Evidence, Finding, Measurement, Status, check
from checks.host.machine import HostError
from checks.limits import within
from checks.printable import some
from checks.system.bounds import bound
from checks.system.neuron.neuron_aborts import ABORTS, Abort, abort_kind, read_aborts
from checks.system.neuron.neuron_counting import History, next_history
from checks.system.neuron.neuron_health import judge_components, judge_state
from checks.system.neuron.neuron_kinds import KINDS, UNKNOWN_KIND, over_cores
from checks.system.neuron.neuron_watch import Watch, judge_watch, next_watch


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


@check(tier="passive", interval_seconds=60, timeout_seconds=15, accelerators=True)
def neuron_counters(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The driver counts no uncorrectable memory error and no hardware error, holds every device ready, and the firmware
    calls no part unhealthy.

    Damage counts for as long as the driver is loaded, and what was counted before the counters were set back is told
    as a warning until the next boot. DMA aborts are a warning once the device was reset after them, and a reason to
    replace it when they come again after that. Corrected errors are judged by the hour; time-outs, executions that
    ended with an error and hangs in collectives by what came while we looked, as warnings, because programs and other
    nodes cause them too. What a program alone causes (bad input, full queues) is not read. A device is looked at under
    the host's number of it, which a container may not know. Where sysfs has no ECC counters, neuron-monitor is asked
    for those of a moment, which is a warning: what was before is not known.

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
        text = f"hw_error of no core is found below {some(bare)}: does the driver put its counters elsewhere?"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")


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


def _host_indices(inventory: Mapping[str, Any]) -> dict[str, int | None]:
    devices = [device for device in inventory.get("devices") or () if device.get("target")]
    found = {str(device["target"]): device.get("host_index", device.get("index")) for device in devices}
    return {target: index if isinstance(index, int) else None for target, index in found.items()}


def _judge_untold(targets: Sequence[str]) -> Iterator[Finding]:
    if targets:
        text = (
            f"which of the host's devices is {some(targets)} cannot be told in this container, so no counters of it "
            "are read: those of another tenant's device may be taken for them; run healthd on the host"
        )
        target = targets[0] if len(targets) == 1 else "node"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


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


def judge_wiped(history: History) -> Iterator[Finding]:
    """Damage that nothing but a new machine repairs, and whose count was set back since."""
    for target, names in history.wiped.items():
        for name, count in names.items():
            kind = KINDS.get(name, UNKNOWN_KIND)
            if kind.recent or kind.action is not Action.REPLACE or history.counts.get(target, {}).get(name):
                continue
            text = (
                f"{name} held {count} before the counters were set back (a driver that was loaded again, or somebody "
                f"who cleared them), which repairs nothing; {kind.advice}"
            )
            yield Finding(
                status=Status.WARN,
                reason=kind.reason,
                message=text,
                target=target,
                action=kind.action,
                blame=kind.blame,
            )


def judge_gaps(target: str, device: DeviceCounters) -> Iterator[Finding]:
    """What is there and could not be read or understood; what is not there at all is `find_lacking`."""
    if device.denied is not None:
        yield Finding(status=Status.UNKNOWN, reason="NoPermission", message=device.denied, target=target)
        return
    dark = [name for name, count in device.counts.items() if count is None]
    numbers = sorted({core for row in device.cores.values() for core in row})
    dark += [f"{name} of core {n}" for name, row in device.cores.items() for n in numbers if row.get(n) is None]
    if dark:
        text = f"no count to be read: {', '.join(dark[:4])}{' and others' if len(dark) > 4 else ''}"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=target)


def _read(ctx: Context[Params]) -> tuple[dict[int, DeviceCounters], str | None]:
    """What sysfs shows, and why it shows nothing."""
    try:
        return read_devices(ctx.host), None
    except HostError as error:
        return {}, str(error)


def _all_well(devices: Mapping[str, DeviceCounters], history: History) -> Finding:
    cores = sum(len(device.cores.get("hw_error", {})) for device in devices.values())
    read = sum(len(device.counts) + sum(map(len, device.cores.values())) for device in devices.values())
    corrected = sum(history.counts.get(target, {}).get(name, 0) for target in devices for name in CORRECTED)
    errors = f", {corrected} corrected errors so far" if corrected else ""
    back = "; some were set back since we look" if history.wiped else ""
    return Finding(
        status=Status.PASS,
        reason=None,
        message=f"{len(devices)} devices, {cores} cores: {read} counters tell of no damage{errors}{back}",
        target="node",
        measurements=(
            Measurement(name="neuron_counters_read_count", value=float(read), lower=None, upper=None, origin="none"),
        ),
    )


def _cores(cores: Mapping[int, int | None]) -> str:
    bad = [str(core) for core, count in sorted(cores.items()) if count]
    return f", core {' '.join(bad[:8])}" if bad else ""


def _recently(recent: int, total: int, wiped: int) -> str:
    before = f", set back since it held {wiped}" if wiped else ""
    return f", {recent} of {total} within the last hours{before}" if recent else before
