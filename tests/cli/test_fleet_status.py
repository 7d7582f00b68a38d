"""`healthd fleet status` of a fleet that is larger than what it shows, and as it is watched in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import healthd.cli.fleet.status as status
from healthd.core import wire
from tests.cli.cli_kit import environment
from tests.core.client_kit import answer, server
from tests.hooks.inside import run_inside
from tests.patience import PATIENCE

HIGH, WIDE = 12, 80
CLEARED = "\x1b[2J"
SUMMARY = {
    "nodes": 40,
    "health": {"healthy": 39, "unhealthy": 1},
    "gates_holding": 0,
    "recovering": None,
    "overrides": [],
}


def row(name: str, health: str = "healthy") -> dict[str, object]:
    return {
        "node": name,
        "health": health,
        "heard_seconds": 0.0,
        "allocated": [],
        "quarantine": None,
        "reasons": [],
    }


def test_nodes_that_are_not_listed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MOST_NODES", 2)
    row = {"node": "n1", "health": "healthy"}
    fleet, page = answer(wire.encode({"nodes": 9})), answer(wire.encode({"nodes": [row, row], "next": "n2"}))
    with server(fleet, page) as url:
        said = run_inside("fleet", "status", "--json", "--aggregator", url)
    assert (said.code, len(said.json["nodes"])) == (0, 2)
    assert said.err == "healthd: only the first 2 nodes by name are listed; narrow the list with --health or --pool\n"


def test_a_fleet_that_is_shown_whole_has_no_such_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MOST_NODES", 2)
    row = {"node": "n1", "health": "healthy"}
    fleet, page = answer(wire.encode({"nodes": 2})), answer(wire.encode({"nodes": [row, row], "next": None}))
    with server(fleet, page) as url:
        assert run_inside("fleet", "status", "--json", "--aggregator", url).err == ""


def test_a_watched_fleet_has_the_screen_for_itself(tmp_path: Path) -> None:
    """Drawn in the place of what was there, the worst first, no higher than the screen; the last answer stays there."""
    rows = [row("a-bad", "unhealthy"), *(row(f"n{number:02}") for number in range(39))]
    look = (answer(wire.encode(SUMMARY)), answer(wire.encode({"nodes": rows, "next": None})))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HIGH, WIDE, 0, 0))
    with server(*look, lambda connection: None) as url:
        line = [sys.executable, "-m", "healthd", "fleet", "status", "--watch", "--aggregator", url]
        env = environment(tmp_path, TERM="xterm-256color")
        env.pop("LINES", None)  # which would be believed more than the terminal, as by every program
        with subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env) as process:
            os.close(theirs)
            told, until = b"", time.monotonic() + 20 * PATIENCE
            while told.count(b"lines more") < 2 and time.monotonic() < until:
                if select.select([ours], [], [], 1.0)[0]:
                    told += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # Linux: the other end is closed
                while os.read(ours, 65536):
                    pass
            assert process.wait(timeout=20 * PATIENCE) == 130
    os.close(ours)
    seen = told.decode()
    assert "\\u001b" not in seen
    before, first, second, *_ = seen.split(CLEARED)
    assert before.strip() == ""
    for screen in (first, second):
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("^C", "").split("\r\n")[:-1]
        assert len(lines) <= HIGH - 1, "the cursor stands on the last line"
        assert "a-bad" in screen, "the worst of them is to be seen"
        assert re.fullmatch(r"\.\.\. and \d+ lines more", lines[-1])
    assert ("trying again" in first, "trying again" in second) == (False, True)
