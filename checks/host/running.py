"""
Running a program to its end, bounded in time and output: for `checks.host.machine`, and to ask an interpreter what it
has.

The program runs under a guard (`checks.host.guard`), which leaves nothing of it when it ends, when its time is up, or
when this process ends. Nobody waits for the end of a pipe: a grandchild may hold it for ever.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

_GUARD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guard.py")
_CHUNK_BYTES = 1 << 16
_LAST_CHUNKS = 64  # what a pipe can hold at its end, twice over; a grandchild that babbles on is left alone
_POLL_SECONDS = 0.02  # where the kernel has no pidfd (before 5.3)
_BURIAL_SECONDS = 2.0  # SIGKILL works at once unless the kernel itself holds the process


class TimeUpError(Exception):
    """
    The program did not end in time. `killed` False: the kernel holds it, and it is still there.

    `out` and `err` are what it had written on its standard output and standard error, within the bound.
    """

    def __init__(self, killed: bool, out: bytes = b"", err: bytes = b"") -> None:
        super().__init__("time is up")
        self.killed = killed
        self.out = out
        self.err = err


def run_program(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
    max_bytes: int,
    keep_open: Sequence[int] = (),
    folder: str = "",
) -> tuple[int, bytes, bytes]:
    """
    Exit code (negative for a signal), standard output and standard error, each cut at `max_bytes`.

    `folder` is the working directory; empty is ours. Raises OSError when it cannot be started and TimeUpError.
    """
    ended, killed, code, out, err = _run(argv, environment, timeout_seconds, max_bytes, None, keep_open, folder)
    if not ended:
        raise TimeUpError(killed, out, err)
    return code, out, err


def run_until_line(
    argv: Sequence[str], *, environment: Mapping[str, str], timeout_seconds: float, max_bytes: int
) -> tuple[bytes, bytes]:
    """
    What a program that streams wrote until its first line was whole, and its standard error; then its group is killed.

    Without a newline in it the program ended, or wrote `max_bytes`, before. Raises OSError when it cannot be started
    and TimeUpError.
    """
    ended, killed, _, out, err = _run(argv, environment, timeout_seconds, max_bytes, until=b"\n")
    if not ended:
        raise TimeUpError(killed, out, err)
    return out, err


def _run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    timeout_seconds: float,
    max_bytes: int,
    until: bytes | None,
    keep_open: Sequence[int] = (),
    folder: str = "",
) -> tuple[bool, bool, int, bytes, bytes]:
    """Whether it was over in time, whether it could be killed, and what `run_program` returns."""
    failed, failing = os.pipe()
    try:
        guard = [sys.executable, "-I", "-S", _GUARD, str(os.getpid()), str(failing), folder, "--", *argv]
        process = Popen(
            guard,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=dict(environment),
            start_new_session=True,
            pass_fds=(failing, *keep_open),
        )
    except BaseException:
        os.close(failed)
        raise
    finally:
        os.close(failing)
    assert process.stdout
    assert process.stderr
    with process.stdout, process.stderr, open(failed, "rb", buffering=0) as errors:
        output = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        ended = False
        try:
            ended = _wait(process.pid, output, time.monotonic() + timeout_seconds, max_bytes, until)
        finally:
            killed = _end(process)
        os.set_blocking(failed, False)
        if number := errors.read(16):
            raise OSError(int(number), os.strerror(int(number)), argv[0])
        for descriptor, part in output.items():
            for _ in range(_LAST_CHUNKS):
                if not _take(descriptor, part, max_bytes):
                    break
        out, err = (bytes(part) for part in output.values())
        return ended, killed, process.returncode if killed else 0, out, err


def _wait(pid: int, output: dict[int, bytearray], deadline: float, max_bytes: int, until: bytes | None) -> bool:
    """
    Read along until the program itself has ended; False when its time was up before.

    With `until` it is over as soon as these bytes are in its standard output (the first of `output`), or that is full.
    """
    wanted = next(iter(output.values()))
    poller = select.poll()
    for descriptor in output:
        os.set_blocking(descriptor, False)
        poller.register(descriptor, select.POLLIN)
    try:
        watch: int | None = os.pidfd_open(pid)
    except OSError:
        watch = None
    pause_seconds = _POLL_SECONDS
    if watch is not None:
        poller.register(watch, select.POLLIN)
        pause_seconds = 3600.0
    try:
        while not (_is_enough(wanted, until, max_bytes) or _has_ended(pid)):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for descriptor, _ in poller.poll(1000 * min(left, pause_seconds)):
                if descriptor in output and not _take(descriptor, output[descriptor], max_bytes):
                    poller.unregister(descriptor)
    finally:
        if watch is not None:
            os.close(watch)
    return True


def _is_enough(output: bytearray, until: bytes | None, max_bytes: int) -> bool:
    return until is not None and (until in output or len(output) >= max_bytes)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _take(descriptor: int, part: bytearray, max_bytes: int) -> bool:
    """One chunk, of which only what is within the bound is kept; False when there is none (left)."""
    try:
        chunk = os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return False
    part += chunk[: max_bytes - len(part)]
    return bool(chunk)


def _end(process: Popen[bytes]) -> bool:
    """Have the guard end what is left; false when the kernel holds some of it, which the guard goes on to kill."""
    process.terminate()
    process.send_signal(signal.SIGCONT)  # whatever a program may have done to it
    try:
        process.wait(_BURIAL_SECONDS)
    except TimeoutExpired:
        return False
    return True
