"""Training steps over the nodes of a real fleet: by hand, and by a gate of the deep tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.aggregator.cluster import AGGREGATOR, Cluster, asked
from tests.patience import PATIENCE

NODES = ("n1", "n2", "n3")
NAME = "data_parallel_step"
# Machines of tests are busy: what takes a second alone may take many.
POLICY = (
    AGGREGATOR
    + """
collective_checks = ["all_reduce"]
collective_start = "180s"
tuning.collective_contact = "90s"
collective_timeout = "60s"
"""
)
SMALL = "[checks.all_reduce]\nsizes_bytes = [1024]\niterations = 2\n[checks.data_parallel_step]\nsteps = 2\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("fleet"), checks=("memory_free", "proof", "all_reduce", NAME)) as one:
        one.fleet(*NODES, config=POLICY, extra=SMALL)
        yield one


@pytest.fixture
def url(fleet: Cluster) -> Iterator[str]:
    yield fleet.services["aggregator"].url
    for name in NODES:
        fleet.healthd("fault", "clear", "--run-dir", str(fleet.run_dir(name)))


def validate(fleet: Cluster, url: str, *nodes: str) -> tuple[int, Any]:
    """The exit code of `healthd fleet validate --kind training`, and what it printed."""
    words = ("--kind", "training", "--wait", "240s", "--json", "--aggregator", url)
    said = fleet.healthd("fleet", "validate", *nodes, *words, seconds=100 * PATIENCE)
    return said.code, said.json


@pytest.mark.thorough
def test_nodes_that_train_together_pass(fleet: Cluster, url: str) -> None:
    code, found = validate(fleet, url, *NODES)
    assert code == 0, found
    ((tested,),) = (run["history"] for run in found["validations"])
    assert tested["outcome"] == "pass"
    assert list(tested["busbw_bytes_per_second"]) == [NAME]


def test_node_whose_gradients_are_wrong_is_named_with_layer_and_operation(fleet: Cluster, url: str) -> None:
    fault = f"{NAME}.block1.gelu_grad@cpu:0=corrupt:0.001"
    assert fleet.healthd("fault", "set", fault, "--run-dir", str(fleet.run_dir("n2"))).code == 0
    code, found = validate(fleet, url, *NODES)
    assert code == 1, found
    excluded = {one["node"]: one["reasons"][0] for one in found["decision"]["excluded"]}
    assert list(excluded) == ["n2"]
    assert excluded["n2"]["check"] == NAME
    assert excluded["n2"]["injected"]
    assert "first at layer block1, gradient of gelu" in excluded["n2"]["message"]
    whole = found["validations"][0]["history"][0]
    assert {node: why["code"] for node, why in whole["accused"].items()} == {"n2": "SilentCorruption"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "seen", "code"),
    [
        (".block1.up_weight_reduced@cpu:0=corrupt", "SilentCorruption", "CollectiveFault"),
        ("@cpu:0=crash", "RankDied", "CollectiveFault"),
        ("@cpu:0=slow:100", "SlowNode", "SlowNode"),
    ],
)
def test_node_at_fault_is_named_and_the_others_are_not(
    fleet: Cluster, url: str, fault: str, seen: str, code: str
) -> None:
    assert fleet.healthd("fault", "set", f"{NAME}{fault}", "--run-dir", str(fleet.run_dir("n2"))).code == 0
    exit_code, found = validate(fleet, url, *NODES)
    assert exit_code == 1, found
    excluded = {one["node"]: one["reasons"][0]["code"] for one in found["decision"]["excluded"]}
    assert excluded == {"n2": code}
    whole = found["validations"][0]["history"][0]
    assert {node: why["code"] for node, why in whole["accused"].items()} == {"n2": seen}


@pytest.mark.thorough
def test_gate_of_the_deep_tier_runs_the_steps_after_the_collectives(fleet: Cluster, url: str) -> None:
    words = ("--tier", "deep", "--wait", "240s", "--json")
    said = fleet.healthd(
        "gate", "--aggregator", url, "--job", "train", *asked(NODES[:2]), *words, seconds=100 * PATIENCE
    )
    assert said.code == 0, said.out + said.err
    (run,) = fleet.services["aggregator"].get(f"/v1/validations/{said.json['id']}").json()["validations"]
    assert [list(tested["busbw_bytes_per_second"]) for tested in run["history"]] == [["all_reduce", NAME]]
