"""Completion in real shells, man pages, and what can be watched."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest

from checks.discover import builtin_checks
from healthd.cli import COMMANDS
from healthd.cli.completion import complete_nodes
from healthd.cli.fleet.fleet import show
from tests.aggregator.parts import state
from tests.cli.cli_gate_kit import SpeakingNode, World, aggregator, nodes
from tests.cli.cli_kit import end, environment, healthd, start
from tests.patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with aggregator(tmp_path_factory.mktemp("completion")) as found:
        speaking = [SpeakingNode(found.url, state(name), None) for name in ("trn-1", "trn-2", "gpu-1")]
        assert all(node.heard.wait(20 * PATIENCE) for node in speaking)
        yield found
        for node in speaking:
            node.stop()


def completed(folder: Path, line: str, **env: str) -> list[str]:
    """What bash offers after this line, by the script that the command prints."""
    bash = shutil.which("bash")
    assert bash is not None
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    program = bin_folder / "healthd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m healthd "$@"\n')
    program.chmod(0o755)
    words = line.split(" ")
    script = (
        'eval "$(healthd completion bash)"\n'
        f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
        "_healthd_completion healthd\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    path = f"{bin_folder}:{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "-c", script],
        env={**environment(folder, **env), "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [word for word in done.stdout.splitlines() if word]


def test_bash_completes_commands_options_values_checks_and_nodes(world: World) -> None:
    folder, here = world.folder, {"HEALTHD_AGGREGATOR": world.url}
    assert completed(folder, "healthd fle") == ["fleet"]
    assert "--aggregator" in completed(folder, "healthd gate --agg")
    assert completed(folder, "healthd fleet status --health un") == ["unknown", "unhealthy"]
    assert completed(folder, "healthd check mat") == [name for name in builtin_checks() if name.startswith("mat")]
    assert completed(folder, "healthd fleet quarantine trn-", **here) == ["trn-1", "trn-2"]
    assert completed(folder, "healthd gate --job j --node gp", **here) == ["gpu-1"]


@pytest.mark.thorough
def test_bash_completes_jobs_and_gates(world: World) -> None:
    here = {"HEALTHD_AGGREGATOR": world.url}
    admitted = world.gate("llama-7b", *nodes("gpu-1"), "--json")
    assert admitted.code == 0, admitted.err
    gate = admitted.json["id"]
    assert completed(world.folder, "healthd fleet explain lla", **here) == ["llama-7b"]
    assert completed(world.folder, f"healthd fleet explain {gate[:-2]}", **here) == [gate]
    assert completed(world.folder, "healthd gate release --job l", **here) == ["llama-7b"]
    assert completed(world.folder, "healthd override l", **here) == ["llama-7b"]
    assert world.run("gate", "release", "--job", "llama-7b").code == 0


def test_help_of_a_gate_begins_with_an_example_and_is_in_sections(tmp_path: Path) -> None:
    said = healthd(tmp_path, "gate", "--help").out
    example, first, last = (
        said.index(words) for words in ("healthd gate --job", "The job:", "Options of every command:")
    )
    assert example < first < last < said.index("--state-dir")
    assert said.index("  --job J") < said.index("--config")


@pytest.mark.thorough
def test_tab_says_nothing_where_no_aggregator_answers(tmp_path: Path) -> None:
    assert completed(tmp_path, "healthd fleet show t", HEALTHD_AGGREGATOR="http://127.0.0.1:9") == []
    assert completed(tmp_path, "healthd fleet show t") == []


def test_tab_does_not_wait_for_an_aggregator_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHD_STATE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HEALTHD_AGGREGATOR", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with click.Context(show) as context:
            assert complete_nodes(context, show.params[0], "n") == []
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(tmp_path: Path, shell: str) -> None:
    said = healthd(tmp_path, "completion", shell)
    assert said.code == 0
    assert "_HEALTHD_COMPLETE" in said.out
    assert healthd(tmp_path, "completion", env={"SHELL": f"/usr/bin/{shell}"}).out == said.out


def test_an_unknown_shell_is_told_which_there_are(tmp_path: Path) -> None:
    said = healthd(tmp_path, "completion", env={"SHELL": "/bin/tcsh"})
    assert said.code == 2
    assert "bash, zsh, fish" in said.err


# --- watch ----------------------------------------------------------------------------------------------------------


def test_a_watched_status_shows_what_changes(world: World) -> None:
    command = start(world.folder, "fleet", "status", "--watch", "--aggregator", world.url)
    assert command.stdout is not None
    seen = ""
    while "quarantined by" not in seen:
        line = command.stdout.readline()
        assert line, "it ended"
        if "trn-2" in line and "trn-2" not in seen:
            url = f"{world.url}/v1/nodes/gpu-1/quarantine"
            httpx.put(url, json={"reason": "fans"}, trust_env=False, verify=False).raise_for_status()
        seen += line
    command.terminate()
    command.communicate(timeout=20 * PATIENCE)
    assert seen.count("3 nodes") > 1, "shown anew"
    httpx.delete(f"{world.url}/v1/nodes/gpu-1/quarantine", trust_env=False, verify=False).raise_for_status()


def test_a_watched_gate_says_all_that_it_waits_for(world: World) -> None:
    busy = world.gate("busy", *nodes("trn-1", "trn-2", "gpu-1"), "--json")
    assert busy.code == 0, busy.err
    line = ("gate", "--job", "next", *nodes("trn-1", "trn-2", "gpu-1"), "--aggregator", world.url, "--wait", "3s")
    said = end(start(world.folder, *line, "--watch"), timeout=60)
    assert said.code == 75
    held = said.err.partition("holding: ")[2]
    assert {name for name in ("trn-1", "trn-2", "gpu-1") if f"{name} is leased" in held} == {"trn-1", "trn-2", "gpu-1"}
    httpx.delete(f"{world.url}/v1/gates/{busy.json['id']}/lease", trust_env=False, verify=False).raise_for_status()


# --- man pages ------------------------------------------------------------------------------------------------------


def test_every_command_has_a_man_page_of_sound_roff(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("docs_man", ROOT / "docs/man.py")
    assert spec is not None
    assert spec.loader is not None
    man = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(man)
    files = man.write(tmp_path)
    names = {file.stem for file in files}
    assert {f"healthd-{name}" for name in COMMANDS} | {"healthd", "healthd-fleet-status"} <= names
    text = (tmp_path / "healthd-gate.1").read_text()
    assert "75: not admitted" in text
    assert "\\-\\-watch" in text
    if (groff := shutil.which("groff")) is None:
        pytest.skip("groff is not here: the pages were written, and not read by it")
    for file in files:
        read = subprocess.run(
            [groff, "-man", "-ww", "-z", "-Tutf8", str(file)], capture_output=True, text=True, check=True
        )
        assert read.stderr == "", file.name
