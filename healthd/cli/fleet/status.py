"""`healthd fleet status`: every node on a line, once or until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from healthd.cli.fleet.line import aggregator_of, fleet_options, print_json
from healthd.cli.settings.options import Command
from healthd.core.errors import UnreachableError
from healthd.core.model import Health
from healthd.core.text import moment

if TYPE_CHECKING:
    from rich.table import Table

    from healthd.core.http.client import Aggregator

PAGE = 500
MOST_NODES = 20_000
# Often enough for eyes; each costs the aggregator a page of its nodes.
WATCH_SECONDS = 2.0

Found: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]]]
"""The numbers of the fleet, and its nodes."""


@click.command(cls=Command)
@fleet_options
@click.option("--health", type=click.Choice([one.value for one in Health]), help="Only nodes with this health.")
@click.option("--pool", metavar="P", help="Only nodes in this pool.")
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
def status(
    as_json: bool = False,
    health: str | None = None,
    pool: str | None = None,
    watch: bool = False,
    **options: Any,
) -> int:
    """List every node, the worst first."""
    with aggregator_of(options) as aggregator:

        def look() -> Found:
            return aggregator.get("/v1/fleet"), _rows(aggregator, health=health, pool=pool)

        def report(found: Found) -> list[Table | str]:
            from healthd.cli.terminal.fleet import fleet_report

            summary, nodes = found
            asked = [word for word, given in (("health", health), ("pool", pool)) if given]
            none = [f"no node matches {' and '.join(asked)}"] if asked and not nodes else []
            return [*fleet_report(summary, nodes), *none]

        def print_once(found: Found) -> None:
            if as_json:
                print_json({"fleet": found[0], "nodes": found[1]})
            else:
                from healthd.cli.terminal import render

                render.show(render.out(), report(found))

        if not watch:
            print_once(look())
        elif sys.stdout.isatty() and not as_json:
            _watch_on_terminal(look, report)
        else:
            _watch_into_pipe(look, print_once)
    return 0


def _watch_on_terminal(look: Callable[[], Found], report: Callable[[Found], list[Table | str]]) -> None:
    """Each time in the place of what was there; while nobody answers, the last answer with its time stays there."""
    from rich.markup import escape

    from healthd.cli.terminal import render

    console = render.out()
    last: list[Table | str] = []
    while True:
        try:
            found = look()
            last = [f"[dim]{moment(time.time())}, every {WATCH_SECONDS:g} s until Ctrl-C[/]", *report(found)]
            render.redraw(console, last)
        except UnreachableError as error:
            render.redraw(console, [f"[yellow]! {escape(str(error))}; trying again[/]", *last])
        time.sleep(WATCH_SECONDS)


def _watch_into_pipe(look: Callable[[], Found], print_once: Callable[[Found], None]) -> None:
    """One after the other, until nobody reads on, as behind `| head`."""
    while True:
        try:
            print_once(look())
        except UnreachableError as error:
            click.echo(f"healthd: {error}; trying again", err=True)
        sys.stdout.flush()
        if getattr(sys.stdout, "dropped", False):
            return
        time.sleep(WATCH_SECONDS)


def _rows(aggregator: Aggregator, **wanted: str | None) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    after: str | None = None
    while len(nodes) < MOST_NODES:
        page = aggregator.get("/v1/nodes", limit=PAGE, after=after, **wanted)
        nodes += page["nodes"]
        after = page.get("next")
        if after is None:
            return nodes
    click.echo(
        f"healthd: only the first {MOST_NODES} nodes by name are listed; narrow the list with --health or --pool",
        err=True,
    )
    return nodes
