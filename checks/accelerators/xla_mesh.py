"""
Several virtual devices of PJRT's CPU client in one process: how collectives run where processes cannot talk.

A collective is an array program whose input and output lie on the devices in given ways, and XLA's partitioner puts the
operation between them. That it does so for each of the three is tested on the compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checks.accelerators.xla import XlaDevice, import_or_say
from checks.contract import Device

_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")


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
            raise ValueError(f"no such collective: {name!r}; known are {', '.join(_COLLECTIVES)}")
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
