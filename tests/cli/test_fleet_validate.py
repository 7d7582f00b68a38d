"""`healthd fleet validate` while its aggregator is away for a moment, or for good."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading

import pytest

import healthd.cli.fleet.gates as fleet_commands
from checks.contract import Action, Blame, Status
from healthd.core import wire
from healthd.core.model import Reason, Verdict
from tests.core.client_kit import answer, decision, server
from tests.hooks.inside import run_inside

WORDS = ("fleet", "validate", "n1", "n2", "--json", "--aggregator")


def told(verdict: Verdict) -> bytes:
    found = {"id": "g-1", "job": "validation-1", "decision": decision(verdict), "validations": ()}
    return answer(wire.encode(found))


def test_a_lost_answer_is_asked_for_again() -> None:
    with server(told(Verdict.HOLD), b"", told(Verdict.ADMIT)) as url:
        said = run_inside(*WORDS, url)
    assert (said.code, said.json["decision"]["decision"]) == (0, "admit")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [(None, 0, "✓ PASSED"), (Status.FAIL, 1, "✗ FAILED"), (Status.UNKNOWN, 3, "? UNKNOWN")],
)
def test_it_says_what_was_validated_and_not_that_something_is_admitted(
    status: Status | None, code: int, said: str
) -> None:
    verdict = Verdict.ADMIT if status is None else Verdict.REJECT
    run = {"id": "v", "members": ("n1", "n2"), "checks": ("all_reduce", "all_gather"), "history": (), "done": ()}
    reasons = () if status is None else (reason(status),)
    made = dataclasses.replace(decision(verdict), reasons=reasons)
    found = {"id": "g-1", "job": "validation-1", "decision": made, "validations": (run,)}
    with server(answer(wire.encode(found))) as url:
        told = run_inside("fleet", "validate", "n1", "n2", "--aggregator", url)
    assert told.code == code
    assert told.out.startswith(f"{said}  2 nodes ran all_reduce, all_gather together: n1, n2  ")
    assert "ADMIT" not in told.out
    assert "REJECT" not in told.out


def reason(status: Status) -> Reason:
    return Reason(
        code="CollectiveFault",
        message="n2 fails in collectives",
        status=status,
        blame=Blame.NODE,
        action=Action.INSPECT,
        node="n2",
        target=None,
        check=None,
    )


def test_where_to_look_is_told_when_nobody_answers_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_commands, "AWAY_SECONDS", 0.0)
    with server(told(Verdict.HOLD), b"") as url:
        said = run_inside(*WORDS, url)
    assert (said.code, said.out) == (3, "")
    assert "cannot be reached" in said.err
    assert "'healthd fleet explain g-1' shows the result" in said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_stopped_is_withdrawn_so_that_its_nodes_are_free(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_commands, "AWAY_SECONDS", 0.0)
    asked = []
    held: list[socket.socket] = []

    def stop(connection: socket.socket) -> None:
        held.append(connection.dup())  # the question stays open: a process that ends gives it up, and this one stays
        os.kill(os.getpid(), number)

    def withdrawn(connection: socket.socket) -> None:
        asked.append("DELETE")
        connection.sendall(answer(b"null"))

    with server(told(Verdict.HOLD), stop, withdrawn) as url:
        said = run_inside(*WORDS, url)
        assert asked == ["DELETE"]
        held[0].shutdown(socket.SHUT_RDWR)
        held[0].close()
        for thread in threading.enumerate():
            if thread.name == "work":
                thread.join(30)
    assert (said.code, said.out) == (130, "")
    assert "healthd: withdrawn; its nodes are free again" in said.err
