"""`healthd kueue`: the controller as a service."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import click

from healthd.cli.services import log_format_option, log_lines
from healthd.cli.settings.options import Command, aggregator_option, common_options, load_settings
from healthd.integrations.kueue.settings import KueueSettings


@click.command(cls=Command, short_help="Gate the jobs of Kueue, as the controller of its AdmissionChecks.")
@common_options
@log_format_option
@aggregator_option
@click.option("--api-server", metavar="URL", help="URL of the API server (default: as in every pod).")
def kueue(log_format: Literal["text", "json"], **options: Any) -> int:
    """
    Gate the jobs of Kueue: the controller of AdmissionChecks with controllerName healthd.internal/gate.

    It runs in the cluster, beside the aggregator. Exit code: 0 after SIGTERM, 2 for usage or configuration, 1
    otherwise.
    """
    settings = load_settings(options, section="kueue")
    from healthd.integrations.kueue.run import run_kueue

    log_lines(log_format)
    asyncio.run(run_kueue(settings.of("kueue", KueueSettings)))
    return 0
