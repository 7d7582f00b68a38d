"""Hooks against an aggregator that is there and says no yes, and against daemons that are none."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from healthd import wire
from healthd.model import AdmittedNode, Decision, Verdict
from tests.fleet.service import free_port
from tests.healthd.cli_kit import Said, healthd

HEALTH = "application/health+json"


@dataclass
class Answers:
    """What a server answers, by the end of the path: status, type of the content, content. It notes what was asked."""

    by_end: dict[str, tuple[int, str, bytes]]
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def of(self, method: str, path: str) -> tuple[int, str, bytes]:
        plain = path.partition("?")[0]
        self.asked.append(f"{method} {plain}")
        return next(
            (found for end, found in self.by_end.items() if plain.endswith(end)), (200, "application/json", b"{}")
        )


@contextlib.contextmanager
def serving(by_end: dict[str, tuple[int, str, bytes]]) -> Iterator[Answers]:
    answers = Answers(by_end)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, kind, body = answers.of(self.command, self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - http.server's names

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    answers.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def admission(*nodes: str) -> bytes:
    return wire.encode(
        Decision(
            id="g-1",
            decision=Verdict.ADMIT,
            reasons=(),
            nodes=tuple(AdmittedNode(node=name, evidence_age_seconds=1.0) for name in nodes),
            excluded=(),
            policy={},
            retryable=False,
            decided_at=0.0,
            duration_seconds=0.0,
        )
    )


@pytest.mark.parametrize("rule", ["hold", "admit", "local"])
def test_a_group_whose_start_is_never_confirmed_starts_nobody_whatever_is_to_be_done_when_nobody_answers(
    tmp_path: Path, rule: str
) -> None:
    """The aggregator lives and says that one member did not confirm: who started now would start alone."""
    not_all = json.dumps({"go": False, "missing": ["n1"], "all_told": False, "over": True}).encode()
    words = {"/handshake": (200, "application/json", not_all)}
    with serving({**words, "/v1/gates": (200, "application/json", admission("n0", "n1"))}) as aggregator:
        who = ("--join", "train", "--size", "2", "--rank", "0", "--node", "n0", "--on-unreachable", rule)
        said = healthd(tmp_path, "gate", "--aggregator", aggregator.url, *who)
    assert said.code == 75, said
    assert "not all members confirmed the start in 3 rounds; its group is told" in said.err
    assert "on_unreachable" not in said.err
    assert sum(one.startswith("DELETE /v1/gates/g-1/members/") for one in aggregator.asked) >= 3


def by_its_own_node(folder: Path, url: str) -> Said:
    away = ("--aggregator", f"http://127.0.0.1:{free_port()}", "--wait", "0s", "--on-unreachable", "local")
    return healthd(folder, "gate", "--job", "j", "--node", "n1", *away, env={"HEALTHD_GATE_LOCAL_URL": url})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"<html>welcome</html>"),
        ("application/json", b'{"status": "ok"}'),
        ("application/json", b'{"status": "pass", "serviceId": "n1"}'),
        (HEALTH, b'{"status": "pass"}'),
        (HEALTH, b'{"status": "fail", "serviceId": "n1"}'),
        (HEALTH, b'{"serviceId": "n1"}'),
        (HEALTH, b'["pass"]'),
        (HEALTH, b"pass"),
    ],
)
def test_a_200_of_another_program_is_not_taken_for_a_fit_node(tmp_path: Path, kind: str, body: bytes) -> None:
    with serving({"/health": (200, kind, body)}) as other:
        said = by_its_own_node(tmp_path, other.url)
    assert said.code == 75, said
    assert "this node says: " in said.err
    assert "fit" not in said.err


@pytest.mark.parametrize(("status", "word", "code"), [(200, "pass", 0), (200, "warn", 0), (503, "fail", 75)])
def test_this_nodes_own_daemon_is_believed(tmp_path: Path, status: int, word: str, code: int) -> None:
    body = json.dumps({"status": word, "serviceId": "n1", "output": "fan: loud"}).encode()
    with serving({"/health": (status, f"{HEALTH}; charset=utf-8", body)}) as daemon:
        said = by_its_own_node(tmp_path, daemon.url)
    assert (said.code, ("fan: loud" if code else "fit") in said.err) == (code, True), said
