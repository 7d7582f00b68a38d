"""
One rank that times collectives in turns by the checks of healthd and by a plain loop. Run by `bench_collectives.py`.

    python -m tests.benchmarks.both_ranks RANK SIZE RENDEZVOUS_FILE ROUNDS

The same processes, cores and process group serve both sides, a fraction of a second apart, so that what else happens on
the machine meets both. Prints one JSON object: `told`, the evidence of the checks by operation and round, and `plain`,
the median seconds of one operation by operation, size in bytes and round.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from typing import Any

from checks.accelerators import cpu
from checks.collective.all_gather import all_gather
from checks.collective.all_reduce import all_reduce
from checks.collective.ranks import Params, join, reach
from checks.collective.reduce_scatter import reduce_scatter
from checks.contract import Context, Evidence, Group, Tier
from checks.host.machine import Host

CHECKS = {check.name: check for check in (all_gather, all_reduce, reduce_scatter)}
SIZES_BYTES = Params().sizes_bytes
ITERATIONS = 9  # of each size and round, on both sides; the checks' own 5 leave medians of medians too rough
WARMUP = Params().warmup
TIMEOUT_SECONDS = 60.0


def main(rank: int, size: int, file: str, rounds: int) -> None:
    """Be that rank."""
    inventory = cpu.find(Host(None), {"cpu_devices": size})
    device = cpu.bind(f"cpu:{rank}", inventory, {})
    context = Context(
        host=Host(None),
        params=Params(iterations=ITERATIONS),
        tier=Tier.QUICK,
        device=device,
        group=Group(
            rank=rank,
            size=size,
            rendezvous=f"file://{file}",
            interface=None,
            seed=7,
            timeout_seconds=TIMEOUT_SECONDS,
            targets=tuple(f"cpu:{index}" for index in range(size)),
        ),
        previous=None,
        inventory=inventory,
        limits={},
    )
    assert context.group is not None
    distributed = join(context.group, device, reach(context.group, device))
    told: dict[str, list[Any]] = {name: [] for name in CHECKS}
    plain: dict[str, dict[int, list[float]]] = {name: {s: [] for s in SIZES_BYTES} for name in CHECKS}
    for number in range(rounds):
        for name, check in CHECKS.items():
            sides = ("told", "plain") if number % 2 else ("plain", "told")
            for side in sides:
                if side == "told":
                    evidence = [item for item in check(context) if isinstance(item, Evidence)]
                    told[name].extend(dataclasses.asdict(item) for item in evidence)
                    continue
                for size_bytes, seconds in plain_loop(device.torch, distributed, name, size).items():
                    plain[name][size_bytes].append(seconds)
    distributed.barrier()
    distributed.destroy_process_group()
    json.dump({"told": told, "plain": plain}, sys.stdout)


def plain_loop(torch: Any, distributed: Any, name: str, ranks: int) -> dict[int, float]:
    """What a person would write: buffers, a loop, a clock. Median seconds by size."""
    found = {}
    for size_bytes in SIZES_BYTES:
        elements = size_bytes // 4 // ranks * ranks
        # Not zeros: pages that nobody has written are all one page, which is read faster than memory.
        whole, part = torch.ones(elements), torch.ones(elements // ranks)
        seconds = []
        for _ in range(WARMUP + ITERATIONS):
            began = time.perf_counter()
            if name == "all_gather":
                distributed.all_gather_into_tensor(whole, part)
            elif name == "all_reduce":
                distributed.all_reduce(whole)
            else:
                distributed.reduce_scatter_tensor(part, whole)
            seconds.append(time.perf_counter() - began)
        found[size_bytes] = statistics.median(seconds[WARMUP:])
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
