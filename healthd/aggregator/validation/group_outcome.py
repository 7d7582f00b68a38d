"""
What the test of a group gave, from what its nodes report: pure.

Ranks are judged by the same code as inside a node, that of their check, so a culprit that shows itself is named at
once; a group that fails without one is for localisation. A member that says nothing gives no outcome: whether it or
the line to it is at fault is not known, so nobody is accused.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from checks.collective.judge import gave_out
from checks.collective.judges import judge_of, judges_training
from checks.collective.last_words import is_own_failure, tells_of_hardware
from checks.contract import Blame, Evidence, Finding, Missing, Status
from checks.reasons import blame_of
from healthd.aggregator.model.validations import Group, Tested
from healthd.aggregator.validation import late_ranks, nccom
from healthd.aggregator.validation.rank_data import MOST_EVENTS, events_of, odd_ranks
from healthd.aggregator.validation.training_data import odd_steps
from healthd.core.evidence import reason
from healthd.core.model import FINAL_STATUSES, OrderReport, OrderStatus, RankReport, Reason
from healthd.localize.model import Outcome

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
_NEVER_UP = "not up"  # in the place of a reason until it is known which


def read_group(
    group: Group, reports: Mapping[str, OrderReport], checks: Sequence[str], *, round_number: int, seconds: float
) -> Tested:
    """
    The outcome of a group whose nodes have reported, or whose time is up.

    `reports` holds the last report of each member, without those that gave none.
    """
    silent = tuple(node for node in group.members if not _is_heard(reports.get(node)))
    if any(report.status == OrderStatus.REFUSED for report in reports.values()):
        # Who waits for a node that does not come says nothing in time, and is not silent.
        silent = ()
    unfit = {
        node: reason("Busy", f"{node} did not take part: {report.message or 'no reason given'}", node=node)
        for node, report in reports.items()
        if report.status == OrderStatus.REFUSED
    }
    if group.hosts and not silent and not unfit and (why := nccom.unfit_main(group, reports, checks)) is not None:
        unfit[group.members[0]] = why
    ranks = _by_check(group, reports)
    injected = any(report.injected for reports_ in ranks.values() for report in reports_.values())
    busbw: dict[str, float] = {}
    for check in checks:
        ours: frozenset[str] = frozenset()
        if group.hosts:
            findings = nccom.findings_of(group, reports, check)
        else:
            findings, ours = _judged(check, group, ranks.get(check, {}), silent, unfit)
        bad = [finding for finding in findings if finding.status in (Status.FAIL, Status.UNKNOWN)]
        if bad or silent or unfit:
            tested = _tested(group, check, bad, ours, silent, unfit, round_number, seconds, busbw, injected=injected)
            return dataclasses.replace(tested, ended_within=_ended_within(group, tested, ranks.get(check, {})))
        busbw.update(_bandwidth(check, findings))
    tested = Tested(
        members=group.members,
        outcome=Outcome.PASS if checks else Outcome.UNKNOWN,
        round=round_number,
        seconds=seconds,
        busbw_bytes_per_second=busbw,
        injected=injected,
    )
    return late_ranks.of_group(tested, group, ranks)


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


def _judged(
    check: str,
    group: Group,
    ranks: Mapping[int, RankReport],
    silent: Sequence[str],
    unfit: Mapping[str, Reason],
) -> tuple[list[Finding], frozenset[str]]:
    """
    The findings of one check over the group, and the ranks in which our own tool failed. Ranks of members that are
    silent or unfit are left out.

    One that was not up yet when the group was called off had no time, where another rank had given out before; else
    it was slow to start.
    """
    events = events_of(ranks)
    said = {rank: one.data for rank, one in ranks.items() if one.data is not None and one.reason is None}
    odd = odd_ranks(said, sum(seat.ranks for seat in group.seats))
    if judges_training(check):
        odd |= odd_steps({rank: data for rank, data in said.items() if rank not in odd})
    evidence: list[Evidence] = []
    missing: list[Missing] = []
    for seat in group.seats:
        if seat.node in silent or seat.node in unfit:
            continue
        for rank in range(seat.first_rank, seat.first_rank + seat.ranks):
            report = ranks.get(rank)
            if report is not None and rank in said and rank not in odd:
                evidence.append(Evidence(target=f"rank:{rank}", key=report.key or "", data=said[rank]))
                continue
            count = 0 if report is None else min(report.events, MOST_EVENTS)
            up = report is not None and not (report.reason in ("Cancelled", "Timeout") and not report.last)
            why = "Garbage" if rank in odd else (report.reason or "Timeout") if report and up else _NEVER_UP
            missing.append(
                Missing(
                    target=f"rank:{rank}",
                    reason=why,
                    message=odd.get(rank) or ("it was never started" if report is None else report.message),
                    progress=tuple(events(index) for index in range(count)),
                )
            )
    instead = "Cancelled" if any(map(gave_out, missing)) else "StartFailed"
    told = [dataclasses.replace(one, reason=instead) if one.reason == _NEVER_UP else one for one in missing]
    return list(judge_of(check)(evidence, told)), frozenset(one.target for one in told if is_own_failure(one))


def _tested(
    group: Group,
    check: str,
    bad: Sequence[Finding],
    ours: frozenset[str],
    silent: Sequence[str],
    unfit: Mapping[str, Reason],
    round_number: int,
    seconds: float,
    busbw: Mapping[str, float],
    *,
    injected: bool,
) -> Tested:
    owners = {rank: seat.node for seat in group.seats for rank in range(seat.first_rank, seat.first_rank + seat.ranks)}
    accused: dict[str, Reason] = {}
    unfit = dict(unfit)
    reasons: list[Reason] = []
    for finding in bad:
        node = _owner(finding.target, owners)
        told = _of_finding(finding, check, node, group, injected=injected)
        reasons.append(told)
        if node is None:
            continue
        if _is_of_port(finding):
            continue
        if finding.reason in _UNFIT or finding.target in ours:
            unfit.setdefault(node, told)
        elif finding.status is Status.FAIL or (finding.reason in _ERRORS and not tells_of_hardware(finding.message)):
            accused.setdefault(node, told)
    if silent or unfit or any(_is_of_port(finding) for finding in bad):
        outcome = Outcome.UNKNOWN
    elif all(finding.reason in _SLOW for finding in bad):
        outcome = Outcome.SLOW
    else:
        outcome = Outcome.FAIL
    reasons.extend(reason("Silent", f"{node} did not say how {check} ended", node=node) for node in silent)
    return Tested(
        members=group.members,
        outcome=outcome,
        round=round_number,
        seconds=seconds,
        reasons=tuple([*reasons, *(one for node, one in unfit.items() if one not in reasons)][:16]),
        accused=accused,
        silent=tuple(silent),
        unfit=unfit,
        busbw_bytes_per_second=busbw,
        injected=injected,
    )


def _ended_within(group: Group, tested: Tested, ranks: Mapping[int, RankReport]) -> tuple[str, ...]:
    """The unfit nodes whose ranks had begun: a peer may have been the cause."""
    begun = {rank for rank, report in ranks.items() if report.events}
    return tuple(
        seat.node
        for seat in group.seats
        if seat.node in tested.unfit and tested.unfit[seat.node].code not in _NOT_AT_WORK
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
