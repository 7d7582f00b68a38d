"""
Running nccom-test: find it, learn what it can, and run one step of a plan within its time. Nothing is judged here.

Unverified on hardware: that nccom-test runs with a HOME and a working directory of its own, and that nothing of it
survives the end of its process group.

Also here:

- what nccom-test says: its help, its table and its JSON report. Pure; nothing is judged here;
- what nccom-test is asked to do: which sizes, types and numbers of ranks, and the arguments for one such run;
- the environment and the folder of a run of nccom-test: nothing of a job's own gets into it.
"""

from __future__ import annotations

import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checks.contract import Tier
from checks.host.guard import FOLDER_PREFIX
from checks.host.machine import Completed, Host, HostError
from checks.json_text import parse_json

__all__ = ["DROPPED_PREFIXES", "FOLDER_PREFIX", "environment_of"]

MAX_ROWS = 256
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZE = re.compile(r"size\(b\)", re.IGNORECASE)
_TIME = re.compile(r"time(?::(\w+))?\(([a-zµ]+)\)", re.IGNORECASE)
_ALGBW = re.compile(r"algbw\(gi?b/s\)", re.IGNORECASE)
_BUSBW = re.compile(r"busbw\(gi?b/s\)", re.IGNORECASE)
MAX_BUS_RATIO = 2.0  # between the printed bus bandwidth and that of size, time and ranks
_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
# argparse writes `--check [{random,all_ones}]`, and `--check` alone for a switch.
_CHECK = re.compile(r"--check(?:[ =](?P<value>\[?(?:\{[^}]*\}|[A-Z_]+)\]?))?")

# Operation of the check -> what nccom-test calls it. By full name: the short forms differ between versions.
OPERATIONS = {
    "nccom_all_gather": "all_gather",
    "nccom_all_reduce": "all_reduce",
    "nccom_reduce_scatter": "reduce_scatter",
}
MAIN_DTYPE = "fp32"
DEEP_DTYPES = ("fp32", "bf16", "fp16")
_WIDEST_BYTES = 4
_QUICK = (1024, 32)  # size to begin with and factor: three sizes, the last of them 1 MiB
_DEEP = (512 * 1024, 16)  # 512 KiB, 8 MiB, 128 MiB: one for each algorithm
_STEPS = 3

# What a job or a launcher sets for processes of its own: other cores, other addresses, another way to the network.
DROPPED_PREFIXES = ("NEURON_", "NCCL_", "CCOM_", "OFI_NCCL_", "FI_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_")

PROGRAM = "nccom-test"
REMEDY = "install the package aws-neuronx-tools, or disable the nccom checks"
HELP_SECONDS = 30.0
_MAX_LOG_BYTES = 1 << 20
_MAX_REPORT_BYTES = 1 << 20
_TAIL_LINES, _TAIL_CHARACTERS = 4, 400

_learned: dict[tuple[str, int], Abilities] = {}  # by path and time of change: a process serves one installation


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


def contradicts(row: Row, bus_factor: float) -> float | None:
    """
    The bus bandwidth in GB/s that size, time and ranks give, where the printed one is more than MAX_BUS_RATIO off.

    None where it fits, or none is printed: in GiB/s it is 7 % less, and of few ranks versions may count otherwise.
    """
    if row.printed_bus is None or row.size_bytes is None or row.seconds is None or not row.seconds > 0:
        return None
    computed = row.size_bytes / row.seconds / 1e9 * bus_factor
    # Printed numbers are rounded to two digits: 0.00 may be 0.005.
    low, high = row.printed_bus - 0.005, row.printed_bus + 0.005
    fits = low <= computed * MAX_BUS_RATIO and computed <= high * MAX_BUS_RATIO
    return None if fits else computed


def merged(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """The rows of `first`, and those of `second` for sizes that it has not: it may have been cut."""
    sizes = {row.size_bytes for row in first}
    return [*first, *(row for row in second if row.size_bytes not in sizes)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """
    One line of the table. `size_bytes` and `seconds` None: not to be read; seconds may be NaN where the tool says so.

    `p99_seconds` None: not asked for. `printed` is the algorithm bandwidth as printed, in a unit that nobody knows, and
    `printed_bus` the bus bandwidth.
    """

    size_bytes: int | None
    seconds: float | None
    dtype: str | None
    printed: float | None = None
    p99_seconds: float | None = None
    algorithm: str | None = None
    printed_bus: float | None = None


def plan_steps(check: str, tier: Tier, *, ranks: int, counts: Sequence[int]) -> list[Step]:
    """
    The processes of one check: in quick one, of all ranks; in deep one a type, and one for each of `counts` besides.
    """
    op = OPERATIONS[check]
    if tier.rank <= Tier.QUICK.rank:
        return [_step(op, ranks, MAIN_DTYPE, _QUICK, whole=True)]
    whole = [_step(op, ranks, dtype, _DEEP, whole=True) for dtype in DEEP_DTYPES]
    return whole + [_step(op, count, MAIN_DTYPE, _DEEP, whole=False) for count in counts if 1 < count < ranks]


def rank_counts(kind: str | None, ranks: int, cores_per_device: int | None) -> tuple[int, ...]:
    """
    Numbers of ranks that are documented to work, besides all of them.

    2 and 8 on Trainium (documented: 1, 2, 8, 32); on others the cores of one device, where that is known.
    """
    if kind in ("Trainium", "Trainium1"):
        return tuple(count for count in (2, 8) if count < ranks)
    return (cores_per_device,) if cores_per_device is not None and 1 < cores_per_device < ranks else ()


def lnc_of(inventory: Mapping[str, Any]) -> int | None:
    """The logical core configuration of the node; None where it is not known."""
    lnc = inventory.get("lnc")
    return lnc if isinstance(lnc, int) and not isinstance(lnc, bool) and lnc > 0 else None


def core_ids_of(inventory: Mapping[str, Any]) -> list[int] | None:
    """The ids of all cores, ascending; None where any device does not say its own."""
    ids: list[int] = []
    for device in inventory.get("devices") or ():
        own = device.get("core_ids") if isinstance(device, Mapping) else None
        if not isinstance(own, (list, tuple)) or not own:
            return None
        ids += [one for one in own if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    return sorted(ids) or None


def find_tool(host: Host) -> str:
    """The path of nccom-test. HostError MissingTool with the remedy."""
    try:
        return host.find_program(PROGRAM)
    except HostError as error:
        raise HostError(error.reason, f"no {PROGRAM} in PATH or /opt/aws/neuron/bin; {REMEDY}") from None


def learn_abilities(host: Host, program: str) -> Abilities:
    """What this installation can do, asked once. HostError where it cannot be asked or its answer is no help."""
    try:
        key = (program, os.stat(program).st_mtime_ns)
    except OSError as error:
        raise HostError("MissingTool", f"{program}: {error.strerror or error}; {REMEDY}") from None
    if key not in _learned:
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
            done = run_guarded(host, [program, "--help"], {"HOME": folder}, folder, HELP_SECONDS)
        found = read_help(done.stdout) or read_help(done.stderr)
        if found is None:
            words = last_lines(done.stdout + "\n" + done.stderr) or "nothing"
            raise HostError("NoData", f"{program} --help (exit code {done.returncode}) is not understood: {words}")
        _learned[key] = found
    return _learned[key]


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


def run_step(
    host: Host,
    program: str,
    step: Step,
    abilities: Abilities,
    *,
    core_ids: Sequence[int] | None,
    lnc: int | None,
    timeout_seconds: float,
) -> Ran:
    """
    Run one step in a folder of its own, which is removed with what the tool left in it (dumps of tensors).

    HostError where it cannot be started.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
        report = os.path.join(folder, "report.json")
        ports = free_ports(2)
        words = arguments(step, abilities, report=report, port=ports[1])
        needed = environment(core_ids, comm_port=ports[0], folder=folder, lnc=lnc)
        code: int | None
        try:
            done = run_guarded(host, [program, *words], needed, folder, timeout_seconds)
            code, output = done.returncode, f"{done.stdout}\n{done.stderr}"
        except HostError as error:
            if error.reason != "Timeout":
                raise
            code, output = None, error.output
        text = _read_report(report)
    log = log_path(output)
    return Ran(
        step=step,
        returncode=code,
        output=output,
        report=text,
        log=log,
        log_text=read_log(host, log),
        seconds=time.monotonic() - began,
        timeout_seconds=timeout_seconds,
    )


def log_path(text: str) -> str | None:
    """The log of neuron-bench that a failure names; None where it names none, or one that may be something else."""
    match = re.search(r"log file (/[\w./-]{1,200}\.log)(?!\S)", text)
    return match[1] if match and ".." not in match[1] else None


def arguments(step: Step, abilities: Abilities, *, report: str, port: int | None) -> list[str]:
    """
    The arguments of a step, without the program. `port` is where a process of the tool may listen; None: its default.

    The operation comes first: `--check` and `--stats` would take it for their value.
    """
    words = [step.op, "-r", str(step.ranks), "-b", str(step.sizes_bytes[0]), "-e", str(step.sizes_bytes[-1])]
    words += ["-f", str(step.factor), "-d", step.dtype]
    if abilities.knows("--non-interactive"):
        words.append("--non-interactive")
    if abilities.knows("--report-to-json-file"):
        words += ["--report-to-json-file", report]
    if abilities.knows("--stats"):
        words += ["--stats", "avg", "p99"]
    if abilities.knows("--data-collector-port") and port is not None:
        words += ["--data-collector-port", str(port)]
    return words + list(abilities.check)


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


def environment(
    core_ids: Sequence[int] | None, *, comm_port: int, folder: str, lnc: int | None = None
) -> dict[str, str]:
    """
    What a step on one node needs. `core_ids` are the node's, ascending; None where they are not known. `lnc`: see
    `lnc_environment`.

    HOME is the run's own folder: nccom-test would take hosts from a file `hosts` in it, and writes there.
    """
    found = {"NEURON_RT_ROOT_COMM_ID": f"127.0.0.1:{comm_port}", "HOME": folder, "LC_ALL": "C"}
    found.update(lnc_environment(lnc))
    # By itself the tool takes the cores from 0 on, which may be others' where numbers are left out.
    if core_ids and list(core_ids) != list(range(len(core_ids))):
        found["NEURON_RT_VISIBLE_CORES"] = visible_cores(core_ids)
    return found


def lnc_environment(lnc: int | None) -> dict[str, str]:
    """
    The logical core configuration by which the ranks were counted, under its new and its old name.

    Without it the runtime takes the chip's default, and may have half of the cores that are asked for. None: not known.
    """
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
    return {} if lnc is None else dict.fromkeys(names, str(lnc))


def visible_cores(core_ids: Sequence[int]) -> str:
    """`8-15`, or each by itself where numbers are left out."""
    ids = sorted(set(core_ids))
    if ids == list(range(ids[0], ids[-1] + 1)) and len(ids) > 1:
        return f"{ids[0]}-{ids[-1]}"
    return ",".join(map(str, ids))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """
    How a step ended. `returncode` None: it did not end in `timeout_seconds` and was killed.

    `output` is what it printed on both streams; `report` the text of its JSON report; `log` the path of the log that
    it named and `log_text` its text. None: there is none.
    """

    step: Step
    returncode: int | None
    output: str
    report: str | None
    log: str | None
    log_text: str | None
    seconds: float
    timeout_seconds: float

    @property
    def tail(self) -> str | None:
        """The last words of the log; None where there are none."""
        return last_lines(self.log_text or "") or None

    @property
    def words(self) -> str:
        """All that was said, on the streams and in the log."""
        return f"{self.output}\n{self.log_text or ''}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process of nccom-test: a sweep over `sizes_bytes` (each `factor` times the one before)."""

    op: str
    ranks: int
    dtype: str
    sizes_bytes: tuple[int, ...]
    factor: int
    whole: bool
    """Whether these are all ranks of the node."""


def free_ports(count: int) -> list[int]:
    """
    TCP ports that are free on the loopback now, each another.

    Somebody else may take one before it is used: the run then fails and is told as it is.
    """
    held = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def last_lines(text: str) -> str:
    """The last words of a program or a log as one bounded line."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


def run_guarded(
    host: Host, argv: Sequence[str], given: Mapping[str, str], folder: str, timeout_seconds: float
) -> Completed:
    """In its folder, with an environment of its own. The exit code is as a shell would say it."""
    # The tool starts neuron-bench by PATH, where services have no /opt/aws/neuron/bin.
    path = os.pathsep.join((os.path.dirname(argv[0]), os.environ.get("PATH", os.defpath), "/opt/aws/neuron/bin"))
    done = host.run(
        argv,
        timeout_seconds=timeout_seconds,
        folder=folder,
        environment=lambda own: environment_of(own, {"PATH": path, **given}),
    )
    return done._replace(returncode=128 - done.returncode) if done.returncode < 0 else done


def environment_of(
    own: Mapping[str, str], given: Mapping[str, str], dropped: Sequence[str] = DROPPED_PREFIXES
) -> dict[str, str]:
    """Ours without what a job put there, and with what this run needs."""
    kept = {name: value for name, value in own.items() if not name.startswith(tuple(dropped))}
    return {**kept, **given}


def read_log(host: Host, path: str | None) -> str | None:
    """The log of neuron-bench; it stays where it is, for people. None where there is none to be read."""
    if path is None:
        return None
    try:
        return host.read(path, max_bytes=_MAX_LOG_BYTES)
    except HostError:
        return None


def _row(cells: Mapping[str, Any]) -> Row:
    """A row by the names of its columns. `time(us)` and `time:avg(us)` are the same; others are percentiles."""
    size, seconds, p99, dtype, printed, printed_bus, algorithm = None, None, None, None, None, None, None
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
        elif _BUSBW.fullmatch(name):
            printed_bus = _finite(cell)
        elif name == "algorithm":
            algorithm = cell if isinstance(cell, str) and re.fullmatch(r"[\w-]{1,32}", cell) else None
    return Row(
        size_bytes=size,
        seconds=seconds,
        dtype=dtype,
        printed=printed,
        p99_seconds=p99,
        algorithm=algorithm,
        printed_bus=printed_bus,
    )


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


def _step(op: str, ranks: int, dtype: str, sweep: tuple[int, int], *, whole: bool) -> Step:
    """Sizes that every rank gets an equal share of, because it is not documented how nccom-test rounds others."""
    wanted, factor = sweep
    first = ranks * _WIDEST_BYTES
    while first * 2 <= wanted:
        first *= 2
    sizes = tuple(first * factor**index for index in range(_STEPS))
    return Step(op=op, ranks=ranks, dtype=dtype, sizes_bytes=sizes, factor=factor, whole=whole)


def _read_report(path: str) -> str | None:
    """In our own folder, so not through the door to the machine."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_REPORT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
