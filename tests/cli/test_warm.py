"""Compilation ahead: who waits, who is told that it is cold, what `healthd warm` says; words of a device's runtime."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from checks.contract import Finding, Status, Tier, worst
from healthd.cli import healthd
from healthd.cli.warm import why_cold
from healthd.core.model import CheckResult
from tests.aggregator.parts import state
from tests.cli.cli_kit import healthd as command
from tests.every import every
from tests.fakes.hollow_torch import make_python
from tests.runner.runner_kit import make_runner, run_checks, tracer

XLA = Path(os.environ.get("HEALTHD_XLA_PYTHON") or Path(__file__).parents[2] / ".venv-xla" / "bin" / "python")
needs_xla = pytest.mark.skipif(not XLA.exists(), reason=f"no interpreter with torch_xla at {XLA}: run make test-xla")

SPEAKING = '''
"""Device checks that end as their parameter says, with words on standard error as a device's runtime has them."""
import os, sys
from collections.abc import Iterator
from dataclasses import dataclass
from checks.contract import Context, Finding, check

@dataclass(frozen=True)
class Params:
    words: str = ""
    ends: str = "raise"

@check(tier="quick", interval_seconds=60, timeout_seconds=5, scope="device")
def speaks(ctx: Context[Params]) -> Iterator[Finding]:
    """Says something and ends badly."""
    print(ctx.params.words, file=sys.stderr, flush=True)
    if ctx.params.ends == "die":
        os._exit(1)
    raise RuntimeError("it failed")
    yield
'''


Speak = Callable[[str, str], CheckResult]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Speak:
    """What a device check that says these words and ends like this results in."""
    folder = tmp_path_factory.mktemp("speaking")
    (folder / "speaking.py").write_text(SPEAKING)
    python = make_python(tmp_path_factory.mktemp("python") / "venv")

    def speak(words: str, ends: str) -> CheckResult:
        return run_checks(
            "speaks",
            tier=Tier.QUICK,
            directories=(folder,),
            options={"cpu_devices": 1},
            params={"speaks": {"words": words, "ends": ends}},
            probe_python=python,
            retries=0,
        )["speaks"]

    return speak


@pytest.mark.parametrize("ends", ["raise", "die"])
def test_core_that_another_process_has_is_busy_never_a_failure(spoken: Speak, ends: str) -> None:
    result = spoken("NeuronCore(s) not available - Requested:nc1-nc1 Available:0", ends)
    assert (result.status, result.findings[0].reason) == (Status.SKIP, "Busy")


@pytest.mark.parametrize("ends", ["raise", "die"])
def test_hardware_error_fails_with_the_documented_action(spoken: Speak, ends: str) -> None:
    words = "(FATAL-RT) Uncorrectable HBM memory error is detected. Please reload the neuron driver or reboot your host"
    result = spoken(words, ends)
    (finding,) = result.findings
    assert (finding.status, finding.reason, finding.target) == (Status.FAIL, "DeviceLost", "cpu:0")
    assert finding.action is not None
    assert finding.action.value == "reboot"
    assert "Uncorrectable HBM memory error" in finding.message


def test_failure_without_such_words_stays_unknown(spoken: Speak) -> None:
    assert spoken("something else", "raise").findings[0].reason == "CheckError"
    assert spoken("something else", "die").findings[0].reason == "Crashed"


# --- the command ------------------------------------------------------------------------------------------------------


def invoke(*arguments: str, folder: Path) -> Any:
    places = ["--state-dir", str(folder / "state"), "--run-dir", str(folder / "run")]
    return CliRunner().invoke(healthd, [*arguments, *places], standalone_mode=False)


def test_accelerator_that_does_not_compile_has_nothing_to_warm(tmp_path: Path) -> None:
    result = invoke("warm", folder=tmp_path)
    assert result.return_value == 0, result.output
    assert result.output == "nothing to compile: accelerator cpu does not compile\n"
    found = json.loads(invoke("warm", "--json", folder=tmp_path).output)
    assert found == {"warm": True, "accelerator": "cpu", "compiles": False, "seconds": 0.0, "checks": {}, "cold": {}}


@pytest.mark.parametrize("ends", ["raise", "die"])
def test_device_that_was_lost_before_it_compiled_leaves_nothing_warm(spoken: Speak, ends: str) -> None:
    words = "(FATAL-RT) Uncorrectable HBM memory error is detected. Please reload the neuron driver or reboot your host"
    result = spoken(words, ends)
    why = why_cold(result)
    assert why is not None
    assert why.startswith("not compiled: DeviceLost: ")


def finding(status: Status, reason: str | None) -> Finding:
    return Finding(status=status, reason=reason, message="m", target="cpu:0")


@every(
    ("findings", "error", "why"),
    [
        ((finding(Status.FAIL, "WrongResult"),), None, None),  # it ran, and found something
        ((finding(Status.FAIL, "WrongResult"), finding(Status.UNKNOWN, "Timeout")), "e", "not compiled: Timeout: m"),
        ((finding(Status.UNKNOWN, "NoData"), finding(Status.UNKNOWN, "Timeout")), "e", "not compiled: Timeout: m"),
        ((finding(Status.SKIP, "NotApplicable"),), None, None),
        ((finding(Status.SKIP, "Busy"),), "e", "not compiled: Busy: m"),
        ((finding(Status.PASS, None), finding(Status.SKIP, "NotApplicable")), None, None),
    ],
)
def test_warm_is_what_ran_to_its_end_on_every_device(
    findings: tuple[Finding, ...], error: str | None, why: str | None
) -> None:
    status = worst(one.status for one in findings)
    result = dataclasses.replace(state("n1").results[0], status=status, findings=findings, error=error)
    assert why_cold(result) == why


def test_tier_that_compiles_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    result = invoke("warm", "--tier", "passive", folder=tmp_path)
    assert result.exception is not None
    assert "--tier 'passive': choose one of: quick, deep, soak" in str(result.exception)


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_placeholder_packages_are_explained_with_where_the_real_ones_are(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    info = packages / "torch_neuronx-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 0.0.1\n")
    (info / "RECORD").write_text("torch_neuronx/__init__.py,,\n")
    python = str(tmp_path / "venv" / "bin" / "python")
    environment = {"HEALTHD_PROBE_PYTHON": python, "HEALTHD_PROBE_COMPILE_CACHE": str(tmp_path / "cache")}
    places = ["--state-dir", str(tmp_path), "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(healthd, ["doctor", "--json", *places], standalone_mode=False, env=environment)
    items = {item["name"]: item for item in json.loads(result.output)}
    found = items["Neuron packages"]
    assert found["state"] == "missing"
    assert "torch-neuronx 0.0.1: empty placeholders" in found["text"]
    assert "AWS's Neuron package repository, see the Neuron setup guide" in found["remedy"]
    assert "compile cache" not in items  # nothing has been compiled


# An interpreter that the kernel holds, as far as its parent can tell: traced by one who never waits, it stays a corpse.
WEDGED = """#!{python}
import os, time
place = "{folder}/" + str(os.getpid())
open(place, "w").close()
while not os.path.exists(place + ".seized"):
    time.sleep(0.01)
time.sleep(600)
"""


def test_interpreter_that_cannot_be_killed_is_told_and_not_waited_for(tmp_path: Path) -> None:
    python, folder = tmp_path / "python", tmp_path / "traced"
    folder.mkdir()
    python.write_text(WEDGED.format(python=sys.executable, folder=folder))
    python.chmod(0o755)
    environment = {"HEALTHD_PROBE_PYTHON": str(python), "HEALTHD_PROBE_START": "1s"}
    with tracer(folder):  # it would wait for as long as the tracer is there
        said = command(tmp_path, "doctor", "--json", env=environment, timeout=20)
    assert said.code == 1
    (item,) = [item for item in said.json if item["name"] == "probe interpreter"]
    assert item["text"] == f"{python} did not respond within 1 s and cannot be killed: the kernel holds it"
    assert "reboot" in item["remedy"]


# --- on real XLA ------------------------------------------------------------------------------------------------------


def on_xla(cache: Path, *names: str, **others: Any) -> Mapping[str, CheckResult]:
    return run_checks(
        *names,
        tier=others.pop("tier", Tier.QUICK),
        accelerator="xla",
        probe_python=XLA,
        directories=(),
        retries=0,
        compile_cache=cache,
        **others,
    )


@pytest.mark.xla
@needs_xla
class TestOnRealXla:
    def test_cold_quick_run_is_unknown_at_once_and_names_the_remedy(self, tmp_path: Path) -> None:
        started = time.monotonic()
        results = on_xla(tmp_path, "matmul", "all_reduce")
        assert time.monotonic() - started < 3  # importing torch_xla alone takes longer
        for result in results.values():
            assert {finding.reason for finding in result.findings} == {"ColdCache"}
            assert result.status is Status.UNKNOWN
            assert "run 'healthd warm' on this node" in result.findings[0].message
        assert list(tmp_path.iterdir()) == []

    def test_run_that_may_compile_does_and_the_next_finds_it_done(self, tmp_path: Path) -> None:
        first = on_xla(tmp_path, "matmul", "all_reduce", on_cold_cache="compile")
        assert {result.status for result in first.values()} == {Status.PASS}
        assert all(result.compile_seconds > 0 for result in first.values())
        second = on_xla(tmp_path, "matmul", "all_reduce")
        assert {result.status for result in second.values()} == {Status.PASS}
        third = on_xla(tmp_path, "matmul", params={"matmul": {"sizes": [64, 64]}})
        assert third["matmul"].findings[0].reason == "ColdCache"  # other shapes are other graphs

    def test_one_check_that_is_cold_keeps_no_other_from_running(self, tmp_path: Path) -> None:
        on_xla(tmp_path, "matmul", "digest", on_cold_cache="compile")
        results = on_xla(tmp_path, "matmul", "digest", params={"matmul": {"sizes": [64, 64]}})
        assert results["matmul"].findings[0].reason == "ColdCache"
        assert results["digest"].status is Status.PASS

    def test_compilation_that_takes_too_long_is_told_as_such(self, tmp_path: Path) -> None:
        result = on_xla(tmp_path, "matmul", on_cold_cache="compile", compile_timeout_seconds=0.01)["matmul"]
        assert {finding.reason for finding in result.findings} == {"CompileFailed"}
        assert "did not end within 0.01 s" in result.findings[0].message
        assert "compile_timeout" in result.findings[0].message

    def test_warm_makes_nodes_with_its_folder_ready(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HEALTHD_PROBE_ACCELERATOR", "xla")
        monkeypatch.setenv("HEALTHD_PROBE_PYTHON", str(XLA))
        monkeypatch.setenv("HEALTHD_NODE_CHECKS", "matmul,digest")
        result = invoke("warm", "--json", folder=tmp_path / "a")
        said = json.loads(result.output)
        assert (result.return_value, said["warm"], sorted(said["checks"])) == (
            0,
            True,
            ["digest (quick)", "matmul (quick)"],
        )
        assert sum(said["checks"].values()) > 0
        shutil.copytree(tmp_path / "a" / "state" / "compile-cache", tmp_path / "layer")  # as an image has it
        runner = make_runner(
            accelerator="xla",
            probe_python=XLA,
            directories=(),
            compile_cache=tmp_path / "layer",
            options={"compile_flags": None, "neuron_lnc": None},
        )
        assert run_checks("matmul", tier=Tier.QUICK, runner=runner)["matmul"].status is Status.PASS
