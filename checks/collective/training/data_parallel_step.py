"""
The `data_parallel_step` check: training steps of all ranks together, with the real reduction of gradients.

Also here:

- all ranks of data-parallel steps in one process, on a mesh: they compute one after the other and reduce together.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from checks.collective.ranks import (
    RENDEZVOUS,
    OwnTime,
    Rank,
    ends_with_failure,
    leave_unwanted,
    limits_of_size,
    meet,
    progress,
    told_by_rank,
)
from checks.collective.training.judge import judge_data_parallel
from checks.collective.training.shard import Shard, one_thread
from checks.contract import Context, Device, Evidence, Finding, Group, Mesh, Progress, Status, check
from checks.peers import median
from checks.training.model import Size
from checks.training.work import LARGE, SMALL

NAME = "data_parallel_step"
LEAST_STEPS, MOST_STEPS = 2, 16


@check(
    tier="deep",
    interval_seconds=86400,
    timeout_seconds=120,
    scope="group",
    judge=functools.partial(judge_data_parallel, NAME),
)
def data_parallel_step(ctx: Context[Params]) -> Iterator[Finding | Evidence | Progress]:
    """
    All ranks train one model together: gradients are correct on each, and identical on all after the reduction.

    Reads:   all devices of the group, by steps of the small transformer of `train_step` in fp32. Each rank has a part
             of the batch of its own, computes its gradients twice, reduces them with all others by torch.distributed
             with the accelerator's backend, and applies AdamW. Over several nodes: `healthd fleet validate --kind
             training`, and gates from the deep tier on.
    Judges:  fail SilentCorruption (the gradients of a rank differ between two computations; or its reduced gradients
             or its parameters differ from those of most ranks) | fail WrongResult (gradients of a rank are further
             from float64 than rounding explains, or are no numbers) | fail DigestMismatch (ranks differ and no
             majority tells which: one of them) | fail CollectiveMismatch (all hold the same reduced gradients, which
             are not the mean of what the ranks contributed: one of them) | fail RankAbsent, RankDied, RankHung (the
             culprit, not those who waited for it) | fail SlowDevice (limit `data_parallel_step_own_seconds` of a
             rank's own work) | fail SlowLink (limits `data_parallel_step_busbw_bytes_per_second`, `..._algbw_...`,
             `..._duration_seconds` of the reduction, without the waiting for late ranks; `nodes_NAME` between nodes) |
             unknown Timeout (culprit unknown) | skip NotApplicable (fewer than 2 ranks) | pass with the times.
             Between nodes a rank is also late by its own work compared with the others': SlowNode.
    Faults:  `data_parallel_step.LAYER.OPERATION@DEVICE=corrupt:MAGNITUDE` as for `train_step`, in the second step; also
             at `block1.up_weight_reduced`, a gradient after the reduction.
    Cost:    deep: of each rank 38 ms of CPU for the first step, 17 ms for each later one; 0.5 MB of gradients.
    Source:  own; the reduction is that of data-parallel training (Li and others, PyTorch Distributed, VLDB 2020): sum
             over ranks, divided by their number. Ranks hold equal bits after it, since each part is summed by one rank
             and copied. The sum of the parts is held against the sum of the whole (Huang and Abraham, Algorithm-Based
             Fault Tolerance, 1984), with the bound of checks/training/reference.py.
    Unverified: NCCL on GPUs, Neuron's collectives, EFA, and a device that really corrupts. It has run by gloo on CPUs,
             and on XLA's CPU device.
    """
    device, group = ctx.device, ctx.group
    if device is None or group is None or group.size < 2:
        text = f"{NAME} needs at least 2 ranks"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    steps = ctx.params.steps
    if not LEAST_STEPS <= steps <= MOST_STEPS:
        raise ValueError(f"parameter 'steps' must be from {LEAST_STEPS} to {MOST_STEPS}, not {steps}")
    size = LARGE if ctx.params.large else SMALL
    if device.members:
        shards, times = yield from mesh_steps(cast("Mesh", device), group, NAME, size, steps)
        for number, (member, shard, measured) in enumerate(zip(device.members, shards, times, strict=True)):
            yield _evidence(ctx, dataclasses.replace(group, rank=number), member, shard, measured)
        return
    rank = yield from meet(group, device)
    shard = Shard(device, group, size)
    with one_thread(device):
        measured = yield from _steps(ctx, rank, shard)
    yield _evidence(ctx, group, device, shard, measured)
    leave_unwanted(rank)


def mesh_steps(
    mesh: Mesh, group: Group, name: str, size: Size, steps: int
) -> Generator[Progress, None, tuple[list[Shard], list[dict[str, Any]]]]:
    """Be all ranks: the work of each, and its times."""
    yield progress(RENDEZVOUS, "joined")
    if len(mesh.members) != group.size:
        raise ValueError(f"a group of {group.size} ranks needs a mesh of {group.size} devices, not {len(mesh.members)}")
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


@dataclass(frozen=True)
class Params:
    steps: int = 4
    """Steps of each rank, 2 to 16; the first does not count for times."""
    large: bool = False
    """Whether the model is the large one of `train_step`, with 25 MB of gradients: minutes on CPUs."""


def _evidence(
    ctx: Context[Params], group: Group, device: Device, shard: Shard, times: Mapping[str, float | None]
) -> Evidence:
    """What a rank says, in the words of every collective, and besides of its steps."""
    size_bytes = shard.gradient_bytes
    measured = {
        "size_bytes": size_bytes,
        "bytes": size_bytes,
        **{name: None if seconds is None else float(f"{seconds:.6g}") for name, seconds in times.items()},
        "limits": limits_of_size(ctx, NAME, size_bytes, largest=True, more=("own_seconds",)),
        "mismatches": 0,
        "first": None,
        "sources": {},
    }
    return told_by_rank(group, device, shard.key, {"sizes": [measured], "training": shard.told()})


def _steps(ctx: Context[Params], rank: Rank, shard: Shard) -> Generator[Progress, None, dict[str, float | None]]:
    """All steps of this rank; its times."""
    seconds: list[float] = []
    ready_seconds = shared_seconds = 0.0
    own, since = OwnTime(ctx.host), time.perf_counter()
    for number in range(ctx.params.steps):
        shard.compute(number)
        rank.device.synchronize()
        step = f"{NAME}/{number + 1}"
        yield progress(step, "entered")
        begun = time.perf_counter()
        with ends_with_failure(rank.group, rank.distributed):
            shard.reduce(rank.distributed)
            rank.device.synchronize()
        ended = time.perf_counter()
        yield progress(step, "left")
        shard.update()
        shared_seconds += ended - begun
        if number:  # the first step is longer: it is held against float64, and libraries warm up
            seconds.append(ended - begun)
            ready_seconds += begun - since
        since = ended
    return {
        "seconds": median(seconds),
        "ready_seconds": ready_seconds,
        **own.spent(without_seconds=shared_seconds),
    }
