"""
All ranks of a collective in one process, on a mesh: the same data, sizes, comparison and evidence as separate ranks.

What differs is who can be told from whom: one process hangs or dies as a whole, so that no rank is named for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from checks.collective.ranks import ELEMENT_BYTES, RENDEZVOUS, Params, Rank, compare, limits_of, progress, told_by_rank
from checks.contract import Context, Evidence, Group, Mesh, Progress
from checks.device.sampling import median


def run_mesh(ctx: Context[Params], name: str, mesh: Mesh, group: Group) -> Iterator[Evidence | Progress]:
    """Be all ranks of the collective `name`: run every size, say what each rank measured."""
    yield progress(RENDEZVOUS, "joined")
    if len(mesh.members) != group.size:
        raise ValueError(f"a group of {group.size} ranks needs a mesh of as many devices, not {len(mesh.members)}")
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


def _expected(name: str, rank: Rank, index: int, elements: int) -> Any:
    """What rank `index` must hold in the end, on the host."""
    size = rank.group.size
    share = elements // size
    if name == "all_gather":
        return cast("Any", rank.torch.cat([rank.values(source, share) for source in range(size)]))
    sums = rank.sums(elements)
    return sums if name == "all_reduce" else sums[index * share : (index + 1) * share]
