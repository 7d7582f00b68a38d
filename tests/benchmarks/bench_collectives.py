"""
The bandwidths that the collectives report, against a plain loop of the same operations in the same run.

Both sides in turns in the same two ranks (see `both_ranks.py`), the check's numbers through its own judge; the figure
is the ratio of the medians over all rounds.
Beside it the same checks once through the runner, workers and all, to see that nothing on that way makes them slower.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from checks.contract import Evidence, Finding, Tier
from checks.worker.faults import Fault, parse_fault
from healthd.core.model import CheckResult
from healthd.runner.runner import Runner
from healthd.runner.settings import OnProgress, Plan, RunnerSettings, RunProgress
from tests.benchmarks.both_ranks import CHECKS, ITERATIONS, SIZES_BYTES
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, percentile
from tests.benchmarks.processes import SEPARATE, end

ROUNDS = 20
HUNG_ROUNDS = 2
RANKS = 2
MIDDLE, LARGE = SIZES_BYTES[1], SIZES_BYTES[-1]

FIGURES = {
    name: Figure(
        name=f"busbw_{name}", what=f"{name}: busbw told, of a plain loop's, 8 MiB", unit="ratio", lower=0.95, upper=1.05
    )
    for name in CHECKS
}

LIMIT_SECONDS = CHECKS["all_reduce"].timeout_seconds
HUNG = Figure(
    name="hung_collective", what="hung collective that has run before, from its start", unit="seconds", upper=10.0
)

Rounds = Mapping[str, Mapping[int, list[float]]]  # operation -> size in bytes -> bytes/s of each round


def collectives(scale: Scale) -> Iterator[Reading]:
    """Medians over the rounds, one reading an operation."""
    told, plain = both_sides(scale.of(ROUNDS, 2))
    whole = through_the_runner()
    for operation, figure in FIGURES.items():
        ours, theirs = told[operation][LARGE], plain[operation][LARGE]
        note = (
            f"told {_quartiles(ours)}, plain {_quartiles(theirs)} GB/s (quartiles of {len(ours)}; at 1 MiB told "
            f"{_quartiles(told[operation][MIDDLE])}, plain {_quartiles(plain[operation][MIDDLE])}); "
            f"once through the runner {whole[operation] / 1e9:.2f}"
        )
        yield Reading(
            figure=figure.name,
            value=statistics.median(ours) / statistics.median(theirs),
            ratio=statistics.median(one / other for one, other in zip(ours, theirs, strict=True)),
            beside="the plain loop, median over pairs of rounds",
            note=note,
        )


def both_sides(rounds: int) -> tuple[Rounds, Rounds]:
    """Bus bandwidths as the checks tell them, and by the plain loop."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        argv = [sys.executable, "-m", "tests.benchmarks.both_ranks"]
        ranks = [
            subprocess.Popen(
                [*argv, str(rank), str(RANKS), f"{folder}/meet", str(rounds)],
                **SEPARATE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            outputs = [rank.communicate(timeout=80) for rank in ranks]
        finally:
            for rank in ranks:
                end(rank, grace_seconds=0.0)
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank failed: {outputs[0][1][-200:]} {outputs[1][1][-200:]}")
    measured = [json.loads(text) for text, _ in outputs]
    told = {name: _told(name, [one["told"][name] for one in measured]) for name in CHECKS}
    plain = {
        name: {
            size: [
                busbw_bytes_per_second(name, size, RANKS, max(seconds))
                for seconds in zip(*(one["plain"][name][str(size)] for one in measured), strict=True)
            ]
            for size in SIZES_BYTES
        }
        for name in CHECKS
    }
    return told, plain


def _told(name: str, by_rank: list[list[dict[str, object]]]) -> dict[int, list[float]]:
    judge = CHECKS[name].judge
    assert judge is not None
    found: dict[int, list[float]] = {size: [] for size in SIZES_BYTES}
    for items in zip(*by_rank, strict=True):
        evidence = [Evidence(**item) for item in items]
        for size, value in told_busbw(name, judge(evidence, [])).items():
            found[size].append(value)
    return found


def told_busbw(name: str, findings: Iterable[Finding]) -> dict[int, float]:
    """Bus bandwidths in findings of a collective, by size; RuntimeError when one is not there."""
    found = {
        int(measurement.labels["size_bytes"]): measurement.value
        for finding in findings
        for measurement in finding.measurements
        if measurement.name == f"{name}_busbw_bytes_per_second" and measurement.value is not None
    }
    if set(found) != set(SIZES_BYTES):
        raise RuntimeError(f"{name} told bandwidths of {sorted(found)} bytes alone")
    return found


def through_the_runner() -> dict[str, float]:
    """The largest size's, as a user gets it."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        params = {name: {"iterations": ITERATIONS} for name in CHECKS}
        runner = Runner(RunnerSettings(run_dir=Path(folder), options={"cpu_devices": RANKS}, params=params))
        results = asyncio.run(runner.run(Plan(tier=Tier.QUICK, checks=tuple(CHECKS), executor="bench")))
    return {result.check: told_busbw(result.check, result.findings)[LARGE] for result in results}


def busbw_bytes_per_second(operation: str, size_bytes: int, ranks: int, seconds: float) -> float:
    """By nccl-tests, doc/PERFORMANCE.md; written anew here, so that a slip in the checks' own shows."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks}.get(operation, (ranks - 1) / ranks)
    return size_bytes / seconds * factor


def _quartiles(values: list[float]) -> str:
    return "/".join(f"{percentile(values, q) / 1e9:.2f}" for q in (25, 50, 75))


def hung(scale: Scale) -> Iterator[Reading]:
    """One rank hangs in an all-reduce that this machine has run before: from the ranks' start to the named rank."""
    seconds = []
    for _ in range(scale.of(HUNG_ROUNDS, 1)):
        with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
            settings = RunnerSettings(run_dir=Path(folder), times_file=Path(folder) / "times.json")
            _all_reduce(settings)
            began: list[float] = []

            def heard(event: RunProgress, began: list[float] = began) -> None:
                if event.event == "started":
                    began.append(time.perf_counter())

            result = _all_reduce(settings, faults=(parse_fault("all_reduce@rank:1=hang"),), on_progress=heard)
            seconds.append(time.perf_counter() - began[0])
            if [finding.target for finding in result.findings] != ["rank:1"]:
                raise RuntimeError(f"not rank 1 alone was named: {result.findings}")
    yield Reading(
        figure=HUNG.name,
        value=max(seconds),
        ratio=max(seconds) / LIMIT_SECONDS,
        beside=f"the time limit of the check, {HUNG.shown(LIMIT_SECONDS)}",
        note=f"worst of {len(seconds)}; after one good run",
    )


def _all_reduce(
    settings: RunnerSettings, *, faults: Sequence[Fault] = (), on_progress: OnProgress | None = None
) -> CheckResult:
    plan = Plan(tier=Tier.QUICK, checks=("all_reduce",), executor="bench")
    (result,) = asyncio.run(Runner(settings).run(plan, faults=faults, on_progress=on_progress))
    return result


BENCHES = (
    Bench(name="collectives", figures=tuple(FIGURES.values()), run=collectives, limit_seconds=100),
    Bench(name="hung_ranks", figures=(HUNG,), run=hung, limit_seconds=120),
)
