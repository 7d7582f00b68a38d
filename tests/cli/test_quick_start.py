"""A passive round of `healthd check` loads what it needs and nothing else, and its child starts before it is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import healthd.core.model
from checks.contract import Scope, Tier
from checks.discover import HOST_PACKAGES, builtin_checks
from healthd.cli.settings.options import load_check_settings
from healthd.cli.settings.tree import Settings
from healthd.core.errors import ConfigError
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan, RunnerSettings
from healthd.runner.workers import launch
from tests.cli.cli_kit import environment
from tests.node.node_kit import eventually
from tests.runner.runner_kit import servers_left, workers_left

LOADED = """
import sys
from healthd.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    sys.stderr.write(" ".join(sys.modules))
"""
AHEAD = """
import sys
from healthd import __main__ as front
from healthd.runner.workers.launch import start_ahead
from tests.runner.runner_kit import workers_left

def start(arguments):
    start_ahead(arguments)
    sys.stderr.write(f"started: {len(workers_left())}\\n")

front.start_ahead = start
try:
    front.main()
except SystemExit:
    sys.stderr.write(f"left: {len(workers_left())}\\n")
"""
HEAVY = {"rich", "httpx", "sqlalchemy", "fastapi", "starlette", "uvicorn", "torch", "grpc"}
OF_OTHERS = {
    "healthd.aggregator",
    "healthd.localize",
    "healthd.core.model.gates",
    "healthd.core.model.orders",
    "healthd.runner.collective.ranks",
}


def test_a_passive_round_loads_neither_frameworks_nor_what_others_need(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", LOADED, "check", "--tier", "passive", "--json", "--run-dir", str(tmp_path)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(said.stderr.split())
    assert '"device_count"' in said.stdout
    assert loaded & (HEAVY | OF_OTHERS) == set()
    assert "checks.collective.all_reduce" not in loaded


def test_every_passive_check_is_among_those_of_the_host() -> None:
    """The quick way of a passive round reads those alone; the others there need no device either."""
    passive = {name for name, check in builtin_checks().items() if check.tier is Tier.PASSIVE}
    others = set(builtin_checks(HOST_PACKAGES)) - passive
    assert passive <= set(builtin_checks(HOST_PACKAGES))
    assert others == {"checkpoint_store", "checkpoint_load", "data_store"}
    assert all(check.scope is Scope.NODE for check in builtin_checks(HOST_PACKAGES).values())


async def test_a_catalogue_of_the_passive_checks_grows_when_more_is_asked_for() -> None:
    runner = Runner(RunnerSettings())
    assert "matmul" not in await runner.catalogue(Tier.PASSIVE)
    assert {"matmul", "all_reduce", "clock"} <= (await runner.catalogue()).keys()
    assert "matmul" in await runner.catalogue(Tier.PASSIVE)


async def test_the_prestarted_worker_does_the_round(tmp_path: Path) -> None:
    runner = Runner(RunnerSettings(accelerator="cpu", run_dir=tmp_path))
    async with runner.prestarted():
        await eventually(lambda: len(workers_left()) == 1)  # its command line shows a moment after its start
        (result,) = await runner.run(Plan(tier=Tier.PASSIVE, checks=("memory_free",), executor="test"))
        assert result.error is None
        # The next run starts its own.
        (result,) = await runner.run(Plan(tier=Tier.PASSIVE, checks=("memory_free",), executor="test"))
        assert result.error is None
    assert workers_left() == []


async def test_a_prestarted_worker_that_is_not_used_is_ended() -> None:
    async with Runner(RunnerSettings(accelerator="cpu")).prestarted():
        await eventually(lambda: len(workers_left()) == 1)
    assert workers_left() == []


def variables_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def test_the_worker_that_was_started_ahead_of_the_settings_is_the_prestarted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEALTHD_PROBE_PYTHON", raising=False)
    launch.start_ahead(["--tier", "passive"])
    runner = Runner(RunnerSettings(accelerator="cpu", run_dir=tmp_path))
    async with runner.prestarted():
        await eventually(lambda: len(workers_left()) == 1)  # its command line shows a moment after its start
        ahead = workers_left()
        catalogue = await runner.catalogue(Tier.PASSIVE)
        assert catalogue == {name: check.info() for name, check in builtin_checks(HOST_PACKAGES).items()}
        assert workers_left() == ahead  # it has listed its checks, and no other was started
        (result,) = await runner.run(Plan(tier=Tier.PASSIVE, checks=("memory_free",), executor="test"))
        assert result.error is None
    assert workers_left() == []


async def test_a_worker_that_was_started_ahead_and_is_not_the_one_of_the_settings_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEALTHD_PROBE_PYTHON", raising=False)
    launch.start_ahead(["--tier", "passive"])
    runner = Runner(RunnerSettings(accelerator="cpu", run_dir=tmp_path, env={"PROBED": "1"}))
    async with runner.prestarted():
        await eventually(lambda: len(workers_left()) == 1)
        (worker,) = workers_left()
        assert "PROBED=1" in variables_of(int(worker.split()[0]))
    assert workers_left() == []


async def test_the_process_that_was_started_ahead_forks_the_workers_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEALTHD_PROBE_PYTHON", raising=False)
    launch.start_ahead([])
    await eventually(lambda: len(servers_left()) == 1, 60)
    ahead = servers_left()
    runner = Runner(RunnerSettings(run_dir=tmp_path, params={"matmul": {"sizes": [32, 32], "repeats": 1}}))
    async with runner.prestarted(devices=True):
        assert servers_left() == ahead
        (result,) = await runner.run(Plan(tier=Tier.QUICK, checks=("matmul",), executor="test"))
        assert result.error is None
    assert workers_left() == []


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        ("", True),
        ("--json --tier quick", True),
        ("--tier=deep --run-dir passive", True),
        ("--tier passive", False),
        ("--json --tier=passive", False),
        ("--json clock", False),
        ("--help", False),
    ],
)
def test_torch_is_imported_ahead_where_the_arguments_ask_for_devices(arguments: str, devices: bool) -> None:
    assert launch.ask_for_devices(arguments.split()) is devices


def test_a_check_starts_its_worker_ahead_and_leaves_none_when_it_does_not_come_to_run(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", AHEAD, "check", "--no-such-option"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = said.stderr.splitlines()
    assert (lines[0], lines[-1]) == ("started: 2", "left: 0"), "the worker of the node, and what forks those of devices"
    assert "no such option" in said.stderr.lower()


async def test_an_interpreter_that_is_not_there_is_told_by_the_run(tmp_path: Path) -> None:
    runner = Runner(RunnerSettings(probe_python=tmp_path / "python", retry_backoff_seconds=0.01))
    async with runner.prestarted():
        (result,) = await runner.run(Plan(tier=Tier.PASSIVE, checks=("memory_free",), executor="test"))
    assert [finding.reason for finding in result.findings] == ["StartFailed"]


def test_a_file_with_more_than_checks_need_is_judged_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("[node]\nname = 'n7'\n")
    alone = load_check_settings({"config": file})
    assert (alone.node.name, isinstance(alone, Settings)) == ("n7", False)
    file.write_text("[node]\nname = 'n7'\n[policy]\nwait = '5m'\n")
    whole = load_check_settings({"config": file})
    assert (whole.node.name, isinstance(whole, Settings)) == ("n7", True)
    file.write_text("[policy]\nwiat = '5m'\n")
    with pytest.raises(ConfigError, match=r"healthd.toml:2: unknown key 'policy.wiat'"):
        load_check_settings({"config": file})


def test_names_that_are_loaded_late_are_all_there() -> None:
    assert all(getattr(healthd.core.model, name) is not None for name in healthd.core.model.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Ordr'"):
        getattr(healthd.core.model, "Ordr")  # noqa: B009
