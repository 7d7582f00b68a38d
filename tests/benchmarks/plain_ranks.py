"""
What a person would write to time a collective: one rank, torch.distributed, a loop. Run by `bench_collectives.py`.

    python plain_ranks.py RANK SIZE RENDEZVOUS_FILE ITERATIONS

Prints JSON: operation -> message size -> median seconds of one operation on this rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings

SIZES_BYTES = (1024, 2**20, 8 * 2**20)
WARMUP = 1


def main(rank: int, size: int, file: str, iterations: int) -> None:
    """Be one rank, on the same share of the cores as a device of healthd has."""
    cores = sorted(os.sched_getaffinity(0))
    share = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size] or [cores[rank % len(cores)]]
    os.sched_setaffinity(0, share)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
    import torch.distributed as distributed

    torch.set_num_threads(len(share))
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    found: dict[str, dict[int, float]] = {"all_gather": {}, "all_reduce": {}, "reduce_scatter": {}}
    for size_bytes in SIZES_BYTES:
        elements = size_bytes // 4 // size * size
        # Not zeros: pages that nobody has written are all one page, which is read faster than memory.
        whole, part = torch.ones(elements), torch.ones(elements // size)
        operations = {
            "all_gather": lambda whole=whole, part=part: distributed.all_gather_into_tensor(whole, part),
            "all_reduce": lambda whole=whole: distributed.all_reduce(whole),
            "reduce_scatter": lambda whole=whole, part=part: distributed.reduce_scatter_tensor(part, whole),
        }
        for name, operation in operations.items():
            seconds = []
            for _ in range(WARMUP + iterations):
                began = time.perf_counter()
                operation()
                seconds.append(time.perf_counter() - began)
            found[name][size_bytes] = statistics.median(seconds[WARMUP:])
    distributed.barrier()
    distributed.destroy_process_group()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
