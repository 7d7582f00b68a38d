"""`healthd fleet screening`: which node is screened next in idle hours, and why."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from healthd.cli.fleet.line import aggregator_of, fleet_options, print_json
from healthd.cli.settings.options import Command
from healthd.core.text import span

if TYPE_CHECKING:
    from rich.table import Table

MOST_NODES = 1000


@click.command(cls=Command, short_help="List nodes by risk: which is screened next in idle hours.")
@click.option("--pool", metavar="P", help="Only nodes in this pool.")
@click.option(
    "--limit", type=click.IntRange(1, MOST_NODES), default=50, show_default=True, help="Maximum number of nodes."
)
@fleet_options
def screening(pool: str | None, limit: int, as_json: bool, **options: Any) -> int:
    """
    List the nodes that are screened in idle hours, the highest risk first, with the terms of each risk.

    Nodes that are due come before all others, whatever their risk.
    """
    with aggregator_of(options) as aggregator:
        found = aggregator.get("/v1/fleet/screening", pool=pool, limit=limit)
    if as_json:
        print_json(found)
        return 0
    from healthd.cli.terminal import render

    render.show(render.out(), screening_lines(found))
    return 0


def screening_lines(found: Mapping[str, Any]) -> Iterable[Table | str]:
    """The list as people read it."""
    from rich.markup import escape

    from healthd.cli.terminal.render import table_of

    if found["tier"] is None:
        yield "screening is off: set tier under [screening] in the aggregator's settings"
        return
    table = table_of("node", "risk", "terms", "tier passed", "links passed", "state", wrapped=("terms",))
    for one in found["nodes"]:
        candidate, risk = one["candidate"], one["risk"]
        state = f"runs {one['work']}" if one["work"] else "due" if one["due"] else ""
        terms = ", ".join(_terms(candidate, risk))
        words = (candidate["node"], f"{risk['total']:.0f}", terms, _ago(one["passed_at"]), _ago(one["paired_at"]))
        table.add_row(*map(escape, (*words, state)))
    yield table if table.row_count else "no node is screened: none with active checks has reported in these pools"
    if found["more"]:
        yield f"[dim]and {found['more']} more: --limit[/]"


def _terms(candidate: Mapping[str, Any], risk: Mapping[str, Any]) -> Iterator[str]:
    for term in risk["terms"]:
        never = term["name"] == "days_since_pass" and candidate["days_since_pass"] is None
        value = "never" if never else f"{term['value']:.3g}"
        yield f"{term['name']}={value} (+{term['points']:.0f})"
    if risk["unknown"]:
        yield f"unknown: {' '.join(risk['unknown'])}"


def _ago(at: float | None) -> str:
    return "never" if at is None else f"{span(max(0.0, time.time() - at))} ago"
