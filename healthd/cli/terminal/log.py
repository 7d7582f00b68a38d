"""The log of a command: to standard error, one line an event, without secrets."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Literal, TextIO, TypeAlias

from checks.printable import printable, printable_line
from healthd.core.redaction import redact

LogForm: TypeAlias = Literal["plain", "text", "json"]
"""plain: the message alone, for people who look on, and for a service manager, which adds the time. text: with time and
level. json: an object a line."""


class LogFormatter(logging.Formatter):
    """One line an event (a newline in a message is escaped)."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03dZ"
    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def __init__(self, form: LogForm = "plain") -> None:
        super().__init__({"text": "%(asctime)s %(levelname)s healthd: %(message)s"}.get(form, "healthd: %(message)s"))
        self._form = form

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the name of the library
        """As the library's."""
        record.message = printable_line(redact(record.message))  # escapes hide where a word begins
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """As the library's."""
        text = printable(redact(super().format(record)))
        if self._form != "json":
            return text
        message, _, more = text.removeprefix("healthd: ").partition("\n")
        said = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            **({"traceback": more} if more else {}),
        }
        return json.dumps(said, ensure_ascii=False)


def log_to_stderr(level: int, form: LogForm = "plain") -> None:
    """Send the log of this process to standard error, unless it goes elsewhere already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def goes_to_the_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether systemd's journal reads this stream (JOURNAL_STREAM of systemd.exec(5)): it has the time of each line."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # a stream without a descriptor
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
