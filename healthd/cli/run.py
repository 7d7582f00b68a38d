"""`healthd run`: start a job's command, and say why it died where it does."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import click

from healthd.core.errors import ConfigError
from healthd.postmortem import EXIT_CODES

PARENT = Path(__file__).parent.parent / "postmortem" / "parent.py"
MAX_SECONDS = 3600.0


@click.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Example: healthd run --logs 'logs/*.log' -- torchrun --nproc-per-node 8 train.py",
)
@click.option("--logs", multiple=True, metavar="GLOB", help="Log files of the job, by pattern; repeatable.")
@click.option("--measure/--no-measure", default=True, help="Check this node after a bad end (default: yes).")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Maximum time for the post-mortem.")
@click.option("--json-out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the verdict as JSON.")
@click.option(
    "--notes-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for this node's notes, also after a good end; read by 'healthd postmortem'.",
)
@click.option(
    "--job", metavar="J", help="Send the notes of a bad end to the aggregator, as the end of this job's gate."
)
@click.option("--attempt", type=click.IntRange(min=0), default=0, metavar="A", help="The gate's attempt (default 0).")
@click.option("--node", metavar="N", help="Name of this node in the fleet (default: NODE_NAME, then the host name).")
@click.option("--aggregator", multiple=True, metavar="URL", help="URL of the aggregator; repeatable.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="F", help="File with the bearer token.")
@click.option(
    "--ca-file", type=click.Path(path_type=Path), metavar="F", help="CA that signed the aggregator's certificate (PEM)."
)
@click.option("--config", type=click.Path(path_type=Path), metavar="F", help="TOML file with the settings of healthd.")
@click.option(
    "--exit-style",
    type=click.Choice(["command", "verdict"]),
    default="command",
    help="Exit with the command's code (default) or with a retry code (75, 76, 70, 79).",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    command: tuple[str, ...],
    logs: tuple[str, ...],
    measure: bool,
    seconds: float,
    json_out: Path | None,
    notes_dir: Path | None,
    job: str | None,
    attempt: int,
    node: str | None,
    aggregator: tuple[str, ...],
    token_file: Path | None,
    ca_file: Path | None,
    config: Path | None,
    exit_style: str,
) -> None:
    """
    Run COMMAND and diagnose it if it fails.

    Standard input, output, error and the terminal belong to the command, and signals are passed on to it. The exit code
    is the command's: 128 plus the signal's number if a signal ended it, 127 if the command does not exist, 126 if it
    cannot be executed, 2 for usage.

    With --exit-style verdict a failure exits with 75 if a retry elsewhere can help, 76 if a retry here can help, 70
    if certainly no retry can help, and 79 if an operator stopped it. If nothing explains the failure, or the verdict
    is only suspected and nothing was measured, the exit code is the command's.
    """
    if not 1.0 <= seconds <= MAX_SECONDS:
        raise ConfigError(f"--seconds {seconds:g} must be between 1 and {MAX_SECONDS:g}")
    for folder, option in ((json_out and json_out.absolute().parent, "--json-out"), (notes_dir, "--notes-dir")):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{option}: no such directory: {folder}; create it first")
    python = sys.executable or shutil.which("python3") or ""
    explain = [python, *(["-I"] if sys.flags.isolated else ["-P"]), "-m", "healthd", "postmortem", "--from-run"]
    explain += [argument for pattern in logs for argument in ("--logs", pattern)]
    explain += ["--measure" if measure else "--no-measure", "--seconds", f"{seconds:g}"]
    explain += ["--json-out", str(json_out.absolute())] if json_out else []
    explain += ["--notes-dir", str(notes_dir.absolute())] if notes_dir else []
    explain += ["--job", job, "--attempt", str(attempt)] if job else []
    explain += ["--node", node] if node else []
    explain += ["--aggregator", ",".join(aggregator)] if aggregator else []
    for option, file in (("--token-file", token_file), ("--ca-file", ca_file), ("--config", config)):
        explain += [option, str(file.absolute())] if file else []
    options = {"explain": explain, "seconds": seconds, "always": bool(notes_dir or job)}
    if exit_style == "verdict":
        options["verdict_codes"] = sorted(EXIT_CODES.values())
    # What lasts as long as the job is a program of its own, half as large as this one.
    os.execv(python, [python, "-I", "-S", str(PARENT), json.dumps(options), "--", *command])  # noqa: S606  never through a shell
