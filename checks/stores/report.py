"""What the child process of a store reports: JSON lines on its standard output, written at once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Report:
    """The lines of one child. `step` says what comes next, so that a hang has a place."""

    def __init__(self) -> None:
        self.current = "start"
        self._send({"pid": os.getpid()})

    def step(self, text: str) -> None:
        """What is begun now."""
        self.current = text
        self._send({"step": text, "at": time.monotonic()})

    def reading(self, name: str, value: float) -> None:
        self._send({"reading": name, "value": value})

    def fault(self, reason: str, message: str) -> None:
        """Something is wrong with the store; the work goes on."""
        self._send({"fault": reason, "message": message})

    def note(self, text: str) -> None:
        """A fact for the message of the finding."""
        self._send({"note": text})

    def done(self) -> None:
        """All that was asked has been done."""
        self._send({"done": True})

    @contextmanager
    def timed(self, text: str, into: dict[str, float], name: str) -> Iterator[None]:
        """A step, and how long it took, in seconds."""
        self.step(text)
        begun = time.perf_counter()
        yield
        into[name] = into.get(name, 0.0) + time.perf_counter() - begun

    def _send(self, line: dict[str, object]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
