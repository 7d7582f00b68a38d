"""
`make bench`: the figures to reach, measured as ratios in one run, as one table.

    python -m tests.benchmarks [--short] [--only NAME ...] [--skip BENCH ...] [--json FILE] [--list]

`--short` (`make bench-short`, in CI) runs everything with few rounds and small sizes: it says whether each figure can
be measured, and nothing about the aims.

Exit code: 1 where an aim was missed, except of a short run, or something could not be measured; else 0. What needs root
is skipped without, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests import speed
from tests.benchmarks import (
    bench_checks,
    bench_collectives,
    bench_daemon,
    bench_fleet,
    bench_flood,
    bench_memory,
    bench_namespaces,
    bench_postmortem,
    bench_screening,
    bench_standin,
    bench_steps,
    bench_takeover,
    bench_training,
)
from tests.benchmarks.figures import SHORT, WHOLE, Bench, Figure, Reading, Scale, measure, verdict

BENCHES: tuple[Bench, ...] = (
    *bench_checks.BENCHES,
    *bench_standin.BENCHES,
    *bench_training.BENCHES,
    *bench_daemon.BENCHES,
    *bench_fleet.BENCHES,
    *bench_memory.BENCHES,
    *bench_takeover.BENCHES,
    *bench_flood.BENCHES,
    *bench_postmortem.BENCHES,
    *bench_screening.BENCHES,
    *bench_steps.BENCHES,
    *bench_collectives.BENCHES,
    *bench_namespaces.BENCHES,
)
COLOURS = {
    "met": "green",
    "missed": "red",
    "unknown": "yellow",
    "shown": "dim",
    "skipped": "dim",
    "measured": "green",
}

Row = tuple[Figure, Reading]


def main(argv: Sequence[str] | None = None, benches: Sequence[Bench] = BENCHES) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a bench or a figure; repeat")
    parser.add_argument("--skip", action="append", default=[], metavar="BENCH", help="leave this bench out; repeat")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the readings there as well")
    parser.add_argument("--list", action="store_true", help="name the benches and their figures, and measure nothing")
    parser.add_argument("--short", action="store_true", help="few rounds and small sizes: can it be measured?")
    arguments = parser.parse_args(argv)
    scale = SHORT if arguments.short else WHOLE
    chosen = [bench for bench in choose(benches, arguments.only, parser) if bench.name not in arguments.skip]
    if arguments.list:
        for bench in chosen:
            sys.stdout.write(f"{bench.name}: {', '.join(figure.name for figure in bench.figures)}\n")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is started is ended on the way out
    load_before = os.getloadavg()
    unit = speed.given() if speed.VARIABLE in os.environ else speed.measured()
    began = time.monotonic()
    rows = run(chosen, scale, Console(stderr=True))
    seconds = time.monotonic() - began
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table(rows, scale))
    load = f"load {load_before[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    took = f"{seconds:.0f} s = {seconds / unit:.0f} U (U = {unit:.2f} s, see 'make speed')"
    console.print(f"{os.cpu_count()} cores, {load}, Python {platform.python_version()}, {took}", style="dim")
    if arguments.json is not None:
        arguments.json.write_text(as_json(rows, scale, seconds, load_before[0], unit), encoding="utf-8")
    return int(any(outcome(figure, reading, scale) in ("missed", "unknown") for figure, reading in rows))


def choose(benches: Sequence[Bench], names: Sequence[str], parser: argparse.ArgumentParser) -> list[Bench]:
    """The benches of these names or with figures of these names; all when none is named."""
    known = {name for bench in benches for name in (bench.name, *(figure.name for figure in bench.figures))}
    for name in names:
        if name not in known:
            parser.error(f"--only {name!r} is none of: {', '.join(sorted(known))}")
    wanted = set(names) or known
    return [bench for bench in benches if wanted & {bench.name, *(figure.name for figure in bench.figures)}]


def run(benches: Sequence[Bench], scale: Scale, progress: Console) -> list[Row]:
    """One after the other, since they would be in each other's way."""
    rows: list[Row] = []
    for bench in benches:
        began = time.monotonic()
        readings = measure(bench, scale)
        rows.extend(zip(bench.figures, readings, strict=True))
        progress.print(f"{bench.name}: {time.monotonic() - began:.0f} s", style="dim")
    return rows


def outcome(figure: Figure, reading: Reading, scale: Scale) -> str:
    """The verdict; of a short run no more than whether it could be measured."""
    word = verdict(figure, reading)
    return "measured" if scale.short and word in ("met", "missed", "shown") else word


def table(rows: Sequence[Row], scale: Scale) -> Table:
    """Figure, aim, measured, ratio, verdict; what the ratio is to, and the spread."""
    title = scale.of("Figures to reach", "Short run: can each figure be measured? The values are not to be compared")
    shown = Table(title=title, title_justify="left")
    for name in ("figure", "aim", "measured", "ratio", "verdict", "circumstances"):
        shown.add_column(name, justify="right" if name in ("measured", "ratio") else "left", overflow="fold")
    for figure, reading in rows:
        word = outcome(figure, reading, scale)
        ratio = "" if reading.ratio is None else f"{reading.ratio:.2f} x"
        told = "; ".join(part for part in (f"to {reading.beside}" if reading.beside else "", reading.note) if part)
        value = "none" if reading.value is None else figure.shown(reading.value)
        shown.add_row(figure.what, figure.aim, value, ratio, f"[{COLOURS[word]}]{word}[/]", told)
    return shown


def as_json(rows: Sequence[Row], scale: Scale, seconds: float, load: float, unit: float) -> str:
    """The same for machines."""
    figures = [
        {
            "name": figure.name,
            "what": figure.what,
            "unit": figure.unit,
            "lower": figure.lower,
            "upper": figure.upper,
            "measured": reading.value,
            "ratio": reading.ratio,
            "beside": reading.beside,
            "note": reading.note,
            "verdict": outcome(figure, reading, scale),
        }
        for figure, reading in rows
    ]
    machine = {"cores": os.cpu_count(), "load_before": load, "unit_seconds": unit, "python": platform.python_version()}
    return (
        json.dumps({"machine": machine, "short": scale.short, "seconds": seconds, "figures": figures}, indent=2) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
