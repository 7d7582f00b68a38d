"""
What tests/gpu/first_run.sh runs in the interpreter of the probes: jobs that die, a holder of a device, and figures.

    python measure.py death NAME DEVICE    # ends as a real job would: see DEATHS
    python measure.py hold DEVICE FILE     # holds a device until standard input ends; FILE is the device's on CPUs
    python measure.py start DEVICE         # seconds of `import torch` and of the first operation on the device, as JSON
    python measure.py readings             # NVML beside nvidia-smi, field by field, as JSON

DEVICE is `cuda` or `cpu`. Needs torch, and nothing of healthd.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def device_assert(device: str) -> None:
    """An index beyond a table: the usual device-side assert."""
    import torch

    table, index = torch.zeros(4, device=device), torch.tensor([10], device=device)
    print(table[index].sum().item())


def illegal_address(device: str) -> None:
    """A kernel that writes through a null pointer."""
    _bad_kernel("*(volatile int *)16 = 1;")


def launch_failure(device: str) -> None:
    """A kernel that traps: an unspecified launch failure."""
    _bad_kernel('asm volatile("trap;");')


def _bad_kernel(statement: str) -> None:
    import torch

    kernel = torch.cuda._compile_kernel(f'extern "C" __global__ void bad(int *unused) {{ {statement} }}', "bad")
    kernel((1, 1, 1), (1, 1, 1), (torch.zeros(1, dtype=torch.int32, device="cuda"),))
    torch.cuda.synchronize()


def out_of_memory(device: str) -> None:
    """More memory than there is."""
    import torch

    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
    print(torch.ones(2**40, device=device).sum())


def killed(device: str) -> None:
    """SIGKILL while a tensor is on the device."""
    import torch

    torch.ones(16, device=device).sum().item()
    os.kill(os.getpid(), signal.SIGKILL)


def wrong_interface(device: str) -> None:
    """A process group over a network interface that does not exist."""
    import torch
    import torch.distributed as dist

    os.environ.update(NCCL_SOCKET_IFNAME="nosuch0", GLOO_SOCKET_IFNAME="nosuch0", NCCL_DEBUG="WARN")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    dist.all_reduce(torch.ones(4, device=device))


DEATHS: dict[str, Callable[[str], None]] = {
    "device_assert": device_assert,
    "illegal_address": illegal_address,
    "launch_failure": launch_failure,
    "out_of_memory": out_of_memory,
    "killed": killed,
    "wrong_interface": wrong_interface,
}


def hold(device: str, file: str) -> None:
    """Hold a device: a context and 64 MiB of it; a CPU device is held by its open file."""
    import torch

    with open(file if device == "cpu" else os.devnull):
        held = torch.ones(2**24, device=device)
        print("holding", held.numel(), flush=True)
        sys.stdin.read()


def start(device: str) -> dict[str, float]:
    """Seconds that any program spends before its first result."""
    began = time.monotonic()
    import torch

    imported = time.monotonic()
    torch.ones(16, device=device).sum().item()
    return {"import_seconds": imported - began, "context_seconds": time.monotonic() - imported}


# Field of nvidia-smi --query-gpu, and the same by NVML in the same unit.
def readings() -> list[dict[str, Any]]:
    """Each field as nvidia-smi prints it, and as NVML gives it a moment later."""
    import pynvml as nvml

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    ecc = (nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC)
    fields: dict[str, Callable[[], Any]] = {
        "name": lambda: nvml.nvmlDeviceGetName(handle),
        "serial": lambda: nvml.nvmlDeviceGetSerial(handle),
        "uuid": lambda: nvml.nvmlDeviceGetUUID(handle),
        "driver_version": nvml.nvmlSystemGetDriverVersion,
        "memory.total": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20,
        "memory.used": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used >> 20,
        "temperature.gpu": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "pcie.link.gen.current": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie.link.width.current": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "ecc.errors.uncorrected.volatile.total": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, ecc[0]
        ),
        "ecc.errors.corrected.aggregate.total": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, ecc[1]
        ),
        "clocks_event_reasons.active": lambda: hex(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
    }
    found = []
    for name, read in fields.items():
        line = ["nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader,nounits", "--id=0"]
        printed = subprocess.run(line, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
        try:
            value = read()
        except nvml.NVMLError as error:
            value = str(error)
        found.append({"field": name, "nvidia-smi": printed, "nvml": value, "same": printed == str(value)})
    return found


def main(arguments: list[str]) -> None:
    """See the module."""
    command, *rest = arguments
    if command == "death":
        DEATHS[rest[0]](rest[1])
    elif command == "hold":
        hold(*rest)
    else:
        print(json.dumps(start(rest[0]) if command == "start" else readings(), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
