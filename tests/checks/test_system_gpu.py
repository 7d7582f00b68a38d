"""NVIDIA GPUs by NVML: memory errors, throttling, links, the driver; and whatever NVML may answer instead."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.accelerators import cuda
from checks.contract import Action, Check, Evidence, Finding, Previous, Status, Tier
from checks.host.identity import read_identity
from checks.host.nvml import Gpu
from checks.system.gpu.gpu_driver import gpu_driver, list_processes
from checks.system.gpu.gpu_links import gpu_links
from checks.system.gpu.gpu_memory import gpu_memory
from checks.system.gpu.gpu_recovery import gpu_recovery
from checks.system.gpu.gpu_throttle import gpu_throttle
from tests.every import every
from tests.fakes.gpus import HEALTHY_GPU, GpuMachine
from tests.hosts.machine import Machine, number
from tests.profile import examples
from tests.runner.runner_kit import run_checks

CHECKS = (gpu_memory, gpu_throttle, gpu_links, gpu_driver, gpu_recovery)
NOT_SUPPORTED, LOST, RESET_REQUIRED, UNKNOWN = 3, 15, 16, 999


@pytest.fixture
def machine(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path / "machine", count=2)


def look(
    machine: GpuMachine, check: Check, previous: Previous | None = None, seconds: float = 60.0, **params: Any
) -> tuple[list[Finding], Previous]:
    """One look, and what the next one gets to see of it."""
    items = machine.run(check, previous=previous, **params)
    evidence = tuple(item for item in items if isinstance(item, Evidence))
    later = Previous(evidence=evidence, elapsed_seconds=seconds, boot_id=machine.host.boot_id())
    return [item for item in items if isinstance(item, Finding)], later


def bad(findings: list[Finding]) -> list[tuple[Status, str | None, str]]:
    return [(item.status, item.reason, item.target) for item in findings if item.status is not Status.PASS]


def judged(machine: GpuMachine, check: Check, **params: Any) -> list[tuple[Status, str | None, str]]:
    return bad(look(machine, check, **params)[0])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_healthy_gpus_pass_each_by_name(check: Check, machine: GpuMachine) -> None:
    findings, before = look(machine, check)
    assert {item.status for item in findings} == {Status.PASS}, findings
    assert bad(look(machine, check, before)[0]) == []
    if check is not gpu_driver:
        assert {item.target for item in findings} == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_node_without_nvidia_gpus_is_not_concerned(check: Check, tmp_path: Path) -> None:
    findings = Machine(tmp_path / "machine").findings(check)
    assert [(item.status, item.reason) for item in findings] == [(Status.SKIP, "NotApplicable")]


# --- what NVML may answer instead -------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (12, (Status.UNKNOWN, "MissingTool")),
        (9, (Status.UNKNOWN, "NoData")),
        (4, (Status.UNKNOWN, "NoPermission")),
        (10, (Status.UNKNOWN, "Timeout")),
        (18, (Status.FAIL, "VersionMismatch")),
        (UNKNOWN, (Status.UNKNOWN, "NoData")),
    ],
)
def test_library_that_does_not_open_is_told_with_its_reason(
    check: Check, code: int, expected: object, machine: GpuMachine
) -> None:
    machine.error("nvmlInit", code)
    assert judged(machine, check) == [(*expected, "node")]  # type: ignore[misc]


def test_library_of_another_version_than_the_driver_asks_for_a_reboot(machine: GpuMachine) -> None:
    machine.error("nvmlInit", 18)
    assert look(machine, gpu_memory)[0][0].action is Action.REBOOT


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_module_that_is_not_installed_is_unknown_with_the_remedy(check: Check, machine: GpuMachine) -> None:
    machine.remove("/python/pynvml")
    (finding,) = look(machine, check)[0]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "MissingTool")
    assert f"nvidia-ml-py is installed neither beside healthd nor for {sys.executable}" in finding.message
    assert "install the extra nvidia of healthd" in finding.message


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("code", [LOST, RESET_REQUIRED, 28])
def test_gpu_that_is_lost_fails_and_no_other_is_accused(check: Check, code: int, machine: GpuMachine) -> None:
    machine.error("*@1", code)
    findings, _ = look(machine, check)
    assert bad(findings) == [(Status.FAIL, "DeviceLost", "cuda:1")]
    if check is not gpu_driver:
        assert any(item.target == "cuda:0" and item.status is Status.PASS for item in findings)


def test_gpu_that_the_library_has_not_though_the_driver_shows_it_is_lost(machine: GpuMachine) -> None:
    machine.state["gpus"][1]["bdf"] = "0000:ff:00.0"
    machine.gpu(1)
    assert judged(machine, gpu_memory) == [(Status.FAIL, "DeviceLost", "cuda:1")]


# Calls that a check makes of each GPU.
CALLS_OF = {
    gpu_memory: (
        "nvmlDeviceGetEccMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows",
    ),
    gpu_throttle: (
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureThreshold",
    ),
    gpu_links: (
        "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkErrorCounter",
        "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetPcieReplayCounter",
    ),
    gpu_driver: ("nvmlDeviceGetComputeRunningProcesses",),
    gpu_recovery: ("nvmlDeviceGetFieldValues",),
}  # fmt: skip
EACH = [(check, call) for check, calls in CALLS_OF.items() for call in calls]


@pytest.mark.parametrize(("check", "call"), EACH, ids=lambda value: getattr(value, "name", value))
def test_call_that_fails_makes_that_gpu_unknown_or_lost_and_never_ends_the_check(
    check: Check, call: str, machine: GpuMachine
) -> None:
    machine.error(f"{call}@0", UNKNOWN)
    assert (Status.UNKNOWN, "NoData", "cuda:0") in judged(machine, check)
    assert not any(target == "cuda:1" for *_, target in judged(machine, check))
    machine.error(f"{call}@0", LOST)
    assert judged(machine, check) == [(Status.FAIL, "DeviceLost", "cuda:0")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_gpu_that_supports_nothing_never_passes(check: Check, tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=1, instance_type=None)
    machine.gpu(0, **dict.fromkeys(HEALTHY_GPU))
    of_gpu = [item for item in look(machine, check)[0] if item.target == "cuda:0"]
    assert of_gpu
    assert {item.status for item in of_gpu} <= {Status.SKIP, Status.UNKNOWN}


anything = (
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.text(max_size=3) | st.lists(st.integers(), max_size=4)
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> GpuMachine:
    return GpuMachine(tmp_path_factory.mktemp("gpus") / "machine", count=1)


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(EACH), max_size=4),
    st.sampled_from([1, 2, 3, 4, 6, 10, 13, 15, 16, 17, 999]),
    st.dictionaries(st.sampled_from(sorted(HEALTHY_GPU)), st.integers(0, 2**64) | st.none(), max_size=4),
)
def test_whatever_nvml_answers_there_is_a_finding_with_a_reason(
    shared: GpuMachine, failing: list[tuple[Check, str]], code: int, odd: dict[str, int | None]
) -> None:
    lists = ("remapped_rows", "nvlinks", "nvlink_errors", "fabric", "processes")
    shared.state["gpus"][0].update(HEALTHY_GPU)
    sizes = {"fabric": 2}
    shared.state["gpus"][0].update(
        {k: ([v % 2**32] * sizes.get(k, 4) if k in lists and v is not None else v) for k, v in odd.items()}
    )
    shared.state["errors"] = {call: code for _, call in failing}
    shared.gpu(0)
    for check in CHECKS:
        findings, before = look(shared, check)
        assert findings
        assert all((item.reason is None) == (item.status is Status.PASS) for item in findings)
        look(shared, check, before)


@settings(max_examples=examples(15))  # of 20 looks each
@given(anything, st.floats())
def test_what_was_remembered_may_be_nonsense(shared: GpuMachine, value: Any, seconds: float) -> None:
    shared.well()
    shared.state["gpus"][0].update(HEALTHY_GPU)
    shared.gpu(0, clock_reasons=0x40)
    key = shared.state["gpus"][0]["uuid"]
    names = (
        "aggregate_base",
        "slowed_seconds",
        "stuck_seconds",
        "pcie_replays",
        "replay/0",
        "recovery/0",
        "crc_flit/0",
        "crc_data/0",
    )
    for data in ({"gpus": {key: dict.fromkeys(names, value)}}, {"gpus": {key: value}}, {"gpus": value}, {}):
        evidence = Evidence(target="node", key="x", data=data)
        previous = Previous(evidence=(evidence,), elapsed_seconds=seconds, boot_id=shared.host.boot_id())
        for check in CHECKS:
            look(shared, check, previous)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "expected", "action"),
    [
        ({"volatile_uncorrected": 1}, (Status.FAIL, "EccErrors"), None),
        ({"remapped_rows": [0, 1, 1, 0]}, (Status.FAIL, "EccErrors"), Action.RESET_DEVICE),
        ({"remapped_rows": [0, 9, 0, 1]}, (Status.FAIL, "EccErrors"), Action.REPLACE),
        ({"retire_pending": 1}, (Status.FAIL, "EccErrors"), Action.RESET_DEVICE),
        ({"retired_pages": [32, 32]}, (Status.FAIL, "EccErrors"), Action.REPLACE),
        ({"retired_pages": [31, 32]}, None, None),
        ({"remapped_rows": [4, 2, 0, 0], "aggregate_uncorrected": 7}, None, None),
    ],
)
def test_errors_of_memory_and_repairs_are_judged(
    says: dict[str, Any], expected: tuple[Status, str] | None, action: Action | None, machine: GpuMachine
) -> None:
    machine.gpu(1, **says)
    findings = [item for item in look(machine, gpu_memory)[0] if item.status is not Status.PASS]
    assert [(item.status, item.reason, item.target, item.action) for item in findings] == (
        [(*expected, "cuda:1", action)] if expected else []
    )


def test_limits_of_memory_errors_can_be_set(machine: GpuMachine) -> None:
    machine.gpu(0, volatile_uncorrected=2)
    assert judged(machine, gpu_memory, max_uncorrected_count=2) == []
    assert judged(machine, gpu_memory, max_uncorrected_count=1) == [(Status.FAIL, "EccErrors", "cuda:0")]


def test_errors_of_a_life_count_by_their_rise_and_stand_until_the_next_boot(machine: GpuMachine) -> None:
    machine.gpu(0, volatile_uncorrected=None, aggregate_uncorrected=5)
    findings, before = look(machine, gpu_memory)
    assert bad(findings) == []
    machine.gpu(0, aggregate_uncorrected=6)
    for _ in range(3):
        findings, before = look(machine, gpu_memory, before)
        assert bad(findings) == [(Status.FAIL, "EccErrors", "cuda:0")]
    earlier_boot = Previous(evidence=before.evidence, elapsed_seconds=60.0, boot_id="another")
    assert bad(look(machine, gpu_memory, earlier_boot)[0]) == []


def test_errors_of_a_life_are_not_forgotten_by_a_look_right_after_the_last_or_without_an_answer(
    machine: GpuMachine,
) -> None:
    machine.gpu(0, volatile_uncorrected=None, aggregate_uncorrected=5)
    _, before = look(machine, gpu_memory)
    machine.gpu(0, aggregate_uncorrected=6)
    findings, before = look(machine, gpu_memory, before, seconds=0.2)
    assert bad(findings) == [(Status.FAIL, "EccErrors", "cuda:0")]
    findings, before = look(machine, gpu_memory, before)  # a fifth of a second later
    assert bad(findings) == [(Status.FAIL, "EccErrors", "cuda:0")]
    machine.error("*@0", LOST)
    findings, before = look(machine, gpu_memory, before)
    assert bad(findings) == [(Status.FAIL, "DeviceLost", "cuda:0")]
    machine.well()
    assert bad(look(machine, gpu_memory, before)[0]) == [(Status.FAIL, "EccErrors", "cuda:0")]


def test_count_of_a_life_that_was_set_back_begins_anew(machine: GpuMachine) -> None:
    machine.gpu(0, volatile_uncorrected=None, aggregate_uncorrected=5)
    _, before = look(machine, gpu_memory)
    machine.gpu(0, aggregate_uncorrected=0)
    findings, before = look(machine, gpu_memory, before)
    assert bad(findings) == []
    machine.gpu(0, aggregate_uncorrected=1)
    assert bad(look(machine, gpu_memory, before)[0]) == [(Status.FAIL, "EccErrors", "cuda:0")]


def test_ecc_that_is_off_is_a_warning_and_a_gpu_without_it_not_concerned(machine: GpuMachine) -> None:
    nothing = dict.fromkeys(("volatile_uncorrected", "aggregate_uncorrected", "remapped_rows"))
    machine.gpu(0, ecc=0, **nothing)
    machine.gpu(1, ecc=None, **nothing)
    assert judged(machine, gpu_memory) == [(Status.WARN, "NoData", "cuda:0"), (Status.SKIP, "NotApplicable", "cuda:1")]
    assert {status for status, *_ in judged(machine, gpu_memory, required=False)} == {Status.SKIP}
    machine.gpu(1, ecc=1)
    assert (Status.UNKNOWN, "NoData", "cuda:1") in judged(machine, gpu_memory)


# --- clocks and heat --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "word"), [(0x08, "hardware slowdown"), (0x48, "too hot"), (0x88, "power brake")])
def test_slowdown_by_the_hardware_is_a_warning_and_when_it_lasts_a_failure(
    mask: int, word: str, machine: GpuMachine
) -> None:
    machine.gpu(1, clock_reasons=mask)
    findings, before = look(machine, gpu_throttle)
    assert bad(findings) == [(Status.WARN, "Throttled", "cuda:1")]
    findings, before = look(machine, gpu_throttle, before)
    assert bad(findings) == [(Status.FAIL, "Throttled", "cuda:1")]
    (finding,) = [item for item in findings if item.status is Status.FAIL]
    assert word in finding.message
    assert "for 60 s" in finding.message
    machine.gpu(1, clock_reasons=0)
    findings, before = look(machine, gpu_throttle, before)
    assert bad(findings) == []
    machine.gpu(1, clock_reasons=mask)
    assert bad(look(machine, gpu_throttle, before)[0]) == [(Status.WARN, "Throttled", "cuda:1")]


def test_two_looks_right_after_each_other_are_one_moment(machine: GpuMachine) -> None:
    machine.gpu(1, clock_reasons=0x08)
    _, before = look(machine, gpu_throttle, seconds=10.0)
    assert bad(look(machine, gpu_throttle, before)[0]) == [(Status.WARN, "Throttled", "cuda:1")]
    assert bad(look(machine, gpu_throttle, before, fail_seconds=5.0)[0]) == [(Status.FAIL, "Throttled", "cuda:1")]


def test_look_right_after_the_last_does_not_begin_the_time_of_a_slowdown_anew(machine: GpuMachine) -> None:
    machine.gpu(1, clock_reasons=0x08)
    _, before = look(machine, gpu_throttle, seconds=45.0)
    _, before = look(machine, gpu_throttle, before, seconds=0.5)
    _, before = look(machine, gpu_throttle, before, seconds=45.0)
    assert bad(look(machine, gpu_throttle, before)[0]) == [(Status.FAIL, "Throttled", "cuda:1")]


def test_heat_by_the_drivers_measure_is_a_warning(machine: GpuMachine) -> None:
    machine.gpu(0, clock_reasons=0x20)
    assert judged(machine, gpu_throttle) == [(Status.WARN, "Throttled", "cuda:0")]


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100, 0x800, 0x117])
def test_how_gpus_work_is_no_fault(mask: int, machine: GpuMachine) -> None:
    machine.gpu(0, clock_reasons=mask)
    assert judged(machine, gpu_throttle) == []


@pytest.mark.parametrize(("celsius", "fails"), [(89, False), (90, True)])
def test_temperature_is_judged_by_what_the_gpu_says_itself(celsius: int, fails: bool, machine: GpuMachine) -> None:
    machine.gpu(0, temperature=celsius)
    assert judged(machine, gpu_throttle) == ([(Status.FAIL, "Overheating", "cuda:0")] if fails else [])
    assert judged(machine, gpu_throttle, margin_celsius=5.0) == [(Status.FAIL, "Overheating", "cuda:0")]


def test_gpu_that_states_no_limit_is_shown_unjudged(machine: GpuMachine) -> None:
    machine.gpu(0, slowdown_temperature=None, temperature=200)
    findings, _ = look(machine, gpu_throttle)
    assert bad(findings) == []
    assert findings[0].measurements[0].origin == "none"


def test_older_drivers_have_another_name_for_the_reasons(machine: GpuMachine) -> None:
    machine.error("nvmlDeviceGetCurrentClocksEventReasons", 13)
    machine.gpu(0, clock_reasons=0x08)
    assert judged(machine, gpu_throttle) == [(Status.WARN, "Throttled", "cuda:0")]


# --- links ------------------------------------------------------------------------------------------------------------


def test_narrow_pcie_link_is_a_warning(machine: GpuMachine) -> None:
    machine.gpu(0, pcie_width=8)
    assert judged(machine, gpu_links) == [(Status.WARN, "LinkDegraded", "cuda:0")]


@pytest.mark.parametrize(("percent", "judged_so"), [(0, False), (9, False), (10, True), (None, False)])
def test_pcie_generation_counts_only_while_the_gpu_works(
    percent: int | None, judged_so: bool, machine: GpuMachine
) -> None:
    machine.gpu(0, pcie_generation=1, utilization=percent)
    assert judged(machine, gpu_links) == ([(Status.WARN, "LinkDegraded", "cuda:0")] if judged_so else [])


def test_nvlink_that_is_down_fails_where_all_must_be_up(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=1)
    machine.gpu(0, nvlinks=[1] * 17 + [0])
    (finding,) = [item for item in look(machine, gpu_links)[0] if item.status is not Status.PASS]
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "LinkDown", "cuda:0")
    assert finding.message == "17 of 18 NVLinks are active (down: 17)"


def test_elsewhere_a_gpu_with_fewer_than_the_others_has_lost_one(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=4, instance_type=None)
    for index in range(4):
        machine.gpu(index, nvlinks=[1] * 12 + [0] * 6)
    assert judged(machine, gpu_links) == []
    machine.gpu(2, nvlinks=[1] * 11 + [0] * 7)
    assert judged(machine, gpu_links) == [(Status.FAIL, "LinkDown", "cuda:2")]


def test_a_gpu_whose_links_cannot_all_be_read_has_lost_none(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=4, instance_type=None)
    for index in range(4):
        machine.gpu(index, nvlinks=[1] * 12)
    machine.gpu(2, nvlinks=[1] * 3 + [7] + [1] * 8)
    assert judged(machine, gpu_links) == [(Status.UNKNOWN, "NoData", "cuda:2")]
    machine.gpu(2, nvlinks=[1] * 12)
    machine.state["errors"] = {"nvmlDeviceGetNvLinkState@3": 999}
    machine.gpu(3)
    assert judged(machine, gpu_links) == [(Status.UNKNOWN, "NoData", "cuda:3")]


def test_gpus_that_are_not_linked_are_in_order(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=2, instance_type="g5.12xlarge")
    machine.gpu(0, nvlinks=None, fabric=None)
    machine.gpu(1, nvlinks=[0] * 12, fabric=[0, 0])
    assert judged(machine, gpu_links) == []


def test_gpus_that_should_be_linked_and_tell_of_no_link_are_unknown(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine", count=1)
    machine.gpu(0, nvlinks=None, fabric=None)
    assert judged(machine, gpu_links) == [(Status.UNKNOWN, "NoData", "cuda:0")]


@pytest.mark.parametrize(("fabric", "fails"), [([1, 0], True), ([2, 0], True), ([3, 999], True), ([3, 0], False)])
def test_fabric_that_is_not_ready_fails(fabric: list[int], fails: bool, machine: GpuMachine) -> None:
    machine.gpu(0, fabric=fabric)
    assert judged(machine, gpu_links) == ([(Status.FAIL, "LinkDown", "cuda:0")] if fails else [])


@every(
    ("mask", "expected"),
    [
        (0b01, (Status.FAIL, "LinkDegraded")),
        (0b01_00_00, (Status.FAIL, "LinkDown")),
        (0b01_00, (Status.WARN, "LinkErrors")),
        (0b01_00_00_00, (Status.WARN, "LinkErrors")),
        (0b10_10_10_10, None),
        (0, None),
        (None, None),
    ],
)
def test_fabric_that_reports_less_bandwidth_or_an_unhealthy_route_fails(
    mask: int | None, expected: tuple[Status, str] | None, machine: GpuMachine
) -> None:
    machine.gpu(1, fabric_health=mask)
    assert judged(machine, gpu_links) == ([(*expected, "cuda:1")] if expected else [])


@pytest.mark.parametrize(
    ("rise", "expected"),
    [
        ({"nvlink_errors": [1, 0, 0, 0]}, (Status.WARN, "LinkErrors")),
        ({"nvlink_errors": [0, 1, 0, 0]}, (Status.WARN, "LinkErrors")),
        ({"nvlink_errors": [0, 0, 6001, 0]}, (Status.FAIL, "LinkErrors")),
        ({"nvlink_errors": [0, 0, 3000, 3001]}, (Status.FAIL, "LinkErrors")),
        ({"nvlink_errors": [0, 0, 6000, 0]}, None),
        ({"pcie_replays": 9}, (Status.WARN, "LinkErrors")),
        ({"pcie_replays": 8}, None),
    ],
)
def test_counters_of_links_are_judged_by_their_rise(
    rise: dict[str, Any], expected: tuple[Status, str] | None, machine: GpuMachine
) -> None:
    _, before = look(machine, gpu_links)
    machine.gpu(0, **rise)
    findings, _ = look(machine, gpu_links, before)
    assert bad(findings) == ([(*expected, "cuda:0")] if expected else [])


def test_old_errors_of_links_are_no_fault_and_counters_set_back_neither(machine: GpuMachine) -> None:
    machine.gpu(0, nvlink_errors=[9, 9, 99999, 9], pcie_replays=1000)
    findings, before = look(machine, gpu_links)
    assert bad(findings) == []
    machine.gpu(0, nvlink_errors=[0, 0, 0, 0], pcie_replays=0)
    assert bad(look(machine, gpu_links, before)[0]) == []


def test_link_that_is_up_again_does_not_bring_its_old_errors_as_new_ones(machine: GpuMachine) -> None:
    machine.gpu(0, nvlinks=[0] + [1] * 17, nvlink_errors=[9, 9, 99999, 9])
    findings, before = look(machine, gpu_links)
    assert bad(findings) == [(Status.FAIL, "LinkDown", "cuda:0")]
    machine.gpu(0, nvlinks=[1] * 18)
    findings, before = look(machine, gpu_links, before)
    assert bad(findings) == []
    machine.gpu(0, nvlink_errors=[9, 9, 199999, 9])
    assert bad(look(machine, gpu_links, before)[0]) == [(Status.FAIL, "LinkErrors", "cuda:0")]


def test_another_gpu_in_its_place_begins_anew(machine: GpuMachine) -> None:
    _, before = look(machine, gpu_links)
    other = "GPU-aaaaaaaa-1111-2222-3333-444455556666"
    machine.change(
        f"/proc/driver/nvidia/gpus/{machine.state['gpus'][0]['bdf']}/information", "GPU-00000000", other[:12]
    )
    machine.gpu(0, uuid=other, pcie_replays=1000)
    assert bad(look(machine, gpu_links, before)[0]) == []


# --- recovery ---------------------------------------------------------------------------------------------------------


@every(
    ("action", "status", "advice"),
    [
        (0, Status.PASS, None),
        (1, Status.FAIL, Action.RESET_DEVICE),
        (2, Status.FAIL, Action.REBOOT),
        (3, Status.FAIL, Action.INSPECT),
        (4, Status.FAIL, Action.RESET_DEVICE),
        (5, Status.FAIL, Action.INSPECT),
        (6, Status.FAIL, Action.RESET_DEVICE),
        (7, Status.FAIL, Action.REBOOT),
        (8, Status.WARN, Action.INSPECT),
        (None, Status.SKIP, None),
    ],
)
def test_recovery_that_the_driver_asks_for_is_a_fault_with_its_action(
    action: int | None, status: Status, advice: Action | None, machine: GpuMachine
) -> None:
    machine.gpu(1, recovery_action=action)
    findings, _ = look(machine, gpu_recovery)
    (finding,) = [item for item in findings if item.target == "cuda:1"]
    assert (finding.status, finding.action) == (status, advice)
    assert (finding.reason == "RecoveryNeeded") is (status in (Status.FAIL, Status.WARN))
    assert judged(machine, gpu_recovery) == [] or status is not Status.PASS


# --- the driver -------------------------------------------------------------------------------------------------------


def test_versions_are_told(machine: GpuMachine) -> None:
    assert look(machine, gpu_driver)[0][0].message == "driver 570.172.08, NVML 12.570.172.08, CUDA 12.8"


@pytest.mark.parametrize(("wanted", "fails"), [("570.", False), ("570.172.08", False), ("580.", True)])
def test_driver_that_is_not_the_wanted_one_fails(wanted: str, fails: bool, machine: GpuMachine) -> None:
    expected = [(Status.FAIL, "VersionMismatch", "node")] if fails else []
    assert judged(machine, gpu_driver, driver=wanted) == expected


def test_version_that_is_not_told_is_unknown(machine: GpuMachine) -> None:
    machine.error("nvmlSystemGetDriverVersion", UNKNOWN)
    assert judged(machine, gpu_driver) == [(Status.UNKNOWN, "NoData", "node")]


def test_process_that_the_driver_shows_and_proc_does_not_is_unknown(machine: GpuMachine) -> None:
    machine.gpu(1, processes=[4711])
    findings, _ = look(machine, gpu_driver)
    assert bad(findings) == [(Status.UNKNOWN, "Busy", "cuda:1")]
    assert number(findings, "gpu_processes_count").value == 1
    (machine.root / "proc/4711/fd").mkdir(parents=True)
    (machine.root / "proc/4711/fd/5").symlink_to("/dev/null")  # the number means another process here
    assert judged(machine, gpu_driver) == [(Status.UNKNOWN, "Busy", "cuda:1")]
    (machine.root / "proc/4711/fd/6").symlink_to("/dev/nvidia1")
    assert judged(machine, gpu_driver) == []


class Answers(Gpu):
    """A GPU that answers one time after the other."""

    def __init__(self, *answers: tuple[int, ...] | None) -> None:
        self._answers = iter(answers)

    def processes(self) -> tuple[int, ...] | None:
        return next(self._answers)


@pytest.mark.parametrize(
    ("answers", "hidden"), [(((4711,), (4711,)), [4711]), (((4711,), ()), []), (((4711,), None), [4711])]
)
def test_process_is_out_of_sight_until_the_driver_shows_it_no_more(
    answers: tuple[tuple[int, ...] | None, ...], hidden: list[int], machine: GpuMachine
) -> None:
    assert list_processes(machine.host, Answers(*answers)) == ((4711,), hidden)


GIB = 1 << 30


def test_memory_in_use_without_a_process_is_a_warning_and_when_it_lasts_a_fault(machine: GpuMachine) -> None:
    machine.gpu(1, used_bytes=40 * GIB)
    findings, before = look(machine, gpu_driver)
    assert bad(findings) == [(Status.WARN, "StuckMemory", "cuda:1")]
    findings, before = look(machine, gpu_driver, before)
    assert bad(findings) == [(Status.FAIL, "StuckMemory", "cuda:1")]
    machine.gpu(1, used_bytes=4 << 20)
    findings, before = look(machine, gpu_driver, before)
    assert bad(findings) == []
    machine.gpu(1, used_bytes=40 * GIB)
    assert bad(look(machine, gpu_driver, before)[0]) == [(Status.WARN, "StuckMemory", "cuda:1")]


def test_memory_in_use_without_a_process_keeps_the_next_job_off(machine: GpuMachine) -> None:
    machine.gpu(1, used_bytes=40 * GIB)
    results = run_checks("gpu_driver", tier=Tier.QUICK, accelerator="cuda", host_root=machine.root, directories=())
    assert results["gpu_driver"].status is Status.FAIL


@pytest.mark.parametrize(
    ("says", "inventory"),
    [
        ({"used_bytes": GIB}, {}),
        ({"used_bytes": None}, {}),
        ({"used_bytes": 40 * GIB}, {"holders": ["cuda:1: pid 4711 (python)"]}),
        ({"used_bytes": 40 * GIB}, {"holders": None}),
        ({"used_bytes": 40 * GIB}, {"holders": ["cuda:0: pid 4711 (python)", "7 more"]}),
    ],
)
def test_memory_that_is_held_or_small_or_of_unknown_holders_is_no_fault(
    says: dict[str, Any], inventory: dict[str, Any], machine: GpuMachine
) -> None:
    machine.gpu(1, **says)
    assert judged(machine, gpu_driver, inventory=inventory) == []


def test_memory_of_a_process_that_the_driver_shows_is_not_stuck(machine: GpuMachine) -> None:
    machine.gpu(1, used_bytes=40 * GIB, processes=[4711])
    (machine.root / "proc/4711/fd").mkdir(parents=True)
    (machine.root / "proc/4711/fd/6").symlink_to("/dev/nvidia1")
    assert judged(machine, gpu_driver) == []


def test_process_list_that_is_not_told_is_unknown(machine: GpuMachine) -> None:
    machine.gpu(0, processes=None)
    assert judged(machine, gpu_driver) == [(Status.UNKNOWN, "NoData", "cuda:0")]


# --- through the runner, and against the real module ------------------------------------------------------------------


def test_checks_run_in_a_child_on_a_machine_that_is_data(machine: GpuMachine) -> None:
    machine.gpu(1, volatile_uncorrected=3)
    names = ("gpu_memory", "gpu_throttle", "gpu_links", "gpu_driver")
    results = run_checks(*names, accelerator="cuda", host_root=machine.root, directories=())
    assert {name: result.status for name, result in results.items()} == {
        "gpu_memory": Status.FAIL,
        "gpu_throttle": Status.PASS,
        "gpu_links": Status.PASS,
        "gpu_driver": Status.PASS,
    }


def test_gpus_with_a_process_that_only_the_driver_shows_are_not_probed(machine: GpuMachine) -> None:
    machine.gpu(1, processes=[4711])
    results = run_checks(
        "gpu_links",
        "gpu_driver",
        "matmul",
        tier=Tier.QUICK,
        accelerator="cuda",
        host_root=machine.root,
        directories=(),
    )
    (finding,) = results["matmul"].findings
    assert (finding.status, finding.reason) == (Status.SKIP, "Busy")
    assert "cuda:1: the driver reports processes that are not visible here (4711)" in finding.message


def test_stand_in_has_the_names_and_codes_of_the_real_module() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    path = Path(__file__).parents[1] / "fakes/pynvml/__init__.py"
    spec = importlib.util.spec_from_file_location("stand_in", path)
    assert spec
    assert spec.loader
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    import inspect

    for name, call in vars(stand_in).items():
        if name.startswith("nvml") and callable(call):
            assert list(inspect.signature(getattr(real, name)).parameters) == list(inspect.signature(call).parameters)
    for code in (NOT_SUPPORTED, LOST, RESET_REQUIRED, 12, 18):
        assert str(real.NVMLError(code)) == str(stand_in.NVMLError(code))
        assert real.NVMLError(code).value == code
    assert real.NVML_ERROR_GPU_IS_LOST == LOST
    assert real.NVML_ERROR_RESET_REQUIRED == RESET_REQUIRED
    assert real.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN == 1
    assert real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED == 1
    assert (real.NVML_VOLATILE_ECC, real.NVML_AGGREGATE_ECC) == (0, 1)
    assert real.NVML_NVLINK_ERROR_DL_CRC_DATA == 3
    for record in ("c_nvmlGpuFabricInfo_t", "c_nvmlGpuFabricInfo_v2_t"):
        told, made = (getattr(module, record)._fields_ for module in (real, stand_in))
        assert [name for name, _ in told] == [name for name, _ in made]
    for name in ("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", "nvmlMemory_v2"):
        assert getattr(real, name) == getattr(stand_in, name)
    assert real.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT == 7
    shifts = ("DEGRADED_BW", "ROUTE_RECOVERY", "ROUTE_UNHEALTHY", "ACCESS_TIMEOUT_RECOVERY")
    assert [getattr(real, f"NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_{name}") for name in shifts] == [0, 2, 4, 6]
    assert real.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE == 1
    assert real.nvmlClocksThrottleReasonHwSlowdown == 0x08
    assert real.nvmlClocksThrottleReasonHwThermalSlowdown == 0x40
    assert real.nvmlClocksThrottleReasonHwPowerBrakeSlowdown == 0x80
    assert real.nvmlClocksThrottleReasonSwThermalSlowdown == 0x20


def test_module_is_found_by_a_child_that_starts_without_site_packages() -> None:
    """As the one that runs passive checks does. Where no driver is, the library is what is missing, not the module."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from checks.host.machine import Host\nfrom checks.host.nvml import NvmlError, opened\n"
        "try:\n    with opened(Host(None)) as nvml: print(nvml.versions())\n"
        "except NvmlError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "is not installed" not in done.stdout
    assert "libnvidia-ml.so.1 is missing" in done.stdout or "Versions(" in done.stdout


def test_place_on_the_bus_and_version_of_the_driver_are_known_without_nvml(machine: GpuMachine) -> None:
    machine.write("/sys/module/nvidia/version", "570.172.08\n")
    assert [device["bdf"] for device in cuda.find(machine.host, {})["devices"]] == ["0000:53:00.0", "0000:63:00.0"]
    assert read_identity(machine.host)["versions"]["nvidia_driver"] == "570.172.08"


def test_gpu_without_a_known_place_is_asked_for_by_its_uuid(machine: GpuMachine) -> None:
    devices = [{**device, "bdf": None} for device in cuda.find(machine.host, {})["devices"]]
    machine.gpu(1, volatile_uncorrected=1)
    items = machine.run(gpu_memory, inventory={"devices": devices})
    assert bad([item for item in items if isinstance(item, Finding)]) == [(Status.FAIL, "EccErrors", "cuda:1")]
    nothing = [{**device, "serial": None} for device in devices]
    items = machine.run(gpu_memory, inventory={"devices": nothing})
    assert {item.status for item in items if isinstance(item, Finding)} == {Status.UNKNOWN}
