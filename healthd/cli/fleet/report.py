"""What `healthd fleet report` shows: how right the gate was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from healthd.cli.terminal.render import table_of
from healthd.core.text import counted, moment, span

MOST_ROWS = 12

# Member of the report -> how it is called, and what it is a share of.
SHARES = (
    ("success", "successful", "jobs that ended as ok, failed or infra"),
    ("success_without_infra", "successful, without infra", "jobs that ended as ok or failed"),
    ("false_alarms", "false alarms", "successful jobs, observed or overridden, with a failing check"),
    ("false_alarms_observed", "  in observe mode", "successful jobs in observe mode"),
    (
        "false_alarms_overridden",
        "  by override",
        "successful jobs that an operator admitted (chosen because they failed)",
    ),
    ("misses", "misses", "jobs stopped by infra although all evidence had passed"),
    ("infra_after_clean", "stopped nevertheless", "jobs admitted with all evidence passing that infra stopped"),
    ("stopped_ok", "enforce would have stopped, ok", "successful jobs in observe mode"),
    ("stopped_infra", "enforce would have stopped, infra", "jobs in observe mode that infra stopped"),
)


def report_lines(report: Mapping[str, Any]) -> Iterable[Table | str]:
    """The report as an aggregator gives it, as tables and lines; what has no number is left out."""
    yield _head(report)
    yield from _exit(report["exit"])
    yield from _ungated(report.get("ungated"))
    shares = _shares(report)
    if shares is not None:
        yield ""
        yield shares
    if report["checks"]:
        yield ""
        yield _checks(report["checks"][:MOST_ROWS])
    if report["decisions"]:
        yield ""
        yield _decisions(report["decisions"], {wait["way"]: wait for wait in report["waits"]})
        yield f"[dim]gates cost {span(report['device_seconds'])} of devices, " + (
            f"{span(report['device_seconds_per_gate'])} each[/]"
        )
    if report["nodes"]:
        yield ""
        yield _nodes(report["nodes"])


def _head(report: Mapping[str, Any]) -> str:
    ended = ", ".join(f"{count} {word}" for word, count in report["ended"].items())
    since = report["since"]
    if since is None:
        return f"[bold]no gate was decided in the last {report['days']:g} days[/]"
    told = f"{counted(report['jobs'], 'job')} reported {'its' if report['jobs'] == 1 else 'their'} end"
    text = f"[bold]{told}[/]" + (f": {escape(ended)}" if ended else "")
    untold = f"; {report['untold']} admitted jobs have not reported" if report["untold"] else ""
    return f"{text}{untold}  [dim]last {report['days']:g} days, the oldest gate of {moment(since)}[/]"


def _exit(found: Mapping[str, Any]) -> Iterable[str]:
    sign = (
        "[green]✓ observe mode has run long enough: switch to enforce[/]"
        if found["ready"]
        else "[yellow]… stay in observe[/]"
    )
    yield f"[bold]observe → enforce:[/] {sign}"
    for why in found["why"]:
        yield f"  {escape(why)}"


def _ungated(found: Mapping[str, Any] | None) -> Iterable[str]:
    """Nothing where every job of Slurm had a gate."""
    if found is None or not found["jobs"]:
        return
    jobs = f"{found['jobs']} job{'' if found['jobs'] == 1 else 's'} of Slurm"
    examples = ", ".join(map(str, found["examples"]))
    yield f"[red]✗ {jobs} started without a gate since {moment(found['since'])}[/], the newest: {escape(examples)}"
    yield "  PrologSlurmctld did not run or could not ask: run 'healthd slurm doctor' as SlurmUser on the controller"


def _shares(report: Mapping[str, Any]) -> Table | None:
    table = table_of("share", "of 100", "95 % interval", "count", "of", wrapped=("of",))
    for member, name, of in SHARES:
        found = report[member]
        if found is not None:
            table.add_row(name, *_share(found), f"{found['count']} of {found['of']}", escape(of))
    return table if table.row_count else None


def _share(found: Mapping[str, Any]) -> tuple[str, str]:
    return f"{100 * found['ratio']:.1f} %", f"{100 * found['low']:.1f} to {100 * found['high']:.1f}"


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    ratio, interval = _share(found)
    return f"{found['count']} of {found['of']}: {ratio} ({interval})"


def _checks(checks: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of("failed check", "before ok", "before infra", wrapped=())
    for one in checks:
        table.add_row(escape(one["check"]), _cell(one["before_ok"]), _cell(one["before_infra"]))
    return table


def _decisions(rows: Sequence[Mapping[str, Any]], waits: Mapping[str, Mapping[str, Any]]) -> Table:
    """By what came of the gate and what enforce says; the wait is of all gates of that kind."""
    table = table_of("gates", "enforce says", "count", "device time", "wait p50", "wait p95", wrapped=())
    told: set[str] = set()
    for row in rows:
        wait = None if row["way"] in told else waits.get(row["way"])
        told.add(row["way"])
        times = ("", "") if wait is None else (span(wait["p50_seconds"]), span(wait["p95_seconds"]))
        table.add_row(row["way"], row["would"], str(row["count"]), span(row["device_seconds"]), *times)
    return table


def _nodes(nodes: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of("excluded node", "gates", "for", wrapped=("for",))
    for one in nodes:
        reasons = ", ".join(f"{code} {count}" for code, count in list(one["reasons"].items())[:6])
        table.add_row(escape(one["node"]), str(one["gates"]), escape(reasons))
    return table
