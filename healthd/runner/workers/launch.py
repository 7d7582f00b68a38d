"""
Starts worker processes: their command, their environment and their pipes.

Imports next to nothing: `healthd check` starts the node's worker before it loads itself, and both load side by side.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired

import checks
from checks.training.environment import NUMERIC_PREFIXES

WORKER = os.path.join(os.path.realpath(next(iter(checks.__path__))), "worker", "worker.py")
LOAD = b'{"kind":"load","id":0}\n'
"""The command by which the node's worker imports its checks."""

# What a job or a launcher sets for its own processes and would change ours: another rank, a preloaded library.
_DROPPED = frozenset(
    {"LD_PRELOAD", "LD_AUDIT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
# The same for what would give healthy devices other bits than those of other nodes; `env` of [probe] may set it.
_DROPPED_PREFIXES = ("PYTHON", "TORCHELASTIC_", "GLOO_", *NUMERIC_PREFIXES)

REAP_SECONDS = 1.0
AUTO: Mapping[str, object] = {"accelerator": "auto", "host_root": None}
"""What a fork server is asked for where no setting changes it."""
_FLAGS = frozenset({"--json", "--localize", "--profile"})
_ahead: Launch | None = None  # one that nobody has taken yet
_fork_ahead: ForkLaunch | None = None


def start_ahead(arguments: Sequence[str]) -> None:
    """
    Start the node's worker as it is where no setting changes it, and let it import its checks; and the fork server,
    where these arguments of `healthd check` ask for checks of devices.

    Nothing that a setting names is run: whether it may be is decided when the settings have been read.
    """
    global _ahead, _fork_ahead
    if not sys.executable or "HEALTHD_PROBE_PYTHON" in os.environ:  # nobody would take it
        return
    env = environment(sys.executable, {}, os.environ)
    with contextlib.suppress(OSError):
        _ahead = Launch(command(sys.executable, alone=True), env)
        if _ahead.process.stdin is not None:
            _ahead.process.stdin.write(LOAD)
        if ask_for_devices(arguments):
            _fork_ahead = ForkLaunch(sys.executable, env, AUTO)


def environment(python: str, extra: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of workers: ours without the variables of a job's processes, the interpreter's tools first."""
    env = {
        name: value for name, value in own.items() if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    # Not resolved: in a virtual environment the interpreter is a link, and its tools are beside the link.
    folder = os.path.dirname(python)
    path = env.get("PATH") or os.defpath
    env["PATH"] = f"{folder}{os.pathsep}{path}" if folder else path
    env.update(extra)
    return env


def ask_for_devices(arguments: Sequence[str]) -> bool:
    """Whether it can be seen that these arguments of `healthd check` ask for a tier that uses devices."""
    left = iter(arguments)
    for word in left:
        if not word.startswith("--") or word == "--help":  # a name: what it checks is not known yet
            return False
        value = word.partition("=")[2] if "=" in word else "" if word in _FLAGS else next(left, "")
        if word.startswith("--tier") and value == "passive":
            return False
    return True


def take_ahead(argv: Sequence[str], env: Mapping[str, str]) -> Launch | None:
    """The worker that was started ahead, where it is the one that these would start; any other is ended."""
    global _ahead
    if _ahead is None or (_ahead.argv, _ahead.env) != (list(argv), env):
        _end_worker()
        return None
    found, _ahead = _ahead, None
    return found


class Launch:
    """A worker that was started, and our end of the pipe of its results. Raises OSError when it cannot be started."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.argv, self.env = list(argv), dict(env)
        self.started = time.monotonic()
        self.results, result_end = os.pipe()
        try:
            self.process = Popen(
                [*argv, str(result_end), str(os.getpid())],
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                bufsize=0,
                env=self.env,
                cwd="/",
                pass_fds=(result_end,),
                start_new_session=True,
            )
        except OSError:
            os.close(self.results)
            raise
        finally:
            os.close(result_end)


def take_fork_ahead(python: str, env: Mapping[str, str], wanted: Mapping[str, object]) -> ForkLaunch | None:
    """The same of the fork server."""
    global _fork_ahead
    found = _fork_ahead
    if found is None or (found.python, found.env, found.wanted) != (python, env, wanted):
        _end_fork_server()
        return None
    _fork_ahead = None
    return found


class ForkLaunch:
    """
    A fork server that was started (`checks.worker.fork_server`) and has been asked for the import, and our end of its
    socket. Raises OSError.
    """

    def __init__(
        self, python: str, env: Mapping[str, str], wanted: Mapping[str, object], *, alone: bool = False
    ) -> None:
        """`alone`: as of `command`."""
        import json
        import socket

        self.python, self.env, self.wanted = python, dict(env), dict(wanted)
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self.line.send(json.dumps(wanted).encode())
                self.process = Popen(
                    [*command(python, alone=alone), "fork", str(theirs.fileno()), str(os.getpid())],
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=DEVNULL,  # where the import fails, workers that import on their own say why
                    env=self.env,
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError:
            self.line.close()
            raise


def command(python: str, *, alone: bool) -> list[str]:
    """The command of a worker. `alone`: without site-packages, with which the interpreter takes a third longer."""
    return [python, "-I", *(["-S"] if alone else []), WORKER]


def end_ahead() -> None:
    """End what was started ahead, where nobody has taken it."""
    _end_worker()
    _end_fork_server()


def _end_worker() -> None:
    global _ahead
    if _ahead is not None:
        found, _ahead = _ahead, None
        found.process.kill()  # the guard; what it guards dies with it
        for pipe in (found.process.stdin, found.process.stdout, found.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        os.close(found.results)
        with contextlib.suppress(TimeoutExpired):  # one that a dying disk holds is not waited for
            found.process.wait(REAP_SECONDS)


def _end_fork_server() -> None:
    global _fork_ahead
    if _fork_ahead is not None:
        found, _fork_ahead = _fork_ahead, None
        found.line.close()
        found.process.terminate()  # it ends what the import has started
        with contextlib.suppress(TimeoutExpired):
            found.process.wait(REAP_SECONDS)
