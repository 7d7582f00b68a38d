"""`healthd fleet digests`: what the comparison of nodes with each other has found."""

from __future__ import annotations

from typing import Any

import click

from healthd.cli.fleet.line import aggregator_of, fleet_options, print_json
from healthd.cli.settings.options import load_settings


@click.command(short_help="Nodes whose training step gives other bits than their peers'.")
@fleet_options
def digests(as_json: bool, **options: Any) -> int:
    """
    Nodes whose training step gives other bits than that of nodes like them, and the first operation that differs.

    Exit code: 0 none differs, 1 some do, 2 it cannot be told.
    """
    settings = load_settings(options, section="gate")
    with aggregator_of(settings) as aggregator:
        found = aggregator.get("/v1/fleet/digests")
    if as_json:
        print_json(found)
    else:
        for what in ("accused", "suspects"):
            for one in found[what]:
                click.echo(f"{one['node']} {one['message']}" + ("" if what == "accused" else " (nobody is accused)"))
        if not found["accused"] and not found["suspects"]:
            click.echo(f"no node differs from its peers ({found['nodes']} have given digests)")
    return 1 if found["accused"] or found["suspects"] else 0
