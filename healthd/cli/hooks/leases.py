"""`healthd gate release` and `healthd fleet release-lease`: give the nodes of a job back."""

from __future__ import annotations

from typing import Any

import click

from healthd.cli.completion import complete_jobs, complete_nodes
from healthd.cli.fleet.line import aggregator_of, done, fleet_options, gate_client, print_json, segment
from healthd.cli.settings.options import Command, load_settings
from healthd.core.errors import ConfigError, NotFoundError

RELEASED, NOTHING_TO_RELEASE = 0, 1
MOST_NAMED = 20


@click.command("release", cls=Command, short_help="Give a job's nodes back: it has ended.")
@fleet_options
@click.option(
    "--job", metavar="J", shell_complete=complete_jobs, help="Name of the job, as in the request of its gate."
)
@click.option(
    "--attempt", type=int, metavar="A", help="Number of the attempt, as in the request of its gate (default 0)."
)
@click.pass_context
def release(ctx: click.Context, /, as_json: bool, **options: Any) -> int:
    """
    Give the nodes of a job back, or withdraw its gate while that is open. The job itself is not touched.

    It says which nodes are given back; a node is free as soon as it has heard of it.

    Exit code 0: released. 1: nothing to give back: no gate of this job and attempt, or its leases have ended. 2: usage,
    or a token that may not release.
    """
    before = ctx.obj if isinstance(ctx.obj, dict) else {}  # what was said before the name of the command
    settings = load_settings({**before, **{k: v for k, v in options.items() if v is not None}}, section="gate")
    asked = settings.gate
    if not asked.job:
        raise ConfigError("--job is missing: name the job as its gate was asked with it")
    of_job = f"job {asked.job} attempt {asked.attempt}"
    try:
        with gate_client(settings) as aggregator:
            nodes = aggregator.withdraw(asked.job, asked.attempt)
    except NotFoundError as error:
        if as_json:
            print_json({"ok": False, "message": str(error), "nodes": []})
        click.echo(f"healthd: {error}; an admin can free a node: healthd fleet release-lease NODE", err=True)
        return NOTHING_TO_RELEASE
    if nodes:
        more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
        text = f"{of_job} gives back {', '.join(nodes[:MOST_NAMED])}{more}"
    else:
        text = f"the gate of {of_job} is withdrawn; it had no node yet"
    done(as_json, text, nodes=list(nodes))
    return RELEASED


@click.command("release-lease", cls=Command, short_help="End every lease on a node, whoever gave it.")
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
