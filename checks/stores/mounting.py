"""Whether a path is on the file system that it should be on, and not on the local disk beneath a missing mount."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from checks.stores.errors import StoreFault
from checks.system.mounts import Mount, parse_mountinfo


def require_mount(path: str, kinds: Sequence[str]) -> Mount | None:
    """
    The mount that a path is on; None where the table of mounts does not have it.

    Raises StoreFault StoreNotMounted where `kinds` are given and it is on another one, or where /etc/fstab mounts
    something at the path, or above it, that is not mounted.
    """
    with suppress(OSError):  # an automounter mounts it when it is opened
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        points = {mount.point: mount for mount in parse_mountinfo(file.read())}
    place = os.path.realpath(path)
    mount = next((points[above] for above in _above(place) if above in points), None)
    if kinds and (mount is None or mount.kind not in kinds):
        there = "nothing" if mount is None else f"{mount.kind} ({mount.source} on {mount.point})"
        wanted = " or ".join(kinds)
        text = f"{path} is on {there}, not on {wanted}: what is written goes to the local disk beneath; mount it"
        raise StoreFault("StoreNotMounted", text)
    for point in _of_fstab():
        if point != "/" and point in _above(place) and point not in points:
            text = f"/etc/fstab mounts {point}, and nothing is mounted there: what is written to {path} goes beneath"
            raise StoreFault("StoreNotMounted", text)
    return mount


def _above(place: str) -> list[str]:
    """A path and all directories above it, the longest first."""
    found = [place]
    while place != "/":
        place = os.path.dirname(place)
        found.append(place)
    return found


def _of_fstab() -> list[str]:
    """The mount points of /etc/fstab that are mounted at boot; none where there is no such file."""
    try:
        with open("/etc/fstab", encoding="utf-8", errors="replace") as file:
            rows = [line.split() for line in file if not line.lstrip().startswith("#")]
    except OSError:
        return []
    return [row[1].rstrip("/") or "/" for row in rows if len(row) > 3 and "noauto" not in row[3].split(",")]
