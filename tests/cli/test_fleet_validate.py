"""`healthd fleet validate` while its aggregator is away for a moment, or for good."""

from __future__ import annotations

import os
import signal
import socket

import pytest

import healthd.cli.fleet.fleet as fleet_commands
from healthd.core import wire
from healthd.core.model import Verdict
from tests.core.test_client import answer, decision, server
from tests.hooks.inside import run_inside

WORDS = ("fleet", "validate", "n1", "n2", "--json", "--aggregator")


def told(verdict: Verdict) -> bytes:
    found = {"id": "g-1", "job": "validation-1", "decision": decision(verdict), "validations": ()}
    return answer(wire.encode(found))


def test_a_lost_answer_is_asked_for_again() -> None:
    with server(told(Verdict.HOLD), b"", told(Verdict.ADMIT)) as url:
        said = run_inside(*WORDS, url)
    assert (said.code, said.json["decision"]["decision"]) == (0, "admit")


def test_where_to_look_is_told_when_nobody_answers_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_commands, "AWAY_SECONDS", 0.0)
    with server(told(Verdict.HOLD), b"") as url:
        said = run_inside(*WORDS, url)
    assert (said.code, said.out) == (1, "")
    assert "cannot be reached" in said.err
    assert "'healthd fleet explain g-1' shows what came of it" in said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_stopped_is_withdrawn_so_that_its_nodes_are_free(number: signal.Signals) -> None:
    asked = []

    def stop(connection: socket.socket) -> None:
        os.kill(os.getpid(), number)
        connection.recv(1)  # the command gives this question up

    def withdrawn(connection: socket.socket) -> None:
        asked.append("DELETE")
        connection.sendall(answer(b"null"))

    with server(told(Verdict.HOLD), stop, withdrawn) as url:
        said = run_inside(*WORDS, url)
    assert (said.code, said.out, asked) == (130, "", ["DELETE"])
    assert "healthd: withdrawn; its nodes are free for others" in said.err
