"""`healthd token`: the secret goes to one place, the lines that let it in to another."""

from __future__ import annotations

import hashlib
import stat
import subprocess
import sys
from pathlib import Path

from tests.cli.cli_kit import environment, healthd
from tests.patience import PATIENCE


def test_a_token_is_written_to_a_file_that_only_its_owner_reads_and_is_not_shown(tmp_path: Path) -> None:
    said = healthd(tmp_path, "token", "nodes", "--scope", "sync", "--write", str(tmp_path / "node.token"))
    secret = (tmp_path / "node.token").read_text(encoding="ascii").strip()
    assert (said.code, said.err) == (0, "")
    assert secret not in said.out
    assert hashlib.sha256(secret.encode()).hexdigest() in said.out
    assert stat.S_IMODE((tmp_path / "node.token").stat().st_mode) == 0o600


def test_a_token_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "node.token").write_text("in use")
    for file, why in (
        ("node.token", "exists and may be in use; name a new file"),
        ("none/node.token", "No such file or directory"),
    ):
        said = healthd(tmp_path, "token", "nodes", "--scope", "sync", "--write", str(tmp_path / file))
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert why in said.err
    assert (tmp_path / "node.token").read_text() == "in use"


def test_a_token_of_some_nodes_says_so_in_its_lines(tmp_path: Path) -> None:
    said = healthd(tmp_path, "token", "trn-a", "--scope", "sync", "--node", "trn-a-*", "--node", "head", "--json")
    assert 'nodes = ["trn-a-*", "head"]\n' in said.json["entry"]
    for options, why in (
        (("--scope", "admin", "--node", "n1"), "node names need the scopes sync or gate, not admin"),
        (("--node", "n1"), "not read"),
        (("--scope", "sync", "--node", "a b"), "'a b' is not a pattern of node names"),
    ):
        refused = healthd(tmp_path, "token", "trn-a", *options)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
        assert why in refused.err


def test_json_leaves_out_a_token_that_was_written(tmp_path: Path) -> None:
    said = healthd(tmp_path, "token", "ci", "--scope", "gate", "--write", str(tmp_path / "ci.token"), "--json")
    assert sorted(said.json) == ["entry"]


def test_a_token_that_cannot_be_written_leaves_no_empty_file(tmp_path: Path) -> None:
    """Else the next try, with room, is told that the file may be in use."""
    file = tmp_path / "ci.token"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 0; exec {sys.executable} -m healthd token ci --write {file}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "the token cannot be written: File too large" in done.stderr
    assert not file.exists()
