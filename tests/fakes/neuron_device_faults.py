"""Faults of Neuron devices themselves: what is missing, what is wrong, what is counted."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fakes.neuron_files import STATUSES, core_leaf, device_folder, device_leaf, write
from tests.fakes.neuron_state import Record, find_device


def missing_device(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """
    A device that the driver did not find: no node, no sysfs, no entry; the others keep their numbers.

    The driver then lists no links at all: its tables are for whole machines (fw_io_topology).
    """
    device = find_device(state, target)
    state["devices"].remove(device)
    number = device["neuron_device"]
    (root / f"dev/neuron{number}").unlink()
    (root / f"sys/class/neuron_device/neuron{number}").unlink()
    shutil.rmtree(root / device_folder(device))
    (root / f"sys/bus/pci/devices/{device['bdf']}").unlink()
    for other in state["devices"]:
        _connect(root, state, other, [])


def missing_core(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """A device with one logical core less: its last one, or the one that is the target."""
    device = find_device(state, target)
    cores: list[int] = device["neuroncore_ids"]
    core = int(target.partition(":")[2]) if target and target.startswith("neuroncore:") else cores[-1]
    first = cores.index(core) * state["lnc"]
    for physical in device["physical_cores"][first : first + state["lnc"]]:
        shutil.rmtree(root / device_folder(device) / f"neuron_core{physical}")
    del device["physical_cores"][first : first + state["lnc"]]
    cores.remove(core)
    device["nc_count"] -= 1
    write(root, device_leaf(state, device, "core_count"), f"{len(device['physical_cores'])}\n")


def less_memory(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """A device that shows less memory, in bytes: by default half, as with one of two stacks."""
    device = find_device(state, target)
    device["memory_size"] = int(value) if value else device["memory_size"] // 2


def wrong_neighbours(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """
    A list of links that is not the type's: one less at both ends; with a value (`1,2,3`) that list on the target alone.

    No driver is known that does so: its lists are fixed.
    """
    device = find_device(state, target)
    if value is not None:
        _connect(root, state, device, [int(part) for part in value.split(",") if part])
        return
    if not device["connected_to"]:
        raise ValueError(f"{state['instance_type']} tells no neighbours, so none can be lost")
    other = find_device(state, f"neuron:{device['connected_to'][-1]}")
    for one, peer in ((device, other), (other, device)):
        _connect(root, state, one, [n for n in one["connected_to"] if n != peer["neuron_device"]])


def ecc(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """More errors in a counter of a device: `NAME=COUNT`, by default one mem_ecc_uncorrected."""
    device = find_device(state, target)
    name, count = parse_count(value, "mem_ecc_uncorrected")
    if name not in device["ecc"]:
        raise ValueError(f"no such counter: {name}; there are {', '.join(device['ecc'])}")
    device["ecc"][name] += count
    _write_ecc(root, state, device, name)


def ecc_reset(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """The counters of a device begin anew, as when the driver is loaded again; no target: of all devices."""
    for device in [find_device(state, target)] if target else state["devices"]:
        for name in device["ecc"]:
            device["ecc"][name] = 0
            _write_ecc(root, state, device, name)


def exec_errors(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """More executions that ended with a status: `STATUS=COUNT` on `neuroncore:N`, by default one hw_error."""
    device = find_device(state, target)
    status, count = parse_count(value, "hw_error")
    nth = device["neuroncore_ids"].index(int(target.partition(":")[2])) if target and "core" in target else 0
    core = device["physical_cores"][nth * state["lnc"]]
    if status not in STATUSES:
        raise ValueError(f"no such status: {status}")
    for kind in ("total", "present"):
        leaf = core_leaf(state, device, core, f"stats/status/{status}/{kind}")
        before = int((root / leaf).read_text()) if (root / leaf).exists() else 0
        write(root, leaf, f"{before + count}\n")
    so_far = state["executions"].setdefault(str(device["neuroncore_ids"][nth]), {})
    so_far[status] = so_far.get(status, 0) + count


def unhealthy_component(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """The firmware says that parts of a device are bad: a list with commas, by default hbm."""
    device = find_device(state, target)
    leaf = device_leaf(state, device, "stats/hardware/health_status/unhealthy_components")
    if not (root / leaf).exists():
        raise ValueError(f"{state['chip']} with driver {state['driver']} does not tell unhealthy components")
    device["unhealthy_components"] = (value or "hbm").split(",")
    write(root, leaf, ",".join(device["unhealthy_components"]) + "\n")


def _connect(root: Path, state: Record, device: Record, neighbours: list[int]) -> None:
    device["connected_to"] = neighbours or None
    write(root, device_leaf(state, device, "connected_devices"), ", ".join(map(str, neighbours)) + "\n")


def _write_ecc(root: Path, state: Record, device: Record, name: str) -> None:
    """A counter, where this driver has it at all."""
    leaf = device_leaf(state, device, f"stats/hardware/{name}")
    if (root / leaf).exists():
        write(root, leaf, f"{device['ecc'][name]}\n")


def parse_count(value: str | None, name: str, count: int = 1) -> tuple[str, int]:
    """`NAME=COUNT`, `NAME` or `COUNT`."""
    for part in (value or "").replace("=", " ").split():
        if part.isdecimal():
            count = int(part)
        else:
            name = part
    return name, count
