"""
How fast is the gate over a large fleet? A real aggregator process, and thousands of simulated nodes in this one.

Every node keeps a connection, its sync held (for ten seconds unless `--sync-seconds` says otherwise) and sent again, so
that a fleet of 10,000 makes 1,000 syncs a second, with nothing new: what one of them costs the aggregator is measured
first. Then gates for 64 nodes of one pool are asked: one a second, whether the one before has its answer or not (an
open loop), and one after the other (a closed loop). Printed: the time of a gate from its arrival to its leases on disk
(before the lease's round trip) and what of it was computing, the database, and the rest, waiting for the event loop;
the whole time as its caller sees it; and the syncs. At last some nodes turn bad at one moment: how long until all of
them are shown as unhealthy, and a job has all other nodes and none of these.

    python -m tests.benchmarks.bench_gate --nodes 10000 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from healthd.core.model import Decision, GateRequest
from healthd.core.wire import decode, encode
from tests.aggregator.postgres import serving
from tests.benchmarks.figures import percentile
from tests.benchmarks.processes import ROOT
from tests.benchmarks.simulated import SimulatedNode, read_answer, state_template

JOINING_AT_ONCE = 200
OPEN_SECONDS = 1.0
LEAST_JOINED_PER_SECOND = 100
LIMIT_SECONDS = 100.0
"""Beyond the time in which the nodes join."""


@dataclass(frozen=True, kw_only=True)
class GateTimes:
    """
    One gate, in seconds: from its arrival to its leases on disk, of these for computing and for the database, and the
    whole as its caller sees it.
    """

    grant: float
    compute: float
    store: float
    whole: float


@dataclass(frozen=True, kw_only=True)
class GateRun:
    """
    What one run measured, of gates of the open and of the closed loop. `cpu_ratio` is the aggregator's over the closed
    loop, `resident_bytes` after it; `lost` counts nodes whose connection failed.

    `idle` has the processor time of a sync with nothing new, in seconds, over a second each: others on the machine make
    it longer, never shorter; `idle_ratio` is what all of them take of one core. `bad_seconds` is None where no node was
    to turn bad.
    """

    nodes: int
    join_seconds: float
    idle: tuple[float, ...]
    idle_ratio: float
    bad: int
    bad_seconds: float | None
    seconds: float
    open: tuple[GateTimes, ...]
    closed: tuple[GateTimes, ...]
    syncs_per_second: float
    cpu_ratio: float
    resident_bytes: int
    lost: int


async def ask(
    port: int,
    number: int,
    count: int,
    *,
    pool: str = "bench",
    tls: ssl.SSLContext | None = None,
    connecting: bool = False,
) -> GateTimes:
    """
    One gate; its nodes are given back.

    `connecting`: the time to connect, with the TLS handshake, is a part of what the caller sees.
    """
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=16 << 20, ssl=tls)
    body = encode(GateRequest(job=f"job-{number}", pool=pool, count=count))
    began = began if connecting else time.perf_counter()
    writer.write(b"POST /v1/gates?wait=25 HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    answer = await read_answer(reader)
    whole = time.perf_counter() - began
    decision = decode(answer.body, Decision, what="the decision")
    if decision.decision != "admit":
        raise SystemExit(f"gate {number}: {decision.decision}: {[r.message for r in decision.reasons][:3]}")
    writer.write(f"DELETE /v1/gates/{decision.id}/lease HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await read_answer(reader)
    writer.close()
    return GateTimes(grant=answer.grant, compute=answer.compute, store=answer.store, whole=whole)


async def bench(arguments: argparse.Namespace, port: int, pid: int) -> GateRun:
    """Join all nodes, let them sync, ask gates for that time, and let some turn bad."""
    sync_seconds: float = arguments.sync_seconds
    nodes = [SimulatedNode(f"node-{number:05}", port, sync_seconds) for number in range(arguments.nodes)]
    began = time.perf_counter()
    await join(nodes)
    joined = time.perf_counter() - began
    tasks = {node.name: asyncio.create_task(node.live()) for node in nodes}
    await asyncio.sleep(sync_seconds + 0.5)  # from here on every node has a request held
    cpu, begin = cpu_seconds(pid), time.perf_counter()
    idle = [one async for one in idle_costs(nodes, pid, seconds=arguments.idle_seconds)]
    idle_ratio = (cpu_seconds(pid) - cpu) / (time.perf_counter() - begin)
    opened = await open_loop(port, arguments.open_gates, arguments.count)
    syncs, cpu, begin = sum(n.seq for n in nodes), cpu_seconds(pid), time.perf_counter()
    times: list[GateTimes] = []
    while time.perf_counter() - begin < arguments.seconds or len(times) < 2:
        times.append(await ask(port, len(opened) + len(times), arguments.count))
        await asyncio.sleep(arguments.pause)
    seconds = time.perf_counter() - begin
    rate = (sum(n.seq for n in nodes) - syncs) / seconds
    used = (cpu_seconds(pid) - cpu) / seconds
    resident = resident_bytes(pid)
    bad_seconds = None
    if arguments.bad:
        await asyncio.sleep(1.0)  # leases of the last gate travel back
        bad_seconds = await turn_bad(nodes[: arguments.bad], tasks, port)
    for task in tasks.values():
        task.cancel()
    ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    return GateRun(
        nodes=len(nodes),
        join_seconds=joined,
        idle=tuple(idle),
        idle_ratio=idle_ratio,
        bad=arguments.bad,
        bad_seconds=bad_seconds,
        seconds=seconds,
        open=tuple(opened),
        closed=tuple(times),
        syncs_per_second=rate,
        cpu_ratio=used,
        resident_bytes=resident,
        lost=sum(not isinstance(error, asyncio.CancelledError) for error in ended),
    )


async def open_loop(port: int, gates: int, count: int) -> list[GateTimes]:
    """Gates at one a second, whatever the others do."""
    asked = []
    for number in range(gates):
        asked.append(asyncio.create_task(ask(port, number, count)))
        await asyncio.sleep(OPEN_SECONDS)
    return list(await asyncio.gather(*asked))


async def join(nodes: Sequence[SimulatedNode], *, at_once: int = JOINING_AT_ONCE) -> None:
    """Make all of them known, some at once."""
    for start in range(0, len(nodes), at_once):
        await asyncio.gather(*(node.open() for node in nodes[start : start + at_once]))


async def idle_costs(nodes: Sequence[SimulatedNode], pid: int, *, seconds: int) -> AsyncIterator[float]:
    """Processor seconds of the aggregator for each sync, a second at a time."""
    for _ in range(seconds):
        syncs, cpu = sum(n.seq for n in nodes), cpu_seconds(pid)
        await asyncio.sleep(1.0)
        yield (cpu_seconds(pid) - cpu) / max(1, sum(n.seq for n in nodes) - syncs)


async def turn_bad(nodes: Sequence[SimulatedNode], tasks: dict[str, asyncio.Task[None]], port: int) -> float:
    """Seconds until all of them are shown as unhealthy, and a job that asks for all other nodes has them."""
    for node in nodes:
        tasks[node.name].cancel()
    await asyncio.gather(*(tasks[node.name] for node in nodes), return_exceptions=True)
    bad = state_template(bad=True)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20.0) as http:
        before = await unhealthy(http)
        began = time.perf_counter()
        for node in nodes:
            tasks[node.name] = asyncio.create_task(node.change(bad))
        while await unhealthy(http) < before + len(nodes):  # noqa: ASYNC110  what a page would see
            await asyncio.sleep(0.05)
        asked = GateRequest(job="all-others", pool="bench", count=len(tasks) - len(nodes), lease=False)
        answer = await http.post("/v1/gates?wait=20", content=encode(asked))
        decision = decode(answer.content, Decision, what="the decision")
    seconds = time.perf_counter() - began
    chosen = {node.node for node in decision.nodes} & {node.name for node in nodes}
    if decision.decision != "admit" or chosen:
        raise RuntimeError(f"{decision.decision} {decision.reasons[:1]}, with {len(chosen)} bad nodes")
    return seconds


async def unhealthy(http: httpx.AsyncClient) -> int:
    """How many nodes are shown as that."""
    summary = (await http.get("/v1/fleet")).raise_for_status().json()
    return int(summary["health"].get("unhealthy", 0))


def shown(run: GateRun) -> str:
    """For people."""
    lines = [f"nodes {run.nodes}, joined in {run.join_seconds:.1f} s"]
    for name, times in (("open loop, one a second", run.open), ("closed loop", run.closed)):
        if len(times) < 2:
            continue
        lines.append(f"{f'{len(times)} gates, {name}; ms':40}{'p50':>10}{'p99':>10}{'max':>10}")
        for what, seconds in (
            ("up to the leases on disk", [one.grant for one in times]),
            ("  computing", [one.compute for one in times]),
            ("  database", [one.store for one in times]),
            ("  waiting for the event loop", [one.grant - one.compute - one.store for one in times]),
            ("as the caller sees it", [one.whole for one in times]),
        ):
            values = (statistics.median(seconds), percentile(seconds, 99), max(seconds))
            lines.append(f"{what:40}" + "".join(f"{1e3 * value:10.1f}" for value in values))
    if run.idle:
        quartile = statistics.quantiles(run.idle, n=4)[0] if len(run.idle) > 1 else run.idle[0]
        words = (
            f"least {1e3 * min(run.idle):.3f} ms, first quartile {1e3 * quartile:.3f}, most {1e3 * max(run.idle):.3f}"
        )
        lines.append(f"processor time of a sync with nothing new: {words}; {run.idle_ratio:.0%} of one core")
    if run.bad_seconds is not None:
        lines.append(f"{run.bad} nodes turn bad: all shown and refused after {run.bad_seconds:.2f} s")
    lines.append(f"syncs {run.syncs_per_second:.0f}/s; nodes lost: {run.lost}")
    lines.append(f"aggregator: {run.cpu_ratio:.0%} of one core, {run.resident_bytes / 1e6:.0f} MB resident")
    return "\n".join(lines)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, by the scheduler's own count of each thread: its clock ticks are too long."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def resident_bytes(pid: int) -> int:
    """Its resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(state_dir: str, database: str | None) -> None:
    """The aggregator, in a process of its own: no other imports it."""
    from healthd.aggregator.policy import Policy, Tuning
    from healthd.aggregator.process import run_aggregator
    from healthd.aggregator.settings import AggregatorSettings

    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=Path(state_dir), database=database)
    policy = Policy(tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0, collective=False)
    asyncio.run(run_aggregator(settings, policy, on_ready=lambda address: print(address, flush=True)))


def serve_bare() -> None:
    """What a sync costs that does nothing: uvicorn as it comes, the request read and an answer written by msgspec."""
    import itertools

    import uvicorn

    from healthd.core.model import SyncAnswer, SyncRequest

    number = itertools.count(1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        decode(body, SyncRequest, what="sync")
        if wait := float(scope["query_string"].partition(b"=")[2]):
            await asyncio.sleep(wait)
        seq = next(number)
        answer = SyncAnswer(
            answer=f"a{seq}",
            seq=seq,
            issuer="bare",
            orders=None,
            acknowledged=(),
            send_all=False,
            retry_after_seconds=0.0,
        )
        text = encode(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def run() -> None:
        config = uvicorn.Config(app, port=0, lifespan="off", access_log=False, log_level="error", backlog=4096)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.01)
        print(f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await serving

    asyncio.run(run())


async def bare(arguments: argparse.Namespace, port: int, pid: int) -> list[float]:
    """The idle costs of the bare application."""
    nodes = [SimulatedNode(f"node-{number:05}", port, arguments.sync_seconds) for number in range(arguments.nodes)]
    await join(nodes)
    tasks = [asyncio.create_task(node.live()) for node in nodes]
    await asyncio.sleep(arguments.sync_seconds + 0.5)
    idle = [one async for one in idle_costs(nodes, pid, seconds=arguments.idle_seconds)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return idle


def main(argv: Sequence[str] | None = None) -> None:
    """Start the aggregator, run the benchmark, end the aggregator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=64, help="nodes of one gate")
    parser.add_argument("--open-gates", type=int, default=20, help="gates of the open loop, one a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the closed loop goes on")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two gates")
    parser.add_argument("--sync-seconds", type=float, default=10.0, help="how long a node lets its sync be held")
    parser.add_argument("--idle-seconds", type=int, default=10, help="how long syncs with nothing new are measured")
    parser.add_argument("--bad", type=int, default=0, help="so many nodes turn bad at the end")
    parser.add_argument("--postgresql", action="store_true", help="on a PostgreSQL of its own, instead of SQLite")
    parser.add_argument("--database", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print every gate's time, for a program")
    parser.add_argument("--bare", action="store_true", help="only syncs with nothing new, of a bare application")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve == "bare":
        serve_bare()
        return
    if arguments.serve:
        serve(arguments.serve, arguments.database)
        return
    gc.disable()  # this process simulates: its pauses are not the aggregator's
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, arguments.nodes + 1000) if hard > 0 else soft, hard))
    limit = LIMIT_SECONDS + arguments.nodes / LEAST_JOINED_PER_SECOND
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="healthd-bench-"))
        command = [sys.executable, "-m", "tests.benchmarks.bench_gate", "--serve", "bare" if arguments.bare else folder]
        if arguments.postgresql:
            command += ["--database", stack.enter_context(serving()).url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            if arguments.bare:
                costs = asyncio.run(asyncio.wait_for(bare(arguments, port, process.pid), limit))
                print(f"a bare application: first quartile {1e3 * percentile(costs, 25):.3f} ms a sync")
                return
            run = asyncio.run(asyncio.wait_for(bench(arguments, port, process.pid), limit))
        finally:
            process.terminate()
            process.wait(10)
    print(encode(run).decode() if arguments.json else shown(run))


if __name__ == "__main__":
    main()
