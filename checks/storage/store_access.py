"""The `store_access` check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Evidence, Finding, check
from checks.storage.child import run_and_judge

READINGS = {
    "store_answer_seconds": ("answers in", "StoreSlow"),
    "store_available_bytes": ("available", "StoreNoSpace"),
    "store_available_inodes_ratio": ("inodes available", "StoreNoInodes"),
}


@dataclass(frozen=True)
class Params:
    """Which directories, as whom, and bounds."""

    readable: tuple[str, ...] = ()  # directories that jobs read
    writable: tuple[str, ...] = ()  # directories that jobs save to
    user: str = ""  # name or number of the user that jobs run as; empty: the daemon's own
    file_systems: tuple[str, ...] = ()  # kinds that they must be on, such as lustre or nfs4; empty: any
    needed_bytes: float | None = None  # what one save takes; None: room is not judged
    seconds: float = 3.0  # for all of them at once; then the process is killed


@check(tier="passive", interval_seconds=60, timeout_seconds=15)
def store_access(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    The file systems that jobs read and save to are mounted, answer, and may be used; also while a job runs.

    Reads:   table of mounts, statvfs, the first entry of the directory, by a child process as `user`. No file is
             opened, nothing is written. A process that hangs in a store is killed; while the kernel holds it, no other
             is started there.
    Judges:  fail StoreHangs, StoreStale, StoreNotMounted, StoreReadOnly, StoreNoPermission, StoreMissing | fail
             StoreNoSpace, StoreNoInodes (none is left, or less than the limits `store_available_bytes` and
             `store_available_inodes_ratio`), StoreSlow (limit `store_answer_seconds`) | unknown CheckError (a
             URL is given, or the daemon may not act as `user`) | skip NotApplicable (no directory is configured).
    Cost:    a tenth of a second of one processor; harmless to jobs.
    """
    params = ctx.params
    common = {"kind": "look", "user": params.user, "file_systems": params.file_systems}
    orders = [{**common, "root": root, "writable": True} for root in params.writable]
    orders += [{**common, "root": root, "writable": False} for root in params.readable if root not in params.writable]
    bounds = {"store_available_bytes": params.needed_bytes}
    yield from run_and_judge(ctx, orders, READINGS, seconds=params.seconds, lower=bounds, nothing="directories")
