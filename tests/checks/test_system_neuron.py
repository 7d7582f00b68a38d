"""Passive checks of Neuron devices: healthy stand-ins pass with right counts; a fault is one finding in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import detect, neuron
from checks.accelerators.neuron.ls import LNC_VARIABLE
from checks.contract import Action, Finding, Status
from checks.host.machine import Host
from checks.reasons import action_of, blame_of
from checks.system.device_permissions import device_permissions
from checks.system.devices import device_count, device_holders
from checks.system.instance import instance_type
from checks.system.neuron.neuron_cores import neuron_cores
from checks.system.neuron.neuron_scope import numbers
from checks.system.neuron.neuron_topology import neuron_topology
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import number, worst_of

CHECKS = (device_count, device_holders, device_permissions, instance_type, neuron_cores, neuron_topology)
OURS = tuple(check.name for check in CHECKS)
Row = tuple[str, str, "str | None", str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(LNC_VARIABLE, raising=False)
    return tmp_path / "machine"


@pytest.fixture
def trn1(root: Path) -> NeuronMachine:
    return NeuronMachine(root, "trn1.32xlarge")


def look(machine: NeuronMachine) -> dict[str, Any]:
    """What the survey of a round shows to its checks, without what belongs to the plain machine."""
    accelerator = detect(machine.host)
    found = accelerator.find(machine.host, {})
    found = {**found, "holders": accelerator.holders(machine.host, found, {})}
    return {"expected_device_count": None, **found}


def findings(machine: NeuronMachine, inventory: dict[str, Any] | None = None) -> list[tuple[str, Finding]]:
    seen = look(machine) if inventory is None else inventory
    return [(check.name, finding) for check in CHECKS for finding in machine.findings(check, inventory=seen)]


def rows(found: Sequence[tuple[str, Finding]]) -> list[Row]:
    """What is not in order: check, status, reason, target."""
    bad = [(name, item) for name, item in found if item.status not in (Status.PASS, Status.SKIP)]
    assert all("\n" not in item.message for _, item in bad)
    return [(name, item.status.value, item.reason, item.target) for name, item in bad]


# --- healthy ----------------------------------------------------------------------------------------------------------

TYPES = [
    ("trn1.2xlarge", None, 2),
    ("trn1.32xlarge", None, 32),
    ("trn1n.32xlarge", None, 32),
    ("trn2.3xlarge", None, 4),
    ("trn2.48xlarge", None, 64),
    ("trn2.48xlarge", 1, 128),
    ("trn2u.48xlarge", None, 64),
    ("trn3.48xlarge", None, 64),
    ("inf2.xlarge", None, 2),
    ("inf2.24xlarge", None, 12),
    ("inf2.48xlarge", None, 24),
]


@pytest.mark.parametrize(("name", "lnc", "cores"), TYPES)
def test_whole_machine_of_each_type_passes_with_numbers(name: str, lnc: int | None, cores: int, root: Path) -> None:
    found = findings(NeuronMachine(root, name, lnc=lnc))
    assert rows(found) == []
    assert {check for check, item in found if item.status is Status.PASS} >= set(OURS) - {"neuron_topology"}
    measured = number([item for _, item in found], "neuron_cores_count")
    assert (measured.value, measured.lower, measured.origin) == (cores, cores, "catalogue")


@pytest.mark.parametrize(("tools", "driver"), [("old", "2.24.7.0"), ("new", "2.31.7.0")])
def test_tools_and_drivers_of_other_versions_pass_as_well(tools: str, driver: str, root: Path) -> None:
    assert rows(findings(NeuronMachine(root, "trn2.48xlarge", tools=tools, driver=driver))) == []


def test_plain_machine_is_not_concerned_and_a_survey_that_failed_is_unknown(trn1: NeuronMachine) -> None:
    for check in (neuron_cores, neuron_topology, device_permissions):
        (skipped,) = trn1.findings(check, inventory={"accelerator": "cpu"})
        assert (skipped.status, skipped.reason) == (Status.SKIP, "NotApplicable")
        (lost,) = trn1.findings(check, inventory={"accelerator": None, "devices": []})
        assert (lost.status, lost.reason) == (Status.UNKNOWN, "NoData")


# --- faults -----------------------------------------------------------------------------------------------------------

GONE = ("fail", "MissingDevice")
FEWER = ("device_count", *GONE, "node")
NO_LINKS = ("neuron_topology", "unknown", "NoData", "node")
DEAD = ("neuron_cores", "fail", "StuckCores", "neuron:3")
UNSEEN = ("neuron_cores", "unknown", "NoData", "node")
FAULTS: list[tuple[str, str, str | None, str | None, list[Row]]] = [
    ("trn1.32xlarge", "missing_device", "neuron:7", None, [FEWER, ("device_count", *GONE, "neuron:7"), NO_LINKS]),
    ("trn1.32xlarge", "missing_device", "neuron:0", None, [FEWER, ("device_count", *GONE, "neuron:0"), NO_LINKS]),
    ("inf2.48xlarge", "missing_device", "neuron:11", None, [FEWER, ("device_count", *GONE, "neuron:11"), NO_LINKS]),
    ("trn1.32xlarge", "missing_core", "neuroncore:14", None, [("neuron_cores", "fail", "MissingDevice", "neuron:7")]),
    ("trn2.48xlarge", "missing_core", "neuron:2", None, [("neuron_cores", "fail", "MissingDevice", "neuron:2")]),
    ("trn1.32xlarge", "less_memory", "neuron:3", None, [("instance_type", "fail", "MissingDevice", "neuron:3")]),
    ("trn1.32xlarge", "wrong_neighbours", "neuron:5", None, [
        ("neuron_topology", "warn", "WrongTopology", "neuron:5"),
        ("neuron_topology", "warn", "WrongTopology", "neuron:6"),
    ]),
    ("trn1.32xlarge", "wrong_neighbours", "neuron:5", "1,4,9", [
        ("neuron_topology", "warn", "WrongTopology", "neuron:5"),
    ]),
    ("trn2.48xlarge", "wrong_neighbours", "neuron:9", "5,8,13,99", [
        ("neuron_topology", "warn", "WrongTopology", "neuron:9"),
    ]),
    ("inf2.48xlarge", "wrong_neighbours", "neuron:4", "3", [("neuron_topology", "warn", "WrongTopology", "neuron:4")]),
    ("trn1.32xlarge", "stuck_core", "neuroncore:6", None, [DEAD]),
    ("trn1.32xlarge", "null_members", None, None, [UNSEEN]),
    ("trn1.2xlarge", "null_members", None, "neuron_processes", [UNSEEN]),
    ("trn1.32xlarge", "null_members", None, "nc_count", [UNSEEN]),
    ("trn1.32xlarge", "null_members", None, "memory_size", [("instance_type", "unknown", "NoData", "node")]),
    ("trn1.32xlarge", "null_members", None, "neuron_device", [UNSEEN]),
    ("trn1.32xlarge", "half_json", None, None, [UNSEEN]),
    ("trn1.32xlarge", "no_tools", None, None, [("neuron_cores", "unknown", "MissingTool", "node")]),
    ("trn1.32xlarge", "no_permission", None, None, [
        ("device_permissions", "unknown", "NoPermission", "node"), UNSEEN,
    ]),
    ("trn1.32xlarge", "no_permission", "neuron:4", None, [
        ("device_permissions", "unknown", "NoPermission", "neuron:4"), UNSEEN,
    ]),
    ("trn1.32xlarge", "no_driver", None, None, [("instance_type", "fail", "MissingDevice", "node")]),
    ("trn1.32xlarge", "extra_members", None, None, []),
    ("trn1.32xlarge", "renumbered", None, None, []),
    ("trn2.48xlarge", "busy", "all", None, []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "target", "value", "expected"), FAULTS)
def test_fault_is_found_named_and_nothing_else_is_accused(
    name: str, kind: str, target: str | None, value: str | None, expected: list[Row], root: Path
) -> None:
    machine = NeuronMachine(root, name)
    machine.fault(kind, target, value)
    assert rows(findings(machine)) == expected


def test_tool_that_hangs_is_a_time_out_with_the_next_step(trn1: NeuronMachine, monkeypatch: Any) -> None:
    monkeypatch.setattr("checks.accelerators.neuron.ls.TIMEOUT_SECONDS", 0.3)
    trn1.fault("hang", "neuron-ls")
    found = findings(trn1)
    assert rows(found) == [("neuron_cores", "unknown", "Timeout", "node")]
    assert any("see the kernel log" in item.message for _, item in found)


def test_words_and_actions_of_faults_tell_what_to_do(trn1: NeuronMachine) -> None:
    trn1.fault("stuck_core", "neuron:3", "900")
    trn1.fault("wrong_neighbours", "neuron:5")
    trn1.fault("no_permission", "neuron:4")
    by_reason = {item.reason: item for _, item in findings(trn1)}
    assert "lists links to" in by_reason["WrongTopology"].message
    assert "0666" in by_reason["NoPermission"].message
    assert "neuron-ls failed with 1: FATA" in by_reason["NoData"].message  # by its words, although the driver is there
    (trn1.root / "dev/neuron4").chmod(0o666)
    (stuck,) = [item for _, item in findings(trn1) if item.reason == "StuckCores"]
    assert "pid 900 (python3) has exited but still holds its cores (among 6-7)" in stuck.message
    assert (blame_of("StuckCores").value, action_of("StuckCores")) == ("node", Action.RESET_DEVICE)


def test_several_faults_are_each_in_their_place(trn1: NeuronMachine) -> None:
    trn1.fault("missing_device", "neuron:7")
    trn1.fault("missing_core", "neuron:2")
    trn1.fault("stuck_core", "neuron:3")
    assert sorted(rows(findings(trn1))) == [
        ("device_count", *GONE, "neuron:7"),
        FEWER,
        ("neuron_cores", "fail", "MissingDevice", "neuron:2"),
        DEAD,
        NO_LINKS,
    ]


def test_stuck_owner_whose_device_another_process_has_open_is_not_accused(trn1: NeuronMachine) -> None:
    """It has inherited the open device, and will release it when it ends."""
    trn1.fault("stuck_core", "neuron:3", "900")
    trn1.fault("busy", "neuron:3", "901")
    trn1.state["processes"].pop()  # the driver knows its parent alone
    trn1.save()
    assert rows(findings(trn1)) == [("neuron_cores", "unknown", "NoData", "neuron:3")]
    blind = {**look(trn1), "holders": None}
    assert ("neuron_cores", "unknown", "NoData", "neuron:3") in rows(findings(trn1, blind))


def test_machine_without_driver_that_is_configured_as_neuron_misses_its_devices(trn1: NeuronMachine) -> None:
    trn1.fault("no_driver")
    seen = {"expected_device_count": None, **neuron.find(trn1.host, {}), "holders": []}
    found = findings(trn1, seen)
    assert ("device_count", "fail", "MissingDevice", "node") in rows(found)
    assert "aws-neuronx-dkms" in next(item for name, item in found if name == "device_count").message
    assert {status for _, status, _, _ in rows(found)} == {"fail", "unknown"}


def test_device_that_sysfs_has_and_the_tool_not_is_told(trn1: NeuronMachine) -> None:
    trn1.state["devices"].pop()
    trn1.save()
    assert rows(findings(trn1)) == [
        ("device_count", "fail", "MissingDevice", "node"),
        ("neuron_cores", "unknown", "NoData", "node"),
    ]


def test_device_file_that_is_missing_is_a_fault_of_that_device(trn1: NeuronMachine) -> None:
    trn1.remove("/dev/neuron5")
    assert rows(findings(trn1)) == [("device_permissions", "fail", "MissingDevice", "neuron:5")]


def test_cores_that_sysfs_counts_otherwise_are_unknown(trn1: NeuronMachine) -> None:
    trn1.write("/sys/devices/virtual/neuron_device/neuron6/core_count", "1\n")
    assert rows(findings(trn1)) == [("neuron_cores", "unknown", "NoData", "neuron:6")]


# --- shares of containers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [[0], [4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]])
def test_share_of_a_container_is_too_few_until_somebody_says_so_and_nothing_else(share: list[int], root: Path) -> None:
    machine = NeuronMachine(root, "trn1.32xlarge", share=share)
    seen = look(machine)
    assert rows(findings(machine, seen)) == [("device_count", "fail", "MissingDevice", "node")]
    (told,) = machine.findings(device_count, inventory=seen, expected=len(share))
    assert told.status is Status.PASS


def test_cores_without_a_type_are_compared_with_most_devices(trn1: NeuronMachine) -> None:
    seen = {**look(trn1), "instance_type": None, "lnc": None}
    trn1.write("/sys/devices/virtual/dmi/id/sys_vendor", "nobody\n")
    assert worst_of(trn1.findings(neuron_cores, inventory=seen)) == (Status.PASS, None)
    seen["devices"][3]["cores"] = 1
    bad = [item for item in trn1.findings(neuron_cores, inventory=seen) if item.status is Status.FAIL]
    assert [(item.reason, item.target, item.measurements[0].origin) for item in bad] == [
        ("MissingDevice", "neuron:3", "derived")
    ]
    pair = {**seen, "devices": seen["devices"][2:4]}
    found = [item for item in trn1.findings(neuron_cores, inventory=pair) if item.reason == "UnknownInstanceType"]
    assert len(found) == 2  # of two nobody can say which is wrong


def test_numbers_are_drawn_together() -> None:
    assert numbers([3, 1, 2, 7, 9, 8, 12]) == "1-3, 7-9, 12"
    assert numbers([]) == ""


def test_rights_on_the_real_machine_are_those_of_this_user(tmp_path: Path) -> None:
    file = tmp_path / "neuron0"
    assert Host(None).may_use(str(file)) is None
    file.write_text("")
    file.chmod(0o600)
    assert Host(None).may_use(str(file)) is True
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from checks.host.machine import Host; os.setuid(65534); "
        "print(Host(None).may_use(sys.argv[1]))"
    )
    if os.geteuid() == 0:
        tmp_path.chmod(0o755)
        place = Path("/tmp") / f"healthd-test-{os.getpid()}"
        place.write_text("")
        place.chmod(0o600)
        try:
            root = str(Path(__file__).parent.parent.parent)
            done = subprocess.run([sys.executable, "-c", code, str(place), root], capture_output=True, text=True)
        finally:
            place.unlink()
        assert done.stdout == "False\n", done.stderr
