"""
Real processes that need not import anything: forked from one that has imported it all before.

`Popen` is `subprocess.Popen` for `PYTHON -I checks/worker/worker.py ...`, `PYTHON -I -S checks/host/guard.py ...` and
`PYTHON -m healthd ...`: such a process is a child of the one that starts it, with the descriptors, environment, working
directory, session, command line, signals and exit code that it would have been executed with, and begins in
milliseconds where importing torch alone takes seconds. Any other command is executed. The processes that are made so
start their own workers and helpers the same way.

`PYTHON -P tests/aggregator/tuned.py ...` is one more of these. `ScriptPopen` does the same for `PYTHON -c ...`.

What an interpreter does at its start, and what a process imports, is not tested by these: the tests that are about it
use `subprocess.Popen`, below which everything is executed.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = str(ROOT / "checks/worker/worker.py")  # and nothing of healthd is imported: `prepared_server` says why
GUARD = str(ROOT / "checks/host/guard.py")
SERVER = Path(__file__).parent / "prepared_server.py"
SERVICES = (str(ROOT / "tests/node/node_process.py"),)
TUNED = str(ROOT / "tests/aggregator/tuned.py")
PROGRAMS = ([WORKER], [GUARD], [TUNED], [str(ROOT / "tests/checks/launch_ranks.py")], *([path] for path in SERVICES))
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""The number of the system call on this machine; None: not known, all is executed."""
OPTIONS = ("-I", "-S", "-P")
EXECUTED = next(
    (path for path in sorted(Path(sys.executable).parent.glob("python3*")) if str(path) != sys.executable), None
)
"""This interpreter under another name: what is started by it is executed. None: it has one name, all is forked."""
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
SHOWN_BYTES = 8 * 1024  # of a command line and of an environment, as /proc shows them

OF_WORKERS = tuple(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted(ROOT.glob("checks/**/*.py"))
    if file.name != "__init__.py"
)
MODULES = (
    "torch",
    *OF_WORKERS,
    "healthd.cli.fleet.baseline",
    "healthd.cli.check",
    "healthd.cli.fleet.fleet",
    "healthd.cli.hooks.gate",
    "healthd.cli.hooks.join",
    "healthd.cli.hooks.preflight",
    "healthd.cli.terminal.decisions",
    "healthd.cli.services",
    "healthd.core.http.gates",
    "healthd.aggregator.process",
    "healthd.node.daemon",
    "healthd.hooks.preflight.hook",
    "healthd.hooks.preflight.sidecar",
    "healthd.core.http.server",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "rich.progress",
    "sqlalchemy.dialects.sqlite",
)

# The arguments of `Popen._execute_child` after the first, in all versions of Python from 3.11 on.
NAMES = (
    "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell",
    "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals", "gid", "gids", "uid",
    "umask", "start_new_session", "process_group",
)  # fmt: skip


class Line:
    """The way to a prepared process, which is a child of ours."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """The process id of a new child of ours."""
        with self._lock:
            sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self._line.sendmsg([json.dumps(request).encode()], sent)
            answer = self._line.recv(64)
        if not answer:
            raise OSError("the prepared process has ended")
        return int(answer)


def line(*, alone: bool) -> Line | None:
    """
    The way to a prepared process of this one, which is started when it is first asked for; None: there is none.

    `alone`: for what is without site-packages. That process is small, and forks several times as fast.
    """
    pid = os.getpid()
    if not lines:
        starters.add(pid)
    if alone and not {(pid, True), (pid, False)} & lines.keys() and (asked := executed.get(pid, 0)) < EXECUTED_FIRST:
        executed[pid] = asked + 1
        return None
    # It would end with a thread that has started it (PR_SET_PDEATHSIG); the main thread stays.
    if pid in starters and (pid, alone) not in lines and threading.current_thread() is threading.main_thread():
        lines[pid, alone] = Line(start(alone=alone))
    return lines.get((pid, alone)) or lines.get((pid, False))


lines: dict[tuple[int, bool], Line] = {}
"""By process id and `alone`."""
EXECUTED_FIRST = 8
"""So many processes without site-packages are executed first: that costs less than a process that forks a few."""
executed: dict[int, int] = {}
"""How many were, by process id."""
starters: set[int] = set()
"""Who starts prepared processes: the first that asks. A forked process has what it was given."""


def start(*, alone: bool) -> socket.socket:
    """Execute a process that imports it all."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                *(["-S"] if alone else []),
                str(SERVER),
                str(theirs.fileno()),
                str(os.getpid()),
                str(ROOT),
                *(OF_WORKERS if alone else MODULES),
                " " * SHOWN_BYTES,
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "ROOM": " " * SHOWN_BYTES},
            cwd="/",
        )

    def end() -> None:
        ours.close()
        process.kill()
        process.wait()

    atexit.register(end)
    return ours


def program_of(argv: list[str]) -> list[str]:
    """What stands where an interpreter's options end: `PYTHON -I worker.py ...`, `PYTHON -P -m healthd ...`."""
    words = argv[1:]
    while words and words[0] in OPTIONS:
        words = words[1:]
    return words


def is_prepared(argv: list[str], *, scripts: bool) -> bool:
    """Whether a process of this command line is forked instead of executed."""
    words = program_of(argv)
    known = words[:2] == ["-m", "healthd"] or words[:1] in PROGRAMS or (scripts and words[:1] == ["-c"])
    return known and argv[0] == sys.executable and CLONE is not None


def guards_script(argv: list[str]) -> bool:
    """Whether it is a guard over a text of Python, which is then forked from the guard too."""
    return program_of(argv)[:1] == [GUARD] and is_script(argv[argv.index("--") + 1 :])


def is_script(argv: list[str]) -> bool:
    """Whether this is how checks run a text of Python in a process of its own."""
    return argv[:3] == [sys.executable, "-I", "-c"]


class Popen(subprocess.Popen[Any]):
    """See the module."""

    scripts = False

    def _execute_child(self, args: Any, *rest: Any) -> None:
        given = dict(zip(NAMES, rest, strict=True))
        argv = [os.fspath(args)] if isinstance(args, (str, os.PathLike)) else [os.fspath(word) for word in args]
        before = given["preexec_fn"]
        # A function of a module is found there by its name; with any other the process is executed.
        named = before is None or getattr(before, "__qualname__", ".").isidentifier()
        known = is_prepared(argv, scripts=self.scripts)
        alone = "-S" in argv[:3] and not guards_script(argv)
        prepared = line(alone=alone) if known and named and not given["shell"] else None
        if prepared is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        ours = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        passed = list(given["pass_fds"])
        env = os.environ if given["env"] is None else given["env"]
        request = {
            "argv": argv,
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
            "folder": os.fspath(given["cwd"]) if given["cwd"] is not None else os.getcwd(),
            "before": before and [before.__module__, before.__qualname__],
            "session": given["start_new_session"],
            "group": given["process_group"],
            "numbers": [0, 1, 2, *passed],
            "limits": [resource.getrlimit(one) for one in LIMITS],
            "ignored": [int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN],
        }
        try:
            self.pid = prepared.fork(request, [n if one == -1 else one for n, one in enumerate(ours)] + passed)
        finally:
            self._child_created = True
            self._close_pipe_fds(  # type: ignore[attr-defined]
                *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
            )


class ScriptPopen(Popen):
    """Also for a text of Python, which finds torch and healthd imported."""

    scripts = True
