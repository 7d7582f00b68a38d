"""
What the kernel says through other doors than text files: its log, its clock. Only `checks.host.machine` calls this.
"""

from __future__ import annotations

import errno
import math
import os
from collections import deque
from typing import NamedTuple

MAX_LOG_LINES = 65_536  # the newest are kept; the usual ring of 256 KB holds 3,000
_MAX_RECORDS = 1_000_000  # somebody who writes as fast as we read does not keep us here
_RECORD_BYTES = 8192  # the kernel's CONSOLE_EXT_LOG_MAX: a shorter buffer is refused
_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000  # <sys/timex.h>

LogLine = tuple["float | None", str]


class ClockState(NamedTuple):
    """What the kernel says of its clock. `offset_seconds` is the last offset that its keeper measured."""

    synchronized: bool
    offset_seconds: float
    max_error_seconds: float


def read_log(path: str = "/dev/kmsg", *, max_lines: int = MAX_LOG_LINES) -> list[LogLine]:
    """The newest lines of the kernel's ring, oldest first, as far as they are there now. Raises OSError."""
    lines: deque[LogLine] = deque(maxlen=max_lines)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # the ring was overwritten while we read: go on with what is left
                    continue
                raise
            if not record:
                break
            lines.append(parse_record(record.decode("utf-8", "replace")))
    finally:
        os.close(descriptor)
    return list(lines)


def parse_record(record: str) -> LogLine:
    """`6,1234,98765432,-;text` and more lines: the third member of the head is microseconds since boot."""
    head, _, rest = record.partition(";")
    fields = head.split(",")
    stamp = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdecimal() and len(fields[2]) < 20 else None
    return stamp, rest.partition("\n")[0]


def parse_line(line: str) -> LogLine:
    """A line as dmesg prints it, `[   12.345678] text`, or as /dev/kmsg gives it."""
    if line.startswith("["):
        stamp, closed, text = line[1:].partition("]")
        try:
            seconds = float(stamp)
        except ValueError:
            return None, line
        return (seconds, text.strip()) if closed and math.isfinite(seconds) else (None, line)
    if ";" in line and line.partition(",")[0].isdecimal():
        return parse_record(line)
    return None, line


def read_clock() -> ClockState:
    """adjtimex(2) without changing anything. Raises OSError."""
    import ctypes

    class Timex(ctypes.Structure):
        _fields_ = [
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("constant", ctypes.c_long),
            ("precision", ctypes.c_long),
            ("tolerance", ctypes.c_long),
            ("time", ctypes.c_long * 2),
            ("tick", ctypes.c_long),
            ("rest", ctypes.c_byte * 128),
        ]

    state = Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ClockState(
        synchronized=not state.status & _STA_UNSYNC,
        offset_seconds=state.offset * (1e-9 if state.status & _STA_NANO else 1e-6),
        max_error_seconds=state.maxerror * 1e-6,
    )
