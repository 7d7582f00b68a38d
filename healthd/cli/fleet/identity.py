"""`healthd fleet rekey` and `healthd fleet forget`: which key a node's name belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from healthd.cli.completion import complete_nodes
from healthd.cli.fleet.line import aggregator_of, done, fleet_options, segment
from healthd.cli.settings.options import Command


@click.command(cls=Command, short_help="A machine was replaced and kept its name: let its key in.")
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


@click.command(cls=Command, short_help="Drop a node that is gone: its name, key and quarantine.")
@click.argument("node", shell_complete=complete_nodes)
@fleet_options
def forget(node: str, as_json: bool, **options: Any) -> int:
    """
    Drop all that is known of NODE: who comes under that name next is a new node. It says what went with the name.

    For a name that is gone, and for one that two daemons claimed, once one of them is stopped. Refused while a job has
    NODE, and while NODE is quarantined and still reports.
    """
    with aggregator_of(options) as aggregator:
        gone = aggregator.call_json("DELETE", f"/v1/nodes/{segment(node)}")
    lost = ", ".join(_lost(gone))
    more = {name: gone.get(name) for name in ("quarantine", "rules", "accused", "leases")}
    done(as_json, f"{node} is forgotten" + (f", and with it {lost}" if lost else ""), **more)
    return 0


def _lost(gone: Mapping[str, Any]) -> Iterator[str]:
    """What went with a node, besides its name and key."""
    if kept := gone.get("quarantine"):
        yield f"its quarantine by {kept['owner']} ({kept['reason']})"
    if gone.get("rules"):
        yield "what the rules of quarantine remembered of it"
    if accused := gone.get("accused"):
        yield f"an accusation by a validation ({accused['code']}, gate {accused['gate']})"
    for row in gone.get("leases") or ():
        yield f"the lease of job {row['lease']['job']}, which was ending"
