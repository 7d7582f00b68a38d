"""
A process with modules imported once, which forks children that become other processes: see `tests.prepared`.

    PYTHON -I prepared_server.py SOCKET PARENT_PID FOLDER MODULE ...

It answers each request on SOCKET with the process id of a child of the process PARENT_PID.
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import warnings
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_REQUEST_BYTES = 1 << 18
MAX_DESCRIPTORS = 16
ABOVE = 100  # descriptors are moved here first, so that none is in the way of another's number


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request with its descriptors; None when nobody asks any more."""
    descriptors = array.array("i")
    text, ancillary, _, _ = line.recvmsg(MAX_REQUEST_BYTES, socket.CMSG_LEN(MAX_DESCRIPTORS * descriptors.itemsize))
    for _, _, content in ancillary:
        descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return (json.loads(text), descriptors.tolist()) if text else None


def fork_orphan(ready: int) -> int:
    """
    Fork a child whose parent ends at once, so that the process that asked becomes its parent.

    Returns 0 in the child, once that is so; its process id here.
    """
    read_end, write_end = os.pipe()
    told_read, told_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(told_write, str(pid).encode())
            os._exit(0)
        os.close(write_end)
        os.read(read_end, 1)  # ends when the parent has, and been reaped
        os.close(read_end)
        os.close(told_read)
        os.close(told_write)
        os.close(ready)
        return 0
    os.close(read_end)
    os.close(told_write)
    os.waitpid(middle, 0)
    pid = int(os.read(told_read, 32))
    os.close(told_read)
    os.close(write_end)
    return pid


def place(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that are asked for, and close all others."""
    import fcntl

    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, ABOVE + max(numbers)) for one in descriptors]
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number, inheritable=True)
    low = 0
    for number in sorted(set(numbers)):
        if low < number:  # of none, it would close all
            os.closerange(low, number)
        low = number + 1
    os.closerange(low, ABOVE + max(numbers) + 2 * MAX_DESCRIPTORS)


def show(argv: list[str], env: dict[str, str]) -> None:
    """Let /proc/PID/cmdline and /proc/PID/environ show what an executed process would."""
    with open("/proc/self/stat") as file:
        places = [int(word) for word in file.read().rpartition(")")[2].split()[45:49]]
    for (start, end), words in zip(
        (places[:2], places[2:]), (argv, [f"{name}={value}" for name, value in env.items()]), strict=True
    ):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the process that was asked for; returns only when its program does."""
    signal.set_wakeup_fd(-1)
    if request["session"]:
        os.setsid()
    place(descriptors, request["numbers"])
    os.chdir(request["folder"] or ".")
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    show(request["argv"], request["env"])
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    # The program stands where an interpreter's options end: `PYTHON -I worker.py ...`, `PYTHON -P -m healthd ...`.
    words = request["argv"][1:]
    while words[0] in ("-I", "-P"):
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def serve(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request. Returns the request in a child, None when nobody asks any more."""
    while (found := receive(line)) is not None:
        pid = fork_orphan(line.fileno())
        if pid == 0:
            line.detach()
            return found
        for one in found[1]:
            os.close(one)
        line.sendall(str(pid).encode())
    return None


def main() -> None:
    number, parent, folder, *modules = (word for word in sys.argv[1:] if word.strip())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)
    sys.path.insert(0, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)
    gc.freeze()
    found = serve(socket.socket(fileno=int(number)))
    if found is not None:
        become(*found)


if __name__ == "__main__":
    main()
