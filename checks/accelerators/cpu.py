"""
Plain CPUs as devices: N logical ones, each with a share of the cores that this process may use.

A CPU has no device file, so that "who holds it" would have no answer. Each logical device gets one, in the run
directory (`devices/cpu0`, ...), with the meaning of /dev/neuron0: who has it open holds the device.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks.accelerators import Descriptor, DeviceMissingError
from checks.accelerators.holding import bounded, find_holders
from checks.contract import Device
from checks.host.efa import count_efa as count_efa
from checks.host.machine import Host, HostError

# A job may ask for bf16 inside fp32 products (usual on Graviton); a probe must measure what it says.
_DROPPED = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")

_FEATURES = frozenset(
    {"cpu family", "model", "flags", "Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"}
)

DEVICE_COUNT_DEFAULT = 2  # the least with which devices can be compared and collectives mean something
DEVICE_COUNT_MAX = 256  # more is a slip of the keyboard: each is a process with torch in it


def prepare_fork() -> None:
    """
    Import torch, for a process that is forked.

    Measured with torch 2.9 and 2.13: the import starts no thread. The pools of threads begin with the first operation,
    in the worker, and take their size from `bind`.
    """
    for name in _DROPPED:
        os.environ.pop(name, None)
    _import_torch()


DESCRIPTOR = Descriptor(
    name="cpu",
    detect_order=2,
    speed_versions=("torch",),
    scaled_products=("float8_e4m3fn",),
    prepare_fork=prepare_fork,
    jobs_open_devices=False,
    uses_efa=False,
)


def present(host: Host) -> bool:
    """Always: whoever runs this runs on one."""
    return True


def find(host: Host, options: Mapping[str, Any]) -> dict[str, Any]:
    """The inventory. Options: `cpu_devices`, else the variable HEALTHD_CPU_DEVICES, else 2."""
    count = _device_count(options)
    allowed = sorted(os.sched_getaffinity(0))
    memory_bytes = _meminfo_bytes(host, "MemTotal")
    kind = _model(host)
    devices = [
        {
            "target": f"cpu:{index}",
            "kind": kind,
            "serial": None,  # x86 and ARM cores tell no serial number
            "cores": len(_share(allowed, index, count)),
            "memory_bytes": memory_bytes // count if memory_bytes is not None else None,
        }
        for index in range(count)
    ]
    return {
        "accelerator": "cpu",
        "device_count": count,
        "expected_device_count": count,  # plain CPUs are what they are configured to be
        "core_count": len(allowed),
        "memory_bytes": memory_bytes,
        "efa_count": count_efa(host),
        "devices": devices,
    }


def holders(host: Host, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> list[str] | None:
    """Who has a device file open. Options: `run_dir` (without it there is nothing to hold), `ignore_pids`."""
    files = {}
    for device in inventory["devices"]:
        path = device_path(device["target"], options)
        if path is not None:
            files[device["target"]] = path
    ours = {os.getpid(), *(int(pid) for pid in options.get("ignore_pids", ()))}
    # Of plain files the kernel itself says whether anybody has them open: processes out of sight are not missed.
    found = find_holders(Path(host.path("/proc")), files, ours)
    return None if found is None else bounded(found)


def device_path(target: str, options: Mapping[str, Any]) -> Path | None:
    """The file that stands for a device; None without a run directory."""
    run_dir = options.get("run_dir")
    return Path(run_dir) / "devices" / target.replace(":", "") if run_dir else None


@contextmanager
def hold(target: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Have the device's file open, and make it where it is not there yet. Raises OSError naming the path."""
    path = device_path(target, options)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readable for all, so that a job of another user can hold the device by opening it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield
    finally:
        os.close(descriptor)


def bind(target: str, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> CpuDevice:
    """Pin this process to the device's cores, then import torch. See `Accelerator.bind`."""
    targets = [device["target"] for device in inventory["devices"]]
    if target not in targets:
        raise DeviceMissingError(f"no such device: {target}; this node has {', '.join(targets) or 'none'}")
    index = targets.index(target)
    # Before torch, where it is not imported yet: its pools of threads take their size and place from what is allowed.
    share = _share(sorted(os.sched_getaffinity(0)), index, len(targets))
    os.sched_setaffinity(0, share)
    for name in _DROPPED:
        os.environ.pop(name, None)
    torch = _import_torch()
    if torch.get_num_threads() != len(share):
        torch.set_num_threads(len(share))
    kind = inventory["devices"][index]["kind"]
    capability = torch.backends.cpu.get_cpu_capability()
    key = f"cpu | {kind} | {_features(Host())} | {capability} | torch {torch.__version__}"
    return CpuDevice(target=target, key=key, torch=torch, device_count=len(targets))


class CpuDevice:
    """The `Device` of the contract on CPU cores: work is done when the call returns; there is nothing to wait for."""

    collective_backend = "gloo"
    matmul_rows = 512  # some milliseconds on one core, and well out of its L1 cache
    members: tuple[Device, ...] = ()

    def __init__(self, *, target: str, key: str, torch: Any, device_count: int) -> None:
        self.target = target
        self.key = key
        self.torch = torch
        self.torch_device = torch.device("cpu")
        self._device_count = device_count

    def synchronize(self) -> None:
        """Nothing runs in the background on a CPU."""

    def available_bytes(self) -> int | None:
        """The device's part of what the kernel, and the container's limit, would still give."""
        free = [_meminfo_bytes(Host(), "MemAvailable"), _cgroup_free_bytes(Host())]
        known = [size for size in free if size is not None]
        return min(known) // self._device_count if free[0] is not None else None

    def read(self, tensor: Any) -> Any:
        """The tensor itself where it is contiguous: no copy."""
        return tensor.detach().cpu().contiguous()

    def measure(self, operation: Callable[[], object], *, repeats: int, warmup: int) -> list[float]:
        """See `Device.measure`."""
        for _ in range(warmup):
            operation()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            operation()
            seconds.append(time.perf_counter() - start)
        return seconds


def _import_torch() -> Any:
    with warnings.catch_warnings():
        # torch without numpy says so at import; no probe wants numpy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
        import torch
    return torch


def _device_count(options: Mapping[str, Any]) -> int:
    name, value = "cpu_devices", options.get("cpu_devices")
    if value is None:
        name, value = "HEALTHD_CPU_DEVICES", os.environ.get("HEALTHD_CPU_DEVICES", DEVICE_COUNT_DEFAULT)
    try:
        count = int(str(value), 10) if not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if not 1 <= count <= DEVICE_COUNT_MAX:
        raise ValueError(f"{name} must be a whole number from 1 to {DEVICE_COUNT_MAX}, not {value!r}")
    return count


def _share(cores: list[int], index: int, count: int) -> list[int]:
    """Neighbouring cores for each device, as even as can be; with more devices than cores they take turns."""
    if count > len(cores):
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // count : (index + 1) * len(cores) // count]


def _model(host: Host) -> str:
    """The processor's name; its architecture where /proc/cpuinfo names none (ARM)."""
    try:
        text = host.read("/proc/cpuinfo")
    except HostError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return os.uname().machine


def _features(host: Host) -> str:
    """
    A short hash of what /proc/cpuinfo tells of instructions and generation, by which libraries choose their kernels.

    Several generations have one name on some machines ("AMD EPYC"). `unknown` where it cannot be read.
    """
    try:
        text = host.read("/proc/cpuinfo")
    except HostError:
        return "unknown"
    found = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in _FEATURES:
            found.add(f"{key.strip()}={' '.join(sorted(value.split()))}")
    import hashlib

    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:8]


def _meminfo_bytes(host: Host, name: str) -> int | None:
    """One line of /proc/meminfo; None where it is not there or not a number."""
    try:
        text = host.read("/proc/meminfo")
        value = next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:"))
        return int(value) * 1024
    except (HostError, StopIteration, IndexError, ValueError):
        return None


def _cgroup_free_bytes(host: Host) -> int | None:
    """
    What the container's own limit leaves (cgroup v2, else v1); None without a limit.

    Cache of files that nobody has read lately counts as used until the kernel takes it back, which it does before
    anything is refused: it fills the limit of every container that reads much. Source: Documentation/admin-guide,
    cgroup-v2.rst, memory.stat.
    """
    for limit, usage, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            most, used = (int(host.read(f"/sys/fs/cgroup/{name}")) for name in (limit, usage))
        except (HostError, ValueError):  # "max" is no number: no limit
            continue
        return max(0, most - max(0, used - _cache_bytes(host, f"/sys/fs/cgroup/{stat}", cache)))
    return None


def _cache_bytes(host: Host, path: str, name: str) -> int:
    """A line of memory.stat; 0 where it is not told."""
    try:
        return next((int(line.split()[1]) for line in host.read(path).splitlines() if line.split()[:1] == [name]), 0)
    except (HostError, IndexError, ValueError):
        return 0
