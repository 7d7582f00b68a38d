"""
A worker on one NeuronCore, through whichever PyTorch the interpreter has: native TorchNeuron, or PyTorch/XLA.

The name `torch-neuronx` has meant both, so what is there is told by behaviour: native where torch takes
`torch.device("neuron")` once that module was imported, else XLA with `PJRT_DEVICE=NEURON`.

A core belongs to one process at a time, and a process that does not say which takes all: so the variables that pin it
are set before anything of Neuron is imported, and whatever a job left in the environment that would change results,
shapes or caches goes.

Unverified on hardware: the variables, the device's and the back ends' names and the functions called are those of AWS's
documentation and of the public source of torch_xla 2.9 and torch-neuronx; no part of `bind` has run on a NeuronCore.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from checks.accelerators import DeviceMissingError
from checks.accelerators.neuron_cache import serves
from checks.accelerators.xla import XlaDevice, import_or_say
from checks.contract import Device

# The first keeps compilation short; the second keeps fp32 fp32, which the bound of `matmul` supposes.
COMPILE_FLAGS = ("--optlevel=1", "--auto-cast=none")
MATMUL_ROWS = 4096  # 1.5 ms of bf16 at the 90 TFLOP/s of one core: well above what starting a program takes
_MEMORY_SHARE = 0.8  # of a core's part of the device, which its programs and the runtime need as well

# What a job may have set that changes results, shapes, caches or who takes which core. By prefix: whole families.
_DROPPED_PREFIXES = (
    "NEURON_PJRT_",
    "NEURON_RT_DBG_",
    "NEURON_RT_INSPECT_",
    "NEURON_RT_STOCHASTIC_",
    "PJRT_LOCAL_",
    "TORCH_NEURONX_NEFF_",  # where programs are kept
)
_DROPPED = (
    "NEURON_RT_NUM_CORES",  # VISIBLE_CORES beats it, but some frameworks read it first
    "NEURONCORE_GROUP_SIZES",
    "NEURONCORE_NUM_DEVICES",
    "NEURON_RT_ROOT_COMM_ID",
    "NEURON_RT_EXEC_TIMEOUT",  # a job that compiles may wait for hours in one execution
    "NEURON_RT_MULTI_INSTANCE_INFERENCE",
    "NEURON_FAIL_ON_NAN",  # a sticky flag of the hardware: what a job did would fail the probe
    "NEURON_EXTRACT_GRAPHS_ONLY",  # executes nothing and returns zeros
    "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU",  # the probe would test the host
    "NEURON_ENABLE_INT_MATMUL_DOWNCAST",
    "NEURON_FRAMEWORK_DEBUG",
    "NEURON_DUMP_HLO_SNAPSHOT",
    "NEURON_PARALLEL_COMPILE_MAX_RETRIES",
    "NEURON_LIBRARY_PATH",
    "NEURON_COMPILE_CACHE_URL",  # the job's own cache, perhaps on a network: what we compile has no place there
    "XLA_FLAGS",
    "XLA_IR_DEBUG",
    "XLA_HLO_DEBUG",
    "XLA_USE_SPMD",
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_FP16",
    "XLA_DOWNCAST_FP16",
    "XLA_USE_32BIT_LONG",
    "XLA_PERSISTENT_CACHE_PATH",
)


def bind(target: str, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> Device:
    """
    Give this process to one core (`neuroncore:14`), then import torch. See `Accelerator.bind`.

    Options: as `environment_of`. Raises RuntimeError with the remedy where torch has no binding to Neuron.
    """
    for name, value in environment_of(target, inventory, options, os.environ).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch = import_or_say("torch")
    device = _device_of(inventory, target)
    memory_bytes = _share_bytes(device)
    kind = f"neuron | {device.get('kind') or 'unknown kind'} | LNC {os.environ.get('NEURON_LOGICAL_NC_CONFIG', '?')}"
    flags = " ".join(flags_of(options))
    native = _import_native(torch)
    if native is not None:
        key = f"{kind} | native {getattr(native, '__version__', '?')} | torch {torch.__version__} | {flags}"
        return NativeDevice(target, key=key, torch=torch, native=native, memory_bytes=memory_bytes)
    torch_xla = import_or_say("torch_xla")
    key = f"{kind} | xla {torch_xla.__version__} | torch {torch.__version__} | {flags}"
    return NeuronXlaDevice(target, key=key, torch=torch, torch_xla=torch_xla, memory_bytes=memory_bytes)


def flags_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The flags of the compiler: `compile_flags` of the options, else COMPILE_FLAGS."""
    given = options.get("compile_flags")
    return COMPILE_FLAGS if given is None else tuple(str(flag) for flag in given)


def lnc_of(inventory: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Physical cores of a logical one: `neuron_lnc` of the options, else what the inventory says."""
    configured = options.get("neuron_lnc")
    found = inventory.get("lnc") if configured is None else configured
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def environment_of(
    target: str, inventory: Mapping[str, Any], options: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, str | None]:
    """
    What the environment must be before Neuron is imported: name -> value, None to drop it. Pure.

    Options: `compile_flags`, `neuron_lnc`, `compile_folder` (the private cache; without it the compiler's own default),
    `retry_failed` (compile again what failed), and `group` (this process becomes a rank: `size` ranks of all nodes,
    `targets` of this node, `first_rank` of the first of them, by default 0, and `root_comm`, where rank 0 waits).
    Raises DeviceMissingError for a core that is not there.
    """
    core = _core_of(target, inventory)
    changes: dict[str, str | None] = {
        name: None for name in environ if name in _DROPPED or name.startswith(_DROPPED_PREFIXES)
    }
    changes.update(
        {
            "NEURON_RT_VISIBLE_CORES": str(core),
            "PJRT_DEVICE": "NEURON",
            # Where the runtime's words are heard, and from which level on.
            "NEURON_RT_LOG_LOCATION": "console",
            "NEURON_RT_LOG_LEVEL": "ERROR",
            # What fails on the device must fail, not move to the host.
            "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
            "PATH": _path(environ.get("PATH", "")),
        }
    )
    lnc = lnc_of(inventory, options)
    if lnc is not None:
        changes["NEURON_LOGICAL_NC_CONFIG"] = changes["NEURON_RT_VIRTUAL_CORE_SIZE"] = str(lnc)
    flags = list(flags_of(options))
    folder = options.get("compile_folder")
    if folder is not None:
        place = str(Path(str(folder), "neuron"))
        flags.append(f"--cache_dir={place}")
        changes["NEURON_COMPILE_CACHE_URL"] = place
        changes["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(Path(str(folder), "neff"))
        changes["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"] = str(Path(str(folder), "neff-local"))
    if options.get("retry_failed"):
        flags.append("--retry_failed_compilation")
    changes["NEURON_CC_FLAGS"] = " ".join(flags)
    group = options.get("group")
    if group:
        changes.update(_rank_environment(target, group))
    return changes


def _rank_environment(target: str, group: Mapping[str, Any]) -> dict[str, str | None]:
    """
    What makes the process a rank: PJRT's client opens the whole group, so it must know before torch_xla is imported.

    The variables without LOCAL count over all nodes of the group, those with it over this one; both bindings read them.
    """
    targets = [str(item) for item in group["targets"]]
    local = targets.index(target)
    rank, size, root = int(group.get("first_rank", 0)) + local, int(group["size"]), str(group["root_comm"])
    address, _, port = root.rpartition(":")
    changes: dict[str, str | None] = {
        "NEURON_RT_ROOT_COMM_ID": root,
        "NEURON_PJRT_PROCESS_INDEX": str(rank),
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": ",".join(["1"] * size),
        "PJRT_LOCAL_PROCESS_RANK": str(local),
        "PJRT_LOCAL_PROCESS_COUNT": str(len(targets)),
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(len(targets)),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
    }
    return changes


def _core_of(target: str, inventory: Mapping[str, Any]) -> int:
    """The number of the core as NEURON_RT_VISIBLE_CORES counts. Raises DeviceMissingError."""
    workers = [str(item) for item in inventory.get("workers") or ()]
    kind, _, number = target.partition(":")
    if target not in workers or kind != "neuroncore" or not number.isdecimal():
        shown = f"{', '.join(workers[:8])}{' and others' if len(workers) > 8 else ''}" or "none"
        raise DeviceMissingError(f"no such core: {target}; this node has {shown}")
    return int(number)


def _device_of(inventory: Mapping[str, Any], target: str) -> Mapping[str, Any]:
    """The device that a core is on; an empty one where the inventory does not say."""
    return next((device for device in inventory.get("devices") or () if serves(device, target)), {})


def _share_bytes(device: Mapping[str, Any]) -> int | None:
    """A core's part of its device's memory, less what runtime and programs take."""
    memory_bytes, cores = device.get("memory_bytes"), device.get("cores")
    if not isinstance(memory_bytes, int) or not isinstance(cores, int) or cores < 1:
        return None
    return int(memory_bytes / cores * _MEMORY_SHARE)


def _path(path: str) -> str:
    """The compiler is a program beside the interpreter, and torch_xla looks for it by PATH."""
    folders = [os.path.dirname(sys.executable), *path.split(os.pathsep), "/opt/aws/neuron/bin"]
    return os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))


def _import_native(torch: Any) -> Any:
    """The module of native TorchNeuron; None where torch does not know a device `neuron` even after its import."""
    import importlib

    try:
        module = importlib.import_module("torch_neuronx")
    except ImportError:
        return None
    try:
        torch.device("neuron")
    except RuntimeError:  # the older package of this name is an addition to torch_xla
        return None
    return module


class NeuronXlaDevice(XlaDevice):
    """One core through PyTorch/XLA: the device of `xla.py`, with memory told by the inventory, and with collectives."""

    def __init__(self, target: str, *, key: str, torch: Any, torch_xla: Any, memory_bytes: int | None) -> None:
        super().__init__(target, key=key, torch=torch, torch_xla=torch_xla, client="NEURON", base=None)
        self.matmul_rows = MATMUL_ROWS
        self._memory_bytes = memory_bytes

    @property
    def collective_backend(self) -> str:
        """That of torch_xla, which has to be imported to be known."""
        import_or_say("torch_xla.distributed.xla_backend")
        return "xla"

    def available_bytes(self) -> int | None:
        """What the client says; where it says nothing, the core's part of the device, which is this process's alone."""
        known = super().available_bytes()
        return known if known is not None else self._memory_bytes


class NativeDevice:
    """The `Device` of the contract on one core through native TorchNeuron: `neuron:0` to its process."""

    collective_backend = "neuron"
    matmul_rows = MATMUL_ROWS
    members: tuple[Device, ...] = ()

    def __init__(self, target: str, *, key: str, torch: Any, native: Any, memory_bytes: int | None) -> None:
        self.target = target
        self.key = key
        self.torch = torch
        self.torch_device = torch.device("neuron", 0)
        self._native = native
        self._memory_bytes = memory_bytes
        count = native.device_count()
        if count != 1:
            raise RuntimeError(
                f"torch-neuronx shows {count} cores for NEURON_RT_VISIBLE_CORES="
                f"{os.environ.get('NEURON_RT_VISIBLE_CORES')} instead of 1; see neuron-ls"
            )

    def synchronize(self) -> None:
        """Wait for all that was given to the core."""
        self._native.synchronize()

    def available_bytes(self) -> int | None:
        """The core's part of the device's memory, less what torch has reserved of it; None where neither is known."""
        if self._memory_bytes is None:
            return None
        return max(0, self._memory_bytes - int(self._native.memory_reserved()))

    def read(self, tensor: Any) -> Any:
        """A copy on the host; it waits for what is under way."""
        self.synchronize()
        return tensor.detach().cpu().contiguous()

    def measure(self, operation: Callable[[], object], *, repeats: int, warmup: int) -> list[float]:
        """See `Device.measure`. By the host's clock, with the launch inside: the first run compiles."""
        for _ in range(warmup):
            operation()
            self.synchronize()
        self.synchronize()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            operation()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds

    def compile_seconds(self) -> float | None:
        """None: it compiles when it likes and counts nothing; who asks must take the time of a first run."""
        return None

    def fallbacks(self) -> tuple[str, ...]:
        """Operations that the host's CPU has done instead of the core since this was last asked, sorted."""
        names = {str(name) for name in self._native.get_fallback_ops()}
        self._native.clear_op_tracking()
        return tuple(sorted(names))
