"""
What nccom-test says: its help, its table and its JSON report. Pure; nothing is judged here.

Columns are found by the names in the header, because their order, number and names differ between versions. Of the
numbers only size and time are taken: the printed bandwidths are in 2^30 bytes/s in old versions and 1e9 bytes/s in new
ones under one header, so they only serve to see that size and time were understood.

Sources: AWS Neuron documentation, tools/neuron-sys-tools/nccom-test.rst. Unverified on hardware.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.json_text import parse_json

MAX_ROWS = 256
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZE = re.compile(r"size\(b\)", re.IGNORECASE)
_TIME = re.compile(r"time(?::(\w+))?\(([a-zµ]+)\)", re.IGNORECASE)
_ALGBW = re.compile(r"algbw\(gi?b/s\)", re.IGNORECASE)
_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
# argparse writes `--check [{random,all_ones}]`, and `--check` alone for a switch.
_CHECK = re.compile(r"--check(?:[ =](?P<value>\[?(?:\{[^}]*\}|[A-Z_]+)\]?))?")


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    One line of the table. `size_bytes` and `seconds` None: not to be read; seconds may be NaN where the tool says so.

    `p99_seconds` None: not asked for. `printed` is the algorithm bandwidth as printed, in a unit that nobody knows.
    """

    size_bytes: int | None
    seconds: float | None
    dtype: str | None
    printed: float | None = None
    p99_seconds: float | None = None
    algorithm: str | None = None


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """
    What a version of nccom-test can do, as its help says.

    `check` is what asks for a check of the values: arguments to give, empty where it knows none.
    """

    flags: frozenset[str]
    check: tuple[str, ...]

    def knows(self, flag: str) -> bool:
        """Whether the help names a flag."""
        return flag in self.flags


def read_help(text: str) -> Abilities | None:
    """The abilities in what `nccom-test --help` prints; None where that is no help of nccom-test."""
    flags = frozenset(_FLAG.findall(text))
    if "--nworkers" not in flags and "-r" not in flags:
        return None
    check: tuple[str, ...] = ()
    if "--check" in flags:
        shown = next((match["value"] for match in _CHECK.finditer(text) if match["value"]), None)
        if shown is None:
            check = ("--check",)  # a switch
        else:
            words = shown if "{" in shown else text
            check = ("--check", "random" if "random" in words else "all_ones")
    return Abilities(flags=flags, check=check)


def read_table(text: str) -> list[Row]:
    """
    The rows of all tables in what nccom-test prints; what is no row (failures, averages, log lines) is passed over.

    A line is a row when it has as many words as its header, and numbers where that promises numbers.
    """
    rows: list[Row] = []
    header: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if any(_SIZE.fullmatch(word) for word in words):
            header = words
        elif len(words) == len(header) and len(rows) < MAX_ROWS:
            cells = dict(zip(header, words, strict=True))
            # Columns of numbers have their unit in brackets. `1 errors found - test failed` has as many words as a row.
            if all(_number(cell) is not None for name, cell in cells.items() if name.endswith(")")):
                rows.append(_row(cells))
    return rows


def read_report(text: str) -> list[Row] | None:
    """The rows of a JSON report; None where it is none. Members that nobody knows are passed over."""
    try:
        found = parse_json(text)
    except ValueError:
        return None
    results = found.get("results") if isinstance(found, dict) else None
    if not isinstance(results, list):
        return None
    return [_row(item) for item in results[:MAX_ROWS] if isinstance(item, dict)]


def believable(row: Row) -> bool:
    """
    Whether the printed bandwidth fits size and time, in either of its units; True where none is printed.

    False means that a column is not what we take it for, so that no number of the row can be used.
    """
    if row.printed is None or row.size_bytes is None or row.seconds is None or not row.seconds > 0:
        return True
    computed = row.size_bytes / row.seconds / 1e9
    # Times were cut to whole microseconds in old versions, printed numbers are rounded to two digits.
    slack = 0.01 + computed * min(0.2, 1e-6 / row.seconds)
    return computed / 1.0738 * 0.95 - slack <= row.printed <= computed * 1.05 + slack


def log_path(text: str) -> str | None:
    """The log of neuron-bench that a failure names; None where it names none, or one that may be something else."""
    match = re.search(r"log file (/[\w./-]{1,200}\.log)(?!\S)", text)
    return match[1] if match and ".." not in match[1] else None


def _row(cells: Mapping[str, Any]) -> Row:
    """A row by the names of its columns. `time(us)` and `time:avg(us)` are the same; others are percentiles."""
    size, seconds, p99, dtype, printed, algorithm = None, None, None, None, None, None
    for name, cell in cells.items():
        time = _TIME.fullmatch(name)
        if _SIZE.fullmatch(name):
            size = _whole(cell)
        elif time:
            scale = _TIME_UNITS.get(time[2].lower())
            value = None if scale is None else _scaled(cell, scale)
            if time[1] in (None, "avg"):
                seconds = value
            elif time[1] == "p99":
                p99 = value
        elif name == "type":
            dtype = cell if isinstance(cell, str) and re.fullmatch(r"\w{1,16}", cell) else None
        elif _ALGBW.fullmatch(name):
            printed = _finite(cell)
        elif name == "algorithm":
            algorithm = cell if isinstance(cell, str) and re.fullmatch(r"[\w-]{1,32}", cell) else None
    return Row(size_bytes=size, seconds=seconds, dtype=dtype, printed=printed, p99_seconds=p99, algorithm=algorithm)


def _number(cell: object) -> float | None:
    """A number that is written as one; NaN stays NaN."""
    if isinstance(cell, bool) or not isinstance(cell, (int, float, str)):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None


def _finite(cell: object) -> float | None:
    value = _number(cell)
    return value if value is not None and math.isfinite(value) else None


def _scaled(cell: object, scale: float) -> float | None:
    value = _number(cell)
    return None if value is None else value * scale


def _whole(cell: object) -> int | None:
    value = _finite(cell)
    return int(value) if value is not None and value == int(value) and 0 < value < 2**60 else None


def merged(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """The rows of `first`, and those of `second` for sizes that it has not: it may have been cut."""
    sizes = {row.size_bytes for row in first}
    return [*first, *(row for row in second if row.size_bytes not in sizes)]
