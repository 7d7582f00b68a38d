"""File systems: room, inodes, and whether they can be written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import Context, Finding, Limit, Status, check
from checks.limits import quantity, within

# Mounts that are read-only by nature, or are no disk.
_NO_DISK = frozenset(
    {"proc", "sysfs", "tmpfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "squashfs", "iso9660", "overlay"}
)


@dataclass(frozen=True)
class Params:
    """Which paths, and bounds."""

    paths: tuple[str, ...] = ("/", "/tmp", "/var")
    min_available_ratio: float = 0.02  # of the size; ext4 keeps 5 % for root, so 2 % left to others is close to the end
    min_available_bytes: float = 1e9  # a core dump or a compile cache must fit
    min_available_inodes_ratio: float = 0.02


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def disk_space(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The file systems that jobs write to have room and inodes left.

    Reads:   statvfs of the configured paths; a path that is not there is left out, unless none is.
    Judges:  fail DiskFull | unknown NoData.
    Cost:    under 1 ms; a network file system that hangs is cut off by the time limit.
    """
    seen = 0
    for path in ctx.params.paths:
        if not ctx.host.exists(path):
            continue
        seen += 1
        room = ctx.host.file_system(path)
        target = f"path:{path}"
        floor = max(ctx.params.min_available_bytes, ctx.params.min_available_ratio * room.size_bytes)
        yield within(
            float(room.available_bytes),
            name="disk_available_bytes",
            target=target,
            limit=ctx.limits.get("disk_available_bytes") or Limit(lower=floor, upper=None, origin="default"),
            reason="DiskFull",
            subject=f"{path} of {quantity('size_bytes', room.size_bytes)}: available",
        )
        if room.inodes:
            yield within(
                room.available_inodes / room.inodes,
                name="disk_available_inodes_ratio",
                target=target,
                limit=ctx.limits.get("disk_available_inodes_ratio")
                or Limit(lower=ctx.params.min_available_inodes_ratio, upper=None, origin="default"),
                reason="DiskFull",
                subject=f"{path}: inodes available",
            )
    if not seen:
        paths = ", ".join(ctx.params.paths) or "none is configured"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=f"no path to look at: {paths}", target="node")


@dataclass(frozen=True)
class MountParams:
    """Which mounts may be read-only."""

    read_only: tuple[str, ...] = ()  # mount points that are so on purpose
    writable: tuple[str, ...] = ("/tmp",)


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def mounts(ctx: Context[MountParams]) -> Iterator[Finding]:
    """
    No disk has been turned read-only: that is what the kernel does after an error.

    Reads:   /proc/self/mounts; a disk is what is mounted from /dev.
    Judges:  fail ReadOnlyMount | unknown NoData (no mount found).
    Cost:    under 1 ms; harmless to jobs.
    """
    text = ctx.host.read("/proc/self/mounts")
    rows = [row for row in (line.split() for line in text.splitlines()) if len(row) >= 4]
    # A later mount on the same point hides the earlier one.
    points = {row[1]: row for row in rows}
    bad = [
        (point, device, kind)
        for point, (device, _, kind, options, *_) in sorted(points.items())
        if "ro" in options.split(",") and point not in ctx.params.read_only and _is_disk(device, kind)
    ]
    bad += [
        (point, points[point][0], points[point][2])
        for point in ctx.params.writable
        if point in points and "ro" in points[point][3].split(",") and point not in [entry[0] for entry in bad]
    ]
    for point, device, kind in bad[:16]:
        yield Finding(
            status=Status.FAIL,
            reason="ReadOnlyMount",
            message=f"{point} ({device}, {kind}) is mounted read-only; look for the error in the kernel log",
            target=f"path:{point}",
        )
    if not bad:
        yield within(
            float(len(points)) if points else None,
            name="mounts_count",
            target="node",
            reason="ReadOnlyMount",
            subject="mounts looked at, no disk is read-only:",
        )


def _is_disk(device: str, kind: str) -> bool:
    loop = device.startswith("/dev/loop")  # snaps and images are read-only by nature
    return device.startswith("/dev/") and not loop and kind not in _NO_DISK
