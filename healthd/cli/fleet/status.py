"""`healthd fleet status`: every node on a line, once or until Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from healthd.cli.fleet.line import aggregator_of, fleet_options, print_json, watch_until_stopped
from healthd.core.model import Health

if TYPE_CHECKING:
    from healthd.core.http.aggregator_client import Aggregator

PAGE = 500
MOST_NODES = 20_000


@click.command()
@fleet_options
@click.option("--health", type=click.Choice([one.value for one in Health]), help="Only nodes of this health.")
@click.option("--pool", help="Only nodes of this pool.")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until Ctrl-C.")
def status(
    as_json: bool = False, health: str | None = None, pool: str | None = None, watch: bool = False, **options: Any
) -> int:
    """Every node on a line, the worst first."""
    with aggregator_of(options) as aggregator:

        def show_once() -> None:
            summary, nodes = aggregator.get("/v1/fleet"), _nodes(aggregator, health, pool)
            if as_json:
                print_json({"fleet": summary, "nodes": nodes})
            else:
                _show_fleet(summary, nodes, health, pool)

        if watch:
            watch_until_stopped(show_once, clear=not as_json)
        else:
            show_once()
    return 0


def _nodes(aggregator: Aggregator, health: str | None, pool: str | None) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    after: str | None = None
    while len(nodes) < MOST_NODES:
        page = aggregator.get("/v1/nodes", limit=PAGE, after=after, health=health, pool=pool)
        nodes += page["nodes"]
        after = page.get("next")
        if after is None:
            return nodes
    click.echo(
        f"healthd: only the first {MOST_NODES} nodes by name are listed; --health and --pool list fewer", err=True
    )
    return nodes


def _show_fleet(summary: dict[str, Any], nodes: list[dict[str, Any]], health: str | None, pool: str | None) -> None:
    from healthd.cli.terminal import fleet_view

    fleet_view.print_fleet(summary, nodes)
    if not nodes and (health or pool):
        click.echo(
            "no node is of that " + " and ".join(word for word, asked in (("health", health), ("pool", pool)) if asked)
        )
