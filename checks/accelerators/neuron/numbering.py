"""
How NeuronCores are counted and numbered: physical and logical ones, by neuron-ls and by sysfs.

A chip of several generations joins one or two physical cores into a logical one (LNC), which is what frameworks see. No
accelerator of its own; pure but for one variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from checks.accelerators.neuron import sysfs as neuron_sysfs
from checks.accelerators.neuron.ls import Listing
from checks.catalog import Chip, find_type

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


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
    """The configuration that is wanted, unless the chip has it not: then nobody can have meant it for this machine."""
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
