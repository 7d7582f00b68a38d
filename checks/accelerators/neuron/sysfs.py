"""
What the Neuron driver shows in sysfs: which devices there are, their serial numbers, kinds, cores and neighbours.

Driver 2.31 moved nodes of its tree, and where to is not published. So a leaf is tried where drivers up to 2.30 have it
and else looked for by its name below its device; a name that several places have is not used. No accelerator of its
own; `neuron` reads devices through it.

Unverified on hardware: the tree is that of AWS's documentation and of the driver's source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from checks.catalog import TRAINIUM, TYPES, Chip
from checks.host.machine import Host, HostError

_FOLDERS = ("/sys/devices/virtual/neuron_device", "/sys/class/neuron_device")
MODULE = "/sys/module/neuron"

# Name -> where it is up to driver 2.30, below the device's directory.
_LEAVES: Mapping[str, str] = {
    "serial_number": "info/serial_number",
    "device_name": "info/architecture/device_name",
    "core_count": "core_count",
    "connected_devices": "connected_devices",
}
_MAX_DEPTH = 4
_MAX_FOLDERS = 200
_MAX_BYTES = 4096
_MAX_CORES = 64
_SKIPPED = frozenset(f"neuron_core{number}" for number in range(_MAX_CORES))  # hundreds of counters, nothing of ours
_NUMBER = re.compile(r"neuron(\d{1,4})")
_SERIAL = re.compile(r"(?=.*[1-9A-Za-z])[0-9A-Za-z-]{4,64}")  # all zeros are no number of anything
_LIST = re.compile(r"[0-9, \t\n]*")


class SysfsDevice(NamedTuple):
    """
    One device. `cores` are physical or logical ones: which, no source says of chips that have both.

    None is what the driver does not say, or says in a form that is not understood.
    """

    number: int
    serial: str | None
    kind: str | None
    cores: int | None
    connected_to: tuple[int, ...] | None


def read_devices(host: Host) -> tuple[SysfsDevice, ...] | None:
    """The devices by number; none where the driver is not loaded, None where sysfs does not tell."""
    folders = _device_folders(host)
    if folders is None:
        return None
    return tuple(_device(host, number, folder) for number, folder in sorted(folders.items()))


def read_numbers(host: Host) -> set[int] | None:
    """The numbers of the devices alone, cheaply; None where sysfs does not tell."""
    folders = _device_folders(host)
    return None if folders is None else set(folders)


def is_loaded(host: Host) -> bool:
    """Whether the driver's module is in the kernel."""
    return host.exists(MODULE)


def chip_of(kind: str | None) -> Chip | None:
    """The catalogue's record of what the driver calls `Trainium1`, `Inferentia2`, ...; None for other names."""
    name = (kind or "").strip().lower()
    if name in ("trainium", "trainium1"):
        return TRAINIUM
    return next((known.chip for known in TYPES.values() if known.chip.name.lower() == name), None)


def parse_number(text: str, least: int, most: int) -> int | None:
    """A whole decimal number in its bounds."""
    word = text.strip()
    if not (word.isascii() and word.isdecimal() and len(word) < 10):
        return None
    number = int(word)
    return number if least <= number <= most else None


def parse_list(text: str) -> tuple[int, ...] | None:
    """Numbers with commas or spaces between them; None for anything else."""
    if not _LIST.fullmatch(text):
        return None
    words = text.replace(",", " ").split()
    return tuple(int(word) for word in words) if all(len(word) < 5 for word in words) else None


def _device_folders(host: Host) -> dict[int, str] | None:
    unseen = False
    for folder in _FOLDERS:
        try:
            names = host.listdir(folder)
        except HostError as error:
            unseen = unseen or error.reason != "NoData"
            continue
        found = {int(match[1]): f"{folder}/{name}" for name in names if (match := _NUMBER.fullmatch(name))}
        if found:
            return found
    # A driver that is loaded and shows no device has none; one that is not loaded shows nothing.
    return None if unseen or not host.exists("/sys/module") else {}


def _device(host: Host, number: int, folder: str) -> SysfsDevice:
    serial = _read(host, folder, "serial_number")
    kind = _read(host, folder, "device_name")
    return SysfsDevice(
        number=number,
        serial=serial if serial is not None and _SERIAL.fullmatch(serial) else None,
        kind=kind if kind and len(kind) <= 64 and kind.isprintable() else None,
        cores=parse_number(_read(host, folder, "core_count") or "", 1, _MAX_CORES),
        connected_to=None if (text := _read(host, folder, "connected_devices")) is None else parse_list(text),
    )


def _read(host: Host, folder: str, name: str) -> str | None:
    """The text of a leaf; None where the device has none, or it may not be read."""
    key = (host.root, name)
    place: str | None = _found.get(key, _LEAVES[name])
    for search in (False, True):
        if search:
            place = None if key in _absent else _search(host, folder, name)
        if place is None:
            _absent.add(key)  # looked for on one device: the others are only asked at the known place
            return None
        try:
            text = host.read(f"{folder}/{place}", max_bytes=_MAX_BYTES).strip()
        except HostError:
            continue
        _found[key] = place
        return text
    return None


# Where leaves were found, and which were nowhere: for as long as this process lives, which is one round of checks.
_found: dict[tuple[object, str], str] = {}
_absent: set[tuple[object, str]] = set()


def _search(host: Host, folder: str, name: str) -> str | None:
    """Where the one leaf of this name is below a device."""
    below = host.walk(folder, skip=_SKIPPED, max_depth=_MAX_DEPTH, max_folders=_MAX_FOLDERS)
    found = [path for path in below if path.rpartition("/")[2] == name]
    return found[0] if len(found) == 1 else None
