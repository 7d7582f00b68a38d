"""The gate: over ten thousand simulated nodes (`bench_gate.py`, a program of its own), and over three real ones."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from checks.contract import Tier
from healthd.core.model import Decision, GateRequest
from healthd.core.wire import decode, encode
from tests.benchmarks.bench_gate import GateRun, GateTimes
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, percentile, spread
from tests.benchmarks.processes import Keeper, aggregator, daemon, timed, wait_until

NODES = ("b1", "b2", "b3")
GATES = 20
VALIDATED = 5
WAIT_SECONDS = 80.0
LARGE_SECONDS = 240.0

LARGE = Figure(
    name="gate_10000",
    what="gate for 64 of 10,000 nodes, one a second, p99 before leases travel",
    unit="seconds",
    upper=0.015,
)
CLOSED = Figure(name="gate_10000_closed", what="the same, one after the other, p99", unit="seconds", upper=0.04)
SYNC = Figure(
    name="sync_processor", what="processor time of a sync with nothing new, 10,000 nodes", unit="seconds", upper=0.25e-3
)
MEMORY = Figure(name="node_memory", what="memory of the aggregator a node, 10,000 nodes", unit="bytes", upper=45e3)
ON_POSTGRESQL = Figure(
    name="gate_10000_postgresql", what="the first of these on PostgreSQL, p99", unit="seconds", upper=0.025
)
TURNED_BAD = Figure(
    name="bad_500", what="500 of 10,000 nodes turn bad: all shown and kept out", unit="seconds", upper=3.5
)
SMALL = Figure(name="gate_3", what="gate for 3 of 3 nodes, leases confirmed, p50", unit="seconds")
TOGETHER = Figure(name="gate_3_collective", what="the same with collectives over the 3 nodes, p50", unit="seconds")


def large(scale: Scale) -> Iterator[Reading]:
    """Run the program, on SQLite; nodes turn bad at its end."""
    run = _run(scale, ())
    circumstances = (
        f"{run.nodes} nodes; as the caller sees it p99 {LARGE.shown(percentile([g.whole for g in run.closed], 99))}; "
        f"{run.syncs_per_second:.0f} syncs/s; aggregator: {run.cpu_ratio:.0%} of one core, "
        f"{run.resident_bytes / 1e6:.0f} MB"
    )
    yield _late(LARGE, run.open, f"{run.nodes} nodes")
    yield _late(CLOSED, run.closed, circumstances)
    # What else runs on the machine makes it longer, never shorter.
    yield Reading(figure=SYNC.name, value=percentile(run.idle, 25), note=f"a second each: {spread(SYNC, run.idle)}")
    yield Reading(
        figure=MEMORY.name, value=run.resident_bytes / run.nodes, note="of all that the process has, after the gates"
    )
    yield Reading(figure=TURNED_BAD.name, value=run.bad_seconds, note=f"{run.bad} of {run.nodes} nodes")


def large_on_postgresql(scale: Scale) -> Iterator[Reading]:
    """Run the program on a PostgreSQL of its own."""
    run = _run(scale, ("--postgresql",))
    yield _late(ON_POSTGRESQL, run.open, f"{run.nodes} nodes; fsync off")


def _late(figure: Figure, gates: Sequence[GateTimes], circumstances: str) -> Reading:
    """The p99 of gates up to their leases on disk, and where the time went at the median."""
    grants = [one.grant for one in gates]
    p50, p99 = statistics.median(grants), percentile(grants, 99)
    parts = (
        f"median {figure.shown(statistics.median([g.compute for g in gates]))} computing, "
        f"{figure.shown(statistics.median([g.store for g in gates]))} database"
    )
    return Reading(
        figure=figure.name,
        value=p99,
        ratio=p99 / p50,
        beside=f"its own p50, {figure.shown(p50)}",
        note=f"{len(gates)} gates; {parts}; {circumstances}",
    )


def _run(scale: Scale, more: Sequence[str]) -> GateRun:
    size = scale.of(
        ("--nodes", "10000", "--open-gates", "40", "--seconds", "15", "--bad", "500"),
        (
            "--nodes",
            "300",
            "--open-gates",
            "2",
            "--seconds",
            "1",
            "--sync-seconds",
            "1",
            "--idle-seconds",
            "2",
            "--bad",
            "20",
        ),
    )
    _, text = timed(
        (sys.executable, "-m", "tests.benchmarks.bench_gate", "--json", *size, *more), seconds=LARGE_SECONDS
    )
    run = decode(text.encode(), GateRun, what="the output of bench_gate")
    if run.lost:
        raise RuntimeError(f"{run.lost} of {run.nodes} nodes lost their connection")
    return run


def small(scale: Scale) -> Iterator[Reading]:
    """Gates one after the other over an aggregator and three daemons, each lease ended before the next."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder, contextlib.ExitStack() as stack:
        center = stack.enter_context(aggregator(Path(folder) / "aggregator"))
        url = f"http://127.0.0.1:{center.port}"
        # Nothing unprompted: three daemons that all start torch would be measured, and not the gate.
        arguments = ("--aggregator", url, "--label", "pool=bench", "--unprompted", "off")
        cpus = {"HEALTHD_CPU_DEVICES": scale.of("2", "1")}
        nodes = [stack.enter_context(daemon(Path(folder) / name, *arguments, extra=cpus)) for name in NODES]
        fleet = [node.connection() for node in nodes]
        http = center.connection()
        for one in (*fleet, http):
            stack.callback(one.close)
        _gate(http, "first", fleet, collective=False)  # waits until all nodes have reported
        alone = [_gate(http, f"alone-{n}", fleet, collective=False) for n in range(scale.of(GATES, 3))]
        together = [_gate(http, f"together-{n}", fleet, collective=True) for n in range(scale.of(VALIDATED, 1))]
    median, late = statistics.median(alone), percentile(alone, 99)
    yield Reading(
        figure=SMALL.name,
        value=median,
        ratio=late / median,
        beside=f"p99, {SMALL.shown(late)}",
        note=f"{len(alone)} gates, passive tier; orders and confirmations by the nodes' own sync",
    )
    yield Reading(
        figure=TOGETHER.name,
        value=statistics.median(together),
        ratio=statistics.median(together) / median,
        beside=f"a gate without, {SMALL.shown(median)}",
        note=f"3 collectives over 3 nodes; {spread(TOGETHER, together)}",
    )


def _gate(http: Keeper, job: str, fleet: Sequence[Keeper], *, collective: bool) -> float:
    """Seconds from the question to `admit`; the lease has ended everywhere afterwards."""
    asked = GateRequest(job=f"bench-{job}", nodes=NODES, tier=Tier.PASSIVE, collective=collective)
    began = time.perf_counter()
    status, text = http.exchange("POST", f"/v1/gates?wait={WAIT_SECONDS:.0f}", encode(asked))
    seconds = time.perf_counter() - began
    if status >= 300:
        raise RuntimeError(f"gate {job}: HTTP {status}: {text[:300]!r}")
    decision = decode(text, Decision, what="the decision")
    if decision.decision != "admit":
        raise RuntimeError(f"gate {job}: {decision.decision}: {'; '.join(r.message for r in decision.reasons)[:300]}")
    http.exchange("DELETE", f"/v1/gates/{decision.id}/lease")
    for node in fleet:
        wait_until(lambda node=node: not node.json("/v1/node")["leases"], 20, "the lease's end on a node")
    return seconds


BENCHES = (
    Bench(name="gate", figures=(LARGE, CLOSED, SYNC, MEMORY, TURNED_BAD), run=large, limit_seconds=LARGE_SECONDS),
    Bench(name="gate_postgresql", figures=(ON_POSTGRESQL,), run=large_on_postgresql, limit_seconds=LARGE_SECONDS),
    Bench(name="fleet", figures=(SMALL, TOGETHER), run=small, limit_seconds=110),
)
