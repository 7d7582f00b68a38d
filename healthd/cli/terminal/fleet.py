"""What people see of a fleet and of its nodes in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from healthd.cli.terminal.render import DRILL, HEALTH_SIGNS, counted, node_report, out, show, table_of
from healthd.core import wire
from healthd.core.model import Health, NodeState
from healthd.core.text import ago, moment

# What `fleet status` counts beside health: a node that is healthy by its own checks may be one of them.
ASIDE = {"quarantined": "quarantined", "accused": "accused by validations"}


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


def print_node(record: Mapping[str, Any]) -> None:
    """`healthd fleet show`: the node's own report as the aggregator has it, and what it says of it."""
    console = out()
    if record["state"] is None:
        console.print(
            f"[bold]{escape(record['node'])}[/]  {HEALTH_SIGNS[Health(record['health'])]}  nothing reported yet"
        )
    else:
        show(console, node_report(wire.convert(record["state"], NodeState, what="node")))
    told = {reason["code"] for reason in record["reasons"]}
    if (accused := record.get("accused")) and not record["quarantine"] and accused["code"] not in told:
        console.print(f"[yellow]! accused:[/] {escape(_why({**record, 'reasons': ()}))}")
    heard = record["heard_seconds"]
    console.print(f"[dim]last report: {ago(heard)}[/]")
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


def _why(node: Mapping[str, Any]) -> str:
    """What there is to know of a node first; a node that is healthy by its own checks may be accused all the same."""
    if node["quarantine"]:
        return f"quarantined by {node['quarantine']['owner']}: {node['quarantine']['reason']}"
    if node.get("maintenance"):
        return f"in maintenance: {node['maintenance']}"
    accused = node.get("accused")
    if node["reasons"] and not (accused and node["reasons"][0]["code"] == accused["code"]):
        return str(node["reasons"][0]["message"])
    if accused:
        return f"{accused['code']} in gate {accused['gate']} of job {accused['job']}: {accused['message']}"
    return f"out of the scheduler's way: {node['removed']}" if node.get("removed") else ""


def _is_drill(node: Mapping[str, Any]) -> bool:
    """Whether what `_why` says was made by an injected fault."""
    told = [node["quarantine"], *node["reasons"][:1], node.get("accused")]
    return next((bool(one["injected"]) for one in told if one), False)
