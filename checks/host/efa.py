"""
Elastic Fabric Adapters as sysfs shows them: names, places on the PCI bus, ports and counters. Nothing is judged here.

Every file that counts EFA counts with this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from checks.host.machine import Host, HostError

# Source: aws/eks-node-monitoring-agent, efa.go; the efa driver's PCI table.
_VENDOR, _DEVICES = "0x1d0f", "0xefa"
_CLASS = "/sys/class/infiniband"
_PCI = "/sys/bus/pci/devices"
_VERBS = "/sys/class/infiniband_verbs"  # uverbsN/ibdev: the name of the adapter of /dev/infiniband/uverbsN
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# How rdma-core names devices by their place: rdmap16s27 is bus 0x10, slot 0x1b. Source: rdma_rename.c.
_NAME = re.compile(r"rdma(?:P(\d+))?p(\d+)s(\d+)(?:f(\d+))?")
_DIGITS = 20  # of a 64-bit counter


class Port(NamedTuple):
    """
    One port. `state` and `phys_state` are as the kernel words them (`4: ACTIVE`, `5: LinkUp`), None where unreadable.

    `counters` holds what is readable and a whole number of `hw_counters`, by name; they count up from driver load.
    """

    number: str
    state: str | None
    phys_state: str | None
    counters: Mapping[str, int]


class Adapter(NamedTuple):
    """One adapter that the efa driver has. `address` is its PCI address with domain; None where nothing tells it."""

    name: str
    address: str | None
    ports: tuple[Port, ...]


def read_adapters(host: Host, counters: tuple[str, ...] = ()) -> list[Adapter] | None:
    """
    The adapters by name, with those of `counters` that they have; None where there is no sysfs.

    Raises HostError NoPermission where sysfs may not be read.
    """
    names = _adapter_names(host)
    if names is None:
        return None
    return [Adapter(name, _address(host, name), _read_ports(host, name, counters)) for name in names]


def count_efa(host: Host) -> int | None:
    """How many adapters the efa driver has; None when sysfs cannot be read."""
    try:
        names = _adapter_names(host)
    except HostError:
        return None
    return None if names is None else len(names)


def find_on_bus(host: Host) -> list[str]:
    """The PCI addresses of all EFA on the bus, whether a driver has them or not. One look at each PCI device."""
    found = []
    for path in host.glob(_PCI, "*"):
        try:
            if _is_efa(host, path):
                found.append(path.rpartition("/")[2].lower())
        except HostError:  # it went away, or is none of our business
            continue
    return found


def without_file(host: Host) -> set[str]:
    """The adapters whose file for programs is not in /dev, as in a container that was given others."""
    found = set()
    for path in host.glob(_VERBS, "uverbs*"):
        name = _line(host, f"{path}/ibdev")
        if name is not None and not host.exists(f"/dev/infiniband/{path.rpartition('/')[2]}"):
            found.add(name)
    return found


def name_at(address: str) -> str:
    """The name that an adapter at a PCI address gets: `rdmap16s27` for 0000:10:1b.0."""
    domain, bus, place = address.split(":")
    slot, _, function = place.partition(".")
    head = f"rdmaP{int(domain, 16)}p" if int(domain, 16) else "rdmap"
    tail = f"f{int(function, 16)}" if int(function, 16) else ""
    return f"{head}{int(bus, 16)}s{int(slot, 16)}{tail}"


def address_of(name: str) -> str | None:
    """The PCI address in such a name; None for another kind of name (`efa_0`)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    domain, bus, slot, function = (int(part or 0) for part in match.groups())
    if bus > 0xFF or slot > 0x1F or function > 7 or domain > 0xFFFFFFFF:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"


def _adapter_names(host: Host) -> list[str] | None:
    if not host.exists("/sys/class"):
        return None
    found = []
    for path in host.glob(_CLASS, "*"):
        try:
            if _is_efa(host, f"{path}/device"):
                found.append(path.rpartition("/")[2])
        except HostError as error:
            if error.reason == "NoPermission":
                raise
            continue  # a device without a place on the bus (soft RoCE) is no EFA
    return found


def _is_efa(host: Host, folder: str) -> bool:
    vendor, kind = (host.read(f"{folder}/{name}", max_bytes=64).strip().lower() for name in ("vendor", "device"))
    return vendor == _VENDOR and kind.startswith(_DEVICES)


def _address(host: Host, name: str) -> str | None:
    """From the links of sysfs, else the driver's own word, else the name."""
    texts = []
    for path in (f"{_CLASS}/{name}/device", f"{_CLASS}/{name}"):
        try:
            texts.append(host.readlink(path))
        except HostError:  # no link: a recorded machine
            continue
    with suppress(HostError):
        texts.append(host.read(f"{_CLASS}/{name}/device/uevent", max_bytes=4096))
    for text in texts:
        found = _ADDRESS.findall(text.lower())
        if found:
            return str(found[-1])
    return address_of(name)


def _read_ports(host: Host, name: str, counters: tuple[str, ...]) -> tuple[Port, ...]:
    ports = []
    for path in host.glob(f"{_CLASS}/{name}/ports", "*"):
        values = {}
        for counter in counters:
            text = _line(host, f"{path}/hw_counters/{counter}")
            if text is not None and text.isascii() and text.isdecimal() and len(text) <= _DIGITS:
                values[counter] = int(text)
        ports.append(
            Port(path.rpartition("/")[2], _line(host, f"{path}/state"), _line(host, f"{path}/phys_state"), values)
        )
    return tuple(ports)


def _line(host: Host, path: str) -> str | None:
    """The one line of a small file; None where it cannot be read or is empty."""
    try:
        return host.read(path, max_bytes=256).strip() or None
    except HostError:
        return None
