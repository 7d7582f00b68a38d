"""The log of a command: to standard error, one line an event."""

from __future__ import annotations

import logging
import sys

from checks.printable import printable, printable_line
from healthd.core.redaction import redact


class LogFormatter(logging.Formatter):
    """One line an event (a newline in a message is escaped), without secrets; a service manager adds the time."""

    def __init__(self) -> None:
        super().__init__("healthd: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name of the library
        """As the library's."""
        record.message = printable_line(redact(record.message))  # escapes hide where a word begins
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """As the library's."""
        return printable(redact(super().format(record)))


def log_to_stderr(level: int) -> None:
    """Send the log of this process to standard error, unless it goes elsewhere already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=level, handlers=[handler])
