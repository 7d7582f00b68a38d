"""Whether an error tells of a device in trouble, or only that the device lacks what it was asked for. Pure."""

from __future__ import annotations

import re

from checks.accelerators.neuron.errors import Diagnosis, diagnose

# What CUDA says where a GPU, or the build of torch, lacks an operation; nothing has run then. Any other error of CUDA
# ends the process's use of the GPU, and the next call repeats it, whatever that call was. Source: CUDA Runtime API,
# cudaError_t; cuBLAS, cublasStatus_t.
_CUDA = re.compile(
    r"CUDA (?:driver )?error: (?!CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE)|no kernel image"
    r"|invalid device function|operation not supported)"
)
# cudaErrorECCUncorrectable, as CUDA, torch and NCCL write it. A program cannot cause it.
_ECC = re.compile(r"[^\n]*\buncorrectable ECC error encountered\b[^\n]*", re.IGNORECASE)
_BAD_MEMORY = Diagnosis("DeviceLost", None, "memory of the GPU had an error that cannot be corrected; see gpu_memory")
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|RESOURCE_EXHAUSTED", re.IGNORECASE)


def is_trouble(error: Exception) -> bool:
    """Whether the device failed, is taken, or could not be asked: to leave the work out would hide that."""
    text = str(error)
    if is_out_of_memory(error):
        return False
    found = diagnose(text)
    return _CUDA.search(text) is not None or (found is not None and found.reason != "CompileFailed")


def diagnose_cuda(text: str) -> tuple[Diagnosis, str] | None:
    """What the words of a worker say of the hardware of its GPU, and the line that says so; None: nothing."""
    found = _ECC.search(text)
    return (_BAD_MEMORY, " ".join(found[0].split())[:300]) if found else None


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was no memory for the work."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
