"""`make demo-kubernetes` in the cluster of the tests: a gated Job with tensors, from `kubectl` to its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes import demo
from tests.kubernetes.kit import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]


def test_job_trains_gives_its_nodes_back_and_the_next_one_goes_round_a_node_that_computes_wrongly(
    nodes_of_ours: Cluster, torch_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.play(nodes_of_ours, tmp_path)
    shown = capsys.readouterr().out
    assert "20 steps of 3 ranks" in shown
    assert "WrongResult matmul cpu:0" in shown
    assert nodes_of_ours.conditions() == {}
