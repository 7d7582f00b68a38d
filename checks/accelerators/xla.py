"""
Devices of PyTorch/XLA, through any PJRT client: chosen by configuration alone (`accelerator = "xla"`), never detected.

XLA records operations and runs them as one compiled program when it is told to: `torch_xla.sync()`. One process has one
device. On PJRT's CPU client, the one that everybody can try, a device is a share of the cores, as in `cpu.py`.

Processes on PJRT's CPU client cannot talk to each other: the `xla` back end of torch.distributed opens a group there
and leaves each rank alone in it, with its own values as the result (seen with torch_xla 2.9.0). So collectives run in
one process over several virtual devices (SPMD): see `XlaMesh`.

Verified on the CPU client alone. For others the number of devices, the variable that confines a process to one of them
and the device files must be configured, and their collectives are refused; NEURON's, whose processes can talk, are the
business of `neuron/torch_binding.py`.

Workers are not forked from one import (`Descriptor.prepare_fork`): one that finds nothing compiled says so without
importing torch, and the ranks on the CPU client share a process. The import itself would allow it: with torch_xla 2.9.0
it starts no thread, and a client that a forked process makes computes. Of other clients that is not known.

What XLA cannot do on a device it leaves to the host's CPU, silently: `fallbacks` tells, so that nobody takes the host's
health for the device's.

Also here:

- several virtual devices of PJRT's CPU client in one process: how collectives run where processes cannot talk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from checks.accelerators import Descriptor, DeviceMissingError, cpu
from checks.accelerators.holding import bounded, find_holders, may_miss
from checks.contract import Device
from checks.host.machine import Host

# What changes dtypes behind a program's back, or shares the compile cache of a job.
_DROPPED = (
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_FP16",
    "XLA_DOWNCAST_FP16",
    "XLA_USE_32BIT_LONG",
    "XLA_PERSISTENT_CACHE_PATH",
)

DESCRIPTOR = Descriptor(
    name="xla",
    detect_order=None,
    speed_versions=("torch",),
    compiles=True,
    python_packages=("torch-xla",),
    graph_sources=("accelerators/xla.py",),
)

DEVICE_COUNT_MAX = cpu.DEVICE_COUNT_MAX

# Metrics of torch_xla that move when a device has worked; the second is that of a mesh.
_WORK = ("ExecuteTime", "ExecuteReplicatedTime", "TransferToDeviceTime", "TransferFromDeviceTime")
# Counters of torch_xla for operations that the host did; reading one number (`item`) is one of them and no fallback.
_FALLBACK = "aten::"
_NO_FALLBACKS = frozenset({"aten::_local_scalar_dense", "aten::item"})

_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")


def present(host: Host) -> bool:
    """Never by itself: whether PJRT has a device can only be told by opening it."""
    return False


def find(host: Host, options: Mapping[str, Any]) -> dict[str, Any]:
    """
    The inventory. `ranks` says that a group is one process (`together`) or, but for the CPU client, not kept (`fresh`).

    Options: `xla_device`, else the variable PJRT_DEVICE, else CPU; `xla_devices`, else for the CPU client the variable
    CPU_NUM_DEVICES, else 2. Without torch nobody can count the devices of another client, so for those it must be set.
    """
    client = _client(options)
    count = _device_count(client, options)
    if client == "CPU":
        found = cpu.find(host, {"cpu_devices": count})
        devices = [
            {**device, "target": f"xla:{index}", "kind": f"PJRT CPU, {device['kind']}"}
            for index, device in enumerate(found["devices"])
        ]
        return {**found, "accelerator": "xla", "devices": devices, "ranks": "together"}
    return {
        "accelerator": "xla",
        "device_count": count,
        "expected_device_count": count,
        "core_count": None,
        "memory_bytes": None,
        "efa_count": None,
        "devices": [
            {"target": f"xla:{index}", "kind": f"PJRT {client}", "serial": None, "cores": None, "memory_bytes": None}
            for index in range(count)
        ],
        "ranks": "fresh",
    }


def holders(host: Host, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> list[str] | None:
    """
    Who has a device file open. None, which counts as taken, where nobody said what the files are.

    Options: on the CPU client `run_dir`, as in `cpu.py`; else `xla_device_files`, as in `/dev/neuron{index}`, `in_job`.
    """
    if _client(options) == "CPU":
        return cpu.holders(host, inventory, options)
    pattern = options.get("xla_device_files")
    if not pattern:
        return None
    files = {
        device["target"]: Path(str(pattern).replace("{index}", str(index)))
        for index, device in enumerate(inventory["devices"])
    }
    ours = {os.getpid(), *(int(pid) for pid in options.get("ignore_pids", ()))}
    found = find_holders(Path(host.path("/proc")), files, ours, blind=may_miss(host, options))
    return None if found is None else bounded(found)


@contextmanager
def hold(target: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Have the files of all devices of `target` open; those of another client than CPU are its own to open."""
    with ExitStack() as stack:
        if _client(options) == "CPU":
            for one in target.split(","):
                stack.enter_context(cpu.hold(one, options))
        yield


def bind(target: str, inventory: Mapping[str, Any], options: Mapping[str, Any]) -> XlaDevice:
    """
    Give this process to one device, or to several (`xla:0,xla:1`) as a mesh. See `Accelerator.bind`.

    Options: `xla_visible_variable`, the variable that confines a process to one device of another client than CPU
    (NEURON_RT_VISIBLE_CORES). Raises RuntimeError where torch_xla is missing or sees another number of devices.
    """
    kinds = {str(device["target"]): str(device["kind"]) for device in inventory["devices"]}
    wanted = target.split(",")
    if unknown := [one for one in wanted if one not in kinds]:
        raise DeviceMissingError(f"no such device: {unknown[0]}; this node has {', '.join(kinds) or 'none'}")
    client = _client(options)
    for name in _DROPPED:
        os.environ.pop(name, None)
    os.environ["PJRT_DEVICE"] = client  # before torch_xla, which reads these when it is imported
    base = None
    if client == "CPU":
        os.environ["CPU_NUM_DEVICES"] = str(len(wanted))
        joined = {"devices": [{"target": target, "kind": kinds[wanted[0]]}]}
        base = cpu.bind(target, inventory if len(wanted) == 1 else joined, options)
        key = f"{base.key} | {base.torch.get_num_threads()} cores"  # XLA splits its sums by them
        torch = base.torch
    else:
        _confine(client, list(kinds).index(wanted[0]), options)
        torch = import_or_say("torch")
        key = f"{kinds[wanted[0]]} | torch {torch.__version__}"
    torch_xla = import_or_say("torch_xla")
    key = f"xla {client} | {key} | torch_xla {torch_xla.__version__}"
    if len(wanted) > 1:
        return XlaMesh(wanted, key=key, torch=torch, torch_xla=torch_xla, client=client, base=base)
    return XlaDevice(target, key=key, torch=torch, torch_xla=torch_xla, client=client, base=base)


class XlaDevice:
    """The `Device` of the contract on one PJRT device: work is recorded, and done at `synchronize`."""

    members: tuple[Device, ...] = ()

    def __init__(self, target: str, *, key: str, torch: Any, torch_xla: Any, client: str, base: Any) -> None:
        """`base` is the CPU device below, with the CPU client alone; else None."""
        self.target = target
        self.key = key
        self.torch = torch
        self._torch_xla = torch_xla
        self._xla_model = import_or_say("torch_xla.core.xla_model")
        self._metrics = import_or_say("torch_xla.debug.metrics")
        self._client = client
        self._base = base
        self.matmul_rows = base.matmul_rows if base is not None else 4096
        # XLA on CPUs adds these in fp16 (seen with torch_xla 2.9.0), so that their products have no bound.
        self.narrow_sums = ("fp16", "fp8") if client == "CPU" else ()
        self.torch_device = torch_xla.device()
        self._fallen_back: dict[str, int] = {}

    @property
    def collective_backend(self) -> str:
        """Refused: see the head of this file. A back end that leaves ranks alone would accuse healthy nodes."""
        raise RuntimeError(
            f"collectives between processes on PJRT {self._client} are not supported; use the accelerator that was "
            "made for these devices, or disable the collective checks"
        )

    def synchronize(self) -> None:
        """Compile what is recorded, unless that has been done before, run it, and wait for its end."""
        self._torch_xla.sync(wait=True)
        self._xla_model.wait_device_ops()

    def available_bytes(self) -> int | None:
        """What the client says; on its CPU client, which says nothing, what the cores' share of the host leaves."""
        if self._base is not None:
            return int(free) if (free := self._base.available_bytes()) is not None else None
        try:
            found = self._xla_model.get_memory_info(self.torch_device)
            return int(found["bytes_limit"]) - int(found["bytes_used"])
        except (RuntimeError, KeyError):  # UNIMPLEMENTED
            return None

    def read(self, tensor: Any) -> Any:
        """Everything recorded is done first, so that what is read is what the device holds; then a copy of it."""
        self.synchronize()
        return tensor.detach().cpu().contiguous()

    def measure(self, operation: Callable[[], object], *, repeats: int, warmup: int) -> list[float]:
        """
        See `Device.measure`. The first run compiles: without a warm-up before it, it takes that much longer.

        Where the operation only records work, its recording, which is Python's time and not the device's, is outside
        the clock; copies from and to the host work at once and are inside.
        """
        for _ in range(warmup):
            operation()
            self.synchronize()
        self.synchronize()
        seconds = []
        for _ in range(repeats):
            done = self._work_done()
            start = time.perf_counter()
            operation()
            called = time.perf_counter()
            worked = called - start if self._work_done() != done else 0.0
            start = time.perf_counter()
            self.synchronize()
            seconds.append(worked + time.perf_counter() - start)
        return seconds

    def compile_seconds(self) -> float:
        """What compilation has taken in this process so far, by torch_xla's own count."""
        found = self._metrics.metric_data("CompileTime")
        return float(found[1]) / 1e9 if found else 0.0

    def fallbacks(self) -> tuple[str, ...]:
        """Operations that the host's CPU has done instead of the device since this was last asked, sorted."""
        names = [name for name in self._metrics.counter_names() if name.startswith(_FALLBACK)]
        counts = {name: int(self._metrics.counter_value(name) or 0) for name in names if name not in _NO_FALLBACKS}
        before, self._fallen_back = self._fallen_back, counts
        return tuple(sorted(name for name, count in counts.items() if count > before.get(name, 0)))

    def _work_done(self) -> tuple[int, ...]:
        """How often the device has worked so far."""
        found = (self._metrics.metric_data(name) for name in _WORK)
        return tuple(one[0] if one else 0 for one in found)


class XlaMesh(XlaDevice):
    """Several virtual devices of the CPU client in one process (SPMD): for collectives alone."""

    def __init__(self, targets: Sequence[str], *, key: str, torch: Any, torch_xla: Any, client: str, base: Any) -> None:
        runtime = import_or_say("torch_xla.runtime")
        runtime.use_spmd()
        super().__init__(",".join(targets), key=key, torch=torch, torch_xla=torch_xla, client=client, base=base)
        self._spmd = import_or_say("torch_xla.distributed.spmd")
        count = runtime.global_runtime_device_count()
        if count != len(targets):
            raise RuntimeError(f"PJRT {client} shows {count} devices to this process instead of {len(targets)}")
        self._mesh = self._spmd.Mesh(list(range(count)), (count,), ("ranks",))
        self.members = tuple(_Member(self, target) for target in targets)

    def collective(self, name: str, contributions: Any) -> _MeshOperation:
        """See `Mesh.collective`."""
        if name not in _COLLECTIVES:
            raise ValueError(f"no such collective: {name!r}; choose one of: {', '.join(_COLLECTIVES)}")
        return _MeshOperation(self, name, contributions)

    def shard(self, tensor: Any, spec: tuple[str | None, ...]) -> Any:
        """Lay a tensor out over the devices: the axis called `ranks` is split, others are whole on each."""
        self._spmd.mark_sharding(tensor, self._mesh, spec)
        return tensor

    def reduce_scatter(self, tensor: Any) -> Any:
        """
        The sum over the members of `tensor`  # [members, elements], split over the members  # [elements].

        Written out for each device (manual sharding): from layouts alone XLA makes an all-reduce and a slice on CPUs.
        """
        count, elements = tensor.shape
        mine = self._spmd.enable_manual_sharding(tensor, ("ranks", None), mesh=self._mesh).global_tensor
        bindings = self._torch_xla._XLAC  # no public function works in a program of several devices
        share = bindings._xla_spmd_reduce_scatter("sum", mine.flatten(), 1.0, 0, count, [list(range(count))])
        whole = self._spmd.disable_manual_sharding(share, ("ranks",), (elements,), mesh=self._mesh)
        return whole.global_tensor

    def shards(self, tensor: Any) -> tuple[Any, ...]:
        """What each device holds of a tensor, in their order, on the host."""
        self.synchronize()
        found = self._spmd.XLAShardedTensor(tensor).local_shards
        ordered = sorted(found, key=lambda shard: int(str(shard.shard_device).rpartition(":")[2]))
        return tuple(shard.data for shard in ordered)


def import_or_say(name: str) -> Any:
    """A module of PyTorch. Raises RuntimeError with the remedy where it is missing."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"{name} cannot be imported ({error}); set python of [probe] to an interpreter that has torch_xla"
        ) from error


def _client(options: Mapping[str, Any]) -> str:
    return str(options.get("xla_device") or os.environ.get("PJRT_DEVICE") or "CPU").upper()


def _device_count(client: str, options: Mapping[str, Any]) -> int:
    name, value = "xla_devices", options.get("xla_devices")
    if value is None and client != "CPU":
        raise ValueError(f"xla_devices must be set for PJRT {client}: counting its devices would open them")
    if value is None:
        name, value = "CPU_NUM_DEVICES", os.environ.get("CPU_NUM_DEVICES", cpu.DEVICE_COUNT_DEFAULT)
    try:
        count = int(str(value), 10) if not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if not 1 <= count <= DEVICE_COUNT_MAX:
        raise ValueError(f"{name} must be a whole number from 1 to {DEVICE_COUNT_MAX}, not {value!r}")
    return count


def _confine(client: str, index: int, options: Mapping[str, Any]) -> None:
    variable = options.get("xla_visible_variable")
    if not variable:
        raise ValueError(
            f"xla_visible_variable must be set for PJRT {client}: without it this process would take all devices "
            "instead of one"
        )
    os.environ[str(variable)] = str(index)


class _MeshOperation:
    """A collective as an array program: XLA's partitioner puts it between the layouts of input and output."""

    def __init__(self, mesh: XlaMesh, name: str, contributions: Any) -> None:
        self._mesh = mesh
        self._name = name
        gathers = name == "all_gather"
        given = contributions.flatten() if gathers else contributions
        self._input = mesh.shard(given.to(mesh.torch_device), ("ranks",) if gathers else ("ranks", None))
        self._output: Any = None
        mesh.synchronize()

    def run(self) -> object:
        """Record it: a new result each time, so that none is left from before."""
        mesh = self._mesh
        if self._name == "all_gather":
            # The sum is there because a layout needs an operation that it is the layout of.
            self._output = mesh.shard(self._input + 0.0, (None,))
        elif self._name == "all_reduce":
            self._output = mesh.shard(self._input.sum(0), (None,))
        else:
            self._output = mesh.reduce_scatter(self._input)
        return self._output

    def outputs(self) -> tuple[Any, ...]:
        """See `MeshOperation.outputs`."""
        return self._mesh.shards(self._output)


class _Member:
    """One virtual device of a mesh: only its own results can be read through it."""

    members: tuple[Device, ...] = ()
    collective_backend = "spmd"

    def __init__(self, mesh: XlaMesh, target: str) -> None:
        self.target = target
        self.key = mesh.key
        self.torch = mesh.torch
        self.torch_device = mesh.torch_device
        self.matmul_rows = mesh.matmul_rows
        self.synchronize = mesh.synchronize
        self.available_bytes = mesh.available_bytes
        self.measure = mesh.measure
        self.fallbacks = mesh.fallbacks

    def read(self, tensor: Any) -> Any:
        """A result of a mesh operation is on the host already."""
        return tensor.detach().cpu().contiguous()
