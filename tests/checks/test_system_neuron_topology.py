"""The driver's list of links, which is fixed by type and number of devices: what it shows, and what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.accelerators import neuron
from checks.catalog import TYPES
from checks.contract import Action, Finding, Status
from checks.reasons import action_of
from checks.system.neuron.neuron_topology import neuron_topology
from tests.fakes.neuron import NeuronMachine
from tests.hosts.machine import Machine, worst_of
from tests.profile import examples

PASSES = (Status.PASS, None)
TORUS = {n: [(n - 4) % 16, (n + 4) % 16, n - n % 4 + (n - 1) % 4, n - n % 4 + (n + 1) % 4] for n in range(16)}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A plain one: this check reads the inventory alone, and the type is told."""
    return Machine(tmp_path_factory.mktemp("links") / "machine")


def with_links(links: dict[int, list[int] | None], **changes: Any) -> dict[str, Any]:
    devices = [{"target": f"neuron:{n}", "index": n, "connected_to": found, **changes} for n, found in links.items()]
    return {"accelerator": "neuron", "devices": devices}


def look(machine: Machine, inventory: dict[str, Any], name: str = "trn1.32xlarge") -> list[Finding]:
    return machine.findings(neuron_topology, inventory=inventory, type=name)


def judged(machine: Machine, links: dict[int, list[int] | None]) -> list[tuple[str, str | None, str]]:
    found = look(machine, with_links(links))
    return [(item.status.value, item.reason, item.target) for item in found if item.status is not Status.PASS]


@pytest.mark.parametrize("name", ["inf2.24xlarge", "inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge", "trn1.2xlarge"])
def test_healthy_machine_passes_with_the_list_of_its_type(name: str, machine: Machine) -> None:
    kind = TYPES[name]
    links: dict[int, list[int] | None] = {n: list(kind.neighbours(n) or ()) for n in range(kind.devices or 0)}
    (finding,) = look(machine, with_links(links), name)
    assert (finding.status, finding.reason) == PASSES
    assert finding.measurements[0].value == sum(len(found or ()) for found in links.values())


def test_open_chain_that_is_listed_as_a_ring_is_told(machine: Machine) -> None:
    ring: dict[int, list[int] | None] = {n: [(n - 1) % 6, (n + 1) % 6] for n in range(6)}
    found = look(machine, with_links(ring), "inf2.24xlarge")
    assert [(item.status, item.target) for item in found] == [(Status.WARN, "neuron:0"), (Status.WARN, "neuron:5")]


def test_list_of_another_type_is_a_warning_that_accuses_no_link(machine: Machine) -> None:
    (finding,) = look(machine, with_links({**TORUS, 5: [1, 4, 9]}))
    assert (finding.status, finding.reason, finding.target) == (Status.WARN, "WrongTopology", "neuron:5")
    assert "lists links to 1, 4, 9, but trn1.32xlarge has 1, 4, 6, 9" in finding.message
    assert "depends only on the type and number" in finding.message
    assert action_of("WrongTopology") is Action.INSPECT


def test_missing_device_is_why_no_links_are_listed_and_no_update_is_advised(machine: Machine) -> None:
    none: dict[int, list[int] | None] = dict.fromkeys(set(range(16)) - {5})
    (finding,) = look(machine, with_links(none))
    assert (finding.status, finding.reason, finding.target) == (Status.UNKNOWN, "NoData", "node")
    assert "only if it finds all 16 devices of trn1.32xlarge, but 15 are shown; see device_count" in finding.message
    assert "update" not in finding.message
    assert judged(machine, dict.fromkeys(TORUS)) == [("unknown", "NoData", "node")]
    assert judged(machine, {}) == [("unknown", "NoData", "node")]


def test_stand_in_lists_no_links_when_a_device_is_gone(tmp_path: Path) -> None:
    """As the driver: its tables are for whole machines."""
    whole = NeuronMachine(tmp_path / "machine", "inf2.24xlarge")
    whole.fault("missing_device", "neuron:2")
    found = neuron.find(whole.host, {})
    assert [device["connected_to"] for device in found["devices"]] == [None] * 5
    (finding,) = whole.findings(neuron_topology, inventory=found)
    assert "but 5 are shown" in finding.message


def test_device_without_a_list_among_others_is_unknown(machine: Machine) -> None:
    assert judged(machine, {**TORUS, 5: None}) == [("unknown", "NoData", "neuron:5")]


def test_share_of_a_container_is_judged_by_the_hosts_numbers(machine: Machine) -> None:
    share = with_links({0: TORUS[8], 1: TORUS[9]})
    for device, host_index in zip(share["devices"], (8, 9), strict=True):
        device["host_index"] = host_index
    assert worst_of(look(machine, share)) == PASSES
    share["devices"][1]["host_index"] = None
    (finding,) = look(machine, share)
    assert (finding.status, finding.reason, finding.target) == (Status.UNKNOWN, "NoData", "neuron:1")


def test_links_are_not_judged_without_a_type_or_through_switches(machine: Machine) -> None:
    (finding,) = look(machine, with_links(dict(TORUS)), "trn3.48xlarge")
    assert (finding.status, finding.reason) == (Status.SKIP, "NotApplicable")
    (finding,) = look(machine, with_links(dict(TORUS)), "trn9.48xlarge")
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "UnknownInstanceType")


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.integers(0, 15), st.none() | st.lists(st.integers(0, 17), max_size=5, unique=True), min_size=1, max_size=16
    )
)
def test_any_list_is_judged_without_a_crash_and_another_one_never_passes(
    machine: Machine, changed: dict[int, list[int] | None]
) -> None:
    links: dict[int, list[int] | None] = {**TORUS, **changed}
    bad = judged(machine, links)
    others = {f"neuron:{n}" for n, found in links.items() if set(found or ()) != set(TORUS[n])}
    assert {target for _, _, target in bad} - {"node"} <= others
    assert bool(bad) is bool(others)
    assert all(status != "fail" for status, _, _ in bad)
