"""`healthd preflight --run`: a gate first, then a parent that stays; rank 0 keeps the notes of all."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.preflight_kit import Job
from tests.hooks.preflight_launch_kit import PASSIVE

# Rank 2 dies of a full disk as soon as all have started, the others of the peer that they lost.
DIES = """
import os, sys, time
rank, folder = os.environ["HEALTHD_RANK"], os.environ["JOB_FOLDER"]
print("started", rank, flush=True)
open(f"{folder}/{rank}", "w").close()
while len(os.listdir(folder)) < int(os.environ["HEALTHD_NNODES"]):
    time.sleep(0.02)
if rank == os.environ["JOB_DIES"]:
    sys.exit("OSError: [Errno 28] No space left on device")
time.sleep(1)
sys.exit("RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:46264")
"""
RUN = (*PASSIVE, "--run", "--exit-style", "verdict")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def test_a_job_that_was_gated_and_died_gets_one_verdict_over_all_of_its_nodes(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "started"
    folder.mkdir()
    for rank in range(job.size):
        env = {"JOB_FOLDER": str(folder), "JOB_DIES": "2"}
        job.start(rank, *RUN, command=(sys.executable, "-c", DIES), env=env)
    for rank in range(job.size):
        ended = job.end(rank)
        assert ended.out == f"started {rank}\n", ended.err
        assert "healthd: why it died: SUSPECTED STORAGE" in ended.err, ended.err
        assert "the command on rank-2: A file system is full" in ended.err
        assert "judged alone" not in ended.err
        assert ended.code == 76
    job.nothing_left()


@pytest.mark.thorough
def test_a_good_end_leaves_nothing_behind_and_keeps_its_code(job: Job) -> None:
    job.size = 2
    for rank in range(job.size):
        job.start(rank, *PASSIVE, "--run", command=(sys.executable, "-c", "print('well')"))
    assert [(job.end(rank).code, rank) for rank in range(job.size)] == [(0, 0), (0, 1)]
    job.nothing_left()


@pytest.mark.thorough
def test_signals_reach_the_command_and_the_main_nodes_sidecar_stays_until_it_has_ended(
    job: Job, tmp_path: Path
) -> None:
    job.size = 1
    ready = tmp_path / "ready"
    # A signal just before one long wait would not end it.
    script = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); "
        f"open({str(ready)!r}, 'w')\nwhile True: time.sleep(0.05)"
    )
    process = job.start(0, *PASSIVE, "--run", command=(sys.executable, "-c", script))
    job.wait_for("time.sleep", "-c")
    while not ready.exists():
        assert process.poll() is None
    os.kill(job.wait_for("preflight", "--sidecar"), signal.SIGTERM)
    os.kill(process.pid, signal.SIGTERM)
    ended = job.end(0)
    assert ended.code == 9
    # By the aggregator of the gate, which knows the node as that: the sidecar has not ended by the signal.
    assert "rank-0 signal: signal 15" in ended.err, ended.err
    assert "judged alone" not in ended.err
    job.nothing_left()


def test_what_goes_with_run_alone_is_refused_without_it(job: Job) -> None:
    job.size = 1
    job.start(0, *PASSIVE, "--exit-style", "verdict")
    ended = job.end(0)
    assert (ended.code, "needs run" in ended.err) == (2, True), ended.err
