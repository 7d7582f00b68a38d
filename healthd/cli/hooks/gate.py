"""`healthd gate`: may this job start here, now? The answer is the exit code."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checks.printable import printable_line
from healthd.cli.completion import complete_jobs, complete_nodes, one_of
from healthd.cli.fleet.line import aggregator_of, done, fleet_options, gate_client, print_json, segment
from healthd.cli.settings.gate import GateSettings
from healthd.cli.settings.options import Command, Group, aggregator_option, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.cli.terminal.output import told
from healthd.core.bounded import read_file
from healthd.core.errors import (
    BadInputError,
    ConfigError,
    HealthdError,
    NotFoundError,
    OutputError,
    UnreachableError,
    words_of,
)
from healthd.core.model import Verdict
from healthd.core.text import counted, moment, span
from healthd.core.workload import own_pod
from healthd.hooks.stopping import TAKE_BACK_SECONDS, Stopped, stoppable

if TYPE_CHECKING:
    from healthd.cli.terminal.progress import Progress
    from healthd.core.model import Decision, GateRequest

# `healthd gate outcome`: how the job ended, so that the gate can be held against it.


TOLD, NO_SUCH_JOB, NOT_TOLD = 0, 1, 75
MAX_MESSAGE = 4096
"""Characters that an aggregator takes."""

PAUSES_SECONDS = (1.0, 3.0)
"""Before it is tried again: an aggregator that restarts is back by then, and a launcher at its end waits no longer."""


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
    Tell how a job ended: ok, failed (its own fault) or infra (a device, a link or a host stopped it).

    Exit code 0: told. 1: no gate of this job and attempt. 75: the aggregator cannot be reached. 2: usage,
    or a token that may not tell.
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


def _told(settings: Settings, job: str, attempt: int, status: str, message: str) -> str | None:
    """The gate that was told, None when there is none. UnreachableError when nobody heard it after some tries."""
    with gate_client(settings) as aggregator:
        for pause in PAUSES_SECONDS:
            try:
                return aggregator.outcome(job, attempt, status, message)
            except UnreachableError:
                time.sleep(pause)
        return aggregator.outcome(job, attempt, status, message)


# `healthd gate release` and `healthd fleet release-lease`: give the nodes of a job back.


RELEASED, NOTHING_TO_RELEASE = 0, 1
PATIENCE_SECONDS = 20.0
"""Until another aggregator has taken over from one that is gone."""
MOST_NAMED = 20


@click.command("release", cls=Command, short_help="Return a job's nodes after it has ended.")
@fleet_options
@click.option("--job", metavar="J", shell_complete=complete_jobs, help="Name of the job, as in its gate request.")
@click.option("--attempt", type=int, metavar="A", help="Number of the attempt, as in its gate request (default 0).")
@click.pass_context
def release(ctx: click.Context, /, as_json: bool, **options: Any) -> int:
    """
    Give the nodes of a job back, or withdraw its gate while that is open. The job itself is not touched.

    It says which nodes are given back; a node is free as soon as it has heard of it.

    Exit code 0: released, now or before. 1: nothing to give back: no gate of this job and attempt, or its leases have
    ended by themselves. 2: usage, or a token that may not release.
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
    End every lease on NODE, also one that was adopted after the loss of the aggregator's database.

    The job is not touched: make sure first that it has ended. Processes that still hold devices keep the node taken.
    A node that is away lets go when it reports again; one that is gone for good can be forgotten now.
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


# Host files of launchers: nodes, one a line.


MAX_BYTES = 64 << 20
"""100,000 nodes with names of 20 characters, and a line for each of 32 slots."""

_SLOTS = re.compile(r"^([^:]+):\d+$")  # a name and how many ranks it takes; an IPv6 address has more colons


def read_hostfile(file: Path | None) -> tuple[str, ...]:
    """
    Names of nodes, one a line; what follows the name (`n1 slots=8`, `n1:8`) and comments are left out.

    A name that comes again is the same node once more: some schedulers write a line for each slot.
    """
    if file is None:
        return ()
    try:
        lines = read_file(file, MAX_BYTES).decode().splitlines()
    except (OSError, BadInputError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the host file cannot be read: {words_of(error)}") from None
    words = (line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip())
    names = tuple(dict.fromkeys(_SLOTS.sub(r"\1", word) for word in words))
    if not names:
        raise ConfigError(f"{file}: the host file is empty; write one node name per line")
    return names


def write_hostfile(file: Path, names: Iterable[str]) -> None:
    """Write the nodes of a job. OutputError where that cannot be done: then the job must not start."""
    try:
        file.write_text("".join(f"{printable_line(name)}\n" for name in names), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot write the host file: {words_of(error)}") from None


# What a hook does while the aggregator is away: by the rule that the operator chose, and nothing is hidden.


MAX_AGE_SECONDS = 600.0
"""How old evidence may be for the node's own verdict, where the gate does not say."""


def may_start(asked: GateSettings, request: GateRequest, error: UnreachableError) -> bool:
    """
    Whether the job may start although no aggregator answers; says on standard error by which rule, and why not.

    Raises OutputError where it may, and its nodes cannot be written to the host file.
    """
    rule = asked.on_unreachable
    names = nodes_of(request)
    why, end = "", "starting without a gate"
    if rule == "hold":
        why = "not admitted"
    elif rule == "local":
        why = own_verdict(asked, request)
        end = f"node {names[0]} reports that it is ready" if names else ""
    if not why and asked.hostfile_out is not None and not names:
        why = (
            f"{asked.hostfile_out} cannot be written because the nodes are unknown without an aggregator; not admitted"
        )
    click.echo(f"healthd: {error}; on_unreachable={rule}: {why or end}", err=True)
    if not why and asked.hostfile_out is not None:
        write_hostfile(asked.hostfile_out, names)
    return not why


def nodes_of(request: GateRequest) -> tuple[str, ...]:
    """The names of all nodes that are asked for; empty where only the aggregator knows them."""
    if request.join is not None:
        return (request.join.node,) if request.join.size == 1 else ()
    return request.nodes


def own_verdict(asked: GateSettings, request: GateRequest) -> str:
    """
    Why this node may not go by its own verdict, or what speaks against it; empty where the node is fit for the job.

    A daemon speaks for its node alone, so it must be the only one that is asked for.
    """
    names = nodes_of(request)
    if len(names) != 1:
        if request.join is not None:
            many = f"group {request.join.group} has {request.join.size} members"
        else:
            many = f"{len(names)} nodes were requested" if names else f"nodes of pool {request.pool} were requested"
        return f"{many}, but a daemon answers only for its own node; not admitted"
    query = {
        "node": names[0],
        "tier": asked.tier.value if asked.tier else "quick",
        "max_age": f"{MAX_AGE_SECONDS if asked.max_age_seconds is None else asked.max_age_seconds:g}",
    }
    if request.workload:
        query["workload"] = request.workload
    from healthd.cli.hooks.slurm import ask_readiness

    found = ask_readiness(asked.local_url, query)
    if found.fit:
        return ""
    if found.fit is None:
        return f"{found.why}; set gate.local_url to the daemon of this node"
    return f"node {names[0]} is not ready: {found.why}"


ADMITTED, IMPOSSIBLE, NOT_ADMITTED = 0, 1, 75


SECTIONS = {
    "The job": ("job", "attempt", "workload", "lease"),
    "Its nodes": ("node", "hostfile", "pool", "count", "min_nodes"),
    "The request": ("tier", "max_age", "collective", "wait", "mode"),
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
    help="How long the job will run, such as 12h: excludes nodes that EC2 will stop or reboot earlier.",
)
@click.option(
    "--mode", shell_complete=one_of("enforce", "observe"), help="enforce or observe (default: the aggregator's)."
)
@click.option(
    "--workload",
    metavar="W",
    help="Workload whose end ends the lease, as pid:1234 or pod:NAMESPACE/NAME/UID (default: the hook's pod or job).",
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

    Name and attempt identify the gate: the same question again gets the same answer. After a "no", ask again with the
    next --attempt.

    Exit code 0: admitted. 75: not admitted, try again or elsewhere. 1: impossible as asked. 2: usage, or a token that
    may not ask.
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
    from healthd.core.http.client import NotAdmittedError

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


gate.add_command(outcome)
gate.add_command(release)


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


def own_workload(environ: Mapping[str, str], nodes: Sequence[str] | None) -> str | None:
    """
    What the host's scheduler calls the job that this hook runs in: its allocation is no obstacle to its own gate, and
    the lease ends with it. `nodes` are those that are asked for, None for the hook's own: a pod may ask for others,
    whose jobs have nothing to do with its end.
    """
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm:{job}"
    here = nodes is None or (len(nodes) == 1 and environ.get("NODE_NAME") in (None, nodes[0]))
    return own_pod(environ) if here else None


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
            from healthd.cli.terminal import render

            render.show(render.out(), render.decision_report(decision))
            if text := lease_line(decision):
                click.echo(f"  {text}")


def lease_line(decision: Decision) -> str:
    """How long the nodes are the job's, for who starts it; empty where it has no lease."""
    seconds = decision.policy.get("lease_seconds")
    if (
        decision.decision is not Verdict.ADMIT
        or not decision.nodes
        or not isinstance(seconds, int | float)
        or not seconds
    ):
        return ""
    asked = decision.request is not None and decision.request.lease_seconds is not None
    return (
        f"leased until the job ends, or for {span(seconds)} if its end cannot be observed "
        f"({'as requested' if asked else 'set with --lease'})"
    )


def again_line(decision: Decision, asked_seconds: float) -> str:
    """
    How to ask anew, where a "no" is the answer to an earlier question; empty for any other decision. `asked_seconds` is
    how long ago this question was asked.
    """
    age, request = decision.decided_seconds_ago, decision.request
    if decision.decision is not Verdict.REJECT or age is None or request is None or age <= asked_seconds:
        return ""
    return f"decided {span(age)} ago; ask again with --attempt {request.attempt + 1}"


def exit_code(decision: Decision, asked: GateSettings) -> int:
    """What a decision comes to for who started this."""
    if decision.decision is not Verdict.ADMIT:
        # In other styles every "no" is 1: what is not known is never said here, but by UnreachableError (75).
        return NOT_ADMITTED if decision.retryable and asked.exit_style == "plain" else IMPOSSIBLE
    return ADMITTED


def _withdraw(settings: Settings, request: GateRequest) -> str:
    """Give the gate back, so that it is not admitted to nobody; what came of it, as the end of a sentence."""
    from healthd.core.http.client import GateClient

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
