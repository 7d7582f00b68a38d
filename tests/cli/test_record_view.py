"""A recorded machine also says from where it was looked at: what a container could not see is unknown in its replay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from checks.accelerators import neuron
from checks.contract import Finding, Status
from checks.host.machine import Host
from checks.system.neuron.neuron_cores import neuron_cores
from healthd.cli.support.recording import record
from tests.fakes.neuron import NeuronMachine

CONTAINER = "pid:[4026532512]"


@pytest.fixture
def pod(tmp_path: Path) -> NeuronMachine:
    """A busy pod: neuron-ls names a process of the host that /proc of the container does not show."""
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    machine.fault("stuck_core", "neuron:0", "900")
    machine.remove("/proc/self/ns/pid")
    (machine.root / "proc/self/ns/pid").symlink_to(CONTAINER)
    return machine


def cores(machine: NeuronMachine, host: Host) -> list[Finding]:
    found: dict[str, Any] = neuron.find(host, {})
    replayed = copy.copy(machine)
    replayed.host = host
    return replayed.findings(neuron_cores, inventory={**found, "holders": neuron.holders(host, found, {})})


def test_busy_pod_does_not_replay_as_stuck_cores(tmp_path: Path, pod: NeuronMachine) -> None:
    record(pod.host, tmp_path / "recorded")
    again = Host(tmp_path / "recorded")
    assert again.pid_namespace() == CONTAINER
    assert [item.reason for item in cores(pod, again) if item.status is Status.FAIL] == []
    assert neuron.holders(again, neuron.find(again, {}), {}) == ["neuron:0: pid 900 (python3)"]


def test_recording_that_does_not_tell_its_namespace_leaves_holders_unknown(tmp_path: Path, pod: NeuronMachine) -> None:
    pod.remove("/proc/self/ns/pid")
    made = record(pod.host, tmp_path / "recorded")
    assert "unknown" in made.left_out["/proc/self/ns/pid"]
    again = Host(tmp_path / "recorded")
    assert [item.reason for item in cores(pod, again) if item.status is Status.FAIL] == []
    pod.state["processes"] = []
    pod.save()
    record(pod.host, tmp_path / "idle")
    idle = Host(tmp_path / "idle")
    assert neuron.holders(idle, neuron.find(idle, {}), {}) is None
