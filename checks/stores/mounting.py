"""Whether a path is on the file system that it should be on, and not on the local disk beneath a missing mount."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from checks.host.machine import Host
from checks.stores.errors import StoreFault
from checks.system.mounts import Mount, find_unmounted, holding, read_fstab, read_points


def require_mount(path: str, kinds: Sequence[str]) -> Mount | None:
    """
    The mount that a path is on; None where the table of mounts does not have it.

    Raises StoreFault StoreNotMounted where `kinds` are given and it is on another one, or where /etc/fstab mounts
    something at the path, or above it, that is not mounted.
    """
    with suppress(OSError):  # an automounter mounts it when it is opened
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    points = read_points(Host())
    place = os.path.realpath(path)
    mount = holding(points, place)
    if kinds and (mount is None or mount.kind not in kinds):
        there = "nothing" if mount is None else f"{mount.kind} ({mount.source} on {mount.point})"
        wanted = " or ".join(kinds)
        text = f"{path} is on {there}, not on {wanted}: what is written goes to the local disk beneath; mount it"
        raise StoreFault("StoreNotMounted", text)
    if point := find_unmounted(place, read_fstab(Host()), points):
        text = f"/etc/fstab mounts {point}, and nothing is mounted there: what is written to {path} goes beneath"
        raise StoreFault("StoreNotMounted", text)
    return mount
