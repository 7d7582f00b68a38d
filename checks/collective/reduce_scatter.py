"""The `reduce_scatter` check."""

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
    judge=functools.partial(judge_ranks, "reduce_scatter"),
)
def reduce_scatter(ctx: Context[Params]) -> Iterator[Finding | Evidence | Progress]:
    """
    Each rank gets its share of the sum over all ranks, exact in every element, and fast.

    Reads:   all devices of the group, by torch.distributed with the accelerator's backend, at three sizes.
    Judges:  fail CollectiveMismatch | fail RankAbsent, RankDied, RankHung (the culprit, not those who waited for it) |
             fail SlowLink (limits `reduce_scatter_busbw_bytes_per_second`, `..._algbw_...`,
             `reduce_scatter_duration_seconds`: for the largest size; `NAME/SIZE_BYTES` for any other,
             `nodes_NAME` between nodes) | unknown Timeout
             (culprit unknown) | skip NotApplicable (fewer than 2 ranks) | pass with bandwidths and times.
    Cost:    quick: about 0.2 s on 2 ranks of one core each, 20 MiB each.
    Source:  nccl-tests, doc/PERFORMANCE.md: size is the size of the whole before the scatter; algbw = size / time,
             busbw = algbw * (n - 1) / n. Time: of the slowest rank.
    Unverified: NCCL on GPUs, Neuron's collectives, EFA. It has run by gloo on CPUs, also between network namespaces,
             and on XLA's CPU device.
    """
    yield from run_ranks(ctx, "reduce_scatter", _build)


def _build(rank: Rank, elements: int) -> Operation:
    torch, distributed, me = rank.torch, rank.distributed, rank.group.rank
    share = elements // rank.group.size
    mine = rank.values(me, elements).to(rank.device.torch_device)
    scattered = torch.empty(share, dtype=torch.float32, device=rank.device.torch_device)
    return Operation(
        run=lambda: distributed.reduce_scatter_tensor(scattered, mine),
        refresh=lambda: scattered.fill_(float("nan")),
        output=scattered,
        expected=lambda: rank.sums(elements)[me * share : (me + 1) * share],
    )
