"""Finds the parents, children and descendants of processes in /proc."""

from __future__ import annotations

import contextlib
import os


def parent_of(pid: int) -> int:
    """The parent of a process. Raises OSError, IndexError or ValueError where the process has ended."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def descendants(of: int) -> list[int]:
    """All processes below one. Parents are read once, so that the list describes one moment."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
                parents[int(name)] = parent_of(int(name))
    found = {of}
    size = 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {of})


def first_child(parent: int, known: int | None = None) -> int:
    """
    The oldest child of a process; the process itself where it has none.

    `known` is the result of an earlier call, which is looked up again only when that child is gone.
    """
    if known is not None and _is_child(known, parent):
        return known
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            children = [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, a sandbox, or the process is gone
        children = [pid for pid in descendants(parent) if _is_child(pid, parent)]
    return children[0] if children else parent


def _is_child(pid: int, parent: int) -> bool:
    try:
        return parent_of(pid) == parent
    except (OSError, IndexError, ValueError):  # it has ended
        return False
