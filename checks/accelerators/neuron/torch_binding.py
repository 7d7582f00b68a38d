"""
A worker on one NeuronCore, through whichever PyTorch the interpreter has: native TorchNeuron, or PyTorch/XLA.

The name `torch-neuronx` has meant both, so what is there is told by behaviour: native where torch takes
`torch.device("neuron")` once that module was imported, else XLA with `PJRT_DEVICE=NEURON`.

A core belongs to one process at a time, and a process that does not say which takes all: so the variables that pin it
are set before anything of Neuron is imported, and whatever a job left in the environment that would change results,
shapes or caches goes.

Its workers are not forked from one import (`Descriptor.prepare_fork`): torch imports torch-neuronx by itself where that
is a back end (TORCH_DEVICE_BACKEND_AUTOLOAD), torch-neuronx reads the variables that pin a core when it is imported,
and AWS documents no fork after the import. A worker that was forked could take the core of another.

Unverified on hardware: the variables, the device's and the back ends' names and the functions called are those of AWS's
documentation and of the public source of torch_xla 2.9 and torch-neuronx; no part of `bind` has run on a NeuronCore.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from checks.accelerators.neuron.environment import environment_of, flags_of, xla_environment
from checks.accelerators.xla import XlaDevice, import_or_say
from checks.compile_cache import serves
from checks.contract import Device

MATMUL_ROWS = 4096  # 1.5 ms of bf16 at the 90 TFLOP/s of one core: well above what starting a program takes
_MEMORY_SHARE = 0.8  # of a core's part of the device, which its programs and the runtime need as well


def bind(target: str, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> Device:
    """
    Give this process to one core (`neuroncore:14`), then import torch. See `Accelerator.bind`.

    Options: as `environment_of` and `xla_environment`. Raises RuntimeError with the remedy where torch has no binding
    to Neuron.
    """
    changes = environment_of(target, inventory, options, os.environ)
    for name, value in changes.items():
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
    # Again what we set: older torch-neuronx writes MASTER_ADDR:62182 over NEURON_RT_ROOT_COMM_ID
    # when it is imported (configure_pjrt_environment), the same for all groups on a host. The device opens after this.
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    os.environ.update(xla_environment(options))
    key = f"{kind} | xla {torch_xla.__version__} | torch {torch.__version__} | {flags}"
    return NeuronXlaDevice(target, key=key, torch=torch, torch_xla=torch_xla, memory_bytes=memory_bytes)


def _device_of(inventory: Mapping[str, Any], target: str) -> Mapping[str, Any]:
    """The device that a core is on; an empty one where the inventory does not say."""
    return next((device for device in inventory.get("devices") or () if serves(device, target)), {})


def _share_bytes(device: Mapping[str, Any]) -> int | None:
    """A core's part of its device's memory, less what runtime and programs take."""
    memory_bytes, cores = device.get("memory_bytes"), device.get("cores")
    if not isinstance(memory_bytes, int) or not isinstance(cores, int) or cores < 1:
        return None
    return int(memory_bytes / cores * _MEMORY_SHARE)


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
