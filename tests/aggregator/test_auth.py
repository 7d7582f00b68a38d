"""Tokens, scopes and what may listen where."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from healthd.aggregator.identity.tokens import (
    EVERYONE,
    AuthError,
    Caller,
    Guard,
    Scope,
    check_exposure,
    is_loopback,
    key_hash,
    new_token,
    read_tokens,
)
from healthd.core.errors import ConfigError
from healthd.core.workload import Pod


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_new_token_opens_what_its_scopes_say_and_nothing_else(tmp_path: Path) -> None:
    token, lines = new_token("hooks", [Scope.GATE])
    assert token not in lines
    guard = Guard(write(tmp_path / "tokens", lines))
    assert guard.require(f"Bearer {token}", Scope.GATE).name == "hooks"
    assert guard.require(f"bearer  {token} ", Scope.READ).name == "hooks"
    with pytest.raises(AuthError, match="lacks scope 'admin'") as refused:
        guard.require(f"Bearer {token}", Scope.ADMIN)
    assert refused.value.status == 403
    with pytest.raises(AuthError) as refused:
        guard.require(f"Bearer {token}", Scope.SYNC)
    assert refused.value.status == 403


def test_a_token_of_some_nodes_speaks_for_names_that_match_a_pattern_whole(tmp_path: Path) -> None:
    token, lines = new_token("trn-a", [Scope.SYNC, Scope.GATE], ["trn-a-*", "head?"])
    caller = Guard(write(tmp_path / "tokens", lines)).require(f"Bearer {token}", Scope.SYNC)
    assert [name for name in ("trn-a-1", "trn-a-", "head1") if not caller.speaks_for(name)] == []
    assert [name for name in ("trn-b-1", "x-trn-a-1", "Trn-a-1", "head", "head12", "") if caller.speaks_for(name)] == []
    caller.check_speaks_for(["trn-a-1", "head1"])
    with pytest.raises(AuthError, match="token 'trn-a' may not act for node 'trn-b-1', only for trn-a") as refused:
        caller.check_speaks_for(["trn-a-1", "trn-b-1"])
    assert refused.value.status == 403


def test_whose_leases_a_later_attempt_ends() -> None:
    gate = frozenset({Scope.GATE, Scope.READ})
    some = Caller(name="t", scopes=gate, nodes=("trn-a-*",))
    pod = Caller(name="train/default", scopes=gate, nodes=("n1",), pod=Pod(namespace="train", name="x-0", uid="u1"))
    assert all(EVERYONE.may_end(node, workload) for node in "ab" for workload in (None, "pod:train/y/u2", "slurm:7"))
    assert [some.may_end(node, "slurm:7") for node in ("trn-a-1", "trn-b-1")] == [True, False]
    own = (None, "pid:7@9", "pod:train/x-0", "pod:train/x-0/u1")
    others = ("pod:train/x-0/u2", "pod:train/x-1/u1", "pod:eval/x-0/u1")
    assert [pod.may_end("n1", workload) for workload in (*own, *others)] == [True] * 4 + [False] * 3
    assert not any(pod.may_end("n2", workload) for workload in (*own, *others))


def test_whose_open_gates_a_later_attempt_closes() -> None:
    gate = frozenset({Scope.GATE, Scope.READ})
    some = Caller(name="t", scopes=gate, nodes=("trn-a-*",))
    pod = Caller(name="train/default", scopes=gate, nodes=("n1",), pod=Pod(namespace="train", name="x-0", uid="u1"))
    for node, closed_by_some in (("trn-a-1", True), ("trn-b-1", False), (None, False)):
        assert (EVERYONE.may_close(node), some.may_close(node), pod.may_close(node)) == (True, closed_by_some, True)


def test_a_pattern_with_as_many_wildcards_as_are_allowed_is_quick_against_the_worst_name(tmp_path: Path) -> None:
    token, lines = new_token("a", [Scope.SYNC], ["*a" * 8])
    caller = Guard(write(tmp_path / "tokens", lines)).require(f"Bearer {token}", Scope.SYNC)
    began = time.process_time()
    assert not caller.speaks_for("a" * 252 + "b")
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong-token-wrong", "Bearer \udcff"]
)
def test_who_cannot_say_who_it_is_gets_401(tmp_path: Path, header: str | None) -> None:
    _, lines = new_token("hooks", [Scope.GATE])
    with pytest.raises(AuthError) as refused:
        Guard(write(tmp_path / "tokens", lines)).identify(header)
    assert refused.value.status == 401


def test_admin_may_do_everything_and_no_file_means_open(tmp_path: Path) -> None:
    token, lines = new_token("root", [Scope.ADMIN])
    guard = Guard(write(tmp_path / "tokens", lines))
    for scope in Scope:
        guard.require(f"Bearer {token}", scope)
        Guard(None).require(None, scope)
    assert Guard(None).open
    assert not guard.open


def test_a_changed_file_is_read_again_and_a_broken_one_locks_nobody_out(tmp_path: Path) -> None:
    clock = Clock()
    old, lines = new_token("a", [Scope.READ])
    file = write(tmp_path / "tokens", lines)
    guard = Guard(file, clock=clock)
    new, lines = new_token("b", [Scope.READ])
    write(file, lines)
    clock.now += 2
    assert guard.identify(f"Bearer {new}").name == "b"
    with pytest.raises(AuthError):
        guard.identify(f"Bearer {old}")
    for breakage in ("[[token", "", '[[token]]\nname = "x"\n'):
        write(file, breakage)
        clock.now += 2
        assert guard.identify(f"Bearer {new}").name == "b"
    file.unlink()
    clock.now += 2
    assert guard.identify(f"Bearer {new}").name == "b"


def test_tokens_in_clear_work_when_nobody_else_can_read_them(tmp_path: Path) -> None:
    text = '[[token]]\nname = "a"\nscopes = ["read"]\ntoken = "sixteen-chars-at-least"\n'
    file = write(tmp_path / "tokens", text, 0o640)
    assert Guard(file).identify("Bearer sixteen-chars-at-least").scopes == {Scope.READ}
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="everyone can read it; run: chmod"):
        read_tokens(file)


HASH = "a" * 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains 0 tokens"),
        ("x = 1", "must contain only tables"),
        ("token = 3", "must contain only tables"),
        ('[[token]]\nname = "a b"\nscopes = ["read"]', "needs a 'name'"),
        ('[[token]]\nname = "a"\nscopes = []', "'scopes' must be"),
        ('[[token]]\nname = "a"\nscopes = ["root"]', "'scopes' must be"),
        ('[[token]]\nname = "a"\nscopes = ["read"]', "either 'sha256' or 'token'"),
        ('[[token]]\nname = "a"\nscopes = ["read"]\ntoken = "short"', "at least 16"),
        ('[[token]]\nname = "a"\nscopes = ["read"]\nsha256 = "ABC"', "64 lower-case hexadecimal"),
        ('[[token]]\nname = "a"\nscopes = ["read"]\nsha265 = "x"', "unknown key 'sha265'"),
        (f'[[token]]\nname = "a"\nscopes = ["read"]\nsha256 = "{HASH}"\n' * 2, "used twice"),
        (f'[[token]]\nname = "a"\nscopes = ["sync"]\nsha256 = "{HASH}"\nnodes = "n1"', "'nodes' must be a list"),
        (f'[[token]]\nname = "a"\nscopes = ["sync"]\nsha256 = "{HASH}"\nnodes = []', "has 0 node patterns"),
        (f'[[token]]\nname = "a"\nscopes = ["sync"]\nsha256 = "{HASH}"\nnodes = {["n"] * 33}', "1 to 32"),
        (f'[[token]]\nname = "a"\nscopes = ["sync"]\nsha256 = "{HASH}"\nnodes = ["n[12]"]', "not a pattern"),
        (f'[[token]]\nname = "a"\nscopes = ["sync"]\nsha256 = "{HASH}"\nnodes = ["{"*" * 9}"]', "at most 8"),
        (f'[[token]]\nname = "a"\nscopes = ["read"]\nsha256 = "{HASH}"\nnodes = ["n*"]', "not read"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "tokens", text)
    with pytest.raises(ConfigError, match=message) as error:
        Guard(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_others_may_write_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    _, lines = new_token("a", [Scope.READ])
    file = write(tmp_path / "tokens", lines, 0o666)
    with pytest.raises(ConfigError, match="chmod go-w"):
        Guard(file)
    with pytest.raises(ConfigError, match="no such token table"):
        Guard(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be used as a token table: larger than 1 MiB"):
        Guard(Path("/dev/zero"))
    os.chmod(file, 0o644)  # hashes alone may be read by all
    assert read_tokens(file)


def test_beyond_loopback_needs_tls_and_tokens_or_a_clear_word() -> None:
    check_exposure(hosts=["127.0.0.1", "::1", "localhost"], tokens=False, tls=False, insecure=False)
    check_exposure(hosts=["0.0.0.0"], tokens=True, tls=True, insecure=False)
    check_exposure(hosts=["0.0.0.0"], tokens=False, tls=False, insecure=True)
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "node-1"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="tls_cert and tls_key"):
            check_exposure(hosts=["127.0.0.1", host], tokens=True, tls=False, insecure=False)
        with pytest.raises(ConfigError, match="token_table"):
            check_exposure(hosts=[host], tokens=False, tls=True, insecure=False)


def test_names_and_scopes_of_new_tokens_are_checked() -> None:
    with pytest.raises(ConfigError, match="is not a token name"):
        new_token('a"\n', [Scope.READ])
    with pytest.raises(ConfigError, match="at least one scope"):
        new_token("a", [])
    assert key_hash("x") == key_hash("x") != key_hash("y")
