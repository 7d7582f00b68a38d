"""
Documented faults of a Neuron machine: each changes what the machine is, its files, and what its tools say.

Kinds that only tools act on (hang, half_json, nccom_wrong, ...) are a row in the state, which the tools read at each
call. Where a source does not say how the fault shows, the docstring says what is assumed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.fakes.neuron_device_faults import (
    ecc,
    ecc_reset,
    exec_errors,
    less_memory,
    missing_core,
    missing_device,
    parse_count,
    unhealthy_component,
    wrong_neighbours,
)
from tests.fakes.neuron_files import (
    link,
    log,
    write,
    write_interface,
    write_packages,
)
from tests.fakes.neuron_state import EFA_COUNTERS, Record, find_device, find_interface

Fault = Callable[[Path, Record, "str | None", "str | None"], None]

HW_ERROR_ACTIONS = {"SRAM_UNCORRECTABLE_ERROR": "TERMINATE_INSTANCE", "HANG_ON_COLLECTIVES": "RESTART"}
BENIGN = (
    "neuron:npid_detach: neuron:npid_detach: pid=90193, slot=0",
    "efa 0000:a0:1a.0 rdmap160s26: Failed to process command DEREG_MR (opcode 8) comp_status 7 err -22",
    "neuron:ndma_memcpy_wait_for_completion: DMA completion timeout for UDMA_ENG_33 q0",
    "neuron:mc_alloc: device mempool [0:0] total 1073741568 occupied 960539030 needed 1272 available 768",
)


def make_fault(root: Path, state: Record, kind: str, target: str | None, value: str | None) -> None:
    """Apply a fault and note it in the state. Raises ValueError for a kind or a target that there is not."""
    if kind not in FAULTS:
        raise ValueError(f"no such fault: {kind!r}; there are {', '.join(FAULTS)}")
    change = FAULTS[kind]
    if change is not None:
        change(root, state, target, value)
    state["faults"].append({"kind": kind, "target": target, "value": value})


def no_driver(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """The module is not loaded: nothing of it in /dev and /sys; packages and firmware tables stay."""
    for node in (root / "dev").glob("neuron*"):
        node.unlink()
    for path in ("sys/devices/virtual/neuron_device", "sys/class/neuron_device", "sys/module/neuron"):
        shutil.rmtree(root / path, ignore_errors=True)
    kmsg = root / "dev/kmsg"
    kmsg.write_text("".join(line for line in kmsg.read_text().splitlines(True) if "neuron" not in line.lower()))


def renumbered(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """A container that numbers its devices anew: what it calls the first is the sixth of the host, and so on."""
    mounts = "proc/self/mountinfo"
    text = (root / mounts).read_text().replace(" - ext4 /dev/nvme0n1p1 ", " - overlay overlay ")
    (root / mounts).unlink()
    write(root, mounts, text)


def hw_error_line(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """What the runtime has the kernel log when hardware fails under it: by default SRAM_UNCORRECTABLE_ERROR."""
    device, kind = find_device(state, target), value or "SRAM_UNCORRECTABLE_ERROR"
    core = int(target.partition(":")[2]) if target and "core" in target else device["neuroncore_ids"][0]
    log(
        root,
        f"NEURON_HW_ERR={kind} instance-id={state['instance_id']} hostname=node-1 nd-id={device['neuron_device']} "
        f"nc-id={device['neuroncore_ids'].index(core)} serial-num={device['serial']} "
        f"action={HW_ERROR_ACTIONS.get(kind, 'TERMINATE_INSTANCE')}",
        4821.7,
    )


def benign_lines(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """Lines that look like faults and are none."""
    for line in BENIGN:
        log(root, line, 4800.0)


def busy(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """A process (pid as value) holds the device and all its cores; target `all`: every device."""
    _open(root, _hold(state, target, value), "python3")


def watched(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """A neuron-monitor (pid as value) has the device open and owns no core of it; target `all`: every device."""
    process = _hold(state, target, value)
    process.update(command="/opt/aws/neuron/bin/neuron-monitor -c /etc/monitor.json", neuron_runtime_version="NA")
    _open(root, process, "neuron-monitor")


def stuck_core(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """The driver still counts a process (pid as value) that is gone as the owner of the cores."""
    _hold(state, target, value)


def no_permission(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """
    The node of a device (no target: of all) that this user may neither read nor write.

    Root may still. Assumed: neuron-ls then says the same as without a driver.
    """
    for device in [find_device(state, target)] if target else state["devices"]:
        if device["visible"]:
            (root / f"dev/neuron{device['neuron_device']}").chmod(0o000)


def efa_missing(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """An interface that the instance was launched without; target `all`: it has none."""
    for nic in list(state["efa"]) if target == "all" else [find_interface(state, target)]:
        state["efa"].remove(nic)
        (root / f"sys/class/infiniband/{nic['name']}").unlink()
        (root / f"sys/bus/pci/devices/{nic['bdf']}").unlink()
        shutil.rmtree(root / f"sys/devices/pci{nic['bdf'][:7]}/{nic['bdf']}")


def efa_down(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """A port without a link; the value is its state, by default `1: DOWN`."""
    nic = find_interface(state, target)
    nic["state"], nic["phys_state"] = value or "1: DOWN", "3: Disabled"
    write_interface(root, nic)


def efa_errors(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """More of what a port counts: `NAME=COUNT`, by default a million rx_drops."""
    nic = find_interface(state, target)
    name, count = parse_count(value, "rx_drops", 1_000_000)
    if name not in EFA_COUNTERS:
        raise ValueError(f"no such counter: {name}; there are {', '.join(EFA_COUNTERS)}")
    nic["counters"][name] += count
    write_interface(root, nic)


def no_tools(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """The tools (the one that is the target) are not installed."""
    for path in sorted((root / "bin").iterdir()):
        if target is None or path.name == target:
            path.unlink()


def version_pair(root: Path, state: Record, target: str | None, value: str | None) -> None:
    """
    Versions that do not go together: `PACKAGE=VERSION` (or `loaded=VERSION`) with commas between.

    By default driver 2.26 under runtime 2.32, which the release notes exclude.
    """
    text = value or (
        "loaded=2.26.5.0,aws-neuronx-dkms=2.26.5.0,aws-neuronx-runtime-lib=2.32.1.0-abc123def,"
        "aws-neuronx-collectives=2.32.1.0-fed321cba"
    )
    for pair in text.split(","):
        name, _, number = pair.partition("=")
        if name == "loaded":
            state["loaded_driver"] = number
            kmsg = root / "dev/kmsg"
            started = "Neuron Driver Started with Version:"
            lines = [line for line in kmsg.read_text().splitlines(True) if started not in line]
            kmsg.write_text("".join(lines))
            log(root, f"neuron: {started}{number}-0a1b2c3d", 13.0)
        else:
            state["packages"][name] = number
    write_packages(root, state)


# None: the tools act on it, and no file changes.
FAULTS: dict[str, Fault | None] = {
    "missing_device": missing_device,
    "missing_core": missing_core,
    "less_memory": less_memory,
    "wrong_neighbours": wrong_neighbours,
    "null_members": None,
    "extra_members": None,
    "renumbered": renumbered,
    "hang": None,
    "half_json": None,
    "no_driver": no_driver,
    "old_units": None,
    "ecc": ecc,
    "ecc_reset": ecc_reset,
    "exec_errors": exec_errors,
    "unhealthy_component": unhealthy_component,
    "hw_error_line": hw_error_line,
    "benign_lines": benign_lines,
    "busy": busy,
    "watched": watched,
    "stuck_core": stuck_core,
    "no_permission": no_permission,
    "efa_missing": efa_missing,
    "efa_down": efa_down,
    "efa_errors": efa_errors,
    "no_tools": no_tools,
    "version_pair": version_pair,
    "nccom_wrong": None,
    "nccom_hang": None,
    "nccom_fail": None,
    "nccom_missing_row": None,
    "nccom_nan": None,
    "nccom_slow": None,
}


def _hold(state: Record, target: str | None, value: str | None) -> Record:
    """A holder of all cores of the devices, in the state alone."""
    devices = [d for d in state["devices"] if d["visible"]] if target == "all" else [find_device(state, target)]
    process = {
        "pid": int(value) if value else 4242 + len(state["processes"]),
        "command": "python3 train.py --config /home/user/config.yaml --token abcdef",
        "neuron_runtime_version": state["packages"]["aws-neuronx-runtime-lib"].partition("-")[0],
        "devices": [device["neuron_device"] for device in devices],
    }
    state["processes"].append(process)
    return process


def _open(root: Path, process: Record, name: str) -> None:
    """The process itself, with the nodes of its devices open."""
    pid, rest = process["pid"], "1 1 0 -1 4194560 100 0 0 0 5 5 0 0 20 0 1 0"
    write(root, f"proc/{pid}/comm", f"{name}\n")
    write(root, f"proc/{pid}/stat", f"{pid} ({name}) S 1 {rest} {pid * 10} 1000 100\n")
    write(root, f"proc/{pid}/status", "voluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t1\n")
    write(root, f"proc/{pid}/wchan", "0")
    for nth, number in enumerate(process["devices"]):
        link(root, f"proc/{pid}/fd/{nth + 3}", f"dev/neuron{number}")
