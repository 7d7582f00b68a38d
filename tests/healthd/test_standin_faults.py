"""
Every documented fault of a Neuron machine through the whole path: stand-in tools and files, children, results, health.

Each gives exactly what is expected of it (check, status, reason, target, action), and nothing else is accused.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checks.contract import Finding, Status, Tier
from checks.reasons import action_of
from checks.system.efa_links import MIN_ELAPSED_SECONDS
from healthd.cli.check import examine
from healthd.cli.settings import Settings
from healthd.model import CheckResult, Health, NodeState
from healthd.node.settings import NodeSettings
from healthd.runner import Plan, Runner
from tests.fakes.neuron import NeuronMachine, parse_fault
from tests.fakes.neuron_faults import FAULTS
from tests.healthd.cli_kit import healthd

TRN1, TRN2, INF2 = "trn1.32xlarge", "trn2.48xlarge", "inf2.48xlarge"
GIB = 1 << 30
# Devices, logical cores, bytes, EFA interfaces.
COUNTS = {TRN1: (16, 32, 512 * GIB, 8), TRN2: (16, 64, 1536 * GIB, 16), INF2: (12, 24, 384 * GIB, 0)}
NCCOM = "nccom_all_reduce"

# check, status, reason, target, action
Row = tuple[str, str, "str | None", str, str]
Make = Callable[..., NeuronMachine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Machines of any type with faults as on the command line: thousands of files, so in memory where it can be."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="healthd-standin-", dir=memory if os.access(memory, os.W_OK) else None))

    def made(name: str, *faults: str, driver: str = "2.30.2.0", tools: str = "new") -> NeuronMachine:
        machine = NeuronMachine(place / "machine", name, driver=driver, tools=tools)
        for fault in faults:
            machine.fault(*parse_fault(fault))
        return machine

    yield made
    shutil.rmtree(place)


def settings(machine: NeuronMachine, **checks: dict[str, object]) -> Settings:
    folder = machine.root.parent
    return Settings(
        node=NodeSettings(name="n1", state_dir=folder / "state", run_dir=folder / "run", host_root=machine.root),
        checks=checks,
    )


def look(machine: NeuronMachine, *names: str, **checks: dict[str, object]) -> NodeState:
    """`healthd check --tier passive`, or of the checks that are named."""
    tier = None if names else Tier.PASSIVE
    return asyncio.run(examine(settings(machine, **checks), names, tier, quiet=True))


def accused(results: tuple[CheckResult, ...]) -> set[Row]:
    """What is neither pass nor skipped for a reason that lies in the machine."""
    return {row(result.check, one) for result in results for one in result.findings if told(one)}


def told(finding: Finding) -> bool:
    return finding.status not in (Status.PASS, Status.SKIP) or finding.reason == "Busy"


def row(check: str, finding: Finding) -> Row:
    action = finding.action or action_of(finding.reason)
    return (check, finding.status.value, finding.reason, finding.target, action.value)


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


@pytest.mark.parametrize(
    ("tools", "driver"), [("old", "2.24.7.0"), ("old", "2.30.2.0"), ("new", "2.31.7.0")], ids=lambda text: str(text)
)
@pytest.mark.parametrize("name", COUNTS)
def test_other_versions_of_tools_and_driver_pass_as_well(name: str, tools: str, driver: str, make: Make) -> None:
    state = look(make(name, tools=tools, driver=driver))
    assert accused(state.results) == set()
    assert state.inventory is not None
    assert (state.inventory.device_count, state.inventory.core_count) == COUNTS[name][:2]


# --- faults that passive checks see -----------------------------------------------------------------------------------


def gone(target: str) -> set[Row]:
    return {("device_count", "fail", "MissingDevice", where, "reboot") for where in ("node", target)}


def topology(*targets: str) -> set[Row]:
    return {("neuron_topology", "fail", "WrongTopology", target, "inspect") for target in targets}


def kernel(action: str, target: str, status: str = "fail") -> set[Row]:
    return {("kernel_log", status, "KernelFault", target, action)}


def counted(reason: str, target: str, action: str, status: str = "fail") -> set[Row]:
    return {("neuron_counters", status, reason, target, action)}


def efa(reason: str, *targets: str, action: str = "inspect", status: str = "fail") -> set[Row]:
    return {("efa", status, reason, target, action) for target in targets}


def unseen(reason: str) -> set[Row]:
    return {("neuron_cores", "unknown", reason, "node", "inspect")}


BARRED = ("device_permissions", "unknown", "NoPermission", "node", "inspect")
LOST_DRIVER: set[Row] = {("instance_type", "fail", "MissingDevice", "node", "reboot")}
OLD_PAIR: set[Row] = {("neuron_versions", "fail", "VersionMismatch", "node", "inspect")}

ON_ALL: list[tuple[str, set[Row]]] = [
    ("missing_device@neuron:5", gone("neuron:5")),
    ("missing_core@neuron:5", {("neuron_cores", "fail", "MissingDevice", "neuron:5", "reboot")}),
    ("less_memory@neuron:5", {("instance_type", "fail", "MissingDevice", "neuron:5", "inspect")}),
    ("null_members", unseen("NoData")),
    ("extra_members", set()),
    ("half_json@neuron-ls", unseen("NoData")),
    ("no_driver", LOST_DRIVER),
    ("no_permission", {BARRED, *unseen("NoData")}),
    ("no_tools", unseen("MissingTool")),
    ("no_tools@neuron-ls", unseen("MissingTool")),
    ("busy@neuron:5", set()),
    ("busy@all", set()),
    ("watched@all", set()),
    ("stuck_core@neuron:5", {("neuron_cores", "fail", "StuckCores", "neuron:5", "reset_device")}),
    ("ecc@neuron:5=mem_ecc_uncorrected=1", counted("EccErrors", "neuron:5", "replace")),
    ("ecc@neuron:5=sram_ecc_uncorrected=3", counted("EccErrors", "neuron:5", "replace")),
    ("exec_errors@neuron:5=hw_error=2", counted("HardwareErrors", "neuron:5", "inspect")),
    ("hw_error_line@neuron:5=SRAM_UNCORRECTABLE_ERROR", kernel("replace", "neuron:5")),
    ("hw_error_line@neuron:5=NC_UNCORRECTABLE_ERROR", kernel("replace", "neuron:5")),
    ("hw_error_line@neuron:5=HBM_UNCORRECTABLE_ERROR", kernel("replace", "neuron:5")),
    ("hw_error_line@neuron:5=DMA_ERROR", kernel("replace", "neuron:5")),
    ("hw_error_line@neuron:5=DMA_ABORT", kernel("replace", "neuron:5")),
    ("hw_error_line@neuron:5=HANG_ON_COLLECTIVES", kernel("inspect", "neuron:5", "warn")),
    ("hw_error_line@neuron:5=SOMETHING_NEW", kernel("inspect", "neuron:5")),
    ("benign_lines", set()),
    ("version_pair", OLD_PAIR),
    ("renumbered", set()),
]  # fmt: skip

OF_TYPES: list[tuple[str, str, set[Row]]] = [
    (TRN1, "wrong_neighbours@neuron:5", topology("neuron:5", "neuron:6")),
    (TRN2, "wrong_neighbours@neuron:5", topology("neuron:5", "neuron:6")),
    (INF2, "wrong_neighbours@neuron:5", topology("neuron:5", "neuron:6")),
    (TRN1, "missing_device@neuron:0=forgotten", gone("neuron:0")),
    (INF2, "missing_device@neuron:11", gone("neuron:11")),
    (TRN2, "missing_core@neuroncore:14", {("neuron_cores", "fail", "MissingDevice", "neuron:3", "reboot")}),
    (TRN1, "ecc@neuron:5=mem_ecc_repairable_uncorrected=1", counted("EccErrors", "neuron:5", "reboot")),
    (TRN2, "unhealthy_component@neuron:5", counted("UnhealthyComponent", "neuron:5", "inspect")),
    (TRN2, "unhealthy_component@neuron:5=sram,link_efa", counted("UnhealthyComponent", "neuron:5", "inspect")),
    (TRN1, "efa_missing@efa:rdmap16s26", efa("MissingDevice", "node", "efa:rdmap16s26", action="reboot")),
    (TRN2, "efa_missing@efa:rdmap86s0", efa("MissingDevice", "node", "efa:rdmap86s0", action="reboot")),
    (TRN1, "efa_down@efa:rdmap16s26", efa("LinkDown", "efa:rdmap16s26")),
    (TRN2, "efa_down@efa:rdmap86s0", efa("LinkDown", "efa:rdmap86s0")),
    (TRN1, "hang@neuron-ls", unseen("Timeout")),
    (TRN1, "hang@neuron-monitor", set()),
    (TRN1, "half_json@neuron-monitor", set()),
]  # fmt: skip


def judged(machine: NeuronMachine, expected: set[Row]) -> NodeState:
    state = look(machine)
    assert accused(state.results) == expected
    statuses = {status for _, status, _, _, _ in expected}
    health = Health.UNKNOWN if "unknown" in statuses else Health.DEGRADED if "warn" in statuses else Health.HEALTHY
    assert state.health is (Health.UNHEALTHY if "fail" in statuses else health)
    assert {(r.check, r.code, r.target) for r in state.reasons} == {(row[0], row[2], row[3]) for row in expected}
    return state


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("fault", "expected"), ON_ALL, ids=[fault for fault, _ in ON_ALL])
def test_fault_is_named_and_nothing_else_is_accused(fault: str, expected: set[Row], name: str, make: Make) -> None:
    state = judged(make(name, fault), expected)
    assert state.inventory is not None
    assert bool(state.allocated) is fault.startswith("busy")
    if fault.startswith(("busy", "watched", "benign", "renumbered", "extra")):
        assert (state.inventory.device_count, state.inventory.core_count) == COUNTS[name][:2]


@pytest.mark.parametrize(
    ("name", "fault", "expected"), OF_TYPES, ids=[f"{name}-{fault}" for name, fault, _ in OF_TYPES]
)
def test_fault_of_a_type_is_named_and_nothing_else_is_accused(
    name: str, fault: str, expected: set[Row], make: Make
) -> None:
    judged(make(name, fault), expected)


def test_each_of_several_faults_is_named(make: Make) -> None:
    machine = make(TRN1, "missing_device@neuron:9", "ecc@neuron:2", "stuck_core@neuron:3", "efa_down@efa:rdmap16s26")
    machine.fault("hw_error_line", "neuron:4", "DMA_ABORT")
    judged(
        machine,
        gone("neuron:9")
        | counted("EccErrors", "neuron:2", "replace")
        | {("neuron_cores", "fail", "StuckCores", "neuron:3", "reset_device")}
        | efa("LinkDown", "efa:rdmap16s26")
        | kernel("replace", "neuron:4"),
    )


@pytest.mark.parametrize(
    ("name", "fault", "code", "reasons"),
    [
        (TRN1, "missing_device@neuron:5", 2, [("MissingDevice", "neuron:5"), ("MissingDevice", "node")]),
        (TRN2, "unhealthy_component@neuron:5", 2, [("UnhealthyComponent", "neuron:5")]),
        (INF2, "half_json@neuron-ls", 3, [("NoData", "node")]),
        (TRN1, "hw_error_line@neuron:5=HANG_ON_COLLECTIVES", 1, [("KernelFault", "neuron:5")]),
    ],
)
def test_command_says_the_same_with_its_exit_code(
    name: str, fault: str, code: int, reasons: list[tuple[str, str]], make: Make, tmp_path: Path
) -> None:
    machine = make(name, fault)
    said = healthd(tmp_path, "check", "--tier", "passive", "--json", "--host-root", str(machine.root))
    assert said.code == code
    assert sorted((reason["code"], reason["target"]) for reason in said.json["reasons"]) == reasons


# --- faults that show from look to look -------------------------------------------------------------------------------


class Looks:
    """Rounds of one runner, which remembers what counters held."""

    def __init__(self, machine: NeuronMachine, *names: str) -> None:
        self.machine, self.names = machine, names
        self.runner = Runner(settings(machine).runner())

    def again(self, *faults: str) -> set[Row]:
        for fault in faults:
            self.machine.fault(*parse_fault(fault))
        plan = Plan(tier=Tier.PASSIVE, checks=self.names, executor="test")
        return accused(asyncio.run(self.runner.run(plan)))


def test_errors_that_were_counted_are_told_after_the_counter_began_anew(make: Make) -> None:
    looks = Looks(make(TRN1), "neuron_counters")
    assert looks.again() == set()
    assert looks.again("ecc@neuron:5=mem_ecc_uncorrected=3") == counted("EccErrors", "neuron:5", "replace")
    assert looks.again("ecc_reset") == counted("EccErrors", "neuron:5", "replace", "warn")
    assert looks.again("ecc@neuron:5=mem_ecc_uncorrected=1") == counted("EccErrors", "neuron:5", "replace")


def test_counter_that_began_anew_without_damage_accuses_nobody(make: Make) -> None:
    looks = Looks(make(TRN1, "ecc@neuron:5=mem_ecc_corrected=7"), "neuron_counters")
    assert looks.again() == set()
    assert looks.again("ecc_reset") == set()


def test_corrected_errors_that_rise_fast_are_a_warning(make: Make) -> None:
    looks = Looks(make(TRN1), "neuron_counters")
    assert looks.again() == set()
    rising = looks.again("ecc@neuron:5=mem_ecc_corrected=5000")
    assert rising == counted("CorrectedErrors", "neuron:5", "inspect", "warn")


@pytest.mark.parametrize("status", ["timeout", "execute_completed_with_error", "hw_collectives_error"])
def test_executions_that_a_program_may_have_caused_are_a_warning_once_seen(status: str, make: Make) -> None:
    looks = Looks(make(TRN1), "neuron_counters")
    assert looks.again() == set()
    found = looks.again(f"exec_errors@neuroncore:10={status}=2")
    assert found == counted("HardwareErrors", "neuron:5", "inspect", "warn")


def test_interfaces_whose_errors_rise_are_named(make: Make) -> None:
    looks = Looks(make(TRN2), "efa")
    assert looks.again() == set()
    time.sleep(MIN_ELAPSED_SECONDS)  # rates over less are not judged
    rising = {
        "rdmap86s0": "rx_drops",
        "rdmap87s0": "retrans_timeout_events",
        "rdmap108s0": "unresponsive_remote_events",
    }
    found = looks.again(*(f"efa_errors@efa:{name}={counter}=100000000" for name, counter in rising.items()))
    assert found == efa("LinkErrors", *(f"efa:{name}" for name in rising), status="warn")


# --- faults that nccom-test finds -------------------------------------------------------------------------------------


def nccom(status: str, reason: str, action: str) -> set[Row]:
    return {(NCCOM, status, reason, "node", action)}


OF_NCCOM: list[tuple[str, set[Row]]] = [
    ("nccom_wrong", nccom("fail", "CollectiveMismatch", "inspect")),
    ("nccom_fail", nccom("fail", "CollectiveFailed", "inspect")),
    ("nccom_missing_row", nccom("fail", "CollectiveFailed", "inspect")),
    ("nccom_nan", nccom("fail", "CollectiveFailed", "inspect")),
    ("nccom_slow=3", set()),  # no limit is set: shown, unjudged
    ("old_units", set()),
    ("half_json@nccom-test", set()),  # the table says the same
    ("no_tools@nccom-test", nccom("unknown", "MissingTool", "inspect")),
    ("busy@neuron:5", nccom("skip", "Busy", "retry")),
    ("stuck_core@neuron:5", nccom("skip", "Busy", "retry")),
]  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("fault", "expected"), OF_NCCOM, ids=[fault for fault, _ in OF_NCCOM])
def test_fault_of_collectives_is_named(fault: str, expected: set[Row], name: str, make: Make) -> None:
    state = look(make(name, fault), NCCOM)
    assert accused(state.results) == expected
    assert (state.health is Health.HEALTHY) is not bool(expected)
    measured = {m.labels["ranks"] for r in state.results for f in r.findings for m in f.measurements}
    assert measured <= {str(COUNTS[name][1])}
    assert bool(measured) is (not expected or fault in ("nccom_wrong", "nccom_fail", "nccom_missing_row"))


def test_collective_that_hangs_is_ended_and_told(make: Make) -> None:
    machine = make(TRN1, "nccom_hang")
    state = look(machine, NCCOM, nccom_all_reduce={"step_seconds": 2.0})
    assert accused(state.results) == nccom("fail", "Timeout", "inspect")
    pid = int((machine.root / "neuron-bench.pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_every_fault_that_there_is_has_a_row() -> None:
    rows = [fault for fault, _ in (*ON_ALL, *OF_NCCOM)] + [fault for _, fault, _ in OF_TYPES]
    looked_at = {parse_fault(text)[0] for text in rows} | {"ecc_reset", "efa_errors", "nccom_hang"}
    assert set(FAULTS) == looked_at
