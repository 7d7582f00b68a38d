"""A stand-in Neuron machine through the runner, the command and the daemon."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.contract import Status, Tier
from checks.system.device_permissions import device_permissions
from checks.system.devices import device_count, device_holders
from checks.system.instance import instance_type
from checks.system.neuron.neuron_cores import neuron_cores
from checks.system.neuron.neuron_topology import neuron_topology
from healthd.cli.settings.checks import ProbeSettings
from healthd.cli.settings.tree import Settings
from healthd.node.settings import NodeSettings
from healthd.runner.workers.workers import worker_targets
from tests.cli.cli_kit import environment
from tests.fakes.neuron import NeuronMachine, main
from tests.patience import PATIENCE
from tests.runner.runner_kit import run_checks

CHECKS = (device_count, device_holders, device_permissions, instance_type, neuron_cores, neuron_topology)
OURS = tuple(check.name for check in CHECKS)


@pytest.fixture
def trn1(tmp_path: Path) -> NeuronMachine:
    return NeuronMachine(tmp_path / "machine", "trn1.32xlarge")


def test_each_core_gets_a_worker_and_becomes_a_rank() -> None:
    inventory = {"devices": [{"target": "neuron:0"}], "workers": ["neuroncore:0", "neuroncore:1"]}
    assert worker_targets(inventory) == ["neuroncore:0", "neuroncore:1"]
    assert worker_targets({**inventory, "workers": []}) == []
    assert worker_targets({"devices": [{"target": "cpu:0"}]}) == ["cpu:0"]
    assert worker_targets({}) == []


def test_devices_whose_cores_are_not_known_are_not_probed_and_not_called_missing(trn1: NeuronMachine) -> None:
    trn1.fault("null_members", None, "nc_count")
    results = run_checks("matmul", tier=Tier.QUICK, accelerator="auto", host_root=trn1.root, directories=())
    (finding,) = results["matmul"].findings
    assert (finding.status, finding.reason, finding.target) == (Status.UNKNOWN, "NoData", "node")


@pytest.fixture
def daemon(trn1: NeuronMachine, tmp_path: Path) -> Iterator[str]:
    """The address of a daemon on a stand-in with a lost core and a stuck owner."""
    trn1.fault("missing_core", "neuron:7")
    trn1.fault("stuck_core", "neuron:3")
    log = tmp_path / "log"
    extra = {f"HEALTHD_NODE_{key}": value for key, value in (("CHECKS", ",".join(OURS)), ("LISTEN", "127.0.0.1:0"))}
    arguments = ["node", "--host-root", str(trn1.root)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "healthd", *arguments], stderr=file, stdout=file, env=environment(tmp_path, **extra)
        )
    try:
        deadline = time.monotonic() + 20 * PATIENCE
        while not (found := re.findall(r"answers on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[-1]
    finally:
        process.terminate()
        process.wait(10 * PATIENCE)


def test_daemon_shows_the_faults_in_health_and_metrics(daemon: str) -> None:
    wanted = {("neuron_cores", "neuron:3", "StuckCores"), ("neuron_cores", "neuron:7", "MissingDevice")}

    async def ask() -> tuple[Any, str]:
        async with httpx.AsyncClient(base_url=daemon, trust_env=False, verify=False) as http:
            for _ in range(600):
                health = (await http.get("/health?verbose")).json()
                if {check for check in health["checks"] if check.partition(":")[0] == "neuron_topology"}:
                    seen = {(r["check"], r["target"], r["code"]) for r in health["reasons"] if r["code"] != "NotYetRun"}
                    if seen == wanted and not [r for r in health["reasons"] if r["code"] == "NotYetRun"]:
                        return health, (await http.get("/metrics")).text
                await asyncio.sleep(0.1)
            raise AssertionError(json.dumps(health))

    health, metrics = asyncio.run(ask())
    assert (health["status"], health["health"]) == ("fail", "unhealthy")
    for check, target, reason in wanted:
        line = (
            f'healthd_finding{{check="{check}",injected="false",reason="{reason}",status="fail",target="{target}"}} 1.0'
        )
        assert line in metrics
    assert 'accelerator="neuron"' in metrics
    assert "healthd_node_allocated 0.0" in metrics  # nobody's job: the owner is gone


def test_configured_type_reaches_every_check_that_needs_it(tmp_path: Path) -> None:
    settings = Settings(
        node=NodeSettings(name="n1", state_dir=tmp_path, run_dir=tmp_path),
        probe=ProbeSettings(instance_type="trn1.2xlarge"),
    )
    params = settings.runner().params
    assert {name for name in OURS if params.get(name, {}).get("type") == "trn1.2xlarge"} == {
        "device_count",
        "instance_type",
        "neuron_cores",
        "neuron_topology",
    }


def test_checks_after_one_that_hung_still_see_the_devices(trn1: NeuronMachine) -> None:
    """The child of the node is started anew, and the survey is not made again."""
    results = run_checks("hangs", "neuron_cores", accelerator="auto", host_root=trn1.root)
    assert results["hangs"].status is Status.UNKNOWN
    assert results["neuron_cores"].status is Status.PASS


def test_what_is_in_a_directory_survives_a_slip_in_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    for words in (["trn9"], ["trn1.2xlarge"], ["trn1.2xlarge", "--fault", "nonsense"], []):
        assert main([str(tmp_path), *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert (tmp_path / "precious").exists()
    assert main([str(tmp_path / "new"), "trn1.2xlarge", "--fault", "nonsense"]) == 2
    assert not (tmp_path / "new").exists()
