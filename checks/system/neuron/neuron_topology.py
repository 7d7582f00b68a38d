"""Compares the links that the Neuron driver lists with those of the instance type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from checks.catalog import InstanceType
from checks.contract import Context, Finding, Limit, Status, check
from checks.limits import within
from checks.system.neuron.neuron_scope import known_type, not_concerned, unknown

Links = Mapping[int, frozenset[int]]


@dataclass(frozen=True)
class Params:
    """What cannot be read from the machine."""

    type: str | None = None  # the instance type where the machine does not tell it


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def neuron_topology(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The driver lists the links between devices that the instance type has.

    The driver does not inspect links. It takes its list from a fixed table, by the kind and number of the devices that
    it has found, so the list never shows a broken link. It does show that all devices were found, and that their kind
    and order are those of the instance type. If a device is missing, the driver lists no links at all; `device_count`
    judges that. The links themselves are judged by the collectives (`nccom_all_reduce` and the others), which move data
    over them, and on Trainium2 and 3 also by the firmware's report, `link_*` in `neuron_counters`.

    Reads:   the inventory (connected_to of neuron-ls, else connected_devices of sysfs); the type as instance_type does.
    Judges:  warn WrongTopology (the list differs from the type) | unknown NoData (no list, or a container's numbers
             that are not known to be the host's), UnknownInstanceType (nothing to compare with) | skip NotApplicable
             (no Neuron; links go through switches, which the driver does not list).
    Cost:    under 1 ms; harmless to jobs.
    Source:  aws-neuron-driver, v2/neuron_dhal_v2.c and v3/neuron_dhal_v3.c (fw_io_topology); checks/catalog.py.
    Unverified on hardware: what the driver and neuron-ls list is from the driver's source.
    """
    other = not_concerned(ctx)
    if other is not None:
        yield other
        return
    known = known_type(ctx, ctx.params.type)
    devices = list(ctx.inventory.get("devices") or ())
    if known is None or known.topology is None:
        name = "the instance type" if known is None else known.name
        text = f"the expected links are unknown: {name} is not in the catalogue with its topology"
        yield unknown("UnknownInstanceType", text)
    elif known.topology not in ("single", "chain", "ring", "torus"):
        text = f"the devices of {known.name} are linked by {known.topology}, which the driver does not list"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
    elif not devices:
        yield unknown("NoData", "the driver shows no device, so there are no links; see device_count")
    elif known.topology == "single":
        yield _measured(0, 0, known, "one device, which has no links to others; links:")
    else:
        yield from _judge(known, devices)


def _judge(known: InstanceType, devices: list[dict[str, Any]]) -> Iterator[Finding]:
    if not any(device.get("connected_to") for device in devices):
        yield unknown("NoData", _why_none(known, devices))
        return
    targets: dict[int, str] = {}
    links: dict[int, frozenset[int]] = {}
    for device in devices:
        index, target = device.get("host_index", device.get("index")), str(device["target"])
        if not device.get("connected_to"):
            yield unknown("NoData", "the driver lists the links of other devices but not of this one", target)
        elif not isinstance(index, int):
            yield unknown("NoData", "this container cannot determine which of the host's devices this is", target)
        else:
            targets[index], links[index] = target, frozenset(device["connected_to"])
    different = [index for index in links if _expected(known, index) != links[index]]
    for index in different:
        yield _different(known, targets[index], links[index], _expected(known, index))
    if not different and len(links) == len(devices):
        count = sum(map(len, links.values()))
        whole = sum(len(_expected(known, index) or ()) for index in links)
        yield _measured(count, whole, known, f"the driver lists links of {len(links)} devices:")


def _why_none(known: InstanceType, devices: list[dict[str, Any]]) -> str:
    if known.devices is not None and len(devices) < known.devices:
        return (
            f"the driver lists no links: it does so only if it finds all {known.devices} devices of {known.name}, "
            f"but {len(devices)} are shown; see device_count"
        )
    return f"neither neuron-ls nor sysfs lists the links of {known.name}; check that the driver is loaded"


def _expected(known: InstanceType, index: int) -> frozenset[int] | None:
    """Neighbours by the catalogue; None for a number that the type has not."""
    if known.devices is None or not 0 <= index < known.devices:
        return None
    return frozenset(known.neighbours(index) or ())


def _different(known: InstanceType, target: str, listed: frozenset[int], expected: frozenset[int] | None) -> Finding:
    should = "has no such device" if expected is None else f"has {_names(expected)}"
    text = (
        f"the driver lists links to {_names(listed)}, but {known.name} {should}; its list depends only on the type "
        "and number of devices, so check the instance type and the driver's version"
    )
    return Finding(status=Status.WARN, reason="WrongTopology", message=text, target=target)


def _measured(count: int, expected: int, known: InstanceType, subject: str) -> Finding:
    return within(
        float(count),
        name="neuron_links_count",
        target="node",
        limit=Limit(lower=float(expected), upper=None, origin="catalogue"),
        reason="WrongTopology",
        subject=f"{known.name}: {subject}",
    )


def _names(indices: frozenset[int]) -> str:
    return ", ".join(str(index) for index in sorted(indices))
