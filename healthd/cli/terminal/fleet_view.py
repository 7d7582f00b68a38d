"""What people see of a fleet, of one of its nodes, of decisions and of validations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.markup import escape
from rich.table import Table

from checks.contract import SEVERITY, Blame, Status
from checks.limits import quantity
from checks.printable import some
from healthd.cli.terminal.render import (
    DRILL,
    HEALTH_SIGNS,
    VERDICT_SIGNS,
    bare_message,
    counted,
    node_report,
    once_each,
    out,
    reason_lines,
    show,
    table_of,
)
from healthd.core import wire
from healthd.core.admission import nodes_asked, terms_of
from healthd.core.model import AdmittedNode, Decision, ExcludedNode, Health, NodeState, Reason, Verdict, WellNode
from healthd.core.text import ago, moment

OUTCOME_SIGNS = {
    "pass": "[green]✓ pass[/]",
    "slow": "[yellow]! slow[/]",
    "unknown": "[magenta]? unknown[/]",
    "fail": "[bold red]✗ fail[/]",
}
MOST_TESTS = 40
OBSERVED = "Observed"
"""The reason of a gate that only watched: what it says is said with the verdict already."""

# What `fleet status` counts beside health: a node that is healthy by its own checks may be one of them.
ASIDE = {"quarantined": "quarantined", "accused": "accused by validations"}


def decision_report(decision: Decision, *, whole: bool = False) -> Iterable[str]:
    """
    What `healthd gate` prints of a decision; `whole`, as `healthd fleet explain` does, with what was asked and applied,
    and why each node is left out.
    """
    decision = _each_sentence_once(decision)
    names = ", ".join(_called(node) for node in decision.nodes[:8]) + (" ..." if len(decision.nodes) > 8 else "")
    took = quantity("s_seconds", decision.duration_seconds) if decision.duration_seconds >= 0.001 else "at once"
    included = f"{counted(len(decision.nodes), 'node')}: {names}" if decision.nodes else "no node"
    drill = f"  {DRILL}" if decision.drill else ""
    own = drill if decision.decision is not Verdict.ADMIT else ""
    yield f"{VERDICT_SIGNS[decision.decision]}{own}  {escape(included)}  [dim]gate {escape(decision.id)}, {took}[/]"
    if decision.would is not None:
        watched = "observe mode; " if any(one.code == OBSERVED for one in decision.reasons) else ""
        yield f"  [dim]{watched}enforce mode would have said:[/] {VERDICT_SIGNS[decision.would]}{drill}"
    if whole:
        yield from _asked_lines(decision)
    for line in reason_lines([one for one in decision.reasons if one.code != OBSERVED]):
        yield f"  {line}"
    told = {(reason.node, bare_message(reason)) for reason in decision.reasons}
    unjudged: dict[str, list[str]] = {}
    for excluded in decision.excluded:
        # A warning stops no job, unless the policy says so: then it is among the reasons above.
        innocent = all(
            (r.blame is not Blame.NODE or r.status is Status.WARN) and (r.node, bare_message(r)) not in told
            for r in excluded.reasons
        )
        if decision.decision is not Verdict.ADMIT and innocent and not whole:
            code = excluded.reasons[0].code if excluded.reasons else "not looked at"
            unjudged.setdefault(code, []).append(_called(excluded))
            continue
        worst = max((SEVERITY[reason.status] for reason in excluded.reasons), default=0)
        shown = [
            reason
            for reason in excluded.reasons
            if SEVERITY[reason.status] == worst and (reason.node, bare_message(reason)) not in told
        ]
        if shown or whole:
            why = "" if shown else " [dim](as said above)[/]" if excluded.reasons else " [dim](not looked at)[/]"
            yield f"  [dim]left out:[/] [bold]{escape(_called(excluded))}[/]{why}"
            for line in reason_lines(shown, most=3):
                yield f"    {line}"
    if unjudged:
        named = "; ".join(f"{some(names, 8)} ({code})" for code, names in unjudged.items())
        yield f"  [dim]not known to be well: {escape(named)}[/]"
    if decision.well:
        yield f"  [dim]well:[/] {escape(some([_called(node) for node in decision.well], 64 if whole else 8))}"


def _asked_lines(decision: Decision) -> Iterable[str]:
    """What was asked, and which terms were applied."""
    if decision.request is not None:
        yield f"  [dim]asked for:[/] {escape(nodes_asked(decision.request))}"
    terms = ", ".join(
        f"{one.name} {one.applied}"
        + ("" if one.asked is None else " (asked for)" if one.asked == one.applied else f" (asked for: {one.asked})")
        for one in terms_of(decision)
    )
    if terms:
        yield f"  [dim]applied:[/] {escape(terms)}"


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


def all_reasons(decision: Decision) -> tuple[Reason, ...]:
    """Those of the decision, and those for which nodes are left out."""
    return (*decision.reasons, *(reason for excluded in decision.excluded for reason in excluded.reasons))


def _each_sentence_once(decision: Decision) -> Decision:
    shown = once_each(reason.message for reason in all_reasons(decision))

    def short(reasons: Sequence[Reason]) -> tuple[Reason, ...]:
        return tuple(replace(reason, message=shown.get(reason.message, reason.message)) for reason in reasons)

    excluded = tuple(replace(one, reasons=short(one.reasons)) for one in decision.excluded)
    return replace(decision, reasons=short(decision.reasons), excluded=excluded)


def _called(node: AdmittedNode | ExcludedNode | WellNode) -> str:
    """Its own name, and the one by which it was asked for."""
    return node.node if node.asked is None else f"{node.node} (asked for as {node.asked})"


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


def _bandwidths(tested: Mapping[str, Any]) -> str:
    found = tested["busbw_bytes_per_second"]
    return ", ".join(f"{name} {quantity('busbw_bytes_per_second', value)}" for name, value in found.items())


def fleet_report(summary: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> Iterable[Table | str]:
    """`healthd fleet status`: the numbers, then every node, the worst first."""
    counts = ", ".join(f"{count} {health}" for health, count in summary["health"].items() if count) or "no node yet"
    holding = counted(summary["gates_holding"], "gate")
    aside = [f"{summary[name]} {said}" for name, said in ASIDE.items() if summary.get(name)]
    yield f"[bold]{counted(summary['nodes'], 'node')}[/]: {'; '.join([counts, *aside, f'{holding} holding'])}"
    if summary["recovering"]:
        yield f"[yellow]! recovering:[/] {escape(str(summary['recovering']))}"
    for breaker in summary.get("breakers", {}).values():
        yield f"[bold red]! breaker open:[/] {escape(str(breaker['reason']))}"
    for override in summary["overrides"]:
        yield f"[yellow]! override:[/] job {escape(override['job'])} is admitted whatever its nodes say"
    if not nodes:
        return
    table = table_of("node", "health", "heard", "in use by", "why", wrapped=("in use by", "why"))
    order = list(HEALTH_SIGNS)
    for node in sorted(nodes, key=lambda n: (-order.index(Health(n["health"])), n["node"])):
        holders = ", ".join(claim["holder"] for claim in node["allocated"])
        heard = ago(node["heard_seconds"])
        sign = HEALTH_SIGNS[Health(node["health"])] + (f" {DRILL}" if _is_drill(node) else "")
        table.add_row(escape(node["node"]), sign, heard, escape(holders), escape(_why(node)))
    yield table


def _why(node: Mapping[str, Any]) -> str:
    """What there is to know of a node first; a node that is healthy by its own checks may be accused all the same."""
    if node["quarantine"]:
        return f"quarantined by {node['quarantine']['owner']}: {node['quarantine']['reason']}"
    if node["reasons"]:
        return str(node["reasons"][0]["message"])
    if accused := node.get("accused"):
        return f"{accused['code']} in gate {accused['gate']} of job {accused['job']}: {accused['message']}"
    return f"out of the scheduler's way: {node['removed']}" if node.get("removed") else ""


def _is_drill(node: Mapping[str, Any]) -> bool:
    """Whether what `_why` says was made by an injected fault."""
    told = [node["quarantine"], *node["reasons"][:1], node.get("accused")]
    return next((bool(one["injected"]) for one in told if one), False)


def print_node(record: Mapping[str, Any]) -> None:
    """`healthd fleet show`: the node's own report as the aggregator has it, and what it says of it."""
    console = out()
    if record["state"] is None:
        console.print(
            f"[bold]{escape(record['node'])}[/]  {HEALTH_SIGNS[Health(record['health'])]}  nothing reported yet"
        )
    else:
        show(console, node_report(wire.convert(record["state"], NodeState, what="node")))
    if record.get("accused") and not record["quarantine"]:
        console.print(f"[yellow]! accused:[/] {escape(_why({**record, 'reasons': ()}))}")
    heard = record["heard_seconds"]
    console.print(f"[dim]last heard: {ago(heard)}[/]")
    for line in event_lines(record["events"][:5]):
        console.print(line)


def event_lines(events: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """What happened on a node, a line each."""
    for event in events:
        said = f"[dim]{moment(event['at'])}[/] {escape(event['kind'])} {escape(event['message'])}"
        yield said


def history_report(events: Iterable[Mapping[str, Any]]) -> Iterable[Table | str]:
    """What `healthd fleet history` prints: newest first."""
    table = table_of("when", "what", "more", wrapped=("more",))
    for event in events:
        table.add_row(moment(event["at"]), escape(event["kind"]), escape(event["message"]))
    yield table if table.row_count else "nothing has happened there that is remembered"
