"""
Runs one program for `nccom_run`: with an environment of its own, and so that nothing of it outlives the one who asked.

    PYTHON -I -S nccom_guard.py PARENT_PID FOLDER [NAME=VALUE ...] -- PROGRAM [ARGUMENT ...]

nccom-test starts neuron-bench, which holds the NeuronCores. When the worker of a check is killed, because a job has
come, the kernel can end nccom-test with it but not what that has started: the cores would stay taken. This process is
told of the parent's end instead, and takes its whole process group with it. It is run by path and imports nothing of
ours.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_NO_SUCH_PROGRAM = 127
FOLDER_PREFIX = "healthd-nccom-"

# What a job or a launcher sets for processes of its own: other cores, other addresses, another way to the network.
DROPPED_PREFIXES = ("NEURON_", "NCCL_", "CCOM_", "OFI_NCCL_", "FI_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_")


def environment_of(
    own: Mapping[str, str], given: Mapping[str, str], dropped: Sequence[str] = DROPPED_PREFIXES
) -> dict[str, str]:
    """Ours without what a job put there, and with what this run needs."""
    kept = {name: value for name, value in own.items() if not name.startswith(tuple(dropped))}
    return {**kept, **given}


def main(arguments: Sequence[str]) -> int:
    """The exit code of the program, or minus its signal as a shell would say it; 127 where it cannot be started."""
    parent, folder, rest = int(arguments[0]), arguments[1], list(arguments[2:])
    cut = rest.index("--")
    given = dict(item.partition("=")[::2] for item in rest[:cut])
    signal.signal(signal.SIGTERM, lambda *_: _end_all(folder))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        return 1
    try:
        program = subprocess.Popen(rest[cut + 1 :], env=environment_of(os.environ, given), cwd=folder)
    except OSError as error:
        sys.stderr.write(f"{rest[cut + 1]} cannot be started: {error.strerror or error}\n")
        return _NO_SUCH_PROGRAM
    code = program.wait()
    return 128 - code if code < 0 else code


def _end_all(folder: str) -> None:
    """The folder, which nobody else will remove now, and the whole group, this process as well: it leads the group."""
    if os.path.basename(folder).startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
