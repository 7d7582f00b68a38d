"""
Reads NVML, the NVIDIA Management Library: what a GPU reports about itself, as frozen records, without judgement.

NVML can hang on a broken GPU, so only checks, which the runner bounds, use it; devices are found without it.

A call that a GPU or driver does not support gives None. One that fails in another way gives None as well, and its error
is in `failed`; a GPU that is lost raises.

Also here:

- imports nvidia-ml-py, which is optional, when a check asks for it: from the interpreter of the probes, else from
  beside healthd, so that the extra `nvidia` of the service is enough and an interpreter of jobs need not be
  changed;
- frozen records of what NVML reports about a GPU, and the conversion of its values. `checks.host.nvml` reads them.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.host.machine import Host

PACKAGE = "nvidia-ml-py"

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
_GPU_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, of drivers from r570 on
_LINK_ERRORS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}


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


def load_module(host: Host) -> Any:
    """The module. Raises NvmlError MissingTool with the remedy."""
    missing = NvmlError(
        "MissingTool",
        f"{PACKAGE} is installed neither beside healthd nor for {sys.executable}: install the extra nvidia of "
        "healthd (pip install '.[nvidia]' in a clone), or disable the checks gpu_*",
    )
    if host.root is None:
        try:
            return _import_installed()
        except ImportError:
            if (beside := _import_beside_healthd()) is not None:
                return beside
            raise missing from None
    path = host.path("/python/pynvml/__init__.py")
    spec = importlib.util.spec_from_file_location("pynvml_of_the_machine", path)
    if spec is None or spec.loader is None or not host.exists("/python/pynvml/__init__.py"):
        raise missing
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        raise NvmlError("NoData", f"neither the bus address nor the UUID of {target} is known")


class NvmlError(Exception):
    """
    NVML as a whole cannot be asked.

    `reason` is a code of `checks.reasons`: MissingTool, NoPermission, VersionMismatch, Timeout or NoData.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The driver's, the library's, and the newest CUDA that the driver can (`12.4`)."""

    driver: str | None
    nvml: str | None
    cuda: str | None
    failed: tuple[str, ...]


def text(value: object) -> str | None:
    """What is no text is None. The module gives bytes in old releases."""
    said = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return (said.strip() or None) if isinstance(said, str) else None


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
        state_of_fabric, status_of_fabric, health_of_fabric = ask.fabric()
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
            fabric_health=health_of_fabric,
            failed=ask.failed,
        )

    def recovery(self) -> Recovery:
        """Raises GpuLostError."""
        ask = _Asking(self._module, self._handle)
        found = ask("recovery action", "nvmlDeviceGetFieldValues", [_GPU_RECOVERY_ACTION])
        try:
            field = found[0]
            # Each field has a result of its own: an older driver does not know this one.
            action = whole(field.value.uiVal) if field.nvmlReturn == 0 else None
            if field.nvmlReturn not in (0, *_UNSUPPORTED):
                ask.failed_to_say("recovery action", field.nvmlReturn)
        except (TypeError, IndexError, AttributeError):
            action = None
        return Recovery(action=action, failed=ask.failed)

    def usage(self) -> Usage:
        """Raises GpuLostError."""
        ask = _Asking(self._module, self._handle)
        before = self.processes()
        # The first form counts what the driver keeps for itself as used.
        version = getattr(self._module, "nvmlMemory_v2", None)
        found = None if version is None else ask("memory", "nvmlDeviceGetMemoryInfo", version)
        # What computed at one of both times may have had the memory meanwhile.
        processes = before or self.processes()
        return Usage(processes=processes, used_bytes=whole(getattr(found, "used", None)))

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


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Errors of the memory."""

    ecc_enabled: bool | None
    """None where the GPU does not report it; so are the other numbers."""
    volatile_uncorrected: int | None
    """Uncorrected ECC errors since the last reset."""
    aggregate_uncorrected: int | None
    """Uncorrected ECC errors over the life of the GPU."""
    remapped_rows: int | None
    """Rows that were remapped, for correctable and uncorrectable errors."""
    remap_pending: bool | None
    """A row is remapped at the next reset."""
    remap_failed: bool | None
    """A remapping has failed."""
    retired_pages: int | None
    """Pages that were retired, on GPUs without row remapping."""
    retire_pending: bool | None
    """A page is retired at the next reset."""
    failed: tuple[str, ...]
    """Calls that failed, each with its error."""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Why clocks are what they are (a bit mask, nvmlClocksEventReasons) and how hot the GPU is, in degrees Celsius."""

    reasons: int | None
    temperature: int | None
    slowdown_temperature: int | None
    failed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The state of PCIe, NVLink and the NVSwitch fabric."""

    pcie_width: int | None
    """Lanes in use; None where the GPU does not report it; so are the other numbers."""
    pcie_width_max: int | None
    """The most lanes that the GPU and its slot support."""
    pcie_generation: int | None
    """The present generation; an idle GPU lowers it to save power."""
    pcie_generation_max: int | None
    """The highest generation that the GPU and its slot support."""
    pcie_replays: int | None
    """Replays, as the driver counts them."""
    busy_ratio: float | None
    """Which part of the last moment the GPU worked."""
    nvlink_active: Mapping[int, bool]
    """Whether each link is active, by its number."""
    nvlink_errors: Mapping[str, int]
    """Errors of each active link since the driver was loaded, by kind and link: `replay/3`."""
    fabric_state: int | None
    """0 (no fabric), 1 (not started), 2 (in progress) or 3 (completed)."""
    fabric_status: int | None
    """The result of joining the fabric, an nvmlReturn_t."""
    fabric_health: int | None
    """The health of the GPU's part in the fabric, a mask (NVML_GPU_FABRIC_HEALTH_MASK_...)."""
    failed: tuple[str, ...]
    """Calls that failed, each with its error."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What the driver says must be done before the GPU is used again."""

    action: int | None
    """An nvmlDeviceGpuRecoveryAction_t: 0 for nothing; None where the driver does not report it."""
    failed: tuple[str, ...]
    """Calls that failed, each with its error."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Who computes on the GPU, and how much memory is in use."""

    processes: tuple[int, ...] | None
    """By their ids as the driver counts them; None where it does not report them."""
    used_bytes: int | None
    """Memory that something has allocated, without the driver's own reserve; None where it is not reported."""


def flag(value: object) -> bool | None:
    """Of 0 and 1; None for anything else."""
    return None if (number := whole(value)) is None or number > 1 else bool(number)


def whole(value: object) -> int | None:
    """A count; None for what is none. All ones is how NVML says "not available"."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        return None
    return value


def total(counts: Sequence[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


class GpuLostError(Exception):
    """A GPU that the driver knows and that does not answer: a fault of the GPU, not of the check."""


def _import_installed() -> Any:
    """The module from site-packages, without which the child of the passive checks starts (-S). Raises ImportError."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        if not sys.flags.no_site:
            raise
    import site

    site.main()  # what Python does at its start without -S; a virtual environment shows itself here
    importlib.invalidate_caches()
    return importlib.import_module("pynvml")


def _import_beside_healthd() -> Any:
    """
    The module from the site-packages that healthd itself is installed in, None where it is not there.

    It is one file of pure Python, so that any interpreter can load it. A wheel has this file in
    `healthd/bundled/checks/host`.
    """
    folder = Path(__file__).resolve().parent
    if folder.parts[-4:] != ("healthd", "bundled", "checks", "host"):
        return None
    path = folder.parents[3] / "pynvml.py"
    spec = importlib.util.spec_from_file_location("pynvml", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module  # where it looks for itself
    spec.loader.exec_module(module)
    return module


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
        self._failed[what] = f"{said!r} is not a valid value"[:200]

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
            self._failed[what] = f"the module and the driver's library are incompatible: {_words(error)}"
            return None

    def fabric(self) -> tuple[int | None, int | None, int | None]:
        """State, status and health of the GPU's part in an NVSwitch fabric; None where there is none to tell."""
        for form, call in (
            ("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"),
            ("c_nvmlGpuFabricInfo_t", "nvmlDeviceGetGpuFabricInfo"),
        ):
            record = getattr(self._module, form, None)
            if record is None:
                continue
            found = record()
            if self("fabric", call, ctypes.byref(found)) is not None:
                return whole(found.state), whole(found.status), whole(getattr(found, "healthMask", None))
        return None, None, None


def _not_opened(error: Exception) -> NvmlError:
    code = _code(error)
    if code == 12:
        return NvmlError("MissingTool", "libnvidia-ml.so.1 is missing: mount the driver's libraries into the container")
    if code == 18:
        words = "the kernel driver and its libraries have different versions: reboot, or reload the driver"
        return NvmlError("VersionMismatch", words)
    if code == 9:  # also what NVML says where it finds no device file
        return NvmlError("NoData", "NVML finds no driver: give the container /dev/nvidiactl, or load the driver")
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
