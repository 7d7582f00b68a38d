"""The scripts of Slurm's hooks, against a daemon that is ready, is not, is silent, or is somebody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from healthd.core.node_name import can_name
from healthd.integrations.slurm.command import ask_daemon
from tests.aggregator.service import free_port
from tests.cli.cli_gate_kit import aggregator
from tests.cli.cli_kit import healthd
from tests.integrations.slurm.slurm_kit import HOOKS

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")


@dataclass
class Daemon:
    """What answers in place of a node's daemon: a status and a body; how often nobody took all of it."""

    url: str
    status: int = 200
    body: str = "n1 is ready\n"
    cut_off: int = 0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon(url="")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = made.body.encode() if self.path == "/readyz?exclude=allocated" else b"?"
            self.send_response(made.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:
                made.cut_off += 1

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Hooks:
    """The hooks as they are installed, with the settings of a test."""

    folder: Path

    def run(self, name: str, url: str, *settings: str) -> int:
        shutil.copytree(HOOKS, self.folder / "etc", dirs_exist_ok=True)
        calls = f"{self.folder}/calls"
        command = self.folder / "healthd"
        command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncat {self.folder}/said\n')
        command.chmod(0o755)
        lines = ("mode=enforce", f"node_url={url}", f"state_dir={self.folder}/run", f"healthd={command}", *settings)
        with (self.folder / "etc/hooks.conf").open("a") as shipped:
            shipped.write("\n".join(lines) + "\n")
        environ = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7"}  # nothing else, and no PATH: as slurmd does
        return subprocess.run([self.folder / "etc" / name], env=environ, timeout=20, check=False).returncode

    @property
    def calls(self) -> int:
        file = self.folder / "calls"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def refused(self) -> str:
        file = self.folder / "run/n1.refused"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def hooks(tmp_path: Path) -> Hooks:
    (tmp_path / "said").write_text("n1 is fit\n")
    return Hooks(tmp_path)


def test_prolog_admits_on_a_ready_node(daemon: Daemon, hooks: Hooks) -> None:
    assert hooks.run("prolog.sh", daemon.url) == 0
    assert hooks.refused == ""


def test_prolog_refuses_on_a_node_that_is_not_ready_and_notes_why_and_when(daemon: Daemon, hooks: Hooks) -> None:
    daemon.status, daemon.body = 503, "matmul: matmul cpu:0: wrong by 3 %\nn1 is not ready\n"
    assert hooks.run("prolog.sh", daemon.url) == 1
    when, _, rest = hooks.refused.partition(" ")
    assert abs(float(when) - time.time()) < 30
    assert rest == "job 7: matmul: matmul cpu:0: wrong by 3 %\n"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "<html>welcome</html>"),
        (200, ""),
        (200, "n1 is not ready"),
        (200, "your new page is ready"),
        (200, "n1 is ready for you"),
        (200, "<p>n1 is ready\n</p>\n"),
        (200, "welcome\nn1 is ready\n"),
        (200, " is ready\n"),
        (404, "n1 is ready"),
        (500, "n1 is ready"),
        (503, "n1 is ready\n"),
        (503, "Service Unavailable"),
        (503, "<html>the proxy is not ready</html>\n"),
        (503, "the proxy is not ready\n"),
        (503, ""),
    ],
)
def test_answer_of_somebody_else_is_no_health(daemon: Daemon, hooks: Hooks, status: int, body: str) -> None:
    daemon.status, daemon.body = status, body
    assert hooks.run("prolog.sh", daemon.url) == 1
    assert "as healthd does" in hooks.refused or f"HTTP {status}" in hooks.refused
    assert hooks.run("prolog.sh", daemon.url, "on_unreachable=admit") == 0
    assert hooks.run("health-check.sh", daemon.url) == 0
    hooks.run("health-check.sh", daemon.url)
    assert hooks.calls == 2, "the command looks every time, since nothing here says that the node is fit"


GOOD_NAMES = ("n", "9", "i-0abc", "ip-10-0-0-1.ec2.internal", "rack_1.n7", "A" * 253)
BAD_NAMES = ("A" * 254, "rack1/n7", "n 1", "-n1", ".n1", "_n1", "n1-", "n1.", "n1_", "n\u00e41", "*", "n1\t", "")


@pytest.mark.parametrize("name", [*GOOD_NAMES, *BAD_NAMES])
def test_hooks_take_the_names_that_a_node_can_have_and_no_others(daemon: Daemon, hooks: Hooks, name: str) -> None:
    daemon.body = f"{name} is ready\n"
    for _ in range(2):
        hooks.run("health-check.sh", daemon.url)
    taken = hooks.run("prolog.sh", daemon.url) == 0
    assert (taken, hooks.calls == 1, ask_daemon(daemon.url, patience_seconds=0).fit is True) == (can_name(name),) * 3
    daemon.status, daemon.body = 503, f"fan: loud\n{name} is not ready\n"
    hooks.run("prolog.sh", daemon.url)
    assert ("fan: loud" in hooks.refused) == can_name(name)


def test_an_answer_without_an_end_is_no_health_and_is_not_kept(daemon: Daemon, hooks: Hooks) -> None:
    daemon.body = "n1 is ready\n" * 5_000_000
    assert hooks.run("prolog.sh", daemon.url) == 1
    assert hooks.run("health-check.sh", daemon.url) == 0
    hooks.run("health-check.sh", daemon.url)
    assert hooks.calls == 2
    assert daemon.cut_off >= 2, "neither took all of it"


def test_silent_daemon_refuses_in_bounded_time_unless_told_otherwise(hooks: Hooks) -> None:
    begin = time.monotonic()
    assert hooks.run("prolog.sh", f"http://127.0.0.1:{free_port()}") == 1
    assert time.monotonic() - begin < 10  # MessageTimeout
    assert "does not respond" in hooks.refused


def test_unfit_node_is_refused_even_where_silence_is_admitted(daemon: Daemon, hooks: Hooks) -> None:
    daemon.status, daemon.body = 503, "n1 is not ready\n"
    assert hooks.run("prolog.sh", daemon.url, "on_unreachable=admit") == 1


def test_observe_mode_refuses_nothing_and_leaves_no_mark(daemon: Daemon, hooks: Hooks) -> None:
    daemon.status, daemon.body = 503, "n1 is not ready\n"
    assert hooks.run("prolog.sh", daemon.url, "mode=observe") == 0
    assert hooks.refused == ""


def test_settings_as_they_are_shipped_refuse_nothing() -> None:
    assert "\nmode=observe\n" in (HOOKS / "hooks.conf").read_text()


def test_fit_node_costs_one_request_and_not_one_interpreter(daemon: Daemon, hooks: Hooks) -> None:
    for _ in range(3):
        assert hooks.run("health-check.sh", daemon.url) == 0
    assert hooks.calls == 1
    daemon.status, daemon.body = 503, "n1 is not ready\n"
    (hooks.folder / "said").write_text("n1 fan: drain\n")
    for _ in range(2):
        hooks.run("health-check.sh", daemon.url)
    assert hooks.calls == 3
    daemon.status, daemon.body = 200, "n1 is ready\n"
    hooks.run("health-check.sh", daemon.url)  # it was drained: this has to be undone
    assert hooks.calls == 4


def test_health_check_looks_anew_every_five_minutes(daemon: Daemon, hooks: Hooks) -> None:
    hooks.run("health-check.sh", daemon.url)
    subprocess.run(["/usr/bin/touch", "-d", "6 minutes ago", hooks.folder / "run/n1.clear"], check=True)
    hooks.run("health-check.sh", daemon.url)
    assert hooks.calls == 2


def test_refusal_of_the_prolog_makes_the_health_check_look_at_once(daemon: Daemon, hooks: Hooks) -> None:
    hooks.run("health-check.sh", daemon.url)
    daemon.status, daemon.body = 503, "n1 is not ready\n"
    hooks.run("prolog.sh", daemon.url)
    daemon.status, daemon.body = 200, "n1 is ready\n"
    hooks.run("health-check.sh", daemon.url)
    assert hooks.calls == 2


def test_controllers_hooks_call_the_command_with_what_the_site_set(hooks: Hooks) -> None:
    assert hooks.run("prolog-slurmctld.sh", "", "gate_wait=3m", "gate_options=--no-collective") == 0
    assert hooks.run("epilog-slurmctld.sh", "") == 0
    assert (hooks.folder / "calls").read_text().splitlines() == ["slurm gate --wait 3m --no-collective", "slurm end"]


def test_observing_sends_no_job_back_whatever_goes_wrong(hooks: Hooks) -> None:
    (hooks.folder / "said").unlink()  # so the command fails
    assert hooks.run("prolog-slurmctld.sh", "") != 0
    assert hooks.run("prolog-slurmctld.sh", "", "mode=observe") == 0
    gate, doctor = (hooks.folder / "calls").read_text().splitlines()[-2:]
    assert (gate, doctor) == ("slurm gate --wait 1m --mode observe --no-drain", "slurm doctor")


def logged(hooks: Hooks, name: str, url: str, *settings: str) -> str:
    """What a hook sends to the system log while it observes; it changes nothing, whatever it finds."""
    log, tools = hooks.folder / "log", hooks.folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "logger").write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    (tools / "logger").chmod(0o755)
    log.unlink(missing_ok=True)
    code = hooks.run(name, url, "mode=observe", f"PATH={tools}:$PATH", *settings)
    assert code == 0 or name == "health-check.sh", "Slurm does not look at the exit code of that one"
    return log.read_text() if log.exists() else ""


def test_observing_a_hook_that_cannot_run_is_said_and_what_enforce_would_do(daemon: Daemon, hooks: Hooks) -> None:
    plain = hooks.folder / "plain-file"
    plain.write_text("no program\n")
    for name, what in (("prolog-slurmctld.sh", "no job would start"), ("health-check.sh", "no node would be drained")):
        for command, code in ((plain, 126), ("/no/such/healthd", 127)):
            said = logged(hooks, name, daemon.url, f"healthd={command}")
            assert f"this hook cannot run '{command}'" in said, said
            assert f"(exit {code})" in said
            assert f"with mode=enforce {what}" in said


def test_observing_the_prolog_says_that_its_tool_is_not_there(hooks: Hooks) -> None:
    tools = hooks.folder / "tools"
    said = logged(hooks, "prolog.sh", "http://127.0.0.1:1", f"PATH={tools}")
    assert "this hook cannot run: curl is not installed" in said
    assert "with mode=enforce every job is refused here" in said


def test_observing_the_hooks_say_what_the_doctor_finds(daemon: Daemon, hooks: Hooks) -> None:
    sick = hooks.folder / "sick"
    sick.write_text('#!/bin/sh\n[ "$2" != doctor ] || { echo "scontrol is not in PATH"; exit 1; }\necho "n1 is fit"\n')
    sick.chmod(0o755)
    for name in ("prolog-slurmctld.sh", "health-check.sh"):
        said = logged(hooks, name, daemon.url, f"healthd={sick}")
        assert "healthd slurm doctor: scontrol is not in PATH" in said, said
        sound = logged(hooks, name, daemon.url)
        assert "doctor" not in sound, sound


def test_health_check_that_observes_asks_the_doctor_once_an_hour(daemon: Daemon, hooks: Hooks) -> None:
    (hooks.folder / "said").write_text("n1 is not fit\n")
    for _ in range(2):
        logged(hooks, "health-check.sh", daemon.url)
    calls = [line.split()[1] for line in (hooks.folder / "calls").read_text().splitlines()]
    assert calls == ["health", "doctor", "health"]
    stamp = hooks.folder / "run/n1.doctor"
    os.utime(stamp, (stamp.stat().st_mtime - 3700,) * 2)
    logged(hooks, "health-check.sh", daemon.url)
    assert (hooks.folder / "calls").read_text().count("doctor") == 2


@pytest.mark.parametrize(
    ("status", "body", "fit"),
    [
        (200, "n1 is ready\n", True),
        (503, "fan: loud\nn1 is not ready\n", False),
        (503, "upstream is away", None),
        (200, "<html>welcome</html>", None),
        (200, "n1 is not ready\n", None),
        (200, "your new page is ready\n", None),
        (200, "welcome\nn1 is ready\n", None),
        (503, "the proxy is not ready\n", None),
        (404, "n1 is ready\n", None),
    ],
)
def test_health_check_believes_only_what_a_daemon_of_ours_says(
    daemon: Daemon, status: int, body: str, fit: bool | None
) -> None:
    daemon.status, daemon.body = status, body
    found = ask_daemon(daemon.url, patience_seconds=0)
    assert found.fit is fit
    assert fit or found.why


def test_daemon_that_is_being_restarted_is_waited_for(daemon: Daemon) -> None:
    daemon.status, daemon.body = 500, ""

    def back() -> None:
        daemon.status, daemon.body = 200, "n1 is ready\n"

    timer = threading.Timer(0.2, back)
    timer.start()
    assert ask_daemon(daemon.url, patience_seconds=5).fit is True
    timer.join()


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_CONF": "/nowhere"}


@pytest.mark.parametrize(("rule", "code"), [("hold", 75), ("local", 75), ("admit", 0)])
def test_aggregator_that_is_away_sends_the_job_back_unless_told_otherwise(tmp_path: Path, rule: str, code: int) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    said = healthd(
        tmp_path,
        *("slurm", "gate", "--aggregator", url, "--wait", "0s", "--on-unreachable", rule),
        env={**JOB, "PATH": str(tmp_path)},
    )
    assert (said.code, f"on_unreachable={'admit' if code == 0 else 'hold'}" in said.err) == (code, True), said


def test_token_that_is_not_wanted_is_a_usage_error_and_no_aggregator_that_is_away(tmp_path: Path) -> None:
    made, wrong = healthd(tmp_path, "token", "ci", "--scope", "gate", "--json").json, tmp_path / "wrong"
    (tmp_path / "tokens.toml").write_text(made["entry"])
    (tmp_path / "tokens.toml").chmod(0o600)
    wrong.write_text("wrong-token-of-some-length")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    with aggregator(tmp_path, "--token-table", str(tmp_path / "tokens.toml")) as world:
        for words in (("gate", "--on-unreachable", "admit"), ("end",)):
            asked = ("slurm", *words, "--aggregator", world.url, "--token-file", str(wrong))
            said = healthd(tmp_path, *asked, env={**JOB, "PATH": str(tmp_path)})
            assert (said.code, said.err.count("\n"), "--token-file" in said.err) == (2, 1, True), said


def test_outside_of_slurms_hooks_it_is_a_usage_error(tmp_path: Path) -> None:
    for words in (("gate",), ("end",), ("health",)):
        said = healthd(tmp_path, "slurm", *words, env={"SLURM_JOB_ID": "0", "SLURMD_NODENAME": ""})
        assert (said.code, len(said.err.strip().splitlines())) == (2, 1), said


def test_a_job_whose_nodes_are_not_told_is_not_admitted(tmp_path: Path) -> None:
    said = healthd(tmp_path, "slurm", "gate", "--on-unreachable", "admit", env={"SLURM_JOB_ID": "7"})
    assert (said.code, said.out, len(said.err.strip().splitlines())) == (2, "", 1), said
    assert "SLURM_JOB_NODELIST" in said.err
