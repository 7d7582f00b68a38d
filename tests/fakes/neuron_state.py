"""
What a stand-in Neuron machine is, as one JSON object, made from the instance catalogue.

Devices, cores, memory and neighbours are the catalogue's. PCI addresses of EFA interfaces, and which device uses which,
are the published maps; every other address is made by a rule that keeps them unique. Assumed, because no source says
it: all ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from checks.catalog import TYPES, InstanceType

Record = dict[str, Any]

# Names of chips as the driver writes them: arch_type of the device and of its cores, device_name, the PCI device id.
# neuron-monitor has its own words (type, neuroncore_version).
CHIPS: dict[str, tuple[str, str, str, str, str, str]] = {
    "Trainium": ("NDv2", "NCv2", "Trainium1", "0x7164", "trainium", "v2"),
    "Inferentia2": ("NDv3", "NCv2", "Inferentia2", "0x7264", "inferentia2", "v2"),
    "Trainium2": ("NDv3", "NCv3", "Trainium2", "0x7364", "trainium2", "v3d"),
    "Trainium3": ("NDv4", "NCv4", "Trainium3", "0x7564", "trainium3", "v4"),
}

# The interface of devices 0 and 1, of 2 and 3, ...
_TRN1_NICS = ("10:1a.0", "a0:1a.0", "20:19.0", "90:19.0", "20:1a.0", "90:1a.0", "10:19.0", "a0:19.0")
# The slot of the interface of device 0, 1, ... of trn1n, on the bus that trn1 has it on.
_TRN1N_SLOTS = ("17", "1a", "17", "1a", "19", "18", "19", "18", "17", "1a", "17", "1a", "19", "18", "19", "18")
# The bus of the interface of device 0, 1, ...
_TRN2_NICS = ["c9", "b4", "b3", "ca", "6c", "57", "56", "6d", "98", "83", "82", "99", "f5", "e0", "df", "f6"]
_TRN3_NICS = ["be", "a9", "a8", "bf", "61", "4c", "4b", "62", "8d", "78", "77", "8e", "ea", "d5", "d4", "eb"]

_VCPUS = {
    "trn1.2xlarge": 8, "trn1.32xlarge": 128, "trn1n.32xlarge": 128, "trn2.3xlarge": 12, "inf2.xlarge": 4,
    "inf2.8xlarge": 32, "inf2.24xlarge": 96,
}  # fmt: skip
_VCPUS_DEFAULT = 192

ECC = ("mem_ecc_corrected", "mem_ecc_uncorrected", "mem_ecc_repairable_uncorrected", "sram_ecc_corrected",
       "sram_ecc_uncorrected")  # fmt: skip
EFA_COUNTERS = (
    "impaired_remote_conn_events", "lifespan", "rdma_read_bytes", "rdma_read_resp_bytes", "rdma_read_wr_err",
    "rdma_read_wrs", "rdma_write_bytes", "rdma_write_recv_bytes", "rdma_write_wr_err", "rdma_write_wrs", "recv_bytes",
    "recv_wrs", "retrans_bytes", "retrans_pkts", "retrans_timeout_events", "rx_bytes", "rx_drops", "rx_pkts",
    "send_bytes", "send_wrs", "tx_bytes", "tx_pkts", "unresponsive_remote_events",
)  # fmt: skip


class Place(NamedTuple):
    """Where a device sits: its PCI address, that of its interface (None: it has none), its NUMA node."""

    bdf: str
    nic_bdf: str | None
    numa_node: int


def make_state(
    name: str,
    *,
    tools: str = "new",
    driver: str = "2.30.2.0",
    lnc: int | None = None,
    share: Sequence[int] | None = None,
) -> Record:
    """
    The whole machine. `share` are the devices that a container was given: tools and /dev show them alone.

    Raises ValueError for a type without a known number of Neuron devices, or a configuration that its chip has not.
    """
    kind = TYPES.get(name)
    if kind is None or kind.chip.accelerator != "neuron" or kind.devices is None or kind.chip.cores is None:
        known = ", ".join(t.name for t in TYPES.values() if t.chip.accelerator == "neuron" and t.devices)
        raise ValueError(f"no Neuron type whose devices are known: {name!r}; there are {known}")
    logical = kind.chip.lnc[0] if lnc is None else lnc
    if logical not in kind.chip.lnc:
        known = ", ".join(map(str, sorted(kind.chip.lnc)))
        raise ValueError(f"{kind.chip.name} has no logical core configuration {logical}; it has {known}")
    places = [_place(kind, index) for index in range(kind.devices)]
    devices = [_device(kind, index, place, logical) for index, place in enumerate(places)]
    for device in devices:
        device["visible"] = share is None or device["neuron_device"] in share
    return {
        "instance_type": name,
        "instance_id": "i-0" + _digits(name, 16),
        "tools": tools,
        "driver": driver,
        "loaded_driver": driver,
        "layout": "moved" if version(driver) >= (2, 31) else "documented",
        "lnc": logical,
        "vcpus": _VCPUS.get(name, _VCPUS_DEFAULT),
        "chip": kind.chip.name,
        "package_manager": "dpkg",
        "packages": packages(driver, tools),
        "devices": devices,
        "monitor_words": CHIPS[kind.chip.name][4:],
        "monitor_speed": 20,
        "processes": [],
        "executions": {},
        "efa": _interfaces(places),
        "faults": [],
    }


def version(text: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing."""
    return tuple(int(part) for part in text.split("-")[0].split(".") if part.isdecimal())


def packages(driver: str, tools: str) -> dict[str, str]:
    """
    Versions of the packages that came with a driver.

    Those of SDK 2.32 and 2.33 are the published ones; for others the rule that they follow (runtime four minor releases
    ahead of the driver, tools two).
    """
    known = {
        "2.30.2.0": ("2.34.10.0", "2.34.10.0", "2.32.28.0"),
        "2.31.7.0": ("2.35.30.0", "2.35.43.0", "2.33.38.0"),
    }
    minor = (*version(driver), 0, 0)[1]
    plain = (f"2.{minor + 4}.1.0", f"2.{minor + 4}.1.0", f"2.{minor + 2}.1.0")
    runtime, collectives, new_tools = known.get(driver, plain)
    return {
        "aws-neuronx-dkms": driver,
        "aws-neuronx-runtime-lib": f"{runtime}-{_digits('runtime' + driver, 9)}",
        "aws-neuronx-collectives": f"{collectives}-{_digits('collectives' + driver, 9)}",
        "aws-neuronx-tools": new_tools if tools == "new" else "2.11.0.0",
    }


def nic_name(bdf: str) -> str:
    """The kernel's name for an interface by its place: bus and slot in decimal."""
    _, bus, rest = bdf.split(":")
    return f"rdmap{int(bus, 16)}s{int(rest.split('.')[0], 16)}"


def find_device(state: Record, target: str | None) -> Record:
    """The record of `neuron:7`, or of the device that has `neuroncore:14`; the first visible one for None."""
    visible: list[Record] = [device for device in state["devices"] if device["visible"]]
    if target is None:
        return visible[0]
    kind, _, number = target.partition(":")
    for device in visible:
        if kind == "neuron" and device["neuron_device"] == int(number):
            return device
        if kind == "neuroncore" and int(number) in device["neuroncore_ids"]:
            return device
    raise ValueError(f"no such target on this machine: {target}")


def find_interface(state: Record, target: str | None) -> Record:
    """The record of `efa:rdmap16s25`; the first one for None."""
    for nic in state["efa"]:
        if target is None or f"efa:{nic['name']}" == target:
            found: Record = nic
            return found
    raise ValueError(f"no such interface on this machine: {target}")


def _device(kind: InstanceType, index: int, place: Place, lnc: int) -> Record:
    physical = kind.chip.cores or 0
    logical = physical // lnc
    neighbours = kind.neighbours(index)
    return {
        "neuron_device": index,
        "bdf": place.bdf,
        "cpu_affinity": _affinity(_VCPUS.get(kind.name, _VCPUS_DEFAULT), place.numa_node),
        "numa_node": place.numa_node,
        "connected_to": _documented_order(index, neighbours) if neighbours else None,
        "physical_cores": list(range(physical)),
        "nc_count": logical,
        "neuroncore_ids": list(range(index * logical, (index + 1) * logical)),
        "memory_size": kind.chip.memory_bytes,
        "serial": _digits(f"{kind.name} {index}", 16),
        "ecc": dict.fromkeys(ECC, 0),
        "unhealthy_components": [],
        "nic": nic_name(place.nic_bdf) if place.nic_bdf else None,
    }


def _documented_order(index: int, neighbours: Sequence[int]) -> list[int]:
    """neuron-ls does not sort: up, left, down, right (0: 12, 3, 4, 1)."""
    steps = (
        (index - 4) % 16,
        index - index % 4 + (index - 1) % 4,
        (index + 4) % 16,
        index - index % 4 + (index + 1) % 4,
    )
    return list(steps) if set(steps) == set(neighbours) else list(neighbours)


def _interfaces(places: Sequence[Place]) -> list[Record]:
    """Each interface once, by address."""
    found = {place.nic_bdf: place.numa_node for place in places if place.nic_bdf}
    return [
        {
            "name": nic_name(bdf),
            "bdf": bdf,
            "numa_node": numa_node,
            "vendor": "0x1d0f",
            "device": "0xefa1" if bdf.endswith(("19.0", "1a.0")) else "0xefa2",
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "counters": dict.fromkeys(EFA_COUNTERS, 0),
        }
        for bdf, numa_node in sorted(found.items())
    ]


def _place(kind: InstanceType, index: int) -> Place:
    if kind.devices == 1:
        nic = "0000:00:1d.0" if kind.efa_interfaces else None
        return Place("0000:00:1f.0", nic, -1)
    if kind.chip.name in ("Trainium2", "Trainium3"):
        buses = _TRN2_NICS if kind.chip.name == "Trainium2" else _TRN3_NICS
        bus = int(buses[index], 16)
        pair = bus + 1 if f"{bus + 1:02x}" in buses else bus - 1
        # Under one switch: two interfaces, then their two devices, the other way round.
        device_bus = min(bus, pair) + (3 if bus < pair else 2)
        return Place(f"0000:{device_bus:02x}:00.0", f"0000:{bus:02x}:00.0", int(bus >= 0xA0))
    if kind.topology == "torus":
        nic = _TRN1_NICS[index // 2]
        bus_name = nic.partition(":")[0]
        nth = sum(_TRN1_NICS[other // 2].startswith(bus_name) for other in range(index))
        if kind.name.startswith("trn1n"):
            nic = f"{bus_name}:{_TRN1N_SLOTS[index]}.0"
        return Place(f"0000:{bus_name}:{0x1B + nth:02x}.0", f"0000:{nic}", int(bus_name >= "90"))
    bus_name = ("10", "20", "90", "a0")[index % 4]
    return Place(f"0000:{bus_name}:{0x1B + index // 4:02x}.0", None, int(bus_name >= "90"))


def _affinity(vcpus: int, numa_node: int) -> str:
    """The processors of a node: half of the cores, and their second threads."""
    if numa_node < 0:
        return f"0-{vcpus - 1}"
    quarter = vcpus // 4
    first, second = numa_node * quarter, (numa_node + 2) * quarter
    return f"{first}-{first + quarter - 1},{second}-{second + quarter - 1}"


def _digits(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
