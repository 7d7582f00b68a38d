"""Three processes of a job on one machine, one of which spoils what it sends: who, what and why, without a service."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hooks.preflight_kit import CONFIG, Ended, Job

CULPRIT = 2
COLLECTIVES = """
[probe]
cpu_devices = 1
[checks.all_reduce]
sizes_bytes = [1024, 65536]
iterations = 2
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, size=3) as job:
        job.config.write_text(CONFIG.replace("[node]\nchecks = [", '[node]\nchecks = ["all_reduce", ') + COLLECTIVES)
        yield job


def run(job: Job, *options: str) -> list[Ended]:
    for rank in range(job.size):
        fault = ("--fault", "all_reduce=corrupt") if rank == CULPRIT else ()
        job.start(rank, "--tier", "passive", *options, *fault)
    return [job.end(rank, timeout=90) for rank in range(job.size)]


@pytest.mark.thorough
def test_all_end_with_75_and_each_says_who_what_and_why(job: Job) -> None:
    for ended in run(job):
        words = " ".join(ended.err.split())
        assert (ended.code, ended.out) == (75, ""), ended.err
        assert "REJECT" in words
        host = socket.gethostname()
        assert f"CollectiveFault {host} (rank 2) fails in collectives with {host} (rank " in words
        assert "wrong values" in words
        assert words.count("CollectiveFault") == 1
    job.nothing_left()


@pytest.mark.thorough
def test_with_two_wanted_the_others_run_renumbered_and_the_culprit_parks(job: Job) -> None:
    ended = run(job, "--min-nodes", "2")
    assert [one.code for one in ended] == [0, 0, 0], ended
    assert [one.out.splitlines()[:1] for one in ended] == [
        ["started 0 2 127.0.0.1"],
        ["started 1 2 127.0.0.1"],
        [],
    ]
    assert "this node was left out" in ended[CULPRIT].err
    assert f"CollectiveFault {socket.gethostname()} (rank 2)" in " ".join(ended[CULPRIT].err.split())
    job.nothing_left()
