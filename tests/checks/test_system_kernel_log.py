"""The kernel log: every kind of fault has a line that trips it, and benign lines win."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Status
from checks.system.fault_lines import BENIGN, PATTERNS, find_fault
from checks.system.kernel_log import kernel_log
from tests.hosts.machine import Machine, number, worst_of

GPUS = {"accelerator": "cuda"}
FAULTS = [
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
    ("Neuron hardware error", Status.FAIL, "[ND 3] NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-0"),
    *(
        ("GPU Xid", Status.FAIL, f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4711, name=python")
        for code in (48, 63, 64, 74, 79, 94, 95, 119, 120)
    ),
]
ORDINARY = [
    "mce: CPU3: Core temperature/speed normal",
    "CPU3: Package temperature/speed normal",
    "EDAC MC: Ver: 3.0.0",
    "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0",
    "EDAC MC0: 0 CE memory read error",
    "infiniband rdmap0s6: Failed to process command DEREG_MR (opcode 8) comp_status 7 err -22",
    "neuron: npid_detach: process 4711 exited, NEURON_HW_ERR=NONE",
    "nd0: ndma_memcpy_wait_for_completion NEURON_HW_ERR=X completion timeout",
    "mc_alloc: device mempool NEURON_HW_ERR=X",
    "Memory cgroup out of memory: Killed process 4711 (python), oom-kill:x",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=pod,task=python",
    "blk_update_request: I/O error, dev loop3, sector 0",
    "Buffer I/O error on dev sr0, logical block 0; blk: I/O error, dev sr0, sector 0",
    "ACPI BIOS Error (bug): Could not resolve symbol [_SB.PCI0]",
    "traps: python[4711] general protection fault ip:7f sp:7f error:0 in libc.so",
    "pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0",
    "pcieport 0000:00:01.0: AER: Uncorrected (Non-Fatal) error received: 0000:01:00.0",
    "NVRM: Xid (PCI:0000:3b:00): 13, pid=79, Graphics Exception: ESR 0x404600=0x80000002",
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, MMU fault: 79",
    "EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode. Opts: errors=remount-ro",
    "systemd[1]: Started Daily apt upgrade.",
    "",
]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.mark.parametrize(("name", "status", "line"), FAULTS)
def test_line_of_a_fault_is_found_and_judged_with_what_to_do(
    name: str, status: Status, line: str, machine: Machine
) -> None:
    machine.write("/dev/kmsg", f"[  4999.000000] {line}\n")
    (finding,) = machine.findings(kernel_log)
    assert (finding.status, finding.reason) == (status, "KernelFault")
    assert finding.message.startswith(f"{name}: 1 line, the last: ")
    assert finding.action is not None


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_and_benign_lines_are_no_fault(line: str) -> None:
    assert find_fault(line) is None


def test_every_pattern_and_every_benign_line_is_tripped_by_a_line_of_these_tests() -> None:
    """Rival fault 5: a pattern that nothing trips is dead."""
    found = {id(find_fault(line)) for _, _, line in FAULTS}
    assert [pattern for pattern in PATTERNS if id(pattern) not in found] == []
    import re

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
        assert time.monotonic() - start < 2
    finally:
        os.close(writer)


@given(
    st.text(max_size=100) | st.sampled_from([line for _, _, line in FAULTS]).map(lambda line: line[: len(line) // 2])
)
def test_any_text_is_judged_without_a_crash_and_the_same_twice(text: str) -> None:
    assert find_fault(text) == find_fault(text)
