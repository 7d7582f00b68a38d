"""`healthd demo`: the main job before the reader's eyes, with real processes on this machine and nothing acted."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from healthd.cli.demo_stage import NODES, Stage

FAULT = "matmul@cpu:1=corrupt"
STEP = "train_step.block1.gelu_grad@cpu:1=corrupt:0.001"
BETWEEN = "all_reduce@rank:4=corrupt"  # a rank that n3 has among the three nodes alone


@click.command(short_help="Three nodes, an aggregator and a gate, on this machine.")
@click.option("--keep", is_flag=True, help="Keep everything running until Ctrl-C.")
def demo(keep: bool) -> int:
    """Three nodes, an aggregator and a gate on this machine: admit, a fault, reject by name, spare, repair, admit."""
    with tempfile.TemporaryDirectory(prefix="healthd-demo-") as folder, _signals(), Stage(Path(folder)) as stage:
        play(stage)
        if keep:
            stage.linger()
    return 0


def play(stage: Stage) -> None:
    """The acts, in order; HealthdError where one does not go as it must."""
    stage.title("1. Three node daemons and an aggregator start, each a process of its own")
    stage.start_all()
    stage.say("A daemon that has not checked yet is never healthy. What a person would type:")
    stage.curl("/health", expect=None)  # 503, unless it has checked by now, as on a busy machine
    stage.say("Each runs real tensor operations on its devices and real collectives between them ...")
    stage.wait_for_health(NODES)
    stage.curl("/health", expect=200)

    stage.title(
        "2. May a job start on the three nodes? The gate looks at the evidence and has them run collectives together"
    )
    stage.gate("train-1", *_nodes(), expect=0)
    stage.say("The lease ends with the job; here by hand:")
    stage.end_job("train-1")

    stage.title(f"3. A fault: one bit of what cpu:1 of n2 computes is flipped ({FAULT})")
    stage.healthd("fault", "set", FAULT, "--run-dir", str(stage.folder / "n2"), expect=0)
    stage.say("A job that wants evidence made now has the checks run again, and is told who is at fault:")
    stage.gate("train-2", *_nodes(), "--max-age", "1s", expect=75, names=("WrongResult", "n2"))
    stage.curl("/health", node="n2", expect=503)

    stage.title("4. The same job is content with two of the three: it starts with the spare")
    stage.gate("train-3", *_nodes(), "--min-nodes", "2", expect=0)
    stage.end_job("train-3")

    stage.title("5. The fault is cleared, and what it had latched with it")
    stage.healthd("fault", "clear", "--run-dir", str(stage.folder / "n2"), expect=0)

    stage.title(f"6. A fault that no node can see alone: n3 sends wrong values to others ({BETWEEN})")
    stage.healthd("fault", "set", BETWEEN, "--run-dir", str(stage.folder / "n3"), expect=0)
    stage.say("All three pass their own checks. Together they have to fail:")
    rejected = stage.gate("train-4", *_nodes(), expect=75, names=("CollectiveFault", "n3"))
    stage.say("Pairs of them told who it is:")
    stage.healthd("fleet", "explain", rejected["id"], "--aggregator", stage.aggregator, expect=0)
    stage.healthd("fault", "clear", "--run-dir", str(stage.folder / "n3"), expect=0)
    stage.gate("train-5", *_nodes(), expect=0)
    stage.healthd("fleet", "status", "--aggregator", stage.aggregator, expect=0)

    training(stage)
    stage.title(f"Done in {time.monotonic() - stage.began:.0f} s")


def training(stage: Stage) -> None:
    """The act of a device that single operations find nothing wrong with."""
    stage.title(f"7. A device that passes every single operation and cannot train ({STEP})")
    stage.say("One gradient of one layer is off by a thousandth, once. Products, memory, digests and copies are right:")
    own = str(stage.folder / "own")
    probes = ("matmul", "memory", "digest", "transfer", "train_step")
    stage.healthd("check", *probes, "--fault", STEP, "--run-dir", own, "--state-dir", own, expect=2)


def _nodes() -> tuple[str, ...]:
    return tuple(word for node in NODES for word in ("--node", node))


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends the demonstration as Ctrl-C does, so that nothing is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
