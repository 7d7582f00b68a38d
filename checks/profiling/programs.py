"""
Which compiled programs (NEFF) belong to a check, in a folder of the compile cache: those that it made when it compiled.

Unverified on hardware: that all programs of a check lie in this folder, and that the largest is the one that is timed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from checks.json_text import parse_json

PROGRAMS = "programs.json"
_MAX_BYTES = 1 << 20
_MAX_PROGRAMS = 64  # of a check
_MAX_FILES = 10_000


def programs_in(folder: Path) -> frozenset[str]:
    """All programs below the folder, by their paths in it."""
    found: list[str] = []
    for place, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(place, name), folder) for name in names if name.endswith(".neff")]
        if len(found) > _MAX_FILES:
            break
    return frozenset(found)


def remember(folder: Path, entry: str, programs: Collection[str]) -> None:
    """Note the programs of an entry of the manifest; where that cannot be written, its check has no profile."""
    known = {**_known(folder), entry: sorted(programs)[:_MAX_PROGRAMS]}
    path = folder / f"{PROGRAMS}.{os.getpid()}"
    with suppress(OSError):
        path.write_text(json.dumps(known), encoding="utf-8")
        os.replace(path, folder / PROGRAMS)


def programs_of(folder: Path, entry: str) -> list[Path]:
    """The programs of an entry that are still there, the largest first."""
    sizes: dict[Path, int] = {}
    for name in _known(folder).get(entry, ()):
        path = folder / name
        with suppress(OSError):
            if folder.resolve() in path.resolve().parents:
                sizes[path] = path.stat().st_size
    return sorted(sizes, key=lambda path: (-sizes[path], path))


def _known(folder: Path) -> dict[str, list[str]]:
    try:
        with open(folder / PROGRAMS, encoding="utf-8") as file:
            said = parse_json(file.read(_MAX_BYTES))
        return {str(entry): [str(name) for name in names] for entry, names in said.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
