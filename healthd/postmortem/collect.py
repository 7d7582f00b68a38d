"""
What is to be found on a node after a job's end, beside what the parent of its command knows; and what checks say now.

Every part is bounded, and what cannot be read is left out: a post-mortem with less to go by, never none.
"""

from __future__ import annotations

import glob
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from checks.host.machine import Host, HostError
from checks.json_text import parse_json
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, words_of
from healthd.core.model import NodeState
from healthd.postmortem.flight_recorder import MAX_BYTES, Dump, Operation, read_dump
from healthd.postmortem.judge import FailedCheck, Measured
from healthd.postmortem.notes import RAS, Notes, Words, option_of

MAX_FILES = 256
TAIL_BYTES = 256 * 1024
MAX_KERNEL_LINES = 500
EARLIER_SECONDS = 1.0  # clocks of files and of the kernel log are not exactly ours
DUMP_SECONDS = 10.0  # torch writes dumps after the first death; longer than that nobody waits
DUMP_LOOK_SECONDS = 0.25
CHECK_STARTS_SECONDS = 1.0  # less than that left: no check is begun
RAS_ADDRESS = "localhost:28028"
RAS_SECONDS = 6.0  # NCCL waits 5 s for the processes of other nodes
MAX_RAS_BYTES = 128 * 1024
READ_BYTES = 65536
NEURON_DUMPS = ("/tmp/neuron-core-dump",)  # and /tmp/neuron-core-dumps, which AWS's guide names
MAX_NEURON_LOGS = 32
# Where torch writes dumps without a variable that says so, by version.
DUMP_PREFIXES = ("/tmp/nccl_trace_rank_", "~/.cache/torch/nccl_trace_rank_", "~/.cache/torch/comm_lib_trace_rank_")
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


# --- What is to be found on the node ---------------------------------------------------------------------------------


def complete(notes: Notes, patterns: Iterable[str]) -> Notes:
    """The notes of the parent and what the node holds: log files, torch's error file and dumps, the kernel log."""
    unread = list(notes.unread)
    files = [*_ras_status(notes, unread), *_log_files(notes, patterns, unread), *_error_file(notes, unread)]
    files += _neuron_logs(notes, unread)
    dumps = _wait_for_dumps(notes, unread)
    return replace(
        notes, files=tuple(files), dumps=tuple(dumps), kernel=tuple(_kernel_log(notes, unread)), unread=tuple(unread)
    )


def _log_files(notes: Notes, patterns: Iterable[str], unread: list[str]) -> Iterator[Words]:
    wanted = list(patterns)
    folder = option_of(notes.command, "log-dir")
    if folder:
        wanted += [os.path.join(glob.escape(folder), "**", name) for name in ("stdout.log", "stderr.log", "error.json")]
    found: dict[str, None] = {}
    for pattern in wanted:
        for name in glob.iglob(os.path.join(notes.directory, pattern), recursive=True):
            if len(found) < MAX_FILES:
                found[name] = None
    if len(found) == MAX_FILES:
        unread.append(f"more than {MAX_FILES} log files match; the others are not read")
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
        local, node, each = int(found[1]), option_of(command, "node-rank"), option_of(command, "nproc-per-node")
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


def _neuron_logs(notes: Notes, unread: list[str]) -> Iterator[Words]:
    """
    The ends of the runtime's logs in Neuron's core dumps of this job.

    https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/explore/core-dump-deep-dive.html
    """
    named = notes.environment.get("NEURON_RT_LOCAL_CORE_DUMP_DIRECTORY")
    # The place has fields of the runtime's own (`dt-%d-cid-%c`): whatever they are filled with is a folder of ours.
    places = [named.partition("%")[0]] if named is not None else list(NEURON_DUMPS)
    for place in places:
        if not place:
            continue
        pattern = os.path.join(notes.directory, glob.escape(place) + "*", "**", "nrt-*.log")
        for name in sorted(glob.iglob(pattern, recursive=True))[:MAX_NEURON_LOGS]:
            try:
                # In a place that all jobs share, other users' dumps are of other jobs.
                if named is None and os.stat(name).st_uid != os.getuid():
                    continue
            except OSError:
                continue
            words = _tail(name, notes, unread)
            if words is not None:
                yield words


def _ras_status(notes: Notes, unread: list[str]) -> Iterator[Words]:
    """
    What NCCL's RAS says of the communicators, where ranks of this node still live; it is noted and not judged.

    NCCL 2.24 and later answer in every process: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
    """
    named = notes.environment.get("NCCL_RAS_ADDR")
    spoken = any("NCCL" in text for words in notes.streams for _, text in words.chunks)
    if notes.environment.get("NCCL_RAS_ENABLE") == "0" or not (named or spoken):
        return
    host, _, port = (named or RAS_ADDRESS).rpartition(":")
    try:
        text = read_ras(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return  # no process of NCCL lives any more
    except (OSError, ValueError) as error:
        unread.append(f"NCCL RAS at {named or RAS_ADDRESS}: {words_of(error)}")
        return
    yield Words(name=RAS, bytes=len(text), chunks=((time.time(), text),))


def read_ras(host: str, port: int) -> str:
    """
    The status of all communicators as text, as `ncclras` asks for it; OSError where nobody tells within RAS_SECONDS.

    ValueError for another program's words: what listens there need not be NCCL.
    """
    deadline = time.monotonic() + RAS_SECONDS
    with socket.create_connection((host, port), RAS_SECONDS) as line:
        line.sendall(b"CLIENT PROTOCOL 2\n")
        heard = b""
        while b"\n" not in heard and len(heard) < MAX_RAS_BYTES:
            heard += _next_of(line, deadline)
        if not heard.startswith(b"SERVER PROTOCOL "):
            raise ValueError(f"it does not speak NCCL's RAS protocol: {heard[:40]!r}")
        line.sendall(b"VERBOSE STATUS\n")
        status = b""
        while len(status) < MAX_RAS_BYTES:
            try:
                part = line.recv(READ_BYTES) if not _too_late(line, deadline) else b""
            except TimeoutError:
                break  # what came until then is worth having
            if not part:
                break
            status += part
    return status[:MAX_RAS_BYTES].decode("utf-8", "backslashreplace")


def _next_of(line: socket.socket, deadline: float) -> bytes:
    if _too_late(line, deadline):
        raise TimeoutError("it did not respond in time")
    part = line.recv(READ_BYTES)
    if not part:
        raise ConnectionError("it closed the connection")
    return part


def _too_late(line: socket.socket, deadline: float) -> bool:
    """Whether the time is over; else the line waits no longer than until then."""
    left = deadline - time.monotonic()
    line.settimeout(max(0.001, left))
    return left <= 0


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


def measure(tier: str, host: str, seconds: float, *, config: Path | None = None, gate: str | None = None) -> Measured:
    """
    Run the checks of a tier on this node now, in a process of their own and by the settings of `config`; never raises.
    The lease of the job's own `gate` does not make the node busy; processes on the devices do.

    Whatever goes wrong is a result that says nothing: `unknown`, with the reason as note.
    """
    if seconds < CHECK_STARTS_SECONDS:
        return Measured(node=host, tier=tier, status="unknown", note="no time was left for it")
    command = [sys.executable, "-P", "-m", "healthd", "check", "--tier", tier, "--json"]
    command += ["--config", str(config)] if config is not None else []
    command += ["--past", gate] if gate is not None else []
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Measured(node=host, tier=tier, status="unknown", note=f"not finished within {seconds:.0f} s")
    except OSError as error:
        return Measured(node=host, tier=tier, status="unknown", note=words_of(error))
    try:
        state = wire.decode(done.stdout, NodeState, what="healthd check")
    except BadInputError:
        words = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
        return Measured(node=host, tier=tier, status="unknown", note=words or f"it exited with {done.returncode}")
    status = {"healthy": "pass", "degraded": "warn", "unhealthy": "fail"}.get(state.health.value, "unknown")
    problems = [
        FailedCheck(reason=reason.code, target=reason.target or "node", message=reason.message)
        for reason in state.reasons
        if reason.status.value == "fail"
    ]
    note = next((f"{each.code}: {each.message}" for each in state.reasons if each.status.value == "unknown"), "")
    return Measured(
        node=host, tier=tier, status=status, problems=tuple(problems), note=note if status == "unknown" else ""
    )
