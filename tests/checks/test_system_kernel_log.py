"""The kernel log: every kind of fault has a line that trips it, and benign lines win."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Action, Blame, Evidence, Finding, ParameterError, Previous, Status
from checks.reasons import blame_of
from checks.system.kernel_log import BENIGN, PATTERNS, Rules, find_fault, kernel_log, recall_faults
from checks.system.kernel_log import Machine as Sight
from checks.worker.protocol import encode, from_evidence
from tests.every import every
from tests.fakes.gpus import GpuMachine
from tests.hosts.machine import Machine, number, worst_of
from tests.patience import PATIENCE

GPUS = {"accelerator": "cuda"}
MLX5, ENA = "mlx5_core 0000:10:00.0", "ena 0000:00:05.0"
LUSTRE = "fsx-OST0001-osc-ffff3000ef06c000"
WAITS = "in progress operations using this service will wait for recovery to complete"
FAULTS = [
    ("GPU Xid of an NVSwitch", Status.FAIL, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 46 x"),
    ("machine check", Status.FAIL, "Memory failure: 0x1234: recovery action for dirty LRU page: Failed"),
    ("machine check", Status.FAIL, "mce: Uncorrected hardware memory error in user-access at 7f0000"),
    ("machine check", Status.WARN, "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400"),
    ("machine check", Status.WARN, "mce: [Hardware Error]: Machine check events logged"),
    ("uncorrected ECC", Status.FAIL, "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"),
    ("corrected ECC", Status.WARN, "EDAC MC0: 2 CE memory scrubbing error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"),
    ("overheating", Status.WARN, "CPU3: Core temperature above threshold, cpu clock throttled"),
    ("overheating", Status.WARN, "thermal thermal_zone0: acpitz: critical temperature reached, shutting down"),
    ("hung task", Status.FAIL, "INFO: task python:4711 blocked for more than 120 seconds."),
    ("lockup", Status.FAIL, "watchdog: BUG: soft lockup - CPU#2 stuck for 22s! [python:4711]"),
    ("lockup", Status.FAIL, "NMI watchdog: Watchdog detected hard LOCKUP on cpu 5"),
    ("lockup", Status.FAIL, "rcu: INFO: rcu_sched detected stalls on CPUs/tasks:"),
    ("lockup", Status.FAIL, "rcu: INFO: rcu_preempt self-detected stall on CPU"),
    ("lockup", Status.FAIL, "rcu: INFO: rcu_sched detected expedited stalls on CPUs/tasks: { 3-... }"),
    ("kernel bug", Status.FAIL, "BUG: unable to handle page fault for address: ffffffffc0"),
    ("kernel bug", Status.FAIL, "Oops: 0002 [#1] SMP NOPTI"),
    ("kernel bug", Status.FAIL, "general protection fault, probably for non-canonical address 0xdead: 0000 [#1]"),
    ("kernel bug", Status.FAIL, "kernel BUG at mm/slub.c:381!"),
    ("kernel bug", Status.FAIL, "Internal error: Oops: 96000004 [#1] SMP"),
    ("out of memory", Status.WARN, "Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB"),
    ("out of memory", Status.WARN, "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task=python"),
    ("disk error", Status.FAIL, "blk_update_request: I/O error, dev sda, sector 12345 op 0x0:(READ)"),
    ("disk error", Status.FAIL, "critical medium error, dev nvme0n1, sector 2048 op 0x0:(READ)"),
    ("disk error", Status.FAIL, "critical target error, dev sda, sector 2048"),
    ("disk error", Status.FAIL, "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff"),
    ("disk error", Status.FAIL, "nvme nvme0: Removing after probe failure status: -19"),
    ("slow disk", Status.WARN, "nvme nvme1: I/O 22 QID 3 timeout, aborting"),
    ("slow disk", Status.WARN, "nvme nvme1: I/O 22 QID 3 timeout, reset controller"),
    ("slow disk", Status.WARN, "nvme nvme1: Abort status: 0x0"),
    ("file system error", Status.FAIL, "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls:"),
    ("file system error", Status.FAIL, "EXT4-fs (sda1): Remounting filesystem read-only"),
    ("file system error", Status.FAIL, "XFS (nvme1n1): Metadata corruption detected at xfs_agf_read_verify"),
    ("file system error", Status.FAIL, "XFS (nvme1n1): Filesystem has been shut down due to log error (0x2)."),
    ("file system error", Status.FAIL, "BTRFS error (device sdb): parent transid verify failed"),
    ("file system error", Status.FAIL, "BTRFS critical (device sdb): corrupt leaf: root=1"),
    ("PCIe fatal", Status.FAIL, "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0"),
    ("PCIe fatal", Status.FAIL, "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link"),
    ("PCIe fatal", Status.FAIL, "pcieport 0000:00:01.0: AER: Uncorrectable (Fatal) error message received"),
    ("PCIe fatal", Status.FAIL, "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link"),
    ("Neuron SRAM error", Status.FAIL, "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=0 nc-id=1"),
    ("Neuron core error", Status.FAIL, "2026-01-01T00:00:00Z NEURON_HW_ERR=NC_UNCORRECTABLE_ERROR instance-id=i-0"),
    ("Neuron HBM error", Status.FAIL, "[ND 3] NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-0"),
    ("Neuron DMA error", Status.FAIL, "NEURON_HW_ERR=DMA_ERROR nd-id=2"),
    ("Neuron DMA error", Status.FAIL, "NEURON_HW_ERR=DMA_ABORT nd-id=2"),
    ("Neuron hang in collectives", Status.WARN, "NEURON_HW_ERR=HANG_ON_COLLECTIVES nd-id=2"),
    ("Neuron hardware error of an unknown kind", Status.FAIL, "NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR_2 nd-id=2"),
    ("Neuron hardware error of an unknown kind", Status.FAIL, "NEURON_HW_ERR="),
    ("Neuron device in an invalid state", Status.FAIL, "neuron:ncdev_open: nd5 is in an invalid state"),
    ("Neuron device that could not be reset", Status.FAIL, "neuron:nr_reset_thread_fn: nd5: reset request 1 failed"),
    (
        "Neuron device without an index",
        Status.FAIL,
        "neuron:neuron_pci_get_device_id_v2: Could not retrieve device index (read timeout)",
    ),
    *(
        ("GPU Xid", Status.FAIL, f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4711, name=python")
        for code in (46, 48, 62, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
    ),
    ("GPU Xid", Status.FAIL, "NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Fatal   XC0 i0 Link 11 (0x4)"),
    (
        "GPU Xid",
        Status.FAIL,
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed to 0x1 (GPU Reset Required)",
    ),
    ("GPU Xid remapping failed", Status.FAIL, "NVRM: Xid (PCI:0000:3b:00): 64, pid=1, Row Remapper failure"),
    ("GPU Xid reboot", Status.FAIL, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
    ("GPU Xid reboot", Status.FAIL, "NVRM: Xid (PCI:0000:3b:00): 154, changed to 0x2 (Node Reboot Required)"),
    ("GPU Xid power", Status.FAIL, "NVRM: Xid (PCI:0000:3b:00): 54, External power cables not connected"),
    *(
        ("GPU Xid support", Status.FAIL, f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4711, name=python")
        for code in (142, 171, 172)
    ),
    ("GPU that does not start", Status.FAIL, "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x65:1468)"),
    ("GPU that does not start", Status.FAIL, "NVRM: RmInitAdapter failed! (0x62:0x65:2028)"),
    (
        "GPU that needs a reset",
        Status.FAIL,
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062) returned",
    ),
    ("network card", Status.FAIL, f"{MLX5}: poll_health:798:(pid 0): device's health compromised - reached miss count"),
    ("network card", Status.FAIL, f"{MLX5}: poll_health:775:(pid 0): Fatal error 1 detected"),
    ("ENA without a sign of life", Status.WARN, f"{ENA} ens5: Keep alive watchdog timeout."),
    ("ENA reset", Status.WARN, f"{ENA}: Device reset completed successfully, Driver info: Elastic Network Adapter"),
    ("ENA reset", Status.WARN, f"{ENA}: Reset attempt failed. Can not reset the device"),
    ("GPU Xid memory", Status.WARN, "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked"),
    ("GPU Xid memory", Status.WARN, "NVRM: Xid (PCI:0000:3b:00): 92, High single-bit ECC error rate"),
    ("GPU Xid memory", Status.WARN, "NVRM: Xid (PCI:0000:3b:00): 94, pid=4711, Contained: SM (0x1)."),
    ("GPU Xid NVLink", Status.WARN, "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 11"),
]
ORDINARY = [
    "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ interrupt",
    "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 24007, Data {0x0000002b, 0x0000002b, 0x00000000, 0x0000002b}",
    "nvidia-nvswitch4: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "mce: CPU3: Core temperature/speed normal",
    "CPU3: Package temperature/speed normal",
    "EDAC MC: Ver: 3.0.0",
    "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0",
    "EDAC MC0: 0 CE memory read error",
    "infiniband rdmap0s6: Failed to process command DEREG_MR (opcode 8) comp_status 7 err -22",
    "neuron: npid_detach: process 4711 exited, NEURON_HW_ERR=NONE",
    "nd0: ndma_memcpy_wait_for_completion NEURON_HW_ERR=X completion timeout",
    "neuron:ndma_memcpy_wait_for_completion: DMA completion timeout for UDMA_ENG_33 q0",
    "neuron:mc_alloc: device mempool [0:0] total 1073741568 occupied 960539030 needed 1272 available 768",
    "Neuron Driver Started with Version:2.30.2.0-0123456789abcdef",
    "mc_alloc: device mempool NEURON_HW_ERR=X",
    "Memory cgroup out of memory: Killed process 4711 (python), oom-kill:x",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=pod,task=python",
    "blk_update_request: I/O error, dev loop3, sector 0",
    "Buffer I/O error on dev sr0, logical block 0; blk: I/O error, dev sr0, sector 0",
    "block nbd0: I/O error, dev nbd0, sector 8 op 0x0:(READ) flags 0x0",
    "I/O error, dev rbd3, sector 8",
    "critical target error, dev dm-3, sector 2048 op 0x0:(READ) flags 0x0",
    "critical target error, dev nvme1n1, sector 2048 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 2",
    "ACPI BIOS Error (bug): Could not resolve symbol [_SB.PCI0]",
    "traps: python[4711] general protection fault ip:7f sp:7f error:0 in libc.so",
    "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
    "pcieport 0000:00:01.0: AER: Uncorrected (Non-Fatal) error received: 0000:01:00.0",
    "NVRM: Xid (PCI:0000:3b:00): 13, pid=79, Graphics Exception: ESR 0x404600=0x80000002",
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, MMU fault: 79",
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    "EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode. Opts: errors=remount-ro",
    "systemd[1]: Started Daily apt upgrade.",
    "",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.172.08  Tue Jul  8 18:20:59 UTC 2025",
    "nvidia 0000:3b:00.0: enabling device (0140 -> 0142)",
    "NVRM: GPU at PCI:0000:3b:00: GPU-00000000-1111-2222-3333-444455556666",
    "NVRM: Xid (PCI:0000:3b:00): 141, pid=4711, name=python",
    f"{MLX5}: firmware version: 22.36.1010",
    f"{MLX5}: Port module event: module 0, Cable plugged",
    f"{MLX5}: poll_health:775:(pid 0): Fatal error 3 detected",
    f"{ENA}: Elastic Network Adapter (ENA) found at mem febf4000, mac addr 0a:58:a9:fe:ac:02",
    f"{ENA} ens5: Local page cache is disabled for less than 16 channels",
    "Lustre: Mounted fsx-client",
    f"Lustre: {LUSTRE}: Connection restored to 10.0.1.5@tcp (at 10.0.1.5@tcp)",
]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def gpus(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path / "gpus", count=2)


@pytest.mark.parametrize(("name", "status", "line"), FAULTS)
def test_line_of_a_fault_is_found_and_judged_with_what_to_do(
    name: str, status: Status, line: str, machine: Machine
) -> None:
    machine.write("/dev/kmsg", f"[  4999.000000] {line}\n")
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.reason) == (status, "KernelFault")
    assert finding.message.startswith(f"{name}: 1 line, the last: ")
    assert finding.action is not None


@every("line", ORDINARY)
def test_ordinary_and_benign_lines_are_no_fault(line: str) -> None:
    assert find_fault(line) is None


@every(
    ("line", "target", "action"),
    [
        ("NVRM: Xid (PCI:0000:63:00): 79, GPU has fallen off the bus.", "cuda:1", Action.REBOOT),
        ("NVRM: Xid (PCI:0000:63:00): 142, pid=1", "cuda:1", Action.INSPECT),
        ("NVRM: Xid (PCI:0000:53:00): 171, pid=1, DRAM", "cuda:0", Action.INSPECT),
        ("NVRM: Xid (0000:63:00): 48, pid=1", "cuda:1", Action.RESET_DEVICE),
        ("NVRM: GPU 0000:63:00.0: RmInitAdapter failed! (0x26:0x65:1468)", "cuda:1", Action.RESET_DEVICE),
        ("NVRM: GPU 0000:63:00.0: status NV_ERR_RESET_REQUIRED returned", "cuda:1", Action.RESET_DEVICE),
        ("NVRM: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)", "node", Action.RESET_DEVICE),
        ("nvidia 0000:63:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=x", "cuda:1", Action.REPLACE),
        (
            "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:63:00.0",
            "cuda:1",
            Action.REPLACE,
        ),
        ("pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0", "node", Action.REPLACE),
        ("NVRM: Xid (PCI:0000:aa:00): 79, GPU has fallen off the bus.", "pci:0000:aa:00.0", Action.REBOOT),
        (f"{MLX5}: poll_health:1: device's health compromised", "pci:0000:10:00.0", Action.INSPECT),
    ],
)
def test_line_with_a_bus_address_is_about_that_device(line: str, target: str, action: Action, gpus: GpuMachine) -> None:
    gpus.write("/dev/kmsg", f"[ 4999.0] {line}\n")
    (finding,) = gpus.findings(kernel_log)
    assert (finding.status, finding.target, finding.action) == (Status.FAIL, target, action)


def test_line_about_a_gpu_that_the_container_was_not_given_does_not_count(gpus: GpuMachine) -> None:
    machine = gpus
    machine.write("/.dockerenv", "")
    machine.write("/dev/nvidia0", "")
    machine.write("/dev/kmsg", "[ 4999.0] NVRM: Xid (PCI:0000:63:00): 79, GPU has fallen off the bus.\n")
    assert [finding.status for finding in machine.findings(kernel_log)] == [Status.PASS]
    machine.write("/dev/kmsg", "[ 4999.0] NVRM: Xid (PCI:0000:53:00): 79, GPU has fallen off the bus.\n")
    assert [finding.target for finding in machine.findings(kernel_log)] == ["cuda:0"]


@pytest.mark.parametrize("line", [f"{ENA} ens5: Keep alive watchdog timeout.", f"{ENA}: Device reset completed"])
def test_interface_that_is_reset_five_times_in_ten_minutes_is_a_fault(line: str, machine: Machine) -> None:
    def judged(*times: float) -> tuple[Status, str]:
        machine.write("/dev/kmsg", "".join(f"[ {seconds}] {line}\n" for seconds in times))
        (finding,) = machine.findings(kernel_log)
        return finding.status, finding.target

    machine.write("/proc/uptime", "5000.0 1.0\n")
    assert judged(4399.0, 4401.0, 4600.0, 4700.0, 4999.0) == (Status.WARN, "pci:0000:00:05.0")
    assert judged(4401.0, 4500.0, 4600.0, 4700.0, 4999.0) == (Status.FAIL, "pci:0000:00:05.0")
    assert judged(4399.0) == (Status.PASS, "node")


@pytest.mark.parametrize(
    "line",
    [
        f"Lustre: {LUSTRE}: Connection to fsx-OST0001 (at 10.0.1.5@tcp) was lost; {WAITS}",
        f"Lustre: {LUSTRE}: Connection to fsx-MDT0000 (at 10.0.1.5@tcp) was lost; {WAITS}",
        "LustreError: 166-1: MGC10.0.1.4@tcp: Connection to MGS (at 10.0.1.4@tcp) was lost; in progress operations",
        f"LustreError: 167-0: {LUSTRE}: This client was evicted by fsx-OST0001; in progress operations will fail.",
    ],
)
def test_lost_connection_to_a_storage_server_is_a_warning_that_accuses_no_node(line: str, machine: Machine) -> None:
    machine.write("/dev/kmsg", f"[ 4999.0] {line}\n")
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.reason, finding.target) == (Status.WARN, "StoreDisconnected", "node")
    assert blame_of(finding.reason) is Blame.PATH
    machine.write("/proc/uptime", "9000.0 1.0\n")
    assert worst_of(machine.findings(kernel_log))[0] is Status.PASS


# --- an operator's own patterns ---------------------------------------------------------------------------------------


FAN = "acme_bmc: fan 3 of tray 0000:63:00.0 stopped"


def own(**members: Any) -> dict[str, Any]:
    return {"patterns": {"fan": {"pattern": r"acme_bmc: fan (?P<fan>\d+) of tray (\S+) stopped", **members}}}


def judged_by(machine: Machine, *lines: str, **members: Any) -> list[tuple[Status, str | None, str]]:
    machine.write("/dev/kmsg", "".join(f"{line}\n" for line in lines))
    found = machine.findings(kernel_log, **own(**members))
    return [(item.status, item.reason, item.target) for item in found]


def test_line_of_ones_own_is_judged_by_its_status_reason_and_device(gpus: GpuMachine) -> None:
    machine = gpus
    assert judged_by(machine, f"[ 10.0] {FAN}") == [(Status.FAIL, "KernelFault", "cuda:1")]
    assert judged_by(machine, f"[ 10.0] {FAN}", status="warn", reason="Overheating") == [
        (Status.WARN, "Overheating", "cuda:1")
    ]
    assert judged_by(machine, f"[ 10.0] {FAN}", device_group=2)[0][2] == "cuda:1"
    assert judged_by(machine, f"[ 10.0] {FAN.replace('fan 3', 'fan 1')}", device_group="fan")[0][2] == "cuda:1"
    assert judged_by(machine, f"[ 10.0] {FAN}", device_group="fan")[0][2] == "3"
    assert judged_by(machine, f"[ 10.0] {FAN.replace('0000:63:00.0', '7')}")[0][2] == "node"
    assert judged_by(machine, f"[ 10.0] {FAN.replace('stopped', 'started')}") == [(Status.PASS, None, "node")]


def test_lines_of_ones_own_are_counted_within_their_time(machine: Machine) -> None:
    machine.write("/proc/uptime", "5000.0 1.0\n")
    lines = [f"[ {seconds}] acme_bmc: fan 3 of tray 7 stopped" for seconds in (4399.0, 4401.0, 4500.0)]
    passed, fault = [(Status.PASS, None, "node")], [(Status.FAIL, "KernelFault", "node")]
    assert judged_by(machine, *lines, count=3) == fault
    assert judged_by(machine, *lines[:2], count=3) == passed
    assert judged_by(machine, *lines, count=2, within="10m") == fault
    assert judged_by(machine, *lines, count=3, within="10m") == passed
    assert judged_by(machine, *lines, count=3, within=601) == fault


def test_line_of_ones_own_hides_no_known_fault_and_is_remembered_beside_it(machine: Machine) -> None:
    machine.write("/dev/kmsg", "[ 100.0] NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n" * 2)
    added = {"patterns": {"any": {"pattern": "Xid", "status": "warn", "count": 2}}}
    first = looked(machine, **added)
    machine.write("/dev/kmsg", CHATTER)
    second = looked(machine, first, **added)
    assert found(first) == found(second) == [(Status.FAIL, "pci:0000:3b:00.0"), (Status.WARN, "pci:0000:3b:00.0")]
    assert found(looked(machine, second, benign=["pid=1"], **added)) == [(Status.PASS, "node")]


@every(
    ("members", "key"),
    [
        ({"pattern": "fan ("}, "pattern"),
        ({"status": "bad"}, "status"),
        ({"reason": "NoSuchReason"}, "reason"),
        ({"count": 0}, "count"),
        ({"within": "soon"}, "within"),
        ({"within": 0}, "within"),
        ({"device_group": 3}, "device_group"),
        ({"device_group": 0}, "device_group"),
        ({"device_group": "tray"}, "device_group"),
        ({"patern": "x"}, "patern"),
    ],
)
def test_wrong_pattern_of_ones_own_is_refused_with_the_way_to_its_key(
    members: dict[str, Any], key: str, machine: Machine
) -> None:
    with pytest.raises(ParameterError) as caught:
        machine.findings(kernel_log, **own(**members))
    assert caught.value.path == ("patterns", "fan", key)
    assert key in str(caught.value)


def neuron_line(kind: str, device: str = "nd-id=4") -> str:
    return (
        f"[ 4990.0] NEURON_HW_ERR={kind} instance-id=i-0 hostname=ip-10-0-0-1 {device} nc-id=1 serial-num=1f action=X\n"
    )


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("SRAM_UNCORRECTABLE_ERROR", Action.REPLACE),
        ("NC_UNCORRECTABLE_ERROR", Action.REPLACE),
        ("HBM_UNCORRECTABLE_ERROR", Action.REPLACE),
        ("DMA_ERROR", Action.RESET_DEVICE),
        ("SOMETHING_NEW", Action.INSPECT),
    ],
)
def test_hardware_error_of_a_neuron_device_names_the_device_and_the_documented_advice(
    kind: str, action: Action, machine: Machine
) -> None:
    machine.write("/dev/kmsg", neuron_line(kind))
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.target, finding.action, finding.blame) == (Status.FAIL, "neuron:4", action, None)


def test_hang_in_collectives_accuses_no_node_and_passes_after_an_hour(machine: Machine) -> None:
    """Its cause may be another node of the job, and every node of it writes the line."""
    machine.write("/dev/kmsg", neuron_line("HANG_ON_COLLECTIVES"))
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.blame, finding.target) == (Status.WARN, Blame.PATH, "neuron:4")
    machine.write("/proc/uptime", "9000.0 1.0\n")
    assert worst_of(machine.findings(kernel_log))[0] is Status.PASS


def test_each_device_is_told_by_itself_and_a_line_without_a_device_accuses_the_node(machine: Machine) -> None:
    kind = "HBM_UNCORRECTABLE_ERROR"
    lines = [neuron_line(kind, f"nd-id={number}") for number in (3, 11, 3)] + [neuron_line(kind, "")]
    machine.write("/dev/kmsg", "".join(lines))
    findings = machine.findings(kernel_log)
    assert {finding.target: finding.measurements[0].value for finding in findings} == {
        "neuron:3": 2.0,
        "neuron:11": 1.0,
        "node": 1.0,
    }


@pytest.mark.parametrize("device", ["nd-id=", "nd-id=x", "nd-id=123456", "send-id=3", "nd-id=-1"])
def test_device_number_that_is_none_leaves_the_fault_with_the_node(device: str, machine: Machine) -> None:
    machine.write("/dev/kmsg", neuron_line("DMA_ERROR", device))
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.target) == (Status.FAIL, "node")


def test_every_pattern_and_every_benign_line_is_tripped_by_a_line_of_these_tests() -> None:
    """Rival fault 5: a pattern that nothing trips is dead."""
    found = {id(find_fault(line)) for _, _, line in FAULTS}
    found.add(id(find_fault(f"Lustre: {LUSTRE}: Connection to fsx-MDT0000 (at 10.0.1.5@tcp) was lost; {WAITS}")))
    assert [pattern for pattern in PATTERNS if id(pattern) not in found] == []
    assert [benign for benign in BENIGN if not any(re.search(benign, line) for line in ORDINARY)] == []


def test_line_is_still_a_fault_at_the_second_look(machine: Machine) -> None:
    """Rival fault 4."""
    machine.write("/dev/kmsg", "[  100.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n")
    assert machine.findings(kernel_log) == machine.findings(kernel_log)
    assert worst_of(machine.findings(kernel_log))[0] is Status.FAIL


@pytest.mark.parametrize(("uptime", "status"), [(3700.0, Status.WARN), (3701.0, Status.PASS)])
def test_what_passes_by_itself_counts_for_an_hour(uptime: float, status: Status, machine: Machine) -> None:
    """Rival fault 24: old events do not add up."""
    machine.write("/dev/kmsg", "[  100.0] Out of memory: Killed process 1 (a)\n")
    machine.write("/proc/uptime", f"{uptime} 1.0\n")
    assert worst_of(machine.findings(kernel_log))[0] is status


@pytest.mark.parametrize("line", ["EXT4-fs error (device sda1): x", "EDAC MC0: 1 UE memory read error"])
def test_damage_counts_until_the_next_boot(line: str, machine: Machine) -> None:
    machine.write("/dev/kmsg", f"[  100.0] {line}\n")
    machine.write("/proc/uptime", "99999999.0 1.0\n")
    assert worst_of(machine.findings(kernel_log))[0] is Status.FAIL


DISK = "I/O error, dev nvme2n1, sector 12345 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 2"
FILE_SYSTEMS = (
    "EXT4-fs error (device nvme2n1): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0",
    "EXT4-fs (nvme2n1): Remounting filesystem read-only",
    "XFS (nvme2n1): Filesystem has been shut down due to log error (0x2).",
    "BTRFS error (device nvme2n1 state EA): bdev /dev/nvme2n1 errs: wr 1",
)
THERE, GONE, UNSEEN = ("nvme0n1", "nvme2n1"), ("nvme0n1",), ()
PASSING = (Status.WARN, Action.INSPECT)  # of a volume that was taken away while it was in use


@pytest.mark.parametrize(
    ("line", "disks", "judged"),
    [
        (DISK, THERE, (Status.FAIL, Action.REPLACE)),
        (DISK, GONE, PASSING),
        (DISK, UNSEEN, (Status.FAIL, Action.REPLACE)),
        *((line, THERE, (Status.FAIL, Action.INSPECT)) for line in FILE_SYSTEMS),
        *((line, GONE, PASSING) for line in FILE_SYSTEMS),
        *((line, UNSEEN, (Status.FAIL, Action.INSPECT)) for line in FILE_SYSTEMS),
    ],
)
def test_errors_of_a_disk_that_is_gone_are_a_warning_that_passes(
    line: str, disks: tuple[str, ...], judged: tuple[Status, Action], machine: Machine
) -> None:
    machine.write("/dev/kmsg", f"[ 4999.0] {line}\n")
    for disk in disks:
        machine.write(f"/sys/class/block/{disk}/size", "8\n")
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.action) == judged
    machine.write("/proc/uptime", "9000.0 1.0\n")
    assert worst_of(machine.findings(kernel_log))[0] is (Status.PASS if judged[0] is Status.WARN else Status.FAIL)


def looked(
    machine: Machine, earlier: list[Finding | Evidence] | None = None, **others: Any
) -> list[Finding | Evidence]:
    """A look, after another one of this boot."""
    evidence = tuple(item for item in earlier or () if isinstance(item, Evidence))
    boot_id = others.pop("boot_id", machine.host.boot_id())
    previous = Previous(evidence=evidence, elapsed_seconds=30.0, boot_id=boot_id) if evidence else None
    return machine.run(kernel_log, previous=previous, **others)


def found(items: list[Finding | Evidence]) -> list[tuple[Status, str]]:
    return [(item.status, item.target) for item in items if isinstance(item, Finding)]


CHATTER = "[ 4999.0] systemd[1]: Started Daily apt upgrade.\n"
DAMAGE = neuron_line("HBM_UNCORRECTABLE_ERROR") + "[ 100.0] NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n" * 3


def test_damage_counts_until_the_next_boot_also_when_the_log_has_forgotten_it(machine: Machine) -> None:
    machine.write("/dev/kmsg", DAMAGE + "[ 4998.0] Out of memory: Killed process 1 (a)\n")
    first = looked(machine)
    machine.write("/dev/kmsg", CHATTER)
    second = looked(machine, first)
    third = looked(machine, second)
    assert found(second) == found(third) == [(Status.FAIL, "neuron:4"), (Status.FAIL, "pci:0000:3b:00.0")]
    text = " ".join(item.message for item in third if isinstance(item, Finding))
    assert "GPU Xid: 3 lines, the last: NVRM: Xid (PCI:0000:3b:00): 48, pid=1 (the log does not go back" in text
    assert "Out of memory" not in text
    assert found(looked(machine, second, boot_id="another boot")) == [(Status.PASS, "node")]


def test_damage_that_was_seen_stays_while_the_log_cannot_be_read(machine: Machine) -> None:
    machine.write("/dev/kmsg", DAMAGE)
    first = looked(machine, inventory=GPUS)
    machine.remove("/dev/kmsg")
    assert found(looked(machine, first, inventory=GPUS)) == [
        (Status.UNKNOWN, "node"),
        (Status.FAIL, "neuron:4"),
        (Status.FAIL, "pci:0000:3b:00.0"),
    ]


def test_operator_may_call_damage_benign_that_the_log_has_forgotten(machine: Machine) -> None:
    machine.write("/dev/kmsg", "[ 4999.0] BUG: our own module says hello\n")
    first = looked(machine)
    machine.write("/dev/kmsg", CHATTER)
    assert found(looked(machine, first)) == [(Status.FAIL, "node")]
    assert found(looked(machine, first, benign=["says hello"])) == [(Status.PASS, "node")]


def test_errors_of_a_disk_are_forgotten_when_it_was_taken_away(machine: Machine) -> None:
    machine.write("/dev/kmsg", f"[ 4999.0] {DISK}\n")
    machine.write("/sys/class/block/nvme2n1/size", "8\n")
    first = looked(machine)
    assert found(first) == [(Status.FAIL, "node")]
    machine.write("/dev/kmsg", CHATTER)
    machine.remove("/sys/class/block/nvme2n1")
    machine.write("/sys/class/block/nvme0n1/size", "8\n")
    assert found(looked(machine, first)) == [(Status.PASS, "node")]


def test_what_is_remembered_fits_into_one_line_of_the_protocol(machine: Machine) -> None:
    lines = (neuron_line("DMA_ERROR", f"nd-id={number} {chr(34) * 900}é") for number in range(64))
    machine.write("/dev/kmsg", "".join(lines))
    (evidence,) = [item for item in looked(machine) if isinstance(item, Evidence)]
    encode({"kind": "evidence", "id": 1, "evidence": from_evidence(evidence)})
    assert len(evidence.data["faults"]) == 24


@given(
    st.lists(
        st.none()
        | st.integers()
        | st.dictionaries(st.sampled_from(["line", "count"]), st.text() | st.integers() | st.none())
    )
    | st.text()
    | st.none()
)
def test_whatever_was_remembered_the_check_goes_on(faults: Any) -> None:
    evidence = Evidence(target="node", key="kernel_log", data={"faults": faults})
    previous = Previous(evidence=(evidence,), elapsed_seconds=1.0, boot_id="b")
    for fault in recall_faults(previous, "b", Rules(), Sight()):
        assert fault.pattern.window_seconds is None


def test_line_without_a_time_may_be_of_now(machine: Machine) -> None:
    machine.write("/dev/kmsg", "Out of memory: Killed process 1 (a)\n")
    assert worst_of(machine.findings(kernel_log))[0] is Status.WARN


def test_lines_of_one_kind_are_one_finding_with_their_number_and_the_worst_kind_comes_first(machine: Machine) -> None:
    machine.write(
        "/dev/kmsg",
        "6,1,4990000000,-;EDAC MC0: 1 CE memory read error\n"
        "[ 4991.0] EDAC MC0: 1 UE first\n[ 4992.0] EDAC MC0: 1 UE second\n",
    )
    findings = machine.findings(kernel_log)
    assert [finding.status for finding in findings] == [Status.FAIL, Status.WARN]
    assert "2 lines, the last: EDAC MC0: 1 UE second" in findings[0].message
    assert number(findings[:1], "kernel_log_faults_count").value == 2.0


def test_operator_may_call_a_line_benign(machine: Machine) -> None:
    machine.write("/dev/kmsg", "[ 4999.0] BUG: our own module says hello\n")
    assert worst_of(machine.findings(kernel_log))[0] is Status.FAIL
    assert worst_of(machine.findings(kernel_log, benign=["says hello"]))[0] is Status.PASS


@pytest.mark.parametrize(
    ("others", "status"),
    [
        ({}, Status.WARN),
        ({"required": True}, Status.UNKNOWN),
        ({"inventory": GPUS}, Status.UNKNOWN),
        ({"inventory": GPUS, "required": False}, Status.WARN),
    ],
)
def test_log_that_is_missing_or_empty_is_never_a_pass(others: Any, status: Status, machine: Machine) -> None:
    machine.write("/dev/kmsg", "")
    assert worst_of(machine.findings(kernel_log, **others)) == (status, "NoData")
    machine.remove("/dev/kmsg")
    assert worst_of(machine.findings(kernel_log, **others)) == (status, "NoData")


def test_frozen_log_never_blocks(machine: Machine) -> None:
    machine.remove("/dev/kmsg")
    os.mkfifo(machine.root / "dev/kmsg")
    writer = os.open(machine.root / "dev/kmsg", os.O_RDWR)
    try:
        start = time.monotonic()
        assert worst_of(machine.findings(kernel_log))[0] is Status.WARN
        assert time.monotonic() - start < 5 * PATIENCE
    finally:
        os.close(writer)


@given(
    st.text(max_size=100) | st.sampled_from([line for _, _, line in FAULTS]).map(lambda line: line[: len(line) // 2])
)
def test_any_text_is_judged_without_a_crash_and_the_same_twice(text: str) -> None:
    assert find_fault(text) == find_fault(text)


@given(
    st.text(alphabet=st.characters(exclude_characters="\n\r"), max_size=40),
    st.text(max_size=40),
    st.sampled_from(["[ND 3] ", "", " "]),
)
def test_neuron_error_in_any_surroundings_is_found_and_its_target_is_a_device_or_the_node(
    kind: str, rest: str, head: str
) -> None:
    text = f"{head}NEURON_HW_ERR={kind} {rest}"
    pattern = find_fault(text)
    benign = any(re.search(line, text) for line in BENIGN)
    assert (pattern is None) is benign
    if pattern is not None:
        target = Sight().target(pattern, text)
        assert target == "node" or target.removeprefix("neuron:").isdecimal()
