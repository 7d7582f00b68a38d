"""
neuron-ls: running it and reading its output. Not an accelerator itself; `neuron` reads devices through it.

Members that are missing, null or of another type are None: a property of the device that is unknown. An output that is
doubtful as a whole (no device, a device without a number, a number used twice) is a ValueError.

Unverified on hardware: members and texts come from AWS's documentation and from published outputs of the tool.

Also here:

- who owns NeuronCores, by neuron-ls, and whether these processes are still there;
- how NeuronCores are counted and numbered: physical and logical ones, by neuron-ls and by sysfs;
- which of the host's devices each device is that can be used here.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from checks.accelerators.neuron import sysfs as neuron_sysfs
from checks.accelerators.neuron.sysfs import SysfsDevice
from checks.catalog import Chip, find_type, type_name
from checks.host.container import PID_NAMESPACE, in_container
from checks.host.machine import Host, HostError
from checks.json_text import parse_json

TIMEOUT_SECONDS = 4.0  # it answers within 1 s; the survey that asks has 10 s in all
WAIT_SECONDS = 2.0  # for another process of ours that asks just now
_POLL_SECONDS = 0.02
_RETRY_WITHIN_SECONDS = 2.0  # a failure that took longer is not the kind that goes away when asked again

MAX_DEVICES = 256
MAX_CORES = 64  # of one device
MAX_PROCESSES = 4096
_MAX_LINKS = 256
_MAX_NUMBER = 4095
_MAX_CHARACTERS = 1 << 20
_MEMORY_BYTES = (2**30, 2**42)  # a number outside is no count of bytes: an old tool, or another unit
_BDF = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
_INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
_NO_RUNTIME = ("", "na", "n/a", "none", "unknown")
_INSTALL = "install aws-neuronx-tools"

_MAX_OWNERS = 192  # of one inventory, which is one bounded line; the largest machine has 128 logical cores

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"

DEVICE_FILE = "/dev/neuron{index}"

Links = Mapping[int, "Sequence[int] | None"]


def read_owners(host: Host, listing: Listing) -> list[dict[str, Any]] | None:
    """
    The owners, those without a process first. None where a device does not tell its processes.

    `alive` None: it cannot be seen from here. `cores` is None: neuron-ls tells devices, not cores.
    """
    found = _owners(listing)
    if found is None:
        return None
    alive = {pid: _is_alive(host, pid) for pid in found}
    if False in alive.values():
        again, _ = query(host)
        still = _owners(again) if again is not None else None
        for pid, state in alive.items():
            if state is False and (still is None or pid not in still):
                alive[pid] = None
        # What has just ended is no owner any more.
        found = {pid: one for pid, one in found.items() if alive[pid] is not None or still is None or pid in still}
    owners = [
        {
            "pid": pid,
            "command": one["command"] or _command(host, pid),
            "alive": alive[pid],
            "cores": None,
            "devices": one["devices"],
            "runtime_version": one["runtime_version"],
        }
        for pid, one in found.items()
    ]
    return sorted(owners, key=lambda owner: (owner["alive"] is not False, owner["pid"]))[:_MAX_OWNERS]


def query(host: Host) -> tuple[Listing | None, ToolError | None]:
    """
    Ask the tool, one process at a time on this machine; once more where it fails at once.

    Exactly one of the two is None. The lock is on the tool's own file: there is nothing to create or to clean up, and a
    tool that the kernel does not let go keeps it, so that no second one is started into the same trouble.
    """
    try:
        program = host.find_program("neuron-ls")
    except HostError:
        return None, ToolError("MissingTool", f"no such program: neuron-ls; {_INSTALL}")
    with _alone(program) as lock:
        if lock is None:
            text = f"another neuron-ls has been running for {WAIT_SECONDS:g} s; check whether it hangs, or try again"
            return None, ToolError("Timeout", text)
        begin = time.monotonic()
        listing, error = _ask(host, lock)
        # Tools up to 2.27 fail when others ask the driver at the same time, which is over a moment later.
        if error is not None and error.reason == "NoData" and time.monotonic() - begin < _RETRY_WITHIN_SECONDS:
            listing, error = _ask(host, lock)
        return listing, error


class ToolError(NamedTuple):
    """Why there is no answer: a code of `checks.reasons`, and one line with the remedy."""

    reason: str
    text: str


def parse(text: str) -> Listing:
    """
    What `neuron-ls -j` printed. Raises ValueError, one line, for what cannot be understood as a whole.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters are too many for a list of devices")
    try:
        plain = parse_json(text)
    except ValueError:
        raise ValueError("no JSON" if text.strip() else "nothing") from None
    if not isinstance(plain, list) or not plain or not all(isinstance(item, dict) for item in plain):
        raise ValueError("not a list of devices")
    if len(plain) > MAX_DEVICES:
        raise ValueError(f"{len(plain)} devices are more than any machine has")
    entries = sorted((_entry(item) for item in plain), key=lambda entry: entry.number)
    numbers = [entry.number for entry in entries]
    if len(set(numbers)) != len(numbers):
        raise ValueError("two devices with the same number")
    cores = [number for entry in entries for number in entry.core_ids or ()]
    if len(set(cores)) != len(cores):
        raise ValueError("one core on two devices")
    return Listing(
        devices=tuple(entries),
        instance_type=_agreed([type_name(item.get("instance_type")) for item in plain]),
        instance_id=_agreed([_instance_id(item.get("instance_id")) for item in plain]),
    )


def program_name(command: object) -> str:
    """The program alone: arguments may hold secrets. Empty where it is not told, as in containers."""
    words = command.split() if isinstance(command, str) else []
    return os.path.basename(words[0])[:64] if words else ""


def devices_of_the_dead(owners: list[dict[str, Any]] | None) -> set[int]:
    """The numbers of devices with cores whose owner has died, so that it cannot release them."""
    return {index for owner in owners or () if owner["alive"] is False for index in owner["devices"]}


def wanted_lnc(options: Mapping[str, Any]) -> int | None:
    """The configuration of jobs by the option or the variable. Raises ValueError for an option that makes no sense."""
    value = options.get("neuron_lnc")
    if value is None:
        said = os.environ.get(LNC_VARIABLE, "").strip()
        return int(said) if said in ("1", "2") else None
    if isinstance(value, bool) or value not in (1, 2):
        raise ValueError(f"neuron_lnc must be 1 or 2 (physical NeuronCores in a logical one), not {value!r}")
    return int(value)


def find_chip(kind: str | None, type_name: object) -> Chip | None:
    """The chip by the driver's name for it, else by the instance type; None where neither is known."""
    known = find_type(type_name) if isinstance(type_name, str) else None
    return neuron_sysfs.chip_of(kind) or (known.chip if known and known.chip.accelerator == "neuron" else None)


def in_force(wanted: int | None, chip: Chip | None) -> int | None:
    """The configuration that is wanted, unless the chip does not have it: then it was meant for another machine."""
    return wanted if wanted is None or chip is None or wanted in chip.lnc else None


def shown_lnc(listing: Listing, chip: Chip | None) -> int | None:
    """By which neuron-ls has counted: what it says, else what the chip can have and the cores fit."""
    said = {entry.lnc for entry in listing.devices} - {None}
    if said:
        return said.pop() if len(said) == 1 else None
    if chip is None or chip.cores is None:
        return None
    counts = [entry.cores for entry in listing.devices if entry.cores is not None]
    most = max(counts, default=0)
    return next((lnc for lnc in chip.lnc if most * lnc == chip.cores), chip.lnc[0] if len(chip.lnc) == 1 else None)


class Listing(NamedTuple):
    """The whole answer, devices in the order of their numbers."""

    devices: tuple[Entry, ...]
    instance_type: str | None
    instance_id: str | None


class Entry(NamedTuple):
    """One device. `connected_to` and `processes` None are what was not told, not "none"."""

    number: int
    bdf: str | None
    numa_node: int | None
    connected_to: tuple[int, ...] | None
    cores: int | None
    lnc: int | None
    memory_bytes: int | None
    core_ids: tuple[int, ...] | None
    processes: tuple[Process, ...] | None


class Process(NamedTuple):
    """One that has devices open. `runtime_version` None: it drives no core, as neuron-monitor."""

    pid: int
    command: str
    runtime_version: str | None


def to_logical(number: int | None, shown: int | None, lnc: int | None) -> int | None:
    """A number of cores, or of a core, that was told by one configuration, in another."""
    if number is None or shown == lnc:
        return number
    return None if shown is None or lnc is None or number * shown % lnc else number * shown // lnc


def logical_from_sysfs(cores: int | None, chip: Chip | None, lnc: int | None) -> int | None:
    """
    Logical cores of a device by its `core_count`, which is of physical or of logical cores.

    More than the logical ones that a whole chip has are physical ones.
    """
    if cores is None or chip is None or chip.cores is None or lnc is None:
        return None
    return cores // lnc if cores > chip.cores // lnc else cores


def first_cores(counts: Sequence[int | None]) -> list[int | None]:
    """The first core of each device where cores are numbered through; None behind a device that does not tell."""
    starts: list[int | None] = []
    at: int | None = 0
    for count in counts:
        starts.append(at)
        at = None if at is None or count is None else at + count
    return starts


def core_range(start: int | None, count: int | None) -> list[int] | None:
    """The numbers of the cores of one device."""
    return None if start is None or count is None else list(range(start, start + count))


def find_host_indices(host: Host, links: Links, shown: Sequence[SysfsDevice] | None) -> dict[int, int | None]:
    """
    The host's index of each device; None where it cannot be told.

    `links` are the devices of a listing by the number that it gives them, with their neighbours; `shown` is what sysfs
    shows. The minor number of the device's file tells; outside of a container every number is the host's.
    """
    minors = {number: host.device_minor(DEVICE_FILE.format(index=number)) for number in links}
    if not in_container(host):
        return {number: number if minor is None else minor for number, minor in minors.items()}
    guessed = match_neighbours(links, shown)
    found = {number: guessed[number] if minor is None else minor for number, minor in minors.items()}
    told = [index for index in found.values() if index is not None]
    # Two devices cannot be one of the host's.
    return {number: index if index is None or told.count(index) == 1 else None for number, index in found.items()}


def match_neighbours(links: Links, shown: Sequence[SysfsDevice] | None) -> dict[int, int | None]:
    """
    The devices of sysfs by their neighbours, where only one has the same; pure.

    Without neighbours the numbers are the host's where they are those of all devices that sysfs shows.
    """
    by_links: dict[frozenset[int], list[int]] = {}
    for device in shown or ():
        by_links.setdefault(frozenset(device.connected_to or ()), []).append(device.number)
    whole = set(links) == {device.number for device in shown or ()}
    found: dict[int, int | None] = {}
    for number, neighbours in links.items():
        same = by_links.get(frozenset(neighbours), []) if neighbours else []
        found[number] = same[0] if len(same) == 1 else number if whole and not neighbours else None
    return found


def _ask(host: Host, lock: tuple[int, ...]) -> tuple[Listing | None, ToolError | None]:
    try:
        done = host.run(["neuron-ls", "-j"], timeout_seconds=TIMEOUT_SECONDS, keep_open=lock)
    except HostError as error:
        remedy = "the driver may hang; see the kernel log" if error.reason == "Timeout" else _INSTALL
        return None, ToolError(error.reason, f"{error}; {remedy}")
    if done.returncode != 0:
        words = " ".join((done.stderr.strip() or done.stdout.strip() or "no output").split())[-300:]
        return None, ToolError("NoData", f"neuron-ls failed with {done.returncode}: {words}")
    try:
        return parse(done.stdout), None
    except ValueError as error:
        text = f"the output of neuron-ls is not understood: {error}; compare its version with the supported ones"
        return None, ToolError("NoData", text)


@contextmanager
def _alone(program: str) -> Iterator[tuple[int, ...] | None]:
    """The descriptor that holds the lock on the tool, where it can be had; None when somebody else keeps it."""
    try:
        descriptor = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield ()  # it may be run and not read
        return
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not _lock(descriptor):
            if time.monotonic() > deadline:
                yield None
                return
            time.sleep(_POLL_SECONDS)
        yield (descriptor,)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: to ask all the same is better than never to know
    return True


def _entry(item: dict[str, Any]) -> Entry:
    number = _whole(item.get("neuron_device"), 0, _MAX_NUMBER)
    if number is None:
        raise ValueError(f"a device without a number: {str(item.get('neuron_device'))[:40]!r}")
    cores = _whole(item.get("nc_count"), 1, MAX_CORES)
    return Entry(
        number=number,
        bdf=_bdf(item.get("bdf")),
        numa_node=_numa(item.get("numa_node")),
        connected_to=_wholes(item.get("connected_to"), _MAX_LINKS, _MAX_NUMBER),
        cores=cores,
        lnc=_whole(item.get("logical_neuroncore_config"), 1, 2),
        memory_bytes=_whole(item.get("memory_size"), *_MEMORY_BYTES),
        core_ids=_core_ids(item.get("neuroncore_ids"), cores),
        processes=_processes(item.get("neuron_processes")),
    )


def _whole(value: object, least: int, most: int) -> int | None:
    """A whole number in its bounds; True and 4.0 are none."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    return None


def _wholes(value: object, most: int, largest: int) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > most:
        return None
    found = [_whole(item, 0, largest) for item in value]
    numbers = tuple(item for item in found if item is not None)
    return numbers if len(numbers) == len(value) else None


def _core_ids(value: object, cores: int | None) -> tuple[int, ...] | None:
    numbers = _wholes(value, MAX_CORES, MAX_CORES * MAX_DEVICES)
    if numbers is None or len(set(numbers)) != len(numbers) or len(numbers) != cores:
        return None
    return tuple(sorted(numbers))


def _bdf(value: object) -> str | None:
    match = _BDF.fullmatch(value.strip().lower()) if isinstance(value, str) and len(value) < 64 else None
    return f"{match[1] or '0000'}:{match[2]}" if match else None


def _numa(value: object) -> int | None:
    """It is text, and "-1" where there is none."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 5:
        value = int(value)
    return _whole(value, 0, 1023)


def _processes(value: object) -> tuple[Process, ...] | None:
    """None where any of them is not understood: a holder would be left out."""
    if not isinstance(value, list) or len(value) > MAX_PROCESSES:
        return None
    found: list[Process] = []
    for item in value:
        pid = _whole(item.get("pid"), 1, 2**31 - 1) if isinstance(item, dict) else None
        version = item.get("neuron_runtime_version") if isinstance(item, dict) else None
        if pid is None or not isinstance(version, str):
            return None
        runs = version.strip().lower() not in _NO_RUNTIME
        found.append(Process(pid, program_name(item.get("command")), version.strip()[:64] if runs else None))
    return tuple(found)


def _instance_id(value: object) -> str | None:
    return value if isinstance(value, str) and _INSTANCE_ID.fullmatch(value) else None


def _agreed(values: list[str | None]) -> str | None:
    """What the entries say, where they do not contradict each other."""
    names = {value for value in values if value is not None}
    return names.pop() if len(names) == 1 else None


def _owners(listing: Listing) -> dict[int, dict[str, Any]] | None:
    found: dict[int, dict[str, Any]] = {}
    for device in listing.devices:
        if device.processes is None:
            return None
        for process in device.processes:
            if process.runtime_version is not None:
                one = found.setdefault(
                    process.pid,
                    {"command": process.command, "devices": [], "runtime_version": process.runtime_version},
                )
                one["devices"].append(device.number)
    return found


def _is_alive(host: Host, pid: int) -> bool | None:
    """Whether there is such a process; None where the processes of the whole machine cannot be seen."""
    if host.pid_namespace() != PID_NAMESPACE:
        return None
    if host.exists(f"/proc/{pid}"):
        return True
    if host.root is not None:
        return False
    try:
        os.kill(pid, 0)  # asks alone; /proc may be mounted so that it hides the processes of others
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _command(host: Host, pid: int) -> str:
    """The name by the kernel, where neuron-ls gives none."""
    try:
        return host.read(f"/proc/{pid}/comm").strip()[:64]
    except HostError:
        return ""
