"""Counters of Neuron devices that are missing or nonsense, and neuron-monitor in their place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators.neuron.sysfs import NEWER, REQUIRED
from checks.contract import Status
from checks.system.neuron.neuron_counters import Watch, judge_watch
from tests.checks.neuron_looks import SYSFS, Looks, inventory, look
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import worst_of

PASSES = (Status.PASS, None)
DARK = (Status.UNKNOWN, "NoData")


@pytest.fixture
def machine(tmp_path: Path) -> NeuronMachine:
    """One device, two cores."""
    return NeuronMachine(tmp_path / "machine", "trn1.2xlarge")


# --- what is missing or nonsense --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage", [b"", b"-1\n", b"nonsense", b"\xff\xfe", b"1 2", b"0x10", b"9" * 30, b"1.5", b"nan"]
)
@pytest.mark.parametrize(
    "leaf", ["stats/hardware/mem_ecc_uncorrected", "neuron_core1/stats/status/hw_nc_ue_error/total"]
)
def test_counter_that_is_no_count_is_unknown(leaf: str, garbage: bytes, machine: NeuronMachine) -> None:
    machine.write(f"{SYSFS}/neuron0/{leaf}", garbage)
    (finding,) = look(machine)
    assert (finding.status, finding.reason, finding.target) == (*DARK, "neuron:0")
    assert leaf.removesuffix("/total").rpartition("/")[2] in finding.message


@pytest.mark.parametrize("name", REQUIRED)
def test_ecc_counter_that_no_place_has_never_passes(name: str, machine: NeuronMachine) -> None:
    machine.remove(f"{SYSFS}/neuron0/stats/hardware/{name}")
    assert worst_of(look(machine, monitor=False)) == DARK


@pytest.mark.parametrize("name", NEWER)
def test_counter_that_only_newer_drivers_have_may_be_missing(name: str, machine: NeuronMachine) -> None:
    machine.remove(f"{SYSFS}/neuron0/stats/hardware/{name}")
    assert worst_of(look(machine)) == PASSES


def test_cores_without_execution_counters_are_unknown(machine: NeuronMachine) -> None:
    for core in (0, 1):
        machine.remove(f"{SYSFS}/neuron0/neuron_core{core}/stats/status")
    assert worst_of(look(machine)) == DARK


def test_one_core_that_lacks_a_counter_is_unknown_and_named(machine: NeuronMachine) -> None:
    machine.remove(f"{SYSFS}/neuron0/neuron_core1/stats/status/hw_dma_abort_error")
    (finding,) = look(machine)
    assert (finding.status, finding.reason) == DARK
    assert "hw_dma_abort_error of core 1" in finding.message


def test_damage_of_one_core_is_found_although_another_cannot_be_read(machine: NeuronMachine) -> None:
    machine.fault("exec_errors", "neuroncore:0", "hw_nc_ue_error=1")
    machine.write(f"{SYSFS}/neuron0/neuron_core1/stats/status/hw_nc_ue_error/total", "nonsense")
    assert {finding.status for finding in look(machine)} == {Status.FAIL, Status.UNKNOWN}


def test_device_that_differs_from_the_others_is_walked_by_itself(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    machine.remove(f"{SYSFS}/neuron5/neuron_core1/stats/status/hw_error")
    machine.fault("ecc", "neuron:9")
    found = {(f.target, f.status) for f in look(machine, inventory=inventory(*range(16)))}
    assert found == {("neuron:5", Status.UNKNOWN), ("neuron:9", Status.FAIL)}


def test_device_that_sysfs_does_not_show_is_unknown(machine: NeuronMachine) -> None:
    findings = look(machine, inventory=inventory(0, 1), monitor=False)
    assert [(finding.status, finding.reason, finding.target) for finding in findings] == [(*DARK, "neuron:1")]


def test_container_judges_its_own_devices_alone(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge")
    machine.fault("ecc", "neuron:9")
    assert worst_of(look(machine, inventory=inventory(4, 5))) == PASSES
    assert worst_of(look(machine, inventory=inventory()))[0] is Status.FAIL  # who knows none judges all


def test_class_directory_serves_where_the_other_is_not_there(machine: NeuronMachine) -> None:
    machine.fault("ecc", "neuron:0")
    old, new = (machine.root / path for path in ("sys/devices/virtual/neuron_device", "sys/class/neuron_device"))
    shutil.rmtree(new)
    old.rename(new)
    assert worst_of(look(machine)) == (Status.FAIL, "EccErrors")


@pytest.mark.parametrize("others", [{"inventory": inventory()}, {}])
def test_machine_without_a_driver_is_unknown_never_healthy(others: Any, machine: NeuronMachine) -> None:
    machine.fault("no_driver")
    assert worst_of(look(machine, **others))[0] is Status.UNKNOWN
    assert worst_of(look(machine, monitor=False, **others)) == DARK


# --- neuron-monitor as the other source -------------------------------------------------------------------------------


@pytest.fixture
def bare(machine: NeuronMachine) -> NeuronMachine:
    """A driver whose ECC counters are not in sysfs."""
    machine.remove(f"{SYSFS}/neuron0/stats/hardware")
    return machine


def test_monitor_serves_where_sysfs_has_no_counters_and_a_zero_of_a_moment_is_no_pass(bare: NeuronMachine) -> None:
    (finding,) = look(bare)
    assert (finding.status, finding.reason) == (Status.WARN, "NoData")
    assert "neuron-monitor" in finding.message


def test_error_that_the_monitor_saw_once_stays(bare: NeuronMachine) -> None:
    bare.fault("ecc", "neuron:0", "sram_ecc_uncorrected=2")
    looks = Looks(bare)
    assert worst_of(looks.look()) == (Status.FAIL, "EccErrors")
    bare.fault("ecc_reset")
    assert worst_of(looks.look()) == (Status.FAIL, "EccErrors")


def test_monitor_is_not_started_again_within_a_minute(bare: NeuronMachine) -> None:
    looks = Looks(bare)
    looks.look()
    bare.fault("no_tools", "neuron-monitor")
    assert worst_of(looks.look(5.0))[0] is Status.WARN
    assert worst_of(looks.look(40.0))[0] is Status.WARN
    assert worst_of(looks.look(40.0)) == (Status.UNKNOWN, "MissingTool")


@pytest.mark.parametrize(
    ("kind", "target", "reason"),
    [
        ("hang", "neuron-monitor", "Timeout"),
        ("half_json", "neuron-monitor", "NoData"),
        ("null_members", "neuron-monitor", "NoData"),
        ("no_tools", "neuron-monitor", "MissingTool"),
    ],
)
def test_monitor_that_tells_nothing_leaves_it_unknown(kind: str, target: str, reason: str, bare: NeuronMachine) -> None:
    bare.fault(kind, target)
    timeout = 0.5 if kind == "hang" else 15.0
    assert worst_of(look(bare, monitor_timeout_seconds=timeout)) == (Status.UNKNOWN, reason)


def test_healthy_tree_never_starts_the_monitor(machine: NeuronMachine) -> None:
    machine.write("/bin/neuron-monitor", f"#!/bin/sh\ntouch {machine.root}/started\n")
    (machine.root / "bin/neuron-monitor").chmod(0o755)
    look(machine)
    assert not (machine.root / "started").exists()


def test_executions_that_failed_while_the_monitor_watched_fail() -> None:
    watch = Watch(0.0, 1.0, {"neuron:0": dict.fromkeys(REQUIRED, 0)}, 2, None, ())
    found = list(judge_watch(watch, {"neuron:0": REQUIRED}, None))
    assert (Status.FAIL, "HardwareErrors") in [(finding.status, finding.reason) for finding in found]
