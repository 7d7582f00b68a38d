"""Walking a tree of files within bounds. Only `checks.host.machine` calls this."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection

_MAX_ENTRIES = 4096  # of one directory


def walk(top: str, *, skip: Collection[str], max_depth: int, max_folders: int) -> list[str]:
    """What `Host.walk` says, below a real path."""
    found: list[str] = []
    waiting = [""]
    for _ in range(max_folders):
        if not waiting:
            break
        below: list[str] = []
        folder = waiting.pop(0)
        try:
            with os.scandir(os.path.join(top, folder)) as entries:
                for entry in itertools.islice(entries, _MAX_ENTRIES):
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if not entry.is_dir(follow_symlinks=False):
                        found.append(path)
                    elif entry.name not in skip and path.count("/") < max_depth:
                        below.append(path)
        except OSError:
            continue
        waiting += sorted(below)
    return sorted(found, key=lambda path: (path.count("/"), path))
