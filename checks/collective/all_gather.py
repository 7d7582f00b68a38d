"""The `all_gather` check."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from checks.collective.judge import judge_ranks
from checks.collective.ranks import Operation, Params, Rank, run_ranks
from checks.contract import Context, Evidence, Finding, Progress, check


@check(
    tier="quick",
    interval_seconds=3600,
    timeout_seconds=60,
    scope="group",
    judge=functools.partial(judge_ranks, "all_gather"),
)
def all_gather(ctx: Context[Params]) -> Iterator[Finding | Evidence | Progress]:
    """
    The data of each rank arrives at every rank, exact in every element, and fast.

    Reads:   all devices of the group, by torch.distributed with the accelerator's backend, at three sizes.
    Judges:  fail CollectiveMismatch (a rank that sent wrong values to several is named, not its receivers) | fail
             RankAbsent, RankDied, RankHung (the culprit, not those who waited for it) | fail SlowLink (limits
             `all_gather_busbw_bytes_per_second`, `..._algbw_...`, `all_gather_duration_seconds`: for the largest size;
             `NAME/SIZE_BYTES` for any other, `nodes_NAME` between nodes) | unknown Timeout (culprit unknown) | skip
             NotApplicable (fewer than 2 ranks) | pass with bandwidths and times.
    Cost:    quick: about 0.1 s on 2 ranks of one core each, 20 MiB each.
    Source:  nccl-tests, doc/PERFORMANCE.md: size is the size of the gathered whole; algbw = size / time,
             busbw = algbw * (n - 1) / n. Time: of the slowest rank.
    Unverified: NCCL on GPUs, Neuron's collectives, EFA. It has run by gloo on CPUs, also between network namespaces,
             and on XLA's CPU device.
    """
    yield from run_ranks(ctx, "all_gather", _build)


def _build(rank: Rank, elements: int) -> Operation:
    torch, distributed, size = rank.torch, rank.distributed, rank.group.size
    share = elements // size
    mine = rank.values(rank.group.rank, share).to(rank.device.torch_device)
    gathered = torch.empty(elements, dtype=torch.float32, device=rank.device.torch_device)
    return Operation(
        run=lambda: distributed.all_gather_into_tensor(gathered, mine),
        refresh=lambda: gathered.fill_(float("nan")),
        output=gathered,
        expected=lambda: torch.cat([rank.values(source, share) for source in range(size)]),
        share=share,
    )
