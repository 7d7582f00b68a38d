"""
From what is noted of a job's end to a verdict: pure. No files, no clock, no processes.

Lines of all ranks become findings by the catalogue; what is known of the processes (exit codes, signals, the kernel's
count of OOM kills, torch's Flight Recorder) becomes findings too. `judge` says which rank failed first and which only
waited for it, and what it was. A text proposes, measurement decides:

- what nothing explains is `unknown`;
- `hardware` is only said where a probe failed or the kernel or a driver found it by itself, else it is suspected;
- `software` is only said where the nodes passed afterwards, else it is suspected;
- who reports what may be another's is not accused.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from healthd.postmortem.catalogue import BY_NAME, SIGNATURES, Kind, Outlook, Place, Signature

MAX_LINE = 4000  # characters of a line that are searched
MAX_SHOWN = 300  # characters of a line that are shown
MAX_FINDINGS = 2000  # of one source: 64 ranks that all say thirty things
SURVIVED_LINES = 200  # of ordinary output after a finding: the job went on
TOGETHER_SECONDS = 2.0  # a kernel's line and the text that it caused stand so near to each other
MAX_EVIDENCE = 8


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of output, or of the kernel log. `at` is seconds since the epoch; None where nobody knows."""

    node: str
    source: str
    text: str
    rank: int | None = None
    at: float | None = None
    kernel: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A signature at a place: which node and rank, when, and the line that shows it."""

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


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one process ended: the command of a node, or one rank. `signal` None: it ended by itself with `code`."""

    node: str
    rank: int | None
    at: float | None
    code: int
    signal: int | None = None
    source: str = "exit"


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A signal that was sent to the command of a node from outside: by whom, as far as the kernel says."""

    node: str
    at: float
    signal: int
    by: str
    pid: int
    uid: int


@dataclass(frozen=True, kw_only=True)
class Late:
    """A rank that the Flight Recorder shows behind the others, and the sentence that says how."""

    rank: int
    why: str


@dataclass(frozen=True, kw_only=True)
class FailedCheck:
    """A check that failed after the job's end."""

    reason: str
    target: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What checks of one node said after the job's end. `status` is that of the whole: pass, warn, fail or unknown."""

    node: str
    tier: str
    status: str
    problems: tuple[FailedCheck, ...] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is positive evidence that nothing is wrong."""
        return self.status in ("pass", "warn") and not self.problems


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that is known of the end of one job, of all of its nodes that told."""

    lines: tuple[Line, ...] = ()
    ended: tuple[Ended, ...] = ()
    stops: tuple[Stop, ...] = ()
    oom_kills: Mapping[str, int] = field(default_factory=dict)
    """Node -> how often the kernel killed in the job's control group for lack of memory while it ran."""
    late: tuple[Late, ...] = ()
    measured: tuple[Measured, ...] = ()
    world_size: int | None = None
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Rank -> its node, as noted at the start."""


@dataclass(frozen=True, kw_only=True)
class EvidenceLine:
    """A line that shows something, and where it was read."""

    text: str
    source: str
    node: str
    rank: int | None
    at: float | None
    place: Place
    reference: str
    """The URL that says what the line means; "" where it is our own observation."""


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """What a job died of. `kind` with `suspected` True is a proposal that nothing has confirmed."""

    kind: Kind
    suspected: bool
    confidence: str
    """high: measured, or a fact of the kernel, a driver or a scheduler; medium: one text says it; low: a guess."""
    name: str
    """The signature, or what took its place."""
    sentence: str
    node: str | None
    rank: int | None
    at: float | None
    outlook: Outlook
    action: str
    settles: str
    evidence: tuple[EvidenceLine, ...]
    waited: tuple[int, ...]
    """The ranks that only waited for it or were ended because of it."""
    measurement: str
    measured: bool = False
    """Whether a check of the job's nodes has given an answer since."""
    device: bool = False
    """Whether a probe of the devices can tell."""
    bad: tuple[str, ...] = ()
    """The nodes of which checks say something bad now, whether or not the job died of it."""


# --- Lines ----------------------------------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# torchrun's default prefix, torch's excepthook and logs, srun --label, mpirun --tag-output.
_RANKED = re.compile(
    r"\s*(?:\[(?:default|rank|Rank |RANK )(?P<a>\d{1,6})\]:?:?"
    r"|(?P<b>\d{1,6}): "
    r"|\[\d+,(?P<c>\d{1,6})\]<std(?:out|err)>:) ?"
)
# The rank in the first group is that of the job; that in any other group (tensor parallel, ...) counts its members.
_RANK_INSIDE = re.compile(r"\[Rank (\d{1,6})\]|\[PG (?:ID )?0\b[^\]]{0,80} Rank (\d{1,6})\]")
# What containers, Ray and pdsh put in front of a line.
_WRAPPED = re.compile(
    r"^(?:20\d\d-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?)?"
    r"(?:\x28[\w.]+ pid=\d+(?:, ip=[\w.:]+)?\x29(?: \[repeated[^\]]*\])? )?"
    r"(?:[\w.-]{1,64}: (?=Traceback|  File |[\w.]+(?:Error|Exception): ))?"
)
# Said and survived: what is tried again or only warned of ends no job.
_MILD = re.compile(
    r"^\[?W\d{4}\b|^\[W |\bWARNING\b|\b(?:User|Deprecation|Future|Runtime)Warning\b|\bretrying\b|\bignored in\b"
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
    for _ in range(2):  # what wraps a line may stand before its rank, and behind it
        found = None if named else _RANKED.match(text)
        if found is not None and (labelled or found["b"] is None):
            named, rank, text = True, int(found["a"] or found["b"] or found["c"]), text[found.end() :]
        text = _WRAPPED.sub("", text)
    if rank is None and (inside := _RANK_INSIDE.search(text)):
        rank = int(inside[1] or inside[2])
    return Line(node=node, source=source, text=text, rank=rank, at=at)


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
    "unresponsive|pair.cc|eaddrinuse|_status_|slowdown|serviceunavailable"
).split("|")
_GROUP = re.compile(r"[(]\?P<[^>]+>")
_ANY_LOG = re.compile("|".join(f"(?:{_GROUP.sub('(?:', each.regex.removeprefix('(?i)'))})" for each in _LOG))


def find(lines: Iterable[Line]) -> list[Finding]:
    """
    What the catalogue knows of these lines, oldest first within a source; what the job survived is left out.

    From the end on: before SURVIVED_LINES of ordinary output of a rank nothing counts, and nothing is searched.
    """
    found: list[Finding] = []
    after: dict[tuple[str, str, int | None], int] = {}  # ordinary lines so far
    for order, line in reversed(list(enumerate(lines))):
        key = (line.node, line.source, line.rank)
        if after.get(key, 0) >= SURVIVED_LINES:
            continue
        finding = _match(line, order)
        if finding is not None:
            found.append(finding)
        elif not line.kernel and not _ORDINARY.search(line.text):
            after[key] = after.get(key, 0) + 1
    counts: dict[str, int] = {}
    first: list[Finding] = []
    for finding in reversed(found):
        counts[finding.source] = counts.get(finding.source, 0) + 1
        if counts[finding.source] <= MAX_FINDINGS:
            first.append(finding)
    return first


def _match(line: Line, order: int) -> Finding | None:
    if not line.kernel and not _maybe(line.text):
        return None
    quoted = not line.kernel and _QUOTED.search(line.text) is not None
    for signature in _KERNEL if line.kernel or quoted else _LOG:
        found = signature.pattern.search(line.text)
        if found is None:
            continue
        if not line.kernel and signature.place is not Place.TEARDOWN and _MILD.search(line.text):
            return None
        told = {name: value for name, value in found.groupdict().items() if value is not None}
        node = _first(told, "node") or line.node
        rank, code = _first(told, "rank"), _first(told, "code")
        by_signal = _first(told, "signal")
        return Finding(
            signature=replace(signature, fact=False) if quoted else signature,
            node=node,
            rank=int(rank) if rank else line.rank,
            at=line.at,
            line=line.text.strip()[:MAX_SHOWN],
            source=line.source,
            order=order,
            code=int(code) if code else -_SIGNALS.get(by_signal, 0) if by_signal else None,
        )
    return None


def _first(told: Mapping[str, str], name: str) -> str | None:
    """The value of a group; a regex with several forms numbers their groups (`rank`, `rank2`)."""
    return next((value for group, value in told.items() if group.rstrip("0123456789") == name), None)


# The kernel's lines in other output: somebody's copy, which proposes and proves nothing.
_QUOTED = re.compile(r"NVRM: Xid \x28|NEURON_HW_ERR=|(?:Out of memory|out of memory): Killed process \d")


def _maybe(text: str) -> bool:
    small = text.lower()
    if not any(key in small for key in KEYS):
        return False
    return bool(_ANY_LOG.search(text)) or bool(_LOSS.search(text)) or bool(_QUOTED.search(text))


_LOSS = re.compile("(?i)nan|inf")
_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, **{str(n): n for n in range(1, 65)}}
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


# --- The verdict ----------------------------------------------------------------------------------------------------

_OWN = ""  # our own observation: no reference


def _own(
    name: str, kind: Kind, place: Place, outlook: Outlook, action: str, *, fact: bool = False, **more: bool
) -> Signature:
    return Signature(
        name=name, kind=kind, place=place, outlook=outlook, regex="$^", suggests=name, settles="", action=action,
        source=_OWN, fact=fact, **more,
    )  # fmt: skip


_CRASHES = {
    4: _own("illegal instruction", Kind.SOFTWARE, Place.INITIATING, Outlook.NONE,
            "Look whether a library was built for another processor.", general=True),
    6: _own("abort", Kind.SOFTWARE, Place.INITIATING, Outlook.NONE, "Read what it said before.", general=True),
    7: _own("bus error", Kind.HOST, Place.INITIATING, Outlook.HERE,
            "Look at the size of /dev/shm and at files that were cut while they were mapped.", general=True),
    8: _own("arithmetic error", Kind.SOFTWARE, Place.INITIATING, Outlook.NONE, "Get a core dump.", general=True),
    11: replace(BY_NAME["segmentation fault"], source=_OWN, suggests="The process ended by a segmentation fault."),
}  # fmt: skip
_OOM = _own("OOM kill, by the control group's count", Kind.HOST, Place.INITIATING, Outlook.HERE,
            BY_NAME["kernel OOM kill"].action, fact=True)  # fmt: skip
_KILLED = _own("killed by SIGKILL, and the kernel counts no OOM kill", Kind.UNKNOWN, Place.INITIATING, Outlook.HERE,
               "Find out who sent it: a scheduler, an operator, another control group's OOM killer.",
               general=True)  # fmt: skip
_PERSON = _own("stopped from the terminal", Kind.STOPPED, Place.INITIATING, Outlook.STOPPED, "None.", fact=True)
_SCHEDULER = _own("stopped by a scheduler or container runtime", Kind.STOPPED, Place.INITIATING, Outlook.ELSEWHERE,
                  "Retry when the nodes are to be had again.", fact=True)  # fmt: skip
_SOMEBODY = _own("stopped by a signal from outside", Kind.STOPPED, Place.INITIATING, Outlook.STOPPED,
                 "None, if it was meant.", fact=True)  # fmt: skip
_FAILED = _own("a rank ended with an error first", Kind.UNKNOWN, Place.INITIATING, Outlook.HERE,
               "Read the last lines of that rank.", general=True)  # fmt: skip
_LAUNCHER = _own(
    "ended by its launcher", Kind.UNKNOWN, Place.TEARDOWN, Outlook.HERE, "See the other ranks.", accuses=False
)
_GAVE_UP = _own("a rank aborted itself after it had waited", Kind.UNKNOWN, Place.CASCADE, Outlook.HERE,
                "See the rank that did not come.", accuses=False)  # fmt: skip
_EARLY = _own("a rank ended without an error while others still worked", Kind.SOFTWARE, Place.INITIATING, Outlook.NONE,
              "Look for an end that depends on the rank or on its share of the data.", general=True)  # fmt: skip
_ABSENT = _own("a rank did not come to what the others waited in", Kind.UNKNOWN, Place.INITIATING, Outlook.HERE,
               "Look what that rank did: a stack trace (py-spy), its node's checks.", general=True)  # fmt: skip

_SCHEDULERS = re.compile(
    r"^(?:slurm|srun|containerd|runc|crun|conmon|dockerd|kubelet|systemd|tini|dumb-init|amazon-ecs|pbs)"
)
_LAUNCHERS = re.compile(r"^(?:torchrun|pt_elastic|python|mpirun|mpiexec|orted|prted|prte|hydra|accelerate|deepspeed)")
_STOPPING = {1, 2, 3, 9, 15}


def judge(case: Case) -> JobVerdict:
    """The verdict of a job that ended badly. It explains itself: the sentence, and the evidence with its sources."""
    findings = find(case.lines)
    summary = torchrun_failures(case.lines)
    findings += _of_processes(case, findings, summary)
    findings = [_on_its_node(finding, case.nodes) for finding in findings if not _of_others(case, finding)]
    cause = _cause(case, findings, summary)
    bad = _measured_bad(case.measured)
    verdict = _unknown(case, findings, bad) if cause is None else _settle(case, cause, findings, bad)
    answered = any(each.status != "unknown" for each in case.measured)
    return replace(verdict, bad=tuple(bad), measured=answered)


def outcome_word(verdict: JobVerdict) -> str | None:
    """
    The outcome of a gate's job that a bad end comes to: infra or failed; None where that would be a guess.

    None for what is only suspected, and for a job that somebody or a scheduler has stopped.
    """
    if verdict.suspected or verdict.kind in (Kind.UNKNOWN, Kind.STOPPED):
        return None
    elsewhere = verdict.kind in (Kind.HOST, Kind.STORAGE) and verdict.outlook is Outlook.ELSEWHERE
    return "infra" if elsewhere or verdict.kind in (Kind.HARDWARE, Kind.NETWORK) else "failed"


def wants_devices(verdict: JobVerdict) -> bool:
    """Whether a probe of the devices can say more: they may be the cause, whatever the text was."""
    possible = verdict.kind in (Kind.HARDWARE, Kind.NETWORK, Kind.UNKNOWN) or verdict.device
    return possible and verdict.kind is not Kind.STOPPED


def _of_others(case: Case, finding: Finding) -> bool:
    """Whether it is of another job on the node: the kernel tells of OOM kills there, and none was counted in ours."""
    return finding.signature.name == "kernel OOM kill" and case.oom_kills.get(finding.node) == 0


def _on_its_node(finding: Finding, nodes: Mapping[int, str]) -> Finding:
    known = nodes.get(finding.rank) if finding.rank is not None and not finding.signature.kernel else None
    return finding if known is None else replace(finding, node=known)


def _of_processes(case: Case, findings: Sequence[Finding], summary: Sequence[Ended]) -> list[Finding]:
    """What is known of the processes, as findings."""
    found: list[Finding] = []
    said = [
        Ended(node=each.node, rank=each.rank, at=each.at, code=each.code, signal=-each.code, source=each.source)
        for each in findings
        if each.code is not None and each.code < 0 and not summary
    ]
    for ended in (*case.ended, *summary, *said):
        if ended.signal == 9 and case.oom_kills.get(ended.node, 0) > 0:
            count = case.oom_kills[ended.node]
            found.append(_process(_OOM, ended, f"oom_kill of the control group rose by {count} while the job ran"))
        elif ended.signal == 9 and not any(stop.signal == 9 for stop in case.stops):
            found.append(_process(_KILLED, ended, f"{_who(ended)} was ended by SIGKILL"))
        elif ended.signal == 6 and any(_waits(each) and each.node == ended.node for each in findings):
            # The watchdog of a rank that waited in vain aborts it.
            found.append(_process(_GAVE_UP, ended, f"{_who(ended)} aborted itself after it had waited"))
        elif ended.signal in _CRASHES:
            found.append(_process(_CRASHES[ended.signal], ended, f"{_who(ended)} was ended by signal {ended.signal}"))
    told = {ended.node for ended in case.ended if ended.signal == 9}
    for node, count in case.oom_kills.items():
        if count > 0 and not any(each.signature is _OOM and each.node == node for each in found) and node not in told:
            at = min((ended.at for ended in case.ended if ended.node == node and ended.at is not None), default=None)
            line = f"oom_kill of the control group rose by {count} while the job ran"
            found.append(Finding(signature=_OOM, node=node, rank=None, at=at, line=line, source="memory.events"))
    failed = {ended.node for ended in case.ended if ended.code != 0}
    for stop in case.stops:
        if stop.signal in _STOPPING and stop.node in failed:
            sender = f"{stop.by or 'a process that is gone'} (process {stop.pid}, user {stop.uid})"
            line = f"signal {stop.signal} from {sender}"
            found.append(
                Finding(signature=_by(stop), node=stop.node, rank=None, at=stop.at, line=line, source="signal")
            )
    if summary and summary[0].code > 0:
        first = summary[0]
        found.append(
            _process(_FAILED, first, f"torchrun saw rank {first.rank} fail first, with exit code {first.code}")
        )
    found += _early(case, [*findings, *found])
    return found


def _by(stop: Stop) -> Signature:
    if stop.by == "the terminal" or (stop.signal == 2 and stop.uid != 0):
        return _PERSON
    if stop.pid == 0 or _SCHEDULERS.match(stop.by):  # 0: from outside of the container
        return _SCHEDULER
    return _LAUNCHER if _LAUNCHERS.match(stop.by) else _SOMEBODY


def _process(signature: Signature, ended: Ended, line: str) -> Finding:
    return Finding(
        signature=signature,
        node=ended.node,
        rank=ended.rank,
        at=ended.at,
        line=line,
        source=ended.source,
        code=ended.code,
    )


def _who(ended: Ended) -> str:
    return "the command" if ended.rank is None else f"rank {ended.rank}"


def _early(case: Case, findings: Sequence[Finding]) -> list[Finding]:
    """A rank that ended well before the others, which waited for it."""
    waited = {finding.rank for finding in findings if finding.signature.place is Place.CASCADE}
    good = [each for each in case.ended if each.code == 0 and each.rank is not None and each.at is not None]
    bad = [each for each in case.ended if each.code != 0 and each.rank in waited and each.at is not None]
    if not good or not bad:
        return []
    first = min(good, key=lambda each: each.at or 0.0)
    if any((each.at or 0.0) <= (first.at or 0.0) for each in bad):
        return []
    return [_process(_EARLY, first, f"rank {first.rank} ended with exit code 0 before the others")]


def _cause(case: Case, findings: Sequence[Finding], summary: Sequence[Ended]) -> Finding | None:
    """The finding that explains the others: the first in time that is no consequence of another."""
    per_rank = _rank_causes(findings)
    waited = min((each.at for each in findings if _waits(each) and each.at is not None), default=float("inf"))
    initiating = [
        finding
        for finding in per_rank
        if finding.signature.place is Place.INITIATING
        # Who stops a job whose ranks already lost each other did not end it.
        and not (finding.signature.kind is Kind.STOPPED and finding.at is not None and finding.at > waited)
    ]
    late = {each.rank: each for each in case.late}
    if initiating:
        behind = [finding for finding in initiating if finding.rank in late]
        first = min(behind or initiating, key=_when)
        near = [
            finding
            for finding in initiating
            if finding.at is not None and first.at is not None and finding.at - first.at <= TOGETHER_SECONDS
        ]
        # What the kernel found explains the text that it caused; who stopped the job explains how its ranks ended.
        facts = [finding for finding in near if finding.signature.fact and _explains(finding, first)]
        chosen = min(facts, key=_when) if facts else first
        return _by_summary(chosen, initiating, summary)
    if case.late:
        return _late(case, case.late[0], findings)
    if summary and not per_rank:
        return None
    return _absent(case, findings)


def _waits(finding: Finding) -> bool:
    return finding.signature.place is Place.CASCADE


def _rank_causes(findings: Sequence[Finding]) -> list[Finding]:
    """Of each rank of each node what came first, what is particular before what is general."""
    groups: dict[tuple[str, int | None, bool], list[Finding]] = {}
    for finding in findings:
        # A fact of the kernel or the scheduler is the node's, whatever its ranks say.
        alone = finding.signature.fact and finding.rank is None
        groups.setdefault((finding.node, finding.rank, alone), []).append(finding)
    causes: list[Finding] = []
    for group in groups.values():
        ordered = sorted(group, key=_when)
        particular = [finding for finding in ordered if not finding.signature.general]
        if particular and particular[0].signature.place is not Place.TEARDOWN:
            causes.append(particular[0])
            continue
        general = [finding for finding in ordered if finding.signature.general] or ordered
        causes.append(next((each for each in general if each.signature.kind is not Kind.UNKNOWN), general[0]))
    return causes


def _when(finding: Finding) -> tuple[float, int]:
    return (finding.at if finding.at is not None else float("inf"), finding.order)


def _explains(fact: Finding, other: Finding) -> bool:
    """Whether a fact of the kernel explains another finding: on the same node, of what the program cannot know."""
    kinds = (fact.signature.kind, Kind.UNKNOWN)
    text = other.signature
    return fact.node == other.node and (text.general or text.device or text.kind in kinds)


def _by_summary(chosen: Finding, initiating: Sequence[Finding], summary: Sequence[Ended]) -> Finding:
    """Where times do not tell, the rank that torchrun saw fail first has the word."""
    if not summary or chosen.signature.fact or chosen.rank == summary[0].rank:
        return chosen
    of_first = [finding for finding in initiating if finding.rank == summary[0].rank]
    if not of_first or (chosen.at is not None and of_first[0].at is not None and chosen.rank is not None):
        return chosen
    return min(of_first, key=_when)


def _late(case: Case, late: Late, findings: Sequence[Finding]) -> Finding:
    node = _node_of(case, late.rank) or next((each.node for each in findings if each.rank == late.rank), "")
    return Finding(signature=_ABSENT, node=node, rank=late.rank, at=None, line=late.why, source="Flight Recorder")


def _absent(case: Case, findings: Sequence[Finding]) -> Finding | None:
    """The one rank that says nothing, where all others say that they waited."""
    waited = {
        finding.rank for finding in findings if finding.signature.place is Place.CASCADE and finding.rank is not None
    }
    if case.world_size is None or not waited:
        return None
    silent = sorted(set(range(case.world_size)) - waited)
    if len(silent) != 1:
        return None
    node = _node_of(case, silent[0])
    why = f"ranks {listed(waited)} waited; of rank {silent[0]} there is no word"
    return Finding(signature=_ABSENT, node=node, rank=silent[0], at=None, line=why, source="output")


def _node_of(case: Case, rank: int) -> str:
    """The node of a rank; "" where nobody knows: it is on a node that has not told, or on any of several."""
    told = {ended.node for ended in case.ended}
    alone = next(iter(told)) if len(told) == 1 and not case.nodes else ""
    return case.nodes.get(rank, alone)


def listed(ranks: Iterable[int]) -> str:
    """Ranks as text: `0-3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


# --- Measurement ----------------------------------------------------------------------------------------------------

# Reason of a failed check -> what it means for a job; a reason of the check itself means nothing.
_REASONS = {
    Kind.HARDWARE: (
        "WrongResult", "SilentCorruption", "DigestMismatch", "ParityLost", "MemoryCorruption", "SlowDevice",
        "MissingDevice", "DeviceLost", "Stuck", "EccErrors", "HardwareErrors", "UnhealthyComponent", "Throttled",
        "Overheating", "StuckCores", "RankHung", "RankDied", "RankFault", "CollectiveMismatch", "DeviceLinkFault",
    ),
    Kind.NETWORK: (
        "LinkDown", "LinkErrors", "LinkDegraded", "NetworkUnusable", "SlowLink", "NameResolution", "CollectiveFault",
        "PathFault", "TopologyFault",
    ),
    Kind.STORAGE: (
        "DiskFull", "ReadOnlyMount", "StoreNoSpace", "StoreQuota", "StoreNoInodes", "StoreReadOnly", "StoreStale",
        "StoreNotMounted", "StoreHangs", "StoreMissing", "StoreCorruption", "StoreError", "ShardEmpty", "ShardShort",
        "ShardMissing", "ShardUnreadable", "CheckpointTorn",
    ),
    Kind.HOST: ("LowMemory", "SharedMemorySmall", "KernelFault", "StuckProcesses", "LimitTooLow", "VersionMismatch"),
}  # fmt: skip
_COMPUTES_WRONGLY = {
    *("WrongResult", "SilentCorruption", "DigestMismatch", "ParityLost", "MemoryCorruption", "DeviceLost", "EccErrors"),
    *("HardwareErrors", "CollectiveMismatch", "RankFault"),
}
"""What makes programs fail that are right."""
_STOPS = {"MissingDevice", "Stuck", "RankHung", "RankDied", "DeviceLinkFault"}
"""What a rank waits for in vain, or loses."""
KIND_OF_REASON = {reason: kind for kind, reasons in _REASONS.items() for reason in reasons}


def _measured_bad(measured: Iterable[Measured]) -> dict[str, list[tuple[Kind, FailedCheck]]]:
    """Node -> the failed checks that say something of it."""
    bad: dict[str, list[tuple[Kind, FailedCheck]]] = {}
    for each in measured:
        told = [
            (KIND_OF_REASON[problem.reason], problem) for problem in each.problems if problem.reason in KIND_OF_REASON
        ]
        bad.setdefault(each.node, []).extend(told)
    return {node: told for node, told in bad.items() if told}


def _settle(
    case: Case, cause: Finding, findings: Sequence[Finding], bad: Mapping[str, list[tuple[Kind, FailedCheck]]]
) -> JobVerdict:
    """Hold the proposal against what was measured."""
    signature = cause.signature
    kind, outlook, action = signature.kind, signature.outlook, signature.action
    suspected, confidence = True, "low" if signature.general or kind is Kind.UNKNOWN else "medium"
    hardware = _hardware_of(cause, bad)
    agreeing = next((problem for kind_, problem in bad.get(cause.node, []) if kind_ is kind), None)
    passed = _all_passed(case, signature)
    path = _path_of(cause, bad)
    sentence = ""
    if hardware is not None:
        # A device that computes wrongly makes programs fail in every way; the reverse is never so. That of another node
        # may have, through what the ranks exchange; and of an end that says nothing itself nobody knows what it was.
        node, problem = hardware
        suspected = kind is Kind.UNKNOWN or node != cause.node
        kind, confidence, outlook = Kind.HARDWARE, "medium" if suspected else "high", Outlook.ELSEWHERE
        action = f"Keep {node} out: {problem.reason}, and see its runbook."
        sentence = f"{'suspected ' if suspected else ''}hardware: {node} fails now: {problem.reason} {problem.target}; "
        sentence += _sentence(cause, signature.kind, True)
    elif agreeing is not None or signature.fact:
        suspected, confidence = False, "high"
    elif path is not None:
        # A path has two ends, and who reports is at the other one.
        node, problem = path
        suspected, confidence = False, "high"
        action = f"Keep {node} out: {problem.reason}, and see its runbook."
        sentence = f"network: {node} fails now: {problem.reason} {problem.target}; {_sentence(cause, kind, True)}"
    elif kind is Kind.SOFTWARE and passed:
        suspected, confidence = False, "medium" if signature.general else "high"
    elif kind is Kind.HARDWARE and passed:
        confidence = "low"
        if signature.program:
            kind, outlook = Kind.SOFTWARE, Outlook.NONE
    elif kind in (Kind.STORAGE, Kind.DATA, Kind.HOST, Kind.STOPPED) and not signature.general:
        suspected = kind is not Kind.STOPPED
    if kind is Kind.UNKNOWN:
        suspected = False
    by_measurement = hardware or (path if agreeing is None and not signature.fact else None)
    named = cause.node if by_measurement is None else by_measurement[0]
    return JobVerdict(
        kind=kind,
        suspected=suspected,
        confidence=confidence,
        name=signature.name,
        sentence=sentence or _sentence(cause, kind, suspected),
        node=named or None,
        rank=cause.rank if named == cause.node else None,
        at=cause.at,
        outlook=outlook,
        action=action,
        settles=signature.settles,
        evidence=_evidence(cause, findings),
        waited=_waited(cause, findings),
        measurement=_measurement(case.measured),
        device=signature.device,
    )


def _hardware_of(cause: Finding, bad: Mapping[str, list[tuple[Kind, FailedCheck]]]) -> tuple[str, FailedCheck] | None:
    """The node and the failed check of a device that can be the cause of this; that of its own node first."""
    if cause.signature.fact:
        return None
    found = [
        (node, problem)
        for node, told in bad.items()
        for kind, problem in told
        if kind is Kind.HARDWARE and _explains_end(problem.reason, cause.signature.kind)
    ]
    return next((each for each in found if each[0] == cause.node), found[0] if found else None)


def _path_of(cause: Finding, bad: Mapping[str, list[tuple[Kind, FailedCheck]]]) -> tuple[str, FailedCheck] | None:
    """The node and the failed check of a path between nodes, where the text says that the network failed."""
    if cause.signature.kind is not Kind.NETWORK:
        return None
    found = ((node, problem) for node, told in bad.items() for kind, problem in told if kind is Kind.NETWORK)
    return next(found, None)


def _explains_end(reason: str, kind: Kind) -> bool:
    """Whether a device of which a check says this can have ended a job in this way. A slow one ends none."""
    if kind is Kind.SOFTWARE:
        return reason in _COMPUTES_WRONGLY
    if kind in (Kind.NETWORK, Kind.UNKNOWN):
        return reason in _COMPUTES_WRONGLY or reason in _STOPS
    return kind is Kind.HARDWARE


def _all_passed(case: Case, signature: Signature) -> bool:
    """Whether every node that told of the job passed afterwards, by a tier that could have found this."""
    wanted = {ended.node for ended in case.ended} | {line.node for line in case.lines}
    tiers = ("quick", "deep") if signature.device else ("passive", "quick", "deep")
    passed = {each.node for each in case.measured if each.passed and each.tier in tiers}
    return bool(wanted) and wanted <= passed


def _sentence(cause: Finding, kind: Kind, suspected: bool) -> str:
    who = "the command" if cause.rank is None else f"rank {cause.rank}"
    where = f" on {cause.node}" if cause.node else ""
    word = f"{'suspected ' if suspected and kind is not Kind.UNKNOWN else ''}{kind.value}"
    return f"{word}: {who}{where}: {cause.signature.suggests.rstrip('.')}"


def _evidence(cause: Finding, findings: Sequence[Finding]) -> tuple[EvidenceLine, ...]:
    shown: dict[tuple[str, str], Finding] = {(cause.line, cause.source): cause}
    rest = sorted(findings, key=_when)
    same = [each for each in rest if each.rank == cause.rank and each.node == cause.node]
    for finding in (*same, *rest):
        if len(shown) < MAX_EVIDENCE:
            shown.setdefault((finding.line, finding.source), finding)
    return tuple(
        EvidenceLine(
            text=finding.line,
            source=finding.source,
            node=finding.node,
            rank=finding.rank,
            at=finding.at,
            place=Place.INITIATING if finding is cause else _place(cause, finding),
            reference=finding.signature.source,
        )
        for finding in shown.values()
    )


def _place(cause: Finding, finding: Finding) -> Place:
    """What is no cause is a consequence: of its own rank's end, or of the first rank's."""
    if finding.signature.place is not Place.INITIATING or (finding.node, finding.rank) == (cause.node, cause.rank):
        return finding.signature.place
    return Place.CASCADE


def _waited(cause: Finding, findings: Sequence[Finding]) -> tuple[int, ...]:
    ranks = {each.rank for each in findings if each.signature.place is not Place.INITIATING and each.rank is not None}
    return tuple(sorted(ranks - {cause.rank}))


def _measurement(measured: Sequence[Measured]) -> str:
    if not measured:
        return "nothing was measured"
    told = []
    for each in measured:
        failed = "; ".join(f"{problem.reason} {problem.target}: {problem.message}" for problem in each.problems[:3])
        why = (failed or each.note).replace("; ", ", ")  # a semicolon ends what is said of one run
        told.append(f"{each.node}: {each.tier} tier {each.status}" + (f" ({why})" if why else ""))
    return "; ".join(told)


def _unknown(case: Case, findings: Sequence[Finding], bad: Mapping[str, list[tuple[Kind, FailedCheck]]]) -> JobVerdict:
    """Nothing in the output explains it: what was measured may, else it is unknown."""
    first = next(((node, kind, problem) for node, told in bad.items() for kind, problem in told), None)
    waited = tuple(sorted({each.rank for each in findings if each.rank is not None}))
    if first is not None:
        node, kind, problem = first
        # That a node is bad now does not say that the job died of it.
        sentence = f"suspected {kind.value}: nothing in the output explains the end; {node} fails now: {problem.reason}"
        action = f"Keep {node} out: {problem.reason}, and see its runbook."
    else:
        node, kind, action = None, Kind.UNKNOWN, "Read the last lines of each rank."
        sentence = "unknown: nothing in the output or on the nodes explains the end"
        if waited:
            sentence += f"; ranks {listed(waited)} only waited or were ended"
    return JobVerdict(
        kind=kind,
        suspected=kind is not Kind.UNKNOWN,
        confidence="low",
        name="",
        sentence=sentence,
        node=node,
        rank=None,
        at=None,
        outlook=Outlook.ELSEWHERE if node is not None else Outlook.HERE,
        action=action,
        settles="",
        evidence=tuple(
            EvidenceLine(
                text=each.line, source=each.source, node=each.node, rank=each.rank, at=each.at,
                place=each.signature.place, reference=each.signature.source,
            )
            for each in sorted(findings, key=_when)[:MAX_EVIDENCE]
        ),
        waited=waited,
        measurement=_measurement(case.measured),
    )  # fmt: skip
