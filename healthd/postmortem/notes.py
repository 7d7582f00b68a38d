"""
The notes of a job's end: of one node, and of all nodes as the judge takes them. Pure.

One node's notes are one JSON file, or one body on their way to the aggregator (`pack`). Every part is bounded.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from healthd.core import wire
from healthd.core.errors import BadInputError
from healthd.core.redaction import redact
from healthd.postmortem.flight_recorder import Dump, late_ranks
from healthd.postmortem.judge import Case, Measured, Stop
from healthd.postmortem.observations import Ended, Line, lines_of
from healthd.postmortem.parent import Relevant

MAX_NOTES_BYTES = 64 * 1024 * 1024
# Of notes that are sent: what all nodes of a job send is held and judged together.
MAX_SENT_TEXT = 256 * 1024  # characters of output: what eight ranks say with a traceback each
MIN_SENT_TEXT = 24 * 1024
MAX_JOB_TEXT = 32 * 1024 * 1024
MAX_SENT_BYTES = 1024 * 1024
MAX_PACKED_BYTES = 768 * 1024
MAX_SENT_LINE = 1000
MAX_SENT_WORDS = 100
RAS = "NCCL RAS"
"""What NCCL's own status is called among the files: it is for people, and no line of it is judged."""
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
    pid: int | None = None
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
            local, nodes = option_of(self.command, "nproc-per-node"), option_of(self.command, "nnodes") or "1"
            return int(local) * int(nodes) if local and local.isdecimal() and nodes.isdecimal() else None
        return next(
            (int(told) for name in SIZE_VARIABLES if (told := self.environment.get(name, "")).isdecimal()), None
        )


def read_notes(body: bytes, where: str) -> Notes:
    """The notes of a node; BadInputError, with `where`, for anything else."""
    notes = wire.decode(body, Notes, what=where)
    if notes.version != 1:
        raise BadInputError(f"{where}: notes of version {notes.version}; this healthd supports version 1")
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
    node = option_of(notes.command, "node-rank")
    return all(number == "0" for number in (*told, *([node] if node else [])))


def _is_launcher(command: Sequence[str]) -> bool:
    """Whether it starts ranks of its own."""
    words = [os.path.basename(word) for word in command[:4]]
    return "torchrun" in words or "torch.distributed.run" in command[:4] or words[:1] in (["mpirun"], ["srun"])


def option_of(command: Sequence[str], name: str) -> str | None:
    """The value of a launcher's option, which it takes with dashes or underscores."""
    spelled = {f"--{name}", f"--{name.replace('-', '_')}"}
    for here, following in zip(command, (*command[1:], ""), strict=True):
        option, equals, value = here.partition("=")
        if option in spelled:
            return value if equals else following
    return None


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
        started={notes.host: min(each.started for each in all_notes if each.host == notes.host) for notes in all_notes},
        pids={
            host: frozenset(each.pid for each in all_notes if each.host == host and each.pid is not None)
            for host in {notes.host for notes in all_notes}
        },
        spread=frozenset(notes.host for notes in all_notes if _is_spread(notes.command)),
    )


def _is_spread(command: Sequence[str]) -> bool:
    """Whether it starts processes on other nodes, whose output it brings here."""
    return os.path.basename(command[0] if command else "") in ("srun", "mpirun", "mpiexec", "prun", "kubectl", "ray")


def _lines(notes: Notes) -> Iterator[Line]:
    labelled = _is_labelled(notes.command)
    for words in (*notes.streams, *notes.files):
        if words.name == RAS:
            continue
        rank = words.rank if words.rank is not None else notes.rank
        for line in lines_of(notes.host, words.name, words.chunks, rank=rank, labelled=labelled):
            yield line if line.at is not None else replace(line, at=words.modified)
    for at, text in notes.kernel:
        yield Line(node=notes.host, source="kernel log", text=text, at=at, kernel=True)


def _is_labelled(command: Sequence[str]) -> bool:
    """Whether `srun --label` puts the rank in front of lines, also where a shell starts it."""
    words = " ".join(command).replace(";", " ").split()
    return (
        "srun" in {os.path.basename(word) for word in words}
        and any(word == "--label" or re.fullmatch(r"-[a-zA-Z]*l", word) for word in words[words.index("srun") :])
        if "srun" in words
        else False
    )


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


# --- On the way to the aggregator ------------------------------------------------------------------------------------


def pack(notes: Notes) -> bytes:
    """The notes without secrets as compressed JSON, of MAX_PACKED_BYTES at most: of long output the end is kept."""
    members = notes.world_size if notes.rank is not None and notes.world_size else 1
    text = max(MIN_SENT_TEXT, min(MAX_SENT_TEXT, MAX_JOB_TEXT // members))
    kernel = tuple((at, line[:MAX_SENT_LINE]) for at, line in notes.kernel)
    command = tuple(word[:MAX_SENT_LINE] for word in notes.command[:MAX_SENT_WORDS])
    notes = redacted(_cut(replace(notes, kernel=kernel, command=command), text))
    while True:
        body = wire.encode(_cut(notes, text))
        packed = zlib.compress(body, 6)
        if (len(body) <= MAX_SENT_BYTES and len(packed) <= MAX_PACKED_BYTES) or text == 0:
            return packed
        # Control characters take six bytes each in JSON, and dumps may name a thousand groups.
        text //= 4
        if text < MIN_SENT_TEXT // 4:
            text, notes = 0, replace(notes, dumps=(), files=notes.files[:16], kernel=notes.kernel[-50:])


def unpack(packed: bytes, where: str) -> Notes:
    """What `pack` made; BadInputError, with `where`, for anything else, and for what is larger."""
    if len(packed) > MAX_PACKED_BYTES:
        raise BadInputError(f"{where}: {len(packed)} bytes; notes have at most {MAX_PACKED_BYTES}")
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(packed, MAX_SENT_BYTES + 1)
    except zlib.error as error:
        raise BadInputError(f"{where}: not compressed by zlib: {error}") from None
    if len(body) > MAX_SENT_BYTES:
        raise BadInputError(f"{where}: more than {MAX_SENT_BYTES} bytes when decompressed")
    if not stream.eof or stream.unused_data:
        raise BadInputError(f"{where}: cut off, or followed by something else")
    return read_notes(body, where)


def _cut(notes: Notes, text: int) -> Notes:
    """The notes with so many characters of output: streams and files share them, and what is short stays whole."""
    parts = [*notes.streams, *notes.files]
    sizes = [sum(len(chunk) for _, chunk in words.chunks) for words in parts]
    kept = [0] * len(parts)
    for done, index in enumerate(sorted(range(len(parts)), key=lambda index: sizes[index])):
        kept[index] = min(sizes[index], text // (len(parts) - done))
        text -= kept[index]
    cut = [replace(words, chunks=_kept_of(words.chunks, most)) for words, most in zip(parts, kept, strict=True)]
    return replace(notes, streams=tuple(cut[: len(notes.streams)]), files=tuple(cut[len(notes.streams) :]))


def _kept_of(chunks: Sequence[tuple[float | None, str]], most: int) -> tuple[tuple[float | None, str], ...]:
    """Of long output two thirds of the room for its end, and one for older lines that tell of a failure."""
    if sum(len(chunk) for _, chunk in chunks) <= most:
        return tuple(chunks)
    relevant = Relevant(most // 3)
    end = _end_of(chunks, most - most // 3)
    older = len(chunks) - len(end)
    for at, chunk in chunks[:older]:
        relevant.add(at or 0.0, chunk.encode())
    if end and (cut := len(chunks[older][1]) - len(end[0][1])) > 0:
        relevant.add(chunks[older][0] or 0.0, chunks[older][1][:cut].encode())
    lines = [(at or None, line.decode("utf-8", "replace")) for at, line in relevant.kept()]
    return (*lines, *end)


def _end_of(chunks: Sequence[tuple[float | None, str]], most: int) -> tuple[tuple[float | None, str], ...]:
    """The last `most` characters from the beginning of a line on: half a line may hide what its secret is called."""
    found: list[tuple[float | None, str]] = []
    for at, chunk in reversed(chunks):
        found.append((at, chunk[-most:] if most else ""))
        if len(chunk) > most:
            break
        most -= len(chunk)
    else:
        return tuple(chunks)
    while found and "\n" not in found[-1][1]:
        found.pop()
    if found:
        at, chunk = found[-1]
        found[-1] = (at, chunk.partition("\n")[2])
    return tuple(reversed(found))
