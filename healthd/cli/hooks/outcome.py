"""`healthd gate outcome`: how the job ended, so that the gate can be held against it."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from healthd.cli.completion import complete_jobs
from healthd.cli.fleet.line import gate_client
from healthd.cli.settings.options import Command, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.core.errors import ConfigError, UnreachableError

TOLD, NO_SUCH_JOB, NOT_TOLD = 0, 1, 75
MAX_MESSAGE = 4096
"""Characters that an aggregator takes."""

PAUSES_SECONDS = (1.0, 3.0)
"""Before it is tried again: an aggregator that restarts is back by then, and a launcher at its end waits no longer."""


@click.command(cls=Command, short_help="Tell how a job ended: ok, failed or infra.")
@common_options
@click.argument("status", type=click.Choice(["ok", "failed", "infra"]))
@click.option("--aggregator", metavar="URL", help="URL of the aggregator.")
@click.option(
    "--job", metavar="J", shell_complete=complete_jobs, help="Name of the job, as in the request of its gate."
)
@click.option(
    "--attempt", type=int, metavar="A", help="Number of the attempt, as in the request of its gate (default 0)."
)
@click.option("--message", metavar="T", default="", help="A line for people, kept with the gate.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
@click.pass_context
def outcome(ctx: click.Context, /, status: str, message: str, as_json: bool, **options: Any) -> int:
    """
    Tell how a job ended: ok, failed (its own fault) or infra (a device, a link or a host stopped it).

    Exit code 0: told. 1: no gate of this job and attempt. 75: the aggregator cannot be reached. 2: usage,
    or a token that may not tell.
    """
    before = ctx.obj if isinstance(ctx.obj, dict) else {}  # what was said before the name of the command
    settings = load_settings({**before, **{k: v for k, v in options.items() if v is not None}}, section="gate")
    asked = settings.gate
    if not asked.job:
        raise ConfigError("--job is missing: name the job as its gate was asked with it")
    line = message[:MAX_MESSAGE].encode(errors="replace").decode()  # the end of a log may begin inside of a character
    gate = _told(settings, asked.job, asked.attempt, status, line)
    if as_json:
        from healthd.core import wire

        told = {"job": asked.job, "attempt": asked.attempt, "status": status, "gate": gate}
        sys.stdout.write(wire.encode(told).decode() + "\n")
    if gate is None:
        click.echo(
            f"healthd: job {asked.job} has no gate for attempt {asked.attempt}; "
            f"'healthd fleet explain {asked.job}' shows its newest",
            err=True,
        )
        return NO_SUCH_JOB
    if not as_json:
        click.echo(f"job {asked.job} attempt {asked.attempt} ended: {status} (gate {gate})")
    return TOLD


def _told(settings: Settings, job: str, attempt: int, status: str, message: str) -> str | None:
    """The gate that was told, None when there is none. UnreachableError when nobody heard it after some tries."""
    with gate_client(settings) as aggregator:
        for pause in PAUSES_SECONDS:
            try:
                return aggregator.outcome(job, attempt, status, message)
            except UnreachableError:
                time.sleep(pause)
        return aggregator.outcome(job, attempt, status, message)
