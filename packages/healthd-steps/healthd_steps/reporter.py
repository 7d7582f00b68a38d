"""
Reports each step of a rank to the daemon of its node, as a datagram (docs/stragglers.md describes it).

It never blocks, never raises and starts no thread: where no daemon listens, or it is busy, a report is dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

DEFAULT_SOCKET = "/run/healthd/steps.sock"
RETRY_SECONDS = 5.0
"""How long after a failure the socket is not tried again: a job without a daemon pays for a look at the clock."""
_JOB_VARIABLES = ("HEALTHD_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "AWS_BATCH_JOB_ID", "TRAINING_JOB_NAME")
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


class StepReporter:
    """
    The reports of one rank.

        reporter = StepReporter()
        for step, batch in enumerate(data):
            reporter.begin()
            loss = forward_and_backward(batch)
            with reporter.waiting:          # or reporter.ready(): all that follows is waiting
                all_reduce_gradients()
            optimizer.step()
            reporter.end(step)
        reporter.close()                    # the end of the process does it too

    Work on an accelerator is done later than it is asked for: either synchronize before `waiting`, or measure own time
    with the device's events and call `report`.
    """

    def __init__(
        self,
        *,
        job: str | None = None,
        rank: int | None = None,
        size: int | None = None,
        path: str | None = None,
    ) -> None:
        """
        What is None comes from the environment: RANK and WORLD_SIZE, else Slurm's or Open MPI's; HEALTHD_STEPS_SOCKET;
        and as the job's name the first of HEALTHD_JOB, SLURM_JOB_ID, TORCHELASTIC_RUN_ID, AWS_BATCH_JOB_ID,
        TRAINING_JOB_NAME; without any of them "job".
        """
        environ = os.environ
        name = job or _first(environ, _JOB_VARIABLES) or "job"
        rank = _number(_first(environ, _RANK_VARIABLES), 0) if rank is None else rank
        size = _number(_first(environ, _SIZE_VARIABLES), rank + 1) if size is None else size
        plain = "".join(char if char.isascii() and char.isprintable() and char != " " else "_" for char in name)[:128]
        self._head = f"step1 {plain} {rank} {max(size, rank + 1)} "
        self._end = f"end1 {plain} {rank}".encode()
        self._path = path or environ.get("HEALTHD_STEPS_SOCKET") or DEFAULT_SOCKET
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._begun = self._waiting_since = self._waited = 0.0
        self._ready_at: float | None = None
        self.dropped = 0
        """Reports that nobody took."""
        self._process = os.getpid()
        atexit.register(self.close)

    # --- the clock of a step ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.perf_counter()
        self._waited, self._ready_at = 0.0, None

    @property
    def waiting(self) -> StepReporter:
        """A context for what waits for other ranks."""
        return self

    def __enter__(self) -> StepReporter:
        self._waiting_since = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waited += time.perf_counter() - self._waiting_since

    def ready(self) -> None:
        """The rank's own work of this step is done; what follows is waiting. The last call of a step counts."""
        self._ready_at = time.perf_counter()

    def end(self, step: int, work: float | None = None) -> None:
        """The step is over: report it. `work` is how much there was to do, such as tokens."""
        now = time.perf_counter()
        if self._begun == 0.0:
            return
        whole = now - self._begun
        waited = self._waited if self._ready_at is None else now - self._ready_at
        self._begun = 0.0
        self.report(step, whole - waited, waited, work)

    # --- the report ---------------------------------------------------------------------------------------------------

    def report(self, step: int, own_seconds: float, wait_seconds: float, work: float | None = None) -> None:
        """Report a step whose times are known."""
        text = f"{self._head}{step} {own_seconds:.7g} {wait_seconds:.7g}"
        if work is not None:
            text += f" {work:.7g}"
        connected = self._socket or self._connect()
        if connected is None:
            self.dropped += 1
            return
        try:
            connected.send(text.encode())
        except BlockingIOError:  # the daemon is busy
            self.dropped += 1
        except OSError:  # it is gone
            self.dropped += 1
            self._give_back()
            self._retry_at = time.monotonic() + RETRY_SECONDS

    def close(self) -> None:
        """Tell the daemon that this rank is done, and give the socket back. A later report begins anew."""
        if self._socket is not None and os.getpid() == self._process:  # a fork of the rank is not the rank
            with contextlib.suppress(OSError):  # it is busy or gone: it sees the end of the process, or the silence
                self._socket.send(self._end)
        self._give_back()

    def _give_back(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> socket.socket | None:
        if time.monotonic() < self._retry_at:
            return None
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError:  # no descriptor is left
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return None
        try:
            found.connect(self._path)
        except OSError:
            found.close()
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return None
        self._socket = found
        return found


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The first of these variables that says something."""
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdecimal() else otherwise
