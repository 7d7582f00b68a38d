"""
Kinds of devices: one file each, found by name; the only code that knows what a device is.

An accelerator finds its devices, sees who holds them and binds a worker to one of them. Probes never enter here, and
nothing here judges. `find` and `holders` run in the standard-library child, so they import no torch and change nothing;
only `bind`, in the worker of one device, imports it.

To add one: a module of this folder with the functions of `Accelerator`, and its name in
`DETECTED_NAMES`, or in `NAMES` alone where nothing on the machine shows that it is wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

from checks.contract import Device

if TYPE_CHECKING:
    from checks.host.machine import Host

DETECTED_NAMES = ("neuron", "cuda", "cpu")  # most special first: `detect` takes the first that is present
NAMES = (*DETECTED_NAMES, "xla")  # xla is one more way to drive devices, by configuration alone


class DeviceMissingError(LookupError):
    """A device that was asked for is not there: a fault of the node, not of the check."""


class Accelerator(Protocol):
    """What every file of this folder offers at module level. `options` are the operator's, by name."""

    def present(self, host: Host) -> bool:
        """Whether this kind of device is on the machine. Cheap."""

    def find(self, host: Host, options: Mapping[str, Any]) -> dict[str, Any]:
        """
        The inventory, of JSON values: accelerator, device_count, core_count, memory_bytes, efa_count and devices.

        Each of `devices` has target, kind, serial, cores and memory_bytes. What cannot be told is None, never 0. No
        torch, no side effects. Raises ValueError (one line) for an option that makes no sense.

        `workers` names the targets that get a worker each and become ranks, where these are not the devices: cores.

        `ranks` says how devices become the ranks of a collective: `kept` (the same workers stay ranks over several
        groups; so without this member), `fresh` (new processes for each group) or `together` (one process has all
        devices, and `bind` gets their targets joined by commas).
        """

    def holders(self, host: Host, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> list[str] | None:
        """
        Who holds devices: `cpu:0: pid 123 (python)`, and so on; empty when nobody does.

        None when it cannot be seen, which counts as taken. This process, the processes in `options["ignore_pids"]` and
        the descendants of both are ours and do not count.
        """

    def bind(self, target: str, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> Device:
        """
        Give this process to one device: pin its cores, then import torch.

        For the worker of the device, once. Raises DeviceMissingError when the inventory has no such target.
        """

    def hold(self, target: str, options: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Hold the device as a job would, so that others see it taken, for as long as the context is open."""


def find_accelerator(name: str, host: Host) -> Accelerator:
    """The accelerator of a name, or the one that is present for `auto`. Raises ValueError for an unknown name."""
    if name == "auto":
        return detect(host)
    known = sorted(NAMES)
    if name not in known:
        raise ValueError(f"no such accelerator: {name!r}; known are auto, {', '.join(known)}")
    return cast("Accelerator", importlib.import_module(f"{__name__}.{name}"))


def detect(host: Host) -> Accelerator:
    """The most special accelerator that is present; plain CPUs are always there."""
    for name in DETECTED_NAMES:
        accelerator = find_accelerator(name, host)
        if accelerator.present(host):
            return accelerator
    raise DeviceMissingError(f"no accelerator is present; looked for {', '.join(DETECTED_NAMES)}")
