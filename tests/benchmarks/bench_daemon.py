"""The daemon as a process: its start, its rest, and its answers while the devices are busy."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from checks.contract import Tier
from healthd.core.model import OrderReport
from healthd.node.http.control_socket import node_state, run_now
from tests.benchmarks.figures import Bench, Figure, Reading, Scale, percentile, spread
from tests.benchmarks.processes import (
    Service,
    bare_app,
    children_cpu_seconds,
    daemon,
    memory_bytes,
    own_cpu_seconds,
    wait_until,
)

STARTS = 5
REST_SECONDS = 30.0
FIRST_RUN_SECONDS = 60.0
BUSY_RUNS = 4
PAUSE_SECONDS = 0.004  # between two requests: some hundred a second, far above any scraper

START = Figure(name="daemon_start", what="daemon: process start to first /livez", unit="seconds")
MEMORY = Figure(name="daemon_memory", what="daemon at rest: resident", unit="bytes", upper=60e6)
CPU = Figure(name="daemon_cpu", what="daemon at rest: of one core, children apart", unit="ratio", upper=0.002)
MEDIAN = Figure(name="health_p50", what="GET /health while a quick tier runs, p50", unit="seconds")
P99 = Figure(name="health_p99", what="GET /health while a quick tier runs, p99", unit="seconds", upper=0.005)


def start(scale: Scale) -> Iterator[Reading]:
    """Starts of the daemon and of a bare application, in turns."""
    daemons, bares = [], []
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
        for number in range(scale.of(STARTS, 1)):
            with bare_app(Path(folder) / f"bare{number}") as bare:
                bares.append(bare.start_seconds)
            with daemon(Path(folder) / f"node{number}", "--unprompted", "off") as node:
                daemons.append(node.start_seconds)
    median, bare_median = statistics.median(daemons), statistics.median(bares)
    beside = f"bare FastAPI, {START.shown(bare_median)}"
    yield Reading(
        figure=START.name, value=median, ratio=median / bare_median, beside=beside, note=spread(START, daemons)
    )


def rest(scale: Scale) -> Iterator[Reading]:
    """The daemon after its first unprompted quick tier, and a bare application, over the same half minute."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder, contextlib.ExitStack() as stack:
        bare = stack.enter_context(bare_app(Path(folder) / "bare"))
        node = stack.enter_context(daemon(Path(folder) / "node"))
        socket = node.folder / "node.sock"
        wait_until(lambda: _has_checked(socket), FIRST_RUN_SECONDS, "the first unprompted quick tier")
        time.sleep(1.0)
        before = [own_cpu_seconds(service.pid) for service in (node, bare)]
        children_before, began = children_cpu_seconds(node.pid), time.perf_counter()
        time.sleep(scale.of(REST_SECONDS, 2.0))
        seconds = time.perf_counter() - began
        used, bare_used = (
            (own_cpu_seconds(service.pid) - cpu) / seconds for service, cpu in zip((node, bare), before, strict=True)
        )
        children_used = (children_cpu_seconds(node.pid) - children_before) / seconds
        resident, bare_resident = memory_bytes(node.pid), memory_bytes(bare.pid)
        proportional = memory_bytes(node.pid, "Pss")
    yield Reading(
        figure=MEMORY.name,
        value=resident,
        ratio=resident / bare_resident,
        beside=f"bare FastAPI, {MEMORY.shown(bare_resident)}",
        note=f"Pss {MEMORY.shown(proportional)}, after one quick tier",
    )
    yield Reading(
        figure=CPU.name,
        value=used,
        ratio=used / bare_used,
        beside=f"bare FastAPI, {CPU.shown(bare_used)}",
        note=f"over {seconds:.0f} s; its checks in children {CPU.shown(children_used)}",
    )


def _has_checked(socket: Path) -> bool:
    state = node_state(socket)
    wanted = {spec.name for spec in state.checks if spec.tier is Tier.QUICK}
    return state.running is None and wanted <= {result.check for result in state.results}


def busy(scale: Scale) -> Iterator[Reading]:
    """Requests by one kept connection to the daemon and one to a bare application, in turns, under the same load."""
    with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder, contextlib.ExitStack() as stack:
        bare = stack.enter_context(bare_app(Path(folder) / "bare"))
        node = stack.enter_context(daemon(Path(folder) / "node", "--unprompted", "off"))
        reports: list[OrderReport] = []
        runs = scale.of(BUSY_RUNS, 1)

        def order() -> None:
            reports.extend(run_now(node.folder / "node.sock", Tier.QUICK) for _ in range(runs))

        thread = threading.Thread(target=order, name="quick tiers")
        thread.start()
        times, bare_times = _ask_while(thread, node, bare)
        thread.join()
    if [report.status for report in reports] != ["done"] * runs:
        raise RuntimeError(f"the runs did not end well: {reports}")
    for figure, percent in ((MEDIAN, 50), (P99, 99)):
        value, bare_value = percentile(times, percent), percentile(bare_times, percent)
        yield Reading(
            figure=figure.name,
            value=value,
            ratio=value / bare_value,
            beside=f"bare FastAPI /livez, {figure.shown(bare_value)}",
            note=f"{len(times)} requests over {runs} quick tiers, slowest {figure.shown(max(times))}",
        )


def _ask_while(thread: threading.Thread, node: Service, bare: Service) -> tuple[list[float], list[float]]:
    ours, theirs = node.connection(), bare.connection()
    times, bare_times = [], []
    with contextlib.closing(ours), contextlib.closing(theirs):
        while thread.is_alive():
            times.append(ours.timed_get("/health")[0])
            time.sleep(PAUSE_SECONDS)
            bare_times.append(theirs.timed_get("/livez")[0])
            time.sleep(PAUSE_SECONDS)
    return times, bare_times


BENCHES = (
    Bench(name="start", figures=(START,), run=start, limit_seconds=80),
    Bench(name="rest", figures=(MEMORY, CPU), run=rest, limit_seconds=110),
    Bench(name="busy", figures=(MEDIAN, P99), run=busy, limit_seconds=110),
)
