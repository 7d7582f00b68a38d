"""
Compilation in groups over several nodes: what is cold is told before torch is imported, and goes to no job's cache.

On a stand-in Neuron machine; unverified on hardware.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from checks.accelerators.neuron.environment import environment_of, xla_environment
from checks.compile_cache import ColdCacheError
from checks.discover import builtin_checks
from checks.worker.commands import Compiling
from healthd.core.model import CollectiveOrder, RankReport
from healthd.runner.collective.ranks import group_over_nodes
from healthd.runner.compilation import compile_over_nodes
from healthd.runner.settings import RunnerSettings
from healthd.runner.workers.workers import Unreaped, Workers
from tests import prepared
from tests.cli.cli_kit import environment
from tests.fakes.neuron import NeuronMachine
from tests.patience import PATIENCE
from tests.runner.ranks_kit import lost, nodes, orders
from tests.runner.runner_kit import make_runner, workers_left

TARGETS = ("neuroncore:0", "neuroncore:1")
INVENTORY: dict[str, Any] = {"accelerator": "neuron", "workers": list(TARGETS), "devices": []}


def order(**changes: Any) -> CollectiveOrder:
    first, _ = orders(2, 2, **changes)
    return first


class Rank:
    """What a worker of one core does with what the runner tells it of an order."""

    def __init__(self, folder: Path, wanted: CollectiveOrder, on_cold_cache: Any = "unknown") -> None:
        settings = RunnerSettings(compile_cache=folder, on_cold_cache=on_cold_cache)
        workers = Workers(settings, Unreaped(), {}, None)
        workers.inventory = INVENTORY
        workers.compile = compile_over_nodes(wanted, [builtin_checks()["all_reduce"]], workers)
        workers.group = group_over_nodes(wanted, TARGETS)
        self.setup = workers.setup(TARGETS[0])
        self.compiling = Compiling(self.setup["compile"], self.setup)

    def environment(self, environ: dict[str, str]) -> dict[str, str | None]:
        """Of a worker that goes by PyTorch/XLA."""
        options = {**self.setup["options"], **self.compiling.options()}
        return {**environment_of(TARGETS[0], INVENTORY, options, environ), **xla_environment(options)}


def test_cold_ranks_of_a_real_session_say_so_at_once_and_name_a_remedy_that_helps(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    runner = make_runner(
        accelerator="auto", host_root=machine.root, directories=(), compile_cache=tmp_path / "cache", retries=0
    )
    heard: list[tuple[RankReport, ...]] = []

    async def main() -> tuple[RankReport, ...]:
        session = runner.session()
        try:
            await session.open()
            return await session.join(order(), heard.append, interface="lo", deadline_seconds=30 * PATIENCE)
        finally:
            await session.close()

    reports = asyncio.run(main())
    assert lost(reports) == {0: "ColdCache", 1: "ColdCache"}
    assert "all_reduce of 4 ranks" in reports[0].message
    assert "nccom-test" in reports[0].message
    assert "run 'healthd warm'" not in reports[0].message, "it compiles for the node's own ranks alone"
    assert not (tmp_path / "cache").exists()
    assert workers_left() == []


@pytest.mark.parametrize(
    ("on_cold_cache", "compile_seconds", "compiles"),
    [("unknown", 0.0, False), ("unknown", 60.0, False), ("compile", 0.0, False), ("compile", 60.0, True)],
)
def test_ranks_compile_only_where_their_node_and_the_order_allow_the_time(
    tmp_path: Path, on_cold_cache: str, compile_seconds: float, compiles: bool
) -> None:
    rank = Rank(tmp_path, order(compile_seconds=compile_seconds), on_cold_cache)
    if compiles:
        assert len(rank.compiling.cold()) == 1
    else:
        with pytest.raises(ColdCacheError, match="of 4 ranks"):
            rank.compiling.cold()


def test_what_a_group_compiled_serves_groups_of_its_size_alone(tmp_path: Path) -> None:
    first = Rank(tmp_path, order(compile_seconds=60.0), "compile")
    assert first.compiling.cold()
    first.compiling.ended("all_reduce", 42.0)
    assert Rank(tmp_path, order()).compiling.cold() == []
    with pytest.raises(ColdCacheError, match="of 6 ranks"):
        Rank(tmp_path, dataclasses.replace(order(), size=6)).compiling.cold()


@pytest.mark.parametrize("on_cold_cache", ["unknown", "compile"])
def test_compiled_programs_of_a_group_never_go_to_the_jobs_cache(tmp_path: Path, on_cold_cache: str) -> None:
    jobs = {"NEURON_COMPILE_CACHE_URL": "s3://job/cache", "TORCH_NEURONX_NEFF_CACHE_DIR": "/job/neff"}
    said = Rank(tmp_path, order(compile_seconds=60.0), on_cold_cache).environment(jobs)
    assert (said["NEURON_COMPILE_CACHE_URL"] or "").startswith(str(tmp_path))
    assert (said["TORCH_NEURONX_NEFF_CACHE_DIR"] or "").startswith(str(tmp_path))
    assert f"--cache_dir={tmp_path}" in (said["NEURON_CC_FLAGS"] or "")


def test_without_a_cache_of_ours_the_jobs_is_not_used_either() -> None:
    jobs = {"NEURON_COMPILE_CACHE_URL": "s3://job", "TORCH_NEURONX_NEFF_CACHE_DIR": "/j", "TORCH_NEURONX_NEFF_X": "1"}
    said = environment_of(TARGETS[0], INVENTORY, {}, jobs)
    assert {name: said[name] for name in jobs} == dict.fromkeys(jobs)


async def test_ranks_wait_for_others_that_compile_and_no_longer(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1, 1, faults=["all_reduce@rank:1=hang"]) as two:
        began = time.monotonic()
        reports = await two.join(orders(1, 1, join_seconds=10 * PATIENCE, timeout_seconds=0.25, compile_seconds=1.5))
        assert time.monotonic() - began >= 1.75
        assert set(lost(reports)) == {0, 1}
        assert any("did not end within 1.75 s" in report.message for report in reports)
        assert not any(report.cold for report in reports), "processors compile nothing"


def test_settings_say_how_long_a_run_may_take_longer() -> None:
    compiles = RunnerSettings(compile_cache=Path("/c"), on_cold_cache="compile", compile_timeout_seconds=700.0)
    assert [compiles.compile_allowance_seconds(name) for name in ("neuron", "xla", "cpu", None)] == [700, 700, 0, 0]
    assert RunnerSettings(compile_cache=Path("/c")).compile_allowance_seconds("neuron") == 0
    assert RunnerSettings(on_cold_cache="compile").compile_allowance_seconds("neuron") == 0


def test_daemon_of_a_node_that_compiles_says_so_where_the_aggregator_reads_it(tmp_path: Path) -> None:
    machine = NeuronMachine(tmp_path / "machine", "trn1.2xlarge")
    said = {
        "HEALTHD_NODE_CHECKS": "device_count",
        "HEALTHD_NODE_LISTEN": "127.0.0.1:0",
        "HEALTHD_PROBE_ON_COLD_CACHE": "compile",
        "HEALTHD_PROBE_COMPILE_TIMEOUT": "11m",
    }
    log = tmp_path / "log"
    command = [sys.executable, "-m", "healthd", "node", "--host-root", str(machine.root)]
    with log.open("wb") as file:
        process = prepared.Popen(command, stdout=file, stderr=file, env=environment(tmp_path, **said))
    try:
        deadline = time.monotonic() + 20 * PATIENCE
        node: dict[str, Any] = {}
        while not node.get("inventory"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
            if found := re.findall(r"answers on (http://\S+)", log.read_text()):
                node = httpx.get(f"{found[-1]}/v1/node", trust_env=False, verify=False, timeout=5 * PATIENCE).json()
        assert (node["inventory"]["accelerator"], node["compile_seconds"]) == ("neuron", 660)
    finally:
        process.terminate()
        process.wait(10 * PATIENCE)
