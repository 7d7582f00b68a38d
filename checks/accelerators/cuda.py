"""
NVIDIA GPUs: found and seen held through /proc alone, bound by UUID before torch is imported.

Neither nvidia-smi nor NVML is asked to find devices: both can hang on a sick GPU, and not every
interpreter has them.
What /proc does not say (memory, cores) is None here; memory is asked of the device once a worker is bound to it.

Unverified: everything from `bind` on has not run on a GPU yet (the tests marked `gpu` do), nor has NCCL between
several. `find` and `holders` are tested on trees of the shape that the driver's documentation and source give.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks.accelerators import Descriptor, DeviceMissingError, Diagnosis, Tool
from checks.accelerators.holding import bounded, find_holders, may_miss
from checks.contract import Device
from checks.host.container import has_own_dev, in_container
from checks.host.efa import count_efa
from checks.host.machine import Host, HostError
from checks.host.nvml import GpuLostError, NvmlError, opened

# What CUDA says where a GPU, or the build of torch, lacks an operation; nothing has run then. Any other error of CUDA
# ends the process's use of the GPU, and the next call repeats it, whatever that call was. Source: CUDA Runtime API,
# cudaError_t; cuBLAS, cublasStatus_t.
_TROUBLE = re.compile(
    r"CUDA (?:driver )?error: (?!CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE)|no kernel image"
    r"|invalid device function|operation not supported)"
)
# cudaErrorECCUncorrectable and cudaErrorNvlinkUncorrectable, as CUDA, torch and NCCL write them. A program cannot cause
# them.
_HARDWARE = tuple(
    (re.compile(rf"[^\n]*\b{words}\b[^\n]*", re.IGNORECASE), Diagnosis("DeviceLost", None, remedy))
    for words, remedy in (
        (
            "uncorrectable ECC error encountered",
            "uncorrectable memory error of the GPU; see gpu_memory",
        ),
        (
            "uncorrectable NVLink error detected",
            "uncorrectable NVLink error, caused by this GPU or by its peer on the link; see gpu_links",
        ),
    )
)
# What a job sets that would let a probe compute with less than it says: TF32 for fp32.
_DROPPED = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")

_FOLDER = "/proc/driver/nvidia/gpus"
_BUS = "/sys/bus/pci/devices"
_SERIAL = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

# They keep GPUs open, some for as long as the machine is up, and run nothing on them; the device plugin and the feature
# discovery are those of Kubernetes. The kernel cuts names at 15 letters.
_CARETAKERS = frozenset(
    {
        "nvidia-persiste",
        "nv-hostengine",
        "dcgm-exporter",
        "dcgm",
        "nv-fabricmanage",
        "nvidia-device-p",
        "gpu-feature-dis",
        "nvidia-smi",
    }
)
_GIVE_ONE = "give the container a single MIG partition (with nvidia-ml-py, which counts them), "


def _diagnose(text: str) -> tuple[Diagnosis, str] | None:
    """What the words of a worker say of the hardware of its GPU, and the line that says so; None: nothing."""
    for pattern, diagnosis in _HARDWARE:
        found = pattern.search(text)
        if found is not None:
            return diagnosis, " ".join(found[0].split())[:300]
    return None


def _tells_of_trouble(text: str) -> bool:
    return _TROUBLE.search(text) is not None


def prepare_fork() -> None:
    """
    Import torch, for a process that is forked, and nothing that asks CUDA.

    CUDA may not be used before a fork and after it. The import does not use it: the driver is opened, and
    CUDA_VISIBLE_DEVICES is read, when the worker first counts its devices (torch, notes on multiprocessing).
    """
    for name in _DROPPED:
        os.environ.pop(name, None)
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("the import of torch has opened CUDA")


DESCRIPTOR = Descriptor(
    name="cuda",
    detect_order=1,
    speed_versions=("torch", "nvidia_driver"),
    version_files={"nvidia_driver": "/sys/module/nvidia/version"},  # `gpu_driver` compares its library
    device_files="/dev/nvidia",
    pjrt_clients=("CUDA", "GPU"),
    scaled_products=("float8_e4m3fn",),
    prepare_fork=prepare_fork,
    holders_check="gpu_driver",
    kubernetes_resources=("nvidia.com/",),
    tools={"nvidia-smi": "install the NVIDIA driver's utilities"},
    python_packages=("nvidia-ml-py",),
    system_packages=("nvidia-driver*",),
    kernel_modules=("nvidia",),
    kernel_words=r"nvidia|nvrm|\bxid\b",
    diagnose=_diagnose,
    tells_of_trouble=_tells_of_trouble,
    support_tools=(Tool(("nvidia-smi", "-q")),),
)


def present(host: Host) -> bool:
    """Whether NVIDIA's driver shows a GPU or cannot be asked whether it does, or a GPU waits for its driver."""
    try:
        return bool(host.glob(_FOLDER, "*")) or bool(_without_driver(host))
    except HostError:
        return True


def _without_driver(host: Host) -> list[str]:
    """
    Bus addresses of NVIDIA's GPUs (3D and VGA controllers) that no driver has.

    A GPU that another driver has, as vfio-pci for a virtual machine, is not for the jobs of this host. In a container
    the bus shows the GPUs of the whole machine, and their drivers.
    """
    found = []
    for folder in host.glob(_BUS, "*"):
        try:
            ours = host.read(f"{folder}/vendor", max_bytes=32).strip() == "0x10de"
            is_gpu = ours and host.read(f"{folder}/class", max_bytes=32).startswith(("0x0302", "0x0300"))
        except HostError:  # it was taken away meanwhile
            continue
        address = folder.rpartition("/")[2]
        # A recording may lack the link of a GPU that the driver shows.
        if is_gpu and not host.exists(f"{folder}/driver") and not host.exists(f"{_FOLDER}/{address}"):
            found.append(address.lower())
    return found


def find(host: Host, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    The inventory, in the order of the bus, which is that of CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID. No options.

    The serial of a device is its UUID: None until the driver has started the GPU for the first time. GPUs that the
    administrator has excluded from the driver's use are no devices, nor are those that a container was not given:
    `not_given` has their bus addresses. `without_driver` has those of GPUs that no driver has.
    """
    read = [(folder.rpartition("/")[2], _read(host, folder)) for folder in sorted(host.glob(_FOLDER, "*"))]
    gpus = _given(host, [(place, gpu) for place, gpu in read if gpu is not None])
    given = {place for place, _ in gpus}
    devices = [
        {
            "target": f"cuda:{index}",
            "kind": gpu.get("model") or "NVIDIA GPU",
            "serial": gpu["gpu uuid"] if _SERIAL.fullmatch(gpu.get("gpu uuid", "")) else None,
            "cores": None,
            "memory_bytes": None,
            "minor": int(gpu["device minor"]) if gpu.get("device minor", "").isdecimal() else None,
            "bdf": place.lower(),  # with domain: 0000:10:1c.0
            "file": host.inode(f"/sys/bus/pci/devices/{place.lower()}"),
        }
        for index, (place, gpu) in enumerate(gpus)
    ]
    return {
        "accelerator": "cuda",
        "device_count": len(devices),
        "core_count": None,
        "memory_bytes": None,
        "efa_count": count_efa(host),
        "devices": devices,
        "not_given": [place.lower() for place, _ in read if place not in given],
        "without_driver": _without_driver(host),
    }


def holders(host: Host, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> list[str] | None:
    """
    Who has /dev/nvidiaN open, but for the daemons that look after GPUs. Options: `ignore_pids`, `in_job`.

    A process that only has /dev/nvidiactl open asks after the GPUs and holds none. None where a device has no known
    file, or a process may not be looked into, or may be out of sight.
    """
    if any(device.get("minor") is None for device in inventory["devices"]):
        return None
    files = {device["target"]: Path(f"/dev/nvidia{device['minor']}") for device in inventory["devices"]}
    ours = {os.getpid(), *(int(pid) for pid in options.get("ignore_pids", ()))}
    found = find_holders(
        Path(host.path("/proc")),
        files,
        ours,
        blind=may_miss(host, options),
        is_onlooker=lambda pid, command: command in _CARETAKERS,
    )
    return None if found is None else bounded(found)


@contextmanager
def hold(target: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Nothing to do: a process that uses the device has its file open."""
    yield


def bind(target: str, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> CudaDevice:
    """
    Show this process one GPU alone, then import torch. See `Accelerator.bind`.

    Raises RuntimeError where this torch cannot use the GPU, which may be torch's fault: no node is blamed for it; and
    where the GPU is partitioned (MIG), because what is tested would be its first part alone. A container may use the
    part that it was given: the one that NVIDIA_VISIBLE_DEVICES names, or the only one that NVML shows it.
    """
    devices = {str(device["target"]): (index, device) for index, device in enumerate(inventory["devices"])}
    if target not in devices:
        raise DeviceMissingError(f"no such device: {target}; this node has {', '.join(devices) or 'none'}")
    index, device = devices[target]
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    container = in_container(Host(None))
    part = _named_part(os.environ) if container and len(devices) == 1 else None  # of several: which has it?
    os.environ["CUDA_VISIBLE_DEVICES"] = part or str(device.get("serial") or index)
    for name in _DROPPED:
        os.environ.pop(name, None)
    import torch

    if torch.version.cuda is None:
        raise RuntimeError(
            f"this torch ({torch.__version__}) is built without CUDA; set python under [probe] to an environment "
            "whose torch has CUDA"
        )
    count = torch.cuda.device_count()
    if count != 1:
        raise RuntimeError(
            f"CUDA shows {count} devices for CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} "
            f"instead of 1; compare the driver with torch's CUDA {torch.version.cuda}, and see nvidia-smi"
        )
    name = torch.cuda.get_device_name(0)
    if " MIG " in name and part is None and not (container and _count_parts(device) == 1):
        raise RuntimeError(
            f"the GPU is partitioned (MIG), and CUDA shows only one partition ({name}), so others may go untested; "
            f"turn MIG off (nvidia-smi -mig 0), {_GIVE_ONE if container else ''}or disable the checks that run on "
            "devices"
        )
    # The bound of `matmul` supposes that sums are kept in fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # Steps of users may have convolutions: the same each time, and in fp32.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_device(0)
    major, minor = torch.cuda.get_device_capability(0)
    kind = f"{name} | sm_{major}{minor}"
    loaded = f"cuDNN {torch.backends.cudnn.version()} | cuBLAS {_cublas_version() or 'unknown'}"
    key = f"cuda | {kind} | torch {torch.__version__} | CUDA {torch.version.cuda} | {loaded}"
    return CudaDevice(target=target, key=key, torch=torch)


def _named_part(environment: Mapping[str, str]) -> str | None:
    """The part of a GPU that this container was given by name; None where it is none, or more than one."""
    names = environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    return names[0] if len(names) == 1 and names[0].startswith("MIG-") else None


def _count_parts(device: Mapping[str, Any]) -> int | None:
    """How many parts of the GPU NVML shows; None where it does not tell."""
    try:
        with opened(Host(None)) as nvml:
            return nvml.gpu(device).count_parts()
    except (NvmlError, GpuLostError):
        return None


def _cublas_version() -> str | None:
    """
    Of the cuBLAS that torch has loaded, which need not be the one that it was built with; None where it does not tell.

    torch does not report it. Asking for properties of the library needs no GPU.
    """
    import ctypes

    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        paths = (line.split(maxsplit=5)[5] for line in lines if "/libcublas.so" in line)
        ask = ctypes.CDLL(next(paths)).cublasGetProperty
        numbers = []
        for part in range(3):  # major, minor, patch
            number = ctypes.c_int()
            if ask(ctypes.c_int(part), ctypes.byref(number)) != 0:
                return None
            numbers.append(str(number.value))
    except (OSError, StopIteration, AttributeError):
        return None
    return ".".join(numbers)


class CudaDevice:
    """The `Device` of the contract on one GPU, which is `cuda:0` to its process whatever its target is."""

    collective_backend = "nccl"
    matmul_rows = 4096  # fills a GPU for a millisecond or some
    members: tuple[Device, ...] = ()
    wide_sums = ("fp16",)  # cuBLAS keeps these in fp32, once reduced precision is off (see `bind`)

    def __init__(self, *, target: str, key: str, torch: Any) -> None:
        self.target = target
        self.key = key
        self.torch = torch
        self.torch_device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize(self.torch_device)

    def available_bytes(self) -> int | None:
        """What the driver would still give, and what torch keeps of what it has freed."""
        free, _ = self.torch.cuda.mem_get_info(self.torch_device)
        kept = self.torch.cuda.memory_reserved(self.torch_device) - self.torch.cuda.memory_allocated(self.torch_device)
        return int(free) + int(kept)

    def read(self, tensor: Any) -> Any:
        """A copy on the host; it waits for what is under way."""
        return tensor.detach().cpu().contiguous()

    def measure(self, operation: Callable[[], object], *, repeats: int, warmup: int) -> list[float]:
        """
        See `Device.measure`. The time between two events on the GPU.

        All runs are given to the GPU before the first is waited for: it would else idle after each event until Python
        has started the operation, and that is no time of the GPU.
        """
        for _ in range(warmup):
            operation()
        pairs = []
        for _ in range(repeats):
            start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            operation()
            end.record()
            pairs.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]  # milliseconds


def _given(host: Host, gpus: list[tuple[str, dict[str, str]]]) -> list[tuple[str, dict[str, str]]]:
    """
    In a container with a /dev of its own those whose files it has; all of them where it has none.

    /proc/driver/nvidia shows a container all GPUs of its host, unless its runtime hides some (NVIDIA's does in its
    `legacy` mode, and not where devices are given by CDI).
    """
    if not has_own_dev(host):
        return gpus
    minors = [gpu.get("device minor", "") for _, gpu in gpus]
    files = [minor.isdecimal() and host.exists(f"/dev/nvidia{minor}") for minor in minors]
    if not any(files):
        return gpus
    # One whose number is not told may have a file.
    return [gpu for gpu, minor, file in zip(gpus, minors, files, strict=True) if file or not minor.isdecimal()]


def _read(host: Host, folder: str) -> dict[str, str] | None:
    """
    What the driver says of one GPU, names in lower case; None of one that it must not use.

    A GPU whose page cannot be read is there all the same: to leave it out would be to miss a device.
    """
    try:
        lines = host.read(f"{folder}/information").splitlines()
    except HostError:
        return {}
    pairs = (line.partition(":") for line in lines)
    said = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return None if said.get("gpu excluded", "").lower() == "yes" else said
