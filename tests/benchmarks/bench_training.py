"""The training step on a CPU and on XLA: wrong values and rare ones found, healthy steps accused, cost of digests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Bench, Figure, Reading, Scale

SCRIPT = Path(__file__).with_name("on_training.py")
ROOT = Path(__file__).parents[2]
XLA_PYTHON = Path(os.environ.get("HEALTHD_XLA_PYTHON") or ROOT / ".venv-xla" / "bin" / "python")
CLEAN_STEPS = 10_000
RARE_STEPS = 30_000  # 95 of 100 such soaks are hit at all
XLA_CLEAN_STEPS = 2_000  # it reads every tensor to the host; 10,000 by hand: `on_training.py xla clean 10000`

FAULTS = Figure(name="step_faults", what="wrong values found and named, every place of a step", unit="ratio", lower=1.0)
CLEAN = Figure(name="step_clean", what="healthy steps with other digests", unit="count", upper=0)
COST = Figure(name="step_digests", what="digests of a large step, of the step", unit="ratio", upper=0.04)
RARE = Figure(name="step_rare", what="strikes of one step in 10,000 that a soak missed", unit="count", upper=0)
XLA_CLEAN = Figure(name="step_clean_xla", what="the same on PyTorch/XLA", unit="count", upper=0)


def ask(accelerator: str, what: str, count: int) -> dict[str, Any]:
    """What `on_training.py` says, under the interpreter that has this accelerator."""
    python = str(XLA_PYTHON) if accelerator == "xla" else sys.executable
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "HEALTHD_CPU_DEVICES": "2"}
    command = (python, "-W", "ignore", str(SCRIPT), accelerator, what, str(count))
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def faults(scale: Scale) -> Reading:
    """One wrong value at every place, of four magnitudes, in two dtypes."""
    said = ask("cpu", "faults", scale.of(0, 24))
    found = sum(said["found"].values())
    missed = ", ".join(str(case) for case in said["missed"][:4]) or "none"
    note = f"{found} of {said['injected']}; missed: {missed}"
    return Reading(figure=FAULTS.name, value=found / said["injected"], note=note)


def clean(accelerator: str, figure: Figure, scale: Scale) -> Reading:
    """Many steps from one state."""
    said = ask(accelerator, "clean", scale.of(CLEAN_STEPS if accelerator == "cpu" else XLA_CLEAN_STEPS, 20))
    note = f"{said['steps']} steps in {said['seconds']:.0f} s"
    return Reading(figure=figure.name, value=float(said["differ"]), note=note)


def on_cpu(scale: Scale) -> Iterator[Reading]:
    """In torch, and the cost of the digests beside the step itself, in turns, by processor time."""
    yield faults(scale)
    said = ask("cpu", "digest", scale.of(15, 2))
    note = ", ".join(f"{dtype} {100 * one['ratio']:.1f} % of {one['without']:.2f} s" for dtype, one in said.items())
    yield Reading(figure=COST.name, value=max(one["ratio"] for one in said.values()), note=note)


def clean_on_cpu(scale: Scale) -> Iterator[Reading]:
    """Healthy steps in torch."""
    yield clean("cpu", CLEAN, scale)


def rare_on_cpu(scale: Scale) -> Iterator[Reading]:
    """A fault that strikes by chance, in a soak of the smallest step."""
    said = ask("cpu", "rare", scale.of(RARE_STEPS, 300))
    note = (
        f"{said['struck']} strikes in {said['steps']} steps, {said['seconds']:.0f} s; "
        f"{100 * said['missed_ratio']:.2g} % of such soaks are not hit; {', '.join(said['found']) or 'nothing differs'}"
    )
    yield Reading(figure=RARE.name, value=float(abs(said["struck"] - said["differ"])), note=note)


def clean_on_xla(scale: Scale) -> Iterator[Reading]:
    """On XLA's CPU client; skipped where its interpreter is not installed."""
    if not XLA_PYTHON.exists():
        note = f"no interpreter with torch_xla at {XLA_PYTHON}"
        yield Reading(figure=XLA_CLEAN.name, value=None, note=note, skipped=True)
        return
    yield clean("xla", XLA_CLEAN, scale)


BENCHES = (
    Bench(name="training", figures=(FAULTS, COST), run=on_cpu, limit_seconds=200),
    Bench(name="training_clean", figures=(CLEAN,), run=clean_on_cpu, limit_seconds=300),
    Bench(name="training_rare", figures=(RARE,), run=rare_on_cpu, limit_seconds=200),
    Bench(name="training_clean_xla", figures=(XLA_CLEAN,), run=clean_on_xla, limit_seconds=300),
)
