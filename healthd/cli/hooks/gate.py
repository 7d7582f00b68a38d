"""
`healthd gate`: may this job start here, now? The answer is the exit code.

Also here:

- `healthd gate outcome`: how the job ended, so that the gate can be held against it;
- `healthd gate release` and `healthd fleet release-lease`: give the nodes of a job back.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from healthd.cli.completion import complete_jobs, complete_nodes, one_of
from healthd.cli.fleet.line import aggregator_of, done, fleet_options, gate_client, print_json, segment
from healthd.cli.hooks.answer import (
    ADMITTED,
    NOT_ADMITTED,
    again_line,
    finish,
    may_start,
    own_workload,
    read_hostfile,
    write_hosts,
)
from healthd.cli.settings.gate import GateSettings
from healthd.cli.settings.options import Command, Group, aggregator_option, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.core.errors import (
    ConfigError,
    HealthdError,
    NotFoundError,
    OutputError,
    UnreachableError,
)
from healthd.core.text import moment
from healthd.hooks.stopping import TAKE_BACK_SECONDS, Stopped, stoppable

if TYPE_CHECKING:
    from healthd.cli.terminal.progress import Progress
    from healthd.core.model import Decision, GateRequest

TOLD, NO_SUCH_JOB, NOT_TOLD = 0, 1, 75
MAX_MESSAGE = 4096
"""Characters that an aggregator takes."""

PAUSES_SECONDS = (1.0, 3.0)
"""Before it is tried again: an aggregator that restarts is back by then, and a launcher at its end waits no longer."""

RELEASED, NOTHING_TO_RELEASE = 0, 1
PATIENCE_SECONDS = 20.0
"""Until another aggregator has taken over from one that is gone."""
MOST_NAMED = 20

SECTIONS = {
    "The job": ("job", "attempt", "workload", "lease"),
    "Its nodes": ("node", "hostfile", "pool", "count", "min_nodes"),
    "The request": ("tier", "max_age", "collective", "wait", "mode"),
    "The answer": ("hostfile_out", "as_json", "watch", "exit_style", "on_unreachable"),
    "Hooks that ask together, one on each node": ("join", "size", "rank", "member", "execute"),
    "The aggregator": ("aggregator", "token_file", "ca_file"),
}


@click.command(cls=Command, short_help="Report how a job ended: ok, failed or infra.")
@common_options
@click.argument("status", type=click.Choice(["ok", "failed", "infra"]))
@aggregator_option
@click.option("--job", metavar="J", shell_complete=complete_jobs, help="Name of the job, as in its gate request.")
@click.option("--attempt", type=int, metavar="A", help="Number of the attempt, as in its gate request (default 0).")
@click.option("--message", metavar="T", default="", help="A note for people, kept with the gate.")
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
@click.pass_context
def outcome(ctx: click.Context, /, status: str, message: str, as_json: bool, **options: Any) -> int:
    """
    Report how a job ended: ok, failed (its own fault) or infra (a device, link or host stopped it).

    Exit code 0: reported. 1: no gate of this job and attempt. 75: the aggregator cannot be reached. 2: usage,
    or the token lacks permission.
    """
    before = ctx.obj if isinstance(ctx.obj, dict) else {}  # what was said before the name of the command
    settings = load_settings({**before, **{k: v for k, v in options.items() if v is not None}}, section="gate")
    asked = settings.gate
    if not asked.job:
        raise ConfigError("--job is missing: name the job as in its gate request")
    line = message[:MAX_MESSAGE].encode(errors="replace").decode()  # the end of a log may begin inside of a character
    gate = _told(settings, asked.job, asked.attempt, status, line)
    if as_json:
        from healthd.core import wire

        told = {"job": asked.job, "attempt": asked.attempt, "status": status, "gate": gate}
        sys.stdout.write(wire.encode(told).decode() + "\n")
    if gate is None:
        click.echo(
            f"healthd: job {asked.job} has no gate for attempt {asked.attempt}; 'healthd fleet explain {asked.job}' "
            "shows its newest",
            err=True,
        )
        return NO_SUCH_JOB
    if not as_json:
        click.echo(f"job {asked.job} attempt {asked.attempt} ended: {status} (gate {gate})")
    return TOLD


@click.command("release", cls=Command, short_help="Return a job's nodes after it has ended.")
@fleet_options
@click.option("--job", metavar="J", shell_complete=complete_jobs, help="Name of the job, as in its gate request.")
@click.option("--attempt", type=int, metavar="A", help="Number of the attempt, as in its gate request (default 0).")
@click.pass_context
def release(ctx: click.Context, /, as_json: bool, **options: Any) -> int:
    """
    Return the nodes of a job, or withdraw its gate while that is open. The job itself is not touched.

    Prints which nodes are returned; a node is free as soon as it has received the release.

    Exit code 0: released, now or before. 1: nothing to release: no gate of this job and attempt, or its leases have
    already ended. 2: usage, or the token lacks permission.
    """
    before = ctx.obj if isinstance(ctx.obj, dict) else {}  # what was said before the name of the command
    settings = load_settings({**before, **{k: v for k, v in options.items() if v is not None}}, section="gate")
    asked = settings.gate
    if not asked.job:
        raise ConfigError("--job is missing: name the job as in its gate request")
    of_job = f"job {asked.job} attempt {asked.attempt}"
    try:
        with gate_client(settings) as aggregator:
            given = aggregator.withdraw(asked.job, asked.attempt, patience_seconds=PATIENCE_SECONDS)
    except NotFoundError as error:
        if as_json:
            print_json({"ok": False, "message": str(error), "nodes": []})
        click.echo(f"healthd: {error}; an admin can free a node: healthd fleet release-lease NODE", err=True)
        return NOTHING_TO_RELEASE
    nodes = given.nodes
    if nodes:
        more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
        text = f"{of_job} returns {', '.join(nodes[:MOST_NAMED])}{more}"
    elif given.withdrawn or given.at is None:
        text = f"the gate of {of_job} is withdrawn; it had no nodes yet"
    else:
        text = f"{of_job} had already returned its nodes {moment(given.at)}"
    done(as_json, text, nodes=list(nodes), released_at=given.at)
    return RELEASED


@click.command("release-lease", cls=Command, short_help="End all leases on a node, whichever gate granted them.")
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def release_lease(node: str, as_json: bool, **options: Any) -> int:
    """
    End every lease on NODE, including one adopted after the aggregator lost its database.

    The job is not touched: make sure that it has ended. While processes still hold devices, the node stays in use. A
    node that is offline drops its leases when it reports again; a node that is gone for good can be removed now.
    """
    with aggregator_of(options) as aggregator:
        found = aggregator.call_json("DELETE", f"/v1/nodes/{segment(node)}/leases")
    if as_json:
        print_json(found)
        return RELEASED
    for row in found["released"]:
        lease = row["lease"]
        click.echo(f"{found['node']}: the lease of job {lease['job']} attempt {lease['attempt']} is released")
    if not found["released"]:
        click.echo(f"{found['node']} has no lease")
    return RELEASED


@click.group(
    cls=Group,
    sections=SECTIONS,
    examples=(
        "healthd gate --job train --pool train --count 64 --wait 10m --hostfile-out hosts",
        "healthd gate --job train --attempt 1 --node n1 --node n2",
    ),
    invoke_without_command=True,
    subcommand_metavar="[outcome|release ...]",
    short_help="Ask whether a job may start, and wait for the answer.",
)
@click.pass_context
@common_options
@aggregator_option
@click.option(
    "--job", metavar="J", shell_complete=complete_jobs, help="Name of the job; name and attempt identify the gate."
)
@click.option("--attempt", type=int, metavar="A", help="Number of this attempt of the job (default 0).")
@click.option(
    "--node", multiple=True, metavar="N", shell_complete=complete_nodes, help="Name of a node of the job; repeatable."
)
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="F", help="File with one node name per line.")
@click.option("--pool", metavar="P", help="Take nodes from this pool, with --count.")
@click.option("--count", type=int, metavar="K", help="Number of nodes to take from the pool.")
@click.option("--join", metavar="GROUP", help="Name of the group; all its hooks form one gate.")
@click.option(
    "--size", type=int, metavar="N", help="With --join: number of hooks in the group (default: from the launcher)."
)
@click.option(
    "--rank", type=int, metavar="R", help="With --join: rank of this hook, from 0 (default: from the launcher)."
)
@click.option(
    "--member",
    metavar="ID",
    help="With --join: identity of this process; a restarted process needs a new one (default: random).",
)
@click.option(
    "--execute", is_flag=True, default=None, help="With --join: run the checks that the gate orders in this process."
)
@click.option("--min-nodes", type=int, metavar="M", help="Minimum number of healthy nodes to admit (default: all).")
@click.option(
    "--tier",
    shell_complete=one_of("passive", "quick", "deep"),
    help="Evidence to require: passive, quick or deep (default: the aggregator's).",
)
@click.option("--max-age", metavar="T", help="Maximum age of the evidence, such as 10m (default: the aggregator's).")
@click.option(
    "--collective/--no-collective",
    default=None,
    help="Run collectives over the nodes together first (default: the aggregator's; on for more than one node).",
)
@click.option(
    "--wait", metavar="T", help="Maximum time to wait for the admission, such as 5m (default: the aggregator's)."
)
@click.option(
    "--runtime",
    metavar="T",
    help="How long the job will run, such as 12h: excludes nodes that EC2 will stop or reboot earlier.",
)
@click.option(
    "--mode", shell_complete=one_of("enforce", "observe"), help="enforce or observe (default: the aggregator's)."
)
@click.option(
    "--workload",
    metavar="W",
    help="Workload whose end ends the lease: pid:1234, pod:NAMESPACE/NAME/UID, ... (default: the hook's pod or job).",
)
@click.option(
    "--lease",
    metavar="T",
    help="How long the lease lasts if no node can observe the job's end, such as 12h (default: the aggregator's).",
)
@click.option(
    "--on-unreachable",
    help="If no aggregator responds: hold (default), local (ask this node's daemon) or admit.",
)
@click.option(
    "--exit-style",
    help="Exit codes: plain (default), npd (0 admitted, 1 not, 2 and above unknown) or slurm (0 or not).",
)
@click.option("--hostfile-out", type=click.Path(path_type=Path), metavar="F", help="File for the admitted nodes.")
@click.option("--watch", is_flag=True, help="While waiting, show every reason instead of the first three.")
@click.option("--json", "as_json", is_flag=True, help="Print only the decision, as JSON.")
def gate(ctx: click.Context, /, as_json: bool, watch: bool, **options: Any) -> int:
    """
    Ask the aggregator whether a job may start, and wait for the answer.

    Name and attempt identify the gate: the same request gets the same answer. After a rejection, ask again with the
    next --attempt.

    Exit code 0: admitted. 75: not admitted, try again or elsewhere. 1: impossible as requested. 2: usage, or the token
    lacks permission.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = {name: value for name, value in options.items() if value not in (None, ())}
        return ADMITTED
    settings = load_settings(options, section="gate")
    if settings.gate.join is not None:
        if watch:
            raise ConfigError("--watch cannot be combined with --join: a hook in a job logs what it waits for")
        from healthd.cli.hooks import join as joining

        return joining.run(settings, as_json=as_json)
    from healthd.cli.terminal.progress import Progress
    from healthd.core.http.gates import NotAdmittedError

    request, began = build_request(settings.gate), time.monotonic()
    try:
        with Progress(quiet=as_json, whole=watch) as progress, stoppable() as signals:
            decision = signals.wait_for(lambda: _ask(settings, request, progress, as_json=as_json))
            progress.end()
            write_hosts(decision, settings.gate)
            code = finish(decision, settings.gate, as_json=as_json)
            if settings.gate.exit_style == "plain" and (text := again_line(decision, time.monotonic() - began)):
                click.echo(f"  {text}", err=as_json)
            return code
    except UnreachableError as error:
        return ADMITTED if may_start(settings.gate, request, error) else NOT_ADMITTED
    except (NotAdmittedError, OutputError) as error:
        # What nobody is told must not stay admitted: nobody would start the job.
        raise type(error)(f"{error}; {_withdraw(settings, request)}") from None
    except Stopped as stop:
        done = _withdraw(settings, request)
        click.echo(f"healthd: stopped by {stop}; {done}", err=True)
        return NOT_ADMITTED


def build_request(asked: GateSettings) -> GateRequest:
    """The request that the settings describe; ConfigError says which option is missing or contradicts another."""
    nodes = tuple(asked.node) + read_hostfile(asked.hostfile)
    for name, given in (("--size", asked.size), ("--rank", asked.rank), ("--execute", asked.execute or None)):
        if given is not None:
            raise ConfigError(f"{name} needs --join GROUP")
    if not asked.job:
        raise ConfigError("--job is missing: name the job, so that repeated requests get the same answer")
    if bool(nodes) == bool(asked.pool):
        raise ConfigError("choose the nodes: --node N (repeatable) or --hostfile F, or --pool P --count K")
    if asked.pool and asked.count is None:
        raise ConfigError("--pool needs --count: the number of nodes to take")
    if asked.count is not None and not asked.pool:
        raise ConfigError("--count belongs to --pool; with --node, use --min-nodes")
    if twice := sorted({node for node in nodes if nodes.count(node) > 1}):
        raise ConfigError(f"node {twice[0]!r} is listed twice")
    for name, number in (("--count", asked.count), ("--min-nodes", asked.min_nodes)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be at least 1, not {number}")
    most = len(nodes) or asked.count or 0
    if asked.min_nodes is not None and asked.min_nodes > most:
        raise ConfigError(f"--min-nodes {asked.min_nodes} is more than the {most} nodes requested")
    return dataclasses.replace(
        asked.request(asked.job),
        nodes=nodes,
        pool=asked.pool,
        count=asked.count,
        min_nodes=asked.min_nodes,
        workload=asked.workload or own_workload(os.environ, nodes),
    )


def _told(settings: Settings, job: str, attempt: int, status: str, message: str) -> str | None:
    """The gate that was told, None when there is none. UnreachableError when nobody heard it after some tries."""
    with gate_client(settings) as aggregator:
        for pause in PAUSES_SECONDS:
            try:
                return aggregator.outcome(job, attempt, status, message)
            except UnreachableError:
                time.sleep(pause)
        return aggregator.outcome(job, attempt, status, message)


def _withdraw(settings: Settings, request: GateRequest) -> str:
    """Give the gate back, so that it is not admitted to nobody; what came of it, as the end of a sentence."""
    from healthd.core.http.gates import GateClient

    try:
        endpoint = settings.endpoint()
        with GateClient(endpoint, slack_seconds=TAKE_BACK_SECONDS) as aggregator:
            aggregator.withdraw(request.job, request.attempt)
    except NotFoundError:
        return "no gate was open yet"
    except HealthdError as error:
        return f"its gate could not be withdrawn ({error})"
    return "its gate is withdrawn"


def _ask(settings: Settings, request: GateRequest, progress: Progress, *, as_json: bool) -> Decision:
    def away(error: UnreachableError) -> None:
        if not as_json:
            click.echo(f"healthd: {error}; trying again until the wait is over", err=True)

    with gate_client(settings) as aggregator:
        return aggregator.ask(request, on_hold=progress.hold, on_away=away, hold_seconds=progress.every_seconds)


gate.add_command(outcome)


gate.add_command(release)
