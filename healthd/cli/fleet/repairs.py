"""`healthd fleet repairs`: the repairs that healthd advises, and what people decide about them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from healthd.cli.completion import complete_nodes
from healthd.cli.fleet.line import aggregator_of, done, fleet_options, own_name, print_json, segment
from healthd.cli.settings.options import Command
from healthd.core.errors import ConfigError
from healthd.core.text import counted, span

if TYPE_CHECKING:
    from rich.table import Table

MOST_CLOSED = 100
DECISIONS = {"accept": "accepted", "reject": "rejected", "done": "marked as done"}


@click.command(cls=Command, short_help="List advised repairs; accept or reject them, or mark them as done.")
@click.argument("what", type=click.Choice(["list", *DECISIONS]), default="list")
@click.argument("node", required=False, shell_complete=complete_nodes)
@click.option("--device", metavar="D", help="Only the repair of this device, as the list names it.")
@click.option("--reason", help="Reason; kept with the repair. Required for a decision.")
@click.option("--closed", is_flag=True, help="List the newest closed repairs too.")
@fleet_options
def repairs(
    what: str, node: str | None, device: str | None, reason: str | None, closed: bool, as_json: bool, **options: Any
) -> int:
    """
    List the repairs that healthd advises (replace, reset, reboot), or decide about those of NODE.

    `accept` says that a person takes it on, `reject` that it will not be made. `done` says that it was made: NODE stays
    quarantined until it passes the deep or soak tier.
    """
    if what == "list":
        if node is not None or device is not None or reason is not None:
            raise ConfigError("NODE, --device and --reason belong to a decision: accept, reject or done")
        with aggregator_of(options) as aggregator:
            found = aggregator.get("/v1/fleet/repairs", closed=MOST_CLOSED if closed else 0)
        if as_json:
            print_json(found)
            return 0
        from healthd.cli.terminal import render

        render.show(render.out(), repair_lines(found["repairs"]))
        return 0
    if node is None or reason is None or closed:
        raise ConfigError(f"usage: healthd fleet repairs {what} NODE --reason WHY [--device D]")
    from healthd.core import wire

    body = {"decision": what, "device": device, "reason": reason, "owner": own_name()}
    with aggregator_of(options) as aggregator:
        answer = aggregator.call("PUT", f"/v1/nodes/{segment(node)}/repairs", body=body)
    left = wire.decode(answer, dict[str, Any], what="repairs")["repairs"]
    meant = [one["device"] for one in left if device in (None, one["device"])]
    then = "; the node stays quarantined until it passes the deep or soak tier" if what == "done" else ""
    said = f"{node}: {counted(len(meant), 'repair')} {DECISIONS[what]} ({', '.join(meant)}){then}"
    done(as_json, said, repairs=left)
    return 0


def repair_lines(found: Iterable[Mapping[str, Any]]) -> Iterable[Table | str]:
    """The list as people read it."""
    from rich.markup import escape

    from healthd.cli.terminal.render import table_of

    table = table_of("node", "device", "advice", "state", "open for", "finding", "last", wrapped=("finding", "last"))
    for one in found:
        last = one["steps"][-1]
        ended = one["closed_at"]
        age = span((time.time() if ended is None else ended) - one["since"])
        words = (one["node"], one["device"], one["advice"], one["state"], age)
        finding, why = f"{one['check']} {one['code']}: {one['message']}", f"{last['by']}: {last['why']}"
        table.add_row(*map(escape, (*words, finding, "" if one["state"] == "advised" else why)))
    yield table if table.row_count else "no repair is advised"
