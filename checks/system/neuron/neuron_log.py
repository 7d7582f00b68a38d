"""
What the Neuron driver and runtime say of devices in the kernel log: which device, and when it was reset.

The runtime names a device by its serial number, the driver by its index on the host (`nd5`). Inside a container the log
is that of the whole machine, so a line may be about a device of somebody else.

Source: aws-neuron-driver, neuron_reset.c (the lines of resets), neuron_module.c (the line of its start).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from checks.host.container import in_container
from checks.host.machine import Host, LogLine

NODE = "node"
_SERIAL = re.compile(r"\bserial-num=([0-9A-Za-z-]{4,64})\b", re.ASCII)
_RUNTIME = re.compile(r"(?:\bnd-id=|\[ND )(\d{1,4})\b", re.ASCII)
_DRIVER = re.compile(r"\bnd(\d{1,4})(?=:| is )", re.ASCII)
# A reset of single cores ("TPB") cures less; older drivers do not say which it is.
_INITIATED = re.compile(r"\bnd(\d{1,4}): initiating device reset request (\d{1,10})", re.ASCII)
_COMPLETED = re.compile(r"\bnd(\d{1,4}): reset request (\d{1,10}) completed", re.ASCII)
_STARTED = "Neuron Driver Started with Version"


class Devices(NamedTuple):
    """
    The devices that may be used here, by what the log calls them.

    `whole`: the machine is ours, not a part of it in a container. `told`: serial number and host's index of each are
    known, so that what is not among them is somebody else's.
    """

    by_serial: Mapping[str, str]
    by_host_index: Mapping[int, str]
    whole: bool
    told: bool = True


def devices_of(host: Host, inventory: Mapping[str, Any]) -> Devices:
    """The devices of an inventory."""
    devices = inventory.get("devices") or () if inventory.get("accelerator") == "neuron" else ()
    serials = {str(device["serial"]): str(device["target"]) for device in devices if device.get("serial")}
    indices = {
        device["host_index"]: str(device["target"]) for device in devices if isinstance(device.get("host_index"), int)
    }
    shown = inventory.get("sysfs_indices")
    whole = shown is None or len(shown) <= len(devices) or not in_container(host)
    return Devices(serials, indices, whole, told=len(serials) == len(indices) == len(devices))


def target_of(text: str, devices: Devices) -> str | None:
    """The device that a line is about; `node` where it names none; None where it is known not to be one of these."""
    if serial := _SERIAL.search(text):
        if target := devices.by_serial.get(serial[1]):
            return target
        if not devices.whole:
            return None if devices.told else NODE
    if driver := _DRIVER.search(text):
        index = int(driver[1])
        other = f"neuron:{index}" if devices.whole else None if devices.told else NODE
        return devices.by_host_index.get(index, other)
    runtime = _RUNTIME.search(text) if devices.whole else None
    return f"neuron:{int(runtime[1])}" if runtime else NODE


class Reset(NamedTuple):
    """A reset that has succeeded. `host_index` None: of all devices, because the driver was loaded."""

    host_index: int | None

    def covers(self, target: str, devices: Devices) -> bool:
        """Whether it has reset the device of a target; a fault of the node is ended by a load of the driver alone."""
        if self.host_index is None:
            return True
        return devices.by_host_index.get(self.host_index, f"neuron:{self.host_index}") == target


class ResetReader:
    """Finds resets of whole devices in the lines of the log, which come in their order."""

    def __init__(self) -> None:
        self._initiated: set[tuple[str, str]] = set()

    def read(self, text: str) -> Reset | None:
        """The reset that a line tells the end of."""
        if _STARTED in text:
            return Reset(None)
        if "reset request" not in text:
            return None
        if initiated := _INITIATED.search(text):
            self._initiated.add((initiated[1], initiated[2]))
        completed = _COMPLETED.search(text)
        if completed is None or (completed[1], completed[2]) not in self._initiated:
            return None
        self._initiated.discard((completed[1], completed[2]))
        return Reset(int(completed[1]))


def last_resets(lines: Sequence[LogLine], devices: Devices) -> dict[str, float]:
    """When each device was last reset, in seconds since boot as the log counts them; those without a time are left."""
    found: dict[str, float] = {}
    reader = ResetReader()
    for stamp, text in lines:
        reset = reader.read(text)
        if reset is not None and stamp is not None:
            known = (target for target in devices.by_host_index.values() if reset.covers(target, devices))
            found.update(dict.fromkeys(known, stamp))
    return found
