"""
Reads NVML, the NVIDIA Management Library: what a GPU reports about itself, as frozen records, without judgement.

NVML can hang on a broken GPU, so only checks, which the runner bounds, use it; devices are found without it.

A call that a GPU or driver does not support gives None. One that fails in another way gives None as well, and its error
is in `failed`; a GPU that is lost raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from checks.host.machine import Host
from checks.host.nvml_module import NvmlError as NvmlError
from checks.host.nvml_module import load_module
from checks.host.nvml_records import Clocks, Links, Memory, Versions, flag, text, total, whole

MAX_PARTS = 64  # of one GPU; today's have at most 8
MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS of the newest header; asking for more than there are ends the list

# nvmlReturn_t and its neighbours, by number: older releases of the module lack some of the names. Source: nvml.h.
_UNSUPPORTED = frozenset(
    {2, 3, 6, 13, 22, 25, 26}
)  # invalid argument, not supported/found, function or version missing
_LOST = {15: "it has fallen off the bus", 16: "it needs a reset", 28: "the driver does not find it"}
_UNCORRECTED, _VOLATILE, _AGGREGATE = 1, 0, 1
_TEMPERATURE_GPU, _THRESHOLD_SLOWDOWN = 0, 1
_MULTIPLE_SINGLE_BIT, _DOUBLE_BIT = 0, 1
_LINK_ERRORS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}


class GpuLostError(Exception):
    """A GPU that the driver knows and that does not answer: a fault of the GPU, not of the check."""


class Gpu:
    """One GPU of the inventory, in an open NVML."""

    def __init__(self, module: Any, target: str, handle: Any) -> None:
        self.target = target
        self._module = module
        self._handle = handle

    def memory(self) -> Memory:
        """Raises GpuLostError."""
        ask = _Asking(self._module, self._handle)
        mode = ask("ECC mode", "nvmlDeviceGetEccMode")
        rows = ask("remapped rows", "nvmlDeviceGetRemappedRows")
        rows = rows if isinstance(rows, (tuple, list)) and len(rows) == 4 else None
        counts = [
            ask("retired pages", "nvmlDeviceGetRetiredPages", cause) for cause in (_MULTIPLE_SINGLE_BIT, _DOUBLE_BIT)
        ]
        return Memory(
            ecc_enabled=flag(mode[0]) if isinstance(mode, (tuple, list)) and mode else None,
            volatile_uncorrected=whole(ask("ECC errors", "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE)),
            aggregate_uncorrected=whole(ask("ECC errors", "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _AGGREGATE)),
            remapped_rows=total([whole(rows[0]), whole(rows[1])]) if rows else None,
            remap_pending=flag(rows[2]) if rows else None,
            remap_failed=flag(rows[3]) if rows else None,
            retired_pages=total([len(pages) if isinstance(pages, (list, tuple)) else None for pages in counts]),
            retire_pending=flag(ask("pending pages", "nvmlDeviceGetRetiredPagesPendingStatus")),
            failed=ask.failed,
        )

    def clocks(self) -> Clocks:
        """Raises GpuLostError."""
        ask = _Asking(self._module, self._handle)
        # The first name came with driver 535; older drivers know the second.
        reasons = whole(ask("clock reasons", "nvmlDeviceGetCurrentClocksEventReasons"))
        if reasons is None:
            reasons = whole(ask("clock reasons", "nvmlDeviceGetCurrentClocksThrottleReasons"))
        return Clocks(
            reasons=reasons,
            temperature=whole(ask("temperature", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU)),
            slowdown_temperature=whole(
                ask("slowdown temperature", "nvmlDeviceGetTemperatureThreshold", _THRESHOLD_SLOWDOWN)
            ),
            failed=ask.failed,
        )

    def links(self) -> Links:
        """Raises GpuLostError."""
        ask = _Asking(self._module, self._handle)
        used = ask("utilization", "nvmlDeviceGetUtilizationRates")
        percent = whole(getattr(used, "gpu", None))
        active: dict[int, bool] = {}
        errors: dict[str, int] = {}
        for link in range(MAX_LINKS):
            said = ask(f"NVLink {link}", "nvmlDeviceGetNvLinkState", link)
            state = flag(said)
            if state is None:
                if said is not None:
                    ask.failed_to_say(f"NVLink {link}", said)
                break
            active[link] = state
            for name, number in _LINK_ERRORS.items() if state else ():
                count = whole(ask(f"NVLink {link} errors", "nvmlDeviceGetNvLinkErrorCounter", link, number))
                if count is not None:
                    errors[f"{name}/{link}"] = count
        state_of_fabric, status_of_fabric = ask.fabric()
        return Links(
            pcie_width=whole(ask("PCIe width", "nvmlDeviceGetCurrPcieLinkWidth")),
            pcie_width_max=whole(ask("PCIe width", "nvmlDeviceGetMaxPcieLinkWidth")),
            pcie_generation=whole(ask("PCIe generation", "nvmlDeviceGetCurrPcieLinkGeneration")),
            pcie_generation_max=whole(ask("PCIe generation", "nvmlDeviceGetMaxPcieLinkGeneration")),
            pcie_replays=whole(ask("PCIe replays", "nvmlDeviceGetPcieReplayCounter")),
            busy_ratio=None if percent is None else min(percent, 100) / 100,
            nvlink_active=active,
            nvlink_errors=errors,
            fabric_state=state_of_fabric,
            fabric_status=status_of_fabric,
            failed=ask.failed,
        )

    def processes(self) -> tuple[int, ...] | None:
        """
        Processes that compute on the GPU, by their ids as the driver counts them; None where it does not tell.

        Raises GpuLostError.
        """
        ask = _Asking(self._module, self._handle)
        found = ask("processes", "nvmlDeviceGetComputeRunningProcesses")
        if not isinstance(found, (list, tuple)):
            return None
        pids = [whole(getattr(process, "pid", None)) for process in found]
        return None if None in pids else tuple(sorted(pid for pid in pids if pid is not None))

    def count_parts(self) -> int | None:
        """
        Parts of the GPU (MIG) that this process may use: in a container those that it was given. None if not told.

        Raises GpuLostError.
        """
        ask = _Asking(self._module, self._handle)
        most = whole(ask("MIG", "nvmlDeviceGetMaxMigDeviceCount"))
        if most is None:
            return None
        name = "nvmlDeviceGetMigDeviceHandleByIndex"
        found = sum(ask("MIG", name, index) is not None for index in range(min(most, MAX_PARTS)))
        return None if ask.failed else found


class Nvml:
    """An open NVML."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def versions(self) -> Versions:
        """What software the driver and its library are."""
        ask = _Asking(self._module, None)
        number = whole(ask("CUDA version", "nvmlSystemGetCudaDriverVersion"))
        return Versions(
            driver=text(ask("driver version", "nvmlSystemGetDriverVersion")),
            nvml=text(ask("NVML version", "nvmlSystemGetNVMLVersion")),
            cuda=None if number is None else f"{number // 1000}.{number % 1000 // 10}",
            failed=ask.failed,
        )

    def gpu(self, device: Mapping[str, Any]) -> Gpu:
        """
        The GPU of an entry of the inventory: by its place on the bus, else by its UUID.

        Raises GpuLostError, and NvmlError where neither is known or the driver does not say why it has none.
        """
        target = str(device.get("target"))
        for name, member in (("nvmlDeviceGetHandleByPciBusId", "bdf"), ("nvmlDeviceGetHandleByUUID", "serial")):
            if not isinstance(device.get(member), str):
                continue
            try:
                # The module passes bytes to the library as they are, in all its releases.
                return Gpu(self._module, target, getattr(self._module, name)(device[member].encode()))
            except self._module.NVMLError as error:
                raise _translated(error, f"NVML has no {target} ({device[member]})") from None
        raise NvmlError("NoData", f"neither the place on the bus nor the UUID of {target} is known")


@contextmanager
def opened(host: Host) -> Iterator[Nvml]:
    """NVML, opened and closed again. Raises NvmlError."""
    module = load_module(host)
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        raise _not_opened(error) from None
    try:
        yield Nvml(module)
    finally:
        with suppress(module.NVMLError):  # what was read stands
            module.nvmlShutdown()


class _Asking:
    """Calls about one GPU (or about none), and what went wrong in them."""

    def __init__(self, module: Any, handle: Any) -> None:
        self._module = module
        self._first = () if handle is None else (handle,)
        self._failed: dict[str, str] = {}

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(f"{what}: {words}" for what, words in self._failed.items())

    def failed_to_say(self, what: str, said: object) -> None:
        """An answer that is none."""
        self._failed[what] = f"{said!r} means nothing"[:200]

    def __call__(self, what: str, name: str, *arguments: Any) -> Any:
        """The value of a call; None where it is not supported or fails. Raises GpuLostError."""
        call = getattr(self._module, name, None)
        if call is None:
            return None  # an older release of the module
        try:
            return call(*self._first, *arguments)
        except self._module.NVMLError as error:
            code = _code(error)
            if code in _LOST:
                raise GpuLostError(f"{_LOST[code]} (NVML, {what}: {_words(error)})") from None
            if code not in _UNSUPPORTED:
                self._failed[what] = _words(error)
            return None
        except _mismatch(self._module) as error:
            self._failed[what] = f"the module and the driver's library do not fit: {_words(error)}"
            return None

    def fabric(self) -> tuple[int | None, int | None]:
        """State and status of the GPU's part in an NVSwitch fabric; None where there is none to tell."""
        record = getattr(self._module, "c_nvmlGpuFabricInfo_t", None)
        if record is None:
            return None, None
        found = record()
        if self("fabric", "nvmlDeviceGetGpuFabricInfo", ctypes.byref(found)) is None:
            return None, None
        return whole(found.state), whole(found.status)


def _not_opened(error: Exception) -> NvmlError:
    code = _code(error)
    if code == 12:
        return NvmlError(
            "MissingTool", "libnvidia-ml.so.1 is not here: mount the driver's libraries into the container"
        )
    if code == 18:
        words = "the driver in the kernel and its libraries are of different versions: reboot, or load the driver anew"
        return NvmlError("VersionMismatch", words)
    if code == 9:  # also what NVML says where it finds no device file
        return NvmlError("NoData", "NVML reaches no driver: give the container /dev/nvidiactl, or load the driver")
    return _translated_to_nvml(error, "NVML cannot be opened")


def _translated(error: Exception, what: str) -> Exception:
    code = _code(error)
    if code in _LOST or code == 6:
        return GpuLostError(f"{what}: {_LOST.get(code, 'the driver does not find it')}")
    return _translated_to_nvml(error, what)


def _translated_to_nvml(error: Exception, what: str) -> NvmlError:
    reasons = {4: "NoPermission", 10: "Timeout", 12: "MissingTool"}
    return NvmlError(reasons.get(_code(error), "NoData"), f"{what}: {_words(error)}")


def _mismatch(module: Any) -> type[Exception]:
    """What the module raises for functions that the driver's library lacks; no class of its own in old releases."""
    found = getattr(module, "NVMLLibraryMismatchError", None)
    return found if isinstance(found, type) and issubclass(found, Exception) else _NeverError


class _NeverError(Exception):
    """Nobody raises it."""


def _code(error: Exception) -> int:
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else 999


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or f"code {_code(error)}"
