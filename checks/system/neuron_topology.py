"""NeuronLink: whether each device has links to the devices that it should have links to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from checks.catalog import InstanceType
from checks.contract import NO_LIMIT, Context, Finding, Limit, Status, check
from checks.limits import within
from checks.system.neuron_scope import known_type, not_concerned, unknown

Links = Mapping[int, "frozenset[int] | None"]


@dataclass(frozen=True)
class Params:
    """What cannot be read from the machine."""

    type: str | None = None  # the instance type where the machine does not tell it


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def neuron_topology(ctx: Context[Params]) -> Iterator[Finding]:
    """
    Every Neuron device has its NeuronLinks to the devices that its instance type says.

    Containers may number devices anew. Where most devices differ from the catalogue, numbers are taken for such: then
    it counts how many links each device has, and how often it is named. Links to a device that is not shown are not
    judged: `device_count` says that it is missing.

    Reads:   the inventory (connected_to of neuron-ls, else connected_devices of sysfs); the type as instance_type does.
    Judges:  fail WrongTopology (a link that should be there is not) | unknown NoData (a device tells no neighbours),
             UnknownInstanceType (nothing to compare with) | skip NotApplicable (no Neuron; links go through switches).
    Cost:    under 1 ms; harmless to jobs.
    Source:  checks/catalog.py names one for the links of each type.
    Unverified on hardware: what a device shows whose link is down.
    """
    other = not_concerned(ctx)
    if other is not None:
        yield other
        return
    known = known_type(ctx, ctx.params.type)
    links = _links(ctx)
    if known is None or known.topology is None:
        name = "the instance type" if known is None else known.name
        text = f"the links that devices should have are not known: {name} is not in the catalogue with its topology"
        yield unknown("UnknownInstanceType", text)
    elif known.topology not in ("single", "ring", "torus"):
        text = f"the devices of {known.name} are linked by {known.topology}, which neuron-ls does not show"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
    elif not links:
        yield unknown("NoData", "no device is shown, so no link is; see device_count")
    elif known.topology == "single":
        yield _measured(0, 0, known, "one device, no links to others; links:")
    else:
        yield from _judge(known, links)


def _links(ctx: Context[Params]) -> Links:
    found: dict[int, frozenset[int] | None] = {}
    for device in ctx.inventory.get("devices") or ():
        connected = device.get("connected_to")
        found[int(device["index"])] = None if connected is None else frozenset(connected)
    return found


def _judge(known: InstanceType, links: Links) -> Iterator[Finding]:
    silent = [index for index, connected in links.items() if connected is None]
    if len(silent) == len(links):
        yield unknown("NoData", "neither neuron-ls nor sysfs tells which devices are linked; update aws-neuronx-tools")
        return
    told = {index: connected for index, connected in links.items() if connected is not None}
    expected = _expected(known, links)
    missing = {index: expected[index] - connected for index, connected in told.items() if index in expected}
    different = [
        index
        for index, connected in told.items()
        if index not in expected or expected[index] != connected & links.keys() - {index}
    ]
    for index in silent:
        yield unknown("NoData", "this device tells no neighbours", f"neuron:{index}")
    if 2 * len(different) > len(told):
        yield from _judge_renumbered(known, told, whole=len(links) == known.devices)
        return
    wrong = [index for index in different if missing[index]]
    for index in wrong:
        yield _wrong(known, index, missing[index], told)
    for index in different:
        if index not in wrong:
            extra = sorted(told[index] & links.keys() - {index} - expected[index])
            text = f"names {_names(extra)} as neighbours beside those of {known.name}; see whether the type is right"
            yield unknown("UnknownInstanceType", text, f"neuron:{index}")
    if not different and not silent:
        count = sum(len(told[index] & expected[index]) for index in told)
        whole = sum(map(len, expected.values()))
        yield _measured(count, whole, known, f"{len(told)} devices have their links; link ends:")


def _expected(known: InstanceType, links: Links) -> dict[int, frozenset[int]]:
    """Neighbours by the catalogue among the devices that are shown; nothing for a number that the type has not."""
    return {
        index: frozenset(known.neighbours(index) or ()) & links.keys()
        for index in links
        if known.devices is not None and 0 <= index < known.devices
    }


def _judge_renumbered(known: InstanceType, told: Mapping[int, frozenset[int]], *, whole: bool) -> Iterator[Finding]:
    """
    Of numbers that are not the host's: how many links a device has, and how often it is named.

    A share of the machine may show links to devices that are not in it, or leave them out: fewer are no fault there.
    """
    degree = len(known.neighbours(0) or ())
    low = {index: len(connected) for index, connected in told.items() if len(connected) < degree}
    named = Counter(number for connected in told.values() for number in connected)
    forgotten = sorted(number for number, times in named.items() if times < degree)
    if not whole or (not low and not forgotten):
        count = sum(map(len, told.values()))
        expected = degree * len(told) if whole else None
        numbering = "whose numbers are not the host's" if whole else "a share of the machine"
        yield _measured(count, expected, known, f"{len(told)} devices, {numbering}, have their links; link ends:")
        return
    for index, count in low.items():
        others = f"; {_names(forgotten)} in the host's numbers is named too seldom" if forgotten else ""
        text = f"has links to {count} devices instead of {degree} as in {known.name}{others}"
        yield Finding(status=Status.FAIL, reason="WrongTopology", message=text, target=f"neuron:{index}")
    if not low:
        text = f"{_names(forgotten)} is named as a neighbour less than {degree} times, and others more often"
        yield unknown("NoData", f"{text}: the numbers are not the host's, so it cannot be told which device that is")


def _wrong(known: InstanceType, index: int, missing: frozenset[int], told: Mapping[int, frozenset[int]]) -> Finding:
    back = [other for other in sorted(missing) if index in told.get(other, ())]
    text = f"has no link to {_names(sorted(missing))}, which {known.name} has"
    if back:
        text += f"; {_names(back)} shows one to it"
    return Finding(status=Status.FAIL, reason="WrongTopology", message=text, target=f"neuron:{index}")


def _measured(count: int, expected: int | None, known: InstanceType, subject: str) -> Finding:
    return within(
        float(count),
        name="neuron_links_count",
        target="node",
        limit=NO_LIMIT if expected is None else Limit(lower=float(expected), upper=None, origin="catalogue"),
        reason="WrongTopology",
        subject=f"{known.name}: {subject}",
    )


def _names(indices: list[int]) -> str:
    return ", ".join(f"neuron:{index}" for index in indices)
