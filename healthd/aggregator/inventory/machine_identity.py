"""
Which machine a node is, whether anything on it has failed, and what AWS has scheduled for it. Pure.

All of it is read once of each state that comes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Status
from healthd.aggregator.model.nodes import ScheduledEvent
from healthd.core import wire
from healthd.core.model import NodeState
from healthd.core.text import plain

EVENTS_CHECK = "scheduled_events"
"""The check that says what AWS has scheduled for the machine."""
MOST_IDENTITY = 128
"""Characters of a serial number or instance id: real ones have some forty, and the database has room for so many."""


def name_of(text: str | None) -> str | None:
    """A serial number, instance or boot id as it may be kept; None for what cannot be one."""
    return text if text and len(text) <= MOST_IDENTITY and text.isprintable() else None


def machine_identity(state: NodeState) -> str:
    """The machine by its instance id, where it has one; names get reused."""
    instance = name_of(state.instance_id)
    return f"instance:{instance}" if instance else f"node:{state.node}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a node is made of: `devices` are targets and their serial numbers."""

    instance_id: str | None
    boot_id: str | None
    devices: tuple[tuple[str, str | None], ...]


def machine_of(state: NodeState) -> str:
    """The machine that a node is as a short text, to compare and to keep: a `Machine` as JSON."""
    devices = state.inventory.devices if state.inventory is not None else ()
    found = Machine(
        instance_id=name_of(state.instance_id),
        boot_id=name_of(state.boot_id),
        devices=tuple((plain(device.target, MOST_IDENTITY), name_of(device.serial)) for device in devices),
    )
    return wire.encode(found).decode()


def identities_in(machine: str, node: str) -> tuple[str, ...]:
    """All that a latch on this machine may be on (see `Facts.identities`)."""
    found = wire.decode(machine.encode(), Machine, what="machine")
    serials = (f"serial:{serial}" for _, serial in found.devices if serial)
    instance = (f"instance:{found.instance_id}",) if found.instance_id else ()
    return (f"node:{node}", *instance, *serials)


def differences(before: str, after: str) -> Iterator[tuple[str, str]]:
    """What became of a machine, as kinds and messages of its history; what is not known has not changed."""
    old = wire.decode(before.encode(), Machine, what="machine")
    new = wire.decode(after.encode(), Machine, what="machine")
    if None not in (old.instance_id, new.instance_id) and old.instance_id != new.instance_id:
        yield "other machine", f"instance {old.instance_id} became {new.instance_id}"
    if None not in (old.boot_id, new.boot_id) and old.boot_id != new.boot_id:
        yield "booted", f"boot {new.boot_id}"
    serials = dict(old.devices)
    for target, serial in new.devices:
        known = serials.get(target)
        if known is not None and serial is not None and known != serial:
            yield "device replaced", f"{target}: {known} became {serial}"
    if old.devices and new.devices and serials.keys() != dict(new.devices).keys():
        yield "devices changed", f"{len(old.devices)} devices became {len(new.devices)}"


def failing(state: NodeState) -> bool:
    """Whether any result has failed: a node without that gives the rules nothing to begin with."""
    return any(result.status is Status.FAIL for result in state.results)


def scheduled_event(state: NodeState) -> ScheduledEvent | None:
    """
    What AWS has scheduled for the machine first, as of when the check ran; None where there is nothing.

    Only a pass, or a machine that is not on EC2, says that there is nothing.
    """
    result = next((result for result in state.results if result.check == EVENTS_CHECK), None)
    if result is None or not result.findings:
        return ScheduledEvent(seconds=None, message=f"{EVENTS_CHECK} has not run")
    events = [
        ScheduledEvent(seconds=measured.value, message=finding.message)
        for finding in result.findings
        if finding.reason == "ScheduledEvent"
        for measured in finding.measurements
        if measured.name == "scheduled_event_seconds" and measured.value is not None
    ]
    if events:
        return min(events, key=lambda event: event.seconds or 0.0)
    (finding, *_) = result.findings
    not_on_ec2 = finding.reason == "NotApplicable" and not finding.measurements
    return None if result.status is Status.PASS or not_on_ec2 else ScheduledEvent(seconds=None, message=finding.message)
