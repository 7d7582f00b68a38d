"""
One lane: the worker of one device, or of the node, and the commands that wait for it.

Commands are sent ahead, so that a worker never waits for the runner, and answered in order. A command that times out,
or whose worker dies or babbles, is lost; those behind it go to a fresh worker.
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
from checks.worker.protocol import ProtocolError, shorten
from healthd.runner.settings import RunProgress
from healthd.runner.workers.child import Child, Ended
from healthd.runner.workers.events import hear, last_step
from healthd.runner.workers.outcome import Outcome, explain, last_line
from healthd.runner.workers.workers import Workers


@dataclass(kw_only=True)
class Job:
    """A command and who wants its outcome. `retry` allows another attempt after the death of the worker."""

    check: str
    command: dict[str, Any]
    timeout_seconds: float
    finish: Callable[[Outcome], None]
    retry: bool = True
    attempts: int = 1
    crashes: tuple[str, ...] = ()
    id: int = 0
    submitted: float = field(default_factory=time.monotonic)
    sent_to: Child | None = field(default=None, repr=False)


class Lane:
    """`target` is the device of its workers; None for the standard-library child of the node."""

    def __init__(self, workers: Workers, target: str | None) -> None:
        self.target = target or "node"
        self.child: Child | None = None
        self.cold = False  # the present worker has graphs to compile before it can measure
        self._device = target
        self._workers = workers
        self._jobs: deque[Job] = deque()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._next_id = 0
        self._free_at = 0.0  # when the worker could begin with what it does now
        self._ready_at: float | None = None
        self.heard_at = 0.0
        """When the worker last said something of the command under way (monotonic)."""
        self._starts = 0  # that the present worker took, or the last attempt at one

    def submit(self, job: Job) -> None:
        """Queue a command; it is sent at once when a worker is there."""
        self._jobs.append(job)
        self._idle.clear()
        self._news.set()
        if self.child is not None:
            self._send(self.child)

    async def idle(self) -> None:
        """Until all that was submitted is done."""
        await self._idle.wait()

    def close(self) -> None:
        """Nothing more will be submitted: `serve` ends when the queue is empty."""
        self._closing = True
        self._news.set()

    async def serve(self) -> None:
        """Work until closed."""
        while True:
            if self._jobs:
                await self._next_job()
                continue
            self._idle.set()
            if self._closing:
                await self.retire()
                return
            self._news.clear()
            await self._news.wait()

    async def _next_job(self) -> None:
        if self.child is None and (lost := await self.ensure()) is not None:
            while self._jobs:
                job = self._jobs.popleft()
                attempts = max(job.attempts, self._starts)
                outcome = Outcome(target=self.target, attempts=attempts)
                job.finish(outcome.lost(lost.reason, lost.message, action=lost.action))
            return
        job = self._jobs[0]
        outcome = await self.collect(job, max(self._free_at, job.submitted) + job.timeout_seconds)
        again = (
            outcome.missing is not None
            and outcome.missing.reason == "Crashed"
            and job.retry
            and job.attempts <= self._workers.settings.retries
        )
        if outcome.missing is not None and again:
            job.crashes = (*job.crashes, outcome.missing.message)
            job.attempts += 1
        else:
            self._jobs.popleft()
            job.finish(outcome)
        if outcome.worker_lost:
            await self.bury(job.check)
        if again:
            await self._workers.back_off(job.attempts - 1)

    # --- the worker ---------------------------------------------------------------------------------------------------

    async def ensure(self) -> Missing | None:
        """Have a worker that is ready. None, or why there is none."""
        if self.child is not None:
            return None
        lost = self._workers.stuck(self.target)
        self._starts = 0
        while lost is None:
            self._starts += 1
            attempt = self._starts
            lost, final = await self._start()
            if lost is None:
                return None
            await self.bury("")
            if final or attempt > self._workers.settings.retries:
                lost = replace(lost, message=f"{lost.message} (attempt {attempt})" if attempt > 1 else lost.message)
                break
            await self._workers.back_off(attempt)
            lost = self._workers.stuck(self.target)
        return lost

    async def _start(self) -> tuple[Missing | None, bool]:
        """Start a worker and hear that it is ready; else why not, and whether that is final."""
        limit_seconds = self._workers.settings.start_timeout_seconds
        try:
            self.child = child = self._workers.spawn(self._device)
        except OSError as error:
            return self._lost("StartFailed", f"cannot start {self._workers.python}: {error.strerror or error}"), False
        child.send(json.dumps({"kind": "setup", "id": 0, **self._workers.setup(self._device)}).encode() + b"\n")
        self._send(child)
        try:
            async with asyncio.timeout(limit_seconds):
                event = await child.next()
        except TimeoutError:
            child.kill()
            return self._lost("StartFailed", f"not ready within {limit_seconds:g} s"), True
        if isinstance(event, Ended):
            words = last_line(child.last_words())
            text = f"{event.message} before it was ready{': ' if words else ''}{words}"
            return self._lost("StartFailed", text, child.last_words()), False
        if event["kind"] == "raised":
            return self._raised(event, child)
        if event["kind"] != "ready":
            return self._lost("Garbage", "said something else than ready"), True
        self._workers.learn_versions(event.get("versions"))
        self.cold = bool(event.get("cold"))
        self._ready_at = self._free_at = time.monotonic()
        return None, False

    def _raised(self, event: dict[str, Any], child: Child) -> tuple[Missing, bool]:
        """Why a worker did not get ready, by its own words, and whether that is final."""
        message = str(event.get("message"))
        if event.get("type") == "DeviceMissingError":
            return self._lost("MissingDevice", message), True
        if event.get("type") == "ModuleNotFoundError":
            # The commonest mistake of a first day, and no second try heals it.
            text = f"{self._workers.python}: {message}; name the interpreter that has it (python of [probe])"
            return self._lost("StartFailed", f"{text}, or install it there: 'healthd doctor' says how"), True
        if event.get("reason") == "ColdCache":
            return self._lost("ColdCache", message), True
        return self._lost("StartFailed", f"{event.get('type')}: {message}", child.last_words()), False

    def _lost(self, reason: str, message: str, words: str = "") -> Missing:
        reason, message, action = explain(reason, message, words)
        return Missing(target=self.target, reason=reason, message=shorten(message), action=action)

    def _send(self, child: Child) -> None:
        lines = bytearray()
        for job in self._jobs:
            if job.sent_to is not child:
                lines += self.line(job, child)
        child.send(bytes(lines))

    def line(self, job: Job, child: Child) -> bytes:
        """The command as this worker will see it, under a number of its own."""
        self._next_id += 1
        job.id, job.sent_to = self._next_id, child
        return json.dumps({**job.command, "check": job.check, "id": job.id}).encode() + b"\n"

    async def retire(self) -> None:
        """Let the worker go in peace."""
        if self.child is not None:
            child = self.child
            self.count_seconds()
            self.child = None
            if not await child.retire(self._workers.settings.kill_grace_seconds):
                self._workers.keep_corpse(self.target, child)

    async def bury(self, check: str) -> None:
        """Kill the worker and wait a short grace for its corpse; it is remembered when that stays."""
        if self.child is not None:
            child = self.child
            child.kill()
            self.count_seconds()
            self.child = None
            if not await child.gone(self._workers.settings.kill_grace_seconds):
                self._workers.keep_corpse(self.target if self._device else f"node/{check}", child)

    def count_seconds(self) -> None:
        """Add the time that the worker has had its device to what the run costs."""
        if self._ready_at is not None and self._device is not None:
            self._workers.device_seconds += time.monotonic() - self._ready_at
        self._ready_at = None

    # --- listening ----------------------------------------------------------------------------------------------------

    async def collect(self, job: Job, deadline: float | None) -> Outcome:
        """The outcome of a command that was sent. `deadline` is monotonic; None: somebody else kills the worker."""
        outcome = Outcome(target=self.target, attempts=max(job.attempts, self._starts), crashes=job.crashes)
        child = self.child
        if child is None:
            return outcome.worker_gone("Crashed", "its worker is gone")

        def tell(event: str, text: str) -> None:
            if job.command["kind"] != "run":
                return  # surveys and judges are ours, and nobody waits for them by name
            self._workers.progress(RunProgress(check=job.check, target=self.target, event=event, text=text))

        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                while not hear(await child.next(), job.id, outcome, child, tell):
                    self.heard_at = time.monotonic()
        except TimeoutError:
            child.kill()
            seen = f"; last seen: {last_step(outcome)}" if outcome.progress else ""
            text = f"did not end within {job.timeout_seconds:g} s{seen}"
            reason, text, action = explain("Timeout", text, child.last_words())
            outcome.worker_gone(reason, text, error=child.last_words() or None, action=action)
        except ProtocolError as error:
            child.kill()
            outcome.worker_gone("Garbage", str(error), error=child.last_words() or None)
        self._free_at = time.monotonic()
        if outcome.missing is None:
            outcome.ended = self._free_at
        tell("ended", outcome.missing.reason if outcome.missing else "done")
        return outcome
