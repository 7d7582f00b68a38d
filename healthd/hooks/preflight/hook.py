"""
The hook: starts the keeper, waits for its word, and then starts the command, parks, or ends.

It does nothing that takes time or memory itself, because it is what the launcher sees, signals and may kill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from healthd.core import wire
from healthd.core.errors import ConfigError, HealthdError
from healthd.hooks.launchers import Place
from healthd.hooks.preflight import NOT_ADMITTED, Outcome
from healthd.hooks.preflight.job import environment_of
from healthd.hooks.stopping import Signals

# A launcher that ends a hook kills it some seconds later.
END_SECONDS = 4.0

# Of a path in which a folder and a socket's name still fit.
FOLDER_BYTES = 60


@dataclass(frozen=True, kw_only=True)
class Start:
    """The command that the hook is to become, with its environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def run_hook(
    place: Place,
    command: tuple[str, ...],
    keeper_arguments: Sequence[str],
    show: Callable[[Outcome], None],
    signals: Signals,
) -> int | Start:
    """
    The exit code when the command is not to be started here.

    `keeper_arguments` are this command's own, for the keeper that is told two more by `--keeper`. Raises HealthdError
    in one line. Whatever is raised here ends the keeper, for which `signals` are deferred.
    """
    began = time.monotonic()
    _open_standard_files()
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: no such command here; it is what should start after the gate")
    folder = _make_folder()
    keeper: subprocess.Popen[bytes] | None = None
    try:
        own, its = socket.socketpair()
        with own, own.makefile("rb") as words:
            with its:
                told = f"{its.fileno()}:{os.getpid()}:{began}:{folder}"
                keeper = _start_keeper(keeper_arguments, told, its.fileno())
            outcome = _read_outcome(words, keeper)
            show(outcome)
            if outcome.kind == "run":
                start = Start(command=command, environment=environment_of(place, outcome, os.environ))
                with contextlib.suppress(OSError):  # a keeper that has ended may have said why
                    own.send(b"\n")  # nothing can fail here any more but the command: it is confirmed now
                outcome = dataclasses.replace(_read_outcome(words, keeper), decision=outcome.decision)
                if outcome.kind == "run":
                    if outcome.decision is None or not outcome.decision.excluded:
                        keeper.wait()  # nobody is parked, so the keeper has nothing left to keep
                    return start
                show(dataclasses.replace(outcome, decision=None))  # which was shown
        if outcome.kind == "park":
            sys.stderr.write("healthd: this node was left out; waiting for the job to end\n")
            sys.stderr.flush()
        keeper.wait()
    except BaseException:
        with signals.deferred():
            if keeper is not None:
                _end(keeper)
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return outcome.code if outcome.kind == "park" else outcome.code or NOT_ADMITTED


def _start_keeper(keeper_arguments: Sequence[str], told: str, descriptor: int) -> subprocess.Popen[bytes]:
    """It is in a process group of its own: Ctrl-C is for the hook, whose end it sees."""
    return subprocess.Popen(
        # -P: the working directory is the job's, and a module of its name must not come before ours.
        [sys.executable, "-P", "-m", "healthd", "preflight", "--keeper", told, *keeper_arguments],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


def _read_outcome(words: IO[bytes], keeper: subprocess.Popen[bytes]) -> Outcome:
    line = b""
    with contextlib.suppress(ConnectionResetError):  # it ended without reading what it was told
        line = words.readline()
    if not line:
        keeper.wait()
        raise HealthdError("the keeper of this node ended without a word; not admitted")
    return wire.decode(line, Outcome, what="the keeper's word")


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """
    Have the keeper take back what it has acknowledged and end, within seconds.

    It would see the end of the hook by itself, but not where that is the first process of a container.
    """
    keeper.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(END_SECONDS)


def _make_folder() -> Path:
    """In /tmp where a socket in one of the usual place would have too long a name for the kernel (107 bytes)."""
    try:
        usual = tempfile.gettempdir()
        where = usual if len(os.fsencode(usual)) <= FOLDER_BYTES else "/tmp"
        return Path(tempfile.mkdtemp(prefix="healthd-preflight-", dir=where))
    except OSError as error:
        text = f"no temporary folder can be made: {error.strerror}; set TMPDIR to a folder that can be written"
        raise ConfigError(text) from None


def _open_standard_files() -> None:
    """A launcher may close them: then the next file that is opened would be taken for one of them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(number, True)
