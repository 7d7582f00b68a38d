"""
A stand-in for the module of nvidia-ml-py, as far as `checks.host.nvml` goes: same names, same errors, same shapes.

It is copied into a machine that is a directory (`python/pynvml`) and reads what GPUs say from `nvml.json` there, at
each call: `{"driver", "nvml", "cuda", "gpus": [{"bdf", "uuid", NAME: VALUE, ...}], "errors": {CALL: CODE}}`. What a GPU
has no value for is not supported. `errors` names a call (`nvmlDeviceGetEccMode`), a call and a GPU
(`nvmlDeviceGetEccMode@0`) or all calls of a GPU (`*@0`), and the code that it ends with.
"""
# ruff: noqa: N802, N803  (names of the library)

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

NVML_SUCCESS = 0
_NAMES = {
    1: "Uninitialized", 2: "Invalid Argument", 3: "Not Supported", 4: "Insufficient Permissions", 6: "Not Found",
    9: "Driver Not Loaded", 10: "Timeout", 12: "NVML Shared Library Not Found", 13: "Function Not Found",
    15: "GPU is lost", 16: "GPU requires restart", 17: "The operating system has blocked the request.",
    18: "RM has detected an NVML/RM version mismatch.", 28: "GPU not found", 999: "Unknown Error",
}  # fmt: skip
_STATE = Path(__file__).parents[2] / "nvml.json"
_open = 0


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _NAMES.get(self.value, f"NVML Error with code {self.value}")


class NVMLLibraryMismatchError(Exception):
    pass


class c_nvmlGpuFabricInfo_t(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    ]


class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):  # noqa: N801
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
        ("healthMask", ctypes.c_uint32),
    ]


NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
nvmlMemory_v2 = 0x02000028  # noqa: N816


class _Record:
    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


class _Handle:
    def __init__(self, index: int) -> None:
        self.index = index


def _state(call: str, index: int | None = None) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(_STATE.read_text())
    errors = state.get("errors", {})
    code = errors.get(call, errors.get(f"{call}@{index}", errors.get(f"*@{index}")))
    if code is not None:
        raise NVMLError(code)
    if not _open and call != "nvmlInit":
        raise NVMLError(1)
    return state


def _of(handle: _Handle, call: str, name: str) -> Any:
    value = _state(call, handle.index)["gpus"][handle.index].get(name)
    if value is None:
        raise NVMLError(3)
    return value


def nvmlInit() -> None:
    global _open
    _state("nvmlInit")
    _open += 1


def nvmlShutdown() -> None:
    global _open
    _state("nvmlShutdown")
    _open -= 1


def nvmlSystemGetDriverVersion() -> str:
    return str(_state("nvmlSystemGetDriverVersion")["driver"])


def nvmlSystemGetNVMLVersion() -> str:
    return str(_state("nvmlSystemGetNVMLVersion")["nvml"])


def nvmlSystemGetCudaDriverVersion() -> int:
    return int(_state("nvmlSystemGetCudaDriverVersion")["cuda"])


def nvmlDeviceGetHandleByPciBusId(pciBusId: bytes) -> _Handle:
    return _find("nvmlDeviceGetHandleByPciBusId", "bdf", pciBusId)


def nvmlDeviceGetHandleByUUID(uuid: bytes) -> _Handle:
    return _find("nvmlDeviceGetHandleByUUID", "uuid", uuid)


def _find(call: str, name: str, wanted: bytes) -> _Handle:
    assert isinstance(wanted, bytes)  # what the library takes
    gpus = _state(call)["gpus"]
    for index, gpu in enumerate(gpus):
        if gpu[name] == wanted.decode():
            _state(call, index)
            return _Handle(index)
    raise NVMLError(6)


def nvmlDeviceGetEccMode(handle: _Handle) -> list[int]:
    mode = _of(handle, "nvmlDeviceGetEccMode", "ecc")
    return [mode, mode]


def nvmlDeviceGetTotalEccErrors(handle: _Handle, errorType: int, counterType: int) -> int:
    assert errorType == 1
    name = ("volatile_uncorrected", "aggregate_uncorrected")[counterType]
    return int(_of(handle, "nvmlDeviceGetTotalEccErrors", name))


def nvmlDeviceGetRemappedRows(device: _Handle) -> tuple[int, int, int, int]:
    return tuple(_of(device, "nvmlDeviceGetRemappedRows", "remapped_rows"))


def nvmlDeviceGetRetiredPages(device: _Handle, sourceFilter: int) -> list[int]:
    return list(range(_of(device, "nvmlDeviceGetRetiredPages", "retired_pages")[sourceFilter]))


def nvmlDeviceGetRetiredPagesPendingStatus(device: _Handle) -> int:
    return int(_of(device, "nvmlDeviceGetRetiredPagesPendingStatus", "retire_pending"))


def nvmlDeviceGetCurrentClocksEventReasons(handle: _Handle) -> int:
    return int(_of(handle, "nvmlDeviceGetCurrentClocksEventReasons", "clock_reasons"))


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: _Handle) -> int:
    return int(_of(handle, "nvmlDeviceGetCurrentClocksThrottleReasons", "clock_reasons"))


def nvmlDeviceGetTemperature(handle: _Handle, sensor: int) -> int:
    assert sensor == 0
    return int(_of(handle, "nvmlDeviceGetTemperature", "temperature"))


def nvmlDeviceGetTemperatureThreshold(handle: _Handle, threshold: int) -> int:
    assert threshold == 1
    return int(_of(handle, "nvmlDeviceGetTemperatureThreshold", "slowdown_temperature"))


def nvmlDeviceGetUtilizationRates(handle: _Handle) -> _Record:
    return _Record(gpu=_of(handle, "nvmlDeviceGetUtilizationRates", "utilization"), memory=0)


def nvmlDeviceGetCurrPcieLinkWidth(handle: _Handle) -> int:
    return int(_of(handle, "nvmlDeviceGetCurrPcieLinkWidth", "pcie_width"))


def nvmlDeviceGetMaxPcieLinkWidth(handle: _Handle) -> int:
    return int(_of(handle, "nvmlDeviceGetMaxPcieLinkWidth", "pcie_width_max"))


def nvmlDeviceGetCurrPcieLinkGeneration(handle: _Handle) -> int:
    return int(_of(handle, "nvmlDeviceGetCurrPcieLinkGeneration", "pcie_generation"))


def nvmlDeviceGetMaxPcieLinkGeneration(handle: _Handle) -> int:
    return int(_of(handle, "nvmlDeviceGetMaxPcieLinkGeneration", "pcie_generation_max"))


def nvmlDeviceGetPcieReplayCounter(handle: _Handle) -> int:
    return int(_of(handle, "nvmlDeviceGetPcieReplayCounter", "pcie_replays"))


def nvmlDeviceGetNvLinkState(device: _Handle, link: int) -> int:
    links = _of(device, "nvmlDeviceGetNvLinkState", "nvlinks")
    if link >= len(links):
        raise NVMLError(2)
    return int(links[link])


def nvmlDeviceGetNvLinkErrorCounter(device: _Handle, link: int, counter: int) -> int:
    return int(_of(device, "nvmlDeviceGetNvLinkErrorCounter", "nvlink_errors")[counter]) if link == 0 else 0


def nvmlDeviceGetMaxMigDeviceCount(device: _Handle) -> int:
    _state("nvmlDeviceGetMaxMigDeviceCount", device.index)
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(device: _Handle, index: int) -> _Handle:
    if index not in _of(device, "nvmlDeviceGetMigDeviceHandleByIndex", "parts"):
        raise NVMLError(6)
    return _Handle(device.index)


def nvmlDeviceGetGpuFabricInfo(device: _Handle, gpuFabricInfo: Any) -> int:
    state, status = _of(device, "nvmlDeviceGetGpuFabricInfo", "fabric")
    found = gpuFabricInfo._obj
    found.state, found.status = state, status
    return NVML_SUCCESS


def nvmlDeviceGetGpuFabricInfoV(device: _Handle, gpuFabricInfo: Any) -> int:
    mask = _of(device, "nvmlDeviceGetGpuFabricInfoV", "fabric_health")
    nvmlDeviceGetGpuFabricInfo(device, gpuFabricInfo)
    gpuFabricInfo._obj.healthMask = mask
    return NVML_SUCCESS


def nvmlDeviceGetFieldValues(handle: _Handle, fieldIds: list[int]) -> list[_Record]:
    assert fieldIds == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    action = _state("nvmlDeviceGetFieldValues", handle.index)["gpus"][handle.index].get("recovery_action")
    said = _Record(uiVal=0 if action is None else action)
    return [_Record(nvmlReturn=3 if action is None else NVML_SUCCESS, value=said)]


def nvmlDeviceGetMemoryInfo(handle: _Handle, version: int | None = None) -> _Record:
    assert version == nvmlMemory_v2
    used = _of(handle, "nvmlDeviceGetMemoryInfo", "used_bytes")
    return _Record(total=80 << 30, reserved=600 << 20, free=(80 << 30) - used, used=used)


def nvmlDeviceGetComputeRunningProcesses(handle: _Handle) -> list[_Record]:
    pids = _of(handle, "nvmlDeviceGetComputeRunningProcesses", "processes")
    return [_Record(pid=pid, usedGpuMemory=1 << 30, gpuInstanceId=0xFFFFFFFF) for pid in pids]
