"""`healthd fleet` and `healthd override`: look at the fleet, keep nodes out, let them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from healthd.cli.completion import complete_jobs, complete_nodes
from healthd.cli.fleet.gates import explain, validate
from healthd.cli.fleet.line import aggregator_of, done, duration_of, fleet_options, own_name, print_json, segment
from healthd.cli.fleet.repairs import repairs
from healthd.cli.fleet.screening import screening
from healthd.cli.fleet.status import status
from healthd.cli.hooks.gate import release_lease
from healthd.cli.settings.options import Command, Group
from healthd.core.config import nearest
from healthd.core.errors import ConfigError
from healthd.core.text import counted

MOST_EVENTS = 1000


@click.group(cls=Group, invoke_without_command=True, short_help="Show the fleet as the aggregator sees it.")
@click.pass_context
def fleet(ctx: click.Context) -> None:
    """Show the fleet as the aggregator sees it; without a command, run `status`."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(status)


for command in (status, explain, validate, release_lease, repairs, screening):
    fleet.add_command(command)


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
    from healthd.cli.terminal.fleet import print_node

    print_node(record)
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
    from healthd.cli.terminal.fleet import history_report

    render.show(render.out(), history_report(page["events"]))
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


@fleet.command(short_help="Accept the key of a replaced machine.")
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


@fleet.command(short_help="Remove a node that is gone: its name, key and quarantine.")
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


@fleet.command(short_help="Admit jobs again after the database was lost.")
@fleet_options
def recover(as_json: bool, **options: Any) -> int:
    """Admit jobs again after the aggregator lost its database."""
    with aggregator_of(options) as aggregator:
        aggregator.call("POST", "/v1/fleet/recover")
    done(as_json, "the aggregator admits jobs again, with what has been reported so far")
    return 0


@fleet.command(short_help="List nodes whose training-step digest differs from their peers.")
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


@fleet.command(short_help="Show the steps of running jobs, and slow nodes in them.")
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
