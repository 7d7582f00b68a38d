"""`healthd node` and `healthd aggregator`: the services."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any, Literal

import click

from healthd.cli.settings.options import (
    Command,
    common_options,
    common_options_of_aggregator,
    load_settings,
)
from healthd.cli.terminal.log import goes_to_the_journal, log_to_stderr
from healthd.core.errors import BadInputError, ConfigError
from healthd.core.node_name import check_name

log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log format: lines of text, or one JSON object per line.",
)


@click.command(cls=Command)
@common_options
@log_format_option
@click.option("--name", metavar="N", help="Name of the node in the fleet (default: the host's).")
@click.option("--listen", metavar="HOST:PORT", help="Address of the read-only HTTP port (/health, /metrics).")
@click.option("--interface", metavar="IF", help="Network interface of the ranks of collectives (default: by route).")
@click.option(
    "--aggregator", "aggregators", multiple=True, metavar="URL", help="Aggregators, preferred first; repeatable."
)
@click.option("--label", multiple=True, metavar="NAME=VALUE", help="A label, such as pool=a; repeatable.")
@click.option(
    "--unprompted", help="When active checks run unprompted: idle, boot or off (default: depends on the host)."
)
@click.option(
    "--fault", multiple=True, metavar="FAULT", help="Inject a fault: CHECK[@TARGET]=KIND[:VALUE]; repeatable."
)
def node(
    aggregators: tuple[str, ...],
    label: tuple[str, ...],
    unprompted: str | None,
    log_format: Literal["text", "json"],
    **options: Any,
) -> int:
    """
    Run the daemon of this node.

    Exit code: 0 after SIGTERM, 2 for usage or configuration, 1 otherwise.
    """
    options["sync.aggregators"] = aggregators
    options["label"] = ",".join(label) or None
    options["active.unprompted"] = unprompted
    for shared in ("token_file", "ca_file"):
        options[f"sync.{shared}"] = options.pop(shared)
    settings = load_settings(options, section="node")
    try:
        check_name(settings.node.name)
    except BadInputError as error:
        raise ConfigError(f"--name: {error}") from None
    from healthd.node.daemon import run_node

    log_lines(log_format)
    # A daemon looks after the node for all jobs, also where a scheduler has started it (a DaemonSet).
    asyncio.run(run_node(settings.node, settings.runner(in_job=False)))
    return 0


@click.command(cls=Command)
@common_options_of_aggregator
@log_format_option
@click.option("--listen", metavar="HOST:PORT", help="Address to listen on (default 127.0.0.1:8090).")
@click.option(
    "--token-table",
    type=click.Path(path_type=Path),
    metavar="F",
    help="TOML file of accepted tokens ('healthd token').",
)
@click.option(
    "--database", metavar="URL", help="SQLAlchemy URL of the database (default: SQLite in the state directory)."
)
@click.option("--tls-cert", type=click.Path(path_type=Path), metavar="F", help="Certificate chain (PEM).")
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="F", help="Its private key (PEM).")
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond loopback without TLS or tokens.")
@click.option("--advertise-url", metavar="URL", help="URL under which nodes and other aggregators reach this one.")
@click.option("--mode", help="Default mode of gates: enforce or observe.")
@click.option("--step-down", is_flag=True, help="End the lease of the leading aggregator; a standby takes over.")
def aggregator(mode: str | None, step_down: bool, log_format: Literal["text", "json"], **options: Any) -> int:
    """
    Run the aggregator of a fleet. Several on one PostgreSQL are standbys for each other.

    Exit code: 0 after SIGTERM or --step-down, 2 for usage or configuration, 1 otherwise.
    """
    options["policy.mode"] = mode
    options["aggregator.ca_file"] = options.pop("ca_file")
    settings = load_settings(options, section="aggregator")
    if step_down:
        from healthd.aggregator.store import step_down as end_lease

        before = end_lease(settings.aggregator.database_url)
        where = f" at {before.url}" if before.url else ""
        click.echo(
            f"{before.holder}{where} no longer leads (term {before.term})"
            if before.holder
            else f"no aggregator led (term {before.term})"
        )
        return 0
    from healthd.aggregator.process import run_aggregator

    log_lines(log_format)
    asyncio.run(
        run_aggregator(
            settings.aggregator,
            settings.policy,
            actuator=settings.actuator,
            screening=settings.screening,
            callers_may=settings.gate.callers_may,
        )
    )
    return 0


def log_lines(form: Literal["text", "json"]) -> None:
    """One line an event on standard error; text has no time of its own where the journal adds it."""
    journal = form == "text" and goes_to_the_journal(sys.stderr, os.environ)
    log_to_stderr(logging.INFO, "plain" if journal else form)
    for noisy in ("httpx", "httpcore", "alembic", "sqlalchemy"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
