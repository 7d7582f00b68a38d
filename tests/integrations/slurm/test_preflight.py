"""Preflights of nodes that know who they are by the variables of this launcher alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hooks.two_nodes_kit import HERE, two_nodes_start_together


def slurm(rank: int) -> dict[str, str]:
    told = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}
    return {**told, "SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank), "SLURM_STEP_NODELIST": f"{HERE},other"}


@pytest.mark.thorough
def test_two_nodes_start_together_by_the_launchers_word_alone(tmp_path: Path) -> None:
    two_nodes_start_together(tmp_path, slurm)
