"""`healthd gate`: may this job start here, now? The answer is the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from healthd.cli.completion import complete_jobs, complete_nodes, one_of
from healthd.cli.fleet.line import gate_client
from healthd.cli.hooks.hostfile import read_hostfile, write_hostfile
from healthd.cli.hooks.leases import release
from healthd.cli.hooks.outcome import outcome
from healthd.cli.hooks.unreachable import may_start
from healthd.cli.settings.hooks import GateSettings
from healthd.cli.settings.options import Group, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.output import told
from healthd.core.errors import ConfigError, HealthdError, NotFoundError, OutputError, UnreachableError
from healthd.core.model import Decision, GateRequest, Verdict
from healthd.core.text import counted
from healthd.hooks.stopping import Stopped, stoppable

ADMITTED, IMPOSSIBLE, NOT_ADMITTED = 0, 1, 75

# A launcher that ends a hook kills it some seconds later.
WITHDRAW_SECONDS = 2.0


SECTIONS = {
    "The job": ("job", "attempt", "workload"),
    "Its nodes": ("node", "hostfile", "pool", "count", "min_nodes"),
    "What is asked": ("tier", "max_age", "collective", "wait", "mode"),
    "The answer": ("hostfile_out", "as_json", "watch", "exit_style", "on_unreachable"),
    "Hooks that ask together, one on each node": ("join", "size", "rank", "member", "execute"),
    "The aggregator": ("aggregator", "token_file", "ca_file"),
}


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
@click.option("--aggregator", metavar="URL", help="URL of the aggregator.")
@click.option(
    "--job", metavar="J", shell_complete=complete_jobs, help="Name of the job; name and attempt identify the gate."
)
@click.option("--attempt", type=int, metavar="A", help="Number of this attempt of the job (default 0).")
@click.option(
    "--node", multiple=True, metavar="N", shell_complete=complete_nodes, help="Name of a node of the job; repeat."
)
@click.option(
    "--hostfile", type=click.Path(path_type=Path), metavar="F", help="File with the name of a node on each line."
)
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
    help="With --join: identity of this process; one that is started again needs another (default: random).",
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
@click.option("--max-age", metavar="T", help="Maximum age of the evidence, as 10m (default: the aggregator's).")
@click.option(
    "--collective/--no-collective",
    default=None,
    help="Run collectives over the nodes together first (default: the aggregator's; on for more than one node).",
)
@click.option("--wait", metavar="T", help="Maximum time to wait for the admission, as 5m (default: the aggregator's).")
@click.option(
    "--runtime",
    metavar="T",
    help="How long the job will run, as 12h: leaves out nodes that EC2 will stop or reboot before its end.",
)
@click.option(
    "--mode", shell_complete=one_of("enforce", "observe"), help="enforce or observe (default: the aggregator's)."
)
@click.option("--workload", metavar="W", help="Workload with which the lease ends, as pid:1234 on every node.")
@click.option(
    "--on-unreachable",
    help="While no aggregator answers: hold (default), local (ask the daemon of the one node) or admit.",
)
@click.option(
    "--exit-style",
    help="Exit codes: plain (default), npd (0 admitted, 1 not, 2 and above unknown) or slurm (0 or not).",
)
@click.option(
    "--hostfile-out", type=click.Path(path_type=Path), metavar="F", help="File to write the admitted nodes to."
)
@click.option("--watch", is_flag=True, help="While it waits, show every reason, not the first three.")
@click.option("--json", "as_json", is_flag=True, help="Print the decision as JSON, and nothing else.")
def gate(ctx: click.Context, /, as_json: bool, watch: bool, **options: Any) -> int:
    """
    Ask the aggregator whether a job may start, and wait for the answer.

    Exit code 0: admitted. 75: not admitted, try again or elsewhere. 1: impossible as asked. 2: usage, or a token that
    may not ask.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = {name: value for name, value in options.items() if value not in (None, ())}
        return ADMITTED
    settings = load_settings(options, section="gate")
    if settings.gate.join is not None:
        if watch:
            raise ConfigError("--watch does not go with --join: a hook in a job says what it waits for in its log")
        from healthd.cli.hooks import join as joining

        return joining.run(settings, as_json=as_json)
    from healthd.core.http.gate_client import NotAdmittedError

    request = build_request(settings.gate)
    try:
        with stoppable():
            decision = _ask(settings, request, as_json=as_json, watch=watch)
            write_hosts(decision, settings.gate)
            return finish(decision, settings.gate, as_json=as_json)
    except UnreachableError as error:
        return ADMITTED if may_start(settings.gate, request, error) else NOT_ADMITTED
    except (NotAdmittedError, OutputError) as error:
        # What nobody is told must not stay admitted: nobody would start the job.
        raise type(error)(f"{error}; {_withdraw(settings, request)}") from None
    except Stopped as stop:
        done = _withdraw(settings, request)
        click.echo(f"healthd: stopped by {stop}; {done}", err=True)
        return NOT_ADMITTED


gate.add_command(outcome)
gate.add_command(release)


def build_request(asked: GateSettings) -> GateRequest:
    """The request that the settings describe; ConfigError says which option is missing or contradicts another."""
    nodes = tuple(asked.node) + read_hostfile(asked.hostfile)
    for name, given in (("--size", asked.size), ("--rank", asked.rank), ("--execute", asked.execute or None)):
        if given is not None:
            raise ConfigError(f"{name} goes with --join GROUP")
    if not asked.job:
        raise ConfigError("--job is missing: name the job, so that asking again gets the same answer")
    if bool(nodes) == bool(asked.pool):
        raise ConfigError("say which nodes: --node N (repeat) or --hostfile F, or else --pool P --count K")
    if asked.pool and asked.count is None:
        raise ConfigError("--pool needs --count: how many nodes of it")
    if asked.count is not None and not asked.pool:
        raise ConfigError("--count goes with --pool; with --node, use --min-nodes")
    if twice := sorted({node for node in nodes if nodes.count(node) > 1}):
        raise ConfigError(f"node {twice[0]!r} is named twice")
    for name, number in (("--count", asked.count), ("--min-nodes", asked.min_nodes)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} must be at least 1, not {number}")
    most = len(nodes) or asked.count or 0
    if asked.min_nodes is not None and asked.min_nodes > most:
        raise ConfigError(f"--min-nodes {asked.min_nodes} is more than the {most} nodes asked for")
    return GateRequest(
        job=asked.job,
        attempt=asked.attempt,
        nodes=nodes,
        pool=asked.pool,
        count=asked.count,
        min_nodes=asked.min_nodes,
        tier=asked.tier,
        max_age_seconds=asked.max_age_seconds,
        wait_seconds=asked.wait_seconds,
        runtime_seconds=asked.runtime_seconds,
        mode=asked.mode,
        workload=asked.workload or own_workload(os.environ, len(nodes)),
        collective=asked.collective,
    )


def own_workload(environ: Mapping[str, str], nodes: int) -> str | None:
    """What the host's scheduler calls the job that this hook runs in: its allocation is no obstacle to its own gate."""
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm:{job}"
    name, namespace = environ.get("POD_NAME"), environ.get("POD_NAMESPACE")
    return f"pod:{namespace}/{name}" if name and namespace and nodes == 1 else None


def write_hosts(decision: Decision, asked: GateSettings) -> None:
    """Write the host file of an admission, by the names that were asked for. OutputError where that cannot be done."""
    if decision.decision is Verdict.ADMIT and asked.hostfile_out is not None:
        write_hostfile(asked.hostfile_out, (node.asked or node.node for node in decision.nodes))


def finish(decision: Decision, asked: GateSettings, *, as_json: bool) -> int:
    """Show a decision and say the exit code. OutputError where it cannot be shown."""
    show(decision, asked, as_json=as_json)
    return exit_code(decision, asked)


def show(decision: Decision, asked: GateSettings, *, as_json: bool) -> None:
    """Print a decision. OutputError where that cannot be done."""
    with told(needed=as_json):
        if as_json:
            from healthd.core import wire

            sys.stdout.write(wire.encode(decision).decode() + "\n")
        elif asked.exit_style != "plain":
            admitted = counted(len(decision.nodes), "node")
            why = " ".join(decision.reasons[0].message.split()) if decision.reasons else admitted
            click.echo(f"{decision.decision.value}: {why}")
        else:
            from healthd.cli.terminal import fleet_view, render

            render.show(render.out(), fleet_view.decision_report(decision))


def exit_code(decision: Decision, asked: GateSettings) -> int:
    """What a decision comes to for who started this."""
    if decision.decision is not Verdict.ADMIT:
        # In other styles every "no" is 1: what is not known is never said here, but by UnreachableError (75).
        return NOT_ADMITTED if decision.retryable and asked.exit_style == "plain" else IMPOSSIBLE
    return ADMITTED


def _withdraw(settings: Settings, request: GateRequest) -> str:
    """Give the gate back, so that it is not admitted to nobody; what came of it, as the end of a sentence."""
    from healthd.core.http.gate_client import GateClient

    try:
        endpoint = settings.endpoint(settings.gate.aggregator)
        with GateClient(endpoint, slack_seconds=WITHDRAW_SECONDS) as aggregator:
            aggregator.withdraw(request.job, request.attempt)
    except NotFoundError:
        return "no gate was open yet"
    except HealthdError as error:
        return f"its gate could not be withdrawn ({error})"
    return "its gate is withdrawn"


def _ask(settings: Settings, request: GateRequest, *, as_json: bool, watch: bool) -> Decision:
    from healthd.cli.terminal.progress import Progress

    progress = Progress(quiet=as_json, whole=watch)

    def away(error: UnreachableError) -> None:
        if not as_json:
            click.echo(f"healthd: {error}; trying again until the wait is over", err=True)

    with gate_client(settings) as aggregator, progress:
        return aggregator.ask(request, on_hold=progress.hold, on_away=away, hold_seconds=progress.every_seconds)
