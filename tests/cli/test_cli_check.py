"""`healthd check`: what it measures, what faults come to, and what it says to what cannot be meant."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.cli.cli_kit import Said, environment, healthd
from tests.patience import PATIENCE

PROBES = ("matmul", "memory", "digest", "transfer", "train_step")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
SMALL = """
[checks.matmul]
sizes = [64, 64]
repeats = 1
[checks.all_reduce]
timeout = "6s"
"""


def small(folder: Path, text: str = SMALL) -> str:
    file = folder / "healthd.toml"
    file.write_text(text)
    return str(file)


def results(said: Said) -> dict[str, dict[str, Any]]:
    return {result["check"]: result for result in said.json["results"]}


def one_line(said: Said, code: int = 2) -> str:
    assert said.code == code, said.err
    assert said.out == ""
    assert said.err.startswith("healthd: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_the_quick_tier_gives_every_probe_and_collective_with_numbers_limits_and_their_origin(tmp_path: Path) -> None:
    text = "[checks.matmul]\nsizes = [64, 64]\n[checks.memory]\nmax_bytes = 1048576\n"
    said = healthd(tmp_path, "check", "--tier", "quick", "--json", "--config", small(tmp_path, text))
    assert said.code in (0, 1), said.err or said.json["reasons"]
    assert said.err == ""
    found = results(said)
    for name in (*PROBES, *COLLECTIVES):
        assert found[name]["status"] == "pass", found[name]
        measured = [one for finding in found[name]["findings"] for one in finding["measurements"]]
        assert measured or name == "digest"
        assert all(one["value"] > 0 and one["origin"] for one in measured)
    assert len([name for name, result in found.items() if result["tier"] == "quick"]) >= 17
    assert said.json["inventory"]["accelerator"] == "cpu"
    assert said.json["inventory"]["device_count"] == 2
    assert said.json["faults"] == []


def test_a_corrupt_device_of_three_is_named_as_silent_corruption(tmp_path: Path) -> None:
    fault = "digest@cpu:1=corrupt"
    said = healthd(tmp_path, "check", "digest", "--fault", fault, "--json", env={"HEALTHD_CPU_DEVICES": "3"})
    assert said.code == 1
    reason = said.json["reasons"][0]
    assert (reason["code"], reason["target"], reason["injected"]) == ("SilentCorruption", "cpu:1", True)
    assert said.json["faults"] == [fault]
    assert said.json["health"] == "unhealthy"


def test_a_rank_that_hangs_in_a_collective_is_named_within_the_deadline(tmp_path: Path) -> None:
    config = small(tmp_path)
    said = healthd(
        tmp_path, "check", "all_reduce", "--config", config, "--fault", "all_reduce@rank:1=hang", "--json", timeout=25
    )
    assert said.code in (1, 3)
    assert "rank 1" in said.json["reasons"][0]["message"] or "rank:1" in str(said.json["reasons"][0]["target"])


def test_a_crash_of_one_check_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    config = small(tmp_path)
    names = ("matmul", "transfer", "memory_free")
    said = healthd(tmp_path, "check", *names, "--config", config, "--fault", "matmul=crash", "--json")
    found = results(said)
    assert said.code == 3
    assert found["matmul"]["findings"][0]["reason"] == "Crashed"
    assert found["transfer"]["status"] == "pass"
    assert found["memory_free"]["status"] == "pass"


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("memory_free=fail", 1, None),
        ("memory_free=hang", 3, "Timeout"),
        ("memory_free=crash", 3, "Crashed"),
        ("memory_free=garbage", 3, None),
        ("memory_free=slow:2", 0, None),
        ("device_count=missing", 1, "MissingDevice"),
    ],
)
def test_every_kind_of_fault_of_a_passive_check_shows_and_is_marked(
    tmp_path: Path, fault: str, code: int, reason: str | None
) -> None:
    name = fault.partition("=")[0]
    seconds = 1 if fault.endswith("=hang") else 10
    config = small(tmp_path, f'[checks.{name}]\ntimeout = "{seconds}s"\n')
    said = healthd(tmp_path, "check", name, "--config", config, "--fault", fault, "--json")
    assert said.code == code, said.out
    result = results(said)[name]
    assert result["injected"]
    if reason is not None:
        assert reason in [finding["reason"] for finding in result["findings"]]


def test_faults_of_devices_show_on_the_device_they_hit(tmp_path: Path) -> None:
    config = small(tmp_path)
    faults = ("matmul@cpu:0=corrupt", "transfer@cpu:1=fail", "all_reduce@rank:1=absent")
    given = [word for fault in faults for word in ("--fault", fault)]
    names = ("matmul", "transfer", "all_reduce")
    said = healthd(tmp_path, "check", *names, "--config", config, *given, "--json")
    assert said.code == 1
    found = results(said)
    wrong = {(name, finding["target"]) for name in names for finding in found[name]["findings"] if finding["reason"]}
    assert ("matmul", "cpu:0") in wrong
    assert ("matmul", "cpu:1") not in wrong
    assert ("transfer", "cpu:1") in wrong
    assert found["all_reduce"]["status"] in ("unknown", "fail")
    assert "rank 1" in str(found["all_reduce"]) or "rank:1" in str(found["all_reduce"])


def test_a_directory_can_stand_for_the_machine(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent / "hosts" / "healthy"
    said = healthd(tmp_path, "check", "--tier", "passive", "--json", "--host-root", str(root))
    assert said.code in (0, 1, 3)
    assert {"kernel_log", "mounts", "device_count"} <= results(said).keys()


def test_people_get_a_table_without_colour_where_it_is_no_terminal(tmp_path: Path) -> None:
    said = healthd(tmp_path, "check", "memory_free")
    assert said.code == 0
    assert "\x1b" not in said.out
    assert "memory_free" in said.out
    assert "healthy" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("matmull",), "'matmull'"),
        (("--tier", "quik"), "--tier 'quik': choose one of: passive, quick, deep, soak"),
        (("--fault", "matmul"), "write CHECK[@TARGET]=KIND[:VALUE]"),
        (("--fault", "matmul=melt"), "no such kind: 'melt'"),
        (("--fault", "matmull=fail"), "did you mean 'matmul'?"),
        (("--fault", "memory_free=corrupt"), "cannot be injected into"),
        (("--fault", "matmul=slow:-3"), "slow needs a factor above 1"),
        (("--fault", "matmul=slow:nan"), "slow needs a factor above 1"),
        (("--no-such-option",), "--no-such-option"),
        (("--config", "/no/such/file"), "/no/such/file: no such file"),
        (("--config", "/"), "cannot be read"),
        (("--config", "/bin/sh"), "cannot be read"),
        (("--host-root", "/no/such/root"), "/no/such/root"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_exit_code_3(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in one_line(healthd(tmp_path, "check", "--json", *arguments))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEALTHD_CPU_DEVICES", "abc"),
        ("HEALTHD_CPU_DEVICES", "0"),
        ("HEALTHD_CPU_DEVICES", "-1"),
        ("HEALTHD_CPU_DEVICES", "100000"),
        ("HEALTHD_CPU_DEVICE", "2"),
        ("HEALTHD_PROBE_RETRIES", "-1"),
        ("HEALTHD_PROBE_START", "soon"),
        ("HEALTHD_PROBE_ACCELERATOR", "abacus"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(tmp_path: Path, variable: str, value: str) -> None:
    said = healthd(tmp_path, "check", "matmul", "--json", env={variable: value})
    text = one_line(said)
    assert variable in text or value in text


def test_an_interpreter_that_is_not_there_is_unknown_and_named(tmp_path: Path) -> None:
    said = healthd(tmp_path, "check", "memory_free", "--json", env={"HEALTHD_PROBE_PYTHON": "/no/such/python"})
    assert said.code == 3
    assert "/no/such/python" in said.json["reasons"][0]["message"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[probe]\ncpu_device = 2\n", "healthd.toml:2: unknown key 'probe.cpu_device'; did you mean 'cpu_devices'?"),
        ("[prob]\n", "healthd.toml:1: unknown key 'prob'; did you mean 'probe'?"),
        ("[checks.matmull]\nrepeats = 1\n", "no such check: 'matmull'"),
        ("[checks.matmul]\nrepeat = 1\n", "repeat"),
        ('[checks.matmul]\ntimeout = "-1s"\n', "-1s"),
        ("[checks.matmul]\nrepeats = -1\n", "repeats"),
        (
            "[checks.kernel_log]\n[checks.kernel_log.patterns.fan]\npattern = 'fan ('\n",
            "healthd.toml:3: checks.kernel_log: ",
        ),
        ("[checks.kernel_log.patterns.fan]\npattern = 'fan'\nreason = 'Fan'\n", "healthd.toml:3: checks.kernel_log: "),
        ("[checks.kernel_log]\nrequired = true\nbenign = ['(']\n", "healthd.toml:3: checks.kernel_log: "),
        ("[checks.kernel_log.patterns.fan]\nstatus = 'warn'\n", "'patterns.fan.pattern' must be set"),
        ("[node\n", "healthd.toml:1: not TOML"),
        ('[node]\nchecks = ["nothing_like_it"]\n', "nothing_like_it"),
        ("[limits.matmul_flops_per_second]\nlower = 'a'\n", "limits"),
        ("\n[limits.memory_availble_ratio]\nlower = 0.9\n", "healthd.toml:2: no check has a limit"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in one_line(healthd(tmp_path, "check", "matmul", "--json", "--config", small(tmp_path, text)))


def test_a_pattern_of_ones_own_is_tried_on_a_recorded_log(tmp_path: Path) -> None:
    log = tmp_path / "machine/dev/kmsg"
    log.parent.mkdir(parents=True)
    log.write_text("[ 4990.0] acme_bmc: fan 3 stopped\n[ 4991.0] acme_bmc: fan 3 stopped\n")
    own = "[checks.kernel_log.patterns.fan]\npattern = 'fan \\d stopped'\nreason = 'Overheating'\nwithin = '10m'\n"
    found = []
    for count in (2, 3):
        config = small(tmp_path, f"{own}count = {count}\n")
        words = ("check", "kernel_log", "--host-root", str(tmp_path / "machine"), "--json", "--config", str(config))
        said = healthd(tmp_path, *words)
        found.append((said.code, [reason["code"] for reason in said.json["reasons"]]))
    assert found == [(1, ["Overheating"]), (0, [])]


def on_a_terminal(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """What a person sees, 80 columns wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    line = [sys.executable, "-m", "healthd", *arguments]
    seen = environment(folder, TERM="xterm-256color", **(env or {}))
    with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=seen) as process:
        os.close(theirs)
        chunks = []
        with contextlib.suppress(OSError):  # Linux: the other end is closed
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        process.wait(timeout=20 * PATIENCE)
    os.close(ours)
    return b"".join(chunks).decode()


@pytest.mark.thorough
def test_a_terminal_gets_colour_and_lines_that_fit_it(tmp_path: Path) -> None:
    config = small(tmp_path, SMALL.replace("repeats = 1", 'repeats = 1\ntimeout = "5s"'))
    faults = ("--fault", "matmul@cpu:1=corrupt", "--fault", "matmul@cpu:0=hang")  # long enough to be looked at
    said = on_a_terminal(tmp_path, "check", "matmul", "--config", config, *faults)
    assert "\x1b[1;31m" in said, "a failure is red"
    assert "0 of 1 checks done" in said, "a line that moves while it runs"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "\n")
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "WrongResult" in plain


def test_no_color_is_respected(tmp_path: Path) -> None:
    said = on_a_terminal(tmp_path, "check", "memory_free", env={"NO_COLOR": "1"})
    assert "memory_free" in said
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", said)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_has_not_our_signs_gets_the_same_answer(tmp_path: Path, encoding: str) -> None:
    said = healthd(tmp_path, "check", "memory_free", env={"PYTHONIOENCODING": encoding}, executed=True)
    assert (said.code, said.err) == (0, "")
    assert "\\u2713 healthy" in said.out


def test_a_named_check_that_failed_is_never_left_out_of_the_verdict(tmp_path: Path) -> None:
    config = small(tmp_path)
    fault = ("--fault", "matmul@cpu:1=corrupt")
    said = healthd(tmp_path, "check", "matmul", "load", "--tier", "passive", "--config", config, *fault, "--json")
    assert said.code == 1, said.err
    assert said.json["health"] == "unhealthy"


@pytest.mark.parametrize("target", ["cpu:9", "rank:9"])
def test_a_fault_on_what_is_not_there_is_an_error_and_no_pass(tmp_path: Path, target: str) -> None:
    check = "all_reduce" if target.startswith("rank") else "matmul"
    said = healthd(tmp_path, "check", check, "--config", small(tmp_path), "--fault", f"{check}@{target}=fail")
    assert said.code == 2
    assert f"this node has no '{target}'" in said.err


def test_a_reader_that_goes_away_changes_no_exit_code(tmp_path: Path) -> None:
    line = f"'{sys.executable}' -m healthd check load memory_free --fault load=fail --json; echo code $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({line}) | true"], env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert "code 1" in done.stderr


def test_bare_command_shows_its_help_and_a_typo_the_nearest_command(tmp_path: Path) -> None:
    bare = healthd(tmp_path)
    assert bare.code == 2
    assert "Commands:\n" in bare.err
    assert "did you mean 'check'?" in healthd(tmp_path, "chek").err


def test_a_relative_run_directory_is_the_same_place_to_workers(tmp_path: Path) -> None:
    """Otherwise who holds a device would be looked for elsewhere, and nobody found there."""
    env = environment(tmp_path)
    env.pop("HEALTHD_NODE_RUN_DIR", None)
    devices = tmp_path / "here/devices"
    devices.mkdir(parents=True)
    line = [
        sys.executable,
        "-m",
        "healthd",
        "check",
        "matmul",
        "--run-dir",
        "here",
        "--config",
        small(tmp_path),
        "--json",
    ]
    with (devices / "cpu0").open("w"):
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "Busy" in done.stdout


def test_a_limit_that_judges_nothing_is_told(tmp_path: Path) -> None:
    text = "[limits.memory_available_ratio]\nlower = 0.0\n[limits.gpu_temperature_celsius]\nupper = 90.0\n"
    said = healthd(tmp_path, "check", "--tier", "passive", "--config", small(tmp_path, text))
    assert "healthd.toml:3: limits.gpu_temperature_celsius matched no measurement" in said.err
    assert "limits.memory_available_ratio" not in said.err


def test_an_interpreter_without_torch_is_told_with_the_remedy_and_not_tried_twice(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    said = healthd(tmp_path, "check", "matmul", env={"HEALTHD_PROBE_PYTHON": str(python)})
    assert said.code == 3
    assert "No module named 'torch'; name the interpreter that has it" in " ".join(said.out.split())
    assert "attempt 2" not in said.out


def test_what_is_not_known_of_a_machine_is_not_counted(tmp_path: Path) -> None:
    said = healthd(tmp_path, "check", "matmul", env={"HEALTHD_PROBE_PYTHON": "/no/such/python"})
    assert said.code == 3
    first = said.out.splitlines()[0]  # no speed was measured, so nothing is said about limits
    assert "devices unknown" in first
    assert "in use by it cannot be seen" not in first


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("check", "memory_free", "--json"), 3),
        (("fault", "set", "\udcff=fail"), 1),
        (("fleet", "show", "\udcff"), 1),
        (("fleet", "quarantine", "n1", "--reason", "\udcff"), 1),
    ],
)
def test_bytes_that_are_no_text_are_told_in_one_line(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """As a shell passes on what is typed or found in another encoding."""
    env = {"HEALTHD_NODE_NAME": "n\udcff", "HEALTHD_AGGREGATOR": "http://127.0.0.1:1"}
    said = healthd(tmp_path, *words, env=env, executed=True)
    assert (said.code, said.out) == (code, "")
    assert "not UTF-8" in said.err
    assert said.err.count("\n") == 1
