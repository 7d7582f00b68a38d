"""The `all_reduce` check."""

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
    judge=functools.partial(judge_ranks, "all_reduce"),
)
def all_reduce(ctx: Context[Params]) -> Iterator[Finding | Evidence | Progress]:
    """
    The sum over all ranks arrives at every rank, exact in every element, and fast.

    Reads:   all devices of the group, by torch.distributed with the accelerator's backend, at three sizes.
    Judges:  fail CollectiveMismatch | fail RankAbsent, RankDied, RankHung (the culprit, not those who waited for it) |
             fail SlowLink (limits `all_reduce_busbw_bytes_per_second`, `..._algbw_...`, `all_reduce_duration_seconds`:
             for the largest size; `NAME/SIZE_BYTES` for any other,
             `nodes_NAME` between nodes) | unknown Timeout (culprit unknown) | skip
             NotApplicable (fewer than 2 ranks) | pass with bandwidths and times.
    Cost:    quick: about 0.1 s on 2 ranks of one core each, 24 MiB each.
    Source:  nccl-tests, doc/PERFORMANCE.md: size is the size of one rank's buffer; algbw = size / time,
             busbw = algbw * 2 (n - 1) / n. Time: of the slowest rank.
    Unverified: NCCL on GPUs, Neuron's collectives, EFA. It has run by gloo on CPUs, also between network namespaces,
             and on XLA's CPU device.
    """
    yield from run_ranks(ctx, "all_reduce", _build)


def _build(rank: Rank, elements: int) -> Operation:
    torch, distributed = rank.torch, rank.distributed
    mine = rank.values(rank.group.rank, elements).to(rank.device.torch_device)
    buffer = torch.empty_like(mine)  # the operation is in place
    return Operation(
        run=lambda: distributed.all_reduce(buffer),
        refresh=lambda: buffer.copy_(mine),
        output=buffer,
        expected=lambda: rank.sums(elements),
    )
