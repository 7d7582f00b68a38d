"""The run directory: where it is by default, and whether it may be used; only commands that use it look."""

from __future__ import annotations

import os
from pathlib import Path

from healthd.core.errors import ConfigError


def default_run_dir() -> Path:
    """Root's is the system's; another user's is their own."""
    if os.geteuid() == 0:
        return Path("/run/healthd")
    import tempfile

    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "healthd" if base else Path(tempfile.gettempdir()) / f"healthd-{os.geteuid()}"


def check_run_dir(folder: Path) -> None:
    """ConfigError where it is the default one, of which everybody knows the name, and somebody else has made it."""
    if os.geteuid() == 0 or folder != default_run_dir().absolute():
        return  # in /run root alone makes directories, for whomever
    try:
        status = folder.lstat()
    except OSError:
        return  # who makes it says what is wrong
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{folder}: another user has made it; name a directory of yours with --run-dir")
