"""What people see of decisions and of validations in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from checks.contract import SEVERITY, Blame, Status
from checks.limits import quantity
from checks.printable import some
from healthd.cli.terminal.render import (
    DRILL,
    MOST_REASONS_LEFT_OUT,
    VERDICT_SIGNS,
    bare_message,
    counted,
    once_each,
    printed,
    reason_lines,
    table_of,
)
from healthd.core.model import AdmittedNode, Decision, ExcludedNode, Reason, Verdict, WellNode

OUTCOME_SIGNS = {
    "pass": "[green]✓ pass[/]",
    "slow": "[yellow]! slow[/]",
    "unknown": "[magenta]? unknown[/]",
    "fail": "[bold red]✗ fail[/]",
}
MOST_TESTS = 40
OBSERVED = "Observed"
"""The reason of a gate that only watched. Its message is printed with the verdict already."""


def decision_report(decision: Decision, *, whole: bool = False) -> Iterable[str]:
    """
    What `healthd gate` prints of a decision; `whole`, as `healthd fleet explain` does, with what was asked and applied,
    and why each node is left out.
    """
    report = report_of(decision, whole=whole)
    yield from _verdict_lines(decision)
    if whole:
        yield from _asked_lines(decision)
    for line in reason_lines(report.reasons, short=report.short):
        yield f"  {line}"
    for left_out in report.left_out:
        yield f"  [dim]left out:[/] [bold]{escape(_called(left_out.node))}[/]{_why_left_out(left_out)}"
        for line in reason_lines(left_out.reasons, most=MOST_REASONS_LEFT_OUT, short=report.short):
            yield f"    {line}"
    if report.not_verified:
        named = "; ".join(f"{some(names, 8)} ({code})" for code, names in report.not_verified.items())
        yield f"  [dim]not verified: {escape(named)}[/]"
    if decision.well:
        yield f"  [dim]passed:[/] {escape(some([_called(node) for node in decision.well], 64 if whole else 8))}"


def validation_report(decision: Decision, validations: Sequence[Mapping[str, Any]]) -> Iterable[Table | str]:
    """What `healthd fleet validate` prints: who ran what together, what came of it, and the rounds."""
    _, *lines = decision_report(decision)
    members = list(validations[-1]["members"]) if validations else [node.node for node in decision.nodes]
    ran = " ran " + ", ".join(validations[-1]["checks"]) if validations and validations[-1]["checks"] else ""
    if decision.decision is Verdict.ADMIT:
        came_to = "[bold green]✓ PASSED[/]"
    elif any(reason.status is Status.FAIL for reason in all_reasons(decision)):
        came_to = "[bold red]✗ FAILED[/]"
    else:
        came_to = "[magenta]? UNKNOWN[/]"
    who = f"{counted(len(members), 'node')}{ran} together: {some(members, 8)}" if members else "nothing was run"
    took = quantity("s_seconds", decision.duration_seconds)
    yield f"{came_to}  {escape(who)}  [dim]validation {escape(decision.id)}, {took}[/]"
    yield from lines
    yield from rounds_report(validations)


def rounds_report(validations: Sequence[Mapping[str, Any]]) -> Iterable[Table | str]:
    """The rounds of validations as they ran: who was tested with whom, and what came of it."""
    for run in validations:
        history = [*run["history"], *run["done"]]
        if not history:
            continue
        yield ""
        yield f"[dim]collectives over {len(run['members'])} nodes together (validation {escape(run['id'])})[/]"
        table = table_of("round", "nodes", "outcome", "took", "what was seen", wrapped=("nodes", "what was seen"))
        for tested in history[:MOST_TESTS]:
            seen = tested["reasons"][0]["message"] if tested["reasons"] else _bandwidths(tested)
            table.add_row(
                "whole" if not tested["round"] else str(tested["round"]),
                escape(", ".join(tested["members"][:8]) + (" ..." if len(tested["members"]) > 8 else "")),
                OUTCOME_SIGNS.get(tested["outcome"], escape(str(tested["outcome"])))
                + (f" {DRILL}" if tested["injected"] else ""),
                quantity("s_seconds", tested["seconds"]),
                escape(seen),
            )
        yield table
        if len(history) > MOST_TESTS:
            yield f"[dim]and {len(history) - MOST_TESTS} tests more; --json has them all[/]"


def all_reasons(decision: Decision) -> tuple[Reason, ...]:
    """Those of the decision, and those for which nodes are left out."""
    return (*decision.reasons, *(reason for excluded in decision.excluded for reason in excluded.reasons))


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A node that is left out with a line of its own; `reasons` are those that no line above has."""

    node: ExcludedNode
    reasons: Sequence[Reason]


@dataclass(frozen=True, kw_only=True)
class Report:
    """
    What there is to say of a decision beside its verdict.

    `not_verified` has nodes that are only counted, by the code of their first reason. `short` has what is printed
    instead of a message (see `once_each`).
    """

    reasons: Sequence[Reason]
    left_out: Sequence[LeftOut]
    not_verified: Mapping[str, Sequence[str]]
    short: Mapping[str, str]


def report_of(decision: Decision, *, whole: bool = False) -> Report:
    """Each reason once, in the place where it says most. `whole`: each node that is left out has a line of its own."""
    reasons = [one for one in decision.reasons if one.code != OBSERVED]
    above = {(one.node, bare_message(one)) for one in decision.reasons}
    left_out: list[LeftOut] = []
    not_verified: dict[str, list[str]] = {}
    for node in decision.excluded:
        own = [one for one in node.reasons if (one.node, bare_message(one)) not in above]
        if decision.decision is not Verdict.ADMIT and not whole and _is_innocent(node, own):
            code = node.reasons[0].code if node.reasons else "not checked"
            not_verified.setdefault(code, []).append(_called(node))
            continue
        worst = max((SEVERITY[one.status] for one in node.reasons), default=0)
        shown = [one for one in own if SEVERITY[one.status] == worst]
        if shown or whole:
            left_out.append(LeftOut(node=node, reasons=shown))
    in_print = [
        *printed(reasons),
        *(one for each in left_out for one in printed(each.reasons, most=MOST_REASONS_LEFT_OUT)),
    ]
    short = once_each(one.message for one in in_print)
    return Report(reasons=reasons, left_out=left_out, not_verified=not_verified, short=short)


def _is_innocent(node: ExcludedNode, own: Sequence[Reason]) -> bool:
    """
    Whether nothing is held against a node: all its reasons are its own, and none blames the node.

    A warning stops no job, unless the policy says so: then it is among the reasons of the decision.
    """
    return len(own) == len(node.reasons) and all(
        one.blame is not Blame.NODE or one.status is Status.WARN for one in own
    )


def _verdict_lines(decision: Decision) -> Iterable[str]:
    names = ", ".join(_called(node) for node in decision.nodes[:8]) + (" ..." if len(decision.nodes) > 8 else "")
    took = quantity("s_seconds", decision.duration_seconds) if decision.duration_seconds >= 0.001 else "at once"
    included = f"{counted(len(decision.nodes), 'node')}: {names}" if decision.nodes else "no node admitted"
    drill = f"  {DRILL}" if decision.drill else ""
    own = drill if decision.decision is not Verdict.ADMIT else ""
    verdict = VERDICT_SIGNS[decision.decision.value]
    yield f"{verdict}{own}  {escape(included)}  [dim]gate {escape(decision.id)}, {took}[/]"
    if decision.would is not None:
        watched = "observe mode; " if any(one.code == OBSERVED for one in decision.reasons) else ""
        yield f"  [dim]{watched}enforce mode would have said:[/] {VERDICT_SIGNS[decision.would.value]}{drill}"


def _asked_lines(decision: Decision) -> Iterable[str]:
    """What was asked, and which terms were applied."""
    from healthd.core.asked import nodes_asked, terms_of

    if decision.request is not None:
        yield f"  [dim]asked for:[/] {escape(nodes_asked(decision.request))}"
    terms = ", ".join(
        f"{one.name} {one.applied}"
        + ("" if one.asked is None else " (asked for)" if one.asked == one.applied else f" (asked for: {one.asked})")
        for one in terms_of(decision)
    )
    if terms:
        yield f"  [dim]applied:[/] {escape(terms)}"


def _why_left_out(left_out: LeftOut) -> str:
    if left_out.reasons:
        return ""
    return " [dim](see above)[/]" if left_out.node.reasons else " [dim](not checked)[/]"


def _called(node: AdmittedNode | ExcludedNode | WellNode) -> str:
    """Its own name, and the one by which it was asked for."""
    return node.node if node.asked is None else f"{node.node} (asked for as {node.asked})"


def _bandwidths(tested: Mapping[str, Any]) -> str:
    found = tested["busbw_bytes_per_second"]
    return ", ".join(f"{name} {quantity('busbw_bytes_per_second', value)}" for name, value in found.items())
