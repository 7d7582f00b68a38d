"""Preflights of nodes that know who they are by the variables of this launcher alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hooks.two_nodes_kit import HERE, two_nodes_start_together


def sagemaker(rank: int) -> dict[str, str]:
    # The first of the hosts is rank 0; "localhost" sorts before "other".
    return {"SM_HOSTS": f'["other", "{HERE}"]', "SM_CURRENT_HOST": (HERE, "other")[rank]}


@pytest.mark.thorough
def test_two_nodes_start_together_by_the_launchers_word_alone(tmp_path: Path) -> None:
    two_nodes_start_together(tmp_path, sagemaker)
