"""
Does the gate still answer while strangers open idle connections? A real aggregator, simulated nodes, and a flood.

A process of its own opens connections that never send a byte, over loopback alone and from the address of everybody
else, so many a second, and holds the newest 3,000 of them. Meanwhile gates are asked one after the other, each over a
new connection. Printed: the time of a gate as its caller sees it, with connecting, before and after the flood and
during it; the longest time for which a node got no answer; the lines that the aggregator logged.

    python -m tests.benchmarks.bench_flood --tls --open-files 600 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import resource
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme

from healthd.core.wire import decode, encode
from tests.benchmarks.bench_gate import ask, cpu_seconds
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, percentile
from tests.benchmarks.processes import SEPARATE, end, timed
from tests.benchmarks.simulated import SimulatedNode

HELD = 3000
"""Connections that the flood keeps open; the older ones it closes itself."""
SILENT_SECONDS = 10.0
"""A node that got no answer for so long counts as silent; the policy's own bound is 60 s."""
SYNC_SECONDS = 2.0
GATE_NODES = 8
PAUSE_SECONDS = 0.05
AROUND_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class FloodRun:
    """
    What one run measured: `quiet` and `flooded` are the seconds of each gate. `opened` counts connections of the flood,
    `refused` those that could not be opened. `lost` counts nodes whose connection failed.
    """

    open_files: int
    tls: bool
    quiet: tuple[float, ...]
    flooded: tuple[float, ...]
    seconds: float
    opened: int
    refused: int
    lost: int
    gap_seconds: float
    log_lines: int
    cpu_ratio: float

    @property
    def ratio(self) -> float:
        """p99 under the flood to the quiet one."""
        return percentile(self.flooded, 99) / percentile(self.quiet, 99)


def flood(port: int, rate: float, seconds: float) -> tuple[int, int]:
    """Open idle connections at that rate; how many were begun, and how many could not be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, HELD + 100)), hard))
    held: deque[socket.socket] = deque()
    opened = refused = 0
    began = time.monotonic()
    while (lasted := time.monotonic() - began) < seconds:
        for _ in range(min(round(lasted * rate) - opened - refused, round(rate))):
            one = socket.socket()
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no TIME_WAIT
            try:
                with contextlib.suppress(BlockingIOError):
                    one.connect(("127.0.0.1", port))
            except OSError:
                refused += 1
                one.close()
                continue
            opened += 1
            held.append(one)
            if len(held) > HELD:
                held.popleft().close()
        time.sleep(0.002)
    for one in held:
        one.close()
    return opened, refused


async def gates(port: int, first: int, seconds: float, tls: ssl.SSLContext | None) -> list[float]:
    """Ask gates for that time, at least two; the seconds of each."""
    began, times = time.perf_counter(), list[float]()
    while time.perf_counter() - began < seconds or len(times) < 2:
        whole = (await ask(port, first + len(times), GATE_NODES, tls=tls, connecting=True)).whole
        times.append(whole)
        await asyncio.sleep(PAUSE_SECONDS)
    return times


async def bench(arguments: argparse.Namespace, port: int, pid: int, log: Path, tls: ssl.SSLContext | None) -> FloodRun:
    """Join all nodes, and ask gates before, during and after the flood."""
    nodes = [SimulatedNode(f"node-{number:05}", port, SYNC_SECONDS, tls) for number in range(arguments.nodes)]
    await asyncio.gather(*(node.open() for node in nodes))
    tasks = [asyncio.create_task(node.live()) for node in nodes]
    await asyncio.sleep(SYNC_SECONDS + 0.5)
    await gates(port, 0, 0.5, tls)  # what is slow once
    quiet = await gates(port, 10_000, arguments.quiet_seconds, tls)
    lines, cpu, began = count_lines(log), cpu_seconds(pid), time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.bench_flood", "--flood", str(port)),
        *("--rate", str(arguments.rate), "--seconds", str(arguments.seconds)),
        stdout=asyncio.subprocess.PIPE,
        **SEPARATE,
    )
    try:
        # The flood's process takes a moment to start, and ends after the gates.
        flooded = await gates(port, 20_000, arguments.seconds, tls)
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    seconds = time.perf_counter() - began
    used, lines = (cpu_seconds(pid) - cpu) / seconds, count_lines(log) - lines
    quiet += await gates(port, 30_000, arguments.quiet_seconds, tls)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    opened, refused = (int(word) for word in output.split())
    return FloodRun(
        open_files=arguments.open_files,
        tls=tls is not None,
        quiet=tuple(quiet),
        flooded=tuple(flooded),
        seconds=arguments.seconds,
        opened=opened,
        refused=refused,
        lost=sum(not isinstance(error, asyncio.CancelledError) for error in ended),
        gap_seconds=max(node.gap_seconds for node in nodes),
        log_lines=lines,
        cpu_ratio=used,
    )


def count_lines(log: Path) -> int:
    """Lines of the aggregator's log."""
    return log.read_bytes().count(b"\n")


def serve(state_dir: Path, open_files: int) -> None:
    """The aggregator with that many files, and with TLS where its certificate lies in the directory."""
    from healthd.aggregator.policy import Policy, Tuning
    from healthd.aggregator.process import run_aggregator
    from healthd.aggregator.settings import AggregatorSettings

    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    pem = state_dir / "server.pem" if (state_dir / "server.pem").exists() else None
    settings = AggregatorSettings(listen="127.0.0.1:0", state_dir=state_dir, tls_cert=pem, tls_key=pem)
    policy = Policy(
        tuning=Tuning(settle_seconds=0.0), recovery_seconds=0.0, collective=False, silent_seconds=SILENT_SECONDS
    )
    asyncio.run(run_aggregator(settings, policy, on_ready=lambda address: print(address, flush=True)))


def run(arguments: argparse.Namespace) -> FloodRun:
    """Start the aggregator, measure, end the aggregator."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as name:
        folder, tls = Path(name), None
        if arguments.tls:
            authority, tls = trustme.CA(), ssl.create_default_context()
            authority.configure_trust(tls)
            pem = folder / "server.pem"
            authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
            pem.chmod(0o600)
        command = [sys.executable, "-m", "tests.benchmarks.bench_flood", "--serve", name]
        command += ["--open-files", str(arguments.open_files)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, **SEPARATE)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            limit = AROUND_SECONDS + arguments.seconds + 2 * arguments.quiet_seconds
            measuring = bench(arguments, port, process.pid, folder / "log", tls)
            return asyncio.run(asyncio.wait_for(measuring, limit))
        finally:
            end(process, grace_seconds=10.0)
            if process.stdout is not None:
                process.stdout.close()
            if arguments.show_log:
                sys.stderr.write((folder / "log").read_text(errors="replace")[-20_000:])


def shown(one: FloodRun) -> str:
    """For people."""
    lines = [f"{'gate as its caller sees it, ms':34}{'p50':>10}{'p99':>10}{'max':>10}{'gates':>10}"]
    for name, seconds in (("quiet", one.quiet), ("under the flood", one.flooded)):
        values = (statistics.median(seconds), percentile(seconds, 99), max(seconds))
        lines.append(f"{name:34}" + "".join(f"{1e3 * value:10.1f}" for value in values) + f"{len(seconds):10}")
    lines.append(f"p99 under the flood: {one.ratio:.2f} times the quiet one")
    lines.append(
        f"{'TLS' if one.tls else 'HTTP'}, {one.open_files} open files; {one.opened / one.seconds:.0f} idle "
        f"connections/s for {one.seconds:g} s, {one.refused} refused"
    )
    lines.append(
        f"nodes lost: {one.lost}; longest time without an answer {one.gap_seconds:.1f} s (syncs are held "
        f"{SYNC_SECONDS:g} s); log lines {one.log_lines}; aggregator: {one.cpu_ratio:.0%} of one core"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open-files", type=int, default=600, help="the aggregator's limit")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1000.0, help="idle connections a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the flood lasts")
    parser.add_argument("--quiet-seconds", type=float, default=15.0, help="how long it is quiet before, and after")
    parser.add_argument("--show-log", action="store_true", help="print the end of the aggregator's log as well")
    parser.add_argument("--json", action="store_true", help="print every gate's time, for a program")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--flood", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        serve(arguments.serve, arguments.open_files)
    elif arguments.flood is not None:
        print(*flood(arguments.flood, arguments.rate, arguments.seconds))
    else:
        gc.disable()  # this process simulates: its pauses are not the aggregator's
        one = run(arguments)
        print(encode(one).decode() if arguments.json else shown(one))


# --- figures ----------------------------------------------------------------------------------------------------------

RUNS: Mapping[str, Sequence[str]] = {
    "http_600": ("--open-files", "600"),
    "http_20000": ("--open-files", "20000"),
    "tls_600": ("--open-files", "600", "--tls"),
    "tls_20000": ("--open-files", "20000", "--tls"),
}
FLOODED = tuple(
    Figure(
        name=f"flood_{name}",
        what=f"gate under 1,000 idle connections/s ({name.replace('_', ', ')} open files), p99 to the quiet one",
        unit="ratio",
        upper=2.0,
    )
    for name in RUNS
)
SILENT = Figure(name="flood_silent_nodes", what="nodes that the flood silenced, over these runs", unit="count", upper=0)
LINES = Figure(name="flood_log_lines", what="lines logged in one of these floods, at most", unit="count", upper=19)


def figures(scale: Scale) -> Iterator[Reading]:
    """Run the program, once for each limit and kind of connection."""
    size = scale.of(("--seconds", "30", "--quiet-seconds", "8"), ("--seconds", "2", "--quiet-seconds", "1"))
    runs = list[FloodRun]()
    for figure, options in zip(FLOODED, RUNS.values(), strict=True):
        _, text = timed((sys.executable, "-m", "tests.benchmarks.bench_flood", "--json", *size, *options))
        one = decode(text.encode(), FloodRun, what="the output of bench_flood")
        runs.append(one)
        yield Reading(
            figure=figure.name,
            value=one.ratio,
            note=f"p99 {1e3 * percentile(one.flooded, 99):.0f} ms after {1e3 * percentile(one.quiet, 99):.0f} ms, "
            f"{len(one.flooded)} gates; {one.opened / one.seconds:.0f} connections/s; aggregator: "
            f"{one.cpu_ratio:.0%} of one core",
        )
    longest = max(one.gap_seconds for one in runs)
    silent = sum(one.lost + (one.gap_seconds > SILENT_SECONDS) for one in runs)
    yield Reading(figure=SILENT.name, value=silent, note=f"longest time without an answer {longest:.1f} s")
    yield Reading(figure=LINES.name, value=max(one.log_lines for one in runs))


BENCHES = (Bench(name="flood", figures=(*FLOODED, SILENT, LINES), run=figures, limit_seconds=290),)


if __name__ == "__main__":
    main()
