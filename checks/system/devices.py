"""What the accelerator's driver shows: how many devices there are, and who holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Limit, NoParams, Status, check
from checks.limits import within


@dataclass(frozen=True)
class Params:
    """What should be there."""

    expected: int | None = None  # None: from the instance type; plain CPUs are what is configured


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def device_count(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The node has as many devices as it should have.

    Reads:   the inventory of the accelerator's driver.
    Judges:  fail MissingDevice | unknown NoData (the driver says nothing), UnknownInstanceType (nothing to compare).
    Cost:    under 1 ms; harmless to jobs.
    """
    count = ctx.inventory.get("device_count")
    if count is None:
        text = "the driver does not say how many devices there are"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
        return
    expected, origin = ctx.params.expected, "config"
    if expected is None:
        expected, origin = ctx.inventory.get("expected_device_count"), "derived"
    if expected is None:
        yield Finding(
            status=Status.UNKNOWN,
            reason="UnknownInstanceType",
            message=f"{count} devices found and nothing to compare with; set expected for this check",
            target="node",
        )
        return
    devices = ctx.inventory.get("devices") or ()
    names = ", ".join(device["target"] for device in devices) or "none"
    yield within(
        float(count),
        name="device_count",
        target="node",
        limit=Limit(lower=float(expected), upper=None, origin=origin),
        reason="MissingDevice",
        subject=f"devices found ({names}):",
    )


@check(tier="passive", interval_seconds=30, timeout_seconds=5)
def device_holders(ctx: Context[NoParams]) -> Iterator[Finding]:
    """
    It can be seen which processes hold the devices.

    A holder is a fact, not a fault: it makes the node allocated. Not being able to see any is unknown, and counts as
    taken.

    Reads:   what the accelerator's driver and /proc say.
    Judges:  unknown NoData (holders cannot be seen).
    Cost:    1 ms for every thousand processes; harmless to jobs.
    """
    holders = ctx.inventory.get("holders")
    if holders is None:
        yield Finding(
            status=Status.UNKNOWN,
            reason="NoData",
            message="cannot see who holds the devices, so they count as taken; run as root in the host's PID namespace",
            target="node",
        )
        return
    who = ", ".join(holders[:8]) + (f" and {len(holders) - 8} more" if len(holders) > 8 else "")
    yield within(
        float(len(holders)),
        name="device_holders_count",
        target="node",
        reason="NoData",
        subject=f"holders of devices ({who or 'nobody'}):",
    )
