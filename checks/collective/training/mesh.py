"""
All ranks of data-parallel steps in one process, on a mesh: they compute one after the other and reduce together.

One process hangs or dies as a whole, so that no rank is named for it; and nobody waits for anybody.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator
from typing import Any

from checks.collective.ranks import RENDEZVOUS, progress
from checks.collective.training.shard import Shard
from checks.contract import Group, Mesh, Progress
from checks.device.sampling import median
from checks.training.model import Size


def mesh_steps(
    mesh: Mesh, group: Group, name: str, size: Size, steps: int
) -> Generator[Progress, None, tuple[list[Shard], list[dict[str, Any]]]]:
    """Be all ranks: the work of each, and its times."""
    yield progress(RENDEZVOUS, "joined")
    if len(mesh.members) != group.size:
        raise ValueError(f"a group of {group.size} ranks needs a mesh of as many devices, not {len(mesh.members)}")
    shards = [Shard(member, dataclasses.replace(group, rank=rank), size) for rank, member in enumerate(mesh.members)]
    yield progress(RENDEZVOUS, "left")
    own_seconds, seconds = [0.0] * group.size, []
    for number in range(steps):
        for rank, shard in enumerate(shards):
            began = time.perf_counter()
            shard.compute(number)
            own_seconds[rank] += time.perf_counter() - began if number else 0.0
        yield progress(f"{name}/{number + 1}", "entered")
        parts = mesh.torch.stack([member.read(s.flat) for member, s in zip(mesh.members, shards, strict=True)])
        operation = mesh.collective("all_reduce", parts)
        took = mesh.measure(operation.run, repeats=1, warmup=0 if number else 1)
        seconds += took if number else []
        yield progress(f"{name}/{number + 1}", "left")
        for rank, (shard, output) in enumerate(zip(shards, operation.outputs(), strict=True)):
            began = time.perf_counter()
            shard.flat = output.to(mesh.torch_device)
            shard.update()
            own_seconds[rank] += time.perf_counter() - began if number else 0.0
    times = {"seconds": median(seconds), "cpu_wait_seconds": None}
    return shards, [{**times, "own_seconds": own} for own in own_seconds]
