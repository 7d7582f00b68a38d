"""
The outcome of a group's test, for localisation: what its ranks measured, which nodes that is held against, and whether
ranks come late. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checks.collective.judge import gave_out, is_own_failure, tells_of_hardware
from checks.collective.judges import judge_of, judges_training
from checks.contract import Blame, Evidence, Finding, Missing, Progress, Status
from checks.limits import quantity
from checks.peers import factor_of, median, normal
from checks.reasons import blame_of
from healthd.aggregator.validation import nccom
from healthd.aggregator.validation.rank_data import is_number, odd_ranks, odd_steps
from healthd.aggregator.validation.records import Group, Tested
from healthd.core.evidence import reason
from healthd.core.model import FINAL_STATUSES, OrderReport, OrderStatus, RankReport, Reason
from healthd.localize import Outcome

MOST_EVENTS = 1000
"""Signs of life of a rank in one check that are counted: twice the sizes and a few."""

FALSE_ALARMS = 0.005
"""In one look at a group; a second measurement has to agree."""
MOST_LATE = 64
"""Nodes looked at in one group, the latest first: each is compared with all others."""
LATE_SECONDS = 0.3
"""
A rank must be late by so much at least. On two cores with other work the ranks of sound nodes were seen late by up to
0.22 s, and one with a fifth of a core by 0.31 s: what is less cannot be told from a busy host, and accuses nobody.
"""
LATE_RATIO = 2.0
"""And by so many times what its peers need: what takes them milliseconds may take it some more."""
LATE_SHARE = 0.25
"""And by a quarter of what the operation takes: what is late by less hardly holds up anybody."""

# The node could not take part, through no fault that the group could show; its ranks were never at work.
_NOT_AT_WORK = ("Busy", "StartFailed", "ColdCache", "CompileFailed", "MissingTool", "NoPermission", "CannotAllocate")
# Neither could it where our own tool failed: a group with such a rank was not tested.
_UNFIT = (*_NOT_AT_WORK, "Cancelled", "Stuck", "Garbage", "NoData", "InternalError")
# An error, which may come from a peer: the judge of the ranks knows where it is certain that it is our own tool's.
_ERRORS = ("CheckError", "Crashed")
# Another program has the port of the first rank: the next group gets another one.
_PORT = "is in use"
_RANK = re.compile(r"rank:(\d{1,9})(?!\d)")
_SLOW = ("SlowLink", "SlowDevice")
_NEVER_UP = "not up"  # instead of a reason until it is known which


def read_group(
    group: Group, reports: Mapping[str, OrderReport], checks: Sequence[str], *, round_number: int, seconds: float
) -> Tested:
    """
    The outcome of a group whose nodes have reported, or whose time is up.

    `reports` holds the last report of each member, without those that gave none.
    """
    run = _run_of(group, reports, checks, round_number=round_number, seconds=seconds)
    busbw: dict[str, float] = {}
    for check in checks:
        judged = _judge(run, check)
        if judged.bad or run.silent or run.unfit:
            return _not_passed(run, check, judged, busbw)
        busbw.update(_bandwidth(check, judged.findings))
    tested = Tested(
        members=group.members,
        outcome=Outcome.PASS if checks else Outcome.UNKNOWN,
        round=round_number,
        seconds=seconds,
        busbw_bytes_per_second=busbw,
        injected=run.injected,
    )
    return of_group(tested, group, run.ranks)


def lost_ranks(reports: Mapping[str, OrderReport]) -> bool:
    """Whether any rank is known to be lost, so that the others wait for it in vain."""
    return any(
        report.status == OrderStatus.REFUSED or any(rank.reason is not None for rank in report.ranks)
        for report in reports.values()
    )


def any_cold(reports: Mapping[str, OrderReport]) -> bool:
    """Whether any rank has something to compile, for which all others wait."""
    return any(rank.cold for report in reports.values() for rank in report.ranks)


def all_up(group: Group, reports: Mapping[str, OrderReport]) -> bool:
    """Whether the process of every rank is there."""
    return _each(group, reports, lambda rank: rank.last != "" or rank.data is not None)


def all_inside(group: Group, reports: Mapping[str, OrderReport]) -> bool:
    """Whether every rank has found the others: it says that it left the rendezvous, or that it is further."""
    return _each(group, reports, lambda rank: rank.data is not None or rank.last.endswith((" left", " entered")))


@dataclass(frozen=True, kw_only=True)
class Late:
    """A node whose rank comes late: by how long it needs between leaving an operation and entering the next."""

    node: str
    rank: int
    check: str
    size_bytes: int
    seconds: float
    others_seconds: float


def of_group(tested: Tested, group: Group, ranks: Mapping[str, Mapping[int, RankReport]]) -> Tested:
    """
    The outcome of a group that passed: SLOW, with the node of a rank that is late, where one is; else as it is.

    Nobody is named by that alone: a group that is slow is looked into in pairs. Where nodes do not say how late they
    are, nothing is made of it. `ranks` are reports by check and rank.
    """
    if tested.outcome is not Outcome.PASS:
        return tested
    worst: dict[str, Reason] = {}
    for check, reports in ranks.items():
        for one in sorted(late_nodes(check, group, reports), key=lambda each: each.others_seconds - each.seconds):
            worst.setdefault(one.node, _reason(one, injected=tested.injected))
    if not worst:
        return tested
    return dataclasses.replace(tested, outcome=Outcome.SLOW, accused=worst, reasons=tuple(worst.values())[:16])


def late_nodes(check: str, group: Group, reports: Mapping[int, RankReport]) -> Iterator[Late]:
    """
    The nodes of one check that are out of line, of each size that was measured: by their latest rank each.

    Compared by node, since what makes a node late makes its ranks late together, and in a pair they are half of all.
    """
    for size_bytes, measured in _ready(reports).items():
        latest: dict[str, tuple[float, int]] = {}
        for seat in group.seats:
            mine = [(measured[r][0], r) for r in range(seat.first_rank, seat.first_rank + seat.ranks) if r in measured]
            if mine:
                latest[seat.node] = max(mine)
        operation_seconds = median(seconds for _, seconds in measured.values())
        factor = factor_of(FALSE_ALARMS, len(latest))
        for node, (seconds, rank) in sorted(latest.items(), key=lambda item: (-item[1][0], item[0]))[:MOST_LATE]:
            others = [ready for other, (ready, _) in latest.items() if other != node]
            if not others:
                continue
            usual = normal(others, functools.partial(_least_margin, operation_seconds), factor=factor)
            if usual.is_slow(seconds):
                yield Late(
                    node=node,
                    rank=rank,
                    check=check,
                    size_bytes=size_bytes,
                    seconds=seconds,
                    others_seconds=usual.median,
                )


def _least_margin(operation_seconds: float, others_seconds: float) -> float:
    """The floors of lateness. They are not small, since among few nodes they alone judge."""
    return max(LATE_SECONDS, LATE_RATIO * others_seconds, LATE_SHARE * operation_seconds)


def _ready(reports: Mapping[int, RankReport]) -> dict[int, dict[int, tuple[float, float]]]:
    """size_bytes -> rank -> (seconds between operations, seconds in one), of the ranks that say both."""
    found: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank, report in reports.items():
        sizes = report.data.get("sizes") if report.data is not None else None
        for size in sizes if isinstance(sizes, (list, tuple)) else ():
            if not isinstance(size, Mapping):
                continue
            ready, took, size_bytes = (size.get(name) for name in ("ready_seconds", "seconds", "size_bytes"))
            if _is_time(ready) and _is_time(took) and isinstance(size_bytes, int):
                found[size_bytes][rank] = (float(ready), float(took))  # type: ignore[arg-type]
    return found


def _is_time(value: object) -> bool:
    return is_number(value) and value >= 0


def _reason(late: Late, *, injected: bool) -> Reason:
    text = (
        f"{late.node}: rank:{late.rank} arrives at {late.check} of {late.size_bytes} bytes after "
        f"{quantity('_seconds', late.seconds)}, the others after {quantity('_seconds', late.others_seconds)}"
    )
    target = f"rank:{late.rank}"
    return reason(
        "SlowNode", text, node=late.node, target=target, check=late.check, status=Status.FAIL, injected=injected
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """
    One run of the checks of a group, as its nodes have reported it.

    `silent` members did not report how it ended, `unfit` ones did not take part. `ranks` are reports by check and rank.
    """

    group: Group
    reports: Mapping[str, OrderReport]
    number: int
    seconds: float
    silent: tuple[str, ...]
    unfit: Mapping[str, Reason]
    ranks: Mapping[str, Mapping[int, RankReport]]
    injected: bool

    def present(self) -> Iterator[int]:
        """The ranks of the members that have taken part and reported."""
        for seat in self.group.seats:
            if seat.node not in self.silent and seat.node not in self.unfit:
                yield from range(seat.first_rank, seat.first_rank + seat.ranks)


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """The findings of one check, and the ranks in which our own tool failed, by target."""

    findings: Sequence[Finding]
    ours: frozenset[str] = frozenset()

    @property
    def bad(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status in (Status.FAIL, Status.UNKNOWN)]


def _run_of(
    group: Group, reports: Mapping[str, OrderReport], checks: Sequence[str], *, round_number: int, seconds: float
) -> _Run:
    silent = tuple(node for node in group.members if not _is_heard(reports.get(node)))
    unfit = {
        node: reason("Busy", f"{node} did not take part: {report.message or 'no reason given'}", node=node)
        for node, report in reports.items()
        if report.status == OrderStatus.REFUSED
    }
    if unfit:
        # Who waits for a node that does not come says nothing in time, and is not silent.
        silent = ()
    elif group.hosts and not silent and (why := nccom.unfit_main(group, reports, checks)) is not None:
        unfit[group.members[0]] = why
    ranks = _by_check(group, reports)
    return _Run(
        group=group,
        reports=reports,
        number=round_number,
        seconds=seconds,
        silent=silent,
        unfit=unfit,
        ranks=ranks,
        injected=any(report.injected for of_check in ranks.values() for report in of_check.values()),
    )


def _judge(run: _Run, check: str) -> _Judged:
    """What one check over the group has found."""
    if run.group.hosts:
        return _Judged(findings=nccom.findings_of(run.group, run.reports, check))
    evidence, missing = _collect(run, check)
    return _Judged(
        findings=list(judge_of(check)(evidence, missing)),
        ours=frozenset(one.target for one in missing if is_own_failure(one)),
    )


def _collect(run: _Run, check: str) -> tuple[list[Evidence], list[Missing]]:
    """The measurements of the ranks of one check, and why the other ranks have none."""
    ranks = run.ranks.get(check, {})
    measured = {rank: one.data for rank, one in ranks.items() if one.data is not None and one.reason is None}
    odd = odd_ranks(measured, sum(seat.ranks for seat in run.group.seats))
    if judges_training(check):
        odd |= odd_steps({rank: data for rank, data in measured.items() if rank not in odd})
    events = events_of(ranks)
    evidence: list[Evidence] = []
    missing: list[Missing] = []
    for rank in run.present():
        report = ranks.get(rank)
        if report is not None and rank in measured and rank not in odd:
            evidence.append(Evidence(target=f"rank:{rank}", key=report.key or "", data=measured[rank]))
        else:
            missing.append(_missing(rank, report, odd.get(rank), events))
    # One that was not up when the group was called off had no time if another rank had given out before; else it was
    # slow to start.
    instead = "Cancelled" if any(map(gave_out, missing)) else "StartFailed"
    return evidence, [dataclasses.replace(one, reason=instead) if one.reason == _NEVER_UP else one for one in missing]


def _missing(rank: int, report: RankReport | None, odd: str | None, events: Callable[[int], Progress]) -> Missing:
    """Why a rank has no measurement. `odd` is what is wrong with the data that it has sent."""
    target = f"rank:{rank}"
    if report is None:
        return Missing(target=target, reason=_NEVER_UP, message="it was never started")
    progress = tuple(map(events, range(min(report.events, MOST_EVENTS))))
    if odd is not None:
        return Missing(target=target, reason="Garbage", message=odd, progress=progress)
    never_up = report.reason in ("Cancelled", "Timeout") and not report.last
    why = _NEVER_UP if never_up else report.reason or "Timeout"
    return Missing(target=target, reason=why, message=report.message, progress=progress)


def _not_passed(run: _Run, check: str, judged: _Judged, busbw: Mapping[str, float]) -> Tested:
    """The outcome of a group that did not pass this check, and of which nodes that is held against or for."""
    group, bad = run.group, judged.bad
    owners = {rank: seat.node for seat in group.seats for rank in range(seat.first_rank, seat.first_rank + seat.ranks)}
    accused: dict[str, Reason] = {}
    unfit = dict(run.unfit)
    reasons: list[Reason] = []
    for finding in bad:
        node = _owner(finding.target, owners)
        reasons.append(_of_finding(finding, check, node, group, injected=run.injected))
        if node is None or _is_of_port(finding):
            continue
        if finding.reason in _UNFIT or finding.target in judged.ours:
            unfit.setdefault(node, reasons[-1])
        elif finding.status is Status.FAIL or (finding.reason in _ERRORS and not tells_of_hardware(finding.message)):
            accused.setdefault(node, reasons[-1])
    reasons += [reason("Silent", f"{node} did not report how {check} ended", node=node) for node in run.silent]
    return Tested(
        members=group.members,
        outcome=_outcome(bad, known=not run.silent and not unfit),
        round=run.number,
        seconds=run.seconds,
        reasons=tuple([*reasons, *(one for one in unfit.values() if one not in reasons)][:16]),
        accused=accused,
        silent=run.silent,
        unfit=unfit,
        ended_within=_ended_within(group, unfit, run.ranks.get(check, {})),
        busbw_bytes_per_second=busbw,
        injected=run.injected,
    )


def _outcome(bad: Sequence[Finding], *, known: bool) -> Outcome:
    """`known`: each member has taken part, and has reported."""
    if not known or any(map(_is_of_port, bad)):
        return Outcome.UNKNOWN
    return Outcome.SLOW if all(finding.reason in _SLOW for finding in bad) else Outcome.FAIL


def events_of(ranks: Mapping[int, RankReport]) -> Callable[[int], Progress]:
    """The n-th sign of life of a rank: all pass the same, and those that are somewhere say where."""
    known: dict[int, Progress] = {}
    for report in ranks.values():
        step, _, event = report.last.rpartition(" ")
        if report.events and step:
            known[report.events - 1] = Progress(step=step, event=event, monotonic_seconds=0.0)

    def at(index: int) -> Progress:
        if index in known:
            return known[index]
        before = known.get(index - 1)
        if before is not None and before.event == "entered":
            return Progress(step=before.step, event="left", monotonic_seconds=0.0)
        return Progress(step=f"step {index + 1}", event="left" if index % 2 else "entered", monotonic_seconds=0.0)

    return at


def _ended_within(group: Group, unfit: Mapping[str, Reason], ranks: Mapping[int, RankReport]) -> tuple[str, ...]:
    """The unfit nodes whose ranks had begun: a peer may have been the cause."""
    begun = {rank for rank, report in ranks.items() if report.events}
    return tuple(
        seat.node
        for seat in group.seats
        if seat.node in unfit and unfit[seat.node].code not in _NOT_AT_WORK
        if not begun.isdisjoint(range(seat.first_rank, seat.first_rank + seat.ranks))
    )


def _is_of_port(finding: Finding) -> bool:
    """Whether a rank did not start because another program has its port: no evidence of any node."""
    return finding.reason in _UNFIT and _PORT in finding.message


def _owner(target: str, owners: Mapping[int, str]) -> str | None:
    kind, _, number = target.partition(":")
    return owners.get(int(number)) if kind == "rank" and number.isdecimal() and len(number) < 10 else None


def _called(rank: int, group: Group) -> str:
    """A rank of the group by its node, and by its place there where the node has several."""
    for seat in group.seats:
        if seat.first_rank <= rank < seat.first_rank + seat.ranks:
            return seat.node if seat.ranks == 1 else f"{seat.node} (its rank {rank - seat.first_rank})"
    return f"rank:{rank}"


def _of_finding(finding: Finding, check: str, node: str | None, group: Group, *, injected: bool) -> Reason:
    message = _RANK.sub(lambda found: _called(int(found[1]), group), finding.message)
    message = message if node is None or node in message else f"{node}: {message}"
    blame = finding.blame or blame_of(finding.reason)
    if node is None and blame is Blame.NODE:
        blame = Blame.PATH  # of nodes together: which one, if any, is for localisation to say
    return reason(
        finding.reason or "NoData",
        message,
        node=node,
        target=finding.target,
        check=check,
        status=finding.status,
        blame=blame,
        action=finding.action,
        injected=injected,
    )


def _bandwidth(check: str, findings: Sequence[Finding]) -> dict[str, float]:
    """The bus bandwidth of the largest size."""
    name = f"{check}_busbw_bytes_per_second"
    sized = [
        (int(size), one.value)
        for finding in findings
        for one in finding.measurements
        if one.name == name and one.value is not None
        if (size := one.labels.get("size_bytes", "0")).isdecimal() and len(size) < 16
    ]
    return {check: max(sized)[1]} if sized else {}


def _each(group: Group, reports: Mapping[str, OrderReport], true: Callable[[RankReport], bool]) -> bool:
    """Whether it is true of every rank, in one of the checks."""
    found = {rank.rank for seat in group.seats for rank in _ranks_of(seat.node, reports) if true(rank)}
    return all(found.issuperset(range(seat.first_rank, seat.first_rank + seat.ranks)) for seat in group.seats)


def _ranks_of(node: str, reports: Mapping[str, OrderReport]) -> Sequence[RankReport]:
    report = reports.get(node)
    return report.ranks if report is not None else ()


def _is_heard(report: OrderReport | None) -> bool:
    return report is not None and report.status in FINAL_STATUSES


def _by_check(group: Group, reports: Mapping[str, OrderReport]) -> dict[str, dict[int, RankReport]]:
    """By check and rank, without ranks that are not the node's own; of a rank that is told twice the worse."""
    found: dict[str, dict[int, RankReport]] = defaultdict(dict)
    for seat in group.seats:
        report = reports.get(seat.node)
        for rank in report.ranks if report is not None else ():
            if seat.first_rank <= rank.rank < seat.first_rank + seat.ranks:
                known = found[rank.check].get(rank.rank)
                if known is None or _worth(rank) < _worth(known):
                    found[rank.check][rank.rank] = rank
    return found


def _worth(rank: RankReport) -> tuple[bool, bool]:
    return (rank.reason is None, rank.data is not None)
