"""Standard output, standard error and log of a command: what cannot be written is never taken for told."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from healthd.errors import OutputError, words_of
from healthd.redaction import redact


class CarefulOutput:
    """
    A text stream whose reader may go away (`| head`): what is said then is dropped, and the exit code stays.

    Any other failure (a full disk) is an OutputError; with `forgiving` (standard error, which nobody computes with) it
    is dropped as well. After a failure the stream leads nowhere, so that nothing fails again when the process ends.
    """

    def __init__(self, stream: TextIO, *, forgiving: bool = False) -> None:
        self._stream = stream
        self._forgiving = forgiving
        self.dropped = False

    def write(self, text: str) -> int:
        """As a text stream."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """As a text stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._drop()
        if not (self._forgiving or isinstance(error, BrokenPipeError)):
            raise OutputError(f"standard output cannot be written: {words_of(error)}") from None

    def _drop(self) -> None:
        self.dropped = True
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor has nothing to lead elsewhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lines(logging.Formatter):
    """One line an event, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def log_lines() -> logging.Formatter:
    """The form of the log; a service manager adds the time."""
    return _Lines("healthd: %(message)s")


def log_to_stderr(level: int) -> None:
    """Send the log of this process to standard error, unless it goes elsewhere already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_lines())
    logging.basicConfig(level=level, handlers=[handler])


def take_care() -> None:
    """Make the standard streams careful ones; one that the caller has closed leads nowhere."""
    sys.stdout = cast("TextIO", CarefulOutput(sys.stdout or _nowhere()))
    sys.stderr = cast("TextIO", CarefulOutput(sys.stderr or _nowhere(), forgiving=True))


def _nowhere() -> TextIO:
    """For a stream that is closed: the lowest number is that stream's, and what is started here must find it open."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    return open(descriptor, "w", encoding="utf-8", closefd=False)


@contextlib.contextmanager
def told(*, needed: bool) -> Iterator[None]:
    """
    What is printed within has reached standard output when this ends; else OutputError.

    A reader that has gone away is an error only where the text is `needed`: it is the answer, and not the exit code.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {words_of(error)}") from None
    if needed and isinstance(sys.stdout, CarefulOutput) and sys.stdout.dropped:
        raise OutputError("standard output cannot be written: its reader has gone away")
