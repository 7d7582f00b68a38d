"""
From the output of a job to observations: lines with their ranks and times, and what the catalogue knows of them. Pure.

A line that begins a new thing is an observation of some signature. What the job survived is left out: its steps went on
afterwards.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from checks.json_text import parse_json
from healthd.postmortem.catalogue import SIGNATURES, Signature, Strength, Subject

MAX_LINE = 4000  # characters of a line that are searched
MAX_SHOWN = 300  # characters of a line that are shown
MAX_FINDINGS = 4000  # of one source: 64 ranks that all say sixty things
MAX_FORMS = 20_000
SURVIVED_STEPS = 20  # of the job after an observation: it went on


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of output, or of the kernel log. `at` is seconds since the epoch; None where nothing tells it."""

    node: str
    source: str
    text: str
    rank: int | None = None
    at: float | None = None
    kernel: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """
    An observation: a signature at a place. `node` and `rank` are of the process that reports it.

    `named`, `peer` and `silent` are what the line names: the node it is about, the other end of a connection, and the
    task that stopped answering. `pid` is the process that a line of the kernel is about.
    """

    signature: Signature
    node: str
    rank: int | None
    at: float | None
    line: str
    source: str
    order: int = 0
    """Its position in its source: order where there are no times."""
    code: int | None = None
    """The exit code of the rank, or minus its signal, where the line tells it."""
    named: str | None = None
    peer: str | None = None
    silent: int | None = None
    pid: int | None = None
    waited_seconds: float = 0.0
    """How long the process had waited when it reported, where the line tells it."""
    clock: str = ""
    """The node by whose clock `at` is; "" for `node`."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one process ended: the command of a node, or one rank. `signal` None: it ended by itself with `code`."""

    node: str
    rank: int | None
    at: float | None
    code: int
    signal: int | None = None
    source: str = "exit"


# --- Lines ----------------------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# torchrun's default prefix, torch's excepthook and logs, srun --label, mpirun --tag-output.
_RANKED = re.compile(
    r"\s*(?:\[(?:default|rank:? ?|Rank:? |RANK )(?P<a>\d{1,6})\]:?:?"
    r"|(?P<b>\d{1,6}): "
    r"|\[\d+,(?P<c>\d{1,6})\]<std(?:out|err)>:) ?"
)
# The rank in the first group is that of the job; that in any other group (tensor parallel, ...) counts its members.
_RANK_INSIDE = re.compile(r"\[Rank (\d{1,6})\]|\[PG (?:ID )?0\b[^\]]{0,80} Rank (\d{1,6})\]")
# What containers, Ray and pdsh put in front of a line.
_WRAPPED = re.compile(
    r"^(?:20\d\d-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?)?"
    r"(?:\[?[a-z0-9][\w.-]*/[a-z0-9][\w.-]*(?:/[\w.-]+)?\]? (?=\[|Traceback|  File |[\w.]+(?:Error|Exception)\b))?"
    r"(?:\[pod/[\w.-]+/[\w.-]+\] )?"
    r"(?:\x28[\w.]+ pid=\d+(?:, ip=[\w.:]+)?\x29(?: \[repeated[^\]]*\])? )?"
    r"(?:[\w.-]{1,64}: (?=Traceback|  File |[\w.]+(?:Error|Exception): ))?"
)
# Said and survived: what is tried again or only warned of ends no job.
_MILD = re.compile(
    r"^\[?[WI]\d{4}\b|^\[[WI] |\bWARNING\b|\b(?:User|Deprecation|Future|Runtime)Warning\b|\b[Rr]etrying\b"
    r"|\bignored in\b|\bNCCL INFO\b|^(?:\S+ ){0,3}\W?(?:INFO|DEBUG|TRACE)\b"
)
_ORDINARY = re.compile(
    r"(?i)error|exception|traceback|fail|warn|abort|kill|signal|^\s|^$|^[-=*~]{3,}|timeout|timed out"
)
_STAMP = re.compile(r"(?<!\d)(20\d\d)-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?")


def lines_of(
    node: str,
    source: str,
    chunks: Iterable[tuple[float | None, str]],
    *,
    rank: int | None = None,
    labelled: bool = False,
) -> Iterator[Line]:
    """
    The lines of a stream or file, without colours, each with the time at which its end came and with its rank.

    `rank` is that of lines which name none. `labelled`: numbers before a colon are ranks (srun --label).
    """
    left, at = "", None
    for at, text in chunks:
        *whole, left = re.split(r"\r\n|[\n\r]", left + text)
        for each in whole:
            yield _line(node, source, each, at, rank, labelled)
        left = left[-MAX_LINE:]
    if left:
        yield _line(node, source, left, at, rank, labelled)


def _line(node: str, source: str, text: str, at: float | None, rank: int | None, labelled: bool) -> Line:
    text = _ANSI.sub("", text[: 2 * MAX_LINE])[:MAX_LINE]
    at = at if at is not None else _stamp(text)
    named = False
    if text.startswith("{") and (told := _json_line(text)) is not None:
        text, own = told
        rank, named = (own, True) if own is not None else (rank, False)
    for _ in range(2):  # what wraps a line may stand before its rank, and behind it
        found = None if named else _RANKED.match(text)
        if found is not None and (labelled or found["b"] is None):
            named, rank, text = True, int(found["a"] or found["b"] or found["c"]), text[found.end() :]
        text = _WRAPPED.sub("", text)
    if rank is None and (inside := _RANK_INSIDE.search(text)):
        rank = int(inside[1] or inside[2])
    return Line(node=node, source=source, text=text, rank=rank, at=at)


def _json_line(text: str) -> tuple[str, int | None] | None:
    """The message and the rank of a line that is a JSON object, as structured logs are; None for any other line."""
    try:
        told = parse_json(text)
    except ValueError:
        return None
    words = next((told[name] for name in ("message", "msg", "log", "event", "text") if name in told), None)
    if not isinstance(words, str):
        return None
    trace = next((told[name] for name in ("exc_info", "exception", "stack") if isinstance(told.get(name), str)), "")
    level = str(told.get("level", told.get("levelname", told.get("severity", "")))).upper()
    if level in ("INFO", "DEBUG", "WARN", "WARNING") and not trace:
        words = f"WARNING {words}"
    rank = next((told[name] for name in ("rank", "global_rank", "RANK") if isinstance(told.get(name), int)), None)
    last = trace.strip().rpartition("\n")[2]
    return last or words.strip().rpartition("\n")[2], rank


def _stamp(text: str) -> float | None:
    """The time that a line begins with, as seconds since the epoch: in the zone of this machine where it names none."""
    found = _STAMP.search(text[:60])
    if found is None:
        return None
    try:
        *_, fraction, zone = found.groups()
        year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
        plain = datetime.datetime(year, month, day, hour, minute, second)  # noqa: DTZ001  the zone comes below
        offset = datetime.datetime.strptime(zone, "%z").tzinfo if zone else None
        return (plain.replace(tzinfo=offset) if offset else plain.astimezone()).timestamp() + float(
            f"0.{fraction or 0}"
        )
    except (ValueError, OverflowError, OSError):
        return None


# --- Findings -------------------------------------------------------------------------------------------------------

_LOG = [signature for signature in SIGNATURES if not signature.kernel]
_KERNEL = [signature for signature in SIGNATURES if signature.kernel]
# Ordinary lines are a million times as many: of the texts that can match, each has one of these words in small letters.
KEYS = (  # noqa: SIM905  as a list it would be a page long
    "rror|errno|fail|xception|exit|kill|oom|memory|alloc|timeout|timed out|signal|abort|cancelled|assert|nan|"
    "inf|cuda|nccl|nrt|neuron|efa|ofi|fi_|connect|peer|broken pipe|no space|enospc|quota|read-only|"
    "input/output|file|denied|shared|dataloader|segmentation|sigsegv|bus error|sigbus|evicted|low on resource|"
    "interrupt|node_fail|terminat|job step|mismatch|shape|size|expected|symbol|version|compiler|ptxas|resource|"
    "thread|ancdata|open files|network|route to|resolution|not known|ddress|store|xid|watchdog|barrier|"
    "deadline|duplicate|truncated|corrupt|zip|tar|image|parquet|arrow|pytorchstream|pickl|directory|"
    "unexpected pos|eof|data|type|dma|hang|not available|spot|ec2|received|found|runneuronccimpl|torch.|"
    "triton.|xpu|kernel image|compatibility|due to|caught|rank|hip|tensor|collective|closed|net/ib|"
    "unresponsive|pair.cc|eaddrinuse|_status_|slowdown|serviceunavailable|not ready|task:|coordination|"
    "sigterm|retry count|rc qp|rerun|need to rerun|persistent|transient|unexpected|root cause|actor|worker|"
    "out of memory|likely|stream|jpeg|png|not initialized|not reproducible|handle|allocated|lost|reset|"
    "illegal|ervice|initializ|unreachable|process down|fault|http|ssl|socket|rpc|transport|unavailable|heartbeat|"
    "crashed|driver|rlimit|comm|condition|preempt|imminent|unrecognized|arguments|command"
).split("|")
_GROUP = re.compile(r"[(]\?P<[^>]+>")
_ANY_LOG = re.compile(
    "|".join(f"(?:{_GROUP.sub('(?:', each.removeprefix('(?i)'))})" for one in _LOG for each in one.patterns)
)
_NUMBERS = re.compile(r"\d+")
# What differs between ranks and moments in lines that are otherwise the same; no signature depends on it.
_VARIABLE = re.compile(r"0x[0-9a-f]+|\b\d{5,}|\bRank \d+|\d\d:\d\d:\d\d[.\d]*|\[\d\]")
_FRAME = re.compile(r"#\d+ |frame #|Thread 0x|\[\d+\]:?$|File ")
_BEFORE_STEP = re.compile(r"^\W*(?:20\d\d-\d\d-\d\d[T ]?)?[\d:.,]*Z?\W*")


def find(lines: Iterable[Line]) -> list[Finding]:
    """What the catalogue knows of these lines, oldest first within a source; what the job survived is left out."""
    found: list[Finding] = []
    steps = _Steps()
    known: dict[tuple[bool, str], tuple[Signature | None, bool]] = {}
    for order, line in reversed(list(enumerate(lines))):
        if not line.kernel and steps.survived(line):
            continue
        finding = _match(line, order, known)
        if finding is not None:
            found.append(finding)
        elif not line.kernel and not _FRAME.match(line.text) and not _ORDINARY.search(line.text):
            steps.see(line)
    counts: dict[str, int] = {}
    first: list[Finding] = []
    for finding in reversed(found):
        if finding.source != "kernel log" and steps.went_on(finding):
            continue
        counts[finding.source] = counts.get(finding.source, 0) + 1
        if counts[finding.source] <= MAX_FINDINGS:
            first.append(finding)
    return first


class _Steps:
    """
    The steps of the job, seen from the end: lines of one form whose numbers rise, as of a training loop.

    The stacks and frames that ranks print when they end repeat their numbers, and count for nothing.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, int | None, str], tuple[int, ...]] = {}
        self._counts: dict[tuple[str, str], dict[int | None, int]] = {}
        self._latest: dict[tuple[str, str, int | None], float] = {}
        self._times: dict[str, list[float]] = {}

    def see(self, line: Line) -> None:
        text = _BEFORE_STEP.sub("", line.text, count=1)
        numbers = tuple(map(int, _NUMBERS.findall(text[:200])))
        if not numbers:
            return
        form = (line.node, line.source, line.rank, _NUMBERS.sub("", text[:48]))
        later = self._last.get(form)
        self._last[form] = numbers
        if later is None:
            self._latest.setdefault((line.node, line.source, line.rank), line.at or 0.0)
        elif later > numbers:
            # What a rank prints when it ends comes at one moment.
            if line.at is not None and self._latest[line.node, line.source, line.rank] - line.at < 1.0:
                return
            counts = self._counts.setdefault((line.node, line.source), {})
            counts[line.rank] = counts.get(line.rank, 0) + 1
            if line.at is not None:
                self._times.setdefault(line.node, []).append(line.at)

    def survived(self, line: Line) -> bool:
        """Whether the process of this line made steps afterwards, as far as its own source shows."""
        counts = self._counts.get((line.node, line.source))
        if counts is None:
            return False
        if line.rank is None:
            return max(counts.values()) >= SURVIVED_STEPS
        return counts.get(line.rank, 0) + (counts.get(None, 0) if line.rank is not None else 0) >= SURVIVED_STEPS

    def went_on(self, finding: Finding) -> bool:
        """Whether the job made steps afterwards, as far as other sources of its node show."""
        if finding.at is None:
            return False
        times = self._times.get(finding.node, ())
        return sum(at > finding.at + 1.0 for at in times) >= SURVIVED_STEPS


def last_step(lines: Iterable[Line], before: Mapping[str, float]) -> dict[str, float]:
    """Node -> when its output last showed a step of the job, before its first failure."""
    found: dict[str, float] = {}
    seen: dict[tuple[str, str, int | None, str], tuple[int, ...]] = {}
    for line in lines:
        limit = before.get(line.node)
        if line.kernel or line.at is None or limit is None or line.at > limit or _FRAME.match(line.text):
            continue
        if _ORDINARY.search(line.text):
            continue
        text = _BEFORE_STEP.sub("", line.text, count=1)
        numbers = tuple(map(int, _NUMBERS.findall(text[:200])))
        form = (line.node, line.source, line.rank, _NUMBERS.sub("", text[:48]))
        if numbers and form in seen and numbers > seen[form]:
            found[line.node] = max(found.get(line.node, line.at), line.at)
        if numbers:
            seen[form] = numbers
    return found


def _signature_of(line: Line) -> tuple[Signature | None, bool]:
    """The first signature that a line matches, and whether the line is a copy of one of the kernel."""
    if not line.kernel and not _maybe(line.text):
        return None, False
    quoted = not line.kernel and _QUOTED.search(line.text) is not None
    signatures = _KERNEL if line.kernel or quoted else _LOG
    return next((each for each in signatures if each.search(line.text) is not None), None), quoted


def _match(line: Line, order: int, known: dict[tuple[bool, str], tuple[Signature | None, bool]]) -> Finding | None:
    """The observation of a line. `known` keeps what lines of one form match: hundreds of ranks print the same."""
    if not line.kernel and not _has_a_key(line.text):
        return None
    form = (line.kernel, _VARIABLE.sub("", line.text))
    if form not in known:
        if len(known) >= MAX_FORMS:
            known.clear()
        known[form] = _signature_of(line)
    signature, quoted = known[form]
    if signature is not None and (found := signature.search(line.text)) is not None:
        if signature.strength is Strength.MENTION:
            return None
        if not line.kernel and signature.place.value != "teardown" and _MILD.search(line.text):
            return None
        told = {name: value for name, value in found.groupdict().items() if value is not None}
        rank, code, pid = _first(told, "rank"), _first(told, "code"), _first(told, "pid")
        if pid is None and line.kernel and (process := _PID.search(line.text)):
            pid = process[1]
        by_signal, silent = _first(told, "signal"), _first(told, "silent")
        waited = _WAITED.search(line.text)
        return Finding(
            # A copy of the kernel log in the output is of any time, and of any node.
            signature=replace(signature, strength=Strength.REPORT, subject=Subject.NOBODY, kernel=False)
            if quoted and signature.strength is not Strength.CONSEQUENCE
            else signature,
            node=line.node,
            clock=line.node,
            rank=int(rank) if rank else line.rank,
            at=line.at,
            line=line.text.strip()[:MAX_SHOWN],
            source=line.source,
            order=order,
            code=int(code) if code else -_SIGNALS.get(by_signal.capitalize(), 0) if by_signal else None,
            named=_first(told, "node"),
            peer=_first(told, "peer"),
            silent=int(silent) if silent else None,
            pid=int(pid) if pid else None,
            waited_seconds=int(waited[1]) / 1000 if waited else 0.0,
        )
    return None


def _first(told: Mapping[str, str], name: str) -> str | None:
    """The value of a group; a signature with several forms numbers their groups (`rank`, `rank2`)."""
    return next((value for group, value in told.items() if group.rstrip("0123456789") == name), None)


# The kernel's lines in other output: a copy, which proves nothing.
_QUOTED = re.compile(r"NVRM: Xid \x28|NEURON_HW_ERR=|(?:Out of memory|out of memory): Killed process \d")
_PID = re.compile(r"\bpid=(\d+)")
_WAITED = re.compile(r"\b(?:ran for|after) (\d+) (?:milliseconds|ms)\b")


def _has_a_key(text: str) -> bool:
    return _form_has_a_key(_NUMBERS.sub("", text[:MAX_LINE]))


@lru_cache(maxsize=4096)
def _form_has_a_key(form: str) -> bool:
    small = form.lower()
    return any(key in small for key in KEYS)


def _maybe(text: str) -> bool:
    return bool(_ANY_LOG.search(text)) or bool(_LOSS.search(text)) or bool(_QUOTED.search(text))


_LOSS = re.compile("(?i)nan|inf")
_SIGNALS = {
    "Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Floating point exception": 8,
    "Illegal instruction": 4, "Illegal hardware instruction": 4, **{str(n): n for n in range(1, 65)},
}  # fmt: skip
_SUMMARY = re.compile(r"^\s*(time|host|rank|exitcode|error_file)\s*: (.*)$")


def torchrun_failures(lines: Iterable[Line]) -> list[Ended]:
    """The ranks that torchrun's summary names, the one that it saw fail first in front."""
    failures: list[Ended] = []
    told: dict[str, str] = {}
    node, first_follows, first = "", False, None
    for line in lines:
        if line.text.startswith("Root Cause (first observed failure)"):
            first_follows, told = True, {}
        elif found := _SUMMARY.match(line.text):
            node = line.node
            told[found[1]] = found[2].strip()
            if found[1] == "exitcode" and (ended := _summary(told, node)) is not None:
                if first_follows:
                    first, first_follows = ended, False
                failures.append(ended)
                told = {}
    if first is not None:
        failures = [first, *(each for each in failures if each.rank != first.rank)]
    return failures


def _summary(told: Mapping[str, str], node: str) -> Ended | None:
    rank, code = re.match(r"\d+", told.get("rank", "")), re.match(r"-?\d+", told.get("exitcode", ""))
    if rank is None or code is None:
        return None
    number = int(code[0])
    at = _stamp(told.get("time", ""))
    return Ended(
        node=node, rank=int(rank[0]), at=at, code=number, signal=-number if number < 0 else None, source="torchrun"
    )


_PIDS = re.compile(
    r"\(pid: (\d+)\)|\bprocess (\d+) closing signal|\breceived by PID (\d+)|^(?:\[[^\]]*\] )?[\w.-]+:(\d+):\d+ \[\d+\] "
    r"|\bPID (\d+) on node|\bpid=(\d+), ip="
)
_MPI_RANK = re.compile(r"\bprocess rank (\d{1,6}) with PID \d+ on node (\S+) exited")
_TASKS = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): ")
_HOST = re.compile(r"^(?:\[20[^\]]*\] )?([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] ")


def pids_of(lines: Iterable[Line]) -> dict[str, set[int]]:
    """Node -> the processes of the job that its output names."""
    found: dict[str, set[int]] = {}
    for line in lines:
        if not line.kernel and (
            "pid" in line.text or "PID" in line.text or "process" in line.text or "NCCL" in line.text
        ):
            for numbers in _PIDS.findall(line.text):
                found.setdefault(line.node, set()).update(int(number) for number in numbers if number)
    return found


def placed_ranks(lines: Iterable[Line]) -> dict[int, str]:
    """Rank -> its node, where srun or mpirun tells it."""
    found: dict[int, str] = {}
    for line in lines:
        if "process rank " in line.text and (one := _MPI_RANK.search(line.text)):
            found[int(one[1])] = one[2]
        if line.text.startswith("srun: error: ") and (told := _TASKS.match(line.text)):
            for part in told[2].split(","):
                low, _, high = part.partition("-")
                if low and (high or low).isdecimal():
                    found |= dict.fromkeys(range(int(low), min(int(high or low), int(low) + 4096) + 1), told[1])
    return found
