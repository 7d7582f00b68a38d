"""`healthd fleet` and `healthd override`: look at the fleet, keep nodes out, let them in, explain a gate."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from checks.words import Status
from healthd.cli.completion import complete_gates, complete_jobs, complete_nodes
from healthd.cli.fleet import line
from healthd.cli.fleet.line import (
    aggregator_of,
    done,
    duration_of,
    fleet_options,
    own_name,
    print_json,
    segment,
)
from healthd.cli.fleet.repairs import repairs
from healthd.cli.hooks.gate import release_lease
from healthd.cli.settings.options import Command, Group
from healthd.core.backoff import Backoff
from healthd.core.config import nearest
from healthd.core.errors import ConfigError, UnreachableError
from healthd.core.model import Health
from healthd.core.text import counted, moment

if TYPE_CHECKING:
    from rich.table import Table

    from healthd.core.http.client import Aggregator


# `healthd fleet rekey` and `healthd fleet forget`: which key a node's name belongs to.


@click.command(cls=Command, short_help="Accept the key of a replaced machine.")
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def rekey(node: str, as_json: bool, **options: Any) -> int:
    """
    Accept the newest key presented for NODE instead of its present one, because its machine was replaced.

    Make sure that the old machine is off. If the other machine is the intruder, stop it and run `forget` NODE.
    """
    with aggregator_of(options) as aggregator:
        aggregator.call("POST", f"/v1/nodes/{segment(node)}/rekey")
    done(as_json, f"{node}: the newest key under this name is accepted")
    return 0


@click.command(cls=Command, short_help="Remove a node that is gone: its name, key and quarantine.")
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def forget(node: str, as_json: bool, **options: Any) -> int:
    """
    Remove all records of NODE; the next machine with that name is a new node. Prints what was removed with it.

    Use it for a node that is gone, or for a name that two daemons claimed, after one of them has been stopped. Refused
    while a job uses NODE, and while NODE is quarantined and still reports.
    """
    with aggregator_of(options) as aggregator:
        gone = aggregator.call_json("DELETE", f"/v1/nodes/{segment(node)}")
    lost = ", ".join(_lost(gone))
    more = {name: gone.get(name) for name in ("quarantine", "rules", "accused", "leases")}
    done(as_json, f"{node} is removed" + (f", and with it {lost}" if lost else ""), **more)
    return 0


def _lost(gone: Mapping[str, Any]) -> Iterator[str]:
    """What went with a node, besides its name and key."""
    if kept := gone.get("quarantine"):
        yield f"its quarantine by {kept['owner']} ({kept['reason']})"
    if gone.get("rules"):
        yield "the state of its quarantine rules"
    if accused := gone.get("accused"):
        yield f"an accusation by a validation ({accused['code']}, gate {accused['gate']})"
    for row in gone.get("leases") or ():
        yield f"the lease of job {row['lease']['job']}, which was ending"


# `healthd fleet digests` and `steps`: what the comparison of nodes with each other has found.


@click.command(cls=Command, short_help="List nodes whose training-step digest differs from their peers.")
@fleet_options
def digests(as_json: bool, **options: Any) -> int:
    """
    List nodes whose training-step digest differs from nodes like them, with the first operation that differs.

    Exit code: 0 none differs, 1 some differ, 3 unknown.
    """
    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/fleet/digests")
    differing = bool(found["accused"] or found["suspects"])
    if as_json:
        print_json(found)
    else:
        for one in found["accused"]:
            click.echo(f"{one['node']} {one['message']}")
        for one in found["suspects"]:
            click.echo(f"{one['node']} {one['message']} (undecided)")
        if not differing and found["compared"]:
            click.echo(f"no node differs from its peers ({found['compared']} compared)")
        elif not differing:
            click.echo(f"nothing was compared: of {found['nodes']} nodes with digests, no two are of the same kind")
    return 1 if differing else 0 if found["compared"] else 3


@click.command(cls=Command, short_help="Show the steps of running jobs, and slow nodes in them.")
@fleet_options
def steps(as_json: bool, **options: Any) -> int:
    """
    Show running jobs that report their steps, and nodes that are slow in them by their own time.

    Exit code: 0 none is slow, 1 some are slow, 3 unknown.
    """
    from checks.limits import quantity

    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/fleet/steps")
    compared = any(job["step_seconds"] is not None for job in found["jobs"])
    if as_json:
        print_json(found)
    else:
        for job in found["jobs"]:
            took = "not compared yet" if job["step_seconds"] is None else quantity("x_seconds", job["step_seconds"])
            ranks, nodes = counted(job["ranks"], "rank"), counted(job["nodes"], "node")
            click.echo(f"{job['job']}: {ranks}, {nodes} compared, own time per step {took}")
        for one in found["slow"]:
            click.echo(f"{one['node']} {one['message']}")
        if not compared:
            click.echo("nothing was compared: no job has reported enough steps from more than one node")
    return 1 if found["slow"] else 0 if compared else 3


# `healthd fleet status`: every node on a line, once or until Ctrl-C.


PAGE = 500
MOST_NODES = 20_000

Found: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]]]
"""The numbers of the fleet, and its nodes."""

# Often enough for eyes; each costs the aggregator a page of its nodes.
WATCH_SECONDS = 2.0


@click.command(cls=Command)
@fleet_options
@click.option("--health", type=click.Choice([one.value for one in Health]), help="Only nodes with this health.")
@click.option("--pool", metavar="P", help="Only nodes in this pool.")
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
def status(
    as_json: bool = False,
    health: str | None = None,
    pool: str | None = None,
    watch: bool = False,
    **options: Any,
) -> int:
    """List every node, the worst first."""
    with aggregator_of(options) as aggregator:

        def look() -> Found:
            return aggregator.get("/v1/fleet"), _rows(aggregator, health=health, pool=pool)

        def report(found: Found) -> list[Table | str]:
            from healthd.cli.terminal import render

            summary, nodes = found
            asked = [word for word, given in (("health", health), ("pool", pool)) if given]
            none = [f"no node matches {' and '.join(asked)}"] if asked and not nodes else []
            return [*render.fleet_report(summary, nodes), *none]

        def print_once(found: Found) -> None:
            if as_json:
                print_json({"fleet": found[0], "nodes": found[1]})
            else:
                from healthd.cli.terminal import render

                render.show(render.out(), report(found))

        if not watch:
            print_once(look())
        elif sys.stdout.isatty() and not as_json:
            _watch_on_terminal(look, report)
        else:
            _watch_into_pipe(look, print_once)
    return 0


def _watch_on_terminal(look: Callable[[], Found], report: Callable[[Found], list[Table | str]]) -> None:
    """Each time in the place of what was there; while nobody answers, the last answer with its time stays there."""
    from rich.markup import escape

    from healthd.cli.terminal import render

    console = render.out()
    last: list[Table | str] = []
    while True:
        try:
            found = look()
            last = [f"[dim]{moment(time.time())}, every {WATCH_SECONDS:g} s until Ctrl-C[/]", *report(found)]
            render.redraw(console, last)
        except UnreachableError as error:
            render.redraw(console, [f"[yellow]! {escape(str(error))}; trying again[/]", *last])
        time.sleep(WATCH_SECONDS)


def _watch_into_pipe(look: Callable[[], Found], print_once: Callable[[Found], None]) -> None:
    """One after the other, until nobody reads on, as behind `| head`."""
    while True:
        try:
            print_once(look())
        except UnreachableError as error:
            click.echo(f"healthd: {error}; trying again", err=True)
        sys.stdout.flush()
        if getattr(sys.stdout, "dropped", False):
            return
        time.sleep(WATCH_SECONDS)


def _rows(aggregator: Aggregator, **wanted: str | None) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    after: str | None = None
    while len(nodes) < MOST_NODES:
        page = aggregator.get("/v1/nodes", limit=PAGE, after=after, **wanted)
        nodes += page["nodes"]
        after = page.get("next")
        if after is None:
            return nodes
    click.echo(
        f"healthd: only the first {MOST_NODES} nodes by name are listed; narrow the list with --health or --pool",
        err=True,
    )
    return nodes


MOST_EVENTS = 1000
NOT_FOUND = 404
AWAY_SECONDS = 60.0
"""How long a validation is followed without an answer: an aggregator that restarts is back by then."""


@click.group(cls=Group, invoke_without_command=True, short_help="Show the fleet as the aggregator sees it.")
@click.pass_context
def fleet(ctx: click.Context) -> None:
    """Show the fleet as the aggregator sees it; without a command, run `status`."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(status)


fleet.add_command(status)
fleet.add_command(digests)
fleet.add_command(steps)
fleet.add_command(rekey)
fleet.add_command(forget)
fleet.add_command(release_lease)
fleet.add_command(repairs)


@fleet.command()
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def show(node: str, as_json: bool, **options: Any) -> int:
    """Show the state of one node."""
    with aggregator_of(options) as aggregator:
        record = aggregator.get(f"/v1/nodes/{segment(node)}")
    if as_json:
        print_json(record)
        return 0
    from healthd.cli.terminal import render

    render.print_node(record)
    return 0


@fleet.command()
@click.argument("node", shell_complete=complete_nodes)
@click.option("--reason", required=True, help="Reason; shown to everyone whose job it delays.")
@click.option("--for", "duration", metavar="T", help="Duration (default: until an operator releases the node).")
@click.option("--unseen", is_flag=True, help="Also quarantine a node that has never reported.")
@fleet_options
def quarantine(node: str, reason: str, duration: str | None, unseen: bool, as_json: bool, **options: Any) -> int:
    """Exclude a node from admissions. The name of a node that has never reported needs --unseen."""
    from healthd.core.http.client import RefusedError

    seconds = duration_of("--for", duration)
    body = {"reason": reason, "owner": own_name(), "for_seconds": seconds}
    with aggregator_of(options) as aggregator:
        query = {"unseen": "true"} if unseen else None
        try:
            aggregator.call("PUT", f"/v1/nodes/{segment(node)}/quarantine", body=body, query=query)
        except RefusedError as error:
            raise (ConfigError(str(error)) if error.status in (400, 404) else error) from None
    done(as_json, f"{node} is quarantined" + (f" for {duration}" if duration else "") + f": {reason}")
    return 0


@fleet.command()
@click.argument("node", shell_complete=complete_nodes)
@click.option("--reason", help="Reason; kept in the node's history.")
@fleet_options
def release(node: str, reason: str | None, as_json: bool, **options: Any) -> int:
    """End a quarantine."""
    with aggregator_of(options) as aggregator:
        query = {} if reason is None else {"reason": reason}
        aggregator.call("DELETE", f"/v1/nodes/{segment(node)}/quarantine", query=query)
    done(as_json, f"{node} is released" + (f": {reason}" if reason else ""))
    return 0


@fleet.command(short_help="Show a gate's decision with its evidence and rounds, and why its job died.")
@click.argument("gate", metavar="GATE|JOB[:ATTEMPT]", shell_complete=complete_gates)
@fleet_options
def explain(gate: str, as_json: bool, **options: Any) -> int:
    """
    Show a gate's decision with its evidence and, if the job's failure was reported, why the job died.

    GATE is its id, or JOB for the newest gate of a job, or JOB:ATTEMPT.
    """
    from healthd.core import wire
    from healthd.core.model import Decision

    with aggregator_of(options) as aggregator:
        job, colon, attempt = gate.rpartition(":")
        asked = aggregator.gate_of(job, int(attempt)) if colon and job and attempt.isdecimal() else None
        path = f"/v1/gates/{segment(asked or gate)}"
        decision = aggregator.call("GET", path)
        died = _end_of_job(aggregator, path)
        if as_json:
            print_json({**wire.decode(decision, dict[str, Any], what="decision"), "postmortem": died})
            return 0
        from healthd.cli.terminal import render

        console = render.out()
        read = wire.decode(decision, Decision, what="decision")
        render.show(console, render.decision_report(read, whole=True))
        if read.policy.get("collective"):
            runs = aggregator.get(f"/v1/validations/{segment(read.id)}")
            render.show(console, render.rounds_report(runs["validations"]))
        if died is not None:
            _show_end(died)
    return 0


def _end_of_job(aggregator: Aggregator, path: str) -> dict[str, Any] | None:
    """Why the job of a gate died, as the aggregator answers it; None where nobody has told of a bad end."""
    from healthd.core.http.client import RefusedError

    try:
        found: dict[str, Any] = aggregator.get(f"{path}/postmortem")
    except RefusedError as error:
        if error.status == NOT_FOUND:
            return None
        raise
    return found


def _show_end(died: Mapping[str, Any]) -> None:
    from healthd.aggregator.jobs.postmortem_records import PostmortemPhase, PostmortemState
    from healthd.cli.postmortem import screen
    from healthd.core import wire

    found = wire.convert(died, PostmortemState, what="why the job died")
    record = found.postmortem
    if record.verdict is not None:
        click.echo("\n".join(screen(record.verdict, missing=found.missing)))
    if record.phase is not PostmortemPhase.FINAL:
        click.echo(f"healthd: why it died: not final yet: {record.phase.value}")


@fleet.command(short_help="Run collectives over nodes and find the node at fault.")
@click.argument("nodes", nargs=-1, shell_complete=complete_nodes)
@click.option("--pool", metavar="P", help="Take nodes from this pool, with --count.")
@click.option("--count", type=int, metavar="K", help="Number of nodes to take from the pool.")
@click.option(
    "--kind",
    type=click.Choice(["collectives", "training"]),
    default="collectives",
    show_default=True,
    help="What to run: collectives, or steps of data-parallel training.",
)
@click.option("--wait", metavar="T", default="10m", show_default=True, help="Maximum time to wait for the verdict.")
@fleet_options
def validate(
    nodes: tuple[str, ...], pool: str | None, count: int | None, kind: str, wait: str, as_json: bool, **options: Any
) -> int:
    """
    Run collectives over NODES together, or with --kind the training steps of a small model, and find the node at fault.
    No lease is granted.

    Exit code: 0 all passed together, 1 not all passed, 3 unknown.
    """
    if bool(nodes) == (pool is not None):
        raise ConfigError("choose the nodes: by name, or with --pool P --count K")
    body = {"nodes": nodes, "pool": pool, "count": count, "kind": kind, "wait_seconds": duration_of("--wait", wait)}
    from healthd.core import wire
    from healthd.core.model import Decision, Verdict

    found = _validated(options, body, quiet=as_json)
    decision = wire.convert(found["decision"], Decision, what="decision")
    from healthd.cli.terminal import render

    if as_json:
        print_json(found)
    else:
        render.show(render.out(), render.validation_report(decision, found["validations"]))
    if decision.decision is Verdict.ADMIT:
        return 0
    return 1 if any(one.status is Status.FAIL for one in render.all_reasons(decision)) else 3


def _validated(options: dict[str, Any], body: dict[str, Any], *, quiet: bool) -> Any:
    """Start a validation and follow it to its end."""
    from healthd.cli.terminal.progress import Progress
    from healthd.core import wire
    from healthd.core.model import Decision

    with aggregator_of(options) as aggregator, Progress(quiet=quiet) as progress:
        started = aggregator.call("POST", "/v1/validations", body=body, query={"wait": "0"})
        found = wire.decode(started, dict[str, Any], what="answer of the aggregator")
        with line.withdrawn_when_stopped(aggregator, found["id"]) as signals:
            while found["decision"]["decision"] == "hold":
                progress.hold(wire.decode(wire.encode(found["decision"]), Decision, what="decision"))
                follow = functools.partial(_followed, aggregator, found["id"], progress.every_seconds)
                found = signals.wait_for(follow)
    return found


def _followed(aggregator: Aggregator, gate: str, seconds: float) -> Any:
    """What is known of a validation after so long; asked again for AWAY_SECONDS while nobody answers."""
    backoff, failures, began = Backoff(0.5, 5.0), 0, time.monotonic()
    while True:
        try:
            return aggregator.get(f"/v1/validations/{gate}", wait=f"{seconds:g}")
        except UnreachableError as error:
            if time.monotonic() - began >= AWAY_SECONDS:
                raise UnreachableError(f"{error}; 'healthd fleet explain {gate}' shows the result") from None
        failures += 1
        time.sleep(backoff.after(failures))


@fleet.command(short_help="Report gate accuracy from job outcomes.")
@click.option("--days", type=float, metavar="N", default=28.0, show_default=True, help="Period to report.")
@fleet_options
def report(days: float, as_json: bool, **options: Any) -> int:
    """Report gate accuracy: how jobs ended, compared with what the gate decided about their nodes."""
    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/report", days=f"{days:g}")
    if as_json:
        print_json(found)
        return 0
    from healthd.cli.fleet.report import report_lines
    from healthd.cli.terminal import render

    render.show(render.out(), report_lines(found))
    return 0


@fleet.command(short_help="List devices that are slow compared with their peers.")
@fleet_options
def stragglers(as_json: bool, **options: Any) -> int:
    """
    List devices that are slow compared with their peers: confirmed by two runs, or still to be measured again.

    Exit code: 0 none is confirmed, 1 some are confirmed, 3 unknown.
    """
    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/fleet/stragglers")
    if as_json:
        print_json(found)
    else:
        for one in (*found["confirmed"], *found["suspects"]):
            click.echo(one["message"])
        if not found["nodes"]:
            click.echo(
                "nothing was compared: too few devices of one kind have the same measurement (eleven are needed)"
            )
        elif not found["confirmed"] and not found["suspects"]:
            click.echo(f"no device is slow compared with its peers ({found['nodes']} nodes compared)")
    return 1 if found["confirmed"] else 0 if found["nodes"] else 3


@fleet.command(short_help="Admit jobs again after the database was lost.")
@fleet_options
def recover(as_json: bool, **options: Any) -> int:
    """Admit jobs again after the aggregator lost its database."""
    with aggregator_of(options) as aggregator:
        aggregator.call("POST", "/v1/fleet/recover")
    done(as_json, "the aggregator admits jobs again, with what has been reported so far")
    return 0


@fleet.command(short_help="Show the events of a node in the last weeks.")
@click.argument("node", shell_complete=complete_nodes)
@click.option(
    "--limit", type=click.IntRange(1, MOST_EVENTS), default=50, show_default=True, help="Maximum number of lines."
)
@fleet_options
def history(node: str, limit: int, as_json: bool, **options: Any) -> int:
    """Show recent events of NODE: checks, quarantines, leases, accusations, boots, devices."""
    with aggregator_of(options) as aggregator:
        page = aggregator.get(f"/v1/nodes/{segment(node)}/history", limit=limit)
    if as_json:
        print_json(page)
        return 0
    from healthd.cli.terminal import render

    render.show(render.out(), render.history_report(page["events"]))
    return 0


@fleet.command(short_help="Show or reset the quarantine circuit breaker.")
@click.argument("what", type=click.Choice(["show", "reset"]), default="show")
@click.option("--pool", help="Only the breaker of this pool.")
@fleet_options
def breaker(what: str, pool: str | None, as_json: bool, **options: Any) -> int:
    """
    Show where the rules have stopped quarantining because too many nodes would be out; `reset` lets them continue.

    Exit code: 0 no breaker is open, 1 a breaker is open, 3 unknown.
    """
    with aggregator_of(options) as aggregator:
        tripped = left = aggregator.get("/v1/fleet/breaker")["open"]
        if pool and pool not in left and pool not in (pools := aggregator.get("/v1/fleet")["pools"]):
            raise ConfigError(f"pool {pool!r} has no nodes{nearest(pool, pools)}")
        if what == "reset":
            aggregator.call("POST", "/v1/fleet/breaker/reset", query={"pool": pool})
            left = aggregator.get("/v1/fleet/breaker")["open"]
    tripped, left = ({name: one for name, one in each.items() if pool in (None, name)} for each in (tripped, left))
    if as_json:
        print_json({"open": left})
    elif left:
        for one in left.values():
            click.echo(f"open: {one['reason']}")
    else:
        click.echo("the rules may quarantine again" if tripped else "no breaker is open")
    return 1 if left else 0


@click.command(cls=Command)
@click.argument("job", shell_complete=complete_jobs)
@click.option("--reason", help="Reason; kept with the decision. Required.")
@click.option("--for", "duration", metavar="T", help="Duration, such as 1h; at most 30d. Required.")
@click.option("--clear", is_flag=True, help="Withdraw the override.")
@fleet_options
def override(job: str, reason: str | None, duration: str | None, clear: bool, as_json: bool, **options: Any) -> int:
    """Admit a job by hand, whatever the state of its nodes. Audited, and visible in the metrics."""
    if not clear and (reason is None or duration is None):
        raise ConfigError(
            "an override needs --reason and --for, so that others can see why the job was admitted and until when"
        )
    with aggregator_of(options) as aggregator:
        if clear:
            aggregator.call("DELETE", f"/v1/overrides/{segment(job)}")
        else:
            body = {"reason": reason, "owner": own_name(), "for_seconds": duration_of("--for", duration)}
            aggregator.call("PUT", f"/v1/overrides/{segment(job)}", body=body)
    done(as_json, f"override of {job} is withdrawn" if clear else f"{job} will be admitted for {duration}: {reason}")
    return 0
