"""Whether what must be writable is, from the table of mounts."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from checks.contract import Context, Finding, Status, check
from checks.host.machine import Host, HostError
from checks.limits import within

MAX_FINDINGS = 16
_BOOT_SECONDS = 600.0  # network file systems (`_netdev`, `nofail`) may be mounted long after the daemon has started

_IN_MEMORY = ("tmpfs", "ramfs", "rootfs")
_LOCAL = (*_IN_MEMORY, "overlay", "zfs")  # besides what is mounted from a device
FstabEntry = tuple[str, Sequence[str]]
"""A mount point of /etc/fstab and its options."""


class Mount(NamedTuple):
    """`source` is the device; `super_read_only` is of the file system itself, not of this view of it."""

    point: str
    kind: str
    source: str
    read_only: bool
    super_read_only: bool


@dataclass(frozen=True)
class Params:
    """Which paths must be writable, whatever they are mounted from, and which are read-only on purpose."""

    writable: tuple[str, ...] = ("/tmp",)
    read_only: tuple[str, ...] = ()  # mount points


@check(tier="passive", interval_seconds=60, timeout_seconds=5)
def mounts(ctx: Context[Params]) -> Iterator[Finding]:
    """
    No file system that should be writable has become read-only, as the kernel does after an error.

    Many file systems are read-only by design (images of container hosts, bind mounts of a pod). So a read-only one
    counts only if a `writable` path is on it, or /etc/fstab does not say `ro`, or ext4 has counted an error on it. If a
    mount in /etc/fstab is missing, the check does not mistake the directory underneath for it.

    Reads:   /proc/self/mountinfo, /etc/fstab, /sys/fs/ext4/*/errors_count; whether `writable` paths on
             local file systems are there (of others it is not asked: a dead server would not answer).
    Judges:  fail ReadOnlyMount, StoreNotMounted (/etc/fstab mounts what a configured `writable` path is on, and it is
             not mounted) | unknown NoData (the same within 10 minutes of boot, while mounts may still come; no mount
             found; a configured `writable` path is not there).
    Cost:    under 1 ms; harmless to jobs.
    """
    points, fstab = read_points(ctx.host), read_fstab(ctx.host)
    wanted = {point for point, options in fstab if "ro" not in options}
    bad: dict[str, str] = {}
    missing: list[Finding] = []
    for path in ctx.params.writable:
        mount = holding(points, path)
        if mount and mount.read_only:
            bad[mount.point] = (
                f"{path} must be writable but is on {mount.point} ({mount.source}), which is mounted read-only"
            )
        elif path in Params.writable:
            continue  # nobody has asked for it
        elif lost := find_unmounted(path, fstab, points):
            missing.append(_judge_unmounted(ctx.host, path, lost))
        elif _is_gone(ctx.host, path, mount):
            text = f"{path} does not exist; mount it, or remove it from `writable` of this check"
            missing.append(Finding(status=Status.UNKNOWN, reason="NoData", message=text, target=f"path:{path}"))
    for mount in points.values():
        if mount.point in bad or mount.point in ctx.params.read_only or not mount.super_read_only:
            continue
        name = f"{mount.point} ({mount.source}, {mount.kind})"
        errors = _ext4_errors(ctx.host, mount)
        if errors:
            bad[mount.point] = f"{name} is read-only after {errors} errors; see the kernel log"
        elif mount.point in wanted:
            bad[mount.point] = f"{name} is read-only, but /etc/fstab mounts it writable; see the kernel log"
    yield from missing[:MAX_FINDINGS]
    for point, text in list(bad.items())[:MAX_FINDINGS]:
        yield Finding(status=Status.FAIL, reason="ReadOnlyMount", message=text, target=f"path:{point}")
    if not bad and not missing:
        yield within(
            float(len(points)) if points else None,
            name="mounts_count",
            target="node",
            reason="ReadOnlyMount",
            subject="mounts, none unexpectedly read-only:",
        )


def _judge_unmounted(host: Host, path: str, point: str) -> Finding:
    status, reason = Status.FAIL, "StoreNotMounted"
    text = f"{path} must be writable and /etc/fstab mounts {point}, but nothing is mounted there: mount it"
    if host.uptime_seconds() < _BOOT_SECONDS:
        status, reason = Status.UNKNOWN, "NoData"
        text += f", unless it is still being mounted: the host booted less than {_BOOT_SECONDS / 60:g} minutes ago"
    return Finding(status=status, reason=reason, message=text, target=f"path:{point}")


def parse_mountinfo(text: str) -> list[Mount]:
    """
    Lines `36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/sda1 rw,errors=continue`; others are left out.

    Source: proc_pid_mountinfo(5).
    """
    mounts_found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        here, there = left.split(), right.split()
        if not separator or len(here) < 6 or len(there) < 3:
            continue
        over = "ro" in there[2].split(",")
        mounts_found.append(
            Mount(
                point=_plain(here[4]),
                kind=there[0],
                source=_plain(there[1]),
                read_only=over or "ro" in here[5].split(","),
                super_read_only=over,
            )
        )
    return mounts_found


def parse_fstab(text: str) -> list[FstabEntry]:
    """Lines `/dev/sda1 /point ext4 rw,noatime 0 2`; others are left out. Source: fstab(5)."""
    rows = [line.split() for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [(_plain(row[1]).rstrip("/") or "/", row[3].split(",")) for row in rows if len(row) > 3]


def read_points(host: Host) -> dict[str, Mount]:
    """What is mounted, by its point: a later mount on the same point hides the earlier one."""
    return {mount.point: mount for mount in parse_mountinfo(host.read("/proc/self/mountinfo"))}


def read_fstab(host: Host) -> list[FstabEntry]:
    """/etc/fstab; nothing where there is no such file."""
    try:
        return parse_fstab(host.read("/etc/fstab"))
    except HostError:
        return []


def find_unmounted(path: str, fstab: Iterable[FstabEntry], points: Container[str]) -> str | None:
    """The place at a path or above it that /etc/fstab mounts at boot and where nothing is mounted."""
    for point, options in fstab:
        if point == "/" or "noauto" in options or not f"{path}/".startswith(f"{point}/") or point in points:
            continue
        if os.path.realpath(point) not in points:  # it is mounted by its real path
            return point
    return None


def judge_without_size(path: str, points: dict[str, Mount]) -> Finding:
    """What to say of a file system that tells no size: one in memory without a limit, or not known to have room."""
    mount, status, reason = holding(points, path), Status.UNKNOWN, "NoData"
    text = f"{path} is on a file system that reports no size, so its free space is unknown"
    if mount is not None and mount.kind in _IN_MEMORY:
        status, reason = Status.SKIP, "NotApplicable"
        text = f"{path} is in memory without a limit of its own ({mount.kind}); the check memory_free judges it"
    return Finding(status=status, reason=reason, message=text, target=f"path:{path}")


def _ext4_errors(host: Host, mount: Mount) -> int:
    """How many errors ext4 has found on this device; 0 for other file systems."""
    if mount.kind not in ("ext2", "ext3", "ext4"):
        return 0
    try:
        text = host.read(f"/sys/fs/ext4/{mount.source.rpartition('/')[2]}/errors_count").strip()
    except HostError:
        return 0
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def holding(points: dict[str, Mount], path: str) -> Mount | None:
    """The mount that a path is on: the longest mount point that is a parent of it."""
    while path not in points and path != "/":
        path = path.rpartition("/")[0] or "/"
    return points.get(path)


def _is_gone(host: Host, path: str, mount: Mount | None) -> bool:
    """Whether nothing is at a path of a local file system; that this user may not look there does not say so."""
    if mount and (mount.point == path or not (mount.kind in _LOCAL or mount.source.startswith("/dev/"))):
        return False
    try:
        os.lstat(host.path(path))
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def _plain(text: str) -> str:
    r"""A field with its escapes undone: blanks are written `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
