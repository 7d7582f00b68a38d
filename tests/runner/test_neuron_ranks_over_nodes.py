"""
What the processes of Neuron ranks are told of a group over several nodes, for both bindings of torch. Pure: unverified
on hardware.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checks.accelerators.neuron.environment import environment_of
from healthd.core.model import CollectiveOrder
from healthd.runner.collective.ranks import group_of, group_over_nodes
from tests.runner.ranks_kit import orders

TARGETS = ("neuroncore:0", "neuroncore:1")
INVENTORY: dict[str, Any] = {"workers": list(TARGETS), "devices": []}


def order(first_rank: int, **changes: Any) -> CollectiveOrder:
    (one,) = orders(1)
    values = {"size": 6, "ranks": 2, "main": "10.77.0.1", "port": 29500, **changes}
    return dataclasses.replace(one, first_rank=first_rank, **values)


def told(first_rank: int, target: str, **changes: Any) -> dict[str, str | None]:
    group = group_over_nodes(order(first_rank, **changes), TARGETS)
    return environment_of(target, INVENTORY, {"group": group}, {})


@pytest.mark.parametrize(
    ("first_rank", "target", "rank", "local"),
    [(0, TARGETS[0], "0", "0"), (0, TARGETS[1], "1", "1"), (2, TARGETS[0], "2", "0"), (4, TARGETS[1], "5", "1")],
)
def test_rank_counts_over_all_nodes_and_its_place_over_its_own(
    first_rank: int, target: str, rank: str, local: str
) -> None:
    said = told(first_rank, target)
    # PyTorch/XLA
    assert (said["NEURON_PJRT_PROCESS_INDEX"], said["PJRT_LOCAL_PROCESS_RANK"]) == (rank, local)
    assert (said["NEURON_PJRT_PROCESSES_NUM_DEVICES"], said["PJRT_LOCAL_PROCESS_COUNT"]) == ("1,1,1,1,1,1", "2")
    # native, and launchers of both
    assert (said["RANK"], said["LOCAL_RANK"]) == (rank, local)
    assert (said["WORLD_SIZE"], said["LOCAL_WORLD_SIZE"]) == ("6", "2")
    assert said["NEURON_RT_VISIBLE_CORES"] == target.partition(":")[2]


def test_all_nodes_meet_at_the_main_one_beside_the_store_of_torch() -> None:
    said = [told(first_rank, TARGETS[0]) for first_rank in (0, 2, 4)]
    assert {one["NEURON_RT_ROOT_COMM_ID"] for one in said} == {"10.77.0.1:29501"}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in said} == {("10.77.0.1", "29501")}
    assert told(0, TARGETS[0], port=65535)["NEURON_RT_ROOT_COMM_ID"] == "10.77.0.1:65534"
    v6 = told(0, TARGETS[0], main="fd00::1")
    assert (v6["NEURON_RT_ROOT_COMM_ID"], v6["MASTER_ADDR"]) == ("[fd00::1]:29501", "fd00::1")


def test_group_within_a_node_is_as_it_was() -> None:
    said = environment_of(TARGETS[1], INVENTORY, {"group": group_of(TARGETS)}, {})
    assert (said["RANK"], said["LOCAL_RANK"], said["WORLD_SIZE"], said["LOCAL_WORLD_SIZE"]) == ("1", "1", "2", "2")
    assert (said["NEURON_RT_ROOT_COMM_ID"] or "").startswith("127.0.0.1:")
