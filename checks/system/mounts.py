"""Whether what must be writable is, from the table of mounts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from checks.contract import Context, Finding, Status, check
from checks.host.machine import Host, HostError
from checks.limits import within

MAX_FINDINGS = 16


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
    No file system that should be writable has become read-only, which is what the kernel does after an error.

    Many are read-only by design (images of container hosts, bind mounts of a pod). So one counts only if a `writable`
    path is on it, or /etc/fstab does not say `ro`, or ext4 has counted an error on it.

    Reads:   /proc/self/mountinfo, /etc/fstab, /sys/fs/ext4/*/errors_count.
    Judges:  fail ReadOnlyMount | unknown NoData (no mount found).
    Cost:    under 1 ms; harmless to jobs.
    """
    found = parse_mountinfo(ctx.host.read("/proc/self/mountinfo"))
    points = {mount.point: mount for mount in found}  # a later mount on the same point hides the earlier one
    wanted = _writable_by_fstab(ctx.host)
    bad: dict[str, str] = {}
    for path in ctx.params.writable:
        mount = _holding(points, path)
        if mount and mount.read_only:
            bad[mount.point] = f"{path} must be writable and is on {mount.point} ({mount.source}), mounted read-only"
    for mount in points.values():
        if mount.point in bad or mount.point in ctx.params.read_only or not mount.super_read_only:
            continue
        name = f"{mount.point} ({mount.source}, {mount.kind})"
        errors = _ext4_errors(ctx.host, mount)
        if errors:
            bad[mount.point] = f"{name} is read-only after {errors} errors; look for them in the kernel log"
        elif mount.point in wanted:
            bad[mount.point] = f"{name} is read-only, and /etc/fstab wants it writable; look into the kernel log"
    for point, text in list(bad.items())[:MAX_FINDINGS]:
        yield Finding(status=Status.FAIL, reason="ReadOnlyMount", message=text, target=f"path:{point}")
    if not bad:
        yield within(
            float(len(points)) if points else None,
            name="mounts_count",
            target="node",
            reason="ReadOnlyMount",
            subject="mounts, of which none is read-only that should not be:",
        )


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


def _writable_by_fstab(host: Host) -> set[str]:
    """Mount points that /etc/fstab mounts without `ro`; none where there is no such file."""
    try:
        text = host.read("/etc/fstab")
    except HostError:
        return set()
    rows = [line.split() for line in text.splitlines() if not line.lstrip().startswith("#")]
    return {_plain(row[1]) for row in rows if len(row) > 3 and "ro" not in row[3].split(",")}


def _ext4_errors(host: Host, mount: Mount) -> int:
    """How many errors ext4 has found on this device; 0 for other file systems."""
    if mount.kind not in ("ext2", "ext3", "ext4"):
        return 0
    try:
        text = host.read(f"/sys/fs/ext4/{mount.source.rpartition('/')[2]}/errors_count").strip()
    except HostError:
        return 0
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _holding(points: dict[str, Mount], path: str) -> Mount | None:
    """The mount that a path is on: the longest mount point that is a parent of it."""
    while path not in points and path != "/":
        path = path.rpartition("/")[0] or "/"
    return points.get(path)


def _plain(text: str) -> str:
    r"""A field with its escapes undone: blanks are written `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
