"""What each counter of a Neuron device means: how it is judged, whose fault it is, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from checks.contract import Action, Blame, Status

REPLACE_IT = "stop and start the instance, or replace it"


class Kind(NamedTuple):
    """How a counter is judged: since the load of the driver, or by what the last hours brought (`recent`)."""

    subject: str
    measurement: str
    param: str
    reason: str
    action: Action
    advice: str
    status: Status = Status.FAIL
    blame: Blame | None = None
    recent: bool = False


_ECC = ("neuron_uncorrected_errors_count", "max_uncorrected_count", "EccErrors")
_REPAIRABLE = ("neuron_repairable_errors_count", "max_repairable_count", "EccErrors")
_CORRECTED = ("neuron_corrected_errors_per_hour_count", "max_corrected_per_hour_count", "CorrectedErrors")
_HARDWARE = ("neuron_hardware_errors_count", "max_hardware_errors_count", "HardwareErrors")
_SUSPECT = ("neuron_suspect_errors_count", "max_suspect_errors_count", "HardwareErrors")
_RESET = f"reset the device and run the active checks; when it aborts again, {REPLACE_IT}"
_RELOAD = "reload the driver or reboot, which repairs it"
_WATCH = "watch whether it grows"
_OTHERS = "look at the other nodes of the job for the cause"
_EITHER = "a program can cause them as well: run the active checks"

KINDS: Mapping[str, Kind] = {
    "mem_ecc_uncorrected": Kind("uncorrectable HBM errors", *_ECC, Action.REPLACE, REPLACE_IT),
    "sram_ecc_uncorrected": Kind("uncorrectable SRAM errors", *_ECC, Action.REPLACE, REPLACE_IT),
    "mem_ecc_repairable_uncorrected": Kind("repairable HBM errors", *_REPAIRABLE, Action.REBOOT, _RELOAD),
    "hw_nc_ue_error": Kind("uncorrectable core errors", *_HARDWARE, Action.REPLACE, REPLACE_IT),
    "hw_hbm_ue_error": Kind("executions that met HBM errors", *_HARDWARE, Action.REPLACE, REPLACE_IT),
    "hw_repairable_hbm_ue_error": Kind("executions that met repairable errors", *_HARDWARE, Action.REBOOT, _RELOAD),
    "hw_dma_abort_error": Kind("DMA aborts", *_HARDWARE, Action.RESET_DEVICE, _RESET),
    "hw_error": Kind("hardware errors", *_HARDWARE, Action.INSPECT, "see the runtime's log for the kind"),
    "reset_fail_count": Kind("resets that failed", *_HARDWARE, Action.REBOOT, "reboot", Status.WARN),
    "mem_ecc_corrected": Kind(
        "corrected HBM errors an hour", *_CORRECTED, Action.INSPECT, _WATCH, Status.WARN, recent=True
    ),
    "sram_ecc_corrected": Kind(
        "corrected SRAM errors an hour", *_CORRECTED, Action.INSPECT, _WATCH, Status.WARN, recent=True
    ),
    "hw_collectives_error": Kind(
        "hangs in collectives", *_SUSPECT, Action.INSPECT, _OTHERS, Status.WARN, Blame.PATH, recent=True
    ),
    "timeout": Kind("executions timed out", *_SUSPECT, Action.INSPECT, _EITHER, Status.WARN, recent=True),
    "execute_completed_with_error": Kind(
        "executions ended with an error", *_SUSPECT, Action.INSPECT, _EITHER, Status.WARN, recent=True
    ),
}
UNKNOWN_KIND = Kind("hardware errors of a kind unknown here", *_HARDWARE, Action.INSPECT, "see the runtime's log")

# One number of the device that the driver shows at each of its cores: nsysfsmetric_inc_reset_fail_count.
_SHARED = frozenset({"reset_fail_count"})


def over_cores(name: str, counts: Sequence[int]) -> int:
    """A counter over the cores of a device."""
    return max(counts, default=0) if name in _SHARED else sum(counts)
