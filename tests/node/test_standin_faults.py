"""
Every documented fault of a Neuron machine through the whole path: stand-in tools and files, children, results, health.

Each gives exactly what is expected of it (check, status, reason, target, action), and nothing else is accused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.core.model import Health, NodeState
from tests.cli.cli_kit import healthd
from tests.fakes.neuron import NeuronMachine, parse_fault
from tests.fakes.neuron_faults import FAULTS
from tests.node.standin_kit import (
    COUNTS,
    INF2,
    TRN1,
    TRN2,
    Make,
    Row,
    accused,
    counted,
    efa,
    gone,
    kernel,
    look,
    machines,
    topology,
    unseen,
)
from tests.profile import some


@pytest.fixture
def make() -> Iterator[Make]:
    with machines() as made:
        yield made


# --- healthy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_command_passes_with_the_counts_of_the_type(name: str, make: Make, tmp_path: Path) -> None:
    machine = make(name)
    said = healthd(tmp_path, "check", "--tier", "passive", "--json", "--host-root", str(machine.root))
    assert said.code == 0, said.out
    state = said.json
    found = state["inventory"]
    shown = (found["device_count"], found["core_count"], found["memory_bytes"], found["efa_count"])
    assert (found["accelerator"], *shown) == ("neuron", *COUNTS[name])
    assert (state["health"], state["instance_type"], state["reasons"]) == ("healthy", name, [])
    assert (len(found["devices"]), len(found["workers"])) == COUNTS[name][:2]
    assert all(device["serial"] for device in found["devices"])
    passed = {result["check"] for result in state["results"] if result["status"] == "pass"}
    assert passed >= {
        "device_count",
        "neuron_cores",
        "neuron_counters",
        "neuron_topology",
        "neuron_versions",
        "kernel_log",
    }


# More combinations are in tests/checks/test_accelerators_neuron.py, which needs no children.
@pytest.mark.parametrize(
    ("name", "tools", "driver"),
    [(TRN1, "old", "2.24.7.0"), (TRN2, "new", "2.31.7.0"), (INF2, "old", "2.30.2.0")],
)
def test_other_versions_of_tools_and_driver_pass_as_well(name: str, tools: str, driver: str, make: Make) -> None:
    state = look(make(name, tools=tools, driver=driver))
    assert accused(state.results) == set()
    assert state.inventory is not None
    assert (state.inventory.device_count, state.inventory.core_count) == COUNTS[name][:2]


# --- faults that passive checks see -----------------------------------------------------------------------------------


ON_NODE = [("MissingDevice", "node"), ("NoData", "node")]
BARRED = ("device_permissions", "unknown", "NoPermission", "node", "inspect")
LOST_DRIVER: set[Row] = {("instance_type", "fail", "MissingDevice", "node", "reboot")}
OLD_PAIR: set[Row] = {("neuron_versions", "fail", "VersionMismatch", "node", "inspect")}

# Each fault goes the whole way once, on a type where it shows as on the others; what differs between types and values
# of a fault is told by the tests of the checks (tests/checks/test_system_*.py), which need no children.
FAULTS_OF: list[tuple[str, str, set[Row]]] = [
    (TRN1, "missing_device@neuron:5", gone("neuron:5")),
    (INF2, "missing_core@neuron:5", {("neuron_cores", "fail", "MissingDevice", "neuron:5", "reboot")}),
    (TRN2, "missing_core@neuroncore:14", {("neuron_cores", "fail", "MissingDevice", "neuron:3", "reboot")}),
    (TRN2, "less_memory@neuron:5", {("instance_type", "fail", "MissingDevice", "neuron:5", "inspect")}),
    (TRN1, "wrong_neighbours@neuron:5", topology("neuron:5", "neuron:6")),
    (INF2, "wrong_neighbours@neuron:5", topology("neuron:5", "neuron:6")),
    (INF2, "null_members", unseen("NoData")),
    (TRN2, "extra_members", set()),
    (INF2, "half_json@neuron-ls", unseen("NoData")),
    (TRN1, "half_json@neuron-monitor", set()),
    (TRN2, "no_driver", LOST_DRIVER),
    (INF2, "no_permission", {BARRED, *unseen("NoData")}),
    (TRN1, "no_tools", unseen("MissingTool")),
    (INF2, "no_tools@neuron-ls", unseen("MissingTool")),
    (TRN1, "hang@neuron-ls", unseen("Timeout")),
    (TRN2, "hang@neuron-monitor", set()),
    (INF2, "busy@neuron:5", set()),
    (TRN2, "busy@all", set()),
    (TRN1, "watched@all", set()),
    (INF2, "stuck_core@neuron:5", {("neuron_cores", "fail", "StuckCores", "neuron:5", "reset_device")}),
    (TRN2, "ecc@neuron:5=mem_ecc_uncorrected=1", counted("EccErrors", "neuron:5", "replace")),
    (TRN1, "ecc@neuron:5=mem_ecc_repairable_uncorrected=1", counted("EccErrors", "neuron:5", "reboot")),
    (INF2, "exec_errors@neuron:5=hw_error=2", counted("HardwareErrors", "neuron:5", "inspect")),
    (TRN2, "unhealthy_component@neuron:5=sram,link_efa", counted("UnhealthyComponent", "neuron:5", "inspect")),
    (INF2, "hw_error_line@neuron:5=HBM_UNCORRECTABLE_ERROR", kernel("replace", "neuron:5")),
    (TRN2, "hw_error_line@neuron:5=DMA_ABORT", kernel("reset_device", "neuron:5")),
    (TRN1, "hw_error_line@neuron:5=HANG_ON_COLLECTIVES", kernel("inspect", "neuron:5", "warn")),
    (TRN2, "hw_error_line@neuron:5=SOMETHING_NEW", kernel("inspect", "neuron:5")),
    (TRN1, "benign_lines", set()),
    (INF2, "version_pair", OLD_PAIR),
    (TRN1, "renumbered", set()),
    (TRN1, "efa_missing@efa:rdmap16s26", efa("MissingDevice", "node", "efa:rdmap16s26", action="reboot")),
    (TRN2, "efa_down@efa:rdmap86s0", efa("LinkDown", "efa:rdmap86s0")),
]  # fmt: skip


def judged(machine: NeuronMachine, expected: set[Row]) -> NodeState:
    state = look(machine)
    assert accused(state.results) == expected
    statuses = {status for _, status, _, _, _ in expected}
    health = Health.UNKNOWN if "unknown" in statuses else Health.DEGRADED if "warn" in statuses else Health.HEALTHY
    assert state.health is (Health.UNHEALTHY if "fail" in statuses else health)
    assert {(r.check, r.code, r.target) for r in state.reasons} == {(row[0], row[2], row[3]) for row in expected}
    return state


@pytest.mark.parametrize(
    ("name", "fault", "expected"), some(FAULTS_OF, 6), ids=lambda value: value if isinstance(value, str) else ""
)
def test_fault_is_named_and_nothing_else_is_accused(name: str, fault: str, expected: set[Row], make: Make) -> None:
    state = judged(make(name, fault), expected)
    assert state.inventory is not None
    assert bool(state.allocated) is fault.startswith("busy")
    if fault.startswith(("busy", "watched", "benign", "renumbered", "extra")):
        assert (state.inventory.device_count, state.inventory.core_count) == COUNTS[name][:2]


def test_each_of_several_faults_is_named(make: Make) -> None:
    machine = make(TRN1, "missing_device@neuron:9", "ecc@neuron:2", "stuck_core@neuron:3", "efa_down@efa:rdmap16s26")
    machine.fault("hw_error_line", "neuron:4", "DMA_ABORT")
    judged(
        machine,
        gone("neuron:9")
        | counted("EccErrors", "neuron:2", "replace")
        | {("neuron_cores", "fail", "StuckCores", "neuron:3", "reset_device")}
        | efa("LinkDown", "efa:rdmap16s26")
        | kernel("reset_device", "neuron:4"),
    )


@pytest.mark.parametrize(
    ("name", "fault", "code", "reasons"),
    [
        (TRN1, "stuck_core@neuron:5", 1, [("neuron_cores", "StuckCores", "neuron:5", "reset_device")]),
        (INF2, "half_json@neuron-ls", 3, [("neuron_cores", "NoData", "node", "inspect")]),
    ],
)
def test_command_says_the_same_with_its_exit_code(
    name: str, fault: str, code: int, reasons: list[tuple[str, str, str, str]], make: Make, tmp_path: Path
) -> None:
    machine = make(name, fault)
    said = healthd(tmp_path, "check", "--tier", "passive", "--json", "--host-root", str(machine.root))
    assert said.code == code
    found = [(reason["check"], reason["code"], reason["target"], reason["action"]) for reason in said.json["reasons"]]
    assert found == reasons


def test_every_fault_that_there_is_has_a_row() -> None:
    rows = {parse_fault(fault)[0] for _, fault, _ in FAULTS_OF}
    elsewhere = {"ecc_reset", "efa_errors", "old_units"} | {kind for kind in FAULTS if kind.startswith("nccom_")}
    assert set(FAULTS) == rows | elsewhere  # those: test_standin_looks.py


# --- what the docs show -----------------------------------------------------------------------------------------------


def test_first_check_in_the_docs_is_what_the_command_says(make: Make, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/neuron.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"## The first check\n.*?```text\n(.*?)```", page, re.DOTALL)
    said = healthd(tmp_path, "check", "--tier", "passive", "--host-root", str(make(TRN1).root), env={"COLUMNS": "400"})
    lines = {line.rstrip() for line in said.out.splitlines()}
    assert len(shown.splitlines()) > 9
    assert [line for line in shown.splitlines() if line.replace("user 0 ", f"user {os.geteuid()} ") not in lines] == []
