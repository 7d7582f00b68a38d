"""What killed gate hooks leave in /tmp goes with the next one; what belongs to somebody stays."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from healthd.cli.hooks.join import LEFT_SECONDS, sweep


def folder(place: Path, name: str, *, age_seconds: float) -> Path:
    made = place / f"healthd-gate-{name}"
    (made / "1").mkdir(parents=True)
    (made / "1" / "state.json").write_text("{}")
    at = time.time() - age_seconds
    os.utime(made, (at, at))
    return made


def test_only_old_folders_that_no_hook_holds_are_removed(tmp_path: Path) -> None:
    left = folder(tmp_path, "left", age_seconds=LEFT_SECONDS + 60)
    starting = folder(tmp_path, "starting", age_seconds=LEFT_SECONDS - 60)
    held = folder(tmp_path, "held", age_seconds=LEFT_SECONDS + 60)
    elsewhere = folder(tmp_path / "other", "elsewhere", age_seconds=LEFT_SECONDS + 60)
    (tmp_path / "healthd-gate-link").symlink_to(elsewhere)
    (tmp_path / "healthd-gate-file").write_text("mine")
    lock = os.open(held, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        sweep(tmp_path)
        assert not left.exists()
        assert starting.exists()
        assert held.exists()
        assert (elsewhere / "1" / "state.json").exists()
        assert (tmp_path / "healthd-gate-file").exists()
    finally:
        os.close(lock)
    sweep(tmp_path)
    assert not held.exists(), "its hook has ended, however it did"


@pytest.mark.system(root=True)  # giving a folder to somebody else
def test_folder_of_another_user_stays(tmp_path: Path) -> None:
    theirs = folder(tmp_path, "theirs", age_seconds=LEFT_SECONDS + 60)
    os.chown(theirs, 65534, 65534)
    sweep(tmp_path)
    assert theirs.exists()
