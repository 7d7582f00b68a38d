"""Which process is the worker: what we start becomes its guard (`checks.host.guard`), and the worker is its child."""

from __future__ import annotations

from pathlib import Path

from checks.host.guard import descendants, parent_of


def find_worker(guard: int, known: int | None = None) -> int:
    """
    The pid of the worker under a guard; the guard's own where there is none (yet, or any more).

    `known` is what was found last: it is looked up again only when it is gone. The worker is the first child; orphans
    that the guard has taken in come after it.
    """
    if known is not None and _is_child(known, guard):
        return known
    try:
        children = [int(pid) for pid in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, a sandbox, or the guard is gone
        children = [pid for pid in descendants(guard) if _is_child(pid, guard)]
    return children[0] if children else guard


def _is_child(pid: int, parent: int) -> bool:
    try:
        return parent_of(pid) == parent
    except (OSError, IndexError, ValueError):  # it has ended
        return False
