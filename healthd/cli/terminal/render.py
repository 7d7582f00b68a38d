"""What people see in a terminal: tables and colour, from the same records that programs get as JSON."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from checks.contract import SEVERITY, Finding, Measurement, Status
from checks.limits import quantity
from healthd.cli.terminal.console import Terminal
from healthd.core.evidence import speeds_note
from healthd.core.model import CheckResult, Health, NodeState, Reason

if TYPE_CHECKING:
    from checks.contract import CheckInfo

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
# By the value of a verdict: a passive round of `healthd check` prints without loading what gates are made of.
VERDICT_SIGNS = {
    "admit": "[bold green]✓ ADMIT[/]",
    "hold": "[yellow]… HOLD[/]",
    "reject": "[bold red]✗ REJECT[/]",
}

_REASON_SIGNS = {Status.PASS: "[green]✓[/]", Status.WARN: "[yellow]![/]", Status.FAIL: "[red]✗[/]"}
DRILL = "[bold yellow]DRILL[/]"
"""Stands before what an injected fault made: the word that the eye falls on first."""

MOST_REASONS = 12
MOST_REASONS_LEFT_OUT = 3
"""Lines of reasons: those of a node or a decision, and those of a node that is left out."""

UNFOLDED = 100_000
"""Columns where nobody looks at the width: more than any line has. `COLUMNS` says another."""
_DEVICE = re.compile(r"^[a-z]+:\d+: ")  # a message that begins with its device, as those of workers do
_FOUND_BY = re.compile(r"^(\S+: )?[a-z]\w* [a-z]\S*: ")  # `n1: matmul cpu:0: `, as a reason out of a finding begins
_SENTENCE, _MOST_COMPARED = 20, 100  # characters that make a sentence; lines that a report compares with each other
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?( [kMGTmu](?=[A-Za-z]))?|\b[0-9a-f]{12}\b")


def out() -> Console:
    """Standard output, as wide as the terminal; into a pipe no line is folded, so that grep finds it whole."""
    return _console(stderr=False)


def err() -> Console:
    """Standard error, for progress and errors."""
    return _console(stderr=True)


@contextlib.contextmanager
def busy(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Say what goes on while it does, where somebody looks."""
    console = err()
    with contextlib.nullcontext() if quiet or not console.is_terminal else console.status(what):
        yield


def _console(*, stderr: bool) -> Console:
    console = Terminal(stderr=stderr)
    said = os.environ.get("COLUMNS", "") not in ("", "0")
    return console if console.is_terminal or said else Terminal(stderr=stderr, width=UNFOLDED)


def show(console: Console, parts: Iterable[Table | str]) -> None:
    """
    Print tables and lines of markup.

    On a terminal tables are aligned, and a long line is wrapped under its own beginning. In a pipe or a log each line
    stays one, so that it can be found, and so does each row: its cells, with tabs between them.
    """
    for part in parts:
        if isinstance(part, Table) and not _laid_out(console):
            for row in _plain_rows(console, part):
                console.file.write(f"{row}\n")
            continue
        if isinstance(part, Table) or not console.is_terminal:
            console.print(part, soft_wrap=isinstance(part, str))
            continue
        text = console.render_str(part)
        indent = len(text.plain) - len(text.plain.lstrip()) + 2
        first, *rest = text.wrap(console, max(20, console.width - indent)) or [Text()]
        console.print(first)
        for line in rest:
            console.print(Text(" " * indent) + line)


def _laid_out(console: Console) -> bool:
    """Whether somebody looks at columns: on a terminal, or where `COLUMNS` says how wide it is."""
    return console.is_terminal or console.width < UNFOLDED


def _plain_rows(console: Console, table: Table) -> Iterator[str]:
    """A row a line, with tabs between its cells; an empty first cell, as under the check's name, has the one above."""
    columns = [[console.render_str(str(cell)).plain for cell in column.cells] for column in table.columns]
    if table.show_header:
        yield "\t".join(console.render_str(str(column.header)).plain for column in table.columns)
    first = ""
    for row in zip(*columns, strict=True):
        first = row[0] or first
        yield "\t".join(" ".join(cell.split()) for cell in (first, *row[1:]))


def redraw(console: Console, parts: Iterable[Table | str]) -> None:
    """Show this on a terminal in the place of what is there; of what is higher than the screen only the first lines."""
    with console.capture() as drawn:
        show(console, parts)
    lines = drawn.get().splitlines()
    room = max(2, console.height - 1)  # the cursor stands on a line of its own
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... and {len(lines) - room + 1} lines more"]
    console.clear()
    console.file.write("".join(f"{line}\n" for line in lines))
    console.file.flush()


def table_of(*names: str, wrapped: tuple[str, ...], header: bool = True) -> Table:
    """A table without lines, whose columns are as wide as they need but for those that are wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0), show_header=header)
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name not in wrapped)
    return table


def node_report(state: NodeState) -> Iterable[Table | str]:
    """What `healthd check` and `healthd fleet show` print: a line on the node, its checks, the reasons."""
    note = speeds_note(state.results)
    if note is not None:
        yield f"[yellow]! {escape(note)}[/]"
    yield headline(state)
    table = table_of("check", "status", "target", "finding", wrapped=("target", "finding"))
    ordered = sorted(state.results, key=lambda r: (r.tier.rank, r.check))
    idle = _not_applicable(ordered)
    folded = {check for checks in idle.values() for check in checks}
    for result in ordered:
        for row in result_rows(result) if result.check not in folded else ():
            table.add_row(*row)
    seen = {result.check for result in state.results}
    for spec in state.checks:
        if spec.name not in seen and spec.tier.rank == 0:
            table.add_row(spec.name, SIGNS[Status.UNKNOWN], "node", "has not run yet")
    yield table
    for why, checks in idle.items():
        yield f"{SIGNS[Status.SKIP]}  [dim]{escape(', '.join(checks))}: {escape(why)}[/]"
    if state.reasons or state.quarantine is not None:
        yield ""
    if state.quarantine is not None:
        why = state.quarantine.reason
        said = once_each([why, *(reason.message for reason in printed(state.reasons))])[why]
        yield f"[red]✗[/] quarantined by {escape(state.quarantine.owner)}: {escape(said)}"
    yield from reason_lines(state.reasons)
    if state.results:
        yield counts_line(state.results)


def counts_line(results: Sequence[CheckResult]) -> str:
    """`12 checks: 1 fail, 9 pass, 2 skip`, the worst first."""
    counts = Counter(result.status for result in results)
    shown = ", ".join(f"{counts[status]} {status.value}" for status in reversed(tuple(Status)) if counts[status])
    return f"[dim]{counted(len(results), 'check')}:[/] {shown}"


def _not_applicable(results: Sequence[CheckResult]) -> dict[str, tuple[str, ...]]:
    """Why -> the checks that have nothing to look at here for that reason, where they are several: one line will do."""
    alike: dict[str, list[str]] = {}
    for result in results:
        if len(result.findings) == 1 and result.findings[0].status is Status.SKIP and not result.injected:
            alike.setdefault(result.findings[0].message, []).append(result.check)
    return {why: tuple(checks) for why, checks in alike.items() if len(checks) > 1}


def headline(state: NodeState) -> str:
    """`node n1  ✓ healthy  cpu, 2 devices, 2 cores, 23.4 GB`."""
    parts = []
    if state.inventory is not None:
        inventory = state.inventory
        known = inventory.device_count is not None
        parts.append(inventory.accelerator if known else "devices unknown")
        if known:
            parts.append(counted(inventory.device_count, "device"))
            parts.append(counted(inventory.core_count, "core"))
        if inventory.memory_bytes is not None:
            parts.append(quantity("memory_bytes", inventory.memory_bytes))
    holders = [one.holder for one in state.allocated if one.by != "unseen"]
    if holders:
        parts.append("in use by " + ", ".join(holders))
    parts.extend(one.holder for one in state.allocated if one.by == "unseen")
    if state.quarantine is not None:
        parts.append(f"quarantined by {state.quarantine.owner}")
    if state.maintenance is not None:
        parts.append(f"in maintenance ({state.maintenance})")
    if state.faults:
        parts.append("injected faults: " + ", ".join(state.faults))
    drill = f"  {DRILL}" if state.faults else ""
    return f"[bold]{escape(state.node)}[/]  {HEALTH_SIGNS[state.health]}{drill}  [dim]{escape(', '.join(parts))}[/]"


def result_rows(result: CheckResult) -> Iterable[tuple[str, ...]]:
    """One row a finding, the worst first; what passed alike on many targets is one row, of the lowest."""
    name = (f"{DRILL} " if result.injected else "") + escape(result.check)
    notes = [f"{result.attempts} tries"] if result.attempts > 1 else []
    if result.duration_seconds >= 1:
        notes.append(f"took {quantity('s_seconds', result.duration_seconds)}")
    note = f" [dim]({', '.join(notes)})[/]" if notes else ""
    for targets, finding, alike in _folded(result.findings):
        limit = "; ".join(dict.fromkeys(limit_text(m) for m in finding.measurements))
        said = escape(finding.message)
        if alike > 1 and finding.status is Status.PASS:
            said += f" [dim]on {escape(finding.target)}, the lowest[/]"
        elif alike > 1:
            said = escape(_DEVICE.sub("", finding.message))
        yield (name, SIGNS[finding.status], escape(targets), f"{said} [dim]{escape(limit)}[/]{note}")
        name = note = ""
    if name:
        yield (name, SIGNS[result.status], "node", escape(result.error or "yielded nothing") + note)


def _folded(findings: Sequence[Finding]) -> Iterable[tuple[str, Finding, int]]:
    """
    Targets, the finding to show, and how many different ones it stands for.

    Findings with the same words are told once, also where they begin with the name of their device; those that passed
    and differ in numbers alone by the one that measured least, because 32 cores would be 64 rows.
    """
    groups: dict[tuple[Status, str, int], list[Finding]] = {}
    before: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        passed = finding.status is Status.PASS and not finding.target.startswith("path:")
        skeleton = _NUMBER.sub("#", finding.message) if passed else _DEVICE.sub("", finding.message)
        # Several findings on one target are several things that were measured, such as sizes.
        place = (skeleton, finding.target) if passed else (skeleton, "")
        before[place] += 1
        groups.setdefault((finding.status, skeleton, before[place] if passed else 0), []).append(finding)
    for key in sorted(groups, key=lambda k: -SEVERITY[k[0]]):
        alike = groups[key]
        least = min(alike, key=lambda f: (f.measurements[0].value or 0.0) if f.measurements else 0.0)
        yield _in_short(finding.target for finding in alike), least, len({finding.message for finding in alike})


def _in_short(targets: Iterable[str]) -> str:
    """`cpu:0, cpu:1`; where they are many `rank:0-31`, or `rank:0 ... rank:31 (30)` if some between are not meant."""
    names = sorted(dict.fromkeys(targets), key=lambda t: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", t)])
    if len(names) <= 3:
        return ", ".join(names)
    kind, _, first = names[0].rpartition(":")
    if first.isdigit() and names == [f"{kind}:{int(first) + n}" for n in range(len(names))]:
        return f"{kind}:{first}-{int(first) + len(names) - 1}"
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def limit_text(measurement: Measurement) -> str:
    """`[>= 10 GFLOP/s, config]`, or `[no limit]`."""
    bounds = []
    if measurement.lower is not None:
        bounds.append(f">= {quantity(measurement.name, measurement.lower)}")
    if measurement.upper is not None:
        bounds.append(f"<= {quantity(measurement.name, measurement.upper)}")
    return f"[{' and '.join(bounds)}, {measurement.origin}]" if bounds else "[no limit]"


def reason_lines(
    reasons: Sequence[Reason], *, most: int = MOST_REASONS, short: Mapping[str, str] = MappingProxyType({})
) -> Iterable[str]:
    """
    One line a reason, worst first, with what to do about it; what many checks or targets say alike is one line.

    `short` has what stands in the place of a message (see `once_each`). In a drill there is nothing to do: DRILL stands
    in front, and no advice behind.
    """
    groups = _alike(reasons)
    for alike in groups[:most]:
        reason = replace(alike[0], message=short.get(alike[0].message, alike[0].message))
        # A sentence that begins with the node's name needs it only once.
        where = f"{reason.node}: " if reason.node and not reason.message.startswith(f"{reason.node} ") else ""
        advised = reason.action.value != "none" and not reason.injected
        action = f" [dim]→ {reason.action.value.replace('_', ' ')}[/]" if advised else ""
        sign = _REASON_SIGNS.get(reason.status, "[magenta]?[/]")
        said = bare_message(reason)
        if len(alike) > 1 and reason.check is not None:
            checks = ", ".join(dict.fromkeys(one.check or "" for one in alike))
            said = f"{checks} {_in_short(one.target or 'node' for one in alike)}: {_said(reason)}"
        drill = f"{DRILL} " if reason.injected else ""
        yield f"{sign} {drill}{escape(where)}[bold]{escape(reason.code)}[/] {escape(said)}{action}"
    if len(groups) > most:
        left = sum(len(alike) for alike in groups[most:])
        yield f"[dim]  and {left} more (--json shows all)[/]"


def printed(reasons: Sequence[Reason], *, most: int = MOST_REASONS) -> tuple[Reason, ...]:
    """Those of the reasons whose messages `reason_lines` prints."""
    return tuple(alike[0] for alike in _alike(reasons)[:most])


def _alike(reasons: Sequence[Reason]) -> tuple[Sequence[Reason], ...]:
    """The reasons in groups, each of which is one line."""
    groups: dict[tuple[Any, ...], list[Reason]] = {}
    for reason in reasons:
        whole = reason.check is None  # a sentence on the node, not on what one check found
        key = (reason.node, whole, reason.code, reason.status, reason.action, _said(reason))
        groups.setdefault(key, []).append(reason)
    return tuple(groups.values())


def _said(reason: Reason) -> str:
    """What a reason says without node, check, target and device in front."""
    return _DEVICE.sub("", bare_message(reason).removeprefix(_address(reason)))


def once_each(messages: Iterable[str]) -> dict[str, str]:
    """
    Each of these sentences, which have a line of their own, without what another line says: `see above`, `see below`.

    Give it those that are printed and no others: what is nowhere else must not be sought there.
    A quarantine by a rule holds the finding that it is for; a gate that has expired holds what it waited for.
    """
    lines = list(dict.fromkeys(messages))[:_MOST_COMPARED]
    shown = {}
    for here, text in enumerate(lines):
        for there, other in enumerate(lines):
            said = _sentence(other)
            if there != here and len(said) >= _SENTENCE and said in text and said != _sentence(text):
                text = text.replace(said, "see above" if there < here else "see below")
        shown[lines[here]] = re.sub(r"(see \w+)(?:; \1)+", r"\1", text)
    return shown


def _sentence(message: str) -> str:
    """What a message says, without check, target, device and marks."""
    return _DEVICE.sub("", _FOUND_BY.sub("", message)).removesuffix(" (injected)")


def bare_message(reason: Reason) -> str:
    """The message without the node's name in front, which the line says already."""
    return reason.message.removeprefix(f"{reason.node}: ")


def _address(reason: Reason) -> str:
    """`matmul cpu:1: `, as the message of a reason out of a finding begins."""
    return f"{reason.check} {reason.target}: "


def counted(value: int | None, noun: str) -> str:
    """`1 device`, `16 devices`, `unknown devices`."""
    return f"{'unknown' if value is None else value} {noun}" + ("" if value == 1 else "s")


def print_checks(infos: Iterable[CheckInfo]) -> None:
    """`healthd checks`: what there is, lightest tier first."""
    table = table_of("check", "tier", "runs on", "limit", "from", "what it says", wrapped=("what it says",))
    for info in sorted(infos, key=lambda i: (i.tier.rank, i.name)):
        first = next((line.strip() for line in info.doc.splitlines() if line.strip()), "")
        table.add_row(info.name, info.tier.value, info.scope.value, f"{info.timeout_seconds:g} s", info.origin, first)
    show(out(), [table])


def print_items(items: Sequence[tuple[str, str, str, str]]) -> None:
    """`healthd doctor`: what was looked at, how it is, and the remedy."""
    signs = {"ok": "[green]✓[/]", "missing": "[red]✗[/]", "note": "[yellow]![/]"}
    table = table_of("state", "name", "found", wrapped=("found",), header=False)
    for name, state, text, remedy in items:
        found = escape(text) + (f"\n[dim]→ {escape(remedy)}[/]" if remedy else "")
        table.add_row(signs[state], name, found)
    console = out()
    show(console, [table])
    missing = sum(state == "missing" for _, state, _, _ in items)
    console.print("\nNothing is missing." if not missing else f"\n{missing} missing.")
