"""
A process that has imported what the workers of devices need, and forks them: one import of torch on each node.

    PYTHON -I /path/to/checks/worker/worker.py fork SOCKET_DESCRIPTOR PARENT_PID

The runner names the accelerator on the socket, or the host. This process imports what that accelerator allows to be
shared (`Descriptor.prepare_fork`; for the host: its checks) and answers `ready`, or `refused` with the reason. After
that each message with three descriptors (standard input, output, results) becomes a new worker. A worker is a child of
the runner, as if the runner had executed it: the runner reads its exit status, and it does not end with this process.

Only a process with a single thread may fork: a copy of any other can hang on a lock that a missing thread holds. So
this process counts its threads and its children after the import, and refuses if there are any.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from errno import EAGAIN, ENOMEM
from typing import Any

from checks.host.guard import adopt_orphans, end_descendants, has_children
from checks.worker.protocol import HOST

MAX_MESSAGE_BYTES = 64 * 1024
DESCRIPTORS = 3
"""Of a new worker: standard input, standard output (and error), results."""
_ABOVE = 64  # descriptors are moved here first, so that none is in the way of another's number
_RESULTS = 3
_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}
"""The number of the system call by machine. The first argument is `flags` on both."""
# OpenBLAS, which comes with numpy, starts its threads when it is imported, unless it may have one alone.
_ONE_THREAD = "OPENBLAS_NUM_THREADS"


class RefusedError(RuntimeError):
    """Workers cannot be forked from this process; the text says why."""


def serve(descriptor: int, parent: int) -> int:
    """
    Fork workers until the runner closes its end, which ends this process. Returns in each new worker: the descriptor
    of its results.
    """
    if not adopt_orphans(parent):
        os._exit(1)
    with socket.socket(fileno=descriptor) as line:
        wanted, _ = _receive(line)
        if wanted is None:
            os._exit(0)
        try:
            accelerator = _prepare(wanted)
        except Exception as error:  # noqa: BLE001  workers are then started one by one, and say what is wrong
            reason = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
            end_descendants()
            _send(line, {"refused": " ".join(reason.split())[:500]})
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _send(line, {"ready": accelerator})
        while True:
            message, descriptors = _receive(line)
            if message is None:
                os._exit(0)
            try:
                pid = _fork_sibling()
            except OSError as error:
                _send(line, {"refused": f"clone: {error.strerror}", "for_now": error.errno in (EAGAIN, ENOMEM)})
                os._exit(0)  # requests that wait have this answer too, and their descriptors end with us
            if pid == 0:
                line.close()
                return _take(descriptors)
            for one in descriptors:
                os.close(one)
            _send(line, {"pid": pid})


def _prepare(wanted: Mapping[str, Any]) -> str:
    """
    Import what the workers share; the accelerator's name.

    Raises RefusedError where it cannot be shared, and whatever the import raises.
    """
    from pathlib import Path

    from checks.accelerators import find_accelerator
    from checks.discover import builtin_checks
    from checks.host.machine import Host

    if platform.machine() not in _CLONE or sys.maxsize < 2**32:
        raise RefusedError(f"not known how to fork on {platform.machine()}")
    if wanted["accelerator"] == HOST:
        _share(_prepare_host)
        return HOST
    host = Host(Path(wanted["host_root"]) if wanted["host_root"] else None)
    descriptor = find_accelerator(wanted["accelerator"], host).DESCRIPTOR
    if descriptor.prepare_fork is None:
        raise RefusedError(f"workers of {descriptor.name} are not forked")
    prepare = descriptor.prepare_fork

    def prepare_all() -> None:
        prepare()
        builtin_checks()

    _share(prepare_all)
    return descriptor.name


def _prepare_host() -> None:
    """Import what the worker of the node needs in each round: the standard library alone."""
    import checks.worker.commands
    import checks.worker.loading  # noqa: F401  each worker uses both
    from checks.accelerators import accelerator_names
    from checks.discover import HOST_PACKAGES, builtin_checks

    accelerator_names()  # imports all of them
    builtin_checks(HOST_PACKAGES)


def _share(prepare: Callable[[], object]) -> None:
    """Import what the workers share. Raises RefusedError where this process can then not be copied."""
    devices = _devices()
    cores, given = os.sched_getaffinity(0), os.environ.get(_ONE_THREAD)
    os.environ.setdefault(_ONE_THREAD, "1")
    gc.disable()  # what is imported stays
    prepare()
    if given is None:
        del os.environ[_ONE_THREAD]
    sys.stdout.flush()  # what is left in a buffer would be the output of each worker
    if os.sched_getaffinity(0) != cores:
        raise RefusedError("the import bound this process to some of its cores")
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RefusedError(f"the import started threads: {threads - 1}")
    if has_children():
        raise RefusedError("the import left processes")
    if opened := _devices() - devices:
        raise RefusedError(f"the import opened {', '.join(sorted(opened))}")
    gc.enable()
    gc.freeze()  # the collector of a worker does not write to what it shares


def _devices() -> set[str]:
    """The device files that this process has open."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return {path for link in links if os.path.exists(link) and (path := os.readlink(link)).startswith("/dev/")}


def _fork_sibling() -> int:
    """
    Fork a child of this process's parent. Returns 0 in the child, else its id. Raises OSError.

    The C library does not know of the new process: its record of the thread's id stays that of this process. So the
    child is the guard, which only waits, and forks the worker as usual (`stand_guard`): that fork runs the handlers of
    all libraries, and sets the record right.
    """
    before, in_child, in_parent = (
        getattr(ctypes.pythonapi, name) for name in ("PyOS_BeforeFork", "PyOS_AfterFork_Child", "PyOS_AfterFork_Parent")
    )
    clone: Callable[..., int] = ctypes.PyDLL(None, use_errno=True).syscall
    before()
    pid = clone(_CLONE[platform.machine()], ctypes.c_ulong(_CLONE_PARENT | signal.SIGCHLD), *[None] * 4)
    (in_child if pid == 0 else in_parent)()
    if pid == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid


def _take(descriptors: list[int]) -> int:
    """In the new process: a session of its own, and these descriptors alone."""
    import fcntl

    os.setsid()
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, _ABOVE) for one in descriptors]
    for one, number in zip([moved[0], moved[1], moved[1], moved[2]], range(_RESULTS + 1), strict=True):
        os.dup2(one, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _RESULTS:
            try:
                os.close(int(name))
            except OSError:  # the one of this listing
                continue
    return _RESULTS


def _receive(line: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message with its descriptors; None when the runner has closed its end."""
    found = array.array("i")
    text, ancillary, _, _ = line.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_LEN(DESCRIPTORS * found.itemsize))
    for _, _, content in ancillary:
        found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return (json.loads(text) if text else None), found.tolist()


def _send(line: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        line.sendall(json.dumps(message).encode())
    except OSError:  # the runner has ended
        os._exit(0)
