"""What the Neuron runtime's words mean when several things are said at once: what hardware says counts first."""

from __future__ import annotations

import pytest

from checks.accelerators.neuron.errors import diagnose
from checks.collective.nccom.run import Ran, Step
from checks.collective.nccom.steps import judge_step
from checks.contract import Action, Finding, Status
from tests.every import every

NO_DEVICE = "2026-Nov-21 10:00:00.0768 19:19 ERROR  TDRV:tdrv_get_dev_info            No neuron device available"
NOT_STARTED = "RuntimeError: The PyTorch Neuron Runtime could not be initialized."
TAKEN = "ERROR   NRT:nrt_allocate_neuron_cores     NeuronCore(s) not available - Requested:nc1-nc1 Available:0"
ABORTED = "[MLA 0][NC 0] DMA TX engine 0 is in an abort state"


@every(
    ("before", "reason"),
    [
        (NO_DEVICE, "StartFailed"),
        ("Unable to determine Neuron Driver version. Please check aws-neuron-dkms", "MissingTool"),
        ("This Neuron Runtime (compatibility id: 7) is not compatible with the installed package", "VersionMismatch"),
        ("nrt_init failed: NRT_EXEC_HW_ERR_NC_UE", "DeviceLost"),
        ("nrt_init failed with status_code: 1201", "DeviceLost"),
        ("NRT_UNSUPPORTED_NEFF_VERSION", "VersionMismatch"),
        (TAKEN, "Busy"),
        ("some other line", "Busy"),
    ],
)
def test_runtime_that_could_not_start_means_what_was_said_before_it(before: str, reason: str) -> None:
    found = diagnose(f"{before}\n{NOT_STARTED}")
    assert found is not None
    assert found.reason == reason


@pytest.mark.parametrize("code", ["NRT_EXEC_HW_ERR_HBM_UE", "nrt_execute status=1202"])
def test_status_of_hardware_counts_before_cores_that_are_not_available(code: str) -> None:
    found = diagnose(f"{TAKEN}\n{code}")
    assert found is not None
    assert found.reason == "DeviceLost"


@pytest.mark.parametrize("text", [ABORTED, "NEURON_HW_ERR=DMA_ERROR nd-id=0", "nrt_execute status=1203"])
def test_device_whose_dma_aborted_is_reset_and_probed_again_before_it_is_replaced(text: str) -> None:
    found = diagnose(text)
    assert found is not None
    assert (found.reason, found.action) == ("DeviceLost", Action.RESET_DEVICE)
    assert "run the check again; if it aborts again" in found.remedy


# --- nccom-test -------------------------------------------------------------------------------------------------------

STEP = Step(op="all_reduce", ranks=32, dtype="fp32", sizes_bytes=(1024,), factor=4, whole=True)


def failed(*log: str) -> Finding:
    """The finding of a run that has no row and whose log of neuron-bench has these lines."""
    ran = Ran(
        step=STEP,
        returncode=1,
        output="1024  Failure running neuron-bench - log file /tmp/nccom_test_log_1.log\n1 errors found - test failed",
        report=None,
        log="/tmp/nccom_test_log_1.log",
        log_text="\n".join(log),
        seconds=1.0,
        timeout_seconds=60.0,
    )
    (finding,) = judge_step("nccom_all_reduce", ran, {}, checked=True, cut_short=False, deep=False)
    return finding


def test_busy_core_is_seen_anywhere_in_the_log_of_neuron_bench() -> None:
    finding = failed(TAKEN, *(f"neuron-bench: cleaning up {number}" for number in range(200)))
    assert (finding.status, finding.reason) == (Status.SKIP, "Busy")
    assert "NeuronCore(s) not available - Requested:nc1-nc1" in finding.message


@pytest.mark.parametrize(
    ("word", "reason"),
    [(ABORTED, "CollectiveFailed"), (NO_DEVICE, "MissingDevice"), ("Could not open the nd1", "MissingDevice")],
)
def test_failed_hardware_is_not_called_busy_because_its_cores_are_not_available(word: str, reason: str) -> None:
    finding = failed(word, TAKEN)
    assert (finding.status, finding.reason) == (Status.FAIL, reason)
