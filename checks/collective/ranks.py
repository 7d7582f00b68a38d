"""
A worker as a rank: its process group, the timed loop and the comparison, shared by all collectives.

Nothing is judged here: a rank says what it measured, and `judge.py` compares the ranks.

Data: fp32 whole numbers from -8 to 8 that seed and rank decide. Each partial sum over n ranks is a whole number of at
most 8 n, exact in fp32 (24 bits) in any order of summation while n < 2^21; so the right answer is one, to the last
bit, and every element is compared with it. Each rank repeats a table of 8191 numbers, a prime, so that a block of a
power of two that lands in the wrong place shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from checks.collective.own_time import OwnTime
from checks.collective.store import open_store
from checks.contract import NO_LIMIT, Context, Device, Evidence, Finding, Group, Limit, Mesh, Progress, Status
from checks.device.sampling import median

RENDEZVOUS = "rendezvous"
CONNECTING = "rendezvous/peers"  # the main node was reached; between nodes alone
ELEMENT_BYTES = 4  # fp32
_TABLE = 8191
_LARGEST = 8  # of the numbers

_open_rendezvous: str | None = None  # of the process group of this process; torch has one default group a process
_given_interfaces: dict[str, str | None] = {}  # by variable, before the first group
_broken: set[str] = set()  # groups that a failure has ended: their rendezvous cannot be used again


@dataclass(frozen=True)
class Params:
    sizes_bytes: tuple[int, ...] = (1024, 2**20, 8 * 2**20)
    """Message sizes as nccl-tests counts them (total bytes), ascending: latency, middle, bandwidth."""
    iterations: int = 5
    """Timed operations of each size; the median counts."""
    warmup: int = 1
    """Operations before them that do not count."""


@dataclass(frozen=True)
class Rank:
    """What an operation is built from: torch and its distributed module, the device, and who we are."""

    torch: Any
    distributed: Any
    device: Device
    group: Group

    def values(self, rank: int, elements: int) -> Any:
        """What a rank contributes, on the host  # [elements] fp32."""
        return self._tiled(self._table(rank), elements)

    def sums(self, elements: int) -> Any:
        """The sum of what all ranks contribute, on the host  # [elements] fp32."""
        table = sum(self._table(rank) for rank in range(self.group.size))
        return self._tiled(table, elements)

    def _table(self, rank: int) -> Any:
        generator = self.torch.Generator().manual_seed(self.group.seed * 1_000_003 + rank)
        return self.torch.randint(-_LARGEST, _LARGEST + 1, (_TABLE,), generator=generator).float()

    def _tiled(self, table: Any, elements: int) -> Any:
        return table.repeat(-(-elements // _TABLE))[:elements]


@dataclass(frozen=True)
class Operation:
    """
    One collective of one size, with its buffers in place.

    `refresh` makes the inputs fresh and the outputs NaN, outside the time; `output` is what must equal `expected()`.
    `share` is how many elements of the output come from each rank, where each comes from one.
    """

    run: Callable[[], object]
    refresh: Callable[[], object]
    output: Any
    expected: Callable[[], Any]
    share: int | None = None


Build = Callable[[Rank, int], Operation]  # (rank, elements in all, a multiple of the number of ranks) -> operation


def run_ranks(ctx: Context[Params], name: str, build: Build) -> Iterator[Finding | Evidence | Progress]:
    """Be one rank of the collective `name`: join, run every size, say what was measured."""
    device, group = ctx.device, ctx.group
    if device is None or group is None or group.size < 2:
        text = f"{name} needs at least 2 ranks"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    if device.members:
        from checks.collective.mesh import run_mesh

        yield from run_mesh(ctx, name, cast("Mesh", device), group)
        return
    rank = yield from meet(group, device)
    sizes = []
    for size_bytes in ctx.params.sizes_bytes:
        elements = max(1, size_bytes // ELEMENT_BYTES // group.size) * group.size
        own = OwnTime(ctx.host)
        operation = build(rank, elements)
        step = f"{name}/{size_bytes}"
        yield progress(step, "entered")
        seconds, ready, shared_seconds = _time(device, operation, ctx.params, group)
        yield progress(step, "left")
        compared = compare(device.torch, device.read(operation.output), operation.expected(), operation.share)
        sizes.append(
            {
                "size_bytes": size_bytes,
                "bytes": elements * ELEMENT_BYTES,
                "seconds": median(seconds),
                "ready_seconds": median(ready),
                **own.spent(without_seconds=shared_seconds),
                "limits": limits_of(ctx, name, size_bytes),
                **compared,
            }
        )
    yield told_by_rank(group, device, device.key, {"sizes": sizes})
    leave_unwanted(rank)


def told_by_rank(group: Group, device: Device, key: str, measured: Mapping[str, Any]) -> Evidence:
    """What a rank gives to the judge of its group: who it is, and what it measured."""
    return Evidence(
        target=f"rank:{group.rank}",
        key=key,
        data={
            "rank": group.rank,
            "ranks": group.size,
            "device": device.target,
            "targets": list(group.targets),
            "seed": group.seed,
            **measured,
        },
    )


def meet(group: Group, device: Device) -> Generator[Progress, None, Rank]:
    """Find the other ranks, saying how far it is. Raises RuntimeError as `reach` and `join` do."""
    yield progress(RENDEZVOUS, "joined")
    store = reach(group, device)
    if group.rendezvous.startswith("tcp:"):
        yield progress(CONNECTING, "joined")
    rank = Rank(torch=device.torch, distributed=join(group, device, store), device=device, group=group)
    yield progress(RENDEZVOUS, "left")
    return rank


def leave_unwanted(rank: Rank) -> None:
    """Leave a group that is not wanted any more: its port, and its connections to nodes that are busy with others."""
    if rank.group.leave:
        _leave(rank.distributed)


@contextmanager
def ends_with_failure(group: Group, distributed: Any) -> Iterator[None]:
    """A failure of an operation ends the process group: what peers then do in it is no longer defined."""
    try:
        yield
    except RuntimeError:
        _broken.add(group.rendezvous)
        _leave(distributed)
        raise


def reach(group: Group, device: Device) -> Any:
    """
    The store in which ranks of several nodes find each other, once the main node has been reached; else None.

    Also None where the group is open already. Raises RuntimeError when it has been broken by an earlier failure, when
    the main node is not reached in time, or its port is in use.
    """
    distributed = device.torch.distributed
    if not distributed.is_available():
        raise RuntimeError("this torch has no distributed package; install a build with USE_DISTRIBUTED=1")
    if group.rendezvous in _broken:
        raise RuntimeError(f"the process group of {group.rendezvous} is broken by an earlier failure; start new ranks")
    if _open_rendezvous == group.rendezvous:
        return None
    _leave(distributed)
    return open_store(distributed, group) if group.rendezvous.startswith("tcp:") else None


def join(group: Group, device: Device, store: Any) -> Any:
    """
    torch.distributed with the process group of `group` open: the one that is open already when it is the same.

    Raises RuntimeError when peers do not come in time.
    """
    global _open_rendezvous
    import datetime

    distributed = device.torch.distributed
    if _open_rendezvous == group.rendezvous:
        return distributed
    # Inside a node no packet has a reason to leave the machine, and its host name may resolve to nothing.
    interface = group.interface or ("lo" if group.rendezvous.startswith("file:") else None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = _given_interfaces.setdefault(name, os.environ.get(name))  # of an operator, by env of [probe]
        if (wanted := interface or given) is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = wanted
    try:
        distributed.init_process_group(
            backend=device.collective_backend,
            **({"store": store} if store is not None else {"init_method": group.rendezvous}),
            rank=group.rank,
            world_size=group.size,
            timeout=datetime.timedelta(seconds=group.timeout_seconds),
        )
    except RuntimeError:
        _broken.add(group.rendezvous)
        raise
    _open_rendezvous = group.rendezvous
    return distributed


def _leave(distributed: Any) -> None:
    global _open_rendezvous
    _open_rendezvous = None
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _time(device: Device, operation: Operation, params: Params, group: Group) -> tuple[list[float], list[float], float]:
    """
    Seconds of each timed run, of the work of this rank alone that went before it, and of all runs together.

    No barrier: ranks wait for each other in the operation itself, as in a training step. A rank that is late to it was
    long in its own work, while those that waited for it were long in the operation.
    """
    seconds, ready, shared_seconds = [], [], 0.0
    with ends_with_failure(group, device.torch.distributed):
        for index in range(params.warmup + params.iterations):
            since = time.perf_counter()
            operation.refresh()
            device.synchronize()
            begun = time.perf_counter()
            took = device.measure(operation.run, repeats=1, warmup=0)
            shared_seconds += time.perf_counter() - begun
            if index >= params.warmup:
                seconds.extend(took)
                ready.append(begun - since)
    return seconds, ready, shared_seconds


def compare(torch: Any, found: Any, wanted: Any, share: int | None) -> dict[str, Any]:
    """Elements of a result that are not exactly right: how many, the first, and whose share they are in."""
    if torch.equal(found, wanted):
        return {"mismatches": 0, "first": None, "sources": {}}
    places = (found != wanted).nonzero().flatten()  # NaN differs from everything
    first = int(places[0])
    sources: dict[str, int] = {}
    if share:
        counts = (places // share).bincount()
        sources = {str(rank): int(count) for rank, count in enumerate(counts) if count}
    text = f"element {first} is {float(found[first]):g} instead of {float(wanted[first]):g}"
    return {"mismatches": int(places.numel()), "first": text, "sources": sources}


def limits_of(ctx: Context[Params], name: str, size_bytes: int) -> dict[str, list[Any]]:
    """
    Limits of this size as [lower, upper, origin]: `NAME/SIZE_BYTES`, else for the largest size the plain name.

    Bandwidth means something for large messages alone; a limit on the plain name must not fail the small ones.
    """
    return limits_of_size(ctx, name, size_bytes, largest=size_bytes == max(ctx.params.sizes_bytes))


def limits_of_size(
    ctx: Context[Any], name: str, size_bytes: int, *, largest: bool, more: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """The same for a check with sizes of its own; `more` are quantities that it has besides."""
    limits = {}
    for quantity in ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds", *more):
        limit: Limit = ctx.limit(f"{name}_{quantity}/{size_bytes}", "node")
        if limit is NO_LIMIT and largest:
            limit = ctx.limit(f"{name}_{quantity}", "node")
        limits[quantity] = [limit.lower, limit.upper, limit.origin]
    return limits


def progress(step: str, event: str) -> Progress:
    return Progress(step=step, event=event, monotonic_seconds=time.monotonic())
