"""
Programs that a thread waits for and another may call off: none outlives its time, nor does what it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence


class CalledOffError(Exception):
    """`Programs.cancel` was called before the program could be started."""


class Programs:
    """One at a time, each in a session of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """
        Run a program to its end, without input; `environ` None is this process's own.

        OSError where it cannot be started, subprocess.TimeoutExpired where it does not end and close its output in
        time, CalledOffError after `cancel`.
        """
        with self._lock:
            if self._cancelled:
                raise CalledOffError
            process = self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        try:
            out, err = process.communicate(timeout=timeout_seconds)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)
        finally:
            _kill(process)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            process.wait()

    def cancel(self) -> None:
        """End the program under way with all that it has started, and let no other start. From any thread."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                _kill(self._process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # not reaped, so the number of its group is nobody else's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
