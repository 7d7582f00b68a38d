"""What a report of a step costs the job, with a daemon that reads, one that is stuck, and none."""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.figures import Bench, Figure, Reading, Scale, spread
from tests.job import FOLDER

STEPS = 20_000
ROUNDS = 5

READ = Figure(name="step_report", what="StepReporter: begin, waiting, end; a daemon reads", unit="seconds", upper=20e-6)
FULL = Figure(name="step_report_full", what="the same, the daemon is stuck", unit="seconds", upper=20e-6)
NONE = Figure(name="step_report_none", what="the same, no daemon", unit="seconds", upper=20e-6)


def measure(scale: Scale) -> Iterator[Reading]:
    """Seconds a step, the median of rounds."""
    for figure in (READ, FULL, NONE):
        with tempfile.TemporaryDirectory(prefix="healthd-bench-") as folder:
            path = str(Path(folder) / "steps.sock")
            rounds = [_seconds(figure, path, scale.of(STEPS, 1000)) for _ in range(scale.of(ROUNDS, 1))]
        yield Reading(figure=figure.name, value=statistics.median(rounds), note=spread(figure, rounds))


def _seconds(figure: Figure, path: str, steps: int) -> float:
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    from healthd_steps import StepReporter

    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        if figure is not NONE:
            daemon.bind(path)
        reader = threading.Thread(target=_read, args=(daemon,), daemon=True)
        if figure is READ:
            reader.start()
        reporter = StepReporter(job="bench", rank=0, size=1, path=path)
        begun = time.perf_counter()
        for step in range(steps):
            reporter.begin()
            with reporter.waiting:
                pass
            reporter.end(step)
        took = time.perf_counter() - begun
        if figure is READ:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
                last.sendto(b"", path)
            reader.join()
        reporter.close()
    return took / steps


def _read(daemon: socket.socket) -> None:
    while daemon.recv(1024):
        pass


BENCHES = (Bench(name="steps", figures=(READ, FULL, NONE), run=measure, limit_seconds=60),)
