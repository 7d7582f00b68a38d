"""The `healthd` command as a process, as people and hooks run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be JSON and nothing else."""
        return json.loads(self.out)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """A person's environment without settings of ours, its state and sockets in a folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEALTHD_", "COLUMNS", "NO_"))}
    own = {"HEALTHD_NODE_RUN_DIR": str(folder / "run"), "HEALTHD_NODE_STATE_DIR": str(folder / "state")}
    return {**kept, **own, **more}


def healthd(folder: Path, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 40.0) -> Said:
    """Run to the end. Whatever goes wrong, nobody is shown a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "healthd", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        check=False,
        env=environment(folder, **(env or {})),
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "internal error" not in done.stderr, done.stderr
    return Said(done.returncode, done.stdout, done.stderr)
