"""`healthd fleet` and `healthd override`: look at the fleet, keep nodes out, let them in, explain a gate."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from checks.contract import Status
from healthd.cli.completion import complete_gates, complete_jobs, complete_nodes
from healthd.cli.fleet import line
from healthd.cli.fleet.identity import forget, rekey
from healthd.cli.fleet.line import aggregator_of, done, duration_of, fleet_options, own_name, print_json, segment
from healthd.cli.fleet.peers import digests, steps
from healthd.cli.fleet.status import status
from healthd.cli.hooks.leases import release_lease
from healthd.cli.settings.options import Command, Group
from healthd.core.backoff import Backoff
from healthd.core.config.schema import nearest
from healthd.core.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from healthd.core.http.aggregator_client import Aggregator

MOST_EVENTS = 1000
AWAY_SECONDS = 60.0
"""How long a validation is followed without an answer: an aggregator that restarts is back by then."""


@click.group(cls=Group, invoke_without_command=True, short_help="The fleet as the aggregator sees it.")
@click.pass_context
def fleet(ctx: click.Context) -> None:
    """The fleet as the aggregator sees it; `status` when nothing else is said."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(status)


fleet.add_command(status)
fleet.add_command(digests)
fleet.add_command(steps)
fleet.add_command(rekey)
fleet.add_command(forget)
fleet.add_command(release_lease)


@fleet.command()
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def show(node: str, as_json: bool, **options: Any) -> int:
    """All that is known of one node."""
    with aggregator_of(options) as aggregator:
        record = aggregator.get(f"/v1/nodes/{segment(node)}")
    if as_json:
        print_json(record)
        return 0
    from healthd.cli.terminal import fleet_view

    fleet_view.print_node(record)
    return 0


@fleet.command()
@click.argument("node", shell_complete=complete_nodes)
@click.option("--reason", required=True, help="Why; shown to everyone whose job it delays.")
@click.option("--for", "duration", metavar="T", help="How long (default: until somebody releases it).")
@click.option("--unseen", is_flag=True, help="Also quarantine a node that has never reported.")
@fleet_options
def quarantine(node: str, reason: str, duration: str | None, unseen: bool, as_json: bool, **options: Any) -> int:
    """Keep a node out of admissions. A name that no node has is taken for a slip, unless it is said to be --unseen."""
    from healthd.core.http.aggregator_client import RefusedError

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
@click.option("--reason", help="Why; kept in the node's history.")
@fleet_options
def release(node: str, reason: str | None, as_json: bool, **options: Any) -> int:
    """End a quarantine."""
    with aggregator_of(options) as aggregator:
        query = {} if reason is None else {"reason": reason}
        aggregator.call("DELETE", f"/v1/nodes/{segment(node)}/quarantine", query=query)
    done(as_json, f"{node} is released" + (f": {reason}" if reason else ""))
    return 0


@fleet.command(short_help="A gate's decision with its evidence and rounds.")
@click.argument("gate", shell_complete=complete_gates)
@fleet_options
def explain(gate: str, as_json: bool, **options: Any) -> int:
    """A gate's decision with the evidence it was made on; GATE is its id or its job."""
    from healthd.core import wire
    from healthd.core.model import Decision

    with aggregator_of(options) as aggregator:
        decision = aggregator.call("GET", f"/v1/gates/{segment(gate)}")
        if as_json:
            sys.stdout.write(decision.decode() + "\n")
            return 0
        from healthd.cli.terminal import fleet_view, render

        console = render.out()
        read = wire.decode(decision, Decision, what="decision")
        render.show(console, fleet_view.decision_report(read, whole=True))
        if read.policy.get("collective"):
            runs = aggregator.get(f"/v1/validations/{segment(read.id)}")
            render.show(console, fleet_view.rounds_report(runs["validations"]))
    return 0


@fleet.command(short_help="Run collectives over nodes; find who is at fault.")
@click.argument("nodes", nargs=-1, shell_complete=complete_nodes)
@click.option("--pool", metavar="P", help="Take nodes from this pool, with --count.")
@click.option("--count", type=int, metavar="K", help="Number of nodes to take from the pool.")
@click.option(
    "--kind",
    type=click.Choice(["collectives", "training"]),
    default="collectives",
    show_default=True,
    help="What they run: collectives, or steps of data-parallel training.",
)
@click.option("--wait", metavar="T", default="10m", show_default=True, help="Maximum time to wait for the verdict.")
@fleet_options
def validate(
    nodes: tuple[str, ...], pool: str | None, count: int | None, kind: str, wait: str, as_json: bool, **options: Any
) -> int:
    """
    Run collectives over NODES together, or with --kind training steps of a small model that all train together, and
    find who is at fault. Nobody gets a lease.

    Exit code: 0 all passed together, 1 they did not, 3 it cannot be told.
    """
    if bool(nodes) == (pool is not None):
        raise ConfigError("say which nodes: by name, or else --pool P --count K")
    body = {"nodes": nodes, "pool": pool, "count": count, "kind": kind, "wait_seconds": duration_of("--wait", wait)}
    from healthd.core import wire
    from healthd.core.model import Decision, Verdict

    found = _validated(options, body, quiet=as_json)
    decision = wire.convert(found["decision"], Decision, what="decision")
    from healthd.cli.terminal import fleet_view, render

    if as_json:
        print_json(found)
    else:
        render.show(render.out(), fleet_view.validation_report(decision, found["validations"]))
    if decision.decision is Verdict.ADMIT:
        return 0
    return 1 if any(one.status is Status.FAIL for one in fleet_view.all_reasons(decision)) else 3


def _validated(options: dict[str, Any], body: dict[str, Any], *, quiet: bool) -> Any:
    """Start a validation and follow it to its end."""
    from healthd.cli.terminal.progress import Progress
    from healthd.core import wire
    from healthd.core.model import Decision

    with aggregator_of(options) as aggregator, Progress(quiet=quiet) as progress:
        started = aggregator.call("POST", "/v1/validations", body=body, query={"wait": "0"})
        found = wire.decode(started, dict[str, Any], what="answer of the aggregator")
        with line.withdrawn_when_stopped(aggregator, found["id"]):
            while found["decision"]["decision"] == "hold":
                progress.hold(wire.decode(wire.encode(found["decision"]), Decision, what="decision"))
                found = _followed(aggregator, found["id"], progress.every_seconds)
    return found


def _followed(aggregator: Aggregator, gate: str, seconds: float) -> Any:
    """What is known of a validation after so long; asked again for AWAY_SECONDS while nobody answers."""
    backoff, failures, began = Backoff(0.5, 5.0), 0, time.monotonic()
    while True:
        try:
            return aggregator.get(f"/v1/validations/{gate}", wait=f"{seconds:g}")
        except UnreachableError as error:
            if time.monotonic() - began >= AWAY_SECONDS:
                raise UnreachableError(f"{error}; 'healthd fleet explain {gate}' shows what came of it") from None
        failures += 1
        time.sleep(backoff.after(failures))


@fleet.command(short_help="How right the gate was, by how jobs ended.")
@click.option("--days", type=float, metavar="N", default=28.0, show_default=True, help="How far back.")
@fleet_options
def report(days: float, as_json: bool, **options: Any) -> int:
    """How right the gate was: jobs that ended well or not, held against what it had said of their nodes."""
    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/report", days=f"{days:g}")
    if as_json:
        print_json(found)
        return 0
    from healthd.cli.fleet.report import report_lines
    from healthd.cli.terminal import render

    render.show(render.out(), report_lines(found))
    return 0


@fleet.command(short_help="Devices that are slow among their peers.")
@fleet_options
def stragglers(as_json: bool, **options: Any) -> int:
    """
    Devices that are slow among their peers: what two runs have said, and what has yet to be measured again.

    Exit code: 0 none is confirmed, 1 some are, 3 it cannot be told.
    """
    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/fleet/stragglers")
    if as_json:
        print_json(found)
    else:
        for one in (*found["confirmed"], *found["suspects"]):
            click.echo(one["message"])
        if not found["nodes"]:
            click.echo("nothing was compared: too few devices of one kind have measured the same (it takes eleven)")
        elif not found["confirmed"] and not found["suspects"]:
            click.echo(f"no device is slow among its peers ({found['nodes']} nodes compared)")
    return 1 if found["confirmed"] else 0 if found["nodes"] else 3


@fleet.command(short_help="Let gates admit again after the loss of the database.")
@fleet_options
def recover(as_json: bool, **options: Any) -> int:
    """Say that the aggregator may admit again after the loss of its database."""
    with aggregator_of(options) as aggregator:
        aggregator.call("POST", "/v1/fleet/recover")
    done(as_json, "the aggregator admits again with what has been reported so far")
    return 0


@fleet.command(short_help="What happened on a node in the last weeks.")
@click.argument("node", shell_complete=complete_nodes)
@click.option("--limit", type=click.IntRange(1, MOST_EVENTS), default=50, show_default=True, help="Number of lines.")
@fleet_options
def history(node: str, limit: int, as_json: bool, **options: Any) -> int:
    """What happened on NODE lately: checks, quarantines, leases, accusations, boots, devices."""
    with aggregator_of(options) as aggregator:
        page = aggregator.get(f"/v1/nodes/{segment(node)}/history", limit=limit)
    if as_json:
        print_json(page)
        return 0
    from healthd.cli.terminal import fleet_view, render

    render.show(render.out(), fleet_view.history_report(page["events"]))
    return 0


@fleet.command(short_help="Where rules have stopped quarantining; reset it.")
@click.argument("what", type=click.Choice(["show", "reset"]), default="show")
@click.option("--pool", help="Only the breaker of this pool.")
@fleet_options
def breaker(what: str, pool: str | None, as_json: bool, **options: Any) -> int:
    """
    Show where rules have stopped quarantining because too many nodes would be out; `reset` lets them go on.

    Exit code: 0 none is open (any more), 1 one is, 3 it cannot be told.
    """
    with aggregator_of(options) as aggregator:
        tripped = left = aggregator.get("/v1/fleet/breaker")["open"]
        if pool and pool not in left and pool not in (pools := aggregator.get("/v1/fleet")["pools"]):
            raise ConfigError(f"no node is of pool {pool!r}{nearest(pool, pools)}")
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
@click.option("--reason", help="Why; kept with the decision. Must be given.")
@click.option("--for", "duration", metavar="T", help="How long, as 1h; 30d at most. Must be given.")
@click.option("--clear", is_flag=True, help="Take the override back.")
@fleet_options
def override(job: str, reason: str | None, duration: str | None, clear: bool, as_json: bool, **options: Any) -> int:
    """Admit a job by hand, whatever its nodes say. Audited, and visible in the metrics."""
    if not clear and (reason is None or duration is None):
        raise ConfigError("an override needs --reason and --for: who reads of it later wants to know why")
    with aggregator_of(options) as aggregator:
        if clear:
            aggregator.call("DELETE", f"/v1/overrides/{segment(job)}")
        else:
            body = {"reason": reason, "owner": own_name(), "for_seconds": duration_of("--for", duration)}
            aggregator.call("PUT", f"/v1/overrides/{segment(job)}", body=body)
    done(as_json, f"override of {job} is taken back" if clear else f"{job} will be admitted for {duration}: {reason}")
    return 0
