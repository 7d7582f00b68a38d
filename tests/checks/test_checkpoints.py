"""The checkpoint that a job is to start from: saved by torch.distributed.checkpoint, then damaged."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.contract import Finding, Status
from checks.reasons import REASONS
from checks.storage.checkpoint_load import checkpoint_load
from checks.storage.checkpoint_store import checkpoint_store
from checks.stores.checkpoint import read_shards
from checks.stores.operations import StoreFault
from tests.checks.checkpoints_kit import SAVE


@pytest.fixture
def saved(tmp_path: Path, run_with_torch: Callable[..., subprocess.CompletedProcess[str]]) -> Path:
    """A checkpoint of several files."""
    done = run_with_torch(SAVE, str(tmp_path / "step-100"))
    assert done.returncode == 0, done.stderr
    return tmp_path / "step-100"


@pytest.fixture
def start(context: Callable[..., Any]) -> Callable[..., list[Finding]]:
    """What the checks say of a checkpoint; in quick, or in deep, with a reason of the catalogue."""

    def run(path: Path, *, deep: bool = False) -> list[Finding]:
        check = checkpoint_load if deep else checkpoint_store
        begun = time.monotonic()
        found = [one for one in check(context(check, checkpoint=str(path))) if isinstance(one, Finding)]
        assert deep or time.monotonic() - begun < 12
        assert all(one.reason in REASONS for one in found if one.status is not Status.PASS)
        return found

    return run


def bad(findings: list[Finding]) -> list[str | None]:
    return [one.reason for one in findings if one.status is not Status.PASS]


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"), key=lambda one: (one.stat().st_size, one.name))


def test_whole_checkpoint_loads_one_file_in_quick_and_all_in_deep(
    saved: Path, start: Callable[..., list[Finding]]
) -> None:
    count = len(shards(saved))
    assert count > 3
    before = {path.name: path.stat().st_mtime_ns for path in saved.iterdir()}
    quick, deep = start(saved), start(saved, deep=True)
    assert bad(quick) == bad(deep) == []
    assert f" of 1 of {count} files" in quick[-1].message
    assert f"11 tensors and objects of {count} of {count} files" in deep[-1].message
    assert {path.name: path.stat().st_mtime_ns for path in saved.iterdir()} == before


def test_zero_byte_short_and_missing_shards_are_named(saved: Path, start: Callable[..., list[Finding]]) -> None:
    empty, short, gone = shards(saved)[-3:]
    empty.write_bytes(b"")
    os.truncate(short, short.stat().st_size - 1)
    gone.unlink()
    findings = start(saved)
    told = {one.reason: one.message for one in findings if one.status is Status.FAIL}
    assert set(told) == {"ShardEmpty", "ShardShort", "ShardMissing"}
    assert empty.name in told["ShardEmpty"]
    assert short.name in told["ShardShort"]
    assert gone.name in told["ShardMissing"]


def test_torn_metadata_is_named(saved: Path, start: Callable[..., list[Finding]]) -> None:
    metadata = saved / ".metadata"
    content = metadata.read_bytes()
    for kept in (0, len(content) // 2, len(content) - 1):
        metadata.write_bytes(content[:kept])
        assert bad(start(saved)) == ["CheckpointTorn"]
    metadata.unlink()
    assert bad(start(saved)) == ["CheckpointTorn"]
    assert bad(start(saved / "nothing")) == ["StoreMissing"]


@pytest.mark.thorough
def test_damaged_bytes_are_found_in_deep_where_the_size_is_right(
    saved: Path, start: Callable[..., list[Finding]]
) -> None:
    last = shards(saved)[-1]
    last.write_bytes(b"\0" * last.stat().st_size)
    assert bad(start(saved)) == []  # quick loads the smallest file alone
    (finding,) = [one for one in start(saved, deep=True) if one.status is not Status.PASS]
    assert finding.reason == "ShardUnreadable"
    assert last.name in finding.message


class Evil:
    """What runs a program when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.thorough
def test_pickles_of_a_checkpoint_are_never_run(
    saved: Path, start: Callable[..., list[Finding]], tmp_path: Path
) -> None:
    proof = tmp_path / "ran"
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(proof)))
    assert bad(start(saved)) == ["CheckpointTorn"]
    assert bad(start(saved, deep=True)) == ["CheckpointTorn"]
    assert not proof.exists()


@given(st.binary(max_size=300))
def test_any_bytes_are_shards_or_torn(content: bytes) -> None:
    reason = None
    try:
        assert read_shards(content)
    except StoreFault as fault:
        reason = fault.reason
    assert reason in (None, "CheckpointTorn")


def test_metadata_that_passes_without_torch_and_names_a_function_is_refused_by_the_loader(
    saved: Path, start: Callable[..., list[Finding]], tmp_path: Path
) -> None:
    """The plain reader takes it, for it runs nothing; so the loader must refuse it by itself."""
    proof = tmp_path / "ran"
    content = (saved / ".metadata").read_bytes()
    assert content[:2] == b"\x80\x04"
    body = content[2:]
    if body[:1] == b"\x95":  # a frame: its length no longer fits
        body = body[9:]
    call = b"cos\nmkdir\n(X" + len(str(proof)).to_bytes(4, "little") + str(proof).encode() + b"tR0"
    (saved / ".metadata").write_bytes(b"\x80\x04" + call + body)
    findings = start(saved)
    assert bad(findings) == ["CheckpointTorn"]
    assert "os.mkdir" in next(one.message for one in findings if one.status is not Status.PASS)
    assert not proof.exists()
