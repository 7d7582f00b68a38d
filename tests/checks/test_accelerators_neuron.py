"""Neuron devices: found by stand-in tools and trees of documented shape, seen held, and never guessed at."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import DeviceMissingError, detect, neuron
from checks.accelerators.neuron import ls as neuron_ls
from checks.accelerators.neuron.ls import LNC_VARIABLE
from checks.worker.protocol import MAX_LINE_BYTES, encode
from tests.fakes.neuron import NeuronMachine
from tests.patience import PATIENCE


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(LNC_VARIABLE, raising=False)
    return tmp_path / "machine"


@pytest.fixture
def trn1(root: Path) -> NeuronMachine:
    return NeuronMachine(root, "trn1.32xlarge")


def find(machine: NeuronMachine, **options: Any) -> dict[str, Any]:
    """The inventory as it comes through the worker's line."""
    found: dict[str, Any] = json.loads(json.dumps(neuron.find(machine.host, options)))
    return found


def holders(machine: NeuronMachine, **options: Any) -> list[str] | None:
    return neuron.holders(machine.host, find(machine), options)


# --- found ------------------------------------------------------------------------------------------------------------


# Each type, and each age of tools and drivers on each chip; the trees that are whole have thousands of files.
@pytest.mark.parametrize(
    ("name", "lnc", "tools", "driver", "devices", "cores", "gib", "nics"),
    [
        ("trn1.2xlarge", None, "new", "2.30.2.0", 1, 2, 32, 0),
        ("trn1.32xlarge", None, "old", "2.24.7.0", 16, 32, 512, 8),
        ("trn1.32xlarge", None, "new", "2.31.7.0", 16, 32, 512, 8),
        ("trn2.48xlarge", None, "new", "2.31.7.0", 16, 64, 1536, 16),
        ("trn2.48xlarge", 1, "old", "2.24.7.0", 16, 128, 1536, 16),
        ("inf2.48xlarge", None, "old", "2.24.7.0", 12, 24, 384, 0),
        ("inf2.48xlarge", None, "new", "2.31.7.0", 12, 24, 384, 0),
    ],
)
def test_counts_are_right_with_old_and_new_tools_and_drivers(
    name: str, lnc: int | None, tools: str, driver: str, devices: int, cores: int, gib: int, nics: int, root: Path
) -> None:
    found = find(NeuronMachine(root, name, tools=tools, driver=driver, lnc=lnc, whole=driver == "2.31.7.0"))
    assert (found["device_count"], found["core_count"], found["efa_count"]) == (devices, cores, nics)
    assert found["memory_bytes"] == gib * 2**30
    assert found["workers"] == [f"neuroncore:{number}" for number in range(cores)]
    assert (found["source"], found["tool_error"], found["ranks"]) == ("neuron-ls", None, "fresh")
    assert found["lnc"] == lnc or (2 if name.startswith("trn2") else 1)
    assert all(device["serial"] and device["kind"] != "Neuron device" for device in found["devices"])
    assert len({device["serial"] for device in found["devices"]}) == devices
    assert all(len(device["bdf"]) == 12 for device in found["devices"])


def test_neuron_is_detected_before_anything_else_and_not_where_the_driver_is_gone(trn1: NeuronMachine) -> None:
    assert detect(trn1.host) is sys.modules["checks.accelerators.neuron"]
    trn1.fault("no_driver")
    assert not neuron.present(trn1.host)
    assert detect(trn1.host) is sys.modules["checks.accelerators.cpu"]


@pytest.mark.parametrize("kept", ["/sys/module/neuron", "/dev/neuron3", "/sys/class/neuron_device/neuron0/core_count"])
def test_any_sign_of_the_driver_shows_that_neuron_is_meant(kept: str, trn1: NeuronMachine) -> None:
    trn1.fault("no_driver")
    trn1.write(kept if kept != "/sys/module/neuron" else "/sys/module/neuron/version", "2\n")
    assert neuron.present(trn1.host)


def test_machine_without_driver_has_no_devices_and_says_what_the_tool_said(trn1: NeuronMachine) -> None:
    trn1.fault("no_driver")
    found = find(trn1)
    assert (found["device_count"], found["workers"]) == (0, [])
    assert "aws-neuronx-dkms" in found["tool_error"][1]
    assert holders(trn1) == []


def test_driver_whose_tree_is_not_found_and_tool_that_fails_are_unknown_never_zero(trn1: NeuronMachine) -> None:
    trn1.fault("no_tools")
    trn1.remove("/sys/devices/virtual/neuron_device")
    trn1.remove("/sys/class/neuron_device")
    found = find(trn1)
    assert (found["device_count"], found["core_count"], found["memory_bytes"]) == (None, None, None)
    assert found["sysfs_indices"] is None
    assert holders(trn1) is None  # what is not known may be in use


@pytest.mark.parametrize("fault", ["no_tools", "half_json"])
@pytest.mark.parametrize(("name", "cores"), [("trn1.32xlarge", 32), ("trn2.48xlarge", 64)])
def test_sysfs_stands_in_for_the_tool_without_making_memory_or_owners_up(
    name: str, cores: int, fault: str, root: Path
) -> None:
    machine = NeuronMachine(root, name)
    machine.fault(fault)
    found = find(machine)
    assert (found["source"], found["device_count"], found["core_count"]) == ("sysfs", 16, cores)
    assert (found["memory_bytes"], found["core_holders"]) == (None, None)
    assert found["tool_error"][0] == ("MissingTool" if fault == "no_tools" else "NoData")
    assert set(found["devices"][0]["connected_to"]) == {1, 3, 4, 12}
    assert len(found["workers"]) == cores


def test_tool_that_hangs_is_killed_in_time_and_sysfs_serves(trn1: NeuronMachine, monkeypatch: Any) -> None:
    monkeypatch.setattr(neuron_ls, "TIMEOUT_SECONDS", 0.3)
    trn1.fault("hang", "neuron-ls")
    begin = time.monotonic()
    found = find(trn1)
    assert time.monotonic() - begin < 5 * PATIENCE
    assert found["tool_error"][0] == "Timeout"
    assert (found["source"], found["device_count"]) == ("sysfs", 16)


def script(machine: NeuronMachine, body: str) -> None:
    """Another neuron-ls, in the words of a shell; the documented one is beside it."""
    tool = machine.root / "bin/neuron-ls"
    tool.rename(machine.root / "bin/documented")
    tool.write_text(f"#!/bin/sh\ncd {machine.root}\n{body}\n")
    tool.chmod(0o755)


def test_tool_that_fails_at_once_is_asked_once_more(trn1: NeuronMachine) -> None:
    script(trn1, 'echo x >> calls; if [ $(wc -l < calls) = 1 ]; then exit 1; fi; exec bin/documented "$@"')
    assert find(trn1)["tool_error"] is None
    assert (trn1.root / "calls").read_text() == "x\nx\n"
    (trn1.root / "bin/documented").unlink()
    assert find(trn1)["tool_error"][0] == "NoData"
    assert (trn1.root / "calls").read_text() == "x\n" * 4  # and then no more


def test_tool_is_asked_by_one_process_at_a_time(trn1: NeuronMachine, monkeypatch: Any) -> None:
    monkeypatch.setattr(neuron_ls, "WAIT_SECONDS", 0.1)
    descriptor = os.open(trn1.root / "bin/neuron-ls", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        error = find(trn1)["tool_error"]
    finally:
        os.close(descriptor)
    assert error[0] == "Timeout"
    assert "another neuron-ls" in error[1]
    assert find(trn1)["tool_error"] is None


def test_what_a_tool_leaves_behind_ends_with_it_and_gives_the_lock_back(trn1: NeuronMachine, monkeypatch: Any) -> None:
    """Here a process that left its group, and would keep the lock of neuron-ls for as long as it lives."""
    monkeypatch.setattr(neuron_ls, "WAIT_SECONDS", 0.1)
    leave = "setsid sh -c 'touch out; sleep 8' >/dev/null 2>&1 & while [ ! -e out ]; do sleep 0.02; done"
    script(trn1, f"rm -f out\n{leave}\nexit 1")
    assert neuron_ls.query(trn1.host)[1] is not None
    _, error = neuron_ls.query(trn1.host)
    assert error is not None
    assert error.reason == "NoData"


# --- shares and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [True, False])
def test_share_of_a_container_starts_at_any_number(tool: bool, root: Path) -> None:
    machine = NeuronMachine(root, "trn1.32xlarge", share=[4, 5, 6, 7])
    whole = find(NeuronMachine(root.with_name("whole"), "trn1.32xlarge"))
    if not tool:
        machine.fault("no_tools")
    found = find(machine)
    assert [device["target"] for device in found["devices"]] == [f"neuron:{n}" for n in (4, 5, 6, 7)]
    assert found["core_count"] == 8
    assert [d["serial"] for d in found["devices"]] == [d["serial"] for d in whole["devices"][4:8]]
    assert found["workers"] == [f"neuroncore:{n}" for n in (range(8, 16) if tool else range(8))]
    assert found["sysfs_indices"] == list(range(16))


def test_share_with_numbers_of_its_own_gets_the_serial_numbers_of_its_devices_by_their_neighbours(root: Path) -> None:
    machine = NeuronMachine(root, "trn1.32xlarge", share=[4, 5, 6, 7])
    whole = find(NeuronMachine(root.with_name("whole"), "trn1.32xlarge"))
    for device in machine.state["devices"]:
        device["neuron_device"] -= 4  # neuron-ls alone: sysfs still has the host's numbers
    machine.save()
    found = find(machine)
    assert [device["target"] for device in found["devices"]] == ["neuron:0", "neuron:1", "neuron:2", "neuron:3"]
    assert [d["serial"] for d in found["devices"]] == [d["serial"] for d in whole["devices"][4:8]]
    assert [device["host_index"] for device in found["devices"]] == [4, 5, 6, 7]
    assert {device["kind"] for device in found["devices"]} == {"Trainium1"}


@pytest.mark.parametrize(("said", "expected"), [("1", 128), ("2", 64), ("", 64), ("many", 64)])
def test_configuration_of_jobs_decides_how_many_cores_are_logical_ones(
    said: str, expected: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = NeuronMachine(root, "trn2.48xlarge", lnc=2)
    monkeypatch.setenv(LNC_VARIABLE, said)
    found = find(machine)
    assert (found["core_count"], len(found["workers"]), len(set(found["workers"]))) == (expected,) * 3
    assert found["devices"][15]["core_ids"][-1] == expected - 1
    assert find(machine, neuron_lnc=2)["core_count"] == 64  # an option beats the variable
    assert find(machine, neuron_lnc=1)["core_count"] == 128


@pytest.mark.parametrize("value", [0, 3, "2", True, 1.5])
def test_configuration_that_makes_no_sense_is_one_clear_line(value: object, trn1: NeuronMachine) -> None:
    with pytest.raises(ValueError, match="neuron_lnc must be 1 or 2"):
        find(trn1, neuron_lnc=value)


def test_configuration_that_the_chip_has_not_changes_nothing(trn1: NeuronMachine) -> None:
    assert (find(trn1, neuron_lnc=2)["core_count"], find(trn1, neuron_lnc=2)["lnc"]) == (32, 1)


@pytest.mark.parametrize("members", ["nc_count", "neuroncore_ids", "memory_size", "bdf", "numa_node,connected_to"])
def test_null_members_are_none_or_told_by_sysfs(members: str, trn1: NeuronMachine) -> None:
    trn1.fault("null_members", value=members)
    found = find(trn1)
    assert (found["device_count"], found["tool_error"]) == (16, None)
    assert (found["core_count"] is None) == (members == "nc_count")
    assert (found["memory_bytes"] is None) == (members == "memory_size")
    assert (found["devices"][0]["bdf"] is None) == (members == "bdf")
    assert set(found["devices"][0]["connected_to"]) == {1, 3, 4, 12}
    if members == "nc_count":
        assert found["workers"] == []


def test_inventory_of_the_largest_machine_with_a_process_on_each_core_fits_a_line(root: Path) -> None:
    machine = NeuronMachine(root, "trn2.48xlarge", lnc=1)
    for pid in range(4_000_000, 4_000_128):
        machine.fault("busy", "all", str(pid))
    found = find(machine)
    held = neuron.holders(machine.host, found, {})
    assert held is not None
    assert held[-1] == "1889 more"
    assert len(encode({"kind": "surveyed", "inventory": found, "holders": held})) < MAX_LINE_BYTES


# --- held -------------------------------------------------------------------------------------------------------------


def test_process_on_the_cores_holds_the_device_once(trn1: NeuronMachine) -> None:
    assert holders(trn1) == []
    trn1.fault("busy", "neuron:3", "900")
    assert holders(trn1) == ["neuron:3: pid 900 (python3)"]
    assert find(trn1)["core_holders"] == [
        {
            "pid": 900,
            "command": "python3",  # its arguments may hold secrets
            "alive": True,
            "cores": None,
            "devices": [3],
            "runtime_version": "2.34.10.0",
        }
    ]


def test_process_that_only_the_tool_sees_holds_as_well_as_one_that_only_proc_shows(trn1: NeuronMachine) -> None:
    trn1.fault("busy", "neuron:3", "900")
    trn1.remove("/proc/900/fd")
    assert holders(trn1) == ["neuron:3: pid 900 (python3)"]
    trn1.fault("busy", "neuron:5", "901")
    trn1.fault("no_tools")
    assert holders(trn1) == ["neuron:5: pid 901 (python3)"]


@pytest.mark.parametrize("version", ["", "NA", "n/a"])
def test_programs_that_only_look_hold_nothing(version: str, trn1: NeuronMachine) -> None:
    trn1.fault("busy", "all", "900")
    trn1.write("/proc/900/comm", "neuron-monitor\n")
    trn1.state["processes"][0].update(command="neuron-monitor -c x", neuron_runtime_version=version)
    trn1.save()
    assert holders(trn1) == []
    assert find(trn1)["core_holders"] == []
    trn1.write("/proc/900/comm", "python3\n")
    assert len(holders(trn1) or ()) == 16  # who has a device open may be about to use it


def test_job_by_the_name_of_an_onlooker_holds_by_its_runtime(trn1: NeuronMachine) -> None:
    trn1.fault("busy", "neuron:1", "900")
    trn1.write("/proc/900/comm", "neuron-monitor\n")
    assert holders(trn1) == ["neuron:1: pid 900 (neuron-monitor)"]


def test_our_own_probes_and_their_children_do_not_count(trn1: NeuronMachine) -> None:
    trn1.fault("busy", "neuron:0", "910")
    trn1.fault("busy", "neuron:1", "911")
    trn1.change("/proc/911/stat", "S 1 ", "S 910 ")
    assert holders(trn1, ignore_pids=[910]) == []
    assert len(holders(trn1) or ()) == 2


def test_owner_without_a_process_is_no_holder_and_its_cores_get_no_worker(trn1: NeuronMachine) -> None:
    trn1.fault("stuck_core", "neuron:3", "900")
    found = find(trn1)
    assert [owner["alive"] for owner in found["core_holders"]] == [False]
    assert holders(trn1) == []
    assert {"neuroncore:6", "neuroncore:7"}.isdisjoint(found["workers"])
    assert len(found["workers"]) == 30


def test_owner_that_ended_while_the_tool_ran_is_not_called_stuck(trn1: NeuronMachine) -> None:
    """Two listings: in the second the driver has forgotten it."""
    trn1.fault("stuck_core", "neuron:3", "900")
    after = json.dumps({**trn1.state, "processes": []})
    (trn1.root / "after.json").write_text(after)
    script(trn1, 'bin/documented "$@"; cp after.json standin.json')
    found = find(trn1)
    assert found["core_holders"] == []
    assert len(found["workers"]) == 32


@pytest.mark.parametrize("fault", ["exit 1", "echo nonsense", "exec sleep 600"])
def test_owner_is_not_called_stuck_where_the_tool_does_not_say_it_twice(
    fault: str, trn1: NeuronMachine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(neuron_ls, "TIMEOUT_SECONDS", 1.0)
    trn1.fault("stuck_core", "neuron:3", "900")
    script(trn1, f'if [ -e once ]; then {fault}; exit; fi; touch once; exec bin/documented "$@"')
    found = find(trn1)
    assert [owner["alive"] for owner in found["core_holders"]] == [None]
    assert neuron.holders(trn1.host, found, {}) == ["neuron:3: pid 900 (python3)"]  # in doubt it is in use


def test_owner_is_not_called_stuck_from_inside_a_container(trn1: NeuronMachine) -> None:
    trn1.fault("stuck_core", "neuron:3", "900")
    trn1.remove("/proc/self/ns/pid")
    trn1.write("/proc/self/ns/pid", "pid:[4026532512]\n")
    found = find(trn1)
    assert [owner["alive"] for owner in found["core_holders"]] == [None]
    assert neuron.holders(trn1.host, found, {}) == ["neuron:3: pid 900 (python3)"]


def test_devices_are_not_seen_to_be_free_from_inside_a_container_outside_of_a_job(trn1: NeuronMachine) -> None:
    trn1.remove("/proc/self/ns/pid")
    trn1.write("/proc/self/ns/pid", "pid:[4026532512]\n")
    assert holders(trn1) is None
    assert holders(trn1, in_job=True) == []
    # An onlooker that is seen does not make it better.
    trn1.fault("busy", "all", "900")
    trn1.write("/proc/900/comm", "neuron-monitor\n")
    trn1.state["processes"] = []
    trn1.save()
    assert holders(trn1) is None


def test_core_that_is_not_in_the_inventory_is_missing(trn1: NeuronMachine) -> None:
    with pytest.raises(DeviceMissingError, match="no such core: neuroncore:99; this node has neuroncore:0, "):
        neuron.bind("neuroncore:99", find(trn1), {})
