"""Preflights of nodes that know who they are by the variables of this launcher alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hooks.two_nodes_kit import HERE, two_nodes_start_together


def openmpi(rank: int) -> dict[str, str]:
    told = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    return {**told, "OMPI_COMM_WORLD_RANK": str(rank), "MASTER_ADDR": HERE}


@pytest.mark.thorough
def test_two_nodes_start_together_by_the_launchers_word_alone(tmp_path: Path) -> None:
    two_nodes_start_together(tmp_path, openmpi)
