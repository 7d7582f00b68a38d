"""
Stands between us and a program (or the worker of checks), and leaves nothing of what comes of it.

    PYTHON -I -S guard.py PARENT_PID ERROR_DESCRIPTOR FOLDER -- PROGRAM [ARGUMENT ...]

What a program starts may leave its process group and session (setsid, a double fork), so ending a group does not end
it. This process takes in all orphans below it (PR_SET_CHILD_SUBREAPER), so that everything that comes of the program
descends from here. When the program ends, when SIGTERM comes, or when the parent ends, however that ends, it kills what
descends from it until nothing does. Nothing else is touched: no other process can become a descendant.

Where a part of the control groups (v2) is delegated to us, the program also gets a group of its own, which the kernel
ends as a whole, faster than any program forks; the groups of guards that were killed themselves are ended by the next.

It is run by path and imports nothing of ours. The exit status is the program's, a signal included; 127 where it cannot
be started, and then the error's number is written to ERROR_DESCRIPTOR (-1: a line on standard error instead); 143 when
it was told to end. FOLDER is the working directory ("" for ours); one of nccom-test's is removed if the parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence

FOLDER_PREFIX = "healthd-nccom-"
GROUP_PREFIX = "healthd-"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NO_SUCH_PROGRAM, _TOLD_TO_END = 127, 143
_STOP_PASSES = 16  # what forks faster than we find it is at least stopped in most places before it is killed
_NESTED_SECONDS = 0.3
_REMOVE_TRIES, _REMOVE_PAUSE_SECONDS = 20, 0.005
_FIRST_PAUSE_SECONDS = 0.001
_LAST_PAUSE_SECONDS = 1.0  # between two looks at what the kernel does not let go: a process stuck in a driver

# Taken one by one, never in the middle of something: no end is missed and none comes twice.
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parent, report, folder, argv = int(arguments[0]), int(arguments[1]), arguments[2], list(arguments[4:])
    if not _begin(parent):
        return _TOLD_TO_END
    group = ControlGroup.make()
    program = os.fork()
    if program == 0:
        _become(argv, folder, report, group)
    if report >= 0:
        os.close(report)  # its end tells that the program runs
    status = _wait(program)
    _end_all(group)
    if os.getppid() != parent and os.path.basename(folder).startswith(FOLDER_PREFIX):
        import shutil

        shutil.rmtree(folder, ignore_errors=True)  # nobody else will
    return _TOLD_TO_END if status is None else _end_as(status)


def stand_guard(parent: int) -> None:
    """
    Fork: returns in the child, which goes on under this guard; the guard itself never returns.

    Call it before any thread is started and any device is opened. Whoever waits for this process sees the child's end,
    and sends it SIGTERM to end the child with all that comes of it.
    """
    if not _begin(parent):
        os._exit(_TOLD_TO_END)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _leave_to_itself()
        if os.getppid() != guard:
            os._exit(1)
        return
    _close_all()  # pipes must end with those who use them
    status = _wait(child)
    _send(child, signal.SIGKILL, {guard})
    # The guards of programs below get SIGTERM with its end, and remove folders: that is worth a moment.
    end = time.monotonic() + _NESTED_SECONDS
    while _has_children() and time.monotonic() < end:
        time.sleep(_FIRST_PAUSE_SECONDS)
    _end_all(None)
    os._exit(_TOLD_TO_END if status is None else _end_as(status))


def _close_all() -> None:
    """By what is open: the highest number that may be is a billion in some containers."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that this listing had
            os.close(int(name))


# --- the start --------------------------------------------------------------------------------------------------------


def _begin(parent: int) -> bool:
    """Become the guard; false when the parent has ended already."""
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as we may have inherited it, no end would be told
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


def _leave_to_itself() -> None:
    """In the new process: the signals are its own again, and it ends with the guard however that ends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _become(argv: list[str], folder: str, report: int, group: ControlGroup | None) -> None:
    """In the new process: the program. Never returns."""
    try:
        _leave_to_itself()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and what is ignored stays so
            signal.signal(ignored, signal.SIG_DFL)
        if group is not None:
            group.join()
        if report >= 0:
            os.set_inheritable(report, False)
        if folder:
            os.chdir(folder)
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        said = f"{argv[0]} cannot be started: {error.strerror or error}\n" if report < 0 else str(error.errno)
        os.write(report if report >= 0 else 2, said.encode())
    finally:
        os._exit(_NO_SUCH_PROGRAM)


# --- the end ----------------------------------------------------------------------------------------------------------


def _wait(pid: int) -> int | None:
    """The wait status of the program, or None when we are told to end. Orphans that end before it are reaped."""
    while True:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            return None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    return ended[1]


def _end_all(group: ControlGroup | None) -> None:
    """
    Kill what descends from us until nothing does: what is started meanwhile is found at the next look.

    This goes on for as long as the kernel holds one of them, so that who waits for us knows that it is there.
    """
    pause = _FIRST_PAUSE_SECONDS
    while _has_children():
        if group is not None:
            group.kill()
        found = _stopped_descendants()
        for pid in found:
            _send(pid, signal.SIGKILL, found)
        if _has_children():
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
    if group is not None:
        group.remove()


def _has_children() -> bool:
    """Reap all that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _stopped_descendants() -> set[int]:
    """All descendants, and us; the others stopped as they were found: what is stopped starts nothing."""
    family = {os.getpid()}
    for _ in range(_STOP_PASSES):
        new = set(descendants(os.getpid())) - family
        if not new:
            break
        family |= new
        for pid in new:
            _send(pid, signal.SIGSTOP, family)
    return family


def _send(pid: int, number: signal.Signals, family: Collection[int]) -> None:
    """Signal a child of one of these processes: never another one that has been given its number meanwhile."""
    descriptor = None
    with contextlib.suppress(OSError):  # it has ended, or is none of ours any more
        try:
            descriptor = os.pidfd_open(pid)  # from here on this is one process and no other
        except OSError as error:
            if error.errno == errno.ESRCH:
                return
        try:
            if parent_of(pid) not in family:
                return
            if descriptor is None:  # a kernel (before 5.3) or a sandbox without it
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def parent_of(pid: int) -> int:
    """OSError, IndexError or ValueError where the process has ended."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def descendants(of: int) -> list[int]:
    """All processes below one. Parents are looked up once, so that the list is of one moment."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
                parents[int(name)] = parent_of(int(name))
    found = {of}
    size = 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {of})


def _end_as(status: int) -> int:
    """The exit code; a signal that ended the program ends us too, so that our parent sees what happened."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    import resource

    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)
    return 128 + number  # real-time signals and those that end nobody


# --- control groups ---------------------------------------------------------------------------------------------------


class ControlGroup:
    """A group for one program, below our own."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def make(cls) -> ControlGroup | None:
        """None where no group is delegated to us, or the kernel cannot end one as a whole (before 5.14)."""
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
        """Go into the group with this process; where the kernel refuses, it stays where it is."""
        self._write("cgroup.procs", "0")

    def kill(self) -> None:
        """All that is in it."""
        self._write("cgroup.kill", "1")

    def remove(self) -> None:
        """Once it is empty, which is a moment after the kill; one that never is, is left to a later guard."""
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
    The directory of our own control group (v2) where we may make groups below it; None where we may not.

    That a directory can be written is not enough: root can write all of them, and those of systemd are systemd's alone
    (systemd, CGROUP_DELEGATION). It marks what it delegates; a container whose own root group it is has it to itself.
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
