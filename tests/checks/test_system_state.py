"""Mounts, clock, name, processes and devices: each reason is tripped, and its neighbour is not (rival fault 5)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Evidence, Previous, Status
from checks.system.clock import TIME_SERVICES, clock
from checks.system.devices import device_count, device_holders
from checks.system.host_name import host_name
from checks.system.mounts import mounts, parse_mountinfo
from checks.system.processes import parse_stat, processes
from tests.hosts.machine import Machine, number, worst_of

PASSES = (Status.PASS, None)
GPUS = {"accelerator": "cuda"}
BOOT = "5b0d2f0e-7f3c-4a55-9a43-0d6f1f6f2a10"
MOUNTS = "/proc/self/mountinfo"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


# --- mounts -----------------------------------------------------------------------------------------------------------


def test_disk_that_the_kernel_turned_read_only_fails_by_name(machine: Machine) -> None:
    machine.change(MOUNTS, "xfs /dev/nvme1n1 rw", "xfs /dev/nvme1n1 ro")
    (finding,) = machine.findings(mounts)
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "ReadOnlyMount", "path:/data")
    assert "/etc/fstab" in finding.message
    assert worst_of(machine.findings(mounts, read_only=["/data"])) == PASSES


def test_disk_that_is_read_only_by_design_passes(machine: Machine) -> None:
    machine.change(MOUNTS, "xfs /dev/nvme1n1 rw", "xfs /dev/nvme1n1 ro")
    machine.change("/etc/fstab", "xfs defaults", "xfs ro,noatime")
    assert worst_of(machine.findings(mounts)) == PASSES
    machine.remove("/etc/fstab")
    assert worst_of(machine.findings(mounts)) == PASSES


def test_read_only_view_of_a_writable_disk_passes(machine: Machine) -> None:
    """What every pod has: a bind mount of a configuration."""
    machine.change(MOUNTS, "/ /data rw,", "/ /data ro,")
    assert worst_of(machine.findings(mounts)) == PASSES


@pytest.mark.parametrize(("errors", "status"), [("3\n", Status.FAIL), ("0\n", Status.PASS), ("x\n", Status.PASS)])
def test_read_only_disk_on_which_errors_were_counted_fails(errors: str, status: Status, machine: Machine) -> None:
    machine.remove("/etc/fstab")
    machine.change(MOUNTS, "ext4 /dev/nvme0n1p1 rw", "ext4 /dev/nvme0n1p1 ro")
    machine.write("/sys/fs/ext4/nvme0n1p1/errors_count", errors)
    assert worst_of(machine.findings(mounts, writable=[]))[0] is status


@pytest.mark.parametrize(("path", "status"), [("/data/x", Status.FAIL), ("/database", Status.PASS)])
def test_path_that_must_be_writable_is_judged_by_the_mount_it_is_on(
    path: str, status: Status, machine: Machine
) -> None:
    (machine.root / "database").mkdir()
    machine.change(MOUNTS, "/ /data rw,", "/ /data ro,")
    assert worst_of(machine.findings(mounts, writable=[path]))[0] is status


@pytest.mark.parametrize(
    ("options", "status"),
    [("defaults", Status.FAIL), ("defaults,nofail", Status.FAIL), ("noauto", Status.PASS)],
)
def test_directory_beneath_a_missing_mount_is_not_taken_for_it(options: str, status: Status, machine: Machine) -> None:
    (machine.root / "data/x").mkdir(parents=True)
    machine.change(MOUNTS, "/ /data rw", "/ /elsewhere rw")
    machine.change("/etc/fstab", "/data xfs defaults", f"/data xfs {options}")
    findings = machine.findings(mounts, writable=["/tmp", "/data/x/"])
    assert worst_of(findings)[0] is status
    if status is Status.FAIL:
        (finding,) = findings
        assert (finding.reason, finding.target) == ("StoreNotMounted", "path:/data")
        assert "nothing is mounted there" in finding.message
    assert worst_of(machine.findings(mounts)) == PASSES, "nobody has said that it must be writable"


@pytest.mark.parametrize(
    ("uptime", "expected"),
    [("599.9 1.0\n", (Status.UNKNOWN, "NoData")), ("600.0 1.0\n", (Status.FAIL, "StoreNotMounted"))],
)
def test_mount_that_may_still_come_after_boot_is_not_yet_missed(
    uptime: str, expected: tuple[Status, str], machine: Machine
) -> None:
    machine.change(MOUNTS, "/ /data rw", "/ /elsewhere rw")
    machine.write("/proc/uptime", uptime)
    assert worst_of(machine.findings(mounts, writable=["/data/x"])) == expected


def test_mount_point_that_fstab_writes_with_blanks_is_found(machine: Machine) -> None:
    machine.write("/etc/fstab", "/dev/sdb /a\\040b/ ext4 defaults 0 2\n")
    (machine.root / "a b").mkdir()
    assert worst_of(machine.findings(mounts, writable=["/a b"]))[1] == "StoreNotMounted"
    machine.change(MOUNTS, "/ /data rw", "/ /a\\040b rw")
    assert worst_of(machine.findings(mounts, writable=["/a b"])) == PASSES


def test_path_that_may_not_be_looked_at_is_not_said_to_be_gone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, **_others: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refuse)
        findings = machine.findings(mounts, writable=["/closed/x"])
    assert worst_of(findings) == PASSES


def test_server_of_a_network_file_system_is_not_asked_for_a_path(machine: Machine) -> None:
    text = machine.host.read(MOUNTS)
    machine.write(MOUNTS, f"{text}40 27 0:50 / /far rw - nfs4 server:/far rw\n")
    assert worst_of(machine.findings(mounts, writable=["/far/x"])) == PASSES


def test_path_that_is_not_there_is_not_known_to_be_writable(machine: Machine) -> None:
    findings = machine.findings(mounts, writable=["/tmp", "/nowhere"])
    assert worst_of(findings) == (Status.UNKNOWN, "NoData")
    assert "/nowhere does not exist" in findings[0].message
    (machine.root / "file").touch()
    assert worst_of(machine.findings(mounts, writable=["/file/x"])) == (Status.UNKNOWN, "NoData")
    (machine.root / "tmp").rename(machine.root / "gone")
    assert worst_of(machine.findings(mounts)) == PASSES, "nobody has asked for the default one"


def test_later_mount_on_a_point_hides_the_earlier_and_blanks_are_unescaped() -> None:
    (found,) = parse_mountinfo("1 0 8:1 / /a\\040b ro - ext4 /dev/sda rw\n")
    assert (found.point, found.read_only, found.super_read_only) == ("/a b", True, False)
    assert parse_mountinfo("1 0 8:1 / /a rw ext4 /dev/sda rw\n") == []


# --- clock ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(1.0, PASSES), (-1.0, PASSES), (1.001, (Status.FAIL, "ClockOffset")), (-1.001, (Status.FAIL, "ClockOffset"))],
)
def test_clock_off_by_more_than_a_second_fails_in_both_directions(
    offset: float, expected: object, machine: Machine
) -> None:
    machine.say("clock", offset_seconds=offset)
    assert worst_of(machine.findings(clock)) == expected


def test_offset_that_is_no_number_is_never_a_pass(machine: Machine) -> None:
    machine.say("clock", offset_seconds=float("nan"))
    assert worst_of(machine.findings(clock))[0] is Status.FAIL


def test_unsynchronized_clock_warns_where_a_time_service_runs(machine: Machine) -> None:
    machine.say("clock", synchronized=False)
    assert worst_of(machine.findings(clock)) == (Status.WARN, "ClockUnsynchronized")
    machine.remove("/proc/300")
    assert worst_of(machine.findings(clock)) == (Status.SKIP, "NotApplicable")
    assert worst_of(machine.findings(clock, required=True)) == (Status.WARN, "ClockUnsynchronized")
    assert worst_of(machine.findings(clock, inventory=GPUS)) == (Status.WARN, "ClockUnsynchronized")


def test_names_of_time_services_are_as_long_as_the_kernel_shows_them() -> None:
    assert all(len(name) <= 15 for name in TIME_SERVICES)


# --- name -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inventory", "status"), [(GPUS, Status.FAIL), ({}, Status.WARN)])
@pytest.mark.parametrize("hosts", ["127.0.0.1 localhost\n", "10.0.0.99 node-1\n", "nonsense node-1\n"])
def test_name_that_leads_nowhere_or_elsewhere_is_a_fault(
    hosts: str, inventory: Any, status: Status, machine: Machine
) -> None:
    machine.write("/etc/hosts", hosts)
    assert worst_of(machine.findings(host_name, inventory=inventory)) == (status, "NameResolution")


def test_loopback_is_enough_unless_other_nodes_must_reach_it(machine: Machine) -> None:
    machine.write("/etc/hosts", "127.0.1.1 node-1\n")
    machine.remove("/proc/net")
    assert worst_of(machine.findings(host_name)) == PASSES
    findings = machine.findings(host_name, allow_loopback=False, inventory=GPUS)
    assert worst_of(findings) == (Status.FAIL, "NameResolution")


def test_address_of_version_six_is_known_in_any_spelling(machine: Machine) -> None:
    machine.write("/etc/hosts", "fe80:0:0:0:0:0:0:5 node-1\n")
    assert number(machine.findings(host_name), "host_name_addresses_count").value == 1.0


# --- processes --------------------------------------------------------------------------------------------------------


def look(machine: Machine, before: Evidence | None = None, seconds: float = 60.0, boot: str = BOOT) -> Any:
    """Findings and evidence of one look, some time after another."""
    previous = None if before is None else Previous(evidence=(before,), elapsed_seconds=seconds, boot_id=boot)
    items = machine.run(processes, previous=previous)
    (evidence,) = [item for item in items if isinstance(item, Evidence)]
    return worst_of([item for item in items if not isinstance(item, Evidence)]), evidence


def test_process_that_has_not_run_between_two_looks_is_stuck(machine: Machine) -> None:
    """Rival fault 4: and it is so at the third look."""
    machine.process(400, "nccl_proxy", "D")
    first, before = look(machine)
    assert first == PASSES
    second, after = look(machine, before)
    assert second == (Status.FAIL, "StuckProcesses")
    assert look(machine, after)[0] == (Status.FAIL, "StuckProcesses")


@pytest.mark.parametrize(("seconds", "expected"), [(49.9, PASSES), (50.0, (Status.FAIL, "StuckProcesses"))])
def test_two_looks_must_be_far_enough_apart(seconds: float, expected: object, machine: Machine) -> None:
    machine.process(400, "dd", "D")
    _, before = look(machine)
    assert look(machine, before, seconds)[0] == expected


def test_looks_that_come_too_soon_one_after_the_other_add_up(machine: Machine) -> None:
    machine.process(400, "dd", "D")
    _, before = look(machine)
    verdict, between = look(machine, before, 30.0)
    assert verdict == PASSES
    assert look(machine, between, 30.0)[0] == (Status.FAIL, "StuckProcesses")


def test_process_that_moved_or_was_replaced_or_belongs_to_an_earlier_boot_is_not_stuck(machine: Machine) -> None:
    machine.process(400, "dd", "D", switches=5)
    _, before = look(machine)
    assert look(machine, before, boot="another")[0] == PASSES
    machine.process(400, "dd", "D", switches=6)
    assert look(machine, before)[0] == PASSES
    machine.remove("/proc/400")
    machine.process(401, "dd", "D")
    assert look(machine, before)[0] == PASSES


@pytest.mark.parametrize("others", [{"parent": 2}, {"wchan": "__refrigerator"}])
def test_kernel_threads_and_frozen_containers_are_not_stuck(others: Any, machine: Machine) -> None:
    machine.process(400, "jbd2", "D", **others)
    assert look(machine, look(machine)[1])[0] == PASSES


@pytest.mark.parametrize(("count", "expected"), [(100, PASSES), (101, (Status.WARN, "StuckProcesses"))])
def test_more_than_a_hundred_zombies_warn(count: int, expected: object, machine: Machine) -> None:
    for pid in range(1000, 1000 + count):
        machine.process(pid, "sh", "Z")
    assert look(machine)[0] == expected


def test_machine_that_shows_no_process_is_unknown(machine: Machine) -> None:
    for pid in (1, 2, 300, 301):
        machine.remove(f"/proc/{pid}")
    assert look(machine)[0] == (Status.UNKNOWN, "NoData")


def test_name_of_a_process_may_hold_brackets_and_blanks() -> None:
    found = parse_stat("12 (a (b) D 9) S 1 " + "0 " * 18)
    assert found is not None
    assert (found.name, found.state, found.parent) == ("a (b) D 9", "S", "1")


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2, PASSES), (3, PASSES), (1, (Status.FAIL, "MissingDevice")), (None, (Status.UNKNOWN, "NoData"))],
)
def test_fewer_devices_than_expected_fail_and_silence_is_unknown(
    count: object, expected: object, machine: Machine
) -> None:
    assert worst_of(machine.findings(device_count, inventory={"device_count": count})) == expected


def test_nothing_to_compare_with_is_unknown_and_the_operator_may_say_it(machine: Machine) -> None:
    """Rival fault 6."""
    inventory = {"expected_device_count": None}
    assert worst_of(machine.findings(device_count, inventory=inventory)) == (Status.UNKNOWN, "UnknownInstanceType")
    findings = machine.findings(device_count, inventory=inventory, expected=2)
    assert worst_of(findings) == PASSES
    assert number(findings, "device_count").origin == "config"
    assert worst_of(machine.findings(device_count, expected=3)) == (Status.FAIL, "MissingDevice")


def test_holder_is_a_fact_and_not_seeing_any_is_unknown(machine: Machine) -> None:
    holders = [f"cpu:0: pid {pid} (trainer)" for pid in range(10)]
    findings = machine.findings(device_holders, inventory={"holders": holders})
    assert worst_of(findings) == PASSES
    assert "and 2 more" in findings[0].message
    assert number(findings, "device_holders_count").value == 10.0
    assert worst_of(machine.findings(device_holders, inventory={"holders": None})) == (Status.UNKNOWN, "NoData")
