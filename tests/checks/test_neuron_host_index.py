"""Which of the host's devices a container's devices are: by minor number, by neighbours, unknown without both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import neuron
from checks.accelerators.neuron.ls import match_neighbours
from checks.accelerators.neuron.sysfs import SysfsDevice
from checks.contract import Action, Finding, Status
from checks.host.machine import Host
from checks.system.neuron.neuron_counters import neuron_counters
from healthd.cli.support.recording import record
from tests.checks.neuron_looks import SYSFS
from tests.every import every
from tests.fakes.neuron import NeuronMachine

CHAIN = [SysfsDevice(n, f"00a{n}", "Inferentia2", 2, tuple(m for m in (n - 1, n + 1) if 0 <= m < 6)) for n in range(6)]


@pytest.fixture
def share(tmp_path: Path) -> NeuronMachine:
    """A container with two of six devices: what it calls 0 and 1 are 5 and 0 of the host."""
    machine = NeuronMachine(tmp_path / "machine", "inf2.24xlarge", share=[0, 1])
    machine.fault("renumbered")
    return machine


def set_minors(machine: NeuronMachine, *minors: int) -> None:
    said = json.loads(machine.host.read("/host.json"))
    said["minors"] = {f"/dev/neuron{index}": minor for index, minor in enumerate(minors)}
    machine.remove("/host.json")
    machine.write("/host.json", json.dumps(said))
    machine.host = Host(machine.root)


def count(machine: NeuronMachine, host_index: int) -> None:
    """One uncorrectable error of a device of the host."""
    leaf = f"{SYSFS}/neuron{host_index}/stats/hardware/mem_ecc_uncorrected"
    machine.remove(leaf)
    machine.write(leaf, "1\n")


def look(machine: NeuronMachine) -> tuple[dict[str, Any], list[Finding]]:
    found = neuron.find(machine.host, {})
    return found, machine.findings(neuron_counters, inventory=found)


def indices(found: dict[str, Any]) -> list[int | None]:
    return [device["host_index"] for device in found["devices"]]


def test_errors_of_another_tenant_are_not_ours_and_our_own_are(share: NeuronMachine) -> None:
    count(share, 1)  # the host's device of the number that our second has
    found, findings = look(share)
    assert indices(found) == [5, 0]
    assert [item.status for item in findings] == [Status.PASS]
    count(share, 5)
    _, (finding,) = look(share)
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "EccErrors", "neuron:0")
    assert finding.action is Action.REPLACE


def test_serial_numbers_are_those_of_the_hosts_devices(share: NeuronMachine) -> None:
    serials = [device["serial"] for device in share.state["devices"]]
    assert [device["serial"] for device in look(share)[0]["devices"]] == [serials[5], serials[0]]


def test_without_minor_numbers_and_neighbours_it_is_unknown_and_nothing_is_read(share: NeuronMachine) -> None:
    share.fault("null_members", None, "connected_to")
    count(share, 1)
    found, (finding,) = look(share)
    assert indices(found) == [None, None]
    assert [device["serial"] for device in found["devices"]] == [None, None]
    assert (finding.status, finding.reason, finding.target) == (Status.UNKNOWN, "NoData", "node")
    assert "this container cannot determine" in finding.message


def test_minor_numbers_of_the_device_files_tell_whatever_neighbours_say(share: NeuronMachine) -> None:
    share.fault("null_members", None, "connected_to")
    set_minors(share, 3, 2)
    count(share, 3)
    found, (finding,) = look(share)
    assert indices(found) == [3, 2]
    assert (finding.status, finding.target) == (Status.FAIL, "neuron:0")


def test_outside_of_a_container_numbers_are_the_hosts(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "inf2.24xlarge")
    machine.fault("null_members", None, "connected_to")
    assert indices(neuron.find(machine.host, {})) == list(range(6))


@every(
    ("links", "expected"),
    [
        ({0: (4,), 1: (1,)}, {0: 5, 1: 0}),
        ({0: (1, 3)}, {0: 2}),
        ({0: (7, 9)}, {0: None}),
        ({0: None, 1: ()}, {0: None, 1: None}),
        (dict.fromkeys(range(6)), {n: n for n in range(6)}),
        ({n: CHAIN[n].connected_to for n in range(6)}, {n: n for n in range(6)}),
    ],
)
def test_only_neighbours_that_one_device_alone_has_tell_which_it_is(
    links: dict[int, tuple[int, ...] | None], expected: dict[int, int | None]
) -> None:
    assert match_neighbours(links, CHAIN) == expected


def test_neighbours_that_several_devices_have_do_not_tell() -> None:
    ring = [SysfsDevice(n, None, None, None, ((n - 1) % 4, (n + 1) % 4)) for n in range(4)]
    assert match_neighbours({0: (1, 3)}, ring) == {0: None}
    assert match_neighbours({0: (1, 3)}, None) == {0: None}


def test_minor_number_is_of_a_character_device_alone_and_is_recorded(share: NeuronMachine, tmp_path: Path) -> None:
    assert Host().device_minor("/dev/null") == 3
    assert Host().device_minor("/etc/passwd") is None
    assert Host().device_minor("/dev/no-such") is None
    assert share.host.device_minor("/dev/neuron0") is None
    set_minors(share, 5, 0)
    record(share.host, tmp_path / "recorded", tools=False)
    again = Host(tmp_path / "recorded")
    assert [again.device_minor(f"/dev/neuron{index}") for index in (0, 1, 2)] == [5, 0, None]
