"""The `healthd` command as a process, as people and hooks run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tests import prepared
from tests.patience import PATIENCE

Command: TypeAlias = "subprocess.Popen[str]"


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


def start(folder: Path, *arguments: str, env: Mapping[str, str] | None = None, executed: bool = False) -> Command:
    """Start it. `executed`: by an interpreter of its own, which takes its time to import everything."""
    popen = subprocess.Popen if executed else prepared.Popen
    return popen(
        [sys.executable, "-m", "healthd", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(folder, **(env or {})),
    )


def end(command: Command, *, timeout: float = 40.0) -> Said:
    """What it came to. Whatever goes wrong, nobody is shown a traceback."""
    with command:
        try:
            out, err = command.communicate(timeout=timeout * PATIENCE)
        except subprocess.TimeoutExpired:
            command.kill()
            raise
    assert "Traceback" not in err, err
    assert "internal error" not in err, err
    return Said(command.returncode, out, err)


def healthd(
    folder: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 40.0,
    executed: bool = False,
) -> Said:
    """Run to the end."""
    return end(start(folder, *arguments, env=env, executed=executed), timeout=timeout)
