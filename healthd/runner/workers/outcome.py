"""Reads what one worker reports for a check, and gives a reason if it reports nothing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from checks.contract import Action, Evidence, Finding, Missing, Profile, Progress
from checks.worker.profiles import ProfileParts
from checks.worker.protocol import (
    MAX_FINDINGS,
    MAX_PROGRESS,
    ProtocolError,
    shorten,
    to_finding,
    to_record,
)
from healthd.runner.workers.workers import Ended, Event, WorkerProcess

MAX_ERROR_CHARACTERS = 4000
MAX_ANSWERS = 1024
MAX_EVIDENCE = 256  # one process may be all ranks of a node, and a node has at most so many

# Reasons that say no more than that it failed: the output of the device's runtime may know why.
_VAGUE = frozenset({"Crashed", "CheckError", "StartFailed", "Timeout"})
# Reasons that an error raised in a check may carry: the machine did not let the check see something.
_REASONS_OF_THE_HOST = frozenset({"NoData", "NoPermission", "MissingTool", "Timeout", "ColdCache"})

OnStep = Callable[[str, str], None]


@dataclass(kw_only=True)
class Outcome:
    """What one worker reported for one check, or why it reported nothing."""

    target: str
    """The device of the worker, `rank:N`, or `node`."""
    findings: list[Finding] = field(default_factory=list)
    """What the check found, in order."""
    evidence: list[Evidence] = field(default_factory=list)
    """What a judge compares."""
    progress: list[Progress] = field(default_factory=list)
    """The first and the latest signs of progress."""
    profile_parts: ProfileParts = field(default_factory=ProfileParts, repr=False)
    """The profiles of what was slow."""
    program: str | None = None
    """The compiled program that the check timed, where it can be profiled once its worker is gone."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Answers that are no findings: surveys, catalogue entries, compiled graphs."""
    missing: Missing | None = None
    """Why there is no complete outcome; None when there is one."""
    worker_lost: bool = False
    """The worker process is dead or cannot be trusted any more."""
    compile_seconds: float = 0.0
    """How long compilation took; 0 where nothing was compiled."""
    error: str | None = None
    """The last output of the worker, or a traceback; None without an error."""
    attempts: int = 1
    """How many attempts were made, this one included."""
    crashes: tuple[str, ...] = ()
    """How earlier attempts ended."""
    started_at: float = 0.0
    """When the check began, in seconds since the epoch; 0 when it never began."""
    began: float = field(default_factory=time.monotonic)
    """When the check began (monotonic)."""
    ended: float = field(default_factory=time.monotonic)
    """When the check ended (monotonic)."""

    def fail(self, reason: str, message: str, *, error: str | None = None, action: Action | None = None) -> Outcome:
        """Record why the outcome is incomplete; what was reported before stays. Returns itself."""
        self.ended = time.monotonic()
        self.missing = Missing(
            target=self.target, reason=reason, message=shorten(message), progress=tuple(self.progress), action=action
        )
        self.error = (error or message)[-MAX_ERROR_CHARACTERS:]
        return self

    def fail_with_worker(
        self, reason: str, message: str, *, error: str | None = None, action: Action | None = None
    ) -> Outcome:
        """As `fail`, when the worker process is lost too."""
        self.worker_lost = True
        return self.fail(reason, message, error=error, action=action)

    async def read(
        self,
        process: WorkerProcess,
        command_id: int,
        timeout_seconds: float,
        *,
        begin: float | None = None,
        on_step: OnStep = lambda *_: None,
    ) -> Outcome:
        """
        Read the events of a command, and kill a worker that is late or sends garbage. Returns itself.

        The time counts from `begin` (monotonic; None: now). Where it is infinite, killing a late worker is up to the
        caller.
        """
        left = timeout_seconds if begin is None else begin + timeout_seconds - time.monotonic()
        try:
            async with asyncio.timeout(None if left == math.inf else max(0.0, left)):
                while not self.add_event(await process.next_event(), command_id, process, on_step):
                    pass
        except TimeoutError:
            process.kill()
            seen = f"; last seen: {self.last_step}" if self.progress else ""
            text = f"did not end within {timeout_seconds:g} s{seen}"
            reason, text, action = explain("Timeout", text, process.last_output())
            self.fail_with_worker(reason, text, error=process.last_output() or None, action=action)
        except ProtocolError as error:
            process.kill()
            self.fail_with_worker("Garbage", str(error), error=process.last_output() or None)
        if self.missing is None:
            self.ended = time.monotonic()
        on_step("ended", self.missing.reason if self.missing else "done")
        return self

    def add_event(self, event: Event, command_id: int, process: WorkerProcess, on_step: OnStep) -> bool:
        """
        Add one event of the worker; returns whether it was the last one of the command.

        Raises ProtocolError for an event that does not belong here: the worker cannot be trusted any more.
        """
        if isinstance(event, Ended):
            output = process.last_output()
            line = last_line(process.tail())
            reason, message, action = explain(event.reason, f"{event.message}{': ' if line else ''}{line}", output)
            self.fail_with_worker(reason, message, error=output or None, action=action)
            return True
        if not _answers(event, command_id):
            return False
        match event["kind"]:
            case "started":
                self.started_at, self.began = time.time(), time.monotonic()
                on_step("started", "")
            case "progress":
                # The first says that a rank has joined, the last where it is; those in between can be dropped.
                del self.progress[1 : max(1, len(self.progress) - MAX_PROGRESS + 2)]
                self.progress.append(to_record(Progress, event.get("progress")))
                on_step("step", self.last_step)
            case "finding" if len(self.findings) < MAX_FINDINGS:
                self.findings.append(to_finding(event.get("finding")))
            case "evidence" if len(self.evidence) < MAX_EVIDENCE:
                self.evidence.append(to_record(Evidence, event.get("evidence")))
            case "profile":
                self.profile_parts.add(event.get("profile"))
            case "catalogue" | "warmed" if len(self.answers) < MAX_ANSWERS:
                self.answers.append(event)
            case "surveyed":
                self.answers.append(event)
                return True
            case "raised":
                self._add_raised(event, process.last_output())
                return True
            case "done":
                self._add_done(event)
                return True
            case kind:
                raise ProtocolError(f"an unexpected or surplus {kind[:32]!r}")
        return False

    def _add_raised(self, event: dict[str, Any], output: str) -> None:
        kind, raised_at = str(event.get("type")), event.get("monotonic_seconds")
        reason, message, action = explain_raised(kind, str(event.get("message")), event.get("reason"), output)
        self.fail(reason, message, error=str(event.get("traceback")), action=action)
        if isinstance(raised_at, float):  # by the worker's clock: we may have read the event much later
            self.ended = max(self.began, min(self.ended, raised_at))

    def _add_done(self, event: dict[str, Any]) -> None:
        seconds, dropped = event.get("compile_seconds"), event.get("dropped")
        if isinstance(seconds, float) and 0.0 < seconds < float("inf"):
            self.compile_seconds += seconds
        programs = event.get("programs")
        if isinstance(programs, list) and programs and isinstance(programs[0], str):
            self.program = programs[0]
        if isinstance(dropped, int) and dropped > 0:
            self.error = f"{dropped} findings beyond {MAX_FINDINGS} were dropped; the worst were kept"

    @property
    def crashed(self) -> bool:
        """Whether its process was ended in the middle, by itself or by others: it may do better another time."""
        return self.missing is not None and (
            self.missing.reason == "Crashed" or (self.missing.reason == "CannotAllocate" and self.worker_lost)
        )

    @property
    def profiles(self) -> list[Profile]:
        return self.profile_parts.whole

    @property
    def last_step(self) -> str:
        """The last known position of a rank; empty without progress."""
        return f"{self.progress[-1].event} {self.progress[-1].step}" if self.progress else ""


def _answers(event: dict[str, Any], command_id: int) -> bool:
    """
    Whether an event is an answer to a command; false where it says that a copy of the worker came late.

    Raises ProtocolError for an answer to another command, and for one of a copy: see `checks.worker.protocol`.
    """
    same, second = event.get("id") == command_id, event["kind"] == "second_writer"
    if second and same:
        text = (
            f"a process forked by the check (pid {event.get('pid')}) also sent results: it must return or exit "
            "inside the check"
        )
        raise ProtocolError(text)
    if not second and not same:
        raise ProtocolError(f"an answer to command {event.get('id')!r} instead of {command_id}")
    return same


def explain_raised(kind: str, message: str, reason: object, output: str) -> tuple[str, str, Action | None]:
    """
    The reason and message of an error that a check raised, as `explain` does.

    `kind` is the name of its type, `reason` what it carries, None for most. The want of memory is said in the words of
    many libraries; in those of a communicator, it may be that of another rank.
    """
    if isinstance(reason, str) and reason in _REASONS_OF_THE_HOST:
        return explain(reason, message, output)
    found, text, action = explain("CheckError", f"{kind}: {message}", output)
    if found != "CheckError":
        return found, text, action
    from checks.collective.judge import tells_of_peers
    from checks.device.probes import tells_of_want_of_memory

    if (kind == "MemoryError" or tells_of_want_of_memory(text)) and not tells_of_peers(text):
        found = "CannotAllocate"
    return found, text, action


def explain(reason: str, message: str, output: str) -> tuple[str, str, Action | None]:
    """
    The reason and message of a failure, more precise ones where the output of a device's runtime explains it.

    `output` is the last output of the worker. The action is None where the default action of the reason holds.
    """
    if reason not in _VAGUE:
        return reason, message, None
    from checks.accelerators import descriptors  # slow, and only for what failed

    text = f"{message}\n{output}"
    told = (one.diagnose(text) for one in descriptors() if one.diagnose is not None)
    diagnosed = next((found for found in told if found is not None), None)
    if diagnosed is None:
        return reason, message, None
    found, line = diagnosed
    return found.reason, shorten(found.message(line)), found.action


def last_line(output: str) -> str:
    """
    The most telling line of a process's output: that of a fatal error, else the last one.

    With what was thrown where that ended the process: a communicator tells so that a peer is gone.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    fatal = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    thrown = next((i for i in reversed(range(fatal)) if lines[i].startswith("terminate called")), fatal)
    return ": ".join([*lines[fatal:][:1], *lines[thrown:fatal][:2]]) or (lines[-1] if lines else "")
