"""
What one event of a worker means for the outcome of the command that it answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from checks.worker.protocol import MAX_FINDINGS, MAX_PROGRESS, ProtocolError, to_evidence, to_finding, to_progress
from healthd.runner.workers.child import Child, Ended, Event
from healthd.runner.workers.outcome import Outcome, explain, last_line

MAX_ANSWERS = 1024
MAX_EVIDENCE = 64

# Reasons that a check may end with by an error of its host: the machine did not let it see.
_OF_THE_MACHINE = frozenset({"NoData", "NoPermission", "MissingTool", "Timeout", "ColdCache"})

Tell = Callable[[str, str], None]


def hear(event: Event, command_id: int, outcome: Outcome, child: Child, tell: Tell) -> bool:
    """
    Take one event into the outcome; whether it was the last.

    Raises ProtocolError for what has no place here: the worker cannot be believed any more.
    """
    if isinstance(event, Ended):
        _ended(event, outcome, child.last_words())
        return True
    if event.get("id") != command_id:
        raise ProtocolError(f"an answer to command {event.get('id')!r} instead of {command_id}")
    match event["kind"]:
        case "started":
            outcome.started_at, outcome.began = time.time(), time.monotonic()
            tell("started", "")
        case "progress":
            # The first says that a rank has joined, the last where it is; what lies between may go.
            del outcome.progress[1 : max(1, len(outcome.progress) - MAX_PROGRESS + 2)]
            outcome.progress.append(to_progress(event.get("progress")))
            tell("step", last_step(outcome))
        case "finding" if len(outcome.findings) < MAX_FINDINGS:
            outcome.findings.append(to_finding(event.get("finding")))
        case "evidence" if len(outcome.evidence) < MAX_EVIDENCE:
            outcome.evidence.append(to_evidence(event.get("evidence")))
        case "catalogue" if len(outcome.answers) < MAX_ANSWERS:
            outcome.answers.append(event)
        case "warmed" if len(outcome.answers) < MAX_ANSWERS:
            outcome.answers.append(event)
            tell("step", f"{event.get('text')} {event.get('check')}".strip()[:200])
        case "surveyed":
            outcome.answers.append(event)
            return True
        case "raised":
            _raised(event, outcome, child.last_words())
            return True
        case "done":
            _done(event, outcome)
            return True
        case kind:
            raise ProtocolError(f"an unexpected or surplus {kind[:32]!r}")
    return False


def _ended(event: Ended, outcome: Outcome, words: str) -> None:
    line = last_line(words)
    said = f"{event.message}{': ' if line else ''}{line}"
    reason, message, action = explain(event.reason, said, words)
    outcome.worker_gone(reason, message, error=words or None, action=action)


def _done(event: dict[str, object], outcome: Outcome) -> None:
    seconds, dropped = event.get("compile_seconds"), event.get("dropped")
    if isinstance(seconds, float) and 0.0 < seconds < float("inf"):
        outcome.compile_seconds += seconds
    if isinstance(dropped, int) and dropped > 0:
        outcome.error = f"{dropped} findings beyond {MAX_FINDINGS} were dropped; the worst of them was kept"


def _raised(event: dict[str, object], outcome: Outcome, words: str) -> None:
    reason, raised_at = event.get("reason"), event.get("monotonic_seconds")
    message = str(event.get("message"))
    if reason not in _OF_THE_MACHINE:
        reason, message = "CheckError", f"{event.get('type')}: {message}"
    reason, message, action = explain(str(reason), message, words)
    outcome.lost(reason, message, error=str(event.get("traceback")), action=action)
    if isinstance(raised_at, float):  # by its own clock: what it raised about may be heard of later
        outcome.ended = min(outcome.ended, raised_at)


def last_step(outcome: Outcome) -> str:
    """Where a rank was when it was last heard of; only with progress."""
    last = outcome.progress[-1]
    return f"{last.event} {last.step}"
