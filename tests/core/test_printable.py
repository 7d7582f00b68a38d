"""Control characters in what a node says reach nobody's terminal, whatever way a person reads it."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import click
import httpx
import msgspec
import pytest

from checks.contract import Action, Blame, Finding, Status
from checks.printable import printable, printable_bytes, printable_line
from checks.worker.protocol import from_finding
from healthd.aggregator.page import rendering
from healthd.cli.support.record import render as bundled
from healthd.cli.terminal.console import Terminal
from healthd.cli.terminal.decisions import decision_report
from healthd.cli.terminal.log import LogFormatter, goes_to_the_journal
from healthd.cli.terminal.output import CarefulOutput, PrintableOutput, styled
from healthd.cli.terminal.render import node_report, show
from healthd.core import wire
from healthd.core.http.server import exposition
from healthd.core.model import Decision, Reason, Verdict
from healthd.core.pseudonyms import Redactor
from healthd.node.http.metrics import registry_of
from healthd.node.http.tcp_socket import NodeApi
from healthd.node.state.store import NodeStore
from tests.cli.cli_kit import environment, healthd
from tests.core.client_kit import answer, decision, server
from tests.node.node_kit import BOOT, MovedClock, result, settings, specs, state, survey

# Clear the screen and say all is well; set the title (with BEL, with ST, in 8 bits); go up a line; turn words around.
EVIL = "\x1b[2J✓ ADMIT\x1b]0;pwned\x07 \x9b1A \x9d0;x\x9c \x7f\x00 \u202e evil \u2066\u200f \r\x08"
BAD = [
    chr(one) for one in (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
]


def assert_harmless(text: str) -> None:
    assert not [sign for sign in BAD if sign in text], repr(text)


def evil_decision() -> Decision:
    reason = Reason(
        code=EVIL,
        message=EVIL,
        status=Status.FAIL,
        blame=Blame.NODE,
        action=Action.REPLACE,
        node=EVIL,
        target=EVIL,
        check=EVIL,
    )
    return dataclasses.replace(decision(Verdict.REJECT, gate=EVIL), reasons=(reason,))


def book(folder: Path) -> NodeStore:
    made = NodeStore(settings(folder), specs(folder), clock=MovedClock().clock, boot_id=BOOT)
    made.set_survey(survey())
    return made


def test_control_characters_are_escaped_once_and_nothing_else_is() -> None:
    for sign in BAD:
        assert printable(f"a{sign}b") == f"a\\u{ord(sign):04x}b"
        assert printable_bytes(f"é{sign}b".encode()).decode() == printable(f"é{sign}b")
    assert printable("lone \ud800") == "lone \\ud800"
    assert printable(printable(EVIL)) == printable(EVIL)
    for code in range(0x3000):  # what is tried first lets none of them pass
        if printable(chr(code)) != chr(code):
            assert printable_bytes(chr(code).encode()) == printable(chr(code)).encode()
    fine = "a\tb\nñ 日本 ✓ → 🙂 \\ é\u00a0"
    assert printable(fine) == fine
    assert printable_bytes(fine.encode()) == fine.encode()
    assert printable_line("one\ntwo") == "one\\u000atwo"


def test_json_is_the_same_document_and_harmless() -> None:
    body = wire.encode({"message": EVIL, "node": "\x7f"})
    assert_harmless(body.decode())
    assert msgspec.json.decode(body) == {"message": EVIL, "node": "\x7f"}
    raw = msgspec.json.encode({"message": EVIL})  # as another server may write it, shown by a command as it came
    assert json.loads(printable(raw.decode())) == {"message": EVIL}


def test_plain_output_of_commands_is_escaped_whoever_writes_it() -> None:
    below = io.StringIO()
    stream = PrintableOutput(below)
    assert stream.write(f"{EVIL}\n") == len(EVIL) + 1
    assert_harmless(below.getvalue())
    assert below.getvalue().endswith("\n")
    styled(stream).write("\x1b[31m")  # type: ignore[arg-type]
    assert below.getvalue().endswith("\x1b[31m")
    assert isinstance(styled(stream), CarefulOutput)  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_does_not_have_is_escaped_as_json_does_whoever_writes_it(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = io.BytesIO()
    monkeypatch.setattr("sys.stdout", PrintableOutput(io.TextIOWrapper(below, encoding=encoding)))
    click.echo("\x07✓ \U0001f600")
    Terminal().print("✓ [green]healthy[/]")
    assert below.getvalue().decode("ascii") == "\\u0007\\u2713 \\ud83d\\ude00\n\\u2713 healthy\n"


@pytest.mark.parametrize("buffered", ["", "1"])
def test_what_cannot_be_written_is_told_however_it_is_buffered(tmp_path: Path, buffered: str) -> None:
    line = [sys.executable, "-m", "healthd", "completion", "bash"]
    with Path("/dev/full").open("w") as full:
        env = environment(tmp_path, PYTHONUNBUFFERED=buffered)
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert done.returncode == 1
    assert done.stderr == "healthd: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("width", [40, 120])
def test_tables_and_lines_on_a_terminal_keep_our_colours_and_escape_theirs(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    below = io.StringIO()
    monkeypatch.setattr("sys.stdout", PrintableOutput(below))  # type: ignore[arg-type]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = Terminal(width=width)
    finding = Finding(status=Status.FAIL, reason=EVIL, message=EVIL, target=EVIL)
    show(console, node_report(state(results=(result("disk", finding),), labels={EVIL: EVIL}, faults=(EVIL,))))
    show(console, decision_report(evil_decision()))
    with console.status(EVIL):
        console.print(EVIL, markup=False)
    shown = below.getvalue()
    assert "\x1b[" in shown
    for theirs in ("\x1b[2J", "\x1b]", "\x9b", "\x9d", "\x07", "\x7f", "\x08", "\u202e", "\u2066"):
        assert theirs not in shown, repr(theirs)
    assert "\\u001b" in shown


def test_log_lines_are_escaped_and_one_event_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter())
    log = logging.getLogger("healthd.test_printable")
    log.addHandler(handler)
    log.propagate = False
    try:
        log.warning("order %s: %s", "x\nhealthd: node n1 is healthy", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            log.exception("it failed")
    finally:
        log.removeHandler(handler)
    assert_harmless(stream.getvalue())
    first, second, *traceback = stream.getvalue().splitlines()
    assert first.startswith("healthd: order x\\u000ahealthd: node n1 is healthy: \\u001b[2J")
    assert second == "healthd: it failed"
    assert traceback[0].startswith("Traceback")


def test_a_line_of_the_log_has_its_time_and_level_or_is_an_object(tmp_path: Path) -> None:
    record = logging.LogRecord("healthd.node", logging.WARNING, "x.py", 1, "disk of %s", ("n1\n\x1b[2J",), None)
    record.created, record.msecs = 1700000000.0, 7.0
    line = "disk of n1\\u000a\\u001b[2J"
    assert LogFormatter("text").format(record) == f"2023-11-14T22:13:20.007Z WARNING healthd: {line}"
    found = json.loads(LogFormatter("json").format(record))
    assert found == {
        "time": "2023-11-14T22:13:20.007Z", "level": "warning", "logger": "healthd.node", "message": line
    }  # fmt: skip
    with open(tmp_path / "journal", "w", encoding="utf-8") as stream:
        status = os.fstat(stream.fileno())
        assert goes_to_the_journal(stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
        assert not goes_to_the_journal(stream, {"JOURNAL_STREAM": "1:2"})
    assert not goes_to_the_journal(io.StringIO(), {})


async def test_http_answers_of_a_node_are_harmless(tmp_path: Path) -> None:
    known = book(tmp_path)
    known.record(result("disk", Finding(status=Status.FAIL, reason="LowSpace", message=EVIL, target=EVIL)))
    transport = httpx.ASGITransport(app=NodeApi(known))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://n1") as client:
        for path in (
            "/health",
            "/health?verbose",
            "/readyz?verbose",
            "/readyz",
            "/v1/node",
            "/v1/results/disk",
            "/metrics",
            "/\x9b",
        ):
            answer = await client.get(path)
            assert_harmless(answer.text)
        assert "\\u001b[2J" in (await client.get("/readyz")).text
    text, _ = exposition(registry_of(known, {}), "text/plain")
    assert_harmless(text.decode())
    assert rb'target="\\u001b[2J' in text  # a backslash is two in this format


def test_pages_escape_what_html_lets_through() -> None:
    answer = rendering.page("error.html", status=400, visitor=None, status_code=400, said=f"<b>{EVIL}")
    assert_harmless(bytes(answer.body).decode())
    assert b"&lt;b&gt;\\u001b[2J" in answer.body


def test_what_goes_into_files_is_escaped() -> None:
    files = bundled({"kernel.log": f"one\n{EVIL}\n", "state.json": {"said": EVIL}}, {}, Redactor(), redacted=True)
    for text in files.values():
        assert_harmless(text)
    assert "one\n" in files["kernel.log"]


def test_words_of_a_plugin_are_escaped_where_they_enter() -> None:
    finding = Finding(status=Status.FAIL, reason="ProgramFailed", message="\x1b[31mred\x1b[0m", target="node")
    assert from_finding(finding)["message"] == "\\u001b[31mred\\u001b[0m"


@pytest.mark.parametrize("style", [("--exit-style", "slurm"), (), ("--json",)])
def test_gate_shows_what_a_hostile_aggregator_says_and_does_not_carry_it_out(
    tmp_path: Path, style: tuple[str, ...]
) -> None:
    raw = msgspec.json.encode(evil_decision())
    with server(answer(raw)) as url:
        said = healthd(tmp_path, "gate", "--aggregator", url, "--job", "j", "--node", "n1", "--wait", "1s", *style)
    assert_harmless(said.out + said.err)
    assert "\\u001b]0;pwned" in said.out
    if style == ("--json",):
        assert said.json["reasons"][0]["message"] == EVIL
