"""
Runs one program for a round of nccom-test over several nodes, and leaves nothing of what comes of it.

    PYTHON -I -S nccom_tree.py PARENT_PID FOLDER [NAME=VALUE ...] -- PROGRAM [ARGUMENT ...]

mpirun and its daemon put what they start into process groups and sessions of their own, so ending a group does not end
them. This process takes in all orphans below it (PR_SET_CHILD_SUBREAPER), and when the program ends, when it gets
SIGTERM, or when its parent ends, it kills whatever descends from it until nothing does. It is run by path and imports
nothing of ours. Exit code: the program's, as a shell would say it; 127 where it cannot be started; 143 when it was told
to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NO_SUCH_PROGRAM, _TOLD_TO_END = 127, 143
_FOLDER_PREFIX = "healthd-nccom-"
_KILL_SECONDS = 2.0  # less than those who wait for us give us

# What a job or a launcher sets for processes of its own: as in nccom_guard, which this must not import.
DROPPED_PREFIXES = ("NEURON_", "NCCL_", "CCOM_", "OFI_NCCL_", "FI_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_")


# Taken one by one, never in the middle of something: no end is missed and none comes twice.
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parent, folder, rest = int(arguments[0]), arguments[1], list(arguments[2:])
    cut = rest.index("--")
    given = dict(item.partition("=")[::2] for item in rest[:cut])
    own = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES)}
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        return _TOLD_TO_END

    def ready() -> None:
        """In the new process: the signals are its own again, and it ends with us however we end."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    try:
        program = subprocess.Popen(rest[cut + 1 :], env={**own, **given}, cwd=folder, preexec_fn=ready)
    except OSError as error:
        sys.stderr.write(f"{rest[cut + 1]} cannot be started: {error.strerror or error}\n")
        return _NO_SUCH_PROGRAM
    code = _wait(program.pid)
    _end_all()
    if os.getppid() != parent and os.path.basename(folder).startswith(_FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)  # nobody else will
    return code


def _wait(pid: int) -> int:
    """The program's end, or that we are told to end. Orphans that end before it are reaped."""
    code: int | None = None
    while code is None:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            return _TOLD_TO_END
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    code = os.waitstatus_to_exitcode(ended[1])
    return 128 - code if code < 0 else code


def _end_all() -> None:
    """Kill what descends from us until nothing does: what is started meanwhile is found at the next look."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # all are gone
        time.sleep(0.01)


def _descendants() -> list[int]:
    """All processes below this one. Parents are looked up once, so that the list is of one moment."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    size = 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {os.getpid()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
