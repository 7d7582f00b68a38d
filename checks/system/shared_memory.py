"""/dev/shm: through which data loaders and collectives hand tensors around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Limit, Status, check
from checks.host import HostError
from checks.limits import within

SHM = "/dev/shm"


@dataclass(frozen=True)
class Params:
    """Bounds."""

    min_size_bytes: float = 256e6  # container engines give 64 MB, at which PyTorch data loaders die with a bus error
    min_available_ratio: float = 0.05


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def shared_memory(ctx: Context[Params]) -> Iterator[Finding]:
    """
    /dev/shm is there, large enough for a training job, and not full.

    Reads:   statvfs of /dev/shm.
    Judges:  fail SharedMemorySmall (missing, or full), warn SharedMemorySmall (small).
    Cost:    under 1 ms; harmless to jobs.
    """
    try:
        room = ctx.host.file_system(SHM)
    except HostError as error:
        if error.reason != "NoData":
            raise
        yield Finding(
            status=Status.FAIL,
            reason="SharedMemorySmall",
            message=f"{SHM} is missing; mount a tmpfs there",
            target=f"path:{SHM}",
        )
        return
    yield within(
        float(room.size_bytes),
        name="shared_memory_size_bytes",
        target=f"path:{SHM}",
        limit=ctx.limits.get("shared_memory_size_bytes")
        or Limit(lower=ctx.params.min_size_bytes, upper=None, origin="default"),
        reason="SharedMemorySmall",
        subject=f"{SHM} has",
        outside=Status.WARN,
    )
    yield within(
        room.available_bytes / room.size_bytes if room.size_bytes else None,
        name="shared_memory_available_ratio",
        target=f"path:{SHM}",
        limit=Limit(lower=ctx.params.min_available_ratio, upper=None, origin="default"),
        reason="SharedMemorySmall",
        subject=f"{SHM} available",
    )
