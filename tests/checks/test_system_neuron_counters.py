"""Counters of Neuron devices: damage, what rises, what is set back."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.accelerators.neuron.sysfs import HARDWARE_STATUSES, NEWER, OTHER_STATUSES, REQUIRED
from checks.contract import Action, Blame, Status
from checks.system.neuron.neuron_counters import KINDS, neuron_counters, parse_components
from tests.checks.neuron_looks import SYSFS, Looks, inventory, look
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import number, worst_of

PASSES = (Status.PASS, None)
DARK = (Status.UNKNOWN, "NoData")


@pytest.fixture
def machine(tmp_path: Path) -> NeuronMachine:
    """One device, two cores."""
    return NeuronMachine(tmp_path / "machine", "trn1.2xlarge")


# --- a healthy machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["2.24.7.0", "2.28.1.0", "2.30.2.0", "2.31.7.0"])
@pytest.mark.parametrize("name", ["trn1.2xlarge", "trn2.3xlarge", "inf2.xlarge"])
def test_healthy_machine_passes_under_old_and_new_trees(name: str, driver: str, tmp_path: Path) -> None:
    findings = look(NeuronMachine(tmp_path / "machine", name, driver=driver))
    assert worst_of(findings) == PASSES
    assert (number(findings, "neuron_counters_read_count").value or 0) > 10


def test_all_files_of_a_large_machine_are_read_in_a_moment(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge", whole=True)
    begun = time.monotonic()
    (finding,) = look(machine, inventory=inventory(*range(16)))
    assert time.monotonic() - begun < 10  # it takes 5 ms
    assert "16 devices, 32 cores" in finding.message


def test_check_does_not_concern_other_accelerators(machine: NeuronMachine) -> None:
    (finding,) = machine.findings(neuron_counters)
    assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")


def test_software_errors_never_accuse_the_node(machine: NeuronMachine) -> None:
    for status in ("exec_bad_input", "execute_failed_to_queue", "execute_sw_event_error", "oob_error", "invalid_error"):
        machine.fault("exec_errors", "neuroncore:0", f"{status}=7")
    looks = Looks(machine)
    assert worst_of(looks.look()) == PASSES
    machine.fault("exec_errors", "neuroncore:0", "exec_bad_input=7")
    assert worst_of(looks.look()) == PASSES


def test_every_counter_that_is_read_is_judged() -> None:
    assert {*REQUIRED, *NEWER, *HARDWARE_STATUSES, *OTHER_STATUSES} == set(KINDS)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["2.30.2.0", "2.31.7.0"])
@pytest.mark.parametrize(
    ("counter", "action"),
    [
        ("mem_ecc_uncorrected", Action.REPLACE),
        ("sram_ecc_uncorrected", Action.REPLACE),
        ("mem_ecc_repairable_uncorrected", Action.REBOOT),
    ],
)
def test_uncorrectable_error_since_the_driver_was_loaded_fails_at_the_first_look_and_stays(
    counter: str, action: Action, driver: str, tmp_path: Path
) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.32xlarge", driver=driver)
    machine.fault("ecc", "neuron:7", f"{counter}=2")
    looks = Looks(machine, inventory=inventory(*range(16)))
    for _ in range(3):
        (finding,) = looks.look(seconds=1.0)
        assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "EccErrors", "neuron:7")
        assert finding.action is action
        assert finding.measurements[0].value == 2.0
        assert counter in finding.message


@pytest.mark.parametrize(
    ("status", "action"),
    [
        ("hw_error", Action.INSPECT),
        ("hw_nc_ue_error", Action.REPLACE),
        ("hw_hbm_ue_error", Action.REPLACE),
        ("hw_repairable_hbm_ue_error", Action.REBOOT),
        ("hw_dma_abort_error", Action.RESET_DEVICE),
    ],
)
def test_execution_that_failed_by_hardware_names_device_and_core(
    status: str, action: Action, machine: NeuronMachine
) -> None:
    machine.fault("exec_errors", "neuroncore:1", f"{status}=3")
    (finding,) = look(machine)
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "HardwareErrors", "neuron:0")
    assert finding.action is action
    assert f"({status}, core 1)" in finding.message


def test_hardware_status_of_a_newer_driver_fails_although_nobody_knows_it(machine: NeuronMachine) -> None:
    machine.write(f"{SYSFS}/neuron0/neuron_core0/stats/status/hw_link_error/total", "1\n")
    machine.write(f"{SYSFS}/neuron0/neuron_core1/stats/status/hw_link_error/total", "0\n")
    (finding,) = look(machine)
    assert (finding.status, finding.reason, finding.action) == (Status.FAIL, "HardwareErrors", Action.INSPECT)


def test_reset_that_failed_is_a_warning(machine: NeuronMachine) -> None:
    machine.write(f"{SYSFS}/neuron0/neuron_core0/stats/other_info/reset_fail_count/total", "1\n")
    (finding,) = look(machine)
    assert (finding.status, finding.reason, finding.action) == (Status.WARN, "HardwareErrors", Action.REBOOT)


def test_operator_may_allow_errors_and_the_limit_shows(machine: NeuronMachine) -> None:
    machine.fault("ecc", "neuron:0", "mem_ecc_uncorrected=2")
    assert worst_of(look(machine, max_uncorrected_count=2)) == PASSES
    (finding,) = look(machine, max_uncorrected_count=1)
    assert (finding.measurements[0].upper, finding.measurements[0].origin) == (1.0, "config")


# --- what rises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter", ["mem_ecc_corrected", "sram_ecc_corrected"])
@pytest.mark.parametrize(("count", "status"), [(100, Status.PASS), (101, Status.WARN)])
def test_corrected_errors_are_judged_by_the_hour(
    counter: str, count: int, status: Status, machine: NeuronMachine
) -> None:
    machine.fault("ecc", "neuron:0", f"{counter}=5000")  # before anybody looked
    looks = Looks(machine)
    assert worst_of(looks.look()) == PASSES
    machine.fault("ecc", "neuron:0", f"{counter}={count}")
    findings = looks.look(60.0)
    assert worst_of(findings)[0] is status
    if status is Status.WARN:
        assert findings[0].reason == "CorrectedErrors"
        assert findings[0].measurements[0].value == count


def test_corrected_errors_over_two_hours_are_half_as_many_by_the_hour_and_pass_with_time(
    machine: NeuronMachine,
) -> None:
    looks = Looks(machine)
    looks.look()
    machine.fault("ecc", "neuron:0", "mem_ecc_corrected=150")
    assert worst_of(looks.look(3500.0)) == (Status.WARN, "CorrectedErrors")
    assert worst_of(looks.look(3500.0)) == PASSES  # 77 an hour
    machine.fault("ecc", "neuron:0", "mem_ecc_corrected=300")
    assert worst_of(looks.look(1.0)) == (Status.WARN, "CorrectedErrors")
    assert worst_of(looks.look(3600.0))[0] is Status.WARN
    assert worst_of(looks.look(3600.0)) == PASSES


@pytest.mark.parametrize("status", ["timeout", "execute_completed_with_error", "hw_collectives_error"])
def test_what_a_program_or_another_node_can_cause_warns_while_it_is_new(status: str, machine: NeuronMachine) -> None:
    machine.fault("exec_errors", "neuroncore:0", f"{status}=9")
    looks = Looks(machine)
    assert worst_of(looks.look()) == PASSES  # nobody knows when these were
    machine.fault("exec_errors", "neuroncore:0", f"{status}=1")
    (finding,) = looks.look()
    assert (finding.status, finding.reason) == (Status.WARN, "HardwareErrors")
    assert finding.measurements[0].value == 1.0
    assert (finding.blame is Blame.PATH) is (status == "hw_collectives_error")
    assert worst_of(looks.look(seconds=1.0))[0] is Status.WARN  # a second look at once sees it as well
    looks.look(3600.0)
    assert worst_of(looks.look(3600.0)) == PASSES


# --- what is set back -------------------------------------------------------------------------------------------------


def test_counters_that_were_set_back_count_from_zero_and_the_damage_is_not_forgotten(machine: NeuronMachine) -> None:
    machine.fault("ecc", "neuron:0", "mem_ecc_uncorrected=3")
    looks = Looks(machine)
    assert worst_of(looks.look())[0] is Status.FAIL
    machine.fault("ecc_reset")
    for _ in range(2):
        (finding,) = looks.look()
        assert (finding.status, finding.reason, finding.target) == (Status.WARN, "EccErrors", "neuron:0")
        assert "was 3 before the counters were reset" in finding.message
    machine.fault("ecc", "neuron:0", "mem_ecc_uncorrected=1")
    (finding,) = looks.look()
    assert (finding.status, finding.measurements[0].value) == (Status.FAIL, 1.0)
    assert "1 of 1 within the last hours, reset after it reached 3" in finding.message


def test_driver_that_was_loaded_again_repairs_what_is_repairable_and_that_is_said(machine: NeuronMachine) -> None:
    machine.fault("ecc", "neuron:0", "mem_ecc_repairable_uncorrected=1")
    looks = Looks(machine)
    assert worst_of(looks.look())[0] is Status.FAIL
    machine.fault("ecc_reset")
    (finding,) = looks.look()
    assert finding.status is Status.PASS
    assert "were reset" in finding.message


def test_counter_that_one_core_does_not_tell_for_a_moment_was_not_set_back(machine: NeuronMachine) -> None:
    machine.fault("exec_errors", "neuroncore:0", "timeout=5")
    looks = Looks(machine)
    looks.look()
    leaf = f"{SYSFS}/neuron0/neuron_core0/stats/status/timeout/total"
    machine.write(leaf, "nonsense")
    assert worst_of(looks.look()) == DARK
    machine.write(leaf, "5\n")
    (finding,) = looks.look()
    assert finding.status is Status.PASS
    assert "were reset" not in finding.message


def test_corrected_errors_before_the_first_look_pass_and_are_told(machine: NeuronMachine) -> None:
    machine.fault("ecc", "neuron:0", "mem_ecc_corrected=5000")
    (finding,) = look(machine)
    assert finding.status is Status.PASS
    assert "5000 corrected errors so far" in finding.message


def load_again(machine: NeuronMachine) -> None:
    """The driver makes the directory of a device anew."""
    folder = machine.root / SYSFS.lstrip("/") / "neuron0"
    shutil.copytree(folder, folder.with_name("copy"), symlinks=True)
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def test_register_that_outlives_the_driver_has_not_counted_everything_anew(machine: NeuronMachine) -> None:
    """Counters of memory errors are the firmware's: whether loading the driver sets them back, no source says."""
    machine.fault("ecc", "neuron:0", "mem_ecc_corrected=5000")
    looks = Looks(machine)
    looks.look()
    load_again(machine)
    (finding,) = looks.look()
    assert finding.status is Status.PASS
    assert "were reset" not in finding.message


def test_driver_that_was_loaded_again_is_seen_although_the_counter_has_grown_beyond(machine: NeuronMachine) -> None:
    machine.fault("ecc", "neuron:0", "mem_ecc_corrected=10")
    looks = Looks(machine)
    looks.look()
    load_again(machine)
    machine.fault("ecc", "neuron:0", "mem_ecc_corrected=110")
    (finding,) = looks.look()
    assert finding.measurements[0].value == 120.0  # not 110


def test_evidence_of_another_boot_is_not_compared_with(machine: NeuronMachine) -> None:
    looks = Looks(machine)
    looks.look()
    machine.fault("exec_errors", "neuroncore:0", "timeout=1")
    assert worst_of(looks.look(boot_id="another")) == PASSES


# --- the firmware -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["2.30.2.0", "2.31.7.0"])
def test_unhealthy_component_is_named_with_its_device(driver: str, tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.3xlarge", driver=driver)
    machine.fault("unhealthy_component", "neuron:0", "hbm,link_efa")
    (finding,) = look(machine)
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "UnhealthyComponent", "neuron:0")
    assert "hbm, link_efa" in finding.message


def test_component_that_nobody_knows_is_unknown_beside_the_known_ones(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn2.3xlarge")
    machine.fault("unhealthy_component", "neuron:0", "sram,warp_core")
    findings = look(machine)
    assert {(finding.status, finding.reason) for finding in findings} == {(Status.FAIL, "UnhealthyComponent"), DARK}


@given(st.text(max_size=60))
def test_any_text_of_components_is_words(text: str) -> None:
    assert all(word == word.strip() and word and "," not in word for word in parse_components(text))


@pytest.mark.parametrize("text", [None, "", "\n", " , ", "none\n"])
def test_no_component_is_unhealthy_where_none_is_listed(text: str | None) -> None:
    assert parse_components(text) == []
