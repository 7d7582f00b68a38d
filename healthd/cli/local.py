"""`healthd fault`, `healthd checks`, `healthd token`: what concerns this host alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from healthd.cli.settings.options import common_options, load_settings
from healthd.core.errors import ConfigError, words_of


@click.group(short_help="Inject faults into a running daemon, as a drill.")
def fault() -> None:
    """Inject faults into a running daemon through its Unix socket, as a drill."""


@fault.command(name="set")
@click.argument("faults", nargs=-1, required=True, metavar="FAULT...")
@common_options
def set_(faults: tuple[str, ...], **options: Any) -> int:
    """
    Inject faults: CHECK[@TARGET]=KIND[:VALUE].

    Kinds: fail, hang, crash, slow:FACTOR, corrupt, missing, garbage, absent, wrong. They affect gates as real faults
    do.
    """
    from healthd.node.http.control_socket import set_faults

    settings = load_settings(options, section="node")
    for line in set_faults(settings.control_socket(), faults):
        click.echo(f"active: {line}")
    return 0


@fault.command()
@click.argument("faults", nargs=-1, metavar="[FAULT...]")
@common_options
def clear(faults: tuple[str, ...], **options: Any) -> int:
    """Clear faults (all, if none is named) and what they latched."""
    from healthd.node.http.control_socket import clear_faults

    settings = load_settings(options, section="node")
    left = clear_faults(settings.control_socket(), faults)
    click.echo("cleared" + (f"; still active: {', '.join(left)}" if left else ""))
    return 0


@click.command(short_help="List the checks.")
@common_options
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
def checks(as_json: bool, **options: Any) -> int:
    """List the checks: name, tier, where they run, what they report."""
    import asyncio

    from healthd.runner.runner import Runner

    settings = load_settings(options, section="node")
    found = asyncio.run(Runner(settings.runner()).catalogue())
    if as_json:
        from healthd.core import wire

        sys.stdout.write(wire.encode(list(found.values())).decode() + "\n")
        return 0
    from healthd.cli.terminal import render

    render.print_checks(found.values())
    return 0


@click.command(short_help="Create a bearer token.")
@click.argument("name")
@click.option("--scope", multiple=True, default=("read",), help="read, sync, gate or admin; repeatable.")
@click.option(
    "--node",
    multiple=True,
    metavar="PATTERN",
    help="Limit the token to these nodes, such as 'trn-a-*'; with scope sync or gate. Repeatable.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the token to this file instead of showing it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only JSON.")
def token(name: str, scope: tuple[str, ...], node: tuple[str, ...], write: Path | None, as_json: bool) -> int:
    """
    Create a bearer token for NAME, and the lines for the aggregator's token table.

    The token goes into a new file that only you can read (--write) or to standard error. The lines for the token
    table (with the token's hash only) go to standard output: 'healthd token ci --scope gate --write ci.token >>
    tokens.toml'. Give the nodes of each rack or pool their own token: 'healthd token trn-a --scope sync --node
    "trn-a-*"'.
    """
    from healthd.aggregator.identity.tokens import Scope, new_token

    known = {item.value: item for item in Scope}
    for text in scope:
        if text not in known:
            raise ConfigError(f"--scope {text!r}: choose one of: {', '.join(known)}")
    secret, entry = new_token(name, [known[text] for text in scope], node)
    if write is not None:
        _write_new(write, secret)
    if as_json:
        sys.stdout.write(json.dumps(({} if write else {"token": secret}) | {"entry": entry}) + "\n")
        return 0
    if write is None:
        click.echo(f"The token, for --token-file on the other side; it is shown only once:\n\n{secret}\n", err=True)
    click.echo(entry)
    return 0


def _write_new(path: Path, secret: str) -> None:
    """Write a secret into a file that is new: one in use would lock out whoever has it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(f"{secret}\n")
        except OSError:
            path.unlink(missing_ok=True)  # without the token it would keep the next try from this name
            raise
    except FileExistsError:
        raise ConfigError(f"{path} exists and may be in use; name a new file") from None
    except OSError as error:
        raise ConfigError(f"{path}: the token cannot be written: {words_of(error)}; name another file") from None
