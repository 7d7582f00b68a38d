"""
Kinds of devices: one file (or folder) each, found by what it contains; the only code that knows what a device is.

An accelerator finds its devices, sees who holds them and binds a worker to one of them. Probes never enter here, and
nothing here judges. `find` and `holders` run in the standard-library child, so they import no torch and change nothing;
only `bind`, in the worker of one device, imports it.

To add one: a module of this folder with a `DESCRIPTOR` and the functions of `Accelerator`. There is nothing to
register: all that other code asks of a kind of device is in its descriptor.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from checks.contract import Action, Device

if TYPE_CHECKING:
    from checks.host.machine import Host


@dataclass(frozen=True)
class Diagnosis:
    """
    What the words of a worker that failed say of the cause.

    `reason` is a code of `checks.reasons`; `action` None means the reason's own; `remedy` is a short sentence.
    """

    reason: str
    action: Action | None
    remedy: str

    def message(self, words: str) -> str:
        """One line: what was said, as far as it was, and what to do."""
        return f"{words}; {self.remedy}" if words else self.remedy


@dataclass(frozen=True, kw_only=True)
class OwnIndex:
    """What people are told of Python distributions that are not those of the public index."""

    title: str
    """What they are called together."""

    needed: str
    """The distribution without which an interpreter cannot use the devices."""

    source: str
    """Where the real ones are, as half a sentence."""


class Tool(NamedTuple):
    """
    A program that says something of the devices. `streams`: it never ends, and its first line is what counts.

    `config` is the text of a file whose path stands for `{config}` in the command.
    """

    command: tuple[str, ...]
    streams: bool = False
    config: str | None = None


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What other code may know of a kind of device without opening one."""

    name: str
    """As in settings, inventories and learned limits."""

    detect_order: int | None
    """`auto` takes the first that is present, lowest number first; None: by configuration alone."""

    speed_versions: tuple[str, ...]
    """Versions that change the speed of the same work on the same device; a new version of anything else means nothing
    for learned limits. The first must be known, or nothing is learned."""

    version_files: Mapping[str, str] = field(default_factory=dict)
    """Versions of the machine, by name: each is the one line of a file, which need not be there."""

    read_versions: Callable[[Host], Mapping[str, str]] | None = None
    """Versions that no file says, by name, as far as they are known. Every kind is asked on every machine, so it must
    be cheap where there are no such devices."""

    compiles: bool = False
    """Whether probes are compiled before they run, so that the compile cache concerns them."""

    prepare_fork: Callable[[], None] | None = None
    """
    Imports what the workers of all such devices share, so that one process can fork them.

    It changes what is read at the import as `bind` does, and opens no device, no context and no runtime. Raises
    RuntimeError where such devices cannot be used after a fork. None: workers import on their own; the module of the
    accelerator says why.
    """

    device_files: str | None = None
    """The beginning of the device files' names, with the device's number after it; None: there are none in /dev."""

    pjrt_clients: tuple[str, ...] = ()
    """Names of the PJRT clients that drive these devices under XLA."""

    scaled_products: tuple[str, ...] = ()
    """Dtypes of torch whose scaled products (`torch._scaled_mm`) such devices may have; each device is still asked."""

    profiles_programs: bool = False
    """Whether a slow probe is profiled by its compiled program, on a device that its worker has left: see
    `checks.profiling.neuron`."""

    on_ec2_only: bool = False
    """Whether such devices exist on EC2 alone, so that there must be an instance type."""

    jobs_open_devices: bool = True
    """Whether a job has the device files open for as long as it uses the devices; false for CPUs."""

    holders_check: str | None = None
    """The passive check that can tell of processes on the devices that /proc does not show; None: there is none."""

    kubernetes_resources: tuple[str, ...] = ()
    """Beginnings of the names by which Kubernetes gives such devices to pods."""

    numbers_last: bool = False
    """Whether the other devices of a whole machine keep their numbers where one is lost, so that a gap names it."""

    memory_told_by: str | None = None
    """The source (`source` of the inventory) that tells the memory of devices: unknown where it does not; None: such
    devices need not tell."""

    uses_efa: bool = True
    """Whether EFA interfaces matter to such devices where nobody says how many there should be; false for CPUs."""

    takes_all_efa: bool = False
    """Whether a job on an instance type with several such devices takes all its EFA interfaces."""

    nccom: bool = False
    """Whether nccom-test can carry their collectives over nodes."""

    graph_sources: tuple[str, ...] = ()
    """Files below `checks`, as patterns, whose text decides about the graphs that are compiled for such devices beside
    that of the probes."""

    compiled_with: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[tuple[str, ...], int | None]] | None = None
    """The compiler's flags and the logical core configuration, of an inventory and options: programs that differ in
    them are not the same. None: neither matters."""

    diagnose: Callable[[str], tuple[Diagnosis, str] | None] | None = None
    """What the output of a worker that failed says of its device, and the line that says so (empty: no single one);
    None: nothing that is known. Every kind is asked, whatever the node has."""

    tells_of_trouble: Callable[[str], bool] | None = None
    """Whether the text of an error tells of a device that failed, is taken or could not be asked, and not only of one
    that lacks what it was asked for."""

    tools: Mapping[str, str] = field(default_factory=dict)
    """Programs of the vendor that must be there where the device files are, each with how to get it."""

    python_packages: tuple[str, ...] = ()
    """Python distributions that such devices need, by name."""

    own_index: OwnIndex | None = None
    """Where the real ones of `python_packages` are, if the public index has only placeholders under their names."""

    system_packages: tuple[str, ...] = ()
    """Names of the vendor's packages of the operating system, as patterns of dpkg and rpm."""

    kernel_modules: tuple[str, ...] = ()
    """Of the driver; each has its version in /sys/module."""

    kernel_words: str | None = None
    """A regular expression for lines of the kernel log that concern such devices; case does not matter."""

    support_tools: tuple[Tool, ...] = ()
    """Programs whose output belongs into the record of a machine. They run one after the other."""


class DeviceMissingError(LookupError):
    """A device that was asked for is not there: a fault of the node, not of the check."""


class Accelerator(Protocol):
    """What every accelerator offers at module level. `options` are the operator's, by name."""

    DESCRIPTOR: Descriptor

    def present(self, host: Host) -> bool:
        """Whether this kind of device is on the machine. Cheap."""

    def find(self, host: Host, options: Mapping[str, Any]) -> dict[str, Any]:
        """
        The inventory, of JSON values: accelerator, device_count, core_count, memory_bytes, efa_count and devices.

        Each of `devices` has target, kind, serial, cores and memory_bytes. What cannot be told is None, never 0. No
        torch, no side effects. Raises ValueError (one line) for an option that makes no sense.

        `file` of a device, where it has that member, is the inode of what the kernel makes anew when the device comes
        back or its driver is loaded again: another number means that the device is not yet tested.

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
    found = _accelerators().get(name)
    if found is None:
        raise ValueError(f"no such accelerator: {name!r}; choose one of: auto, {', '.join(accelerator_names())}")
    return found


def detect(host: Host) -> Accelerator:
    """The most special accelerator that is present; plain CPUs are always there."""
    found = {
        one.DESCRIPTOR.detect_order: one for one in _accelerators().values() if one.DESCRIPTOR.detect_order is not None
    }
    for order in sorted(found):
        if found[order].present(host):
            return found[order]
    names = ", ".join(found[order].DESCRIPTOR.name for order in sorted(found))
    raise DeviceMissingError(f"no accelerator is present; looked for {names}")


def accelerator_names() -> tuple[str, ...]:
    return tuple(sorted(_accelerators()))


def find_descriptor(name: str | None) -> Descriptor | None:
    """The descriptor of a kind of device; None for one that is not known here, as of a node of another version."""
    if name is None or name not in _modules():
        return None
    found = getattr(importlib.import_module(f"{__name__}.{name}"), "DESCRIPTOR", None)
    return found if isinstance(found, Descriptor) else None


def descriptors() -> tuple[Descriptor, ...]:
    """Of every kind of device, in the order of `auto`; those by configuration alone come last, by name."""
    found = [one.DESCRIPTOR for one in _accelerators().values()]
    return tuple(sorted(found, key=lambda one: (one.detect_order is None, one.detect_order or 0, one.name)))


def driven_by(client: str) -> str | None:
    """The kind of device that a PJRT client drives; None where no descriptor names the client."""
    found = (one.DESCRIPTOR for one in _accelerators().values())
    return next((one.name for one in found if client in one.pjrt_clients), None)


def holders_checks() -> frozenset[str]:
    """The passive checks that can tell of processes on devices that /proc does not show."""
    found = (one.DESCRIPTOR.holders_check for one in _accelerators().values())
    return frozenset(name for name in found if name is not None)


def compiles(name: str | None) -> bool:
    """Whether the compile cache concerns this kind of device."""
    found = find_descriptor(name)
    return found is not None and found.compiles


@functools.cache
def _accelerators() -> Mapping[str, Accelerator]:
    """Every module of this folder that has a descriptor, by its name."""
    described = {name: find_descriptor(name) for name in _modules()}
    return {
        name: cast("Accelerator", importlib.import_module(f"{__name__}.{name}"))
        for name, descriptor in described.items()
        if descriptor is not None
    }


@functools.cache
def _modules() -> tuple[str, ...]:
    """The names of the modules and packages of this folder; a descriptor bears the name of its module."""
    found = []
    for entry in sorted(os.listdir(__path__[0])):
        name = entry.removesuffix(".py")
        if name != entry or os.path.exists(os.path.join(__path__[0], entry, "__init__.py")):
            found.append(name)
    return tuple(name for name in found if name != "__init__")
