"""Older Pythons, which the interpreters of jobs still are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def find_python(version: str) -> str | None:
    """A Python of this version that starts; a shim of a version manager may be on PATH and not."""
    places = [
        *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")),
        shutil.which(f"python{version}"),
    ]
    for place in places:
        if place is None:
            continue
        done = subprocess.run([str(place), "-V"], capture_output=True, text=True, timeout=20, check=False)
        if done.returncode == 0 and version in done.stdout:
            return str(place)
    return None
