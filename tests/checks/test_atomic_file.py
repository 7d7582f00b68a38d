"""A file is written in one step."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from checks.atomic_file import write_atomically


@pytest.mark.parametrize("several_writers", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_the_new_content_takes_the_place_of_the_old_and_nothing_else_is_left(
    tmp_path: Path, durable: bool, several_writers: bool
) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(b"old")
    with file.open("rb") as reader:
        write_atomically(file, b"new", durable=durable, several_writers=several_writers)
        assert reader.read() == b"old"  # who has it open keeps what it began to read
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(b"old")
    (tmp_path / ".state.json.new").mkdir()
    with pytest.raises(OSError, match=r"state\.json\.new"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"


def test_a_file_that_cannot_be_put_in_place_is_removed(tmp_path: Path) -> None:
    (tmp_path / "state.json" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"state\.json"):
        write_atomically(tmp_path / "state.json", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


def test_the_mode_is_the_wanted_one_whatever_the_umask_and_a_crash_have_left(tmp_path: Path) -> None:
    file, left = tmp_path / "key", tmp_path / ".key.new"
    left.write_bytes(b"")
    left.chmod(0o666)
    write_atomically(file, b"secret", mode=0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = os.umask(0o077)
    try:
        write_atomically(file, b"open", mode=0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_link_in_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"not ours")
    (tmp_path / ".state.json.new").symlink_to(other)
    write_atomically(tmp_path / "state.json", b"new")
    assert other.read_bytes() == b"not ours"
    assert not (tmp_path / "state.json").is_symlink()
