"""
The bandwidths that the collectives report, against a plain loop of the same operations in the same run.

Both sides: 2 ranks on the same cores, each in a session of its own (see `processes.timed`), gloo over the loopback
interface, the same sizes and counts, fresh processes each round, the rounds in turns. Compared are medians over the rounds, since single rounds of two busy cores differ by more
than what is looked for.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from checks.contract import Tier
from healthd.runner import Plan, Runner, RunnerSettings
from tests.benchmarks.figures import Bench, Figure, Reading, percentile
from tests.benchmarks.plain_ranks import SIZES_BYTES
from tests.benchmarks.processes import SEPARATE, end

ROUNDS = 7
ITERATIONS = 25  # more than the checks' own 5, on both sides, so that the rounds say more
RANKS = 2
OPERATIONS = ("all_gather", "all_reduce", "reduce_scatter")
MIDDLE, LARGE = SIZES_BYTES[1], SIZES_BYTES[2]

FIGURES = {
    name: Figure(
        name=f"busbw_{name}",
        what=f"{name}: busbw told, of a plain loop's (8 MiB)",
        unit="ratio",
        lower=0.95,
        upper=1.05,
    )
    for name in OPERATIONS
}

Times = Mapping[str, Mapping[int, float]]  # operation -> size in bytes -> bytes/s


def collectives() -> Iterator[Reading]:
    """Rounds in turns, then one reading an operation."""
    told: dict[tuple[str, int], list[float]] = defaultdict(list)
    plain: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        sides = [(told, told_busbw), (plain, plain_busbw)]
        for found, measure in sides if number % 2 else sides[::-1]:
            for operation, sizes in measure().items():
                for size_bytes, value in sizes.items():
                    found[operation, size_bytes].append(value)
    for operation, figure in FIGURES.items():
        ours, theirs = told[operation, LARGE], plain[operation, LARGE]
        ratio = statistics.median(ours) / statistics.median(theirs)
        note = f"told {_quartiles(ours)}, plain {_quartiles(theirs)} GB/s (quartiles of {len(ours)})"
        middle = f"; at 1 MiB told {_quartiles(told[operation, MIDDLE])}, plain {_quartiles(plain[operation, MIDDLE])}"
        yield Reading(
            figure=figure.name,
            value=ratio,
            ratio=max(ours) / max(theirs),
            beside="best of each",
            note=note + middle,
        )


def told_busbw() -> Times:
    """One run of the checks."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        params = {name: {"iterations": ITERATIONS} for name in OPERATIONS}
        runner = Runner(RunnerSettings(run_dir=Path(folder), options={"cpu_devices": RANKS}, params=params))
        results = asyncio.run(runner.run(Plan(tier=Tier.QUICK, checks=OPERATIONS, executor="bench")))
    found: dict[str, dict[int, float]] = {}
    for result in results:
        wanted = f"{result.check}_busbw_bytes_per_second"
        found[result.check] = {
            int(measurement.labels["size_bytes"]): measurement.value
            for finding in result.findings
            for measurement in finding.measurements
            if measurement.name == wanted and measurement.value is not None
        }
        if set(found[result.check]) != set(SIZES_BYTES):
            raise RuntimeError(f"{result.check}: {result.status.value}: {result.findings}")
    return found


def plain_busbw() -> Times:
    """One run of the loop; the time of the slowest rank counts, as with the checks."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        argv = [sys.executable, "-m", "tests.benchmarks.plain_ranks"]
        ranks = [
            subprocess.Popen(
                [*argv, str(rank), str(RANKS), f"{folder}/meet", str(ITERATIONS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **SEPARATE,
            )
            for rank in range(RANKS)
        ]
        try:
            outputs = [rank.communicate(timeout=60) for rank in ranks]
        finally:
            for rank in ranks:
                end(rank, grace_seconds=0.0)
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"the plain loop failed: {outputs[0][1][-300:]}")
    times = [json.loads(text) for text, _ in outputs]
    return {
        name: {
            size: busbw_bytes_per_second(name, size, RANKS, max(one[name][str(size)] for one in times))
            for size in SIZES_BYTES
        }
        for name in OPERATIONS
    }


def busbw_bytes_per_second(operation: str, size_bytes: int, ranks: int, seconds: float) -> float:
    """By nccl-tests, doc/PERFORMANCE.md; written anew here, so that a slip in the checks' own shows."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks}.get(operation, (ranks - 1) / ranks)
    return size_bytes / seconds * factor


def _quartiles(values: list[float]) -> str:
    return "/".join(f"{percentile(values, q) / 1e9:.2f}" for q in (25, 50, 75))


BENCHES = (Bench(name="collectives", figures=tuple(FIGURES.values()), run=collectives, limit_seconds=90),)
