"""Memory, disks, shared memory, load and limits: each threshold trips, and its neighbour does not (rival fault 5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checks.contract import Limit, Status
from checks.host.machine import HostError
from checks.system.disk import disk_space
from checks.system.load import load, parse_cpu_list
from checks.system.memory import memory_free
from checks.system.process_limits import process_limits
from checks.system.shared_memory import shared_memory
from tests.every import every
from tests.hosts.machine import Machine, number, worst_of

PASSES = (Status.PASS, None)
ROOM = {"size_bytes": 10**12, "available_bytes": 10**11, "inodes": 10**6, "available_inodes": 10**5}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kilobytes", "expected"), [(819200, PASSES), (819199, (Status.FAIL, "LowMemory"))])
def test_memory_below_five_percent_fails(kilobytes: int, expected: object, machine: Machine) -> None:
    machine.change("/proc/meminfo", "12288000", str(kilobytes))
    findings = machine.findings(memory_free)
    assert worst_of(findings) == expected
    assert number(findings, "memory_available_ratio").origin == "default"


@pytest.mark.parametrize("holders", [["cpu:0: pid 5 (trainer)"], None])
def test_low_memory_is_only_a_warning_while_a_job_has_or_may_have_the_devices(
    holders: object, machine: Machine
) -> None:
    machine.change("/proc/meminfo", "12288000", "1000")
    assert worst_of(machine.findings(memory_free, inventory={"holders": holders})) == (Status.WARN, "LowMemory")


@pytest.mark.parametrize(("free", "expected"), [(1024000, PASSES), (1023999, (Status.WARN, "LowMemory"))])
def test_swap_used_by_more_than_half_warns(free: int, expected: object, machine: Machine) -> None:
    machine.change("/proc/meminfo", "SwapFree:        2048000", f"SwapFree: {free}")
    assert worst_of(machine.findings(memory_free)) == expected


def test_machine_without_swap_passes_and_one_that_does_not_tell_is_unknown(machine: Machine) -> None:
    machine.change("/proc/meminfo", "2048000", "0")
    assert worst_of(machine.findings(memory_free)) == PASSES
    machine.change("/proc/meminfo", "SwapTotal", "Other")
    assert worst_of(machine.findings(memory_free)) == (Status.UNKNOWN, "NoData")


@pytest.mark.parametrize("missing", ["MemTotal", "MemAvailable"])
def test_memory_that_is_not_told_is_unknown(missing: str, machine: Machine) -> None:
    machine.change("/proc/meminfo", missing, "Other")
    assert worst_of(machine.findings(memory_free)) == (Status.UNKNOWN, "NoData")


def test_limit_of_the_operator_beats_the_parameter_and_shows_its_origin(machine: Machine) -> None:
    limits = {"memory_available_ratio": Limit(lower=0.8, upper=None, origin="baseline")}
    findings = machine.findings(memory_free, limits=limits, min_available_ratio=0.1)
    assert worst_of(findings) == (Status.FAIL, "LowMemory")
    assert number(findings, "memory_available_ratio").origin == "baseline"
    assert number(machine.findings(memory_free, min_available_ratio=0.1), "memory_available_ratio").origin == "config"


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "expected"), [(2_000_000_000, PASSES), (1_999_999_999, (Status.FAIL, "DiskFull"))]
)
def test_disk_below_two_percent_is_full(available: int, expected: object, machine: Machine) -> None:
    machine.say("file_systems:/var", available_bytes=available)
    assert worst_of(machine.findings(disk_space)) == expected


@pytest.mark.parametrize(("available", "expected"), [(1_000_000_000, PASSES), (999_999_999, (Status.FAIL, "DiskFull"))])
def test_small_disk_needs_a_gigabyte(available: int, expected: object, machine: Machine) -> None:
    machine.say("file_systems:/tmp", size_bytes=2_000_000_000, available_bytes=available)
    assert worst_of(machine.findings(disk_space)) == expected


@pytest.mark.parametrize(
    ("available", "params", "expected"),
    [
        (256_000_000, {}, PASSES),
        (255_999_999, {}, (Status.FAIL, "DiskFull")),
        (500_000_000, {"min_available_bytes": 600_000_000}, (Status.FAIL, "DiskFull")),  # somebody wants just this
    ],
)
def test_disk_smaller_than_the_default_floor_needs_half_of_itself(
    available: int, params: Any, expected: object, machine: Machine
) -> None:
    machine.say("file_systems:/tmp", size_bytes=512_000_000, available_bytes=available)
    assert worst_of(machine.findings(disk_space, **params)) == expected


@pytest.mark.parametrize(("inodes", "expected"), [(20_000, PASSES), (19_999, (Status.FAIL, "DiskFull"))])
def test_disk_without_inodes_is_full_and_names_the_path(inodes: int, expected: object, machine: Machine) -> None:
    machine.say("file_systems:/tmp", available_inodes=inodes)
    findings = machine.findings(disk_space)
    assert worst_of(findings) == expected
    if expected != PASSES:
        (bad,) = [finding for finding in findings if finding.status is Status.FAIL]
        assert bad.target == "path:/tmp"
        assert "/tmp: inodes" in bad.message


def test_file_system_that_counts_no_inodes_is_judged_by_its_bytes(machine: Machine) -> None:
    machine.say("file_systems:/tmp", inodes=0, available_inodes=0)
    assert worst_of(machine.findings(disk_space)) == PASSES


def test_file_system_that_tells_no_size_is_not_known_to_have_room(machine: Machine) -> None:
    machine.say("file_systems:/var", size_bytes=0, available_bytes=0, inodes=0, available_inodes=0)
    assert worst_of(machine.findings(disk_space)) == (Status.UNKNOWN, "NoData")


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_memory_without_a_limit_of_its_own_is_judged_by_memory_free(kind: str, machine: Machine) -> None:
    mounts = machine.host.read("/proc/self/mountinfo")
    machine.write("/proc/self/mountinfo", f"{mounts}31 27 0:30 / /tmp rw - {kind} none rw\n")
    machine.say("file_systems:/tmp", size_bytes=0, available_bytes=0, inodes=0, available_inodes=0)
    findings = machine.findings(disk_space)
    assert worst_of(findings) == PASSES
    assert [item.status for item in findings if item.target == "path:/tmp"] == [Status.SKIP]


def test_room_beneath_a_missing_mount_is_not_taken_for_its_own(machine: Machine) -> None:
    (machine.root / "data").mkdir()
    machine.say("file_systems", **{"/data": {**ROOM, "read_only": False}})
    assert worst_of(machine.findings(disk_space, paths=["/", "/data"])) == PASSES
    machine.change("/proc/self/mountinfo", "/ /data rw", "/ /elsewhere rw")
    findings = machine.findings(disk_space, paths=["/", "/data"])
    assert worst_of(findings) == (Status.UNKNOWN, "NoData")
    (unknown,) = [item for item in findings if item.status is Status.UNKNOWN]
    assert unknown.target == "path:/data"
    assert "nothing is mounted" in unknown.message


def test_no_path_to_look_at_is_unknown(machine: Machine) -> None:
    for paths in ((), ("/nowhere",), ("/", "/nowhere")):
        assert worst_of(machine.findings(disk_space, paths=paths))[0] is Status.UNKNOWN


def test_file_system_that_says_nothing_is_an_error_with_a_reason(machine: Machine) -> None:
    machine.unsay("file_systems", "/tmp")
    with pytest.raises(HostError, match="/tmp") as caught:
        machine.findings(disk_space)
    assert caught.value.reason == "NoData"


# --- shared memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"), [(256_000_000, PASSES), (255_999_999, (Status.WARN, "SharedMemorySmall"))]
)
def test_shared_memory_of_a_container_engine_is_small(size: int, expected: object, machine: Machine) -> None:
    machine.say("file_systems:/dev/shm", size_bytes=size, available_bytes=size)
    assert worst_of(machine.findings(shared_memory)) == expected


@pytest.mark.parametrize(
    ("available", "expected"), [(200_000_000, PASSES), (199_999_999, (Status.WARN, "SharedMemorySmall"))]
)
def test_shared_memory_that_is_full_warns(available: int, expected: object, machine: Machine) -> None:
    machine.say("file_systems:/dev/shm", available_bytes=available)
    assert worst_of(machine.findings(shared_memory)) == expected


def test_shared_memory_without_a_limit_of_its_own_is_neither_small_nor_full(machine: Machine) -> None:
    machine.say("file_systems:/dev/shm", size_bytes=0, available_bytes=0)
    (finding,) = machine.findings(shared_memory)
    assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")
    machine.change("/proc/self/mountinfo", "- tmpfs tmpfs", "- fuse.shm shm")
    assert worst_of(machine.findings(shared_memory)) == (Status.UNKNOWN, "NoData")


def test_missing_shared_memory_fails_with_a_remedy(machine: Machine) -> None:
    machine.unsay("file_systems", "/dev/shm")
    (finding,) = machine.findings(shared_memory)
    assert (finding.status, finding.reason) == (Status.FAIL, "SharedMemorySmall")
    assert "mount a tmpfs" in finding.message


# --- load -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("average", "expected"), [("16.00", PASSES), ("16.01", (Status.WARN, "LoadByOthers"))])
def test_load_above_four_on_each_core_warns(average: str, expected: object, machine: Machine) -> None:
    machine.write("/proc/loadavg", f"99 99 {average} 1/80 11206\n")
    assert worst_of(machine.findings(load)) == expected


def test_load_of_a_job_is_its_own_affair(machine: Machine) -> None:
    machine.write("/proc/loadavg", "99 99 99 1/80 11206\n")
    inventory = {"holders": ["cpu:0: pid 5 (trainer)"]}
    assert worst_of(machine.findings(load, inventory=inventory)) == (Status.SKIP, "NotApplicable")


def test_cores_are_counted_from_cpuinfo_where_sysfs_is_not_there(machine: Machine) -> None:
    machine.remove("/sys")
    assert number(machine.findings(load), "load_per_core_ratio").value == pytest.approx(0.03)
    machine.write("/proc/cpuinfo", "")
    assert worst_of(machine.findings(load)) == (Status.UNKNOWN, "NoData")


@every(("text", "count"), [("0-3\n", 4), ("0", 1), ("0-1,4,6-7", 5), ("3-0", 0), ("x", 0), ("0-", 1)])
def test_list_of_processors_is_counted(text: str, count: int) -> None:
    assert parse_cpu_list(text) == count


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "expected"), [(1024, PASSES), (1023, (Status.FAIL, "LimitTooLow"))])
def test_too_few_open_files_fail(files: int, expected: object, machine: Machine) -> None:
    machine.say("limits", nofile=files)
    assert worst_of(machine.findings(process_limits)) == expected


@pytest.mark.parametrize(
    ("locked", "expected"), [(None, PASSES), (1e9, PASSES), (1e9 - 1, (Status.FAIL, "LimitTooLow"))]
)
def test_locked_memory_is_judged_where_it_is_asked_for(locked: object, expected: object, machine: Machine) -> None:
    machine.say("limits", memlock=locked)
    assert worst_of(machine.findings(process_limits, min_memlock_bytes=1e9)) == expected
    assert worst_of(machine.findings(process_limits)) == PASSES
