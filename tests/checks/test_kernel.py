"""The kernel's log and clock are read without waiting and without harm."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.host import machine
from tests.every import every
from tests.patience import PATIENCE


def test_a_log_that_has_no_more_to_say_is_not_waited_for(tmp_path: Path) -> None:
    # A named pipe that is held open and silent answers as /dev/kmsg does at its end: try again later.
    os.mkfifo(tmp_path / "kmsg")
    with open(os.open(tmp_path / "kmsg", os.O_RDWR), "wb", buffering=0) as writer:
        writer.write(b"6,1,1500000,-;first\n")
        start = time.monotonic()
        assert machine.read_log(str(tmp_path / "kmsg")) == [(1.5, "first")]
        assert time.monotonic() - start < 5 * PATIENCE


def test_of_a_very_long_log_the_newest_lines_are_kept(tmp_path: Path) -> None:
    # A regular file comes in pieces of the buffer's size, each taken as one record; only their number matters here.
    with open(tmp_path / "kmsg", "wb") as file:
        file.truncate(8192 * 30)
        file.seek(-8192, os.SEEK_END)
        file.write(b"6,1,2000000,-;newest\n")
    lines = machine.read_log(str(tmp_path / "kmsg"), max_lines=20)
    assert len(lines) == 20
    assert lines[-1] == (2.0, "newest")


def test_no_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="kmsg"):
        machine.read_log(str(tmp_path / "kmsg"))


@every(
    ("record", "line"),
    [
        ("6,339,5140900,-;NET: Registered protocol family 10\n", (5.1409, "NET: Registered protocol family 10")),
        (
            "30,340,5690716,-;udevd[80]: starting\n SUBSYSTEM=net\n DEVICE=+net:eth0\n",
            (5.690716, "udevd[80]: starting"),
        ),
        ("4,1,7,c;text; with; semicolons", (7e-6, "text; with; semicolons")),
        ("no head at all", (None, "")),
        ("a,b,c;text", (None, "text")),
        ("6,1," + "9" * 5000 + ",-;text", (None, "text")),
    ],
)
def test_records_of_kmsg(record: str, line: machine.LogLine) -> None:
    assert machine.parse_record(record) == line


@every(
    ("text", "line"),
    [
        ("[    5.140900] NET: up", (5.1409, "NET: up")),
        ("[    5.140900][   T12] NET: up", (5.1409, "[   T12] NET: up")),
        ("[nan] NET: up", (None, "[nan] NET: up")),
        ("[ 12.5 no end", (None, "[ 12.5 no end")),
        ("6,339,5140900,-;NET: up", (5.1409, "NET: up")),
        ("BUG: a; b", (None, "BUG: a; b")),
    ],
)
def test_lines_as_dmesg_prints_them(text: str, line: machine.LogLine) -> None:
    assert machine.parse_line(text) == line


@given(st.text())
def test_any_text_gives_a_line_with_a_finite_time_or_none(text: str) -> None:
    for parse in (machine.parse_line, machine.parse_record):
        stamp, said = parse(text)
        assert stamp is None or math.isfinite(stamp)
        assert isinstance(said, str)


def test_the_clock_of_this_machine_can_be_read_and_is_plausible() -> None:
    state = machine.read_clock()
    assert abs(state.offset_seconds) < 1  # the kernel's own bound is half a second
    assert state.max_error_seconds >= 0
