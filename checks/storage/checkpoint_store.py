"""The `checkpoint_store` check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from checks.contract import Context, Evidence, Finding, check
from checks.storage.child import run_and_judge

READINGS = {
    "checkpoint_write_bytes_per_second": ("write and flush at", "StoreSlow"),
    "checkpoint_read_bytes_per_second": ("read back at", "StoreSlow"),
    "checkpoint_rename_seconds": ("rename in", "StoreSlow"),
    "checkpoint_available_bytes": ("available", "StoreNoSpace"),
    "checkpoint_peers_count": ("other nodes whose markers are complete here:", "StoreNotShared"),
    "checkpoint_size_bytes": ("the checkpoint is complete by its metadata:", "CheckpointTorn"),
    "checkpoint_load_bytes_per_second": ("loaded at", "StoreSlow"),
}


@dataclass(frozen=True)
class Params:
    """Where, as whom, how much, for how long; what other nodes must see; and what a job is to start from."""

    paths: tuple[str, ...] = ()  # directories, or URLs such as s3://bucket/prefix, where jobs save
    user: str = ""  # name or number of the user that jobs run as; empty: the daemon's own
    file_systems: tuple[str, ...] = ()  # kinds that the paths must be on, such as lustre or nfs4; empty: any
    size_bytes: int = 32 << 20  # of the file that is written
    needed_bytes: float | None = None  # what one save takes; None: room is not judged
    seconds: float = 7.5  # for each path and for the checkpoint, all at once; then the process is killed
    marker_seconds: float = 0.0  # how old a marker of another node may be; 0: no markers are written or read
    peers: tuple[
        str, ...
    ] = ()  # host names of nodes whose markers must be seen; empty: those that are there must be whole
    peers_wait_seconds: float = 2.0  # how long to wait for them
    checkpoint: str = ""  # directory or URL of the checkpoint to start from; empty: none
    load_bytes: int = 64 << 20  # how much of one file of it is loaded


@check(tier="quick", interval_seconds=3600, timeout_seconds=30)
def checkpoint_store(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    A job can save here and start from its checkpoint: written, flushed, renamed, listed, read back, compared, deleted.

    Reads:   the directories or URLs of `paths` by a child process as `user`, URLs by fsspec; of `checkpoint` the
             metadata, the sizes of all files, and one file of it by torch.distributed.checkpoint.
    Writes:  one file of `size_bytes` a path, in a folder of its own, removed whatever happens. Where `marker_seconds`
             is set, one file of 64 KiB a node in `.healthd-markers`, which stays and is replaced by the next run.
    Judges:  fail StoreNoSpace, StoreQuota, StoreNoInodes, StoreReadOnly, StoreNoPermission, StoreStale,
             StoreNotMounted (neither of `file_systems`, or /etc/fstab mounts what is not mounted), StoreNotShared,
             StoreHangs (the process is killed), StoreSlow (limits `checkpoint_write_bytes_per_second`,
             `checkpoint_read_bytes_per_second`, `checkpoint_rename_seconds`, `checkpoint_load_bytes_per_second`),
             StoreMissing, StoreCorruption, StoreError | fail ShardEmpty, ShardShort, ShardMissing, ShardUnreadable,
             CheckpointTorn | unknown MissingTool (no fsspec, no torch), Timeout (the child did not get to the store) |
             skip NotApplicable (no path is configured).
    Cost:    quick: under `seconds`; 32 MiB to the store and back. Importing torch is two seconds of it, where a
             checkpoint is named.
    Source:  torch.distributed.checkpoint, filesystem.py: `.metadata` is written last and renamed; it names each file
             with offsets and lengths.
    Unverified: NFS, FSx for Lustre and S3 themselves: it has run on ext4, tmpfs, FUSE and moto's server. What is read
             back may come from the cache of a network file system, although pages are dropped first.
    """
    params = ctx.params
    common = {"user": params.user, "file_systems": params.file_systems}
    orders: list[dict[str, Any]] = [
        {
            **common,
            "kind": "write",
            "root": root,
            "node": ctx.host.host_name(),
            "size_bytes": params.size_bytes,
            "seconds": params.seconds,
            "marker_seconds": params.marker_seconds,
            "peers": params.peers,
            "wait_seconds": params.peers_wait_seconds,
        }
        for root in params.paths
    ]
    if params.checkpoint:
        orders.append(
            {
                "user": params.user,
                "kind": "checkpoint",
                "root": params.checkpoint,
                "all": False,
                "load_bytes": params.load_bytes,
            }
        )
    bounds = {"checkpoint_available_bytes": params.needed_bytes}
    yield from run_and_judge(ctx, orders, READINGS, seconds=params.seconds, lower=bounds, nothing="paths")
