"""
Runs a program, or the worker of checks, and leaves nothing of what it starts.

    PYTHON -I -S guard.py PARENT_PID ERROR_DESCRIPTOR FOLDER -- PROGRAM [ARGUMENT ...]

What a program starts may leave its process group and session (setsid, a double fork), so killing a group does not end
it. This process adopts all orphans below it (PR_SET_CHILD_SUBREAPER), so that everything that the program starts
descends from it. When the program ends, when SIGTERM comes, or when the parent ends, in whatever way, it kills its
descendants until there are none. Nothing else is touched: no other process can become a descendant.

Where a part of the control groups is delegated to us, the program also gets a group of its own (`control_group`). The
groups of guards that were killed themselves are removed by the next guard.

The exit status is that of the program, a signal included; 127 where it cannot be started, and then the number of the
error is written to ERROR_DESCRIPTOR (-1: a line on standard error instead); 143 when the guard was told to end. FOLDER
is the working directory ("" for ours); a folder of nccom-test or of a profile is removed when the parent is
gone.
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

if __name__ == "__main__":
    # Run by path, without site-packages: `checks` is the package that this file is in.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from checks.host.control_group import ControlGroup
from checks.host.descendants import descendants, parent_of

FOLDER_PREFIX = "healthd-nccom-"
PROFILE_PREFIX = "healthd-profile-"
STORE_NAME = "healthd-store"
"""The name of a process (PR_SET_NAME, at most 15 characters) that may hang in a file system, and holds no device."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NO_SUCH_PROGRAM, _TOLD_TO_END = 127, 143
_STOP_PASSES = 16  # what forks faster than we find it is at least stopped in most places before it is killed
_NESTED_SECONDS = 0.3
_STORE_SECONDS = 0.3  # the kernel releases at once what it releases at all
_FIRST_PAUSE_SECONDS = 0.001
_LAST_PAUSE_SECONDS = 1.0  # between two looks at a process that the kernel does not release: stuck in a driver

# Received one by one by sigwait, never in the middle of something: no end is missed and none is counted twice.
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def main(arguments: Sequence[str]) -> int:
    """Run the program; the exit status. See the module."""
    parent, report, folder, argv = int(arguments[0]), int(arguments[1]), arguments[2], list(arguments[4:])
    if not _begin(parent):
        _remove_ours(folder)
        return _TOLD_TO_END
    group = ControlGroup.make()
    program = os.fork()
    if program == 0:
        _become(argv, folder, report, group)
    if report >= 0:
        os.close(report)  # closed without an error: the program runs
    status = _wait(program)
    _end_all(group)
    if os.getppid() != parent:
        _remove_ours(folder)
    return _TOLD_TO_END if status is None else _end_as(status)


def _remove_ours(folder: str) -> None:
    """Remove the folder where it is one of ours: its owner is gone, and no other process does."""
    if os.path.basename(folder).startswith((FOLDER_PREFIX, PROFILE_PREFIX)):
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def stand_guard(parent: int) -> None:
    """
    Fork: returns in the child, which continues under this guard; the guard itself never returns.

    Call it before any thread is started and any device is opened. A process that waits for this one sees the end of the
    child, and can send SIGTERM to end the child with everything that it started.
    """
    if not _begin(parent):
        os._exit(_TOLD_TO_END)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _reset_signals()
        if os.getppid() != guard:
            os._exit(1)
        return
    _close_all()  # pipes must end with the processes that use them
    status = _wait(child)
    _send(child, signal.SIGKILL, {guard})
    # The guards of programs below get SIGTERM with its end, and remove folders: that is worth a moment.
    end = time.monotonic() + _NESTED_SECONDS
    while has_children() and time.monotonic() < end:
        time.sleep(_FIRST_PAUSE_SECONDS)
    _end_all(None)
    os._exit(_TOLD_TO_END if status is None else _end_as(status))


def adopt_orphans(parent: int) -> bool:
    """
    For a process that works and cannot wait for signals as a guard does: take in orphans, and end with all descendants
    on SIGTERM, or when the parent ends. False when the parent has ended already.
    """
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _end_with_descendants)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


def has_children() -> bool:
    """Reap all children that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def end_descendants() -> None:
    """Kill all descendants of this process, until there are none."""
    _end_all(None)


def _end_with_descendants(*_: object) -> None:
    _end_all(None)
    os._exit(_TOLD_TO_END)


def _close_all() -> None:
    """Close the open descriptors one by one: the highest possible number is a billion in some containers."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing
            os.close(int(name))


# --- the start --------------------------------------------------------------------------------------------------------


def _begin(parent: int) -> bool:
    """Become the guard; false when the parent has ended already."""
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, as it may be inherited, no end would be reported
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent


def _reset_signals() -> None:
    """In the new process: receive signals as usual, and die with the guard, in whatever way that ends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _become(argv: list[str], folder: str, report: int, group: ControlGroup | None) -> None:
    """In the new process: become the program. Never returns."""
    try:
        _reset_signals()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
            signal.signal(ignored, signal.SIG_DFL)
        if group is not None:
            group.join()
        if report >= 0:
            os.set_inheritable(report, False)
        if folder:
            os.chdir(folder)
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        text = f"{argv[0]} cannot be started: {error.strerror or error}\n" if report < 0 else str(error.errno)
        os.write(report if report >= 0 else 2, text.encode())
    finally:
        os._exit(_NO_SUCH_PROGRAM)


# --- the end ----------------------------------------------------------------------------------------------------------


def _wait(pid: int) -> int | None:
    """The wait status of the program, or None after SIGTERM. Orphans that end before it are reaped."""
    while True:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            return None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    return ended[1]


def _end_all(group: ControlGroup | None) -> None:
    """
    Kill the descendants until there are none: what is started meanwhile is found at the next look.

    This goes on for as long as the kernel holds one of them, so that the end of this process means that none is left:
    but for processes that hang in a store. These are killed, hold no device, and end when the store answers or is
    unmounted; to wait for them would keep all other checks from running.
    """
    pause = _FIRST_PAUSE_SECONDS
    begun = time.monotonic()
    while has_children():
        if group is not None:
            group.kill()
        found = _stopped_descendants()
        for pid in found:
            _send(pid, signal.SIGKILL, found)
        if time.monotonic() - begun > _STORE_SECONDS and all(map(_hangs_in_a_store, found - {os.getpid()})):
            break
        if has_children():
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
    if group is not None:
        group.remove()


def _hangs_in_a_store(pid: int) -> bool:
    """Whether a process is one of those named STORE_NAME, and the kernel holds it (D state)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return False
    return name == STORE_NAME and rest.split()[0] == "D"


def _stopped_descendants() -> set[int]:
    """The pids of this process and of all descendants, which are stopped as they are found: then they start nothing."""
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
    """Signal a child of one of these processes, never another process that has got its number meanwhile."""
    descriptor = None
    with contextlib.suppress(OSError):  # it has ended, or descends from another process now
        try:
            descriptor = os.pidfd_open(pid)  # from here on this is one process, whatever happens to its number
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


def _end_as(status: int) -> int:
    """The exit code; a signal that killed the program kills this process too, so that the parent sees it."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    import resource

    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)
    return 128 + number  # real-time signals, and those that do not kill


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
