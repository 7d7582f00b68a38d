"""
AWS Neuron devices (Trainium, Inferentia2): found by neuron-ls and sysfs, one worker for each logical core.

neuron-ls says what a process here can use and who uses it; sysfs knows serial numbers and kinds, and stands in where
the tool is missing or hangs. Nothing is judged here: what is not understood is None, and where the two disagree both
numbers are in the inventory for the checks.

Unverified on hardware: everything here; tested on stand-ins that follow the documentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks.accelerators import Descriptor, DeviceMissingError, Diagnosis, OwnIndex, Tool
from checks.accelerators.holding import bounded, find_holders, is_ours, may_miss
from checks.accelerators.neuron import ls as neuron_ls
from checks.accelerators.neuron import ls as neuron_owners
from checks.accelerators.neuron import sysfs as neuron_sysfs
from checks.accelerators.neuron.ls import (
    DEVICE_FILE,
    Entry,
    Listing,
    core_range,
    find_chip,
    find_host_indices,
    first_cores,
    in_force,
    logical_from_sysfs,
    shown_lnc,
    to_logical,
    wanted_lnc,
)
from checks.accelerators.neuron.monitor import MONITOR_CONFIG
from checks.accelerators.neuron.sysfs import SysfsDevice
from checks.accelerators.neuron.versions import read_all
from checks.contract import Device
from checks.host.container import has_own_dev
from checks.host.efa import count_efa
from checks.host.machine import Host, HostError

# They have devices open for as long as they look at them and run nothing on them. The kernel cuts names at 15 letters.
_ONLOOKERS = frozenset({"neuron-monitor", "neuron-ls", "neuron-top", "neuron-observer", "neuron-device-p"})


def present(host: Host) -> bool:
    """Whether the driver is loaded, shows a device, or cannot be asked whether it does."""
    try:
        return neuron_sysfs.is_loaded(host) or bool(device_files(host)) or bool(neuron_sysfs.read_numbers(host))
    except HostError:
        return True


def find(host: Host, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    The inventory. Options: `neuron_lnc`, the logical core configuration of jobs (1 or 2), else the variable
    NEURON_LOGICAL_NC_CONFIG, else what neuron-ls shows; `instance_type`.

    Beside the members of every accelerator: `source` (neuron-ls or sysfs), `tool_error` ([reason, text]: why neuron-ls
    said nothing), `sysfs_indices` (what sysfs shows, None where it does not tell) and of each device `sysfs_cores` and
    `host_index`, its number in sysfs and in the kernel log (None where it cannot be told in a container); `index` is
    its number in /dev.
    """
    wanted = wanted_lnc(options)
    listing, error = neuron_ls.query(host)
    shown = neuron_sysfs.read_devices(host)
    if not shown and ((listing is not None and listing.devices) or neuron_sysfs.is_loaded(host) or device_files(host)):
        shown = None  # the driver is there, so its tree is where it is not looked for
    found: dict[str, Any] = {
        "accelerator": "neuron",
        "efa_count": count_efa(host),
        "ranks": "fresh",
        "source": "sysfs" if listing is None else "neuron-ls",
        "tool_error": None if error is None else [error.reason, error.text],
        "sysfs_indices": None if shown is None else [device.number for device in shown],
    }
    if listing is None:
        devices, lnc = _by_sysfs(host, shown, wanted, options)
        owners = None
    else:
        devices, lnc = _by_tool(host, listing, shown, wanted, options)
        owners = neuron_owners.read_owners(host, listing)
        identity = {"instance_type": listing.instance_type, "instance_id": listing.instance_id}
        found.update({name: value for name, value in identity.items() if value is not None})
    unusable = neuron_owners.devices_of_the_dead(owners)
    known = listing is not None or bool(devices) or shown == ()
    return {
        **found,
        "device_count": len(devices) if known else None,
        "core_count": _total([device["cores"] for device in devices]) if known else None,
        "memory_bytes": _total([device["memory_bytes"] for device in devices]) if known else None,
        "devices": devices,
        "lnc": lnc,
        "workers": [
            f"neuroncore:{core}"
            for device in devices
            if device["index"] not in unusable
            for core in device["core_ids"] or ()
        ],
        "core_holders": owners,
    }


def device_files(host: Host) -> set[int]:
    """The numbers of the device files in /dev."""
    names = (path.rpartition("/neuron")[2] for path in host.glob("/dev", "neuron*"))
    return {int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 5}


def holders(host: Host, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> list[str] | None:
    """
    Who has /dev/neuronN open or, by neuron-ls, runs on its cores. Options: `ignore_pids`, `in_job`.

    Not the programs that only look at devices. Nor a holder whose process is gone: that is no job, nothing will ever
    release what it has, and counting it would hide a broken node behind "allocated" for ever. Its device gets no worker
    (see `find`), and the check `neuron_cores` fails.
    """
    if inventory.get("device_count") is None:
        return None
    files = {
        device["target"]: Path(host.path(DEVICE_FILE.format(index=device["index"]))) for device in inventory["devices"]
    }
    proc = Path(host.path("/proc"))
    ours = {os.getpid(), *(int(pid) for pid in options.get("ignore_pids", ()))}
    owners = [owner for owner in inventory.get("core_holders") or () if owner["alive"] is not False]
    by_pid = {owner["pid"] for owner in owners}
    opened = find_holders(
        proc,
        files,
        ours,
        blind=may_miss(host, options),
        is_onlooker=lambda pid, command: command in _ONLOOKERS and pid not in by_pid,
    )
    found = {_place(line): line for line in opened or ()}
    for owner in owners:
        if not is_ours(proc, owner["pid"], ours):
            for index in owner["devices"]:
                key = (f"neuron:{index}", owner["pid"])
                found.setdefault(key, f"{key[0]}: pid {owner['pid']} ({owner['command'] or 'unknown'})")
    # What neuron-ls names is taken whatever else cannot be seen.
    return None if opened is None and not found else bounded(sorted(found.values()))


@contextmanager
def hold(target: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Nothing to do: a process that uses a core has its device's file open."""
    yield


def bind(target: str, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> Device:
    """Give this process to one core. See `Accelerator.bind`."""
    workers = inventory.get("workers") or ()
    if target not in workers:
        raise DeviceMissingError(f"no such core: {target}; this node has {', '.join(workers) or 'none'}")
    from checks.accelerators.neuron import torch_binding

    return torch_binding.bind(target, inventory, options)


def _compiled_with(inventory: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    from checks.accelerators.neuron.environment import flags_of, lnc_of

    return flags_of(options), lnc_of(inventory, options)


def _diagnose(text: str) -> tuple[Diagnosis, str] | None:
    from checks.accelerators.neuron.errors import diagnose, telling_line  # slow, and only for what failed

    found = diagnose(text)
    return None if found is None else (found, telling_line(text))


def _tells_of_trouble(text: str) -> bool:
    from checks.accelerators.neuron.errors import diagnose

    found = diagnose(text)
    return found is not None and found.reason != "CompileFailed"


def _by_tool(
    host: Host, listing: Listing, shown: Sequence[SysfsDevice] | None, wanted: int | None, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], int | None]:
    """What neuron-ls lists, with what sysfs knows of the same devices."""
    indices = find_host_indices(host, {entry.number: entry.connected_to for entry in listing.devices}, shown)
    by_index = {device.number: device for device in shown or ()}
    kinds = {device.kind for device in shown or ()}
    kind = kinds.pop() if len(kinds) == 1 else None
    chip = find_chip(kind, options.get("instance_type") or listing.instance_type)
    shows = shown_lnc(listing, chip)
    lnc = in_force(wanted, chip) or shows
    starts = first_cores([to_logical(entry.cores, shows, lnc) for entry in listing.devices])
    told = any(entry.core_ids is not None for entry in listing.devices)
    devices = []
    for entry, start in zip(listing.devices, starts, strict=True):
        host_index = indices[entry.number]
        twin = None if host_index is None else by_index.get(host_index)
        cores = to_logical(entry.cores, shows, lnc)
        first = entry.core_ids[0] if entry.core_ids else None
        if told:
            start = None if first is None else to_logical(first, shows, lnc)
        ids = list(entry.core_ids) if entry.core_ids and cores == entry.cores else core_range(start, cores)
        devices.append(
            {
                "target": f"neuron:{entry.number}",
                "index": entry.number,
                "host_index": host_index,
                "kind": (twin.kind if twin else None) or kind or "Neuron device",
                "serial": twin.serial if twin else None,
                "cores": cores,
                "memory_bytes": entry.memory_bytes,
                "bdf": entry.bdf,
                "numa_node": entry.numa_node,
                "connected_to": _links(entry, twin),
                "core_ids": ids,
                "sysfs_cores": twin.cores if twin else None,
                "file": host.inode(DEVICE_FILE.format(index=entry.number)),
            }
        )
    return devices, lnc


def _by_sysfs(
    host: Host, shown: Sequence[SysfsDevice] | None, wanted: int | None, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], int | None]:
    """What sysfs shows; of a container that has fewer device files, its share."""
    files = device_files(host)
    share = bool(files) and has_own_dev(host)
    mine = [device for device in shown or () if not share or device.number in files]
    kinds = {device.kind for device in mine}
    chip = find_chip(kinds.pop() if len(kinds) == 1 else None, options.get("instance_type"))
    lnc = in_force(wanted, chip) or (chip.lnc[0] if chip else None)
    cores = [logical_from_sysfs(device.cores, chip, lnc) for device in mine]
    devices = [
        {
            "target": f"neuron:{device.number}",
            "index": device.number,
            "host_index": device.number,
            "kind": device.kind or "Neuron device",
            "serial": device.serial,
            "cores": count,
            "memory_bytes": None,
            "bdf": None,
            "numa_node": None,
            "connected_to": None if device.connected_to is None else list(device.connected_to),
            "core_ids": core_range(start, count),
            "sysfs_cores": device.cores,
            "file": host.inode(DEVICE_FILE.format(index=device.number)),
        }
        for device, count, start in zip(mine, cores, first_cores(cores), strict=True)
    ]
    return devices, lnc


def _links(entry: Entry, twin: SysfsDevice | None) -> list[int] | None:
    links = entry.connected_to
    if links is None and twin is not None:
        links = twin.connected_to or None  # an empty leaf of sysfs says no more than null does
    return None if links is None else list(links)


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _place(line: str) -> tuple[str, int]:
    """Target and pid in `neuron:0: pid 123 (python)`."""
    target, _, rest = line.partition(": pid ")
    return target, int(rest.partition(" (")[0])


DESCRIPTOR = Descriptor(
    name="neuron",
    detect_order=0,
    speed_versions=("neuron_driver", "neuron_runtime", "neuron_collectives", "torch"),
    read_versions=read_all,
    compiles=True,
    device_files="/dev/neuron",
    pjrt_clients=("NEURON",),
    profiles_programs=True,
    on_ec2_only=True,
    kubernetes_resources=("aws.amazon.com/neuron",),  # neuron, neuroncore, neurondevice
    numbers_last=True,
    memory_told_by="neuron-ls",
    takes_all_efa=True,
    nccom=True,
    graph_sources=(
        "accelerators/xla.py",
        "accelerators/neuron/environment.py",
        "accelerators/neuron/torch_binding.py",
    ),
    compiled_with=_compiled_with,
    diagnose=_diagnose,
    tells_of_trouble=_tells_of_trouble,
    tools={"neuron-ls": "install aws-neuronx-tools"},
    python_packages=("torch-neuronx", "neuronx-cc", "libneuronxla", "nrtpy"),
    own_index=OwnIndex(
        title="Neuron packages",
        needed="torch-neuronx",
        source="install them from AWS's Neuron package repository, see the Neuron setup guide",
    ),
    system_packages=("aws-neuron*",),
    kernel_modules=("neuron",),
    kernel_words="neuron",
    support_tools=(
        Tool(("neuron-ls", "-j")),
        Tool(("neuron-monitor", "-c", "{config}"), streams=True, config=MONITOR_CONFIG),
    ),
)
