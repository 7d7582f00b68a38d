"""
What the three nccom checks share: whether they concern the node, the steps, and the time for them.

Also here:

- judging what nccom-test said: pure. Failed is a bad exit, "errors found", a row missing or no number, a time-out;
- the `nccom_all_gather` check;
- the `nccom_all_reduce` check;
- the `nccom_reduce_scatter` check.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from checks.accelerators.neuron.errors import is_hardware
from checks.catalog import find_type
from checks.collective.nccom.run import (
    MAIN_DTYPE,
    Ran,
    Row,
    Step,
    believable,
    contradicts,
    core_ids_of,
    find_tool,
    last_lines,
    learn_abilities,
    lnc_of,
    merged,
    plan_steps,
    rank_counts,
    read_report,
    read_table,
    run_step,
)
from checks.collective.ranks import bus_factor, judge_bandwidth
from checks.contract import NO_LIMIT, Action, Blame, Context, Finding, Limit, Progress, Status, Tier, check
from checks.host.machine import HostError
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

_LEAST_SECONDS = 1.0


@check(tier="quick", interval_seconds=3600, timeout_seconds=600, accelerators=True, collective=True)
def nccom_all_gather(ctx: Context[Params]) -> Iterator[Finding | Progress]:
    """
    Every NeuronCore gets the share of every other, by AWS's own nccom-test, with right values.

    Reads:   nccom-test (PATH, /opt/aws/neuron/bin): quick: fp32 over all cores at 3 sizes up to 1 MiB; deep: 512 KiB, 8
             and 128 MiB (each goes by another algorithm) in fp32, bf16 and fp16 over all cores, and in fp32 over fewer.
    Judges:  fail CollectiveMismatch (wrong values), CollectiveFailed (bad exit, errors, a row missing or no number),
             Timeout (it hangs), MissingDevice (no driver), SlowLink (`nccom_all_gather_busbw_bytes_per_second`,
             `..._algbw_...`, `nccom_all_gather_duration_seconds`, each with `/SIZE_BYTES`: all cores, fp32;
             without: the largest size of deep) | unknown MissingTool, NoData, Garbage (output not understood, or its
             busbw contradicts size, time and ranks), CheckError, Crashed | skip NotApplicable (not Neuron, one core),
             Busy.
    Cost:    quick: one start of nccom-test; deep: five or less. It takes all cores, so it only runs while all are free.
    Source:  AWS Neuron documentation, nccom-test.rst. Bandwidths are bytes by seconds (1 GB/s = 1e9 bytes/s), not the
             columns that the tool prints; busbw = algbw * (n - 1) / n. Unverified on hardware: stand-in tools alone.
    """
    yield from run_nccom(ctx, "nccom_all_gather")


@check(tier="quick", interval_seconds=3600, timeout_seconds=600, accelerators=True, collective=True)
def nccom_all_reduce(ctx: Context[Params]) -> Iterator[Finding | Progress]:
    """
    The sum over all NeuronCores arrives at each, by AWS's own nccom-test, with right values.

    Reads:   nccom-test (PATH, /opt/aws/neuron/bin): quick: fp32 over all cores at 3 sizes up to 1 MiB; deep: 512 KiB, 8
             and 128 MiB (each goes by another algorithm) in fp32, bf16 and fp16 over all cores, and in fp32 over fewer.
    Judges:  fail CollectiveMismatch (wrong values), CollectiveFailed (bad exit, errors, a row missing or no number),
             Timeout (it hangs), MissingDevice (no driver), SlowLink (`nccom_all_reduce_busbw_bytes_per_second`,
             `..._algbw_...`, `nccom_all_reduce_duration_seconds`, each with `/SIZE_BYTES`: all cores, fp32;
             without: the largest size of deep) | unknown MissingTool, NoData, Garbage (output not understood, or its
             busbw contradicts size, time and ranks), CheckError, Crashed | skip NotApplicable (not Neuron, one core),
             Busy.
    Cost:    quick: one start of nccom-test; deep: five or less. It takes all cores, so it only runs while all are free.
    Source:  AWS Neuron documentation, nccom-test.rst. Bandwidths are bytes by seconds (1 GB/s = 1e9 bytes/s), not the
             columns that the tool prints; busbw = algbw * 2 (n - 1) / n. Unverified on hardware: stand-in tools alone.
    """
    yield from run_nccom(ctx, "nccom_all_reduce")


@check(tier="quick", interval_seconds=3600, timeout_seconds=600, accelerators=True, collective=True)
def nccom_reduce_scatter(ctx: Context[Params]) -> Iterator[Finding | Progress]:
    """
    Every NeuronCore gets its share of the sum over all, by AWS's own nccom-test, with right values.

    Reads:   nccom-test (PATH, /opt/aws/neuron/bin): quick: fp32 over all cores at 3 sizes up to 1 MiB; deep: 512 KiB, 8
             and 128 MiB (each goes by another algorithm) in fp32, bf16 and fp16 over all cores, and in fp32 over fewer.
    Judges:  fail CollectiveMismatch (wrong values), CollectiveFailed (bad exit, errors, a row missing or no number),
             Timeout (it hangs), MissingDevice (no driver), SlowLink (`nccom_reduce_scatter_busbw_bytes_per_second`,
             `..._algbw_...`, `nccom_reduce_scatter_duration_seconds`, each with `/SIZE_BYTES`: all cores, fp32;
             without: the largest size of deep) | unknown MissingTool, NoData, Garbage (output not understood, or its
             busbw contradicts size, time and ranks), CheckError, Crashed | skip NotApplicable (not Neuron, one core),
             Busy.
    Cost:    quick: one start of nccom-test; deep: five or less. It takes all cores, so it only runs while all are free.
    Source:  AWS Neuron documentation, nccom-test.rst. Bandwidths are bytes by seconds (1 GB/s = 1e9 bytes/s), not the
             columns that the tool prints; busbw = algbw * (n - 1) / n. Unverified on hardware: stand-in tools alone.
    """
    yield from run_nccom(ctx, "nccom_reduce_scatter")


def run_nccom(ctx: Context[Params], check: str) -> Iterator[Finding | Progress]:
    """Run and judge all steps of one check, until one finds the cores taken or hangs."""
    began = time.monotonic()
    refused = _refused(ctx)
    if refused is not None:
        yield refused
        return
    ranks = _rank_count(ctx)
    if ranks is None:
        text = "the number of NeuronCores is unknown, so nothing was measured; see device_count"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
        return
    if ranks < 2:
        text = "a collective needs two NeuronCores; this node has one"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    try:
        program = find_tool(ctx.host)
        abilities = learn_abilities(ctx.host, program)
    except HostError as error:
        yield Finding(status=Status.UNKNOWN, reason=error.reason, message=str(error), target="node")
        return
    kind, cores = _device(ctx)
    deep = ctx.tier.rank >= Tier.DEEP.rank
    for step in plan_steps(check, ctx.tier, ranks=ranks, counts=rank_counts(kind, ranks, cores)):
        name = f"{step.op} of {step.ranks} ranks in {step.dtype}"
        left = ctx.params.total_seconds - (time.monotonic() - began)
        if left < _LEAST_SECONDS:
            text = f"{name} did not run: earlier steps used all of the {ctx.params.total_seconds:g} s"
            yield Finding(status=Status.UNKNOWN, reason="Timeout", message=text, target="node")
            return
        yield Progress(step=name, event="entered", monotonic_seconds=ctx.host.monotonic_seconds())
        seconds = min(left, ctx.params.step_seconds)
        try:
            ran = run_step(
                ctx.host,
                program,
                step,
                abilities,
                core_ids=core_ids_of(ctx.inventory),
                lnc=lnc_of(ctx.inventory),
                timeout_seconds=seconds,
            )
        except HostError as error:
            yield Finding(status=Status.UNKNOWN, reason=error.reason, message=f"{name}: {error}", target="node")
            return
        yield Progress(step=name, event="left", monotonic_seconds=ctx.host.monotonic_seconds())
        yield from judge_step(
            check,
            ran,
            ctx.limits,
            checked=bool(abilities.check),
            cut_short=seconds < ctx.params.step_seconds,
            deep=deep,
        )
        if ran.returncode is None:
            return  # what hangs once hangs again, and each costs its whole time


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
        text = f"{what}: this nccom-test cannot verify values, so their correctness is unknown; update its package"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    for row in good:
        yield _speed(check, ran.step, row, limits, deep=deep, checked=checked and failure is None)


@dataclass(frozen=True)
class Params:
    step_seconds: float = 120.0
    """How long one process of nccom-test may take, loading of its programs included; beyond it the collective hangs."""
    total_seconds: float = 590.0
    """How long all of them may take: less than the time-out of the check, so that a step is named."""


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
        text = f"{what} did not finish within {ran.timeout_seconds:g} s and was killed"
        words = f"; log {ran.log}" if ran.log else ""
        words += f"; its last output: {ran.tail or last_lines(ran.output) or 'none'}"
        if cut_short:
            text += f"; earlier steps had used part of its time{words}"
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
        text = f"{what} was killed, perhaps because memory ran out: {last_lines(ran.output)}"
        return Finding(status=Status.UNKNOWN, reason="Crashed", message=text, target="node")
    return None


def _not_measured(what: str, ran: Ran) -> Finding | None:
    """What kept the step from telling anything of the devices: it has no row at all."""
    words = last_lines(ran.output)
    if ran.returncode == _NOT_FOUND_EXIT:
        return Finding(status=Status.UNKNOWN, reason="MissingTool", message=f"{what}: {words}", target="node")
    # What hardware said comes first: cores that failed are not available either.
    if _NO_DRIVER.search(ran.words):
        text = f"{what} did not run: the Neuron driver or a device is missing: {words}"
        return Finding(status=Status.FAIL, reason="MissingDevice", message=text, target="node")
    if is_hardware(ran.words):
        return None
    if busy := _BUSY.search(ran.words):
        text = f"{what} did not run: the cores are in use: {_line_of(ran.words, busy.start())}"
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
        text = f"{what}: no row for {_sizes(missing)} bytes, although nccom-test succeeded"
        return Finding(status=Status.FAIL, reason="CollectiveFailed", message=text, target="node")
    why = errors[0] if errors else f"exit code {ran.returncode}"
    text = f"{what} failed ({why})"
    if missing:
        text += f", no row for {_sizes(missing)} bytes"
    if ran.log:
        text += f"; log {ran.log}"
    text += f": {ran.tail or last_lines(ran.output) or 'no output'}"
    wrong = not _RUN_FAILED.search(ran.output) and _WRONG.search(ran.output)
    reason = "CollectiveMismatch" if wrong else "CollectiveFailed"
    return Finding(status=Status.FAIL, reason=reason, message=text, target="node")


def _unusable(what: str, row: Row, step: Step) -> Finding | None:
    """Why the numbers of a row cannot be used; None where they can."""
    if row.seconds is not None and not math.isfinite(row.seconds):
        text = f"{what}: the time {row.seconds} is not a number"
        return Finding(status=Status.FAIL, reason="CollectiveFailed", message=text, target="node")
    if row.seconds is None or row.seconds <= 0:
        text = f"{what}: no readable time"
        return Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    if row.dtype not in (None, step.dtype):
        text = f"{what}: unexpected type {row.dtype} in its row"
        return Finding(status=Status.UNKNOWN, reason="Garbage", message=text, target="node")
    if not believable(row):
        text = (
            f"{what}: {quantity('_seconds', row.seconds)} does not match the printed bandwidth {row.printed:g}, so a "
            "unit must be wrong; report this with the version of nccom-test"
        )
        return Finding(status=Status.UNKNOWN, reason="Garbage", message=text, target="node")
    if (computed := contradicts(row, bus_factor(step.op, step.ranks))) is not None:
        text = (
            f"{what}: the printed bus bandwidth is {row.printed_bus:g} GB/s, but size, time and {step.ranks} ranks "
            f"give {computed:.3g} GB/s; report this with the version of nccom-test"
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


def _refused(ctx: Context[Params]) -> Finding | None:
    """Why nothing can be measured here."""
    if ctx.inventory.get("accelerator") != "neuron":
        text = "nccom-test runs only on Neuron devices"
        return Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
    if not ctx.inventory.get("devices"):
        text = "no Neuron devices were found, so nothing was measured"
        return Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    holders = ctx.inventory.get("holders")
    if holders:
        text = f"the devices are in use: {', '.join(map(str, list(holders)[:4]))}"
        return Finding(status=Status.SKIP, reason="Busy", message=text, target="node")
    return None


def _rank_count(ctx: Context[Params]) -> int | None:
    """All logical cores; None where any device does not say its own and the inventory has no sum."""
    count = ctx.inventory.get("core_count")
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return count
    cores = [device.get("cores") for device in ctx.inventory["devices"]]
    whole = [one for one in cores if isinstance(one, int) and not isinstance(one, bool) and one > 0]
    return sum(whole) if len(whole) == len(cores) else None


def _device(ctx: Context[Params]) -> tuple[str | None, int | None]:
    """Kind and logical cores of one device; of the instance type where the devices do not say their kind."""
    first = ctx.inventory["devices"][0]
    known = find_type(ctx.inventory.get("instance_type"))
    kind = first.get("kind") or (known.chip.name if known else None)
    cores = first.get("cores")
    return kind, cores if isinstance(cores, int) and not isinstance(cores, bool) else None
