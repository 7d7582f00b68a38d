"""
Makes a control group (v2) for one program, which the kernel can kill as a whole, faster than any program forks.

Only where a part of the control groups is delegated to us.
"""

from __future__ import annotations

import contextlib
import os
import time

GROUP_PREFIX = "healthd-"

_REMOVE_TRIES, _REMOVE_PAUSE_SECONDS = 20, 0.005


class ControlGroup:
    """A control group for one program, below our own."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def make(cls) -> ControlGroup | None:
        """A new group; None where none is delegated to us, or the kernel cannot kill one as a whole (before 5.14)."""
        own = delegated_group()
        if own is None:
            return None
        for name in os.listdir(own):
            pid = name[len(GROUP_PREFIX) :]
            if name.startswith(GROUP_PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                left = cls(os.path.join(own, name))  # of a guard that was killed
                left.kill()
                left.remove()
        path = os.path.join(own, f"{GROUP_PREFIX}{os.getpid()}")
        try:
            os.mkdir(path)
        except OSError:
            return None
        made = cls(path)
        if os.path.exists(os.path.join(path, "cgroup.kill")):
            return made
        made.remove()
        return None

    def join(self) -> None:
        """Move this process into the group; where the kernel refuses, it stays where it is."""
        self._write("cgroup.procs", "0")

    def kill(self) -> None:
        """Kill every process in it."""
        self._write("cgroup.kill", "1")

    def remove(self) -> None:
        """Remove it once it is empty, a moment after the kill; one that never is, is left to a later guard."""
        for _ in range(_REMOVE_TRIES):
            try:
                os.rmdir(self._path)
            except OSError:
                time.sleep(_REMOVE_PAUSE_SECONDS)
            else:
                return

    def _write(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self._path, name), "w") as file:
            file.write(text)


def delegated_group() -> str | None:
    """
    The directory of our own control group (v2), below which we may make groups; None where we may not.

    That a directory can be written is not enough: root can write all of them, and those of systemd belong to systemd
    (systemd, CGROUP_DELEGATION). It marks what it delegates; a container owns the root of its own groups.
    """
    try:
        with open("/proc/self/cgroup") as file:
            path = next(line.rstrip("\n")[3:] for line in file if line.startswith("0::"))
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file if " - cgroup2 " in line]
        root, place = mounts[0][3], mounts[0][4]
    except (OSError, StopIteration, IndexError):
        return None
    if ".." in path.split("/") or not path.startswith(root.rstrip("/")):
        return None
    own = place + path[len(root.rstrip("/")) :].rstrip("/")
    is_root_of_container = path == root == "/" and os.path.exists(f"{own}/cgroup.events")
    writable = os.access(own, os.W_OK) and os.access(f"{own}/cgroup.procs", os.W_OK)
    return own if writable and (is_root_of_container or _is_marked(own)) else None


def _is_marked(folder: str) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False
