"""Which machine a node is, and whether anything on it has failed: read once of each state that comes in. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Status
from healthd import wire
from healthd.model import NodeState


def machine_identity(state: NodeState) -> str:
    """The machine by its instance id, where it has one; names get reused."""
    return f"instance:{state.instance_id}" if state.instance_id else f"node:{state.node}"


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
        instance_id=state.instance_id,
        boot_id=state.boot_id,
        devices=tuple((device.target, device.serial) for device in devices),
    )
    return wire.encode(found).decode()


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
