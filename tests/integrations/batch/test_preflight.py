"""Preflights of nodes that know who they are by the variables of this launcher alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.cli_kit import healthd
from tests.hooks.preflight_kit import Job
from tests.hooks.two_nodes_kit import PASSIVE, settled, two_nodes_start_together


def batch(rank: int) -> dict[str, str]:
    told = {"AWS_BATCH_JOB_ID": "f0", "AWS_BATCH_JOB_ATTEMPT": "1", "AWS_BATCH_JOB_NUM_NODES": "2"}
    told |= {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "AWS_BATCH_JOB_NODE_INDEX": str(rank)}
    return told | ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"} if rank else {})


@pytest.mark.thorough
def test_two_nodes_start_together_by_the_launchers_word_alone(tmp_path: Path) -> None:
    two_nodes_start_together(tmp_path, batch)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, size=2) as job:
        yield job


def test_a_main_node_whose_exit_code_is_the_jobs_is_never_left_out(job: Job) -> None:
    """AWS Batch would call the job a success when the parked main node ends well, whatever became of the others."""
    for rank in range(2):
        fault = ("--fault", "memory_free=fail") if rank == 0 else ()
        job.start(rank, *PASSIVE, "--min-nodes", "1", *fault, place=(), env=settled(job, batch(rank)))
    for rank in range(2):
        ended = job.end(rank)
        assert (ended.code, ended.out) == (75, ""), ended.err
        assert "the main node was left out" in ended.err
    job.nothing_left()


def test_half_of_a_launchers_variables_are_one_clear_line(job: Job) -> None:
    job.start(0, place=(), env={"AWS_BATCH_JOB_ID": "f0", "AWS_BATCH_JOB_NUM_NODES": "2"})
    ended = job.end(0)
    assert ended.code == 2
    assert "AWS_BATCH_JOB_NODE_INDEX" in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_gate_for_fewer_nodes_does_not_go_with_a_main_node_whose_end_is_the_jobs(tmp_path: Path) -> None:
    done = healthd(
        tmp_path,
        *("gate", "--aggregator", "http://127.0.0.1:1", "--join", "g", "--min-nodes", "1"),
        env={
            "AWS_BATCH_JOB_ID": "1-2-3",
            "AWS_BATCH_JOB_NUM_NODES": "2",
            "AWS_BATCH_JOB_NODE_INDEX": "0",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        },
    )
    assert done.code == 2, done.err
    assert "--min-nodes cannot be combined with AWS Batch, where the job ends when" in done.err
