"""Whether the machine is what its instance type promises: the devices, their cores and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from checks.accelerators import driven_by, find_descriptor
from checks.catalog import InstanceType, find_type, has_no_accelerators
from checks.contract import Action, Context, Finding, Limit, Status, check
from checks.host.identity import read_identity
from checks.limits import quantity, within


@dataclass(frozen=True)
class Params:
    """What cannot be read from the machine."""

    type: str | None = None  # the instance type where the machine does not tell it
    devices: int | None = None  # under XLA, where device_count counts something else; None: all of the type
    memory_ratio: float = 0.95  # of the type's memory a device must show; drivers keep up to 2 %, a lost stack is 12 %


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def instance_type(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The machine has the accelerators that its instance type promises.

    A machine without its driver looks like one with plain CPUs, but its type shows what it is. `device_count` judges
    the number of devices and `neuron_cores` the cores of Neuron devices; both name what is missing. Under XLA a device
    may be a core, so this check counts the device files.

    Reads:   the type from params.type, else the inventory's and the firmware tables (/sys/devices/virtual/dmi/id);
             the inventory of the accelerator; under XLA the device files. No request to the metadata service.
    Judges:  fail MissingDevice (another accelerator, less memory) | unknown UnknownInstanceType (EC2, and the catalogue
             does not have the type, or it promises less than is seen), NoData (the driver says no count) | skip
             NotApplicable (no EC2; a type without accelerators).
    Cost:    under 1 ms; harmless to jobs.
    Source:  checks/catalog.py names one for each figure.
    Unverified on hardware: firmware tables and devices of real instances; both were written by documentation.
    """
    identity = read_identity(ctx.host, configured=ctx.params.type, inventory=ctx.inventory, imds=False)
    name, seen = identity["instance_type"], _accelerator(ctx)
    known = find_type(name)
    if ctx.params.type is not None and identity["instance_type_origin"] != "config":
        yield _unknown(f"{ctx.params.type!r} is not an instance type; correct type for this check")
    elif known is None:
        yield _without_record(name, seen, on_ec2=identity["on_ec2"])
    elif seen != known.chip.accelerator:
        yield _other_accelerator(known, seen)
    elif ctx.inventory.get("accelerator") == "xla":
        yield _judge_files(ctx, known)
    else:
        yield from _judge(ctx, known)


def _accelerator(ctx: Context[Params]) -> str | None:
    """The kind of device in use; under XLA the one that its PJRT client drives, which its devices' kind names."""
    used = ctx.inventory.get("accelerator")
    if used != "xla":
        return used
    clients = {str(device.get("kind")).removeprefix("PJRT ") for device in ctx.inventory.get("devices") or ()}
    return driven_by(clients.pop()) or "xla" if len(clients) == 1 else "xla"


def _without_record(name: str | None, seen: str | None, *, on_ec2: bool) -> Finding:
    """Nothing to compare with: is that in order here?"""
    if has_no_accelerators(name) and seen == "cpu":
        return _not_applicable(f"{name} has no accelerators")
    if name is not None:
        return _unknown(f"the catalogue has no instance type {name}, so its expected hardware is unknown")
    described = find_descriptor(seen)
    # Where such devices exist on EC2 alone there is a type, and it could not be read.
    if on_ec2 or (described is not None and described.on_ec2_only):
        return _unknown("the firmware tables do not contain the instance type; set type for this check")
    return _not_applicable("not on EC2, and no instance type is configured")


def _other_accelerator(known: InstanceType, seen: object) -> Finding:
    count = "" if known.devices is None else f"{known.devices} "
    text = (
        f"{known.name} has {count}{known.chip.name} ({known.chip.accelerator}), but {seen or 'nothing'} is in use "
        f"here; check that the driver is loaded and the accelerator is configured as {known.chip.accelerator} or auto"
    )
    return Finding(status=Status.FAIL, reason="MissingDevice", message=text, target="node")


def _judge(ctx: Context[Params], known: InstanceType) -> Iterator[Finding]:
    count = ctx.inventory.get("device_count")
    if count is None:
        text = f"the driver does not report its devices; {known.name} has {known.chip.name}"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
        return
    if known.devices is not None and count > known.devices:
        yield _unknown(
            f"{known.name} has {known.devices} {known.chip.name}, but {count} are shown; is the type correct?"
        )
        return
    # Too few are the fault of another check: this number is shown and not judged.
    yield within(
        float(count),
        name="instance_devices_count",
        target="node",
        reason="MissingDevice",
        subject=f"{known.name}, {known.chip.name} devices:",
    )
    yield from _judge_memory(ctx, known)


def _judge_files(ctx: Context[Params], known: InstanceType) -> Finding:
    """Under XLA the inventory holds what was configured, and tells no memory, so the files of devices are counted."""
    expected, origin = (known.devices, "catalogue") if ctx.params.devices is None else (ctx.params.devices, "config")
    if expected is None:
        return _unknown(
            f"{known.name} has {known.chip.name}, but their number is not published; set devices for this check"
        )
    described = find_descriptor(known.chip.accelerator)
    stem = described.device_files if described is not None else None
    if stem is None:
        return _unknown(f"{known.chip.accelerator} has no device files to count")
    count = sum(path[len(stem) :].isdecimal() for path in ctx.host.glob("/dev", stem.rpartition("/")[2] + "*"))
    if count > expected:
        return _unknown(f"{known.name} has {expected} {known.chip.name}, but {count} are shown; is the type correct?")
    return within(
        float(count),
        name="instance_devices_count",
        target="node",
        limit=Limit(lower=float(expected), upper=None, origin=origin),
        reason="MissingDevice",
        subject=f"{known.name}, {known.chip.name} devices:",
    )


def _judge_memory(ctx: Context[Params], known: InstanceType) -> Iterator[Finding]:
    """
    Each device that shows less memory than it should, else the one that shows least.

    Nothing where no device tells its memory: not every driver does, and the count has been judged.
    """
    name = "instance_device_memory_bytes"
    limit = Limit(lower=ctx.params.memory_ratio * known.chip.memory_bytes, upper=None, origin="catalogue")
    devices: list[dict[str, Any]] = [device for device in ctx.inventory.get("devices") or () if device.get("target")]
    if all(device.get("memory_bytes") is None for device in devices):
        source = ctx.inventory.get("source")
        described = find_descriptor(ctx.inventory.get("accelerator"))
        if devices and described is not None and source is not None and source == described.memory_told_by:
            promised = quantity(name, float(known.chip.memory_bytes))
            text = f"{source} reports no memory size of its devices; {known.chip.name} has {promised}"
            yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
        return
    findings = [
        within(
            None if (size := device.get("memory_bytes")) is None else float(size),
            name=name,
            target=str(device["target"]),
            limit=limit,
            reason="MissingDevice",
            subject=f"memory of this {known.chip.name}, of {quantity(name, float(known.chip.memory_bytes))}:",
            action=Action.INSPECT,  # a reboot brings back no memory; a GPU may be partitioned (MIG)
        )
        for device in devices
    ]
    bad = [finding for finding in findings if finding.status is not Status.PASS]
    yield from bad or [min(findings, key=lambda finding: finding.measurements[0].value or 0.0)]


def _unknown(text: str) -> Finding:
    return Finding(status=Status.UNKNOWN, reason="UnknownInstanceType", message=text, target="node")


def _not_applicable(text: str) -> Finding:
    return Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
