"""
Where tests put their files: in memory where that can be.

A test here writes hundreds or thousands of small files, and a disk takes ten times as long for each as memory does.
"""

from __future__ import annotations

import os
from pathlib import Path

MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 2 << 30


def memory_folder() -> Path | None:
    """
    A directory in memory; None where there is none to write to, with room, and where programs may be started.

    In containers it is often small and mounted noexec, and stand-in tools are programs.
    """
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return None
    fit = os.access(MEMORY, os.W_OK | os.X_OK) and not found.f_flag & os.ST_NOEXEC
    return MEMORY if fit and found.f_bavail * found.f_frsize >= ENOUGH_BYTES else None
