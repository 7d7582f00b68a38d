"""`healthd fleet digests` and `steps`: what the comparison of nodes with each other has found."""

from __future__ import annotations

from typing import Any

import click

from checks.limits import quantity
from healthd.cli.fleet.line import aggregator_of, fleet_options, print_json
from healthd.cli.settings.options import Command
from healthd.core.text import counted


@click.command(cls=Command, short_help="Nodes whose training step gives other bits than their peers'.")
@fleet_options
def digests(as_json: bool, **options: Any) -> int:
    """
    Nodes whose training step gives other bits than that of nodes like them, and the first operation that differs.

    Exit code: 0 none differs, 1 some do, 3 it cannot be told.
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
            click.echo(f"{one['node']} {one['message']} (nobody is accused)")
        if not differing and found["compared"]:
            click.echo(f"no node differs from its peers ({found['compared']} compared)")
        elif not differing:
            click.echo(f"nothing was compared: of {found['nodes']} with digests no two are of one kind")
    return 1 if differing else 0 if found["compared"] else 3


@click.command(cls=Command, short_help="Running jobs by their steps, and nodes that are slow in them.")
@fleet_options
def steps(as_json: bool, **options: Any) -> int:
    """
    Running jobs that report their steps, and the nodes that are slow in them by their own time.

    Exit code: 0 none is slow, 1 some are, 3 it cannot be told.
    """
    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/fleet/steps")
    compared = any(job["step_seconds"] is not None for job in found["jobs"])
    if as_json:
        print_json(found)
    else:
        for job in found["jobs"]:
            took = "not compared yet" if job["step_seconds"] is None else quantity("x_seconds", job["step_seconds"])
            ranks, nodes = counted(job["ranks"], "rank"), counted(job["nodes"], "node")
            click.echo(f"{job['job']}: {ranks}, {nodes} compared, own time of a step {took}")
        for one in found["slow"]:
            click.echo(f"{one['node']} {one['message']}")
        if not compared:
            click.echo("nothing was compared: no job has told enough steps from more than one node")
    return 1 if found["slow"] else 0 if compared else 3
