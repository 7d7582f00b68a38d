"""/dev/shm: through which data loaders and collectives hand tensors around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Status, check
from checks.host.machine import HostError
from checks.limits import within
from checks.system.bounds import bound
from checks.system.mounts import judge_without_size, read_points

SHM = "/dev/shm"
TARGET = f"path:{SHM}"


@dataclass(frozen=True)
class Params:
    """Bounds."""

    min_size_bytes: float = 256e6  # container engines give 64 MB, at which PyTorch data loaders die with a bus error
    min_available_ratio: float = 0.05  # what is left over from jobs that died stays until somebody removes it


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def shared_memory(ctx: Context[Params]) -> Iterator[Finding]:
    """
    /dev/shm is there, large enough for a training job, and not full.

    Reads:   statvfs of /dev/shm; where that tells no size, its kind in /proc/self/mountinfo.
    Judges:  fail SharedMemorySmall (missing), warn SharedMemorySmall (small, or full) | unknown NoData (no size) | skip
             NotApplicable (memory without a limit of its own).
    Cost:    under 1 ms; harmless to jobs.
    """
    try:
        room = ctx.host.file_system(SHM)
    except HostError as error:
        if error.reason != "NoData" or ctx.host.exists(SHM):
            raise
        text = f"{SHM} is missing; mount a tmpfs there"
        yield Finding(status=Status.FAIL, reason="SharedMemorySmall", message=text, target=TARGET)
        return
    if not room.size_bytes:
        yield judge_without_size(SHM, read_points(ctx.host))
        return
    yield within(
        float(room.size_bytes),
        name="shared_memory_size_bytes",
        target=TARGET,
        limit=bound(ctx, "shared_memory_size_bytes", TARGET, lower="min_size_bytes"),
        reason="SharedMemorySmall",
        subject=f"{SHM} has",
        outside=Status.WARN,
    )
    yield within(
        room.available_bytes / room.size_bytes,
        name="shared_memory_available_ratio",
        target=TARGET,
        limit=bound(ctx, "shared_memory_available_ratio", TARGET, lower="min_available_ratio"),
        reason="SharedMemorySmall",
        subject=f"{SHM} available",
        outside=Status.WARN,
    )
