"""`healthd fleet rekey` and `healthd fleet forget`: which key a node's name belongs to."""

from __future__ import annotations

from typing import Any

import click

from healthd.cli.completion import complete_nodes
from healthd.cli.fleet.line import aggregator_of, done, fleet_options, segment


@click.command(short_help="A machine was replaced and kept its name: let its key in.")
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def rekey(node: str, as_json: bool, **options: Any) -> int:
    """
    Let the key in that came last under the name of NODE, in the place of its own: its machine was replaced.

    Make sure first that the old machine is off. Where the other one is the intruder, stop that one and `forget` NODE.
    """
    with aggregator_of(options) as aggregator:
        aggregator.call("POST", f"/v1/nodes/{segment(node)}/rekey")
    done(as_json, f"{node} has the key that came last under its name")
    return 0


@click.command(short_help="Drop a node that is gone: its name, key and quarantine.")
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def forget(node: str, as_json: bool, **options: Any) -> int:
    """
    Drop all that is known of NODE: who comes under that name next is a new node. Refused while a job has it.

    For a name that is gone, and for one that two daemons claimed, once one of them is stopped.
    """
    with aggregator_of(options) as aggregator:
        aggregator.call("DELETE", f"/v1/nodes/{segment(node)}")
    done(as_json, f"{node} is forgotten")
    return 0
