"""`healthd fleet explain` and `validate`: a decision with its reasons, and collectives over nodes without a job."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from checks.words import Status
from healthd.cli.completion import complete_gates, complete_nodes
from healthd.cli.fleet.line import (
    aggregator_of,
    duration_of,
    fleet_options,
    print_json,
    segment,
    withdrawn_when_stopped,
)
from healthd.cli.settings.options import Command
from healthd.core.backoff import Backoff
from healthd.core.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from healthd.core.http.client import Aggregator

NOT_FOUND = 404
AWAY_SECONDS = 60.0
"""How long a validation is followed without an answer: an aggregator that restarts is back by then."""


@click.command(cls=Command, short_help="Show a gate's decision with its evidence and rounds, and why its job died.")
@click.argument("gate", metavar="GATE|JOB[:ATTEMPT]", shell_complete=complete_gates)
@fleet_options
def explain(gate: str, as_json: bool, **options: Any) -> int:
    """
    Show a gate's decision with its evidence and, if the job's failure was reported, why the job died.

    GATE is its id, or JOB for the newest gate of a job, or JOB:ATTEMPT.
    """
    from healthd.core import wire
    from healthd.core.model import Decision

    with aggregator_of(options) as aggregator:
        job, colon, attempt = gate.rpartition(":")
        asked = aggregator.gate_of(job, int(attempt)) if colon and job and attempt.isdecimal() else None
        path = f"/v1/gates/{segment(asked or gate)}"
        decision = aggregator.call("GET", path)
        died = _end_of_job(aggregator, path)
        if as_json:
            print_json({**wire.decode(decision, dict[str, Any], what="decision"), "postmortem": died})
            return 0
        from healthd.cli.terminal import decisions, render

        console = render.out()
        read = wire.decode(decision, Decision, what="decision")
        render.show(console, decisions.decision_report(read, whole=True))
        if read.policy.get("collective"):
            runs = aggregator.get(f"/v1/validations/{segment(read.id)}")
            render.show(console, decisions.rounds_report(runs["validations"]))
        if died is not None:
            _show_end(died)
    return 0


@click.command(cls=Command, short_help="Run collectives over nodes and find the node at fault.")
@click.argument("nodes", nargs=-1, shell_complete=complete_nodes)
@click.option("--pool", metavar="P", help="Take nodes from this pool, with --count.")
@click.option("--count", type=int, metavar="K", help="Number of nodes to take from the pool.")
@click.option(
    "--kind",
    type=click.Choice(["collectives", "training"]),
    default="collectives",
    show_default=True,
    help="What to run: collectives, or steps of data-parallel training.",
)
@click.option("--wait", metavar="T", default="10m", show_default=True, help="Maximum time to wait for the verdict.")
@fleet_options
def validate(
    nodes: tuple[str, ...], pool: str | None, count: int | None, kind: str, wait: str, as_json: bool, **options: Any
) -> int:
    """
    Run collectives over NODES together, or with --kind the training steps of a small model, and find the node at fault.
    No lease is granted.

    Exit code: 0 all passed together, 1 not all passed, 3 unknown.
    """
    if bool(nodes) == (pool is not None):
        raise ConfigError("choose the nodes: by name, or with --pool P --count K")
    body = {"nodes": nodes, "pool": pool, "count": count, "kind": kind, "wait_seconds": duration_of("--wait", wait)}
    from healthd.core import wire
    from healthd.core.model import Decision, Verdict

    found = _validated(options, body, quiet=as_json)
    decision = wire.convert(found["decision"], Decision, what="decision")
    from healthd.cli.terminal import decisions, render

    if as_json:
        print_json(found)
    else:
        render.show(render.out(), decisions.validation_report(decision, found["validations"]))
    if decision.decision is Verdict.ADMIT:
        return 0
    return 1 if any(one.status is Status.FAIL for one in decisions.all_reasons(decision)) else 3


def _end_of_job(aggregator: Aggregator, path: str) -> dict[str, Any] | None:
    """Why the job of a gate died, as the aggregator answers it; None where nobody has told of a bad end."""
    from healthd.core.http.client import RefusedError

    try:
        found: dict[str, Any] = aggregator.get(f"{path}/postmortem")
    except RefusedError as error:
        if error.status == NOT_FOUND:
            return None
        raise
    return found


def _show_end(died: Mapping[str, Any]) -> None:
    from healthd.aggregator.jobs.postmortem_records import PostmortemPhase, PostmortemState
    from healthd.cli.postmortem import screen
    from healthd.core import wire

    found = wire.convert(died, PostmortemState, what="why the job died")
    record = found.postmortem
    if record.verdict is not None:
        click.echo("\n".join(screen(record.verdict, missing=found.missing)))
    if record.phase is not PostmortemPhase.FINAL:
        click.echo(f"healthd: why it died: not final yet: {record.phase.value}")


def _validated(options: dict[str, Any], body: dict[str, Any], *, quiet: bool) -> Any:
    """Start a validation and follow it to its end."""
    from healthd.cli.terminal.progress import Progress
    from healthd.core import wire
    from healthd.core.model import Decision

    with aggregator_of(options) as aggregator, Progress(quiet=quiet) as progress:
        started = aggregator.call("POST", "/v1/validations", body=body, query={"wait": "0"})
        found = wire.decode(started, dict[str, Any], what="answer of the aggregator")
        with withdrawn_when_stopped(aggregator, found["id"]) as signals:
            while found["decision"]["decision"] == "hold":
                progress.hold(wire.decode(wire.encode(found["decision"]), Decision, what="decision"))
                follow = functools.partial(_followed, aggregator, found["id"], progress.every_seconds)
                found = signals.wait_for(follow)
    return found


def _followed(aggregator: Aggregator, gate: str, seconds: float) -> Any:
    """What is known of a validation after so long; asked again for AWAY_SECONDS while nobody answers."""
    backoff, failures, began = Backoff(0.5, 5.0), 0, time.monotonic()
    while True:
        try:
            return aggregator.get(f"/v1/validations/{gate}", wait=f"{seconds:g}")
        except UnreachableError as error:
            if time.monotonic() - began >= AWAY_SECONDS:
                raise UnreachableError(f"{error}; 'healthd fleet explain {gate}' shows the result") from None
        failures += 1
        time.sleep(backoff.after(failures))
