"""
Real processes that need not import anything: forked from one that has imported it all before.

`Popen` is `subprocess.Popen` for `PYTHON -I checks/worker.py ...` and `PYTHON -m healthd ...`: such a process is a
child of this one, with the descriptors, environment, working directory, session, command line, signals and exit code
that it would have been started with, and begins in milliseconds where importing torch alone takes seconds. Any other
command is executed as always. One process for each set of modules is kept until this one ends.

What an interpreter does at its start is not tested by these: the tests that are about it use `subprocess.Popen`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from healthd.runner.workers import WORKER

ROOT = Path(__file__).parent.parent
SERVER = Path(__file__).parent / "prepared_server.py"
PR_SET_CHILD_SUBREAPER = 36
SHOWN_BYTES = 16 * 1024  # of a command line and of an environment, as /proc shows them

TORCH = ("torch",)
HEALTHD = (
    "healthd.cli.check",
    "healthd.cli.fleet",
    "healthd.cli.gate",
    "healthd.cli.joining",
    "healthd.cli.preflight",
    "healthd.cli.render",
    "healthd.cli.services",
    "healthd.client",
    "healthd.fleet.app",
    "healthd.node.daemon",
    "healthd.web",
    "uvicorn.protocols.http.httptools_impl",
)

# The arguments of `Popen._execute_child` after the first, in all versions of Python from 3.11 on.
NAMES = (
    "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell",
    "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals", "gid", "gids", "uid",
    "umask", "start_new_session", "process_group",
)  # fmt: skip


class Server:
    """One process with modules imported, which forks."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", str(SERVER), str(theirs.fileno()), str(os.getpid()), str(ROOT), *modules),
                    " " * SHOWN_BYTES,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "ROOM": " " * SHOWN_BYTES},
                cwd="/",
            )
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """The process id of a new child of ours."""
        with self._lock, _adopting():
            sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self._line.sendmsg([json.dumps(request).encode()], sent)
            answer = self._line.recv(64)
        if not answer:
            raise OSError("the prepared process has ended")
        return int(answer)

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def server(modules: tuple[str, ...], pid: int) -> Server:
    """The one of this process, started when it is first asked for."""
    return Server(modules)


def modules_of(argv: list[str]) -> tuple[str, ...] | None:
    """What a process of this command line imports; None for one that is executed."""
    if argv[:3] == [sys.executable, "-I", WORKER]:
        return TORCH
    if argv[0] == sys.executable and argv[1:4] in (["-P", "-m", "healthd"], ["-m", "healthd", *argv[3:4]]):
        return HEALTHD
    return None


class Popen(subprocess.Popen[Any]):
    """See the module."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        given = dict(zip(NAMES, rest, strict=True))
        argv = [os.fspath(args)] if isinstance(args, (str, os.PathLike)) else [os.fspath(word) for word in args]
        modules = modules_of(argv) if not given["shell"] else None
        if modules is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        ours = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        passed = list(given["pass_fds"])
        env = os.environ if given["env"] is None else given["env"]
        request = {
            "argv": argv,
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
            "folder": os.fspath(given["cwd"]) if given["cwd"] is not None else os.getcwd(),
            "session": given["start_new_session"],
            "numbers": [0, 1, 2, *passed],
        }
        try:
            self.pid = server(modules, os.getpid()).fork(
                request, [number if one == -1 else one for number, one in enumerate(ours)] + passed
            )
        finally:
            self._child_created = True
            self._close_pipe_fds(  # type: ignore[attr-defined]
                *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
            )


@contextlib.contextmanager
def _adopting() -> Any:
    """Orphans below us become our children, instead of those of the first process of the machine."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

