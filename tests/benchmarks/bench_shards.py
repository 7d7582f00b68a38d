"""
A hundred thousand nodes in eight shards, on one machine: are all of them there, and how fast is a gate of one shard?

Eight aggregators share one PostgreSQL; each leads a shard. Every shard has a program of its own that simulates its
nodes, because a process may have no more files open. Nodes let a sync be held for a minute. Gates for 256 nodes are
asked of one shard after the other, each at its leader.

    python -m tests.benchmarks.bench_shards --nodes 100000 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from healthd.core.wire import encode
from tests.aggregator.postgres import serving
from tests.benchmarks.bench_gate import ask, cpu_seconds, join, resident_bytes
from tests.benchmarks.figures import percentile
from tests.benchmarks.processes import ROOT
from tests.benchmarks.simulated import SimulatedNode, state_template

LABEL = "part"
HOLD_SECONDS = 60
START_SECONDS = 60.0
JOINING_AT_ONCE = 25


@dataclass(frozen=True, kw_only=True)
class ShardsRun:
    """
    What one run measured: `grants` and `wholes` as of `GateRun`; `present` are the nodes that the merged view has, with
    the first one of each further shard; `lost` those whose connection failed. Memory and processor time (of one core)
    are of all aggregators together.
    """

    nodes: int
    shards: int
    join_seconds: float
    seconds: float
    grants: tuple[float, ...]
    wholes: tuple[float, ...]
    syncs_per_second: float
    present: int
    healthy: int
    lost: int
    cpu_ratio: float
    resident_bytes: int


def shard_name(number: int) -> str:
    """Of the first one it is the one that nodes without the label are of."""
    return "default" if number == 0 else f"part-{number}"


def template_of(shard: str) -> bytes:
    """A node of this shard; each has a pool of its own, so that a gate can name it."""
    return state_template(pool=f"pool-{shard}", part=None if shard == "default" else shard)


# --- a program for the nodes of one shard -----------------------------------------------------------------------------


async def simulate(port: int, shard: str, count: int) -> None:
    """Join, say so, and sync until standard input ends; then how many syncs there were since, and how many are lost."""
    template = template_of(shard)
    nodes = [SimulatedNode(f"{shard}-{n:05}", port, HOLD_SECONDS, template=template) for n in range(count)]
    await join(nodes, at_once=JOINING_AT_ONCE)
    before = sum(node.seq for node in nodes)
    tasks = [asyncio.create_task(node.live()) for node in nodes]
    print("joined", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    syncs = sum(node.seq for node in nodes) - before
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    lost = sum(not isinstance(error, asyncio.CancelledError) for error in ended)
    print(json.dumps({"syncs": syncs, "lost": lost}), flush=True)


# --- the aggregators --------------------------------------------------------------------------------------------------


def serve(database: str, state_dir: str) -> None:
    """One of them, in a process of its own."""
    from healthd.aggregator.app import run_aggregator
    from healthd.aggregator.model.policy import Policy, Tuning
    from healthd.aggregator.settings import AggregatorSettings

    settings = AggregatorSettings(
        listen="127.0.0.1:0",
        state_dir=Path(state_dir),
        database=database,
        shard_label=LABEL,
        hold_seconds=HOLD_SECONDS,
        max_nodes=1_000_000,
    )
    tuning = Tuning(settle_seconds=0.0)
    policy = Policy(tuning=tuning, recovery_seconds=0.0, collective=False, silent_seconds=3 * HOLD_SECONDS)
    asyncio.run(run_aggregator(settings, policy, on_ready=lambda address: print(address, flush=True)))


def found_shards(ports: Sequence[int], count: int) -> Mapping[str, int]:
    """Make every shard by a first node of it, and wait until each is led, by another one each; the leaders' ports."""
    leaders: dict[str, int] = {}

    def led() -> bool:
        rows = httpx.get(f"http://127.0.0.1:{ports[0]}/v1/shards", trust_env=False).json()["shards"]
        leaders.update({row["shard"]: int(row["leader"].rpartition(":")[2]) for row in rows if row["leader"]})
        for number in range(1, count):
            if shard_name(number) not in leaders:
                _come_first(shard_name(number), ports[number % len(ports)])
        return len(leaders) == count == len(set(leaders.values()))

    _wait(led, "a leader of every shard, each another one")
    return leaders


def _come_first(shard: str, port: int) -> None:
    node = SimulatedNode(f"{shard}-first", port, 0, template=template_of(shard))
    url, headers = f"http://127.0.0.1:{port}/v1/nodes/{node.name}/sync", {"x-healthd-node-key": node.key}
    httpx.post(url, content=node.body(full=True), headers=headers, trust_env=False, timeout=10.0)


def _wait(done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if done():
                return
        if time.monotonic() > until:
            raise RuntimeError(f"after {START_SECONDS:g} s there is not: {what}")
        time.sleep(0.2)


# --- the run ----------------------------------------------------------------------------------------------------------


async def gates(leaders: Mapping[str, int], count: int, seconds: float, pause: float) -> list[tuple[float, float]]:
    """Ask for gates, one shard after the other."""
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < len(leaders):
        shard = shard_name(len(times) % len(leaders))
        times.append(await ask(leaders[shard], len(times), count, pool=f"pool-{shard}"))
        await asyncio.sleep(pause)
    return times


def measure(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> ShardsRun:
    """Start all, join, ask for gates, and see who is there."""
    database = stack.enter_context(serving()).url
    services = []
    for _ in range(arguments.shards):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="healthd-bench-"))
        services.append(_started(stack, "--serve", database, folder))
    ports = [int(_line(one).rpartition(":")[2]) for one in services]
    leaders = found_shards(ports, arguments.shards)
    began = time.perf_counter()
    share = arguments.nodes // arguments.shards
    fleets = [
        _started(stack, "--simulate", str(leaders[s]), s, str(share)) for s in map(shard_name, range(arguments.shards))
    ]
    for fleet in fleets:
        if _line(fleet).strip() != "joined":
            raise RuntimeError("the nodes of a shard did not join")
    joined = time.perf_counter() - began
    time.sleep(arguments.settle)
    cpu, began = sum(cpu_seconds(one.pid) for one in services), time.perf_counter()
    times = asyncio.run(gates(leaders, arguments.count, arguments.seconds, arguments.pause))
    seconds = time.perf_counter() - began
    used = (sum(cpu_seconds(one.pid) for one in services) - cpu) / seconds
    resident = sum(resident_bytes(one.pid) for one in services)
    summary = (
        httpx.get(f"http://127.0.0.1:{ports[0]}/v1/fleet", trust_env=False, timeout=30.0).raise_for_status().json()
    )
    live = time.perf_counter() - began + arguments.settle
    told = [_ended(fleet) for fleet in fleets]
    return ShardsRun(
        nodes=share * arguments.shards,
        shards=len(leaders),
        join_seconds=joined,
        seconds=seconds,
        grants=tuple(grant for grant, _ in times),
        wholes=tuple(whole for _, whole in times),
        syncs_per_second=sum(one["syncs"] for one in told) / live,
        present=summary["nodes"],
        healthy=summary["health"].get("healthy", 0),
        lost=sum(one["lost"] for one in told),
        cpu_ratio=used,
        resident_bytes=resident,
    )


def _started(stack: contextlib.ExitStack, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_shards", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    return process


def _line(process: subprocess.Popen[str]) -> str:
    said: IO[str] | None = process.stdout
    assert said is not None
    return said.readline()


def _ended(process: subprocess.Popen[str]) -> Mapping[str, Any]:
    assert process.stdin is not None
    process.stdin.close()
    told: Mapping[str, Any] = json.loads(_line(process))
    return told


def shown(run: ShardsRun) -> str:
    """For people."""
    values = (1e3 * statistics.median(run.grants), 1e3 * percentile(run.grants, 99), 1e3 * max(run.grants))
    wholes = (1e3 * statistics.median(run.wholes), 1e3 * percentile(run.wholes, 99))
    lines = (
        f"{run.nodes} nodes in {run.shards} shards, joined in {run.join_seconds:.0f} s",
        f"present {run.present}, healthy {run.healthy}, connections lost {run.lost}",
        f"{len(run.grants)} gates in {run.seconds:.0f} s; to the leases on disk p50 {values[0]:.1f} ms, "
        f"p99 {values[1]:.1f}, max {values[2]:.1f}; as the caller sees it p50 {wholes[0]:.0f} ms, p99 {wholes[1]:.0f}",
        f"{run.syncs_per_second:.0f} syncs/s; aggregators: {run.cpu_ratio:.0%} of one core, "
        f"{run.resident_bytes / 1e6:.0f} MB resident in all, {run.resident_bytes / run.nodes / 1e3:.1f} kB a node",
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it, or one of its programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=8, help="and aggregators")
    parser.add_argument("--count", type=int, default=256, help="nodes of one gate")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long gates are asked for")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two gates")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the first one")
    parser.add_argument("--json", action="store_true", help="print every gate's time, for a program")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--simulate", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    gc.disable()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.serve:
        gc.enable()
        serve(*arguments.serve)
    elif arguments.simulate:
        port, shard, count = arguments.simulate
        asyncio.run(simulate(int(port), shard, int(count)))
    else:
        with contextlib.ExitStack() as stack:
            run = measure(arguments, stack)
        print(encode(run).decode() if arguments.json else shown(run))


if __name__ == "__main__":
    main()
