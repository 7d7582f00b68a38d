"""
Who owns NeuronCores, by neuron-ls, and whether these processes are still there. No accelerator of its own.

A process with a runtime version owns cores of the devices it is listed under; one without only looks at them. An owner
without a process has left its cores reserved. To say so wrongly would be bad, so it takes two listings, the second
begun when the process was gone already, and eyes that see all processes of the machine.

Unverified on hardware: how soon the driver forgets an owner that has ended.
"""

from __future__ import annotations

import os
from typing import Any

from checks.accelerators.neuron import ls as neuron_ls
from checks.accelerators.neuron.ls import Listing
from checks.host.container import PID_NAMESPACE
from checks.host.machine import Host, HostError

_MAX_OWNERS = 192  # of one inventory, which is one bounded line; the largest machine has 128 logical cores


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
        again, _ = neuron_ls.query(host)
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


def devices_of_the_dead(owners: list[dict[str, Any]] | None) -> set[int]:
    """The numbers of devices with cores that nobody is left to release."""
    return {index for owner in owners or () if owner["alive"] is False for index in owner["devices"]}


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
