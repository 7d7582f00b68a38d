"""A profile of one compiled program by neuron-profile's stand-in: its sentence, its bounds, and what goes wrong."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checks.host.machine import Host, HostError
from checks.profiling.neuron import ProfileError, capture
from checks.profiling.operations import MAX_EVENTS
from tests.fakes.neuron import NeuronMachine
from tests.node.node_daemon_kit import until

SAID = "in one more run, most time was spent in dot 75 %, add 20 %, SEMAPHORE 5 %"


@pytest.fixture
def trn1(tmp_path: Path) -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", "trn1.32xlarge")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "model.neff"
    path.write_bytes(b"a program")
    return str(path)


def spoil(machine: NeuronMachine, kind: str) -> None:
    machine.state["faults"].append({"kind": kind, "target": "neuron-profile", "value": None})
    machine.save()


def test_a_program_is_captured_on_its_core_and_the_operations_are_said(trn1: NeuronMachine, program: str) -> None:
    found = capture(Host(trn1.root), program, "neuroncore:5", "train_step")
    assert (found.target, found.said) == ("neuroncore:5", SAID)
    assert found.id.startswith("train_step-neuroncore-5-")
    held = json.loads(gzip.decompress(found.content))
    assert held["otherData"]["program"] == program
    assert [(event["name"], event["tid"]) for event in held["traceEvents"]] == [
        ("dot", "TensorMatrix"),
        ("add", "Vector"),
        ("dot", "TensorMatrix"),
        ("SEMAPHORE", "Sync"),
    ]


def test_a_program_that_is_gone_a_target_that_is_no_core_and_nonsense_are_one_line(
    trn1: NeuronMachine, program: str, tmp_path: Path
) -> None:
    host = Host(trn1.root)
    with pytest.raises(ProfileError, match=r"neuron-profile capture ended with code 1: .*cannot read"):
        capture(host, str(tmp_path / "none.neff"), "neuroncore:5", "matmul")
    with pytest.raises(ProfileError, match="neuron:x is not a core"):
        capture(host, program, "neuron:x", "matmul")
    spoil(trn1, "half_json")
    with pytest.raises(ProfileError, match="its output is not understood"):
        capture(host, program, "neuroncore:5", "matmul")


def test_a_tool_that_is_not_installed_or_hangs_is_an_error_of_the_host(
    trn1: NeuronMachine, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(trn1, "hang")
    monkeypatch.setattr("checks.profiling.neuron.CAPTURE_SECONDS", 0.5)
    with pytest.raises(HostError) as late:
        capture(Host(trn1.root), program, "neuroncore:5", "matmul")
    assert late.value.reason == "Timeout"
    (trn1.root / "bin/neuron-profile").unlink()
    with pytest.raises(HostError) as missing:
        capture(Host(trn1.root), program, "neuroncore:5", "matmul")
    assert missing.value.reason == "MissingTool"


def test_all_instructions_count_and_those_without_a_time_do_not(trn1: NeuronMachine, program: str) -> None:
    spoil(trn1, "long")
    found = capture(Host(trn1.root), program, "neuroncore:5", "matmul")
    assert found.said == "in one more run, most time was spent in LATE 100 %"
    assert json.loads(gzip.decompress(found.content))["otherData"]["events_left_out"] == 100_001 - MAX_EVENTS


@pytest.mark.parametrize(("kind", "why"), [("huge", "is not understood: OverflowError"), ("large", "ended with code")])
def test_a_number_or_a_file_that_is_too_large_is_one_line(
    trn1: NeuronMachine, program: str, kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(trn1, kind)
    monkeypatch.setattr("checks.profiling.neuron._MAX_FILE_BYTES", 1 << 19, raising=False)
    with pytest.raises(ProfileError, match=why):
        capture(Host(trn1.root), program, "neuroncore:5", "matmul")


def test_a_worker_that_is_killed_leaves_no_folder(trn1: NeuronMachine, program: str, tmp_path: Path) -> None:
    spoil(trn1, "hang")
    place = tmp_path / "tmp"
    place.mkdir()
    words = "from checks.host.machine import Host; from checks.profiling.neuron import capture; "
    words += f"from pathlib import Path; capture(Host(Path({str(trn1.root)!r})), {program!r}, 'neuroncore:5', 'matmul')"
    killed = subprocess.Popen([sys.executable, "-c", words], env={**os.environ, "TMPDIR": str(place)})
    try:
        until(lambda: any(place.iterdir()) and _works_in(next(place.iterdir())))
    finally:
        killed.kill()
        killed.wait()
    until(lambda: not any(place.iterdir()))


def _works_in(folder: Path) -> bool:
    """Whether a process has this working directory."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(folder):
                return True
    return False
