"""What people see in a terminal: tables and colour, from the same records that programs get as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from checks.contract import SEVERITY, Blame, Finding, Measurement, Status
from checks.limits import quantity
from healthd.model import CheckResult, Decision, Health, NodeState, Reason, Verdict

if TYPE_CHECKING:
    from healthd.runner import CheckInfo

SIGNS = {
    Status.PASS: "[green]✓ pass[/]",
    Status.WARN: "[yellow]! warn[/]",
    Status.UNKNOWN: "[magenta]? unknown[/]",
    Status.FAIL: "[bold red]✗ fail[/]",
    Status.SKIP: "[dim]- skip[/]",
}
HEALTH_SIGNS = {
    Health.HEALTHY: "[green]✓ healthy[/]",
    Health.DEGRADED: "[yellow]! degraded[/]",
    Health.UNKNOWN: "[magenta]? unknown[/]",
    Health.UNHEALTHY: "[bold red]✗ unhealthy[/]",
}
VERDICT_SIGNS = {
    Verdict.ADMIT: "[bold green]✓ ADMIT[/]",
    Verdict.HOLD: "[yellow]… HOLD[/]",
    Verdict.REJECT: "[bold red]✗ REJECT[/]",
}


def out() -> Console:
    """Standard output, as wide as the terminal (100 columns where there is none), colour only on a terminal."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def err() -> Console:
    """Standard error, for progress and errors."""
    return Console(stderr=True, highlight=False)


def node_report(state: NodeState) -> Iterable[Table | str]:
    """What `healthd check` and `healthd fleet show` print: a line on the node, its checks, the reasons."""
    yield headline(state)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("check", "status", "target", "finding", "limit", "took"):
        table.add_column(name, overflow="fold", no_wrap=name in ("check", "status", "took"))
    for result in sorted(state.results, key=lambda r: (r.tier.rank, r.check)):
        for row in result_rows(result):
            table.add_row(*row)
    for spec in state.checks:
        if spec.name not in {result.check for result in state.results} and spec.tier.rank == 0:
            table.add_row(spec.name, SIGNS[Status.UNKNOWN], "node", "has not run yet", "", "")
    yield table
    if state.reasons:
        yield ""
        yield from reason_lines(state.reasons)


def headline(state: NodeState) -> str:
    """`node n1  ✓ healthy  cpu, 2 devices, 2 cores, 23.4 GB`."""
    parts = []
    if state.inventory is not None:
        inventory = state.inventory
        parts.append(inventory.accelerator)
        parts.append(f"{_count(inventory.device_count)} devices")
        parts.append(f"{_count(inventory.core_count)} cores")
        parts.append(quantity("memory_bytes", inventory.memory_bytes))
    if state.allocated:
        parts.append("in use by " + ", ".join(a.holder for a in state.allocated))
    if state.quarantine is not None:
        parts.append(f"quarantined by {state.quarantine.owner}: {state.quarantine.reason}")
    if state.faults:
        parts.append("injected faults: " + ", ".join(state.faults))
    return f"[bold]{escape(state.node)}[/]  {HEALTH_SIGNS[state.health]}  [dim]{escape(', '.join(parts))}[/]"


def result_rows(result: CheckResult) -> Iterable[tuple[str, ...]]:
    """One row a finding; what passed with the same words on every target is folded into one row."""
    took = quantity("seconds_seconds", result.duration_seconds)
    if result.attempts > 1:
        took += f" ({result.attempts} tries)"
    first = True
    for targets, finding in _folded(result.findings):
        name, time = (result.check, took) if first else ("", "")
        if first and result.injected:
            name += " [yellow](injected)[/]"
        limit = "; ".join(dict.fromkeys(limit_text(m) for m in finding.measurements))
        yield (name, SIGNS[finding.status], escape(targets), escape(finding.message), f"[dim]{escape(limit)}[/]", time)
        first = False
    if first:
        yield (result.check, SIGNS[result.status], "node", escape(result.error or "yielded nothing"), "", took)


def _folded(findings: Sequence[Finding]) -> Iterable[tuple[str, Finding]]:
    """Passing findings that differ in their target alone are told once."""
    seen: dict[tuple[Status, str], list[str]] = {}
    kept: dict[tuple[Status, str], Finding] = {}
    for finding in findings:
        key = (finding.status, finding.message)
        if finding.target not in seen.setdefault(key, []):
            seen[key].append(finding.target)
        kept.setdefault(key, finding)
    for key in sorted(kept, key=lambda k: -SEVERITY[k[0]]):
        yield ", ".join(seen[key]), kept[key]


def limit_text(measurement: Measurement) -> str:
    """`>= 10 GFLOP/s (config)`; `unjudged` where nobody set one."""
    bounds = []
    if measurement.lower is not None:
        bounds.append(f">= {quantity(measurement.name, measurement.lower)}")
    if measurement.upper is not None:
        bounds.append(f"<= {quantity(measurement.name, measurement.upper)}")
    return f"{' and '.join(bounds)} ({measurement.origin})" if bounds else "unjudged"


def reason_lines(reasons: Sequence[Reason], *, most: int = 12) -> Iterable[str]:
    """One line a reason, worst first, with what to do about it."""
    for reason in reasons[:most]:
        where = f"{reason.node}: " if reason.node else ""
        action = "" if reason.action.value == "none" else f" [dim]→ {reason.action.value.replace('_', ' ')}[/]"
        sign = {Status.FAIL: "[red]✗[/]", Status.WARN: "[yellow]![/]"}.get(reason.status, "[magenta]?[/]")
        yield f"{sign} {escape(where)}[bold]{escape(reason.code)}[/] {escape(_bare(reason))}{action}"
    if len(reasons) > most:
        yield f"[dim]  and {len(reasons) - most} more (--json shows all)[/]"


def decision_report(decision: Decision) -> Iterable[str]:
    """What `healthd gate` and `healthd fleet explain` print."""
    names = ", ".join(node.node for node in decision.nodes[:8]) + (" ..." if len(decision.nodes) > 8 else "")
    took = quantity("s_seconds", decision.duration_seconds)
    included = f"{len(decision.nodes)} nodes: {names}" if decision.nodes else "no node"
    yield f"{VERDICT_SIGNS[decision.decision]}  {escape(included)}  [dim]gate {escape(decision.id)}, {took}[/]"
    if decision.would is not None:
        yield f"  [dim]enforce mode would have said:[/] {VERDICT_SIGNS[decision.would]}"
    for line in reason_lines(decision.reasons):
        yield f"  {line}"
    told = {(reason.node, _bare(reason)) for reason in decision.reasons}
    unjudged = []
    for excluded in decision.excluded:
        if decision.decision is not Verdict.ADMIT and all(r.blame is not Blame.NODE for r in excluded.reasons):
            unjudged.append(excluded.node)
            continue
        worst = max((SEVERITY[reason.status] for reason in excluded.reasons), default=0)
        shown = [
            reason
            for reason in excluded.reasons
            if SEVERITY[reason.status] == worst and (reason.node, _bare(reason)) not in told
        ]
        if shown:
            yield f"  [dim]left out:[/] [bold]{escape(excluded.node)}[/]"
            for line in reason_lines(shown, most=3):
                yield f"    {line}"
    if unjudged and decision.reasons:
        names = ", ".join(unjudged[:8]) + (f" and {len(unjudged) - 8} more" if len(unjudged) > 8 else "")
        yield f"  [dim]no fault found or not looked at to the end: {escape(names)}[/]"


def _bare(reason: Reason) -> str:
    """The message without the node's name in front, which the line says already."""
    return reason.message.removeprefix(f"{reason.node}: ")


def age_text(seconds: float | None) -> str:
    """`never`, `12 s`, `5 min`, `3.1 h`, `2 d`."""
    if seconds is None:
        return "never"
    for bound, scale, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < bound:
            return f"{seconds / scale:.0f} {name}"
    return f"{seconds / 86400:.1f} d"


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def print_fleet(summary: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> None:
    """`healthd fleet status`: the numbers, then every node, the worst first."""
    console = out()
    counts = ", ".join(f"{count} {health}" for health, count in summary["health"].items() if count) or "no node yet"
    console.print(f"[bold]{summary['nodes']} nodes[/]: {counts}; {summary['gates_holding']} gates holding")
    if summary["recovering"]:
        console.print(f"[yellow]! recovering:[/] {escape(str(summary['recovering']))}")
    for override in summary["overrides"]:
        console.print(f"[yellow]! override:[/] job {escape(override['job'])} is admitted whatever its nodes say")
    if not nodes:
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("node", "health", "heard", "in use by", "why"):
        table.add_column(name, overflow="fold", no_wrap=name in ("node", "health", "heard"))
    order = list(HEALTH_SIGNS)
    for node in sorted(nodes, key=lambda n: (-order.index(Health(n["health"])), n["node"])):
        holders = ", ".join(claim["holder"] for claim in node["allocated"])
        why = node["reasons"][0]["message"] if node["reasons"] else ""
        if node["quarantine"]:
            why = f"quarantined by {node['quarantine']['owner']}: {node['quarantine']['reason']}"
        heard = "never" if node["heard_seconds"] is None else f"{age_text(node['heard_seconds'])} ago"
        table.add_row(node["node"], HEALTH_SIGNS[Health(node["health"])], heard, escape(holders), escape(why))
    console.print(table)


def print_node(record: Mapping[str, Any]) -> None:
    """`healthd fleet show`: the node's own report as the aggregator has it, and what it says of it."""
    from healthd import wire

    console = out()
    if record["state"] is None:
        console.print(
            f"[bold]{escape(record['node'])}[/]  {HEALTH_SIGNS[Health(record['health'])]}  nothing reported yet"
        )
    else:
        for part in node_report(wire.convert(record["state"], NodeState, what="node")):
            console.print(part)
    heard = record["heard_seconds"]
    console.print(f"[dim]last heard: {'never' if heard is None else age_text(heard) + ' ago'}[/]")
    for event in record["events"][:10]:
        when = datetime.datetime.fromtimestamp(event["at"], datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        console.print(f"[dim]{when}Z[/] {escape(event['kind'])} {escape(event['message'])}")


def print_checks(infos: Iterable[CheckInfo]) -> None:
    """`healthd checks`: what there is, lightest tier first."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("check", "tier", "runs on", "limit", "from", "what it says"):
        table.add_column(name, overflow="fold", no_wrap=name != "what it says")
    for info in sorted(infos, key=lambda i: (i.tier.rank, i.name)):
        first = next((line.strip() for line in info.doc.splitlines() if line.strip()), "")
        table.add_row(info.name, info.tier.value, info.scope.value, f"{info.timeout_seconds:g} s", info.origin, first)
    out().print(table)


def print_items(items: Sequence[tuple[str, str, str, str]]) -> None:
    """`healthd doctor`: what was looked at, how it is, and the remedy."""
    signs = {"ok": "[green]✓[/]", "missing": "[red]✗[/]", "note": "[yellow]![/]"}
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, state, text, remedy in items:
        found = escape(text) + (f"\n[dim]→ {escape(remedy)}[/]" if remedy else "")
        table.add_row(signs[state], name, found)
    console = out()
    console.print(table)
    missing = sum(state == "missing" for _, state, _, _ in items)
    console.print("\nNothing is missing." if not missing else f"\n{missing} missing.")
