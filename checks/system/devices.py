"""The devices that the accelerator's driver shows: their number, and the processes that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.accelerators import find_descriptor
from checks.catalog import find_type
from checks.contract import Context, Finding, Limit, NoParams, Status, check
from checks.host.container import in_container
from checks.host.identity import read_identity
from checks.limits import within
from checks.printable import some

NOT_SHOWN = "the driver does not show it"


@dataclass(frozen=True)
class Params:
    """What should be there."""

    expected: int | None = None  # None: from the instance type; a container's share where it is given fewer
    type: str | None = None  # the instance type where the machine does not tell it


# That there are too few may be a wrong expectation or a driver that is missing; one that is named is lost.
@check(tier="passive", interval_seconds=30, timeout_seconds=5, accelerator_faults=(f"MissingDevice: {NOT_SHOWN}",))
def device_count(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The node has as many devices as it should have, and each has its driver.

    The number of plain CPU devices is configured. For other devices the expected number comes from the instance type,
    unless a parameter sets it. More devices than expected are not a fault here: `instance_type` reports that the type
    may be wrong. An NVIDIA GPU on the PCI bus without a driver makes the node a GPU node, unless `accelerator` of
    [probe] is set to another kind.

    Reads:   the inventory of the accelerator's driver; of NVIDIA GPUs vendor, class and driver in /sys/bus/pci/devices;
             the type from params.type, else as instance_type does.
    Judges:  fail MissingDevice, MissingDriver | unknown NoData (the driver says nothing), UnknownInstanceType (nothing
             to compare).
    Cost:    under 1 ms; harmless to jobs.
    Source:  checks/catalog.py names one for the number of devices of each type.
    Unverified on hardware: that the other Neuron devices keep their numbers where one is lost.
    """
    count = ctx.inventory.get("device_count")
    without = ctx.inventory.get("without_driver") or ()
    for address in without:
        text = "a GPU is on the PCI bus but no driver is bound to it: install or load the driver, and see dmesg"
        yield Finding(status=Status.FAIL, reason="MissingDriver", message=text, target=f"pci:{address}")
    if count is None:
        text = f"the driver does not report the number of devices{_tool_words(ctx)}"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
        return
    expected, origin = _expected(ctx)
    if expected is None and without:
        return
    if expected is None:
        yield Finding(
            status=Status.UNKNOWN,
            reason="UnknownInstanceType",
            message=(
                f"{count} devices found, but the instance type is unknown, so the expected number is unknown; set "
                "expected"
            ),
            target="node",
        )
        return
    names = _names([str(device["target"]) for device in ctx.inventory.get("devices") or ()])
    words = _tool_words(ctx) if count < expected else ""
    if count < expected <= len(ctx.inventory.get("sysfs_indices") or ()):
        words += "; sysfs shows more: if the container was given fewer, set expected for this check"
    yield within(
        float(count),
        name="device_count",
        target="node",
        limit=Limit(lower=float(expected), upper=None, origin=origin),
        reason="MissingDevice",
        subject=f"devices found ({names}{words}):",
    )
    if origin == "catalogue":
        for index in _gaps(ctx, expected):
            text = f"{NOT_SHOWN}, and shows the others by their numbers"
            target = f"{ctx.inventory['accelerator']}:{index}"
            yield Finding(status=Status.FAIL, reason="MissingDevice", message=text, target=target)


def _gaps(ctx: Context[Params], expected: int) -> list[int]:
    """The numbers that are missing among those of a whole machine; none where this cannot be told."""
    shown = {device.get("index") for device in ctx.inventory.get("devices") or ()}
    wanted = set(range(expected))
    described = find_descriptor(ctx.inventory.get("accelerator"))
    if described is None or not described.numbers_last:
        return []
    if not shown or not shown < wanted or in_container(ctx.host):
        return []
    gaps = wanted - shown
    # What sysfs has and the vendor's tool has not may be kept from us, and is not lost.
    return [] if gaps & set(ctx.inventory.get("sysfs_indices") or ()) else sorted(gaps)


def _expected(ctx: Context[Params]) -> tuple[int | None, str]:
    """How many devices there should be, and who says so; None where nobody does."""
    if ctx.params.expected is not None:
        return ctx.params.expected, "config"
    derived = ctx.inventory.get("expected_device_count")
    if derived is not None:
        return derived, "derived"
    identity = read_identity(ctx.host, configured=ctx.params.type, inventory=ctx.inventory, imds=False)
    known = find_type(identity["instance_type"])
    if known is None or known.chip.accelerator != ctx.inventory.get("accelerator"):
        return None, "none"
    return known.devices, "catalogue"


def _names(targets: list[str]) -> str:
    """The devices by name, runs of more than two drawn together, so that a gap is seen: `neuron:0-6, neuron:8-15`."""
    runs: list[list[tuple[str, int]]] = []
    parts: list[tuple[str, int]] = []
    for target in targets:
        kind, _, number = target.rpartition(":")
        if not (number.isascii() and number.isdecimal()):
            return ", ".join(targets)
        parts.append((kind, int(number)))
    for kind, index in sorted(parts):
        if runs and runs[-1][-1] == (kind, index - 1):
            runs[-1].append((kind, index))
        else:
            runs.append([(kind, index)])
    words = [
        f"{run[0][0]}:{run[0][1]}-{run[-1][1]}" if len(run) > 2 else ", ".join(f"{kind}:{n}" for kind, n in run)
        for run in runs
    ]
    return ", ".join(words) or "none"


def _tool_words(ctx: Context[Params]) -> str:
    """Why the accelerator's own tool said nothing, where that is known."""
    error = ctx.inventory.get("tool_error")
    return f"; {error[1]}" if error else ""


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def device_holders(ctx: Context[NoParams]) -> Iterator[Finding]:
    """
    The processes that hold the devices are visible to healthd.

    A holder is not a fault: it makes the node allocated. If holders cannot be seen, the result is unknown, and the
    devices count as in use.

    Reads:   what the accelerator's driver and /proc say.
    Judges:  unknown NoData (holders cannot be seen).
    Cost:    1 ms for every thousand processes; harmless to jobs.
    Unverified on hardware: holders of GPUs and Neuron devices; those of CPU devices are read from real processes.
    """
    holders = ctx.inventory.get("holders")
    if holders is None:
        yield Finding(
            status=Status.UNKNOWN,
            reason="NoData",
            message=(
                "holders of the devices cannot be seen, so the devices count as in use; run as root in the host's "
                "PID namespace"
            ),
            target="node",
        )
        return
    who = some(holders, 8)
    yield within(
        float(len(holders)),
        name="device_holders_count",
        target="node",
        reason="NoData",
        subject=f"holders of devices ({who or 'none'}):",
    )
