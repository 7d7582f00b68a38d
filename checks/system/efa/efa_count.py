"""How many EFA interfaces a node should have, and what fewer mean: a fault, or a node that was launched without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from checks.catalog import InstanceType
from checks.contract import NO_LIMIT, Context, Finding, Limit, Status, make_finding
from checks.host.efa import Adapter, find_on_bus
from checks.limits import within
from checks.system.efa.efa_links import missing_addresses, target_at, used_by

if TYPE_CHECKING:
    from checks.system.efa.efa import Params

_TEMPLATE = "add them in the launch template (network interfaces of type efa), or set expected for this check"


def judge_count(
    ctx: Context[Any],
    wanted: Params,
    known: InstanceType | None,
    adapters: Sequence[Adapter] | None,
    users: Mapping[str, Sequence[str]],
) -> Iterator[Finding]:
    """
    The number of interfaces; where some are missing, each of them as well, as far as its place is known.

    `users` are the targets of devices by the address of the interface that each uses.
    """
    counted = _counted(ctx, wanted, known, adapters)
    yield counted
    if counted.reason != "MissingDevice" or not adapters or known is None:
        return  # of none at all, one finding says it
    if wanted.expected in (None, known.efa_interfaces):
        yield from _missing(known.name, adapters, users)


def _counted(
    ctx: Context[Any], wanted: Params, known: InstanceType | None, adapters: Sequence[Adapter] | None
) -> Finding:
    count = None if adapters is None else len(adapters)
    expected, outside, origin = _expected(wanted, known)
    if expected is None and (skipped := _without_expectation(ctx, known, count)) is not None:
        return skipped
    if expected == 0 and not count:
        return make_finding(Status.SKIP, "NotApplicable", "no EFA interface is expected, and there is none")
    if count is None:
        return make_finding(Status.UNKNOWN, "NoData", "sysfs is not mounted here, so EFA interfaces cannot be seen")
    names = ", ".join(adapter.name for adapter in adapters or ()) or "none"
    finding = within(
        float(count),
        name="efa_interfaces_count",
        target="node",
        limit=NO_LIMIT if expected is None else Limit(lower=float(expected), upper=None, origin=origin),
        reason="MissingDevice",
        subject=f"EFA interfaces ({names}):",
        outside=outside,
    )
    if finding.status is Status.PASS:
        return finding
    on_bus = len(find_on_bus(ctx.host))
    unbound = f"; the PCI bus shows {on_bus}: load the efa driver" if on_bus > count else f"; {_TEMPLATE}"
    alone = not wanted.required and wanted.expected is None and not count and not on_bus
    if alone:
        unbound = f"; jobs over several nodes need them{unbound}"
    return Finding(
        status=Status.WARN if alone else finding.status,
        reason=finding.reason,
        message=finding.message + unbound,
        target="node",
        measurements=finding.measurements,
    )


def _expected(wanted: Params, known: InstanceType | None) -> tuple[int | None, Status, str]:
    """How many there should be (None: nobody says), how bad fewer are, and who says so."""
    if wanted.expected is not None:
        return wanted.expected, Status.FAIL, "config"
    if known is None or known.efa_interfaces is None:
        return None, Status.FAIL, "none"
    if known.efa_interfaces == 0:
        return 0, Status.FAIL, "catalogue"
    several = (known.devices or 0) > 1
    if known.chip.accelerator == "neuron" and several:
        return known.efa_interfaces, Status.FAIL, "catalogue"
    if known.topology == "switch" and several:
        return known.efa_interfaces, Status.WARN, "catalogue"
    return 0, Status.FAIL, "catalogue"  # types that do their work alone: whoever wants EFA sets expected


def _without_expectation(ctx: Context[Any], known: InstanceType | None, count: int | None) -> Finding | None:
    """What to say where nobody says how many there should be; None where what is there can be shown unjudged."""
    accelerator = ctx.inventory.get("accelerator")
    # Neuron devices exist on EC2 alone. GPUs elsewhere, and CPUs, need no EFA.
    concerned = known is not None or accelerator == "neuron" or (accelerator != "cpu" and bool(count))
    if concerned:
        text = f"{count or 0} EFA interfaces found and nothing to compare with; set expected for this check"
        return make_finding(Status.UNKNOWN, "UnknownInstanceType", text)
    return None if count else make_finding(Status.SKIP, "NotApplicable", "no EFA interface, and none needed")


def _missing(name: str, adapters: Sequence[Adapter], users: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Which are missing, and who would use them; nothing where the places are not known."""
    for address in missing_addresses(name, adapters):
        text = f"no EFA interface at {address}{used_by(users.get(address))}"
        yield make_finding(Status.FAIL, "MissingDevice", text, target=target_at(address, adapters))
