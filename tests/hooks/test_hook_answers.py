"""Hooks against an aggregator that is there and says no yes, and against daemons that are none."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from healthd.core.model import Verdict
from healthd.node import daemon
from tests.aggregator.service import free_port
from tests.cli.cli_kit import Said
from tests.every import every
from tests.hooks.hook_answers_kit import Answer, admission, serving
from tests.hooks.inside import run_inside
from tests.patience import PATIENCE


@pytest.mark.parametrize("rule", ["hold", "admit", "local"])
def test_a_group_whose_start_is_never_confirmed_starts_nobody_whatever_is_to_be_done_when_nobody_answers(
    rule: str,
) -> None:
    """The aggregator lives and says that one member did not confirm: who started now would start alone."""
    not_all = json.dumps({"go": False, "missing": ["n1"], "all_told": False, "over": True}).encode()
    words = {"/handshake": (200, "application/json", not_all)}
    with serving({**words, "/v1/gates": (200, "application/json", admission("n0", "n1"))}) as aggregator:
        who = ("--join", "train", "--size", "2", "--rank", "0", "--node", "n0", "--on-unreachable", rule)
        said = run_inside("gate", "--aggregator", aggregator.url, *who)
    assert said.code == 75, said
    assert "not all members confirmed the start in 3 rounds; its group is informed" in said.err
    assert "on_unreachable" not in said.err
    assert sum(one.startswith("DELETE /v1/gates/g-1/members/") for one in aggregator.asked) >= 3


POOL = ("--pool", "p", "--count", "2")
NAMED = ("--node", "n0", "--node", "n1")
GROUP = ("--join", "g", "--size", "2", "--rank", "0", "--node", "n0")


@every(
    ("arguments", "named", "why"),
    [
        (NAMED, (), "lists no node"),
        (NAMED, ("n0", "n7"), "lists n7, which was not requested"),
        (NAMED, ("n0",), "lists 1 nodes although 2 were requested"),
        (NAMED, ("n0", "n0"), "lists n0 twice"),
        ((*NAMED, "--min-nodes", "1"), (), "lists no node"),
        (POOL, (), "lists no node"),
        (POOL, ("n4",), "lists 1 nodes although 2 were requested"),
        (POOL, ("n4", "n5", "n6"), "lists 3 nodes although 2 were requested"),
        (GROUP, (), "lists no node"),
        (GROUP, ("n0", "n1", "n2"), "lists 3 nodes although 2 were requested"),
    ],
)
def test_an_admission_of_no_or_other_nodes_than_asked_is_none_and_is_taken_back(
    arguments: tuple[str, ...], named: tuple[str, ...], why: str
) -> None:
    given_back = json.dumps({"decision": None, "released": [{"node": node} for node in named]}).encode()
    listed = json.dumps({"gates": [{"id": "g-1", "attempt": 0}]}).encode()

    def answer(method: str) -> Answer:
        return (200, "application/json", admission(*named) if method == "POST" else listed)

    with serving({"/v1/gates": answer, "/v1/gates/lease": (200, "application/json", given_back)}) as aggregator:
        job = () if arguments is GROUP else ("--job", "j")
        said = run_inside("gate", "--aggregator", aggregator.url, *job, *arguments, "--on-unreachable", "admit")
    assert said.code == 75, said
    assert why in said.err
    if arguments is GROUP:  # the gate is the group's: a member leaves it
        assert any(one.startswith("DELETE /v1/gates/g-1/members/") for one in aggregator.asked), aggregator.asked
    else:
        assert "DELETE /v1/gates/lease?job=j&attempt=0" in aggregator.asked
        assert "its gate is withdrawn" in said.err


@pytest.mark.parametrize(("arguments", "named"), [(NAMED, ("n1", "n0")), (POOL, ("n4", "n5"))])
def test_an_admission_of_the_nodes_that_were_asked_for_is_one(
    arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    with serving({"/v1/gates": (200, "application/json", admission(*named))}) as aggregator:
        assert run_inside("gate", "--aggregator", aggregator.url, "--job", "j", *arguments).code == 0


def test_a_member_that_cannot_write_its_hosts_keeps_the_others_from_starting_without_it() -> None:
    """Found before it confirms the start: once it has, the others go."""
    with serving({"/v1/gates": (200, "application/json", admission("n0", "n1"))}) as aggregator:
        said = run_inside("gate", "--aggregator", aggregator.url, *GROUP, "--hostfile-out", "/dev/full")
    assert (said.code, "cannot write the host file" in said.err) == (75, True), said
    assert not any("handshake" in one for one in aggregator.asked)
    assert any(one.startswith("DELETE /v1/gates/g-1/members/") for one in aggregator.asked)


def test_a_member_whose_decision_cannot_be_told_gives_its_node_back() -> None:
    go = json.dumps({"go": True, "missing": [], "all_told": False, "over": False}).encode()
    words = {"/handshake": (200, "application/json", go)}
    with serving({**words, "/v1/gates": (200, "application/json", admission("n0", "n1"))}) as aggregator:
        said = run_inside("gate", "--aggregator", aggregator.url, *GROUP, "--json", out="/dev/full")
    assert (said.code, "cannot be written" in said.err) == (75, True), said
    assert not any("handshake" in one for one in aggregator.asked), "once it has confirmed, the others go"
    assert any(one.startswith("DELETE /v1/gates/g-1/members/") for one in aggregator.asked)


def test_a_signal_that_comes_with_the_answer_ends_a_hook_that_executes(tmp_path: Path) -> None:
    """Its node's daemon, which runs in the same process, must not take the signal for its own."""

    def answer(_: str) -> Answer:
        if not any("/sync" in one for one in aggregator.asked):
            time.sleep(0.05)
            return 200, "application/json", admission(verdict=Verdict.HOLD)
        os.kill(os.getpid(), signal.SIGTERM)
        return 200, "application/json", admission("n0")

    words = {"/v1/gates": answer, "/sync": (404, "application/json", b"{}")}
    (tmp_path / "hook.toml").write_text('[node]\nchecks = ["memory_free"]\n')
    with serving(words) as aggregator:
        who = ("--join", "g", "--size", "1", "--rank", "0", "--node", "n0", "--execute")
        where = ("--config", str(tmp_path / "hook.toml"), "--run-dir", str(tmp_path), "--aggregator", aggregator.url)
        said = run_inside("gate", *who, *where)
    assert (said.code, "stopped by SIGTERM; its group is informed" in said.err) == (75, True), said
    assert any(one.startswith("DELETE /v1/gates/g-1/members/") for one in aggregator.asked)


def test_a_member_that_is_stopped_leaves_before_its_checks_end_and_asks_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher gives it seconds, which the end of a check may take; and who asked again would be a member again."""
    left_first: list[bool] = []

    async def run_node(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left_first.append(aggregator.asked[-1].startswith("DELETE /v1/gates/g-1/members/"))

    def answer(_: str) -> Answer:
        if len(aggregator.asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return 200, "application/json", admission(verdict=Verdict.HOLD)

    monkeypatch.setattr(daemon, "run_node", run_node)
    with serving({"/v1/gates": answer}) as aggregator:
        who = ("--join", "g", "--size", "1", "--rank", "0", "--node", "n0", "--execute")
        said = run_inside("gate", *who, "--run-dir", str(tmp_path), "--aggregator", aggregator.url)
        for thread in threading.enumerate():
            if thread.name == "line to the aggregator":
                thread.join(20 * PATIENCE)
    assert (said.code, "stopped by SIGTERM; its group is informed" in said.err) == (75, True), said
    assert left_first == [True]
    assert aggregator.asked[-1].startswith("DELETE /v1/gates/g-1/members/")


def by_its_own_node(folder: Path, url: str) -> Said:
    away = ("--aggregator", f"http://127.0.0.1:{free_port()}", "--wait", "0s", "--on-unreachable", "local")
    (folder / "hook.toml").write_text(f'[gate]\nlocal_url = "{url}"\n')
    return run_inside("gate", "--job", "j", "--node", "n1", *away, "--config", str(folder / "hook.toml"))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>welcome</html>"),
        (200, b'{"status": "pass", "serviceId": "n1"}'),
        (200, b"n1 is not ready\n"),
        (200, b"ready"),
        (200, b""),
        (404, b"n1 is ready\n"),
        (503, b"upstream is away"),
        (400, b"unknown query parameter 'node'"),
        (200, b"n1 is ready\n" * 10_000),
    ],
)
def test_what_is_not_the_answer_of_a_daemon_of_ours_is_no_fit_node(tmp_path: Path, status: int, body: bytes) -> None:
    with serving({"/readyz": (status, "text/plain", body)}) as other:
        said = by_its_own_node(tmp_path, other.url)
    assert said.code == 75, said
    assert "set gate.local_url to the daemon of this node" in said.err


@pytest.mark.parametrize(("status", "word", "code"), [(200, "", 0), (503, "not ", 75)])
def test_this_nodes_own_daemon_is_believed(tmp_path: Path, status: int, word: str, code: int) -> None:
    body = f"{'fan: loud' if code else ''}\nn1 is {word}ready\n".encode()
    with serving({"/readyz": (status, "text/plain; charset=utf-8", body)}) as daemon:
        said = by_its_own_node(tmp_path, daemon.url)
    assert (said.code, "fan: loud" in said.err) == (code, code != 0), said
