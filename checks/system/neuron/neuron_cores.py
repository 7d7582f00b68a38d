"""NeuronCores: how many each device has, which processes hold them, and whether these processes still exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checks.accelerators.neuron.sysfs import chip_of
from checks.contract import NO_LIMIT, Context, Finding, Limit, Status, check
from checks.host.container import in_container
from checks.limits import within
from checks.system.neuron.neuron_scope import known_type, not_concerned, numbers, tool_error, unknown


@dataclass(frozen=True)
class Params:
    """What cannot be read from the machine."""

    type: str | None = None  # the instance type where the machine does not tell it


@check(tier="passive", interval_seconds=30, timeout_seconds=5, accelerators=True)
def neuron_cores(ctx: Context[Params]) -> Iterator[Finding]:
    """
    Every Neuron device has all its cores, and none is reserved for a process that has exited.

    A holder of cores is not a fault, but a holder without a process is: nothing will ever release its cores, every job
    that needs them fails with "cores busy", and only a reset of the device helps. Such a holder does not make the node
    allocated, and the cores of its devices are not probed. neuron-ls and sysfs must show the same devices and cores.

    Reads:   the inventory (neuron-ls and sysfs, asked once a round); /proc for whether a holder is still there.
    Judges:  fail MissingDevice (fewer cores than the chip has), StuckCores | unknown MissingTool, Timeout, NoData
             (neuron-ls does not say, or sysfs says otherwise) | skip NotApplicable (no Neuron devices).
    Cost:    under 1 ms; harmless to jobs.
    Source:  cores from checks/catalog.py; cores kept after their process had ended: aws-neuron-sdk issue 1338.
    Unverified on hardware: what the tools show of a core that is lost, and how soon the driver forgets an owner.
    """
    other = not_concerned(ctx)
    if other is not None:
        yield other
        return
    error = tool_error(ctx)
    if error is not None:
        yield unknown(error[0], f"processes that hold cores cannot be seen: {error[1]}")
    devices: list[dict[str, Any]] = list(ctx.inventory.get("devices") or ())
    if not devices:
        yield unknown("NoData", "the driver shows no device, so there are no cores; see device_count")
        return
    yield from _judge_counts(ctx, devices)
    yield from _judge_agreement(ctx, devices)
    if error is None:
        yield from _judge_holders(ctx)


def _judge_counts(ctx: Context[Params], devices: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Each device that has other cores than it should have, else all of them in one finding."""
    if all(device.get("cores") is None for device in devices):
        yield unknown("NoData", "neither neuron-ls nor sysfs reports the number of cores")
        return
    expected, origin = _expected(ctx, devices)
    bad = False
    for device in devices:
        finding = _judge_device(device, expected, origin)
        if finding is not None:
            bad = True
            yield finding
    if not bad and expected is not None:
        count = sum(device["cores"] for device in devices)
        yield within(
            float(count),
            name="neuron_cores_count",
            target="node",
            limit=Limit(lower=float(expected * len(devices)), upper=None, origin=origin),
            reason="MissingDevice",
            subject=f"NeuronCores on {len(devices)} devices{_configured(ctx)}:",
        )


def _judge_device(device: dict[str, Any], expected: int | None, origin: str) -> Finding | None:
    """What is wrong with the cores of one device; None where nothing is."""
    target, cores = str(device["target"]), device.get("cores")
    if cores is None:
        return unknown("NoData", "neither neuron-ls nor sysfs reports the number of cores of this device", target)
    if expected is None:
        text = f"{cores} cores, but neither the instance type nor the chip is known, so the expected number is unknown"
        return unknown("UnknownInstanceType", text, target)
    if cores > expected:
        return unknown("UnknownInstanceType", f"{cores} cores instead of {expected}; is the type correct?", target)
    if cores == expected:
        return None
    return within(
        float(cores),
        name="neuron_device_cores_count",
        target=target,
        limit=Limit(lower=float(expected), upper=None, origin=origin),
        reason="MissingDevice",
        subject="NeuronCores of this device:",
    )


def _expected(ctx: Context[Params], devices: Sequence[dict[str, Any]]) -> tuple[int | None, str]:
    """
    Logical cores that each device should have, and who says so.

    The chip is that of the instance type, else the one that the driver names. Without either the devices are compared
    with each other, where most of them agree.
    """
    known = known_type(ctx, ctx.params.type)
    names = {device.get("kind") for device in devices}
    chip = known.chip if known is not None else chip_of(names.pop() if len(names) == 1 else None)
    lnc = ctx.inventory.get("lnc")
    if chip is not None and chip.cores is not None and lnc in chip.lnc:
        return chip.cores // lnc, "catalogue"
    counts = Counter(device["cores"] for device in devices if device.get("cores") is not None)
    most, times = counts.most_common(1)[0] if counts else (None, 0)
    return (most, "derived") if len(devices) > 2 and 2 * times > len(devices) else (None, "none")


def _configured(ctx: Context[Params]) -> str:
    lnc = ctx.inventory.get("lnc")
    return f", {lnc} physical in each" if lnc is not None and lnc > 1 else ""


def _judge_agreement(ctx: Context[Params], devices: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Where neuron-ls and sysfs show different devices or cores; a container may be given fewer than sysfs shows."""
    shown = ctx.inventory.get("sysfs_indices")
    if ctx.inventory.get("source") != "neuron-ls" or shown is None:
        return
    listed = {int(device["index"]) for device in devices}
    only_sysfs = sorted(set(shown) - listed)
    if only_sysfs and not in_container(ctx.host):
        text = f"sysfs shows neuron:{numbers(only_sysfs)} but neuron-ls does not; check whether the driver has lost it"
        yield unknown("NoData", text)
    if len(listed) > len(shown):
        yield unknown("NoData", f"neuron-ls shows {len(listed)} devices but sysfs {len(shown)}; reload the driver")
    lnc = ctx.inventory.get("lnc")
    for device in devices:
        cores, physical = device.get("cores"), device.get("sysfs_cores")
        if cores is not None and physical is not None and physical not in (cores, cores * (lnc or 1)):
            text = (
                f"neuron-ls shows {cores} cores of {lnc or 1} physical cores each but sysfs {physical}; reload the "
                "driver"
            )
            yield unknown("NoData", text, str(device["target"]))


def _judge_holders(ctx: Context[Params]) -> Iterator[Finding]:
    owners = ctx.inventory.get("core_holders")
    if owners is None:
        text = "neuron-ls does not list the processes of every device, so stuck cores cannot be seen; update it"
        yield unknown("NoData", text)
        return
    dead = [owner for owner in owners if owner.get("alive") is False]
    for owner in dead:
        yield from _judge_dead(ctx, owner)
    if not dead:
        who = ", ".join(f"pid {owner['pid']} ({owner['command'] or 'unknown'})" for owner in owners[:4])
        more = f" and {len(owners) - 4} more" if len(owners) > 4 else ""
        yield within(
            float(len(owners)),
            name="neuron_core_holders_count",
            target="node",
            limit=NO_LIMIT,
            reason="StuckCores",
            subject=f"processes that hold cores ({who or 'none'}{more}):",
        )


def _judge_dead(ctx: Context[Params], owner: dict[str, Any]) -> Iterator[Finding]:
    """One holder without a process: what it has, unless somebody who is there has the device open as well."""
    holders = ctx.inventory.get("holders")
    if holders and ": pid " not in holders[-1]:
        holders = None  # so many that some were left out
    by_index = {int(device["index"]): device for device in ctx.inventory.get("devices") or ()}
    for index in owner["devices"]:
        target = f"neuron:{index}"
        ids = by_index.get(index, {}).get("core_ids")
        cores = f"its cores (among {numbers(ids)})" if ids else "its cores"
        text = f"pid {owner['pid']} ({owner['command'] or 'unknown'}) has exited but still holds {cores}"
        if holders is None or any(str(line).startswith(f"{target}: ") for line in holders):
            # A process that has inherited the open device will release it when it ends.
            why = "other holders of the device cannot be seen" if holders is None else "another process has it open"
            yield unknown("NoData", f"{text}; {why}", target)
            continue
        text += "; reset the device while no job uses it, or reboot"
        told = owner.get("cores")
        for place in [f"neuroncore:{core}" for core in told] if told else [target]:
            yield Finding(status=Status.FAIL, reason="StuckCores", message=text, target=place)
