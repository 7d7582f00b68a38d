"""`healthd demo` as it looks on a terminal; what it shows is tested in tests/aggregator/test_main_job.py."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from healthd.cli.demo import Stage, accuses
from healthd.cli.settings.options import load_settings
from healthd.core.errors import HealthdError
from healthd.core.model import Mode
from tests.aggregator.service import free_port
from tests.patience import PATIENCE
from tests.ui.stage import POLICY, stage

NAMED = ("--node", "n1", "--node", "n2", "--node", "n3")

# One command of the demonstration, with a spinner of two seconds: nobody listens there.
ONE_COMMAND = """
import pathlib, sys
from healthd.cli.demo import Stage
with Stage(pathlib.Path(sys.argv[1])) as stage:
    stage.healthd("gate", "--aggregator", sys.argv[2], "--job", "j", "--node", "n1", "--wait", "2s", expect=75)
"""


@pytest.mark.thorough
def test_on_a_terminal_a_command_leaves_its_answer_and_no_frames_of_its_spinner(tmp_path: os.PathLike[str]) -> None:
    ours, theirs = pty.openpty()
    url = f"http://127.0.0.1:{free_port()}"
    line = [sys.executable, "-c", ONE_COMMAND, str(tmp_path), url]
    with subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as demo:
        os.close(theirs)
        said = _read(ours, seconds=30.0 * PATIENCE)
        assert demo.wait(10 * PATIENCE) == 0, said
    text = said.decode()
    assert "not admitted" in text
    assert "exit code 75" in text
    assert text.count("\n") < 12, text


def test_an_act_that_does_not_end_as_it_is_told_is_tried_again_and_then_said_plainly(tmp_path: Path) -> None:
    """An aggregator whose nodes never get their ranks started in time, as on a machine that is too slow."""
    late = dataclasses.replace(
        POLICY,
        collective=True,
        validation_seconds=1.0,
        tuning=dataclasses.replace(POLICY.tuning, collective_contact_seconds=0.2),
    )
    shown = io.StringIO()
    with stage(tmp_path, policy=late) as fleet, contextlib.redirect_stdout(shown):
        fleet.say("n1", "n2", "n3")
        port = int(fleet.url.rpartition(":")[2])
        with Stage(tmp_path, ports={"aggregator": port}) as demo, pytest.raises(HealthdError) as caught:
            demo.gate("train-4", *NAMED, expect=75, names=("CollectiveFault", "n3"), wait="2s")
    assert re.match(r"this machine is too slow or too busy .* did not name n3 for CollectiveFault", str(caught.value))
    assert shown.getvalue().count("healthd gate --aggregator") == 3
    assert "--attempt 2" in shown.getvalue()


def test_settings_of_the_machine_are_not_those_of_the_demonstration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as actuators, a mode of gates, tokens: only the interpreter of the probes is that of the machine."""
    (tmp_path / "here").mkdir()
    settings = tmp_path / "healthd.toml"
    settings.write_text(f"""
probe.python = "{sys.executable}"
probe.accelerator = "cuda"
limits.load_ratio.upper = 0.000001
node.disabled = ["disk_space"]
""")
    monkeypatch.setenv("HEALTHD_CONFIG", str(settings))
    monkeypatch.setenv("HEALTHD_TOKEN_FILE", "/no/such/file")
    monkeypatch.setenv("HEALTHD_POLICY_MODE", "observe")
    with Stage(tmp_path / "here") as demo:
        environment = demo.environment
    named = {name: value for name, value in environment.items() if name.startswith("HEALTHD_")}
    assert named.pop("HEALTHD_PROBE_PYTHON") == sys.executable
    assert named.pop("HEALTHD_PROBE_ACCELERATOR") == "cpu"
    assert "PATH" in environment
    monkeypatch.setattr(os, "environ", dict(environment))
    options = {"state_dir": tmp_path, "run_dir": tmp_path}
    loaded = load_settings(options, section="node")
    assert (loaded.node.disabled, loaded.limits, loaded.gate.token_file) == ((), {}, None)
    assert loaded.policy.mode is Mode.ENFORCE


def test_faults_of_this_host_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a GPU of the workstation that has fallen off the bus."""
    log = tmp_path / "host/dev/kmsg"
    log.parent.mkdir(parents=True)
    log.write_text("3,1,1000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n")
    (tmp_path / "here").mkdir()
    with Stage(tmp_path / "here") as demo:
        demo.environment |= {"HEALTHD_NODE_HOST_ROOT": str(tmp_path / "host"), "HEALTHD_NODE_CHECKS": "kernel_log"}
        demo.leave_out_faults_of_this_host()
    assert demo.environment["HEALTHD_NODE_DISABLED"] == "kernel_log"
    assert "leaves out: kernel_log: GPU Xid" in capsys.readouterr().out


def test_a_decision_is_held_against_what_is_told_of_it() -> None:
    reason = {"code": "CollectiveFault", "node": "n3"}
    assert accuses({"reasons": [reason], "excluded": []}, "CollectiveFault", "n3")
    assert accuses({"reasons": [], "excluded": [{"node": "n3", "reasons": [reason]}]}, "CollectiveFault", "n3")
    assert not accuses({"reasons": [{"code": "Undecided", "node": None}]}, "CollectiveFault", "n3")
    assert not accuses({"reasons": [reason]}, "CollectiveFault", "n2")


def test_a_node_that_a_rule_keeps_out_for_the_fault_before_the_gate_sees_it_is_named_as_well() -> None:
    text = "n2 is quarantined by rule:hard: matmul cpu:1 WrongResult: fp32 512x512x512 product is wrong; seen once"
    kept_out = {"reasons": [{"code": "Quarantined", "node": "n2", "message": text}]}
    assert accuses(kept_out, "WrongResult", "n2")
    assert not accuses(kept_out, "WrongResult", "n1")
    assert not accuses(kept_out, "SilentCorruption", "n2")


def _read(terminal: int, *, seconds: float) -> bytes:
    """All that comes until the other side is closed."""
    said, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                said += os.read(terminal, 65536)
            except OSError:  # what Linux says of a terminal that nobody has open any more
                break
    os.close(terminal)
    return said
