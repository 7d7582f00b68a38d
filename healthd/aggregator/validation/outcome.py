"""
The result of a group's test: verifies the data of its ranks before they are used, finds late ranks, and makes the
outcome for localisation. Pure.

Anyone with a node's key can send data, and `checks.collective.judge` uses them unchecked. Anything but a complete
measurement by the rank itself is no evidence: neither that the group is healthy, nor that a node is bad.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from checks.collective.judge import gave_out, is_own_failure, tells_of_hardware
from checks.collective.judges import judge_of, judges_training
from checks.collective.training.shard import ENDS, is_digests_text, names_of
from checks.contract import Blame, Evidence, Finding, Missing, Progress, Status
from checks.limits import quantity
from checks.peers import factor_of, median, normal
from checks.reasons import blame_of
from healthd.aggregator.validation import nccom
from healthd.aggregator.validation.records import Group, Tested
from healthd.core.evidence import reason
from healthd.core.model import FINAL_STATUSES, OrderReport, OrderStatus, RankReport, Reason
from healthd.localize import Outcome

LIMITED = ("busbw_bytes_per_second", "algbw_bytes_per_second", "duration_seconds")
MOST_TEXT = 500
MOST_EVENTS = 1000
"""Signs of life of a rank in one check that are counted: twice the sizes and a few."""
_ELEMENT_BYTES = 8
"""Of the largest kind of element: a small size is rounded up to one element a rank."""


def odd_ranks(measured: Mapping[int, Mapping[str, Any]], size: int) -> dict[int, str]:
    """
    Rank -> what is wrong with its data, of those whose data are no measurement in a group of `size` ranks.

    All ranks of a group run the same sizes, so those that tell of others than most do are odd as well.
    """
    found = {rank: why for rank, data in measured.items() if (why := _odd(data, rank, size))}
    ran = {rank: _sizes(data) for rank, data in measured.items() if rank not in found}
    counts = Counter(ran.values())
    usual = max(counts, key=lambda sizes: (counts[sizes], len(sizes)), default=())
    differing = {rank: f"it measured sizes {_listed(own)} and others {_listed(usual)}" for rank, own in ran.items()}
    return found | {rank: why for rank, why in differing.items() if ran[rank] != usual}


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


def _odd(data: Mapping[str, Any], rank: int, size: int) -> str:
    if not _is(data.get("rank"), rank):
        return f"its data are of rank {_shown(data.get('rank'))}"
    if not _is(data.get("ranks"), size):
        return f"its data are from a group of {_shown(data.get('ranks'))} ranks, but this group has {size}"
    targets, sizes = data.get("targets"), data.get("sizes")
    if not isinstance(targets, (list, tuple)) or not all(isinstance(one, str) for one in targets):
        return "its data name no devices"
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return "it measured no size"
    for one in sizes:
        if not isinstance(one, Mapping) or not _count(one.get("size_bytes")) or not one["size_bytes"]:
            return "its data contain an invalid size"
        if why := _odd_size(one, size):
            return f"{one['size_bytes']} bytes: {why}"
    if len(set(_sizes(data))) < len(sizes):
        return "it measured a size twice"
    return ""


def _odd_size(one: Mapping[str, Any], size: int) -> str:
    moved, seconds, wrong = one.get("bytes"), one.get("seconds"), one.get("mismatches")
    if not _count(moved) or not 0 < moved <= max(one["size_bytes"], size * _ELEMENT_BYTES):
        return f"{_shown(moved)} bytes were moved"
    if not is_number(seconds) or not seconds > 0:
        return f"it took {_shown(seconds)} seconds"
    if not _count(wrong):
        return f"{_shown(wrong)} elements were wrong"
    sources = one.get("sources")
    if not isinstance(sources, Mapping) or not all(_names_rank(key, size) for key in sources):
        return "wrong values from an unknown rank"
    first = one.get("first")
    if first is not None and not (isinstance(first, str) and len(first) <= MOST_TEXT):
        return "the first wrong value is not text"
    limits = one.get("limits")
    if not isinstance(limits, Mapping) or not all(is_limit(limits.get(name)) for name in LIMITED):
        return "its limits cannot be read"
    return ""


def is_limit(limit: object) -> bool:
    """Whether it is a limit as ranks send them: [lower, upper, origin]."""
    if not isinstance(limit, (list, tuple)) or len(limit) != 3:
        return False
    lower, upper, origin = limit
    return all(bound is None or is_number(bound) for bound in (lower, upper)) and isinstance(origin, str)


def _names_rank(key: object, size: int) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 and int(key) < size


def _sizes(data: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(one["size_bytes"] for one in data["sizes"]))


def _is(value: object, wanted: int) -> bool:
    return _count(value) and value == wanted


def _count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_number(value: object) -> TypeGuard[float]:
    """A number that can be counted with: JSON knows whole ones that are beyond all others."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "an impossibly large number"  # Python does not write out whole numbers of any length
    return repr(value)[:40]


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:8])) + (" ..." if len(sizes) > 8 else "")


# What a rank says of data-parallel steps, before anybody compares it with other ranks: pure.


MOST_STEPS = 64
MOST_LAYERS = 256
MOST_PLACES_CHARACTERS = 4096
_KEY = "training"
_REASONS = ("SilentCorruption", "WrongResult")


def odd_steps(measured: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Rank -> what is wrong with what it says of its steps; all must have done the same ones."""
    told = {rank: data[_KEY] for rank, data in measured.items() if _KEY in data}
    found = {rank: "it reports no training steps" for rank in measured if rank not in told}
    found |= {
        rank: why for rank, steps in told.items() if (why := _odd_of_training_data(steps) or _odd_rank(measured[rank]))
    }
    shapes = {rank: _shape(steps) for rank, steps in told.items() if rank not in found}
    usual = max(Counter(shapes.values()).items(), key=lambda one: (one[1], one[0]), default=((), 0))[0]
    return found | {rank: "it ran other training steps than the others" for rank, own in shapes.items() if own != usual}


def _odd_of_training_data(told: object) -> str:
    if not isinstance(told, Mapping):
        return "its report on training steps cannot be read"
    steps, faults = told.get("steps"), told.get("faults")
    if not _is_count(steps) or not 0 < steps <= MOST_STEPS:
        return "it ran no training steps, or too many"
    places, digests = told.get("places"), told.get("digests")
    if not isinstance(places, str) or not 0 < len(places) <= MOST_PLACES_CHARACTERS:
        return "it does not name the parameters it trained"
    count = len(names_of(places))
    if not _is_table(digests, steps, lambda cell: is_digests_text(cell, count)) or set(digests) != set(ENDS):
        return "its digests of training steps cannot be read"
    if not _is_table(told.get("sums"), steps, _is_sums):
        return "its sums of gradients cannot be read"
    if not isinstance(faults, (list, tuple)) or not all(_is_fault(one, steps) for one in faults):
        return "its own findings cannot be read"
    return ""


def _odd_rank(data: Mapping[str, Any]) -> str:
    size, device = data["sizes"][0], data.get("device")
    if not isinstance(device, str) or len(device) > MOST_TEXT:
        return "it names no device"
    own, limit = size.get("own_seconds"), size["limits"].get("own_seconds")
    return "" if is_number(own) and own >= 0 and is_limit(limit) else "it does not report how long its own work took"


def _shape(told: Mapping[str, Any]) -> tuple[Any, ...]:
    return (told["steps"], told["places"], tuple(sorted(told["sums"])))


def _is_table(table: object, steps: int, is_cell: Callable[[object], bool]) -> TypeGuard[Mapping[str, Any]]:
    """Name -> a cell of each step."""
    return (
        isinstance(table, Mapping)
        and 0 < len(table) <= MOST_LAYERS
        and all(isinstance(name, str) and len(name) <= MOST_TEXT for name in table)
        and all(isinstance(cells, (list, tuple)) and len(cells) == steps for cells in table.values())
        and all(is_cell(cell) for cells in table.values() for cell in cells)
    )


def _is_sums(cell: object) -> bool:
    return isinstance(cell, (list, tuple)) and len(cell) == 3 and all(one is None or is_number(one) for one in cell)


def _is_fault(fault: object, steps: int) -> bool:
    if not isinstance(fault, Mapping) or fault.get("reason") not in _REASONS:
        return False
    step, text = fault.get("step"), fault.get("message")
    return _is_count(step) and 0 <= step < steps and isinstance(text, str) and len(text) <= MOST_TEXT


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


# Which nodes of a group hold up the others: ranks that come late to a collective. Pure.


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


# What the test of a group gave, from what its nodes report: pure.


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
    return of_group(tested, group, ranks)


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
    reasons.extend(reason("Silent", f"{node} did not report how {check} ended", node=node) for node in silent)
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
