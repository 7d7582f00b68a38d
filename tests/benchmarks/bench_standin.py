"""
A Neuron machine of 16 devices and 32 cores: what a passive round and a plan over 32 workers cost of our own.

There is no such machine here. Files and tools are a stand-in's, so the tools' time, which is theirs, is measured beside
and taken off; and the workers load a torch that does nothing, so that what is left is ours.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from checks.contract import Tier
from checks.host.machine import Host
from healthd.core.model import CheckResult
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan, RunnerSettings, RunProgress
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, spread
from tests.benchmarks.processes import timed
from tests.fakes.hollow_torch import make_python
from tests.fakes.neuron import NeuronMachine

ROUNDS = 15
PLAN_ROUNDS = 3
WORKERS = 32
TOOL_SECONDS = 10.0

PASSIVE = Figure(
    name="neuron_passive_round",
    what="passive round on 16 Neuron devices, without the tools",
    unit="seconds",
    upper=0.25,
)
PLAN = Figure(name="neuron_plan", what="plan of a check that does nothing on 32 workers", unit="seconds")

NOTHING = '''
"""A check that does nothing."""
from collections.abc import Iterator
from checks.contract import Context, Finding, Measurement, NoParams, Status, check

@check(tier="quick", interval_seconds=60, timeout_seconds=5, scope="device")
def nothing(ctx: Context[NoParams]) -> Iterator[Finding]:
    """Says that it was here."""
    here = Measurement(name="nothing_count", value=1.0, lower=None, upper=None, origin="none")
    target = ctx.device.target
    yield Finding(status=Status.PASS, reason=None, message="here", target=target, measurements=(here,))
'''


def passive(scale: Scale) -> Iterator[Reading]:
    """Rounds as the daemon has them: one runner, its children anew, neuron-ls once in each."""
    ours: list[float] = []
    wholes: list[float] = []
    tools: list[float] = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        machine = NeuronMachine(Path(folder) / "machine", "trn1.32xlarge", whole=True)
        runner = Runner(RunnerSettings(host_root=machine.root, run_dir=Path(folder)))

        async def play() -> None:
            names = tuple(name for name, info in (await runner.catalogue()).items() if info.tier is Tier.PASSIVE)
            plan = Plan(tier=Tier.PASSIVE, checks=names, executor="bench")
            _all_well(await runner.run(plan))  # asks libfabric, which then is not asked for ten minutes
            for _ in range(scale.of(ROUNDS, 2)):
                began = time.perf_counter()
                results = await runner.run(plan)
                whole = time.perf_counter() - began
                _all_well(results)
                tool = _tool_seconds(machine.host)
                wholes.append(whole)
                tools.append(tool)
                ours.append(whole - tool)

        asyncio.run(play())
    whole, tool = statistics.median(wholes), statistics.median(tools)
    note = f"{spread(PASSIVE, ours)}; whole {PASSIVE.shown(whole)}, neuron-ls {PASSIVE.shown(tool)}; stand-in"
    yield Reading(
        figure=PASSIVE.name,
        value=statistics.median(ours),
        ratio=statistics.median(ours) / tool,
        beside=f"the stand-in's neuron-ls, {PASSIVE.shown(tool)}",
        note=note,
    )


def _tool_seconds(host: Host) -> float:
    began = time.perf_counter()
    done = host.run(["neuron-ls", "--json-output"], timeout_seconds=TOOL_SECONDS)
    if done.returncode:
        raise RuntimeError(f"neuron-ls of the stand-in failed: {done.stdout or done.stderr}")
    return time.perf_counter() - began


def _all_well(results: tuple[CheckResult, ...]) -> None:
    bad = [result.check for result in results if result.status.value not in ("pass", "skip")]
    if bad:
        raise RuntimeError(f"the round is not what it should be: {', '.join(bad)}")


def plan(scale: Scale) -> Iterator[Reading]:
    """Workers that load nothing, at most half the cores at once: their number at a time is counted as well."""
    count = scale.of(WORKERS, 8)
    at_once = RunnerSettings().max_workers_at_once
    seconds: list[float] = []
    most = 0
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        python = make_python(Path(folder) / "venv")
        checks = Path(folder) / "checks"
        checks.mkdir()
        (checks / "nothing.py").write_text(NOTHING)
        settings = RunnerSettings(
            accelerator="cpu",
            probe_python=python,
            run_dir=Path(folder),
            directories=(checks,),
            options={"cpu_devices": count},
        )
        for _ in range(scale.of(PLAN_ROUNDS, 1)):
            runner, running = Runner(settings), set[str]()
            asyncio.run(runner.catalogue())

            def heard(event: RunProgress, running: set[str] = running) -> None:
                nonlocal most
                (running.add if event.event == "started" else running.discard)(event.target)
                most = max(most, len(running))

            began = time.perf_counter()
            work = runner.run(Plan(tier=Tier.QUICK, checks=("nothing",), executor="bench"), on_progress=heard)
            (result,) = asyncio.run(work)
            seconds.append(time.perf_counter() - began)
            if result.status.value != "pass" or len(result.findings) != count:
                raise RuntimeError(f"{len(result.findings)} of {count} workers: {result.status.value} {result.error}")
        bare = statistics.median(timed((str(python), "-I", "-c", "pass"))[0] for _ in range(scale.of(ROUNDS, 3)))
    if most > at_once:
        raise RuntimeError(f"{most} workers ran at once, and {at_once} is the bound")
    median = statistics.median(seconds)
    each = median / math.ceil(count / at_once)
    yield Reading(
        figure=PLAN.name,
        value=median,
        ratio=each / bare,
        beside=f"{PLAN.shown(bare)} of a bare interpreter, by worker",
        note=f"{spread(PLAN, seconds)}; {PLAN.shown(each)} a worker, {at_once} at once",
    )


BENCHES = (
    Bench(name="neuron", figures=(PASSIVE,), run=passive, limit_seconds=80),
    Bench(name="plan", figures=(PLAN,), run=plan, limit_seconds=100),
)
