"""`healthd gate release` and `healthd fleet release-lease`: give the nodes of a job back."""

from __future__ import annotations

from typing import Any

import click

from healthd.cli.completion import complete_jobs, complete_nodes
from healthd.cli.fleet.line import aggregator_of, done, fleet_options, gate_client, print_json, segment
from healthd.cli.settings.options import Command, load_settings
from healthd.core.errors import ConfigError

RELEASED, NO_SUCH_JOB = 0, 1


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

    Exit code 0: released. 1: no gate of this job and attempt. 2: usage, or a token that may not release.
    """
    before = ctx.obj if isinstance(ctx.obj, dict) else {}  # what was said before the name of the command
    settings = load_settings({**before, **{k: v for k, v in options.items() if v is not None}}, section="gate")
    asked = settings.gate
    if not asked.job:
        raise ConfigError("--job is missing: name the job as its gate was asked with it")
    with gate_client(settings) as aggregator:
        there = aggregator.withdraw(asked.job, asked.attempt)
    if there:
        done(as_json, f"the nodes of job {asked.job} attempt {asked.attempt} are given back")
        return RELEASED
    text = f"there is no gate of job {asked.job} attempt {asked.attempt}, or a later attempt has superseded it"
    if as_json:
        print_json({"ok": False, "message": text})
    click.echo(f"healthd: {text}; an admin can free a node: healthd fleet release-lease NODE", err=True)
    return NO_SUCH_JOB


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
