"""What an error of a store means: a reason code and a sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

_BY_ERRNO: Mapping[int, tuple[str, str]] = {
    errno.ENOSPC: ("StoreNoSpace", "no space is left"),
    errno.EDQUOT: ("StoreQuota", "the quota of the user, group or project is used up"),
    errno.EROFS: ("StoreReadOnly", "it is mounted read-only"),
    errno.EACCES: ("StoreNoPermission", "permission denied"),
    errno.EPERM: ("StoreNoPermission", "operation not permitted"),
    errno.ESTALE: ("StoreStale", "stale file handle: the server no longer knows what this node has mounted"),
    errno.ENOTCONN: ("StoreStale", "the program that serves this mount is gone"),
    errno.ENOENT: ("StoreMissing", "it is not there"),
    errno.ENOTDIR: ("StoreMissing", "it is no directory"),
}


class StoreFault(Exception):
    """A fault of a store that has been told apart: `reason` is a code of `checks.reasons`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def explain(error: Exception, step: str, root: str) -> tuple[str, str]:
    """The reason and one sentence for what a step on the store at `root` raised."""
    if isinstance(error, StoreFault):
        return error.reason, str(error)
    if isinstance(error, ImportError):
        return "MissingTool", f"{error}; install the object-store extra of healthd where the probes run"
    number = error.errno if isinstance(error, OSError) else None
    if number is None and isinstance(error, PermissionError):
        number = errno.EACCES
    if number is None and isinstance(error, FileNotFoundError):
        number = errno.ENOENT
    if number == errno.ENOSPC and _has_no_inodes(root):
        return "StoreNoInodes", f"{step}: no inodes are left, although there is space: too many files"
    if number is not None and number in _BY_ERRNO:
        reason, text = _BY_ERRNO[number]
        return reason, f"{step}: {text}"
    said = " ".join(str(error).split())[:300]
    return "StoreError", f"{step}: {type(error).__name__}: {said}"


def _has_no_inodes(root: str) -> bool:
    try:
        found = os.statvfs(root)
    except OSError:
        return False
    return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0
