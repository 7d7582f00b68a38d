"""
Who has a device file open: the same question for /dev/neuron0, /dev/nvidia0 and the files of CPU devices.

A file that is open anywhere is a device in use. What cannot be seen is None, never "nobody".
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.host.container import PID_NAMESPACE
from checks.host.machine import Host

# A file that is open and that no process has: who had it may have ended between the two looks, such as a worker of ours
# or a look like this one. So it is looked again before it counts as taken by somebody out of sight.
AGAIN_SECONDS = (0.01, 0.05, 0.2)
MAX_HOLDERS = 160  # told one by one: an inventory is one bounded line, see `checks.worker.protocol`


def sees_all(host: Host) -> bool:
    """
    Whether /proc shows the processes of the whole machine: not those of a container alone, and none are kept from us.

    False where it is not known, also of a recorded machine: it may have been recorded from inside a container.
    """
    # Mounted with hidepid, /proc has no folder of others: the first process is never ours.
    return host.pid_namespace() == PID_NAMESPACE and host.exists("/proc/1")


def may_miss(host: Host, options: Mapping[str, Any]) -> bool:
    """
    Whether a process that cannot be seen from here may hold devices. Options: `in_job`.

    Inside of a job the devices that there are were given to it, so that nobody out of sight has them.
    """
    return not options.get("in_job") and not sees_all(host)


def bounded(holders: Sequence[str]) -> list[str]:
    """At most MAX_HOLDERS lines; the last then says how many more there are."""
    if len(holders) <= MAX_HOLDERS:
        return list(holders)
    return [*holders[: MAX_HOLDERS - 1], f"{len(holders) - MAX_HOLDERS + 1} more"]


def find_holders(
    proc: Path,
    files: Mapping[str, Path],
    ignore_pids: Collection[int],
    *,
    blind: bool = False,
    is_onlooker: Callable[[int, str], bool] = lambda pid, command: False,
) -> list[str] | None:
    """
    Processes that have one of `files` (target -> path) open: `cpu:0: pid 123 (python)`, sorted.

    `ignore_pids` and their descendants do not count, nor do processes of which `is_onlooker` (pid, command) says that
    they only look. None when a device may be held by a process that cannot be seen; `blind` says that there may be such
    processes (see `may_miss`), which matters where the kernel does not tell whether a file is open.
    `proc` is the root of /proc, which may be a recorded one.
    """
    for pause in (*AGAIN_SECONDS, None):
        found, unseen = _look(proc, files, ignore_pids, blind=blind, is_onlooker=is_onlooker)
        if not unseen or pause is None:
            return found
        time.sleep(pause)
    raise AssertionError("the last look returns")


def _look(
    proc: Path,
    files: Mapping[str, Path],
    ignore_pids: Collection[int],
    *,
    blind: bool,
    is_onlooker: Callable[[int, str], bool],
) -> tuple[list[str] | None, bool]:
    """The holders as of one look, and whether a file was open of which no process was seen to have it."""
    real = proc == Path("/proc")
    open_somewhere = {target: _is_open(path) if real else None for target, path in files.items()}
    wanted = {path.name: (target, path) for target, path in files.items() if open_somewhere[target] is not False}
    found: list[str] = []
    ours: set[str] = set()
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()) if wanted else ():
        targets = _open_devices(proc / str(pid) / "fd", wanted)
        if targets is None:
            blind = True
        elif targets and (_descends(proc, pid, ignore_pids) or is_onlooker(pid, _command(proc, pid))):
            ours.update(targets)
        elif targets:
            # Of one that has ended meanwhile nobody knows whose it was: it may have been one of ours.
            still = _open_devices(proc / str(pid) / "fd", wanted)
            found.extend(
                f"{target}: pid {pid} ({_command(proc, pid)})" for target in (targets if still is None else still)
            )
    if found:
        return sorted(found), False
    # Where the kernel says "open": is it us, or somebody out of sight (another PID namespace, hidepid, another user)?
    unseen = any(open_somewhere[target] and target not in ours for target, _ in wanted.values())
    if unseen or (blind and any(open_somewhere[target] is None for target, _ in wanted.values())):
        return None, unseen
    return [], False


def _open_devices(folder: Path, by_name: Mapping[str, tuple[str, Path]]) -> list[str] | None:
    """Targets whose file this process has open; None when the process may not be looked into."""
    try:
        descriptors = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return []  # it ended while we looked
    except PermissionError:
        return None
    targets: set[str] = set()
    for descriptor in descriptors:
        link = folder / descriptor
        try:
            # Names first: a stat of a descriptor on a dead network file system would never return.
            seen = os.readlink(link)
            entry = by_name.get(os.path.basename(seen))
            # The path differs where the holder has another mount namespace; the inode does not.
            if entry and (seen == str(entry[1]) or os.path.samefile(link, entry[1])):
                targets.add(entry[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            return None
    return sorted(targets)


def is_ours(proc: Path, pid: int, ignore_pids: Collection[int]) -> bool:
    """Whether a process is one of `ignore_pids` or a descendant of one."""
    return _descends(proc, pid, ignore_pids)


def _descends(proc: Path, pid: int, ancestors: Collection[int]) -> bool:
    """Whether a process is one of `ancestors` or comes from one."""
    for _ in range(256):  # deeper than any process tree; ends a loop in recorded data
        if pid in ancestors:
            return True
        try:
            stat = (proc / str(pid) / "stat").read_text(errors="replace")
            pid = int(stat.rpartition(")")[2].split()[1])  # the name before it may hold spaces and brackets
        except (OSError, IndexError, ValueError):
            return False
        if pid <= 1:
            return pid in ancestors
    return False


def _command(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "unknown"


def _is_open(path: Path) -> bool | None:
    """
    Whether any process, seen or unseen, has the file open, by the kernel's own word; None when it cannot tell.

    Linux gives a write lease on a file that nobody else has open (fcntl(2), F_SETLEASE). Device nodes have no leases,
    so for them this is None and the scan decides.
    """
    if not path.exists():
        return False
    if not path.is_file():
        return None  # to open a device node is to use the device
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # Somebody who opens the file now waits for the microseconds of the lease, and we get a signal that by default
        # ends a process: SIGURG instead, which by default does nothing.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        granted = _lease(descriptor)
        if not granted:
            return None if granted is None else True
        second = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # A file system that grants it although the file is open twice does not count openers, so it says nothing.
            return None if _lease(descriptor) else False
        finally:
            os.close(second)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _lease(descriptor: int) -> bool | None:
    """Take the lease and give it back; False when refused because the file is open elsewhere."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError:
        return None
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
