"""A node without EFA is warned of by itself, and fails where a fleet or a gate over several nodes needs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from healthd.cli.settings.tree import Settings
from healthd.node.settings import NodeSettings


def settings(tmp_path: Path, *aggregators: str, **checks: dict[str, Any]) -> Settings:
    node = NodeSettings(name="n1", state_dir=tmp_path, run_dir=tmp_path)
    sync = dataclasses.replace(node.sync, aggregators=aggregators)
    return Settings(node=dataclasses.replace(node, sync=sync), checks=checks)


def required(made: Settings, **place: bool) -> object:
    return made.runner(**place).params.get("efa", {}).get("required", False)


def test_node_of_a_fleet_needs_efa_and_a_node_by_itself_does_not(tmp_path: Path) -> None:
    assert required(settings(tmp_path)) is False
    assert required(settings(tmp_path, "https://head:8090")) is True


@pytest.mark.parametrize("in_fleet", [True, False])
def test_gate_decides_by_the_nodes_that_it_has(in_fleet: bool, tmp_path: Path) -> None:
    assert required(settings(tmp_path), in_fleet=in_fleet) is in_fleet
    assert required(settings(tmp_path, "https://head:8090"), in_fleet=in_fleet) is in_fleet


def test_operators_word_counts_before_ours(tmp_path: Path) -> None:
    fleet = settings(tmp_path, "https://head:8090", efa={"required": False, "expected": 4})
    assert fleet.runner().params["efa"] == {"required": False, "expected": 4}
