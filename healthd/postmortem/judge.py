"""
From the notes of a job's end to a verdict. Pure: no files, no clock, no processes.

1. Lines become observations by the catalogue (`observations`), and so do facts about the processes: exit codes,
   signals, the kernel's count of OOM kills, torch's Flight Recorder. Each has a strength and a subject.
2. A kernel record counts as a fact only if it is tied to the job: by a pid, by the control group, or by time, between
   the last sign of progress and one minute after the first failure.
3. Waits, lost peers, aborts and processes ended by a launcher are consequences. The cause is an observation that is not
   a consequence: on one node the first in time, since one clock orders them. Clocks of several nodes are counted from
   the start of the job there, and events within a minute are not ordered: there a fact precedes a report, and a
   specific observation a general one.
4. The verdict follows from the strongest observation that explains the end and from measurement (`verdicts`). Only the
   subject of an observation is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from healthd.postmortem.catalogue import BY_NAME, Kind, Outlook, Place, Signature, Strength, Subject
from healthd.postmortem.observations import (
    Ended,
    Finding,
    Line,
    find,
    last_step,
    pids_of,
    placed_ranks,
    torchrun_failures,
)
from healthd.postmortem.verdicts import FAILED, OPEN, PASSED, Row, row_of

TOGETHER_SECONDS = 5.0  # the lines of one failure of one process stand so near to each other
UNORDERED_SECONDS = 60.0  # between clocks of nodes, counted from the start of the job on each
AFTER_SECONDS = 60.0  # a record of the kernel may come so long after the first failure
BEFORE_SECONDS = 120.0  # and so long before it, where the output shows no progress
WAIT_SECONDS = 35 * 60.0  # or before the first wait that does not say how long it was: NCCL's default and some
MAX_CASCADE = 3


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
    started: Mapping[str, float] = field(default_factory=dict)
    """Node -> when its command began, by its own clock: times of several nodes are counted from there."""
    pids: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Node -> processes of the job that are known besides those that its output names."""
    spread: frozenset[str] = frozenset()
    """The nodes whose command is a launcher that brings the output of other nodes, as srun and mpirun do."""


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


# --- Observations of processes --------------------------------------------------------------------------------


def _own(
    name: str,
    kind: Kind,
    strength: Strength,
    subject: Subject,
    outlook: Outlook,
    action: str,
    *,
    general: bool = False,
    device: bool = False,
) -> Signature:
    """A signature of our own observation, which no text shows."""
    return Signature(
        name=name, kind=kind, strength=strength, subject=subject, outlook=outlook, suggests=name, settles="",
        action=action, source="", general=general, device=device,
    )  # fmt: skip


_FACT, _REPORT, _AFTER = Strength.FACT, Strength.REPORT, Strength.CONSEQUENCE
_CRASHES = {
    4: _own("illegal instruction", Kind.SOFTWARE, _REPORT, Subject.RANK, Outlook.NONE,
            "Check whether a library was built for another processor.", general=True, device=True),
    6: _own("abort", Kind.SOFTWARE, _REPORT, Subject.RANK, Outlook.NONE, "Read its lines before the abort.",
            general=True, device=True),
    7: _own("bus error", Kind.HOST, _REPORT, Subject.RANK, Outlook.HERE,
            "Check the size of /dev/shm, and look for files that were truncated while mapped.", general=True),
    8: _own("arithmetic error", Kind.SOFTWARE, _REPORT, Subject.RANK, Outlook.NONE, "Get a core dump.",
            general=True, device=True),
    11: replace(BY_NAME["segmentation fault"], source="", suggests="The process ended by a segmentation fault."),
}  # fmt: skip
_OOM = _own("OOM kill, by the control group's count", Kind.HOST, _FACT, Subject.NODE, Outlook.HERE,
            BY_NAME["kernel OOM kill"].action)  # fmt: skip
_KILLED = _own("killed by SIGKILL, and the kernel counts no OOM kill", Kind.UNKNOWN, _REPORT, Subject.RANK,
               Outlook.HERE, "Find out who sent it: a scheduler, an operator, or the OOM killer of another control "
                             "group.",
               general=True)  # fmt: skip
_PERSON = _own("stopped from the terminal", Kind.STOPPED, _FACT, Subject.NOBODY, Outlook.STOPPED, "None.")
_SCHEDULER = _own("stopped by a scheduler or container runtime", Kind.STOPPED, _FACT, Subject.NOBODY,
                  Outlook.ELSEWHERE, "Retry when the nodes are available again.")  # fmt: skip
_SOMEBODY = _own("stopped by a signal from outside", Kind.STOPPED, _FACT, Subject.NOBODY, Outlook.STOPPED,
                 "None, if this was intended.")  # fmt: skip
_FAILED = _own("a rank ended with an error first", Kind.UNKNOWN, _REPORT, Subject.RANK, Outlook.HERE,
               "Read the last lines of that rank.", general=True)  # fmt: skip
_LAUNCHER = _own("ended by its launcher", Kind.UNKNOWN, _AFTER, Subject.NOBODY, Outlook.HERE, "See the other ranks.")
_GAVE_UP = _own("a rank aborted itself after waiting", Kind.UNKNOWN, _AFTER, Subject.PEER, Outlook.HERE,
                "See the rank that did not arrive.")  # fmt: skip
_EARLY = _own("a rank ended without an error while others were still working", Kind.SOFTWARE, _REPORT, Subject.RANK,
              Outlook.NONE, "Look for an end that depends on the rank or on its share of the data.",
              general=True, device=True)  # fmt: skip
_ABSENT = _own("a rank did not arrive where the others waited", Kind.UNKNOWN, _REPORT, Subject.RANK,
               Outlook.HERE, "Find out what that rank was doing: a stack trace (py-spy), the checks of its node.",
               general=True)  # fmt: skip

_SCHEDULERS = re.compile(
    r"^(?:slurm|srun|containerd|runc|crun|conmon|dockerd|kubelet|systemd|tini|dumb-init|amazon-ecs|pbs)"
)
_LAUNCHERS = re.compile(r"^(?:torchrun|pt_elastic|python|mpirun|mpiexec|orted|prted|prte|hydra|accelerate|deepspeed)")
_SPREADING = ("srun: ", "slurmstepd: ", "mpirun ", "mpiexec ", "prterun ")
_STOPPING = {1, 2, 3, 9, 15}


def judge(case: Case) -> JobVerdict:
    """The verdict of a job that ended badly. It explains itself: the sentence, and the evidence with its sources."""
    placed = {**placed_ranks(case.lines), **case.nodes}
    # A script below `healthd run` may start srun or mpirun, which then print lines of their own.
    spread = {line.node for line in case.lines if line.text.startswith(_SPREADING)}
    case = replace(case, spread=case.spread | spread)
    findings = [_on_its_node(finding, placed) for finding in find(case.lines)]
    summary = torchrun_failures(case.lines)
    findings += _of_processes(case, findings, summary)
    findings = [_on_its_node(finding, placed) for finding in _tied(case, findings)]
    cause = _cause(case, findings, placed)
    bad = _measured_bad(case.measured)
    verdict = _settle(case, cause, findings, bad, placed)
    answered = any(each.status != "unknown" for each in case.measured)
    return replace(verdict, bad=tuple(bad), measured=answered)


def outcome_word(verdict: JobVerdict) -> str | None:
    """
    The outcome of a gate's job that a bad end comes to: infra or failed; None where that would be a guess.

    None for what is only suspected, and for a job that a person or a scheduler has stopped.
    """
    if verdict.suspected or verdict.kind in (Kind.UNKNOWN, Kind.STOPPED):
        return None
    elsewhere = verdict.kind in (Kind.HOST, Kind.STORAGE) and verdict.outlook is Outlook.ELSEWHERE
    return "infra" if elsewhere or verdict.kind in (Kind.HARDWARE, Kind.NETWORK) else "failed"


def wants_devices(verdict: JobVerdict) -> bool:
    """Whether a probe of the devices can say more: they may be the cause, whatever the text was."""
    possible = verdict.kind in (Kind.HARDWARE, Kind.NETWORK, Kind.UNKNOWN) or verdict.device
    return possible and verdict.kind is not Kind.STOPPED


def accuses(kind: Kind, outlook: Outlook) -> bool:
    """Whether a verdict of this kind says that the node it names is at fault."""
    return kind in (Kind.HARDWARE, Kind.NETWORK) or (kind in (Kind.HOST, Kind.STORAGE) and outlook is Outlook.ELSEWHERE)


def _on_its_node(finding: Finding, placed: Mapping[int, str]) -> Finding:
    known = placed.get(finding.rank) if finding.rank is not None and not finding.signature.kernel else None
    return finding if known is None else replace(finding, node=known)


def _of_processes(case: Case, findings: Sequence[Finding], summary: Sequence[Ended]) -> list[Finding]:
    """What is known of the processes, as observations."""
    found: list[Finding] = []
    waits = [each for each in findings if each.signature.strength is _AFTER]
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
        elif ended.signal == 6 and any(each.node == ended.node for each in waits):
            # The watchdog of a rank that waited in vain aborts it, as libraries do that have lost a peer.
            found.append(_process(_GAVE_UP, ended, f"{_who(ended)} aborted itself after waiting"))
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
            sender = f"{stop.by or 'a process that has exited'} (process {stop.pid}, user {stop.uid})"
            line = f"signal {stop.signal} from {sender}"
            found.append(
                Finding(signature=_by(stop), node=stop.node, rank=None, at=stop.at, line=line, source="signal")
            )
    first = summary[0] if summary and summary[0].code > 0 else None
    # Who was seen to end first may have waited as the others did.
    if first is not None and not any(each.node == first.node and each.rank in (None, first.rank) for each in waits):
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
        signature=signature, node=ended.node, rank=ended.rank, at=ended.at, line=line, source=ended.source,
        code=ended.code,
    )  # fmt: skip


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


# --- What the kernel says, and when ---------------------------------------------------------------------------


def _tied(case: Case, findings: Sequence[Finding]) -> Iterator[Finding]:
    """The observations, of those of the kernel only what is tied to this job."""
    kernel = [finding for finding in findings if finding.signature.kernel]
    if not kernel:
        yield from findings
        return
    windows = _windows(case, [finding for finding in findings if not finding.signature.kernel])
    named = pids_of(case.lines)
    # Where a process of the job reports its device too, an error that names a stranger may be of that device.
    reported = {
        each.node
        for each in findings
        if not each.signature.kernel and each.signature.strength is _REPORT and each.signature.device
        if not each.signature.general
    }
    for finding in findings:
        if not finding.signature.kernel:
            yield finding
            continue
        own = named.get(finding.node, set()) | case.pids.get(finding.node, frozenset())
        ours = finding.pid is not None and finding.pid in own
        begin, end = windows.get(finding.node, (float("-inf"), float("inf")))
        in_time = finding.at is None or begin <= finding.at <= end
        # The pid of a launcher says nothing of its ranks, so strangers are known only where the output names ranks.
        foreign = finding.pid is not None and bool(named.get(finding.node)) and not ours
        signature = finding.signature
        if signature.name == "kernel OOM kill":
            count = case.oom_kills.get(finding.node)
            if count == 0 or not (ours or in_time) or (foreign and not count):
                continue
            yield finding if ours or count else replace(finding, signature=replace(signature, strength=_REPORT))
        elif (ours and signature.strength is _FACT) or (
            in_time and (not foreign or (signature.strength is _FACT and finding.node in reported))
        ):
            yield finding


def _windows(case: Case, findings: Sequence[Finding]) -> dict[str, tuple[float, float]]:
    """Node -> the time in which a record of the kernel can be the cause, by the clock of that node."""
    first: dict[str, Finding] = {}
    for finding in findings:
        if finding.at is not None and (finding.node not in first or finding.at < (first[finding.node].at or 0.0)):
            first[finding.node] = finding
    failed = {node: finding.at or 0.0 for node, finding in first.items()}
    for ended in case.ended:
        if ended.at is not None and ended.code != 0:
            failed[ended.node] = min(ended.at, failed.get(ended.node, ended.at))
    steps = last_step(case.lines, failed)
    elsewhere = [at - case.started[node] for node, at in steps.items() if node in case.started]
    windows: dict[str, tuple[float, float]] = {}
    for node, at in failed.items():
        finding_ = first.get(node)
        if node in steps:
            begin = steps[node] - TOGETHER_SECONDS
        elif elsewhere and node in case.started:
            begin = case.started[node] + max(elsewhere) - UNORDERED_SECONDS
        elif finding_ is not None and finding_.signature.place is Place.CASCADE:
            begin = at - BEFORE_SECONDS - (finding_.waited_seconds or WAIT_SECONDS)
        else:
            begin = at - BEFORE_SECONDS
        windows[node] = (min(begin, at - TOGETHER_SECONDS), at + AFTER_SECONDS)
    return windows


# --- The cause ------------------------------------------------------------------------------------------------


def _cause(case: Case, findings: Sequence[Finding], placed: Mapping[int, str]) -> Finding | None:
    """The observation that explains the end: a source in the graph of who waited for whom and who ended whom."""
    since = _Order(case)
    sources = [each for each in findings if each.signature.strength in (_FACT, _REPORT)]
    waits = [each for each in findings if each.signature.place is Place.CASCADE]
    stop = _stop(since, sources, waits)
    if stop is not None:
        return stop
    sources = [each for each in sources if each.signature.kind is not Kind.STOPPED]
    reports = [each for each in sources if each.signature.strength is _REPORT and not _only_waited(each, waits)]
    reports = [each for each in reports if not _follows_a_wait(since, each, waits)]
    reports = _of_ranks(since, reports)
    known = [each for each in reports if each.signature.kind is not Kind.UNKNOWN]
    behind = [each for each in known or reports if each.rank in {late.rank for late in case.late}]
    report = _first(since, behind or known)
    facts = [each for each in sources if each.signature.strength is _FACT]
    facts = [each for each in facts if report is None or _explains(since, each, report)]
    if facts:
        return _first(since, facts)
    if report is not None:
        return report
    if case.late:
        return _late(case.late[0], findings, placed)
    named = _first(since, behind or reports)
    return named if named is not None else _absent(case, findings, placed)


def _only_waited(report: Finding, waits: Sequence[Finding]) -> bool:
    """Whether a launcher names a rank that ended with an error first, and that rank may have waited as others did."""
    if report.signature.kind is not Kind.UNKNOWN or report.code is None or report.code == -9:
        return False
    return any(each.node == report.node and (report.rank is None or each.rank in (None, report.rank)) for each in waits)


def _follows_a_wait(since: _Order, report: Finding, waits: Sequence[Finding]) -> bool:
    """Whether it is what a rank raised after it had lost its peers, and says no more than that."""
    return report.signature.general and any(
        (each.node, each.rank) == (report.node, report.rank) and since.key(each) < since.key(report) for each in waits
    )


class _Order:
    """Times that can be compared: those of one node exactly, those of several from the start of the job on each."""

    def __init__(self, case: Case) -> None:
        self._started = case.started

    def key(self, finding: Finding) -> tuple[float, int]:
        """Where an observation stands."""
        at = float("inf") if finding.at is None else finding.at - self._started.get(_clock(finding), 0.0)
        return at, finding.order

    def before(self, one: Finding, other: Finding) -> bool:
        """Whether one is certainly earlier."""
        if _clock(one) == _clock(other):
            return self.key(one) < self.key(other)
        return self.key(one)[0] < self.key(other)[0] - UNORDERED_SECONDS


def _clock(finding: Finding) -> str:
    return finding.clock or finding.node


def _stop(since: _Order, sources: Sequence[Finding], waits: Sequence[Finding]) -> Finding | None:
    """What stopped the job from outside, unless it had failed or its ranks had lost each other before."""
    stops = [each for each in sources if each.signature.kind is Kind.STOPPED]
    others = [*(each for each in sources if each.signature.kind is not Kind.STOPPED), *waits]
    stops = [stop for stop in stops if not any(since.before(other, stop) for other in others)]
    return min(stops, key=lambda each: (each.signature.general, since.key(each)), default=None)


def _of_ranks(since: _Order, reports: Sequence[Finding]) -> list[Finding]:
    """Of each rank of each node what it reported first; of one failure what is particular before what is general."""
    groups: dict[tuple[str, int | None], list[Finding]] = {}
    for finding in reports:
        groups.setdefault((finding.node, finding.rank), []).append(finding)
    chosen: list[Finding] = []
    for group in groups.values():
        known = [each for each in group if each.signature.kind is not Kind.UNKNOWN] or group
        first = min(since.key(each)[0] for each in known)
        together = [each for each in known if since.key(each)[0] <= first + TOGETHER_SECONDS]
        chosen.append(min(together, key=lambda each: (each.signature.general, since.key(each))))
    return chosen


def _first(since: _Order, findings: Sequence[Finding]) -> Finding | None:
    """The first; of those of several nodes that cannot be ordered what is particular, and a rank before a node."""
    if not findings:
        return None
    first = min(findings, key=since.key)
    level = [each for each in findings if each is first or _level(since, first, each)]
    return min(level, key=lambda each: (each.signature.general, each.rank is None, since.key(each)))


def _level(since: _Order, first: Finding, other: Finding) -> bool:
    """Whether it may be as early: on another node, or what a rank says of what the kernel recorded of its process."""
    if _clock(other) != _clock(first):
        return not since.before(first, other)
    return first.signature.kernel and since.key(other)[0] <= since.key(first)[0] + TOGETHER_SECONDS


def _explains(since: _Order, fact: Finding, report: Finding) -> bool:
    """Whether a fact explains what a process reports: by its kind, and as its report does not come well before it."""
    text = report.signature
    if report.node == fact.node and since.key(report)[0] + TOGETHER_SECONDS < since.key(fact)[0]:
        return text.kind is fact.signature.kind or text.kind is Kind.UNKNOWN
    if text.kind in (fact.signature.kind, Kind.UNKNOWN):
        return True
    if fact.signature.kind is Kind.HARDWARE:
        return text.device or text.general
    if fact.signature.kind is Kind.HOST:  # whoever loses a process to the kernel's OOM killer fails in any way
        return text.general and report.node == fact.node
    return fact.signature.kind is Kind.STORAGE and text.kind is Kind.DATA


def _late(late: Late, findings: Sequence[Finding], placed: Mapping[int, str]) -> Finding:
    node = placed.get(late.rank) or next((each.node for each in findings if each.rank == late.rank), "")
    return Finding(signature=_ABSENT, node=node, rank=late.rank, at=None, line=late.why, source="Flight Recorder")


def _absent(case: Case, findings: Sequence[Finding], placed: Mapping[int, str]) -> Finding | None:
    """The one rank that reports nothing, where all others report that they waited."""
    waited = {each.rank for each in findings if each.signature.place is Place.CASCADE and each.rank is not None}
    if case.world_size is None or not waited:
        return None
    silent = sorted(set(range(case.world_size)) - waited)
    if len(silent) != 1:
        return None
    reported = {ended.node for ended in case.ended}
    alone = next(iter(reported)) if len(reported) == 1 and not case.nodes and not case.spread else ""
    why = f"ranks {listed(waited)} waited; rank {silent[0]} reported nothing"
    node = placed.get(silent[0], alone)
    return Finding(signature=_ABSENT, node=node, rank=silent[0], at=None, line=why, source="output")


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


# --- The verdict ----------------------------------------------------------------------------------------------


def _settle(
    case: Case,
    cause: Finding | None,
    findings: Sequence[Finding],
    bad: Mapping[str, list[tuple[Kind, FailedCheck]]],
    placed: Mapping[int, str],
) -> JobVerdict:
    """Hold what the observations propose against what was measured, by the table of verdicts."""
    if cause is None:
        return _unknown(case, findings, bad)
    signature = cause.signature
    failed = _failed_of(cause, bad)
    passed = failed is None and _all_passed(case)
    own = failed is not None and failed[0] == cause.node
    measurement = FAILED if failed is not None else PASSED if passed else OPEN
    row = row_of(signature.strength, signature.kind, measurement, program=signature.program, own=own)
    kind, outlook = row.kind or signature.kind, row.outlook or signature.outlook
    confidence = "low" if row.confidence == "medium" and signature.general else row.confidence
    if row.measurement == (PASSED,) and row.kind is None and signature.general:
        confidence = "medium"
    node, rank = _named(case, cause, kind, outlook, placed)
    if signature.strength is _REPORT and _is_common(cause, findings, kind, outlook):
        node, rank = None, None
    action, sentence = signature.action, _sentence(case, cause, kind, row.suspected)
    if failed is not None and signature.strength is not _FACT and _names_the_check(row):
        node, problem = failed
        rank = cause.rank if own else None
        action = f"Keep {node} out: {problem.reason}; see its runbook."
        certainty = "suspected " if row.suspected else ""
        sentence = f"{certainty}{kind.value}: {node} fails now: {problem.reason} {problem.target}; "
        sentence += _sentence(case, cause, signature.kind, True)
    return JobVerdict(
        kind=kind,
        suspected=row.suspected,
        confidence=confidence,
        name=signature.name,
        sentence=sentence,
        node=node or None,
        rank=rank,
        at=cause.at,
        outlook=outlook,
        action=action,
        settles=signature.settles,
        evidence=_evidence(cause, findings),
        waited=_waited(cause, findings),
        measurement=_measurement(case.measured),
        device=signature.device,
    )


def _names_the_check(row: Row) -> bool:
    """Whether the verdict is that of the failed check, which then names its node."""
    return row.outlook is Outlook.ELSEWHERE and row.measurement == (FAILED,)


def _named(
    case: Case, cause: Finding, kind: Kind, outlook: Outlook, placed: Mapping[int, str]
) -> tuple[str | None, int | None]:
    """The node and the rank that a verdict may name: the subject of the observation, never who merely reports it."""
    subject = cause.signature.subject
    if subject is Subject.NAMED:
        return cause.named, cause.rank
    reporter = cause.node
    if cause.node in case.spread and not cause.signature.kernel and placed.get(cause.rank or -1) != cause.node:
        # The launcher brings the output of all nodes to this one: where a line was printed is not known.
        reporter = "" if accuses(kind, outlook) else cause.node
    if subject in (Subject.RANK, Subject.DEVICE, Subject.NODE):
        return reporter, cause.rank
    if accuses(kind, outlook) or kind in (Kind.UNKNOWN, Kind.STOPPED):
        return None, None
    return reporter, cause.rank


def _is_common(cause: Finding, findings: Sequence[Finding], kind: Kind, outlook: Outlook) -> bool:
    """Whether others report the same, so that none is named: other ranks, or for an accusation other nodes."""
    alike = [each for each in findings if each.signature.name == cause.signature.name]
    if accuses(kind, outlook):
        return any(each.node != cause.node for each in alike) and cause.signature.subject is not Subject.NAMED
    return kind is Kind.UNKNOWN and any(each.rank != cause.rank for each in alike)


def _failed_of(cause: Finding, bad: Mapping[str, list[tuple[Kind, FailedCheck]]]) -> tuple[str, FailedCheck] | None:
    """The node and the failed check that explain this end; those of its own node first."""
    kind = cause.signature.kind
    found = [
        (node, problem)
        for node, told in bad.items()
        for of, problem in told
        if (of is Kind.HARDWARE and _explains_end(problem.reason, kind))
        or (of is kind and (kind is Kind.NETWORK or node == cause.node))
    ]
    return next((each for each in found if each[0] == cause.node), found[0] if found else None)


def _explains_end(reason: str, kind: Kind) -> bool:
    """Whether a device of which a check says this can have ended a job in this way. A slow one ends none."""
    if kind is Kind.SOFTWARE:
        return reason in _COMPUTES_WRONGLY
    if kind in (Kind.NETWORK, Kind.UNKNOWN):
        return reason in _COMPUTES_WRONGLY or reason in _STOPS
    return kind is Kind.HARDWARE


def _all_passed(case: Case) -> bool:
    """Whether every node of which there are notes passed a tier that would have found a device at fault."""
    wanted = {ended.node for ended in case.ended} | {line.node for line in case.lines}
    passed = {each.node for each in case.measured if each.passed and each.tier in ("quick", "deep")}
    failed = {each.node for each in case.measured if each.problems}
    return bool(wanted) and wanted <= passed - failed


def _sentence(case: Case, cause: Finding, kind: Kind, suspected: bool) -> str:
    subject = cause.signature.subject
    unplaced = cause.node in case.spread and cause.rank is None
    who = "the command" if cause.rank is None else f"rank {cause.rank}"
    where = f" on {cause.node}" if cause.node and not unplaced else ""
    if subject in (Subject.NOBODY, Subject.PEER) and (
        accuses(kind, cause.signature.outlook) or kind in (Kind.UNKNOWN, Kind.STOPPED)
    ):
        who, where = "the job", ""
    if cause.rank is None and where and subject in (Subject.NODE, Subject.DEVICE):
        who, where = cause.node, ""
    if subject is Subject.NAMED and cause.named:
        where = f" on {cause.named}"
        who = cause.named if cause.rank is None else who
        where = "" if who == cause.named else where
    certainty = f"{'suspected ' if suspected and kind is not Kind.UNKNOWN else ''}{kind.value}"
    return f"{certainty}: {who}{where}: {cause.signature.suggests.rstrip('.')}"


def _evidence(cause: Finding | None, findings: Sequence[Finding]) -> tuple[EvidenceLine, ...]:
    """The cause first, then other reports of its rank or node, then three lines of the cascade."""
    rest = sorted(findings, key=_when)
    shown: dict[tuple[str, str], Finding] = {}
    if cause is not None:
        shown[cause.line, cause.source] = cause
        same = [each for each in rest if each.signature.place is Place.INITIATING and each.node == cause.node]
        for finding in [each for each in same if each.rank in (None, cause.rank)][:3]:
            shown.setdefault((finding.line, finding.source), finding)
    forms: set[str] = set()
    for finding in rest:
        form = finding.signature.name
        if finding.signature.place is not Place.INITIATING and form not in forms and len(forms) < MAX_CASCADE:
            forms.add(form)
            shown.setdefault((finding.line, finding.source), finding)
    return tuple(
        EvidenceLine(
            text=finding.line,
            source=finding.source,
            node=finding.node,
            rank=finding.rank,
            at=finding.at,
            place=finding.signature.place,
            reference=finding.signature.source,
        )
        for finding in shown.values()
    )


def _when(finding: Finding) -> tuple[float, int]:
    return (finding.at if finding.at is not None else float("inf"), finding.order)


def _waited(cause: Finding | None, findings: Sequence[Finding]) -> tuple[int, ...]:
    ranks = {each.rank for each in findings if each.signature.strength is _AFTER and each.rank is not None}
    return tuple(sorted(ranks - {cause.rank if cause is not None else None}))


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
    """No observation explains the end: what was measured may, else it is unknown."""
    failed = ((node, kind, problem) for node, told in bad.items() for kind, problem in told)
    first = next(
        (each for each in failed if each[1] is not Kind.HARDWARE or _explains_end(each[2].reason, Kind.UNKNOWN)), None
    )
    waited = _waited(None, findings)
    row = row_of(None, Kind.UNKNOWN, FAILED if first is not None else OPEN, program=False, own=False)
    kind, outlook = row.kind or Kind.UNKNOWN, row.outlook or Outlook.HERE
    if first is not None:
        node: str | None
        node, kind, problem = first
        # That a node is bad now does not say that the job died of it.
        sentence = f"suspected {kind.value}: the output does not explain the end; {node} fails now: {problem.reason}"
        action = f"Keep {node} out: {problem.reason}; see its runbook."
    else:
        node, action = None, "Read the last lines of each rank."
        sentence = "unknown: neither the output nor the nodes explain the end"
        if waited:
            sentence += f"; ranks {listed(waited)} only waited or were stopped"
        if silent := {each.silent for each in findings if each.silent is not None}:
            sentence += f"; task{'s' if len(silent) > 1 else ''} {listed(silent)} stopped responding"
        if peers := sorted({each.peer for each in findings if each.peer}):
            sentence += f"; {', '.join(peers[:3])} did not respond"
            action = "Look at the nodes that did not respond, and their logs."
    return JobVerdict(
        kind=kind,
        suspected=row.suspected,
        confidence=row.confidence,
        name="",
        sentence=sentence,
        node=node,
        rank=None,
        at=None,
        outlook=outlook,
        action=action,
        settles="",
        evidence=_evidence(None, findings),
        waited=waited,
        measurement=_measurement(case.measured),
    )
