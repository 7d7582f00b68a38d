"""
Which learned limits are meant for this machine: those of its hardware and of the versions that are at work here.

A set of learned limits stands for one kind of hardware with one set of versions. One that a known version contradicts
is not used, and where several are left nobody can say which is right, so none is: the speed is then shown unjudged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checks.contract import Limit

ORIGIN = "baseline"


def hardware_of(instance_type: str | None, kinds: Sequence[str], ranks: int) -> str | None:
    """
    The hardware in one word: instance type, else kind of device, and how many ranks it is split into.

    The split counts because a core of two has other rates than one of eight. None where nothing is known, or where
    devices of several kinds are in one machine whose type is not known.
    """
    kind = instance_type or (next(iter(set(kinds))) if len(set(kinds)) == 1 else None)
    return f"{kind} x{ranks}" if kind and ranks > 0 else None


def hardware_in(instance_type: str | None, inventory: Mapping[str, Any]) -> str | None:
    """The same, of an inventory as accelerators give it."""
    devices = [device for device in inventory.get("devices") or () if isinstance(device, Mapping)]
    return hardware_of(
        instance_type,
        [str(device.get("kind")) for device in devices],
        len(inventory.get("workers") or devices),
    )


def choose(
    sets: Iterable[Mapping[str, Any]], *, hardware: str | None, accelerator: str | None, versions: Mapping[str, str]
) -> dict[str, Limit]:
    """The limits of the one set that fits (see the module); empty where none does, or more than one."""
    fitting = [
        one
        for one in sets
        if hardware is not None
        and one["hardware"] == hardware
        and one["accelerator"] == accelerator
        and all(versions.get(name, version) == version for name, version in one["versions"].items())
    ]
    if len(fitting) != 1:
        return {}
    return {
        str(name): Limit(lower=bounds["lower"], upper=bounds["upper"], origin=ORIGIN)
        for name, bounds in fitting[0]["limits"].items()
    }
