"""
Whether healthd looks at the machine from inside a container.

It decides what a missing device file means: on a host a fault, in a container that it was given other devices.
"""

from __future__ import annotations

import os
from contextlib import suppress

from checks.host.machine import Host, HostError

# PROC_PID_INIT_INO and PROC_USER_INIT_INO of the kernel: namespaces of the machine itself, never a container's.
PID_NAMESPACE = "pid:[4026531836]"
_USER_NAMESPACE = "user:[4026531837]"

_MARKS = (
    "/.dockerenv",
    "/run/.containerenv",  # Podman
    "/run/systemd/container",  # a container with systemd of its own: nspawn, LXC
    "/.singularity.d",  # Apptainer too
)
_BOOTED = "/run/systemd/system"


def in_container(host: Host) -> bool:
    """
    Whether this is a container: sysfs and /proc then show all devices of the machine, /dev only those it was given.

    One sign is enough: a mark of the runtime, the variable that every pod has, a namespace that is not the machine's,
    a root directory that is not the first process's or no mount, or a root file system in layers. Stateless hosts have
    such a root too: those that systemd has booted are no containers. A container to which the host's /run was given
    looks booted as well, and is known by the other signs. As data: `container` in `host.json`, else the files alone.
    """
    if host.root is not None:
        with suppress(HostError):
            return bool(host.data("container"))
    elif os.environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    return (
        any(host.exists(path) for path in _MARKS)
        or host.pid_namespace() not in (PID_NAMESPACE, None)
        or _user_namespace(host) not in (_USER_NAMESPACE, None)
        or _root_is_changed(host)
        or _root_is_layered(host)
    )


def has_own_dev(host: Host) -> bool:
    """
    Whether this is a container with device files of its own: it was not given the device of a file that is missing.

    The kernel has one devtmpfs: mounted in a container, as in that of the DaemonSet of `active`, it is the host's /dev,
    and a missing file is a fault there as on the host.
    """
    return in_container(host) and _mounts(host).get("/dev") != "devtmpfs"


def _user_namespace(host: Host) -> str | None:
    """None where it is not told."""
    try:
        return host.readlink("/proc/self/ns/user")
    except HostError:
        return None


def _root_is_changed(host: Host) -> bool:
    """Whether the root is a directory below that of the machine, or of the first process, which may be the host's."""
    mounts = _mounts(host)
    if mounts and "/" not in mounts:  # chroot
        return True
    try:
        return not os.path.samefile(host.path("/"), host.path("/proc/1/root"))
    except OSError:  # only root may see that of another user's process
        return False


def _root_is_layered(host: Host) -> bool:
    kind = _mounts(host).get("/")
    return kind == "fuse.fuse-overlayfs" or (kind == "overlay" and not host.exists(_BOOTED))


def _mounts(host: Host) -> dict[str, str]:
    """What is mounted where, as far as it is seen from our root: place -> file system; empty where it is not told."""
    try:
        rows = [line.split() for line in host.read("/proc/self/mountinfo").splitlines()]
    except HostError:
        return {}
    ends = [(row, row.index("-") + 1) for row in rows if "-" in row[6:]]
    return {row[4]: row[end] for row, end in ends if len(row) > end}  # the uppermost of a place is the last
