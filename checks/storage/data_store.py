"""The `data_store` check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Evidence, Finding, check
from checks.storage.child import run_and_judge

READINGS = {
    "data_sequential_bytes_per_second": ("read in order at", "StoreSlow"),
    "data_random_bytes_per_second": ("read at random places at", "StoreSlow"),
    "data_random_read_seconds": ("one read at a random place", "StoreSlow"),
}


@dataclass(frozen=True)
class Params:
    """Which data sets, as whom, how much, and for how long."""

    paths: tuple[str, ...] = ()  # directories or URLs of data sets
    user: str = ""  # name or number of the user that jobs run as; empty: the daemon's own
    file_systems: tuple[str, ...] = ()  # kinds that the paths must be on, such as lustre or nfs4; empty: any
    size_bytes: int = 128 << 20  # read in order, at most
    random_reads: int = 128
    random_bytes: int = 128 << 10  # a sample of images or a few thousand tokens
    seconds: float = 7.5  # for each path, all at once; then the process is killed


@check(tier="quick", interval_seconds=3600, timeout_seconds=30)
def data_store(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    A job can read its data: files are there, and are read in order and at random places; nothing is decoded.

    Reads:   files of `paths` by a child process as `user`, others in each run; URLs by fsspec.
    Judges:  fail StoreMissing (no file, or empty ones alone), StoreNoPermission, StoreStale, StoreNotMounted,
             StoreHangs, StoreError | fail StoreSlow (limits `data_sequential_bytes_per_second`,
             `data_random_bytes_per_second`, `data_random_read_seconds`) | unknown MissingTool (no fsspec) |
             skip NotApplicable (no path is configured).
    Cost:    quick: under `seconds`; 144 MiB from the store. Writes nothing.
    Unverified: NFS, FSx for Lustre and S3 themselves, as checkpoint_store.
    """
    params = ctx.params
    orders = [
        {
            "kind": "read",
            "root": root,
            "user": params.user,
            "file_systems": params.file_systems,
            "size_bytes": params.size_bytes,
            "random_reads": params.random_reads,
            "random_bytes": params.random_bytes,
            "seconds": params.seconds / 3,
        }
        for root in params.paths
    ]
    yield from run_and_judge(ctx, orders, READINGS, seconds=params.seconds, nothing="paths")
