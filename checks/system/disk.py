"""Room on file systems, by statvfs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checks.contract import NO_LIMIT, Context, Finding, Limit, Status, check
from checks.host.machine import FileSystem
from checks.limits import quantity, within
from checks.system.bounds import bound
from checks.system.mounts import find_unmounted, judge_without_size, read_fstab, read_points

# A /tmp of half a gigabyte never has one: what was made so small is meant to be.
_MOST_OF_A_SMALL_ONE = 0.5


@dataclass(frozen=True)
class Params:
    """
    Which paths, and bounds. Of the two for bytes the larger one holds; the default one in bytes asks for no more than
    half of a file system.
    """

    paths: tuple[str, ...] = ("/", "/tmp", "/var")
    min_available_ratio: float = 0.02  # of the size; ext4 keeps 5 % for root, so 2 % left to others is close to the end
    min_available_bytes: float = 1e9  # a core dump or a compile cache must fit
    min_available_inodes_ratio: float = 0.02


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def disk_space(ctx: Context[Params]) -> Iterator[Finding]:
    """
    The file systems that jobs write to have room and inodes left.

    Reads:   statvfs of the paths; one of the default ones that is not there is left out, a configured one is unknown.
             /proc/self/mountinfo and /etc/fstab, for mounts that are missing.
    Judges:  fail DiskFull (the default of min_available_bytes asks at most half of a file system) | unknown NoData (a
             configured path that is not there or not mounted; a file system that tells no size) | skip NotApplicable (a
             file system that is read-only and full by nature, or in memory without a limit).
    Cost:    under 1 ms; a network file system that hangs is cut off by the time limit.
    """
    seen = 0
    points, fstab = read_points(ctx.host), read_fstab(ctx.host)
    for path in ctx.params.paths:
        if not ctx.host.exists(path):
            if path not in Params.paths:
                text = f"{path} does not exist; mount it, or remove it from paths of this check"
                yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=f"path:{path}")
                seen += 1
            continue
        seen += 1
        if path not in Params.paths and (lost := find_unmounted(path, fstab, points)):
            text = (
                f"/etc/fstab mounts {lost}, but nothing is mounted there, so this is the space of the local disk: "
                "mount it"
            )
            yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=f"path:{path}")
            continue
        room = ctx.host.file_system(path)
        if not room.size_bytes:
            yield judge_without_size(path, points)
        elif room.read_only:
            text = f"{path} is read-only, so its free space is not judged; the check mounts judges read-only mounts"
            yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target=f"path:{path}")
        else:
            yield from _judge(ctx, path, room)
    if not seen:
        paths = ", ".join(ctx.params.paths) or "none is configured"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=f"no path to check: {paths}", target="node")


def _judge(ctx: Context[Params], path: str, room: FileSystem) -> Iterator[Finding]:
    target = f"path:{path}"
    yield within(
        float(room.available_bytes),
        name="disk_available_bytes",
        target=target,
        limit=_least_bytes(ctx, target, room),
        reason="DiskFull",
        subject=f"{path} of {quantity('size_bytes', room.size_bytes)}: available",
    )
    if room.inodes:
        yield within(
            room.available_inodes / room.inodes,
            name="disk_available_inodes_ratio",
            target=target,
            limit=bound(ctx, "disk_available_inodes_ratio", target, lower="min_available_inodes_ratio"),
            reason="DiskFull",
            subject=f"{path}: inodes available",
        )


def _least_bytes(ctx: Context[Params], target: str, room: FileSystem) -> Limit:
    given = ctx.limit("disk_available_bytes", target)
    if given is not NO_LIMIT:
        return given
    absolute = ctx.params.min_available_bytes
    if absolute == Params.min_available_bytes:
        absolute = min(absolute, _MOST_OF_A_SMALL_ONE * room.size_bytes)
    least = max(absolute, ctx.params.min_available_ratio * room.size_bytes)
    names = ("min_available_bytes", "min_available_ratio")
    changed = any(getattr(ctx.params, name) != getattr(Params, name) for name in names)
    return Limit(lower=least, upper=None, origin="config" if changed else "default")
