"""
Judging what nccom-test said: pure. Failed is a bad exit, "errors found", a row missing or no number, a time-out.

What means that nothing was measured (cores taken, the tool did not understand us, columns that are something else) is
no failure of the node, and never a pass.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from checks.accelerators.neuron.errors import is_hardware
from checks.collective.bandwidth import bus_factor, judge_bandwidth
from checks.collective.nccom.plan import MAIN_DTYPE, Step
from checks.collective.nccom.report import Row, believable, merged, read_report, read_table
from checks.collective.nccom.run import Ran, last_lines
from checks.contract import NO_LIMIT, Action, Blame, Finding, Limit, Status
from checks.limits import quantity

# Texts of the Neuron runtime and of nccom-test; AWS Neuron documentation, nrt-troubleshoot.rst.
_BUSY = re.compile(r"Core\(s\) not available|cores busy", re.IGNORECASE)
_NO_DRIVER = re.compile(
    r"Driver is not running|Unable to determine Neuron Driver version|Could not open the nd\d"
    r"|No neuron device available"
)
# Texts of OpenSSH, by which mpirun gets onto other nodes: an operator's keys are missing, which is no fault of a node.
_NO_KEYS = re.compile(
    r"Permission denied \((?:publickey|password|keyboard|gssapi|hostbased)|Host key verification failed"
)
_ERRORS = re.compile(r"(?<!\d)0*[1-9]\d* errors? found")
_RUN_FAILED = re.compile(r"Failure running neuron-bench|\bNRT[:_]|FATAL-RT")
# What a wrong value is called is not documented: words that can hardly mean anything else.
_WRONG = re.compile(r"mismatch|golden|incorrect (?:result|output|value)|(?:data|correctness) check fail", re.IGNORECASE)
_USAGE_EXIT = 2
_NOT_FOUND_EXIT = 127
_KILLED_EXITS = (-9, -15, 137, 143)  # of the guard itself, and of the program as the guard says it

Limits = Mapping[str, Limit]


def judge_step(
    check: str, ran: Ran, limits: Limits, *, checked: bool, cut_short: bool, deep: bool
) -> Iterator[Finding]:
    """
    The findings of one step. `checked`: values were compared; `cut_short`: its time was less than it should have had.

    Limits hold for all ranks in fp32: `NAME/SIZE_BYTES`, and `NAME` alone for the largest size of the deep tier.
    """
    what = f"{ran.step.op} over {ran.step.ranks} ranks in {ran.step.dtype}"
    rows = _rows(ran)
    nothing = _killed(what, ran, cut_short) or (None if rows else _not_measured(what, ran))
    if nothing is not None:
        yield nothing
        return
    good: list[Row] = []
    told: list[Finding] = []
    for size_bytes in ran.step.sizes_bytes:
        row = rows.get(size_bytes)
        wrong = None if row is None else _unusable(f"{what}, {size_bytes} bytes", row, ran.step)
        if wrong is not None:
            told.append(wrong)
        elif row is not None:
            good.append(row)
    failure = _failure(what, ran, rows)
    if failure is not None:
        yield failure
    yield from told
    if not checked:
        text = f"{what}: this nccom-test cannot check values, so they are not known to be right; update its package"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    for row in good:
        yield _speed(check, ran.step, row, limits, deep=deep, checked=checked and failure is None)


def _rows(ran: Ran) -> dict[int, Row]:
    """The rows by size: of the report, and of the table where the report has none. Of two of one size the worse."""
    table = read_table(ran.output)
    report = read_report(ran.report) if ran.report is not None else None
    found = table if report is None else merged(report, table)
    return {row.size_bytes: row for row in sorted(found, key=_badness) if row.size_bytes is not None}


def _badness(row: Row) -> tuple[bool, float]:
    """What has no time that can be used comes last, after the slowest."""
    seconds = row.seconds
    usable = seconds is not None and math.isfinite(seconds) and seconds > 0
    return (not usable, seconds if usable and seconds is not None else 0.0)


def _killed(what: str, ran: Ran, cut_short: bool) -> Finding | None:
    """What was ended by others."""
    if ran.returncode is None:
        text = f"{what} did not end within {ran.timeout_seconds:g} s and was killed"
        words = f"; log {ran.log}" if ran.log else ""
        words += f"; its last words: {ran.tail or last_lines(ran.output) or 'none'}"
        if cut_short:
            text += f"; it had less time than its own because the steps before it took theirs{words}"
            return Finding(status=Status.UNKNOWN, reason="Timeout", message=text, target="node")
        return Finding(
            status=Status.FAIL,
            reason="Timeout",
            message=f"{text}: the collective hangs{words}",
            target="node",
            blame=Blame.NODE,
            action=Action.INSPECT,
        )
    if ran.returncode in _KILLED_EXITS:
        text = f"{what} was killed by somebody, perhaps for want of memory: {last_lines(ran.output)}"
        return Finding(status=Status.UNKNOWN, reason="Crashed", message=text, target="node")
    return None


def _not_measured(what: str, ran: Ran) -> Finding | None:
    """What kept the step from telling anything of the devices: it has no row at all."""
    words = last_lines(ran.output)
    if ran.returncode == _NOT_FOUND_EXIT:
        return Finding(status=Status.UNKNOWN, reason="MissingTool", message=f"{what}: {words}", target="node")
    # What hardware said comes first: cores that failed are not available either.
    if _NO_DRIVER.search(ran.words):
        text = f"{what} did not run: no Neuron driver, or a device of it is gone: {words}"
        return Finding(status=Status.FAIL, reason="MissingDevice", message=text, target="node")
    if is_hardware(ran.words):
        return None
    if busy := _BUSY.search(ran.words):
        text = f"{what} did not run: the cores are taken: {_line_of(ran.words, busy.start())}"
        return Finding(status=Status.SKIP, reason="Busy", message=text, target="node")
    if refused := _NO_KEYS.search(ran.words):
        text = (
            f"{what} did not start: ssh between the nodes was refused: {_line_of(ran.words, refused.start())}; give "
            "the daemon's user a key for the other nodes, or set nccom_launch of [policy] to off"
        )
        return Finding(status=Status.UNKNOWN, reason="NoPermission", message=text, target="node")
    if ran.returncode == _USAGE_EXIT and re.search(r"usage:|error: ", ran.output):
        text = f"nccom-test did not understand its arguments: {words}; report this with its version"
        return Finding(status=Status.UNKNOWN, reason="CheckError", message=text, target="node")
    return None


def _line_of(text: str, place: int) -> str:
    """The line of a text that a place is in, shortened."""
    line = text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0]
    return " ".join(line.split())[:400]


def _failure(what: str, ran: Ran, rows: Mapping[int, Row]) -> Finding | None:
    """Why the step failed as a whole; None where it did not."""
    missing = [size for size in ran.step.sizes_bytes if size not in rows]
    errors = _ERRORS.search(ran.output)
    if ran.returncode == 0 and not errors and not _RUN_FAILED.search(ran.output):
        if not missing:
            return None
        if len(rows) == len(ran.step.sizes_bytes):
            text = f"{what}: asked for {_sizes(ran.step.sizes_bytes)} bytes, got {_sizes(sorted(rows))}"
            return Finding(status=Status.UNKNOWN, reason="Garbage", message=text, target="node")
        text = f"{what}: no row for {_sizes(missing)} bytes, although nccom-test ended well"
        return Finding(status=Status.FAIL, reason="CollectiveFailed", message=text, target="node")
    why = errors[0] if errors else f"exit code {ran.returncode}"
    text = f"{what} failed ({why})"
    if missing:
        text += f", no row for {_sizes(missing)} bytes"
    if ran.log:
        text += f"; log {ran.log}"
    text += f": {ran.tail or last_lines(ran.output) or 'it said nothing'}"
    wrong = not _RUN_FAILED.search(ran.output) and _WRONG.search(ran.output)
    reason = "CollectiveMismatch" if wrong else "CollectiveFailed"
    return Finding(status=Status.FAIL, reason=reason, message=text, target="node")


def _unusable(what: str, row: Row, step: Step) -> Finding | None:
    """Why the numbers of a row cannot be used; None where they can."""
    if row.seconds is not None and not math.isfinite(row.seconds):
        text = f"{what}: the time is {row.seconds}, no number"
        return Finding(status=Status.FAIL, reason="CollectiveFailed", message=text, target="node")
    if row.seconds is None or row.seconds <= 0:
        text = f"{what}: no time that can be read"
        return Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    if row.dtype not in (None, step.dtype):
        text = f"{what}: the row is of type {row.dtype}"
        return Finding(status=Status.UNKNOWN, reason="Garbage", message=text, target="node")
    if not believable(row):
        text = (
            f"{what}: {quantity('_seconds', row.seconds)} does not fit the printed bandwidth {row.printed:g}, "
            "so a unit is not what it says; report this with the version of nccom-test"
        )
        return Finding(status=Status.UNKNOWN, reason="Garbage", message=text, target="node")
    return None


def _speed(check: str, step: Step, row: Row, limits: Limits, *, deep: bool, checked: bool) -> Finding:
    """Time and bandwidths of a row, in bytes and seconds, never the printed columns."""
    size_bytes, seconds = row.size_bytes or 0, row.seconds or math.nan
    what = f"{step.op} of {size_bytes} bytes over {step.ranks} ranks in {step.dtype}"
    found = judge_bandwidth(
        check,
        what,
        size_bytes,
        seconds,
        factor=bus_factor(step.op, step.ranks),
        limit=lambda suffix: _limit(limits, f"{check}_{suffix}", step, size_bytes, deep),
        labels={"size_bytes": str(size_bytes), "dtype": step.dtype, "ranks": str(step.ranks)},
    )
    text = f"{found.message}; took {quantity('_seconds', seconds)}"
    if row.p99_seconds is not None and math.isfinite(row.p99_seconds):
        text += f" (99 % within {quantity('_seconds', row.p99_seconds)})"
    text += f" by {row.algorithm}" if row.algorithm else ""
    return dataclasses.replace(found, message=text + (", values right" if checked else ""))


def _limit(limits: Limits, name: str, step: Step, size_bytes: int, deep: bool) -> Limit:
    """Bandwidth depends on size, type and ranks: a limit holds for what it was measured at."""
    if not step.whole or step.dtype != MAIN_DTYPE:
        return NO_LIMIT
    names = [f"{name}/{size_bytes}"]
    if deep and size_bytes == step.sizes_bytes[-1]:
        names.append(name)
    keys = [key for one in names for key in (f"{one}@node", one)]
    return next((limits[key] for key in keys if key in limits), NO_LIMIT)


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
