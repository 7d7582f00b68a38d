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
from tests.benchmarks.bench_gate import GateRun
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, percentile, spread
from tests.benchmarks.processes import Keeper, aggregator, daemon, timed, wait_until

NODES = ("b1", "b2", "b3")
GATES = 20
VALIDATED = 5
WAIT_SECONDS = 80.0

LARGE = Figure(
    name="gate_10000", what="gate for 64 of 10,000 nodes, p99 before leases travel", unit="seconds", upper=0.020
)
SMALL = Figure(name="gate_3", what="gate for 3 of 3 nodes, leases confirmed, p50", unit="seconds")
TOGETHER = Figure(name="gate_3_collective", what="the same with collectives over the 3 nodes, p50", unit="seconds")


def large(scale: Scale) -> Iterator[Reading]:
    """Run the program."""
    size = scale.of(
        ("--nodes", "10000", "--seconds", "15"), ("--nodes", "300", "--seconds", "1", "--sync-seconds", "1")
    )
    _, text = timed((sys.executable, "-m", "tests.benchmarks.bench_gate", "--json", *size))
    run = decode(text.encode(), GateRun, what="the output of bench_gate")
    if run.lost:
        raise RuntimeError(f"{run.lost} of {run.nodes} nodes lost their connection")
    p50, p99 = statistics.median(run.grants), percentile(run.grants, 99)
    yield Reading(
        figure=LARGE.name,
        value=p99,
        ratio=p99 / p50,
        beside=f"its own p50, {LARGE.shown(p50)}",
        note=f"{run.nodes} nodes, {len(run.grants)} gates; as the caller sees it p99 "
        f"{LARGE.shown(percentile(run.wholes, 99))}; {run.syncs_per_second:.0f} syncs/s; aggregator: "
        f"{run.cpu_ratio:.0%} of one core, {run.resident_bytes / 1e6:.0f} MB",
    )


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
    Bench(name="gate", figures=(LARGE,), run=large, limit_seconds=100),
    Bench(name="fleet", figures=(SMALL, TOGETHER), run=small, limit_seconds=110),
)
