"""
What the Neuron driver shows in sysfs: which devices there are, their serial numbers, kinds, cores and neighbours.

Driver 2.31 moved nodes of its tree, and where to is not published. So a leaf is tried where drivers up to 2.30 have it
and else looked for by its name below its device; a name that several places have is not used. No accelerator of its
own; `neuron` reads devices through it.

Unverified on hardware: the tree is that of AWS's documentation and of the driver's source.

Also here:

- the counters that the Neuron driver keeps in sysfs, found by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
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

# Where leaves were found, and which were nowhere: for as long as this process lives, which is one round of checks.
_found: dict[tuple[object, str], str] = {}
_absent: set[tuple[object, str]] = set()

ROOTS = ("/sys/devices/virtual/neuron_device", "/sys/class/neuron_device")

# Of a device. Those of `NEWER` came with later drivers: a tree may lack them.
REQUIRED = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
CORRECTED = ("mem_ecc_corrected", "sram_ecc_corrected")
NEWER = ("mem_ecc_repairable_uncorrected", *CORRECTED)
COMPONENTS = "unhealthy_components"
STATE = "reset"  # reading it gives the state of the device; writing it would reset the device, so healthd never does
UNREADABLE = "?"  # instead of a text that could not be read
# Of a core. Statuses whose cause is the program that ran (bad input, queue full, wrong NEFF, ...) are not read at all.
HARDWARE_STATUSES = (
    "hw_error",
    "hw_nc_ue_error",
    "hw_hbm_ue_error",
    "hw_repairable_hbm_ue_error",
    "hw_dma_abort_error",
    "hw_collectives_error",
)
OTHER_STATUSES = ("timeout", "execute_completed_with_error", "reset_fail_count")

_MAX_DEVICES = 256
_LEAVES_MAX_FOLDERS = 2048  # a device of eight cores has about a hundred that are entered
_LEAVES_MAX_DEPTH = 8
_MAX_LEAVES = 1024  # of one device
# Many, and none of them holds a counter of faults.
_LEAVES_SKIPPED = frozenset(
    {"memory_usage", "power", "host_mem", "device_mem", "success", "failure", "exec_bad_input"}
    | {"execute_completed_with_num_error", "execute_failed_to_queue", "generic_error", "resource_error"}
    | {"resource_nc_error", "invalid_error", "unsupported_neff_version", "oob_error"}
    | {f"execute_sw_{kind}" for kind in ("nq_overflow", "semaphore_error", "event_error", "psum_collision")}
    | {"execute_sw_sequencer_fatal", "flop_count", "inference_count", "model_load_count", "nc_time_in_use"}
    | {"reset_req_count"}
)
_DEVICE = re.compile(r"neuron(\d{1,4})", re.ASCII)
_CORE = re.compile(r"(?:neuron_|neuron)?core_?(\d{1,4})|nc_?(\d{1,4})", re.ASCII)
_COUNT = re.compile(r"\d{1,20}", re.ASCII)
_NAMES = frozenset({*REQUIRED, *NEWER, COMPONENTS, STATE})
_CORE_NAMES = frozenset({*HARDWARE_STATUSES, *OTHER_STATUSES})


def read_devices(host: Host) -> tuple[SysfsDevice, ...] | None:
    """The devices by number; none where the driver is not loaded, None where sysfs does not tell."""
    folders = _device_folders(host)
    if folders is None:
        return None
    return tuple(_device(host, number, folder) for number, folder in sorted(folders.items()))


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


def read_counters(host: Host) -> dict[int, DeviceCounters]:
    """Every device that the driver shows, by its number; empty where there is none. Raises HostError NoPermission."""
    found: dict[int, DeviceCounters] = {}
    # Devices of one machine look alike, so the others are read without being walked where their folders hold the same.
    known: dict[tuple[str, ...], list[Leaf]] = {}
    for folder, index in _folders(host):
        names = tuple(host.listdir(folder))
        device = _read_leaf(host, folder, index, known[names], always=False) if names in known else None
        if device is None:
            leaves = find_leaves(host, folder)
            device = _read_leaf(host, folder, index, leaves, always=True)
            if is_whole(leaves, names):
                known[names] = leaves
        if device is not None:
            found[index] = device
    return found


class DeviceCounters(NamedTuple):
    """
    What one device counts since its driver was loaded.

    `counts` by name and `cores` by name and core hold None where a leaf is there and holds no count. `components` is
    the text of `unhealthy_components`, None where there is none. `inode` changes when the driver is loaded again.
    `denied` names a file that may not be read. `state` is what the driver holds of the device: 0 it is being reset, 1
    ready, 2 invalid; None where it does not tell (root alone may read it).
    """

    number: int
    inode: int | None
    counts: Mapping[str, int | None]
    cores: Mapping[str, Mapping[int, int | None]]
    components: str | None
    denied: str | None
    state: int | None = None


def is_whole(leaves: Collection[Leaf], names: Collection[str]) -> bool:
    """Whether these are places to look at on the next device too: nothing is missing, and its cores are alike."""
    cores: dict[int, set[str]] = {core: set() for name in names if (core := _core(name)) is not None}
    for leaf in leaves:
        if leaf.core is not None:
            cores.setdefault(leaf.core, set()).add(leaf.name)
    kinds = {frozenset(kinds) for kinds in cores.values()}
    return len(kinds) == 1 and {leaf.name for leaf in leaves if leaf.core is None}.issuperset(REQUIRED)


def find_leaves(host: Host, folder: str) -> list[Leaf]:
    """The places of all counters below one device."""
    paths = host.walk(folder, skip=_LEAVES_SKIPPED, max_depth=_LEAVES_MAX_DEPTH, max_folders=_LEAVES_MAX_FOLDERS)
    return sort_leaves(paths)


def sort_leaves(paths: Sequence[str]) -> list[Leaf]:
    """
    Which of these paths is which counter; of several of one name the first.

    Of `total` and `present` the former counts: the latter is of the process that runs, and gone with it.
    """
    found: dict[tuple[str, int | None], Leaf] = {}
    for path in paths:
        parts = path.split("/")
        holder = parts[:-2] if parts[-1] == "total" else parts[:-1]
        name = parts[len(holder)] if len(parts) > len(holder) else ""
        core = next((number for part in reversed(holder) if (number := _core(part)) is not None), None)
        status = "status" in holder and name.startswith("hw_")
        if name in (_NAMES if core is None else _CORE_NAMES) or (core is not None and status):
            found.setdefault((name, core), Leaf(name, core, path))
    return list(found.values())[:_MAX_LEAVES]


class Leaf(NamedTuple):
    """A place below a device: whose counter it is (`core` None: the device's) and where."""

    name: str
    core: int | None
    path: str


def parse_count(text: str) -> int | None:
    """A count of events; None for anything else, a negative number included."""
    text = text.strip()
    return int(text) if _COUNT.fullmatch(text) else None


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


def _search(host: Host, folder: str, name: str) -> str | None:
    """Where the one leaf of this name is below a device."""
    below = host.walk(folder, skip=_SKIPPED, max_depth=_MAX_DEPTH, max_folders=_MAX_FOLDERS)
    found = [path for path in below if path.rpartition("/")[2] == name]
    return found[0] if len(found) == 1 else None


def _folders(host: Host) -> list[tuple[str, int]]:
    """The devices under the first root that has any."""
    for root in ROOTS:
        names = {path: _DEVICE.fullmatch(path.rpartition("/")[2]) for path in host.glob(root, "neuron*")}
        found = sorted((int(match[1]), path) for path, match in names.items() if match)
        if found:
            return [(path, index) for index, path in found[:_MAX_DEVICES]]
    return []


def _core(part: str) -> int | None:
    match = _CORE.fullmatch(part)
    return int(match[1] or match[2]) if match else None


def _read_leaf(host: Host, folder: str, index: int, leaves: Collection[Leaf], *, always: bool) -> DeviceCounters | None:
    """The counters at these places; None where one of them is not there, unless `always`."""
    counts: dict[str, int | None] = {}
    cores: dict[str, dict[int, int | None]] = {}
    components: str | None = None
    denied: str | None = None
    state: int | None = None
    for leaf in leaves:
        if leaf.name == STATE:
            with suppress(HostError):  # no counter: where it may not be read, nothing is missing
                state = parse_count(host.read(f"{folder}/{leaf.path}", max_bytes=64))
            continue
        text = UNREADABLE
        try:
            text = host.read(f"{folder}/{leaf.path}", max_bytes=4096)
        except HostError as error:
            if error.reason == "NoData" and not always:
                return None
            denied = denied or (str(error) if error.reason == "NoPermission" else None)
        if leaf.core is not None:
            cores.setdefault(leaf.name, {})[leaf.core] = parse_count(text)
        elif leaf.name == COMPONENTS:
            components = text
        else:
            counts[leaf.name] = parse_count(text)
    return DeviceCounters(index, host.inode(folder), counts, cores, components, denied, state)
