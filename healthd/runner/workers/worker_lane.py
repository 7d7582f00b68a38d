"""
Runs the commands for one device, or for the node, in its worker process: one lane.

Commands are sent ahead, so that a worker never waits for the runner, and answered in order. A command whose worker
times out, dies or sends garbage is lost; the commands behind it go to a new worker.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from checks.contract import Missing
from checks.worker.protocol import shorten
from healthd.runner.settings import RunProgress
from healthd.runner.workers.outcome import Outcome, explain, last_line
from healthd.runner.workers.workers import Ended, WorkerProcess, Workers


@dataclass(kw_only=True)
class Job:
    """One command for a worker."""

    check: str
    """The check, or the kind of command where it is for no check."""
    command: dict[str, Any]
    """The members of the command, without `check` and `id`."""
    timeout_seconds: float
    """Counts from when the worker can begin with it."""
    finish: Callable[[Outcome], None] = lambda _: None
    """Receives the outcome."""
    retry: bool = True
    """Whether it is sent again after the worker has crashed."""
    attempts: int = 1
    """The number of the present attempt, from 1."""
    crashes: tuple[str, ...] = ()
    """How the attempts before this one ended."""
    id: int = 0
    """The number of the command for its worker; 0 until it is sent."""
    submitted: float = field(default_factory=time.monotonic)
    """When it was queued (monotonic)."""
    sent_to: WorkerProcess | None = field(default=None, repr=False)
    """None until it is sent."""


class WorkerLane:
    """`target` is the device of its workers; None is the standard-library worker of the node."""

    def __init__(self, workers: Workers, target: str | None) -> None:
        self.target = target or "node"
        self.process: WorkerProcess | None = None
        self.cold = False
        """The present worker has graphs to compile before it can measure."""
        self._device = target
        self._workers = workers
        self._jobs: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._next_id = 0
        self._free_at = 0.0  # when the worker could begin its present command
        self._ready_at: float | None = None
        self._starts = 0  # attempts to start the present worker

    def submit(self, job: Job) -> None:
        """Queue a command; it is sent at once when there is a worker."""
        self._jobs.append(job)
        self._idle.clear()
        self._wake.set()
        if self.process is not None:
            self._send_queued(self.process)

    def ask(self, job: Job) -> asyncio.Future[Outcome]:
        """Queue a command, and get its outcome; `finish` of the job is called before."""
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        finish = job.finish

        def settle(outcome: Outcome) -> None:
            finish(outcome)
            if not answer.done():
                answer.set_result(outcome)

        job.finish = settle
        self.submit(job)
        return answer

    async def wait_idle(self) -> None:
        """Wait until the queue is empty."""
        await self._idle.wait()

    def close(self) -> None:
        """No more commands will come: `serve` ends when the queue is empty."""
        self._closing = True
        self._wake.set()

    async def serve(self) -> None:
        """Work on the queue until the lane is closed."""
        while True:
            if self._jobs:
                await self._next_job()
                continue
            self._idle.set()
            if self._closing:
                await self.retire()
                return
            self._wake.clear()
            await self._wake.wait()

    async def _next_job(self) -> None:
        if self.process is None and (lost := await self.start()) is not None:
            while self._jobs:
                job = self._jobs.popleft()
                attempts = max(job.attempts, self._starts)
                outcome = Outcome(target=self.target, attempts=attempts)
                job.finish(outcome.fail(lost.reason, lost.message, action=lost.action))
            return
        job = self._jobs[0]
        outcome = await self._read(job, max(self._free_at, job.submitted))
        again = outcome.crashed and job.retry and job.attempts <= self._workers.settings.retries
        if outcome.missing is not None and again:
            job.crashes = (*job.crashes, outcome.missing.message)
            job.attempts += 1
        else:
            self._jobs.popleft()
            job.finish(outcome)
        if outcome.worker_lost:
            await self.kill(job.check)
        if again:
            await self._workers.back_off(job.attempts - 1)

    # --- the worker ---------------------------------------------------------------------------------------------------

    async def start(self) -> Missing | None:
        """Start a worker where there is none, and wait until it is ready. None, or why there is none."""
        if self.process is not None:
            return None
        lost = self._workers.stuck(self.target)
        self._starts = 0
        while lost is None:
            self._starts += 1
            attempt = self._starts
            lost, final = await self._try_start()
            if lost is None:
                return None
            await self.kill("")
            if final or attempt > self._workers.settings.retries:
                lost = replace(lost, message=f"{lost.message} (attempt {attempt})" if attempt > 1 else lost.message)
                break
            await self._workers.back_off(attempt)
            lost = self._workers.stuck(self.target)
        return lost

    async def _try_start(self) -> tuple[Missing | None, bool]:
        """Start a worker and wait until it is ready; else why it is not, and whether another attempt is of no use."""
        limit_seconds = self._workers.settings.start_timeout_seconds
        process: WorkerProcess | None = None
        try:
            async with asyncio.timeout(limit_seconds):
                self.process = process = await self._workers.spawn(self._device)
                setup = {"kind": "setup", "id": 0, **self._workers.setup(self._device)}
                process.send(json.dumps(setup).encode() + b"\n")
                self._send_queued(process)
                event = await process.next_event()
        except OSError as error:
            if isinstance(error, TimeoutError):
                if process is not None:
                    process.kill()
                return self._missing("StartFailed", f"not ready within {limit_seconds:g} s"), True
            text = (
                f"cannot start {self._workers.python}: {error.strerror or error}; name another interpreter with python"
            )
            text += " under [probe] or HEALTHD_PROBE_PYTHON"
            return self._missing("StartFailed", text), False
        if isinstance(event, Ended):
            line = last_line(process.last_output())
            text = f"{event.message} before it was ready{': ' if line else ''}{line}"
            return self._missing("StartFailed", text, process.last_output()), False
        if event["kind"] == "raised":
            return self._setup_raised(event, process)
        if event["kind"] != "ready":
            return self._missing("Garbage", "sent something other than ready"), True
        self._workers.note_versions(event.get("versions"))
        self.cold = bool(event.get("cold"))
        self._ready_at = self._free_at = time.monotonic()
        return None, False

    def _setup_raised(self, event: dict[str, Any], process: WorkerProcess) -> tuple[Missing, bool]:
        """Why a worker did not become ready, by what it raised, and whether another attempt is of no use."""
        message = str(event.get("message"))
        if event.get("type") == "DeviceMissingError":
            return self._missing("MissingDevice", message), True
        if event.get("type") == "ModuleNotFoundError":
            # The commonest mistake of a first day; a second attempt does not help.
            text = f"{self._workers.python}: {message}; name the interpreter that has it with python under [probe] or"
            return self._missing("StartFailed", f"{text} HEALTHD_PROBE_PYTHON: 'healthd doctor' says how"), True
        if event.get("reason") == "ColdCache":
            return self._missing("ColdCache", message), True
        return self._missing("StartFailed", f"{event.get('type')}: {message}", process.last_output()), False

    def _missing(self, reason: str, message: str, output: str = "") -> Missing:
        reason, message, action = explain(reason, message, output)
        return Missing(target=self.target, reason=reason, message=shorten(message), action=action)

    async def retire(self) -> None:
        """Let the worker end by itself."""
        if self.process is not None:
            process = self._detach(self.process)
            if not await process.retire(self._workers.settings.kill_grace_seconds):
                self._workers.add_unreaped(self.target, process)

    async def kill(self, check: str) -> None:
        """Kill the worker and wait a short time until it is reaped; it is recorded when that does not happen."""
        if self.process is not None:
            self.process.kill()
            process = self._detach(self.process)
            if not await process.wait_gone(self._workers.settings.kill_grace_seconds):
                self._workers.add_unreaped(self.target if self._device else f"node/{check}", process)

    def _detach(self, process: WorkerProcess) -> WorkerProcess:
        self.count_seconds()
        self.process = None
        return process

    def count_seconds(self) -> None:
        """Add the time for which the worker has had its device to the cost of the run."""
        if self._ready_at is not None and self._device is not None:
            self._workers.device_seconds += time.monotonic() - self._ready_at
        self._ready_at = None

    # --- commands and outcomes ----------------------------------------------------------------------------------------

    def _send_queued(self, process: WorkerProcess) -> None:
        for job in self._jobs:
            if job.sent_to is not process:
                self._send(job, process)

    def _send(self, job: Job, process: WorkerProcess) -> None:
        self._next_id += 1
        job.id, job.sent_to = self._next_id, process
        process.send(json.dumps({**job.command, "check": job.check, "id": job.id}).encode() + b"\n")

    async def run_now(self, job: Job) -> Outcome:
        """Run a command beside the queue."""
        if self.process is not None:
            self._send(job, self.process)
        return await self._read(job, job.submitted)

    async def _read(self, job: Job, begin: float) -> Outcome:
        """The outcome of a command that was sent; its time counts from `begin` (monotonic)."""
        outcome = Outcome(target=self.target, attempts=max(job.attempts, self._starts), crashes=job.crashes)
        process = self.process
        if process is None:
            return outcome.fail_with_worker("Crashed", "its worker has exited")

        def report(event: str, text: str) -> None:
            if job.command["kind"] == "run":  # the others are no progress of a check
                progress = RunProgress(check=job.check, target=self.target, event=event, text=text)
                self._workers.report_progress(progress)

        await outcome.read(process, job.id, job.timeout_seconds, begin=begin, on_step=report)
        self._free_at = time.monotonic()
        return outcome
