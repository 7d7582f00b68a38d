"""`healthd record`: this machine's readings as a directory that `--host-root` replays."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from healthd.cli.settings.options import common_options, load_settings


@click.command(short_help="Record what checks read on this machine.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--no-tools", is_flag=True, help="Do not run the vendors' tools.")
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
@common_options
def record(directory: Path, no_tools: bool, as_json: bool, **options: Any) -> int:
    """
    Record what checks read on this machine into DIRECTORY, which must not exist yet; only you can read it.

    'healthd check --tier passive --host-root DIRECTORY' then gives the same findings. No environment, command line or
    mount password is recorded; host names and addresses are. Run as root to record everything.
    """
    from checks.host.machine import Host
    from healthd.record import record as record_machine

    settings = load_settings(options, section="node")
    made = record_machine(Host(settings.node.host_root), directory, tools=not no_tools)
    if as_json:
        said = {"directory": str(directory), "files": made.files, "bytes": made.bytes, "left_out": made.left_out}
        sys.stdout.write(json.dumps(said) + "\n")
        return 0
    click.echo(f"{directory}: {made.files} files, {made.bytes / 1e6:.1f} MB")
    for path, why in made.left_out.items():
        click.echo(f"left out: {path}: {why}")
    return 0
