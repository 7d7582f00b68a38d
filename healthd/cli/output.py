"""
Standard output and error of the command: control characters in what others said are escaped, whoever writes it.

Colours and cursor movements of our own go past that, to the stream below: see `healthd.cli.terminal`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO, cast

from checks.printable import printable, printable_line


class ForgivingOutput:
    """A stream whose reader may go away (`| head`): what is said then is dropped, and the exit code stays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As a text stream."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """As a text stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrintableOutput(ForgivingOutput):
    """A stream on which no control character comes out but tabs and newlines."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.styled = cast("TextIO", ForgivingOutput(stream))

    def write(self, text: str) -> int:
        """As a text stream."""
        super().write(printable(text))
        return len(text)


class PrintableFormatter(logging.Formatter):
    """One line an event (a newline in a message is escaped), and tracebacks as they are, but for control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name of the library
        """As the library's."""
        record.message = printable_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """As the library's."""
        return printable(super().format(record))


def guard_streams() -> None:
    """Have standard output and error escape what others said, from now on."""
    sys.stdout = cast("TextIO", PrintableOutput(sys.stdout))
    sys.stderr = cast("TextIO", PrintableOutput(sys.stderr))


def styled(stream: TextIO) -> TextIO:
    """The stream below a guarded one, for what is printable already; the stream itself where it is not guarded."""
    return cast("TextIO", getattr(stream, "styled", stream))


def log_to_stderr(level: int) -> None:
    """One line an event on standard error; a service manager adds the time."""
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setFormatter(PrintableFormatter("healthd: %(message)s"))
    logging.basicConfig(handlers=[to_stderr], level=level)
