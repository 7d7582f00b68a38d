"""`healthd slurm doctor`: what would keep the hooks from running, found before enforce mode sends jobs back for it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.integrations.slurm.doctor import CONTROLLER_HOOKS, LEAST_SECONDS, NODE_HOOKS, judge
from healthd.integrations.slurm.scontrol import Scontrol, SlurmError
from tests.aggregator.service import free_port
from tests.cli.cli_kit import Said
from tests.hooks.hook_answers_kit import serving
from tests.hooks.inside import daemon_port, run_inside
from tests.hooks.local_verdict_kit import fit
from tests.integrations.slurm.slurm_kit import HOOKS, SlurmCluster, until

# As slurm-wlm 22.05.8 prints it, shortened.
CONFIG = """\
Configuration data as of 2026-11-21T13:54:49
AccountingStorageHost   = localhost
ClusterName             = t
EpilogSlurmctld         = {hooks}/epilog-slurmctld.sh
HealthCheckNodeState    = ANY
HealthCheckProgram      = {hooks}/health-check.sh
Prolog                  = {hooks}/prolog.sh
PrologFlags             = Alloc,Contain,DeferBatch
PrologSlurmctld         = {hooks}/prolog-slurmctld.sh
SchedulerParameters     = nohold_on_prolog_fail
SlurmUser               = root(0)

Slurmctld(primary) at localhost is UP
"""
REFUSED = json.dumps({"title": "NotFound", "status": 404, "detail": "no gate"}).encode()


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    """Scripts where slurm.conf names them."""
    folder = tmp_path / "hooks"
    folder.mkdir()
    for name in ("prolog-slurmctld.sh", "epilog-slurmctld.sh", "prolog.sh", "health-check.sh", "hooks.conf"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def config(tmp_path: Path, hooks: Path) -> Iterator[Path]:
    """What the controller's scontrol says of slurm.conf, and of node n1; a program of that name in PATH."""
    text = tmp_path / "config"
    text.write_text(CONFIG.format(hooks=hooks))
    tools = tmp_path / "tools"
    tools.mkdir()
    node = "NodeName=n1 Arch=x86_64\\n   State=IDLE ThreadsPerCore=1\\n"
    (tools / "scontrol").write_text(f'#!/bin/sh\ncase $* in *node*) printf "{node}" ;; *) cat {text} ;; esac\n')
    (tools / "scontrol").chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tools}:{before}"
    yield text
    os.environ["PATH"] = before


def found(said: Said) -> dict[str, tuple[str, str]]:
    return {item["name"]: (item["state"], item["text"]) for item in said.json}


def on_controller(*more: str, status: int = 404) -> Said:
    with serving({"/lease": (status, "application/problem+json", REFUSED)}) as aggregator:
        return run_inside("slurm", "doctor", "--aggregator", aggregator.url, "--json", *more)


def test_controller_on_which_all_is_right_has_nothing_missing(config: Path) -> None:
    said = on_controller()
    assert (said.code, {state for state, _ in found(said).values()} - {"note"}) == (0, {"ok"}), said.out


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("Alloc,Contain,DeferBatch", "Alloc", "PrologFlags"),
        ("nohold_on_prolog_fail", "(null)", "SchedulerParameters"),
        ("= ANY", "= IDLE", "HealthCheckNodeState"),
        ("/prolog-slurmctld.sh", "/not-there.sh", "PrologSlurmctld"),
    ],
)
def test_what_slurm_conf_lacks_is_named(config: Path, old: str, new: str, key: str) -> None:
    config.write_text(config.read_text().replace(old, new))
    said = on_controller()
    assert said.code == 1
    assert [name for name, (state, _) in found(said).items() if state == "missing"] == [key], said.out


def test_hook_that_cannot_be_run_or_that_everybody_may_change_is_named(config: Path, hooks: Path) -> None:
    (hooks / "prolog-slurmctld.sh").chmod(0o644)
    (hooks / "hooks.conf").chmod(0o666)
    items = found(on_controller())
    assert "cannot run it" in items["PrologSlurmctld"][1]
    assert "everyone can write" in items["EpilogSlurmctld"][1]


def test_aggregator_that_is_away_or_does_not_want_the_token_is_missing(config: Path) -> None:
    assert found(on_controller(status=403))["aggregator"][0] == "missing"
    away = run_inside("slurm", "doctor", "--aggregator", f"http://127.0.0.1:{free_port()}", "--json")
    assert (away.code, "cannot be reached" in found(away)["aggregator"][1]) == (1, True)


def test_node_needs_its_daemon_and_its_name(config: Path, tmp_path: Path) -> None:
    with daemon_port(fit(tmp_path)) as url:
        assert run_inside("slurm", "doctor", "--node", "n1", "--local-url", url, "--json").code == 0
        unknown = run_inside("slurm", "doctor", "--node", "n9", "--local-url", url, "--json")
    silent = run_inside("slurm", "doctor", "--node", "n1", "--local-url", f"http://127.0.0.1:{free_port()}", "--json")
    assert (unknown.code, found(unknown)["node"][0]) == (1, "missing")
    assert (silent.code, found(silent)["daemon"][0]) == (1, "missing")


def test_without_scontrol_it_says_so_and_looks_at_the_rest(tmp_path: Path) -> None:
    before = os.environ["PATH"]
    os.environ["PATH"] = str(tmp_path)
    try:
        items = found(on_controller())
    finally:
        os.environ["PATH"] = before
    assert items["scontrol"][0] == "missing"
    assert items["aggregator"][0] == "ok"


def test_people_are_told_the_remedy(config: Path) -> None:
    config.write_text(config.read_text().replace("= ANY", "= IDLE"))
    with serving({"/lease": (404, "application/problem+json", REFUSED)}) as aggregator:
        said = run_inside("slurm", "doctor", "--aggregator", aggregator.url)
    assert "HealthCheckNodeState" in said.out
    assert "lacks ANY: drained nodes are never resumed" in said.out
    assert "1 missing" in said.out


def test_hooks_that_slurm_conf_does_not_name_are_a_note(config: Path) -> None:
    items = list(judge({"PrologFlags": "Alloc"}, (*CONTROLLER_HOOKS, *NODE_HOOKS)))
    assert {item.name for item in items if item.state == "note"} == {*CONTROLLER_HOOKS, *NODE_HOOKS}
    assert Scontrol().settings()["SlurmUser"] == "root(0)"


def test_slurm_that_ends_the_gates_hook_before_its_wait_is_noted(config: Path, tmp_path: Path) -> None:
    for seconds, noted in (("60 sec", True), ("900 sec", False), ("65534", False)):
        config.write_text(f"PrologEpilogTimeout     = {seconds}\n{CONFIG.format(hooks=tmp_path / 'hooks')}")
        said = on_controller()
        assert (said.code, "PrologEpilogTimeout" in found(said)) == (0, noted), said.out
    assert "PrologEpilogTimeout" not in {item.name for item in judge({"PrologEpilogTimeout": "60"}, NODE_HOOKS)}


def test_our_own_fragment_gives_the_gate_the_time_that_its_hook_takes() -> None:
    """PrologEpilogTimeout bounds PrologSlurmctld too: slurm.conf(5)."""
    timeout = re.search(r"^PrologEpilogTimeout=(\d+)$", (HOOKS / "healthd-slurm.conf").read_text(), re.MULTILINE)
    wait = re.search(r"^gate_wait=(\d+)m ", (HOOKS / "prolog-slurmctld.sh").read_text(), re.MULTILINE)
    assert timeout is not None
    assert wait is not None
    assert int(timeout[1]) > LEAST_SECONDS == 60 * int(wait[1])


@pytest.mark.system("slurmd", "slurmctld", "sbatch", "sinfo", "scontrol", root=True)
def test_in_a_real_slurm_our_own_fragment_lacks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    cluster = SlurmCluster(folder, {"n1": "http://127.0.0.1:1"}, "http://127.0.0.1:1")
    os.environ["SLURM_CONF"] = str(cluster.config)
    try:
        until(lambda: answers(cluster), 20, cluster.log)
        items = found(on_controller())
        (folder / "healthd/prolog-slurmctld.sh").chmod(0o644)
        after = found(on_controller())
    finally:
        del os.environ["SLURM_CONF"]
        cluster.stop()
    assert {name for name, (state, _) in items.items() if state != "ok"} == set(), items
    assert [name for name, (state, _) in after.items() if state != "ok"] == ["PrologSlurmctld"]


def answers(cluster: SlurmCluster) -> bool:
    try:
        return bool(cluster.scontrol.settings())
    except SlurmError:
        return False
