"""
The notes of a job's end: what the parent of its command knows, and what is to be found on the node afterwards.

One node's notes are one JSON file, so that those of all nodes can be judged together (`healthd postmortem`). Every part
is bounded, and what cannot be read is left out: a post-mortem with less to go by, never none.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from checks.host.machine import Host, HostError
from checks.json_text import parse_json
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, words_of
from healthd.core.model import NodeState
from healthd.core.redaction import redact
from healthd.postmortem.flight_recorder import MAX_BYTES, Dump, Operation, late_ranks, read_dump
from healthd.postmortem.judge import Case, Ended, Line, Measured, Problem, Stop, lines_of

MAX_NOTES_BYTES = 64 * 1024 * 1024
MAX_FILES = 256
TAIL_BYTES = 256 * 1024
MAX_KERNEL_LINES = 500
EARLIER_SECONDS = 1.0  # clocks of files and of the kernel log are not exactly ours
DUMP_SECONDS = 10.0  # torch writes dumps after the first death; longer than that nobody waits
DUMP_LOOK_SECONDS = 0.25
CHECK_STARTS_SECONDS = 1.0  # less than that left: no check is begun
# Where torch writes dumps without a variable that says so, by version.
DUMP_PREFIXES = ("/tmp/nccl_trace_rank_", "~/.cache/torch/nccl_trace_rank_", "~/.cache/torch/comm_lib_trace_rank_")
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Who a process is among all ranks of its job; what counts nodes is not among them.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_SHELL_SIGNALS = (4, 6, 7, 8, 9, 11, 15)  # a shell that exits 128 and one of these tells of its own child


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A signal that the parent passed on."""

    at: float
    signal: int
    pid: int
    uid: int
    by: str


@dataclass(frozen=True, kw_only=True)
class Words:
    """The end of a stream or file, as pairs of time and text. `rank` None: the node's, or the lines say it."""

    name: str
    bytes: int
    chunks: tuple[tuple[float | None, str], ...]
    rank: int | None = None
    modified: float | None = None


@dataclass(frozen=True, kw_only=True)
class Notes:
    """All that one node knows of the end of a job."""

    version: int
    host: str
    command: tuple[str, ...]
    directory: str
    started: float
    ended: float
    code: int
    signal: int | None
    signals: tuple[Sent, ...]
    environment: dict[str, str]
    streams: tuple[Words, ...]
    memory_events: dict[str, dict[str, int]]
    dumped_core: bool = False
    files: tuple[Words, ...] = ()
    kernel: tuple[tuple[float, str], ...] = ()
    dumps: tuple[Dump, ...] = ()
    measured: tuple[Measured, ...] = ()
    unread: tuple[str, ...] = field(default=())
    """What was looked for and could not be read, with the reason."""

    @property
    def rank(self) -> int | None:
        """The rank that the command is; None where it is the launcher of several, or nobody says."""
        if _is_launcher(self.command):
            return None
        return next(
            (int(told) for name in RANK_VARIABLES if (told := self.environment.get(name, "")).isdecimal()), None
        )

    @property
    def world_size(self) -> int | None:
        """How many ranks the job has; None where nobody says."""
        if _is_launcher(self.command):
            local, nodes = _option(self.command, "nproc-per-node"), _option(self.command, "nnodes") or "1"
            return int(local) * int(nodes) if local and local.isdecimal() and nodes.isdecimal() else None
        return next(
            (int(told) for name in SIZE_VARIABLES if (told := self.environment.get(name, "")).isdecimal()), None
        )


def read_notes(body: bytes, where: str) -> Notes:
    """The notes of a node; BadInputError, with `where`, for anything else."""
    notes = wire.decode(body, Notes, what=where)
    if notes.version != 1:
        raise BadInputError(f"{where}: notes of version {notes.version}; this healthd knows version 1")
    return notes


def is_first(notes: Notes) -> bool:
    """Whether this is the job's first rank or node, or the only one: of a good end one says it for all."""
    names = (
        *RANK_VARIABLES,
        "NODE_RANK",
        "GROUP_RANK",
        "SLURM_NODEID",
        "JOB_COMPLETION_INDEX",
        "AWS_BATCH_JOB_NODE_INDEX",
    )
    told = [notes.environment[name] for name in names if name in notes.environment]
    node = _option(notes.command, "node-rank")
    return all(number == "0" for number in (*told, *([node] if node else [])))


def _is_launcher(command: Sequence[str]) -> bool:
    """Whether it starts ranks of its own."""
    words = [os.path.basename(word) for word in command[:4]]
    return "torchrun" in words or "torch.distributed.run" in command[:4] or words[:1] in (["mpirun"], ["srun"])


def _option(command: Sequence[str], name: str) -> str | None:
    """The value of a launcher's option, which it takes with dashes or underscores."""
    spelled = {f"--{name}", f"--{name.replace('-', '_')}"}
    for here, following in zip(command, (*command[1:], ""), strict=True):
        option, equals, value = here.partition("=")
        if option in spelled:
            return value if equals else following
    return None


# --- What is to be found on the node ---------------------------------------------------------------------------------


def complete(notes: Notes, patterns: Iterable[str]) -> Notes:
    """The notes of the parent and what the node holds: log files, torch's error file and dumps, the kernel log."""
    unread: list[str] = []
    files = [*_log_files(notes, patterns, unread), *_error_file(notes, unread)]
    dumps = _wait_for_dumps(notes, unread)
    return replace(
        notes, files=tuple(files), dumps=tuple(dumps), kernel=tuple(_kernel_log(notes, unread)), unread=tuple(unread)
    )


def _log_files(notes: Notes, patterns: Iterable[str], unread: list[str]) -> Iterator[Words]:
    wanted = list(patterns)
    folder = _option(notes.command, "log-dir")
    if folder:
        wanted += [os.path.join(glob.escape(folder), "**", name) for name in ("stdout.log", "stderr.log", "error.json")]
    found: dict[str, None] = {}
    for pattern in wanted:
        for name in glob.iglob(os.path.join(notes.directory, pattern), recursive=True):
            if len(found) < MAX_FILES:
                found[name] = None
    if len(found) == MAX_FILES:
        unread.append(f"more than {MAX_FILES} log files match: the others are not read")
    for name in found:
        words = _tail(name, notes, unread)
        if words is not None:
            yield words


def _tail(name: str, notes: Notes, unread: list[str]) -> Words | None:
    """The end of a file that was written while the job ran."""
    try:
        with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if status.st_mtime < notes.started - EARLIER_SECONDS or not os.path.isfile(name):
                return None
            file.seek(max(0, status.st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "backslashreplace")
    except OSError as error:
        unread.append(f"{name}: {words_of(error)}")
        return None
    rank = _rank_of(name, notes.command)
    if name.endswith(".json"):
        text = _error_text(text) or text
    return Words(name=name, bytes=status.st_size, chunks=((None, text),), rank=rank, modified=status.st_mtime)


def _rank_of(name: str, command: Sequence[str]) -> int | None:
    """The rank whose file it is, by torchrun's folders or by its name (`rank-3.log`)."""
    if found := re.search(r"/attempt_\d+/(\d+)/(?:stdout\.log|stderr\.log|error\.json)$", name):
        local, node, each = int(found[1]), _option(command, "node-rank"), _option(command, "nproc-per-node")
        return int(node) * int(each) + local if node and each and node.isdecimal() and each.isdecimal() else local
    named = re.search(r"rank[-_.]?(\d+)", os.path.basename(name))
    return int(named[1]) if named else None


def _error_file(notes: Notes, unread: list[str]) -> Iterator[Words]:
    """What torch's `@record` wrote of an exception."""
    name = notes.environment.get("TORCHELASTIC_ERROR_FILE")
    if name and os.path.exists(name):
        words = _tail(name, notes, unread)
        if words is not None:
            yield replace(words, rank=notes.rank)


def _error_text(text: str) -> str | None:
    """The exception in an error file, as a line like those of a log."""
    try:
        message = parse_json(text)["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError):
        return None


def _wait_for_dumps(notes: Notes, unread: list[str]) -> list[Dump]:
    """The dumps of this job: torch writes them within seconds after the first death, so they are waited for."""
    named = [notes.environment[name] for name in DUMP_VARIABLES if notes.environment.get(name)]
    prefixes = named or [os.path.expanduser(prefix) for prefix in DUMP_PREFIXES]
    # In a place that all jobs share, other users' dumps are of other jobs.
    owner = None if named else os.getuid()
    deadline = notes.ended + DUMP_SECONDS
    before: dict[str, int] = {}
    while True:
        sizes = dict(_dump_files(prefixes, notes, owner))
        settled = sizes == before and all(sizes.values())
        if settled or time.time() >= deadline:
            break
        before = sizes
        time.sleep(DUMP_LOOK_SECONDS)
    dumps: dict[int, Dump] = {}
    for name in sizes:
        rank = re.search(r"(\d+)(?:\.json|\.pickle|_\d+)?$", name)
        if rank is None:
            continue
        try:
            dump = read_dump(read_file(Path(name), MAX_BYTES), int(rank[1]), name)
        except (BadInputError, OSError) as error:
            unread.append(str(error))
            continue
        dumps[dump.rank] = replace(dump, operations=tuple(_telling(dump.operations)))
    return list(dumps.values())


def _dump_files(prefixes: Iterable[str], notes: Notes, owner: int | None) -> Iterator[tuple[str, int]]:
    for prefix in prefixes:
        for name in sorted(glob.glob(os.path.join(notes.directory, glob.escape(prefix) + "*")))[:MAX_FILES]:
            try:
                status = os.stat(name)
            except OSError:
                continue
            if status.st_mtime >= notes.started - EARLIER_SECONDS and owner in (None, status.st_uid):
                yield name, status.st_size


def _telling(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Of each group the last collective and the oldest unfinished one: the rules need no others."""
    last = {operation.group: operation for operation in operations}
    oldest: dict[str, Operation] = {}
    for operation in operations:
        if not operation.done:
            oldest.setdefault(operation.group, operation)
    yield from {id(each): each for each in (*oldest.values(), *last.values())}.values()


def _kernel_log(notes: Notes, unread: list[str]) -> list[tuple[float, str]]:
    """The lines of the kernel log since the job's start."""
    host = Host()
    try:
        booted = host.epoch_seconds() - host.uptime_seconds()
        lines = [(booted + at, text) for at, text in host.kernel_log() if at is not None]
    except HostError as error:
        unread.append(f"the kernel log: {error}")
        return []
    return [(at, text) for at, text in lines if at >= notes.started - EARLIER_SECONDS][-MAX_KERNEL_LINES:]


# --- Measurement -----------------------------------------------------------------------------------------------------


def measure(tier: str, host: str, seconds: float) -> Measured:
    """
    Run the checks of a tier on this node now, in a process of their own; never raises.

    Whatever goes wrong is a result that says nothing: `unknown`, with the reason as note.
    """
    if seconds < CHECK_STARTS_SECONDS:
        return Measured(node=host, tier=tier, status="unknown", note="no time was left for it")
    command = [sys.executable, "-P", "-m", "healthd", "check", "--tier", tier, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Measured(node=host, tier=tier, status="unknown", note=f"not done within {seconds:.0f} s")
    except OSError as error:
        return Measured(node=host, tier=tier, status="unknown", note=words_of(error))
    try:
        state = wire.decode(done.stdout, NodeState, what="healthd check")
    except BadInputError:
        words = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
        return Measured(node=host, tier=tier, status="unknown", note=words or f"it exited with {done.returncode}")
    status = {"healthy": "pass", "degraded": "warn", "unhealthy": "fail"}.get(state.health.value, "unknown")
    problems = [
        Problem(reason=reason.code, target=reason.target or "node", message=reason.message)
        for reason in state.reasons
        if reason.status.value == "fail"
    ]
    note = next((f"{each.code}: {each.message}" for each in state.reasons if each.status.value == "unknown"), "")
    return Measured(
        node=host, tier=tier, status=status, problems=tuple(problems), note=note if status == "unknown" else ""
    )


# --- All nodes together ----------------------------------------------------------------------------------------------


def case_of(all_notes: Sequence[Notes]) -> Case:
    """What the notes of all nodes say, as the judge takes it."""
    lines: list[Line] = []
    ended: list[Ended] = []
    for notes in all_notes:
        lines += _lines(notes)
        ended.append(_ended(notes))
    size = next((size for notes in all_notes if (size := notes.world_size) is not None), None)
    dumps = {dump.rank: dump for notes in all_notes for dump in notes.dumps if size is None or dump.rank < size}
    return Case(
        lines=tuple(lines),
        ended=tuple(ended),
        stops=tuple(
            Stop(node=notes.host, at=sent.at, signal=sent.signal, by=sent.by, pid=sent.pid, uid=sent.uid)
            for notes in all_notes
            for sent in notes.signals
        ),
        oom_kills=_oom_kills(all_notes),
        late=late_ranks(dumps.values()),
        measured=tuple(each for notes in all_notes for each in notes.measured),
        world_size=size,
        nodes={notes.rank: notes.host for notes in all_notes if notes.rank is not None},
    )


def _lines(notes: Notes) -> Iterator[Line]:
    labelled = os.path.basename(notes.command[0] if notes.command else "") == "srun" and bool(
        {"-l", "--label"} & set(notes.command)
    )
    for words in (*notes.streams, *notes.files):
        rank = words.rank if words.rank is not None else notes.rank
        for line in lines_of(notes.host, words.name, words.chunks, rank=rank, labelled=labelled):
            yield line if line.at is not None else replace(line, at=words.modified)
    for at, text in notes.kernel:
        yield Line(node=notes.host, source="kernel log", text=text, at=at, kernel=True)


def _ended(notes: Notes) -> Ended:
    signal = notes.signal
    if signal is None and notes.code - 128 in _SHELL_SIGNALS:
        signal = notes.code - 128
    return Ended(node=notes.host, rank=notes.rank, at=notes.ended, code=notes.code, signal=signal)


def _oom_kills(all_notes: Iterable[Notes]) -> Mapping[str, int]:
    risen: dict[str, int] = {}
    for notes in all_notes:
        before, after = (notes.memory_events.get(name, {}).get("oom_kill") for name in ("before", "after"))
        if before is not None and after is not None:
            risen[notes.host] = max(risen.get(notes.host, 0), after - before)
    return risen


def redacted(notes: Notes) -> Notes:
    """The notes without secrets, for a file that others may read."""
    clean = [
        replace(words, chunks=tuple((at, redact(text)) for at, text in words.chunks))
        for words in (*notes.streams, *notes.files)
    ]
    count = len(notes.streams)
    return replace(
        notes,
        command=tuple(redact(word) for word in notes.command),
        streams=tuple(clean[:count]),
        files=tuple(clean[count:]),
    )
