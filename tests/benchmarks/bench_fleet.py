"""The gate: over ten thousand simulated nodes (`bench_gate.py`, a program of its own), and over three real ones."""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.figures import Bench, Figure, Reading, percentile
from tests.benchmarks.processes import Keeper, aggregator, daemon, timed, wait_until

NODES = ("b1", "b2", "b3")
GATES = 20
HEALTHY_SECONDS = 60.0

LARGE = Figure(
    name="gate_10000", what="gate for 64 of 10,000 nodes, p99 before leases travel", unit="seconds", upper=0.020
)
SMALL = Figure(name="gate_3", what="gate for 3 of 3 nodes, leases confirmed, p50", unit="seconds")


def large() -> Iterator[Reading]:
    """Run the program and read its table."""
    program = Path(__file__).with_name("bench_gate.py")
    if not program.exists():
        raise RuntimeError(f"{program.name} is missing")
    _, text = timed((sys.executable, str(program), "--nodes", "10000", "--seconds", "15"))
    grant, whole = gate_times(text)
    last = text.strip().splitlines()[-1]
    yield Reading(
        figure=LARGE.name,
        value=grant["p99"],
        ratio=grant["p99"] / grant["p50"],
        beside=f"its own p50, {LARGE.shown(grant['p50'])}",
        note=f"as the caller sees it p99 {LARGE.shown(whole['p99'])}; {last}",
    )


def gate_times(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds at p50, p99 and max from the program's output: up to the leases on disk, and as its caller sees it."""
    found = []
    for line in ("gate up to its leases on disk, ms", "gate as its caller sees it, ms"):
        match = re.search(rf"^{re.escape(line)}\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$", text, re.MULTILINE)
        if match is None:
            raise RuntimeError(f"bench_gate.py did not print {line!r}")
        values = (float(group) / 1e3 for group in match.groups())
        found.append(dict(zip(("p50", "p99", "max"), values, strict=True)))
    return found[0], found[1]


def small() -> Iterator[Reading]:
    """Gates one after the other over an aggregator and three daemons, each lease ended before the next."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder, contextlib.ExitStack() as stack:
        center = stack.enter_context(aggregator(Path(folder) / "aggregator"))
        url = f"http://127.0.0.1:{center.port}"
        nodes = [
            stack.enter_context(daemon(Path(folder) / name, "--aggregator", url, "--label", "pool=bench"))
            for name in NODES
        ]
        doors = [stack.enter_context(contextlib.closing(node.connection())) for node in nodes]
        for name, door in zip(NODES, doors, strict=True):
            wait_until(lambda door=door: door.timed_get("/health")[1] == 200, HEALTHY_SECONDS, f"{name} healthy")
        http = stack.enter_context(contextlib.closing(center.connection()))
        seconds = [_ask(http, number, doors) for number in range(GATES)]
    median = statistics.median(seconds)
    ping = percentile(seconds, 99)
    yield Reading(
        figure=SMALL.name,
        value=median,
        ratio=ping / median,
        beside=f"p99, {SMALL.shown(ping)}",
        note=f"{len(seconds)} gates; orders and confirmations by the nodes' own sync",
    )


def _ask(http: Keeper, number: int, doors: list[Keeper]) -> float:
    body = {"job": f"bench-{number}", "nodes": list(NODES)}
    began = time.perf_counter()
    status, decision = http.json("POST", "/v1/gates?wait=20", body)
    seconds = time.perf_counter() - began
    if status >= 300 or decision["decision"] != "admit":
        raise RuntimeError(f"gate {number}: HTTP {status}: {str(decision)[:300]}")
    http.json("DELETE", f"/v1/gates/{decision['id']}/lease")
    for door in doors:
        wait_until(lambda door=door: not door.json("GET", "/v1/node")[1]["leases"], 20, "the lease's end on a node")
    return seconds


BENCHES = (
    Bench(name="gate", figures=(LARGE,), run=large, limit_seconds=80),
    Bench(name="fleet", figures=(SMALL,), run=small, limit_seconds=90),
)
