"""The `checkpoint_load` check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Evidence, Finding, check
from checks.storage.checkpoint_store import READINGS
from checks.storage.child import run_and_judge


@dataclass(frozen=True)
class Params:
    """Which checkpoint, as whom, and for how long."""

    checkpoint: str = ""  # directory or URL of the checkpoint to start from; empty: none
    user: str = ""  # name or number of the user that jobs run as; empty: the daemon's own
    seconds: float = 570.0  # then the process is killed; raise `timeout` of this check with it


@check(tier="deep", interval_seconds=86400, timeout_seconds=600)
def checkpoint_load(ctx: Context[Params]) -> Iterator[Finding | Evidence]:
    """
    Every shard of the checkpoint that a job is to start from loads.

    Reads:   all of it, by torch.distributed.checkpoint in a child process as `user`, one chunk after the other. Pickles
             in it are not run: tensors are loaded with `weights_only`, objects are read and not made.
    Judges:  fail ShardEmpty, ShardShort, ShardMissing, ShardUnreadable, CheckpointTorn, and the reasons of the store as
             checkpoint_store has them | unknown MissingTool (no torch) | skip NotApplicable (no checkpoint is named).
    Cost:    deep: as long as reading it takes; memory for its largest chunk.
    """
    params = ctx.params
    order = {"user": params.user, "kind": "checkpoint", "root": params.checkpoint, "all": True, "load_bytes": 0}
    orders = [order] if params.checkpoint else []
    yield from run_and_judge(ctx, orders, READINGS, seconds=params.seconds, nothing="checkpoint")
