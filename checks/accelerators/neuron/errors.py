"""
What texts of the Neuron runtime, driver and compiler mean: pure, and known from documentation alone.

A worker fails with an exception or dies; what the runtime wrote before that is among its last words. Who hears of the
failure asks here whether the words say more than the failure does. What is not known here stays what it was.

Unverified on hardware: the texts are those that AWS documents or that users have reported, none was seen here.
"""

from __future__ import annotations

import re

from checks.accelerators import Diagnosis
from checks.contract import Action

_REPLACE = "AWS recommends stopping and starting, or terminating, the instance"
_REBOOT = "AWS recommends reloading the driver or rebooting the instance"
_BUSY = Diagnosis("Busy", None, "another process has the core; the check runs once it is free")
_COLLECTIVE = Diagnosis(
    "Timeout", Action.INSPECT, "a collective hangs; any rank may be the cause, so look at the others"
)
_HBM = Diagnosis("DeviceLost", Action.REPLACE, f"uncorrectable device memory error: {_REPLACE}")
_HBM_REPAIRABLE = Diagnosis("DeviceLost", Action.REBOOT, f"repairable device memory error: {_REBOOT}")
_CORE = Diagnosis("DeviceLost", Action.REPLACE, f"uncorrectable memory error of a core: {_REPLACE}")
# A program can cause it, and a reset of the device cures it (aws-neuron-sdk issue 1390). AWS advises to replace.
_DMA = Diagnosis(
    "DeviceLost",
    Action.RESET_DEVICE,
    f"a DMA engine aborted: reset the device and run the check again; if it aborts again, {_REPLACE}",
)
_HANG = Diagnosis("DeviceLost", Action.REPLACE, f"the core did not finish its work in time: {_REPLACE}")
_UNIT = Diagnosis("DeviceLost", Action.RESET_DEVICE, "an execution unit cannot recover: reset the device")
_GONE = Diagnosis(
    "StartFailed",
    None,
    "the runtime cannot open a device: compare neuron-ls with the instance type; in a container, check which "
    "/dev/neuron* devices it has",
)
_NO_DRIVER = Diagnosis("MissingTool", None, "the Neuron driver does not respond: install or load aws-neuronx-dkms")
_VERSION = Diagnosis(
    "VersionMismatch", None, "driver, runtime and compiler are incompatible: install those of one Neuron release"
)
_FAILED = Diagnosis(
    "CompileFailed",
    None,
    "the cache contains a failed compilation: run 'healthd warm' to compile it again",
)
_LOCKED = Diagnosis(
    "CompileFailed",
    None,
    "a compilation is waiting for a lock of the cache: if nothing else is compiling, run 'healthd warm' to clear "
    "stale locks",
)
_COMPILER = Diagnosis("CompileFailed", None, "the compiler failed: see its log, and run 'healthd warm'")

# In each list the first that matches counts. What hardware did comes before what followed from it, so that the order is
# _HARDWARE, then status codes of hardware, then _OTHERS, then codes that are left, then _GENERAL.
_HARDWARE: tuple[tuple[str, Diagnosis], ...] = (
    (r"suspected hang in collectives|missing collectives status", _COLLECTIVE),
    (r"Uncorrectable HBM memory error[^\n]*reload the neuron driver or reboot", _HBM_REPAIRABLE),
    (r"Uncorrectable HBM memory error", _HBM),
    (r"\bHBM_UNCORRECTABLE_ERROR\b", _HBM),
    (r"Uncorrectable memory error is detected|\b(?:SRAM|NC)_UNCORRECTABLE_ERROR\b", _CORE),
    (r"DMA [TR]X engine \d+ is in an abort state|\bNEURON_HW_ERR=DMA_ERROR\b", _DMA),
    (r"execution timeout \(\d+ ms\) on Neuron Device", _HANG),
    (r"Unable to determine Neuron Driver version", _NO_DRIVER),
    (
        r"No neuron device available|Could not open the nd\d+|Failed to initialize devices, error:\d+"
        r"|TDRV not initialized",
        _GONE,
    ),
)
_OTHERS: tuple[tuple[str, Diagnosis], ...] = (
    (r"compatibility id: [^\n]* is not compatible with the installed", _VERSION),
    (r"requires Neuron Driver version [\d.]+ or greater", _VERSION),
    (r"NEFF version mismatch", _VERSION),
    (r"Neuron ?Core\(s\) not available|cores busy, ret=-16", _BUSY),
    (r"Got a cached failed neff", _FAILED),
    (r"Another process must be compiling", _LOCKED),
    (r"\bNCC_[A-Z]+\d+\b|Compiler status (?:FAIL|ERROR)|neuronx-cc (?:failed|terminated)", _COMPILER),
)
# Said whatever went wrong. AWS's guide names busy cores as the cause, so it means them where nothing else is said.
_GENERAL: tuple[tuple[str, Diagnosis], ...] = ((r"PyTorch Neuron Runtime could not be initialized", _BUSY),)

_Patterns = tuple[tuple[re.Pattern[str], Diagnosis], ...]

# Codes of the runtime (nrt_status.h) that mean something by themselves.
_STATUSES: dict[int, tuple[str, Diagnosis]] = {
    6: ("HW_ERROR", _UNIT),
    10: ("UNSUPPORTED_NEFF_VERSION", _VERSION),
    101: ("EXEC_UNIT_UNRECOVERABLE", _UNIT),
    1005: ("EXEC_NC_BUSY", _BUSY),
    1200: ("EXEC_HW_ERR_COLLECTIVES", _COLLECTIVE),
    1201: ("EXEC_HW_ERR_HBM_UE", _HBM),
    1202: ("EXEC_HW_ERR_NC_UE", _CORE),
    1203: ("EXEC_HW_ERR_DMA_ABORT", _DMA),
    1205: ("EXEC_HW_ERR_REPAIRABLE_HBM_UE", _HBM_REPAIRABLE),
}
_BY_NAME = dict(_STATUSES.values())
_NAME = re.compile(r"\b(?:NRT_)?((?:EXEC|HW|UNSUPPORTED)_[A-Z_]+)\b")
# A bare number is only a status where the text says so; one or two digits say too little.
_NUMBER = re.compile(r"\b(?:nrt_)?(?:status|status_code|nrt error)\b\s*[=:]?\s*\(?(\d{3,4})\b", re.IGNORECASE)


def _compiled(texts: tuple[tuple[str, Diagnosis], ...]) -> _Patterns:
    return tuple((re.compile(text, re.IGNORECASE), found) for text, found in texts)


_PATTERNS = tuple(_compiled(texts) for texts in (_HARDWARE, _OTHERS, _GENERAL))


def diagnose(text: str) -> Diagnosis | None:
    """What the words of a worker that failed say of the cause; None where they say nothing that is known."""
    hardware, others, general = (
        next((found for pattern, found in patterns if pattern.search(text)), None) for patterns in _PATTERNS
    )
    codes = _codes(text)
    broken = next((found for found in codes if found.reason in ("DeviceLost", "Timeout")), None)
    return hardware or broken or others or next(iter(codes), None) or general


def is_hardware(text: str) -> bool:
    """Whether the words tell of a device that failed, is not there, or of a collective that hangs."""
    found = diagnose(text)
    return found is not None and found.reason in ("DeviceLost", "Timeout", "StartFailed")


def _codes(text: str) -> list[Diagnosis]:
    """What the runtime's status codes in a text mean, those by name first."""
    names = [_BY_NAME.get(match.group(1)) for match in _NAME.finditer(text)]
    numbers = [_STATUSES.get(int(match.group(1))) for match in _NUMBER.finditer(text)]
    return [found for found in names if found] + [status[1] for status in numbers if status]


def telling_line(text: str) -> str:
    """The line of somebody's words that `diagnose` went by, shortened; empty where there is none."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    wanted = diagnose(text)
    if wanted is None:
        return ""
    return next((line[:300] for line in lines if diagnose(line) == wanted), "")
