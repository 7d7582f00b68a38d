"""A passive round, a quick tier and a hung check: what running checks costs on top of what they measure."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from checks.contract import Status, Tier
from checks.worker.faults import parse_fault
from healthd.core.model import CheckResult, NodeState
from healthd.core.wire import decode
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan, RunnerSettings, RunProgress
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, spread
from tests.benchmarks.processes import HEALTHD, children, timed

PASSIVE_ROUNDS = 15
COMMAND_ROUNDS = 7
QUICK_ROUNDS = 3
ACTIVE_CHECKS = 8  # of the quick tier on any accelerator: five probes, three collectives
IMPORT_SHARE = 2.5  # of the time of importing torch that a quick tier may take besides its measuring
HUNG_LIMIT_SECONDS = 2.0
HUNG_ROUNDS = 3

# What a shell script of such checks does: five of them, by the tools that every machine has.
BASH_FIVE_CHECKS = r"""
set -u
df -P / | awk 'NR==2 { exit ($5+0 > 95) }' || echo "disk full"
df -Pi / | awk 'NR==2 { exit ($5+0 > 95) }' || echo "no inodes"
free -m | awk '/^Mem/ { exit ($7 < 64) }' || echo "no memory"
read -r load _ < /proc/loadavg; awk -v l="$load" 'BEGIN { exit (l > 1000) }' || echo "load"
awk '$4 ~ /^ro/ && $2 == "/" { bad = 1 } END { exit bad }' /proc/mounts || echo "read-only"
"""

PASSIVE = Figure(name="passive_round", what="passive round, child started for it", unit="seconds", upper=0.072)
COMMAND = Figure(
    name="passive_command", what="`healthd check --tier passive`, whole process", unit="seconds", upper=0.2
)
QUICK = Figure(name="quick_command", what="`healthd check --tier quick` of its allowance", unit="ratio", upper=1.0)
HUNG = Figure(name="hung_check", what="hung check with a 2 s limit, from ready", unit="seconds", upper=2.2)


def passive(scale: Scale) -> Iterator[Reading]:
    """Rounds of the runner, of the whole command and of five checks in bash, in turns."""
    rounds: list[float] = []
    commands: list[float] = []
    shells: list[float] = []
    counts: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        runner = Runner(RunnerSettings(run_dir=Path(folder)))
        argv = (*HEALTHD, "check", "--tier", "passive", "--json", "--run-dir", folder, "--state-dir", folder)

        async def play() -> None:
            catalogue = await runner.catalogue()
            names = tuple(name for name, info in catalogue.items() if info.tier is Tier.PASSIVE)
            plan = Plan(tier=Tier.PASSIVE, checks=names, executor="bench")
            await runner.run(plan)
            for number in range(scale.of(PASSIVE_ROUNDS, 2)):
                began = time.perf_counter()
                results = await runner.run(plan)
                rounds.append(time.perf_counter() - began)
                counts.add(sum(result.error is None for result in results))
                shells.append(timed(("bash", "-c", BASH_FIVE_CHECKS))[0])
                if number < COMMAND_ROUNDS:
                    commands.append(timed(argv, codes=(0, 1, 2, 3))[0])

        asyncio.run(play())
    if min(counts) < 10:
        raise RuntimeError(f"only {min(counts)} checks of the passive round ran to their end")
    shell = statistics.median(shells)
    for figure, values in ((PASSIVE, rounds), (COMMAND, commands)):
        median = statistics.median(values)
        note = f"{spread(figure, values)}; {min(counts)} checks"
        beside = f"5 checks in bash, {PASSIVE.shown(shell)}"
        yield Reading(figure=figure.name, value=median, ratio=median / shell, beside=beside, note=note)


def quick(scale: Scale) -> Iterator[Reading]:
    """
    The whole command against 2.5 imports of torch and its own measuring.

    Measuring is the time in which at least one check was running (the union of their spans, as devices work side by
    side): what a sum over devices would count twice is no excuse.
    """
    imports: list[float] = []
    wholes: list[float] = []
    measuring: list[float] = []
    for _ in range(scale.of(QUICK_ROUNDS, 1)):
        with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
            imports.append(timed((sys.executable, "-W", "ignore", "-c", "import torch"))[0])
            argv = (*HEALTHD, "check", "--tier", "quick", "--json", "--run-dir", folder, "--state-dir", folder)
            seconds, text = timed(argv, codes=(0, 1, 2, 3))
            ran = active_results(decode(text.encode(), NodeState, what="the output of healthd check"))
            wholes.append(seconds)
            measuring.append(union_seconds([(result.started_at, result.duration_seconds) for result in ran]))
    shares = [w / (IMPORT_SHARE * i + m) for w, i, m in zip(wholes, imports, measuring, strict=True)]
    whole, one = statistics.median(wholes), statistics.median(imports)
    note = f"whole {COMMAND.shown(whole)}, measuring {COMMAND.shown(statistics.median(measuring))}; "
    yield Reading(
        figure=QUICK.name,
        value=statistics.median(shares),
        ratio=whole / one,
        beside=f"import torch, {COMMAND.shown(one)}",
        note=note + "allowance: 2.5 imports + time in which any check ran; " + spread(QUICK, shares),
    )


def active_results(state: NodeState) -> list[CheckResult]:
    """
    What measured on the devices; what does not apply to this machine (nccom-test on a CPU) is left out.

    RuntimeError when one of them could not measure, or fewer than the five probes and three collectives are there.
    """
    active = {spec.name for spec in state.checks if spec.tier is not Tier.PASSIVE}
    results = [r for r in state.results if r.check in active and r.status is not Status.SKIP]
    unknown = [result.check for result in results if result.status is Status.UNKNOWN]
    if unknown or len(results) < ACTIVE_CHECKS:
        raise RuntimeError(f"{len(results)} active checks, not measured: {', '.join(unknown) or 'none'}")
    return results


def union_seconds(spans: list[tuple[float, float]]) -> float:
    """How long at least one of some spans (start, length) was under way."""
    total, reached = 0.0, float("-inf")
    for start, length in sorted(spans):
        total += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return total


def hung(scale: Scale) -> Iterator[Reading]:
    """A device check that hangs on one of two devices: from its start there to its result, and what is left then."""
    seconds = []
    for _ in range(scale.of(HUNG_ROUNDS, 1)):
        with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
            settings = RunnerSettings(run_dir=Path(folder), timeouts_seconds={"matmul": HUNG_LIMIT_SECONDS})
            began: list[float] = []
            ended: list[float] = []

            def progress(event: RunProgress, began: list[float] = began) -> None:
                if (event.check, event.target, event.event) == ("matmul", "cpu:1", "started"):
                    began.append(time.perf_counter())

            def heard(_: CheckResult, ended: list[float] = ended) -> None:
                ended.append(time.perf_counter())

            plan = Plan(tier=Tier.QUICK, checks=("matmul",), executor="bench")
            faults = (parse_fault("matmul@cpu:1=hang"),)
            run = Runner(settings).run(plan, faults=faults, on_result=heard, on_progress=progress)
            (result,) = asyncio.run(run)
        named = [finding for finding in result.findings if finding.reason == "Timeout" and finding.target == "cpu:1"]
        left = [line for line in children(os.getpid()) if "worker.py" in line]
        if not named or result.check != "matmul" or left:
            raise RuntimeError(f"named: {bool(named)}; processes left: {left or 'none'}; {result.findings}")
        seconds.append(ended[0] - began[0])
    worst = max(seconds)
    yield Reading(
        figure=HUNG.name,
        value=worst,
        ratio=worst / HUNG_LIMIT_SECONDS,
        beside="its limit",
        note=f"worst of {len(seconds)}; check and target named, no process left",
    )


BENCHES = (
    Bench(name="passive", figures=(PASSIVE, COMMAND), run=passive, limit_seconds=60),
    Bench(name="quick", figures=(QUICK,), run=quick, limit_seconds=110),
    Bench(name="hung", figures=(HUNG,), run=hung, limit_seconds=80),
)
