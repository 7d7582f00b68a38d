"""Preflights of two nodes that know who they are by their launcher's variables alone: real hooks, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.hooks.preflight_kit import Job

PASSIVE = ("--tier", "passive", "--no-collective")
HERE = "localhost"
"""The host of rank 0."""

Variables = Callable[[int], dict[str, str]]
"""What the launcher sets on the node of that rank."""


def settled(job: Job, variables: dict[str, str]) -> dict[str, str]:
    """With a port of this test's own, for nodes that share a machine."""
    return {**variables, "HEALTHD_PREFLIGHT_PORT": str(job.port)}


def two_nodes_start_together(folder: Path, launcher: Variables) -> None:
    with Job(folder, size=2) as job:
        for rank in range(2):
            job.start(rank, *PASSIVE, place=(), env=settled(job, launcher(rank)))
        for rank in range(2):
            ended = job.end(rank)
            assert ended.code == 0, ended.err
            assert f"started {rank} 2" in ended.out
            assert f"healthd: rank {rank} of 2 by " in ended.err
        job.nothing_left()
