"""
The files of a stand-in Neuron machine: sysfs, device nodes, firmware tables, kernel log, packages, processes.

The tree of the driver up to 2.30 is the documented one. From 2.31 on leaves moved to paths that could not be read: the
layout here is made up, with the same names of leaves, so that whoever hard-codes a path is found out.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from tests.fakes.neuron_state import CHIPS, Record, version

SYSFS = "sys/devices/virtual/neuron_device"

# Counters of each core, one for each status of the runtime.
STATUSES = (
    "success", "failure", "timeout", "exec_bad_input", "hw_error", "execute_completed_with_error",
    "execute_completed_with_num_error", "execute_failed_to_queue", "generic_error", "resource_error",
    "resource_nc_error", "invalid_error", "unsupported_neff_version", "oob_error", "hw_collectives_error",
    "hw_hbm_ue_error", "hw_nc_ue_error", "hw_dma_abort_error", "hw_repairable_hbm_ue_error",
    "execute_sw_nq_overflow", "execute_sw_semaphore_error", "execute_sw_event_error", "execute_sw_psum_collision",
    "execute_sw_sequencer_fatal",
)  # fmt: skip
OTHER_INFO = ("flop_count", "inference_count", "model_load_count", "nc_time_in_use", "reset_req_count",
              "reset_fail_count")  # fmt: skip
HOST_MEMORY = ("application_memory", "constants", "dma_buffers", "tensors")
DEVICE_MEMORY = ("constants", "model_code", "model_shared_scratchpad", "runtime_memory", "tensors")
# What may be read of each core; of the others the first core of a machine shows what they look like.
READ_STATUSES = (*(status for status in STATUSES if status.startswith("hw_")), "timeout",
                 "execute_completed_with_error")  # fmt: skip
READ_INFO = ("reset_fail_count",)

# What moves, by the beginning of the path inside neuronN or neuron_coreM: the longest fitting one counts.
_MOVED_DEVICE = {
    "core_count": "info/core_count",
    "connected_devices": "topology/connected_devices",
    "info/serial_number": "info/identity/serial_number",
    "stats/hardware/health_status/unhealthy_components": "health/unhealthy_components",
    "stats/hardware/health_status": "health/status",
    "stats/hardware": "health/ecc",
    "stats/power": "power",
    "stats/memory_usage": "memory/usage",
}
_MOVED_CORE = {
    "stats/status": "execution/status",
    "stats/memory_usage": "memory/usage",
    "stats/other_info": "execution/info",
}


def write(root: Path, path: str, text: str, mode: int | None = None) -> None:
    """A file of the machine with its directories; `path` has no slash at its beginning."""
    place = os.path.join(root, path)
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, text.encode())
        if mode is not None:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def link(root: Path, path: str, to: str) -> None:
    """A relative symbolic link inside the machine, so that the tree may be moved."""
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    place.symlink_to(os.path.relpath(root / to, place.parent))


def device_folder(device: Record) -> str:
    """Where a device is in sysfs."""
    return f"{SYSFS}/neuron{device['neuron_device']}"


def device_leaf(state: Record, device: Record, leaf: str) -> str:
    """The path of a leaf of a device, named as the documented tree has it (`stats/hardware/mem_ecc_corrected`)."""
    return f"{device_folder(device)}/{_moved(state, leaf, _MOVED_DEVICE)}"


def core_leaf(state: Record, device: Record, core: int, leaf: str) -> str:
    """The path of a leaf of a physical core, by its number on the device."""
    return f"{device_folder(device)}/neuron_core{core}/{_moved(state, leaf, _MOVED_CORE)}"


def write_machine(root: Path, state: Record, *, whole: bool) -> None:
    """Everything but the tools. `whole`: also the many leaves that nobody reads, of every device and core."""
    write_identity(root, state)
    write_packages(root, state)
    for nth, device in enumerate(state["devices"]):
        write_device(root, state, device, whole=whole or nth == 0, all_cores=whole)
    for number, nic in enumerate(state["efa"]):
        write_interface(root, nic)
        write(root, f"dev/infiniband/uverbs{number}", "", 0o666)
    if state["instance_type"].startswith(("trn2u", "trn3")):
        for name in ("node_id_2", "node_id_4", "server_id_2", "server_id_4"):
            write(root, f"sys/class/neuron_device/{name}", "0\n")
        write(root, "sys/class/neuron_device/ultraserver_mode", "1\n")
    log(root, f"neuron: Neuron Driver Started with Version:{state['driver']}-{zlib.crc32(b'driver'):08x}", 13.0)
    for nic in state["efa"]:
        log(root, f"efa {nic['bdf']} {nic['name']}: Setup irq", 14.0)


def write_identity(root: Path, state: Record) -> None:
    """The firmware's tables, processors and NUMA nodes."""
    dmi = "sys/devices/virtual/dmi/id"
    write(root, f"{dmi}/sys_vendor", "Amazon EC2\n")
    write(root, f"{dmi}/product_name", f"{state['instance_type']}\n")
    write(root, f"{dmi}/board_asset_tag", f"{state['instance_id']}\n")
    write(root, "sys/devices/system/cpu/online", f"0-{state['vcpus'] - 1}\n")
    for node, cpus in {d["numa_node"]: d["cpu_affinity"] for d in state["devices"]}.items():
        write(root, f"sys/devices/system/node/node{max(node, 0)}/cpulist", f"{cpus}\n")


def write_packages(root: Path, state: Record) -> None:
    """
    The loaded driver's version, and dpkg's record of the packages among some others.

    Of rpm only the database's file is there; what is in it the stand-in `rpm` reads from the state.
    """
    write(root, "sys/module/neuron/version", f"{state['loaded_driver']}\n")
    if state["efa"]:
        write(root, "sys/module/efa/version", "2.17.2g\n")
    if state["package_manager"] == "rpm":
        write(root, "var/lib/rpm/rpmdb.sqlite", "SQLite format 3\n")
        return
    rows = {"adduser": "3.134", **state["packages"], "zlib1g": "1:1.3.dfsg-3.1ubuntu2"}
    text = "\n".join(
        f"Package: {name}\nStatus: install ok installed\nPriority: optional\nSection: utils\n"
        f"Maintainer: nobody <nobody@example.org>\nArchitecture: amd64\nVersion: {number}\nDescription: {name}\n"
        for name, number in rows.items()
    )
    write(root, "var/lib/dpkg/status", text)


def write_device(root: Path, state: Record, device: Record, *, whole: bool, all_cores: bool) -> None:
    """
    One device: its node, its place on the PCI bus, its sysfs tree.

    `whole`: with what it and its first core say of memory and all other leaves; `all_cores`: those of every core.
    """
    arch, core_arch, device_name, pci_id, *_ = CHIPS[state["chip"]]
    number, release = device["neuron_device"], version(state["driver"])
    if device["visible"]:
        write(root, f"dev/neuron{number}", "", 0o666)
    _write_pci(root, device["bdf"], "0x1d0f", pci_id, device["numa_node"])
    link(root, f"sys/class/neuron_device/neuron{number}", device_folder(device))
    family = state["instance_type"].partition(".")[0].capitalize()
    leaves = {
        "core_count": str(len(device["physical_cores"])),
        "connected_devices": ", ".join(map(str, device["connected_to"] or ())),
        "reset": "1",
        "info/serial_number": device["serial"],
        "info/notify_delay": "-1",
        "info/architecture/arch_type": arch,
        "info/architecture/device_name": device_name,
        "info/architecture/instance_type": family,
        "stats/power/utilization": "POWER_STATUS_VALID,1763700000,8.10,9.42,8.77",
    }
    for name, count in device["ecc"].items():
        if not name.endswith("_corrected") or release >= (2, 30, 2):
            leaves[f"stats/hardware/{name}"] = str(count)
    if release >= (2, 28):
        leaves["stats/hardware/health_status/hw_error_event"] = "0"
    if release >= (2, 29):
        leaves["stats/power/utilization_raw"] = "8.77"
    if release >= (2, 30, 2) and state["chip"] in ("Trainium2", "Trainium3"):
        leaves["stats/hardware/health_status/unhealthy_components"] = ",".join(device["unhealthy_components"])
        leaves["stats/hardware/health_status/healthcheck_heartbeat"] = "1"
    for category in HOST_MEMORY if whole else ():
        for kind in ("total", "present", "peak"):
            leaves[f"stats/memory_usage/host_mem/{category}/{kind}"] = "0"
    for leaf, value in leaves.items():
        write(root, device_leaf(state, device, leaf), f"{value}\n")
    first = device["physical_cores"][0]
    for core in device["physical_cores"]:
        # Leaves of memory are many, and one core shows what they look like.
        _write_core(root, state, device, core, core_arch, whole=all_cores or (whole and core == first))
        if whole and core == first:
            _write_core_memory(root, state, device, core)


def write_interface(root: Path, nic: Record) -> None:
    """One EFA interface, with links between the PCI device and the RDMA device as the kernel makes them."""
    folder = _write_pci(root, nic["bdf"], nic["vendor"], nic["device"], nic["numa_node"])
    rdma = f"{folder}/infiniband/{nic['name']}"
    write(root, f"{rdma}/node_type", "4: usnic\n")
    write(root, f"{rdma}/ports/1/state", f"{nic['state']}\n")
    write(root, f"{rdma}/ports/1/phys_state", f"{nic['phys_state']}\n")
    write(root, f"{rdma}/ports/1/link_layer", "Unspecified\n")
    write(root, f"{rdma}/ports/1/rate", "100 Gb/sec (4X EDR)\n")
    for name, count in nic["counters"].items():
        write(root, f"{rdma}/ports/1/hw_counters/{name}", f"{count}\n")
    link(root, f"{rdma}/device", folder)
    link(root, f"sys/class/infiniband/{nic['name']}", rdma)


def log(root: Path, text: str, seconds: float) -> None:
    """One more line of the kernel log."""
    with (root / "dev/kmsg").open("a") as kmsg:
        kmsg.write(f"[{seconds:12.6f}] {text}\n")


def _write_pci(root: Path, bdf: str, vendor: str, device: str, numa_node: int) -> str:
    """A PCI device; where it is, without a slash at the beginning."""
    folder = f"sys/devices/pci{bdf[:7]}/{bdf}"
    leaves: Mapping[str, str] = {
        "vendor": vendor,
        "device": device,
        "numa_node": str(numa_node),
        "current_link_speed": "16.0 GT/s PCIe",  # less than the most on healthy machines as well
        "current_link_width": "8",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "8",
        "uevent": f"PCI_SLOT_NAME={bdf}",
    }
    for name, value in leaves.items():
        write(root, f"{folder}/{name}", f"{value}\n")
    link(root, f"sys/bus/pci/devices/{bdf}", folder)
    return folder


def _write_core(root: Path, state: Record, device: Record, core: int, arch: str, *, whole: bool) -> None:
    write(root, core_leaf(state, device, core, "info/architecture/arch_type"), f"{arch}\n")
    for folder, names in (
        ("stats/status", STATUSES if whole else READ_STATUSES),
        ("stats/other_info", OTHER_INFO if whole else READ_INFO),
    ):
        for name in names:
            for kind in ("total", "present") if whole else ("total",):
                write(root, core_leaf(state, device, core, f"{folder}/{name}/{kind}"), "0\n")


def _write_core_memory(root: Path, state: Record, device: Record, core: int) -> None:
    for place, categories in (("device_mem", DEVICE_MEMORY), ("host_mem", HOST_MEMORY)):
        for category in categories:
            for kind in ("total", "present", "peak"):
                write(root, core_leaf(state, device, core, f"stats/memory_usage/{place}/{category}/{kind}"), "0\n")


def _moved(state: Record, leaf: str, moves: Mapping[str, str]) -> str:
    if state["layout"] == "documented":
        return leaf
    for old in sorted(moves, key=len, reverse=True):
        if leaf == old or leaf.startswith(f"{old}/"):
            return moves[old] + leaf[len(old) :]
    return leaf
