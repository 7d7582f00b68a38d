"""
A worker as a rank: its process group, the timed loop and the comparison, shared by all collectives.

Nothing is judged here: a rank says what it measured, and `judge.py` compares the ranks.

Data: fp32 whole numbers from -8 to 8 that seed and rank decide. Each partial sum over n ranks is a whole number of at
most 8 n, exact in fp32 (24 bits) in any order of summation while n < 2^21; so the right answer is one, to the last
bit, and every element is compared with it. Each rank repeats a table of 8191 numbers, a prime, so that a block of a
power of two that lands in the wrong place shows.

Also here:

- what a rank spends on its own account, so that who is late can be told from those who wait for it;
- time and bandwidths of one operation over ranks, by the definitions of nccl-tests (doc/PERFORMANCE.md);
- where the ranks of several nodes find each other: a key-value store of torch on the main node, over TCP;
- all ranks of a collective in one process, on a mesh: the same data, sizes, comparison and evidence as separate
  ranks.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

from checks.contract import NO_LIMIT, SEVERITY, Context, Device, Evidence, Finding, Group, Limit, Mesh, Progress, Status
from checks.host.machine import Host, HostError
from checks.limits import within
from checks.peers import median

_IN_USE = ("eaddrinuse", "address already in use", "errno: 98")
_KNOWN_SECONDS = 0.5  # rank 0 says which group it is as soon as it listens

RENDEZVOUS = "rendezvous"
CONNECTING = "rendezvous/peers"  # the main node was reached; between nodes alone
ELEMENT_BYTES = 4  # fp32
_TABLE = 8191
_LARGEST = 8  # of the numbers

_open_rendezvous: str | None = None  # of the process group of this process; torch has one default group a process
_given_interfaces: dict[str, str | None] = {}  # by variable, before the first group
_broken: set[str] = set()  # groups that a failure has ended: their rendezvous cannot be used again


def bus_factor(op: str, ranks: int) -> float:
    """What makes the bus bandwidth of the algorithm bandwidth."""
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def judge_bandwidth(
    name: str,
    subject: str,
    size_bytes: int,
    seconds: float,
    *,
    factor: float,
    limit: Callable[[str], Limit],
    labels: Mapping[str, str],
) -> Finding:
    """
    One finding with three measurements, `NAME_` and a suffix; its message is that of the worst.

    `limit` gives the limit of a suffix, `busbw_bytes_per_second` and so on. A time that is none makes no bandwidth.
    """
    algbw = size_bytes / seconds if seconds > 0 else math.nan
    values = {
        "busbw_bytes_per_second": algbw * factor,
        "algbw_bytes_per_second": algbw,
        "duration_seconds": seconds,
    }
    judged = [
        within(
            value,
            name=f"{name}_{suffix}",
            target="node",
            limit=limit(suffix),
            reason="SlowLink",
            subject=f"{subject}: {suffix.partition('_')[0]}",
            labels=labels,
        )
        for suffix, value in values.items()
    ]
    worst = max(judged, key=lambda finding: SEVERITY[finding.status])
    return dataclasses.replace(worst, measurements=tuple(one for finding in judged for one in finding.measurements))


def limit_of(size: Mapping[str, Any], suffix: str) -> Limit:
    """The limit that a rank has told with what it measured at one size."""
    lower, upper, origin = size["limits"][suffix]
    return Limit(lower=lower, upper=upper, origin=origin)


def run_ranks(ctx: Context[Params], name: str, build: Build) -> Iterator[Finding | Evidence | Progress]:
    """Be one rank of the collective `name`: join, run every size, say what was measured."""
    device, group = ctx.device, ctx.group
    if device is None or group is None or group.size < 2:
        text = f"{name} needs at least 2 ranks"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    if device.members:
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


class OwnTime:
    """Counts from its making."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._since = time.perf_counter()
        self._withheld = cpu_wait_seconds(host)

    def spent(self, *, without_seconds: float) -> dict[str, float | None]:
        """
        `own_seconds` of work that waits for no other rank: all of the time but `without_seconds`, which ranks shared.

        `cpu_wait_seconds` is how long the threads of this process were ready to run and were given no processor, in
        all that time: near zero on a machine of its own, and large in a rank whose share of the processors is cut,
        while those that wait for it in an operation sleep. None where the kernel does not count it.
        """
        own_seconds = time.perf_counter() - self._since - without_seconds
        now = cpu_wait_seconds(self._host)
        known = now is not None and self._withheld is not None
        return {
            "own_seconds": max(0.0, own_seconds),
            "cpu_wait_seconds": max(0.0, (now or 0.0) - (self._withheld or 0.0)) if known else None,
        }


def cpu_wait_seconds(host: Host) -> float | None:
    """
    How long all threads of this process have waited for a processor since they began; None where it is not told.

    Source: Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat: time on the cpu and time spent waiting on a
    runqueue, both in nanoseconds, and timeslices run. A group at its cpu.max counts as waiting.
    """
    total = 0
    try:
        for thread in host.listdir("/proc/self/task"):
            total += int(host.read(f"/proc/self/task/{thread}/schedstat").split()[1])
    except (HostError, ValueError, IndexError):  # also a thread that has just ended: the sum would be no sum
        return None
    return total / 1e9


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


def open_store(distributed: Any, group: Group) -> Any:
    """
    The store of a rendezvous `tcp://HOST:PORT?group=ID` (an IPv6 address in brackets); rank 0 serves it.

    It returns as soon as this rank has reached the main node, and waits for no other rank. A store of another group
    that has the port, such as the one before, is left alone. Raises RuntimeError in one line.
    """
    url = urlsplit(group.rendezvous)
    if url.hostname is None or url.port is None:
        raise RuntimeError(f"{group.rendezvous}: not a rendezvous; write tcp://ADDRESS:PORT?group=ID")
    key = f"healthd/{url.query}"
    deadline = time.monotonic() + group.timeout_seconds
    while True:
        store = _store(distributed, group, url.hostname, url.port, deadline)
        if group.rank == 0:
            store.set(key, "here")
            return store
        try:
            store.wait([key], datetime.timedelta(seconds=_KNOWN_SECONDS))
        except RuntimeError:  # torch has errors of its own for the network and its stores; all are RuntimeError
            if time.monotonic() > deadline:
                text = f"{url.hostname} port {url.port} belongs to another group; peers timed out"
                raise RuntimeError(text) from None
        else:
            return store


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


def run_mesh(ctx: Context[Params], name: str, mesh: Mesh, group: Group) -> Iterator[Evidence | Progress]:
    """Be all ranks of the collective `name`: run every size, say what each rank measured."""
    yield progress(RENDEZVOUS, "joined")
    if len(mesh.members) != group.size:
        raise ValueError(f"a group of {group.size} ranks needs a mesh of {group.size} devices, not {len(mesh.members)}")
    rank = Rank(torch=mesh.torch, distributed=None, device=mesh, group=group)
    yield progress(RENDEZVOUS, "left")
    sizes: list[list[dict[str, Any]]] = [[] for _ in mesh.members]
    for size_bytes in ctx.params.sizes_bytes:
        elements = max(1, size_bytes // ELEMENT_BYTES // group.size) * group.size
        own = elements // group.size if name == "all_gather" else elements
        contributions = mesh.torch.stack([rank.values(source, own) for source in range(group.size)])
        step = f"{name}/{size_bytes}"
        yield progress(step, "entered")
        operation = mesh.collective(name, contributions)
        seconds = mesh.measure(operation.run, repeats=ctx.params.iterations, warmup=max(1, ctx.params.warmup))
        yield progress(step, "left")
        for index, (member, output) in enumerate(zip(mesh.members, operation.outputs(), strict=True)):
            sizes[index].append(
                {
                    "size_bytes": size_bytes,
                    "bytes": elements * ELEMENT_BYTES,
                    "seconds": median(seconds),
                    "limits": limits_of(ctx, name, size_bytes),
                    **compare(
                        mesh.torch,
                        member.read(output),
                        _expected(name, rank, index, elements),
                        own if name == "all_gather" else None,
                    ),
                }
            )
    for index, member in enumerate(mesh.members):
        yield told_by_rank(replace(group, rank=index), member, mesh.key, {"sizes": sizes[index]})


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


@dataclass(frozen=True)
class Params:
    sizes_bytes: tuple[int, ...] = (1024, 2**20, 8 * 2**20)
    """Message sizes as nccl-tests counts them (total bytes), ascending: latency, middle, bandwidth."""
    iterations: int = 5
    """Timed operations of each size; the median counts."""
    warmup: int = 1
    """Operations before them that do not count."""


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


def _store(distributed: Any, group: Group, host: str, port: int, deadline: float) -> Any:
    seconds = max(0.1, deadline - time.monotonic())
    try:
        return distributed.TCPStore(
            host,
            port,
            group.size,
            group.rank == 0,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if any(words in str(error).lower() for words in _IN_USE):
            raise RuntimeError(f"port {port} is in use on this node; use another port for the group") from None
        raise


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


def _expected(name: str, rank: Rank, index: int, elements: int) -> Any:
    """What rank `index` must hold in the end, on the host."""
    size = rank.group.size
    share = elements // size
    if name == "all_gather":
        return cast("Any", rank.torch.cat([rank.values(source, share) for source in range(size)]))
    sums = rank.sums(elements)
    return sums if name == "all_reduce" else sums[index * share : (index + 1) * share]


Build = Callable[[Rank, int], Operation]  # (rank, elements in all, a multiple of the number of ranks) -> operation
