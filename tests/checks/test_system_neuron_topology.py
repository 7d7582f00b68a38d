"""Links between Neuron devices: judged by the catalogue, or by degree where a container has numbers of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.accelerators import neuron
from checks.contract import Status
from checks.system.neuron_topology import neuron_topology
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import worst_of


@pytest.fixture
def trn1(tmp_path: Path) -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", "trn1.32xlarge")


def with_links(links: dict[int, list[int] | None]) -> dict[str, Any]:
    devices = [{"target": f"neuron:{n}", "index": n, "connected_to": found} for n, found in links.items()]
    return {"accelerator": "neuron", "devices": devices}


TORUS = {n: [(n - 4) % 16, (n + 4) % 16, n - n % 4 + (n - 1) % 4, n - n % 4 + (n + 1) % 4] for n in range(16)}


def judged(machine: NeuronMachine, links: dict[int, list[int] | None]) -> list[tuple[str, str | None, str]]:
    found = machine.findings(neuron_topology, inventory=with_links(links))
    return [(item.status.value, item.reason, item.target) for item in found if item.status is not Status.PASS]


@pytest.mark.parametrize(("factor", "step"), [(1, 6), (5, 3)])
def test_numbers_of_a_container_are_judged_by_degree(factor: int, step: int, trn1: NeuronMachine) -> None:
    renamed: dict[int, list[int] | None] = {n: [(factor * m + step) % 16 for m in old] for n, old in TORUS.items()}
    assert judged(trn1, renamed) == []
    renamed[6] = (renamed[6] or [])[1:]
    assert judged(trn1, renamed) == [("fail", "WrongTopology", "neuron:6")]
    share: dict[int, list[int] | None] = {0: [1, 2], 1: [0, 3], 2: [0, 3], 3: [1, 2]}
    assert judged(trn1, share) == []


def test_device_that_tells_no_neighbours_is_unknown_and_its_own_neighbours_are_not_accused(trn1: NeuronMachine) -> None:
    assert judged(trn1, {**TORUS, 5: None}) == [("unknown", "NoData", "neuron:5")]
    assert judged(trn1, dict.fromkeys(TORUS)) == [("unknown", "NoData", "node")]
    assert judged(trn1, {}) == [("unknown", "NoData", "node")]


def test_links_are_not_judged_without_a_type_or_through_switches(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn3.48xlarge")
    (finding,) = machine.findings(neuron_topology, inventory=neuron.find(machine.host, {}))
    assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")
    machine.write("/sys/devices/virtual/dmi/id/product_name", "trn9.48xlarge\n")
    (finding,) = machine.findings(neuron_topology, inventory=with_links(dict(TORUS)))
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "UnknownInstanceType")
    assert worst_of(machine.findings(neuron_topology, inventory=with_links(dict(TORUS)), type="trn1.32xlarge")) == (
        Status.PASS,
        None,
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.integers(0, 15), st.none() | st.lists(st.integers(0, 17), max_size=5, unique=True), min_size=1, max_size=16
    )
)
def test_any_links_are_judged_without_a_crash_and_a_lost_one_never_passes(
    shared: NeuronMachine, changed: dict[int, list[int] | None]
) -> None:
    links: dict[int, list[int] | None] = {**TORUS, **changed}
    bad = judged(shared, links)
    same = [n for n in links if links[n] is not None and set(links[n] or ()) >= set(TORUS[n])]
    if len(same) == 16:
        assert all(status != "fail" for status, _, _ in bad)
    elif 2 * len(same) >= 16:
        lost = {f"neuron:{n}" for n in links if n not in same}
        assert {target for _, _, target in bad} >= lost


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> NeuronMachine:
    return NeuronMachine(tmp_path_factory.mktemp("links") / "machine", "trn1.32xlarge")
