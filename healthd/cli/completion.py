"""`healthd completion`: has a shell complete commands, options, their values, and names of nodes, jobs and gates."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "healthd"
# Somebody has pressed Tab and waits.
ASK_SECONDS = 1.5
MOST_NAMES = 500


@click.command(short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> int:
    """
    Print the completion script for a shell; without SHELL, for the shell in $SHELL.

    bash: eval "$(healthd completion bash)" in ~/.bashrc; zsh likewise in ~/.zshrc; fish: healthd completion fish >
    ~/.config/fish/completions/healthd.fish. Names of nodes, jobs and gates come from the aggregator in
    HEALTHD_AGGREGATOR.
    """
    from click.shell_completion import get_completion_class

    from healthd.cli import healthd

    chosen = shell or os.path.basename(os.environ.get("SHELL", ""))
    kind = get_completion_class(chosen) if chosen in SHELLS else None
    if kind is None:
        raise click.UsageError(f"unknown shell; choose one of: {', '.join(SHELLS)}")
    click.echo(kind(healthd, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
    return 0


def complete_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of nodes with their health, by the aggregator."""
    from click.shell_completion import CompletionItem

    # Names are sorted: the page begins with what could complete the word.
    after = {"after": f"{incomplete[:-1]}{chr(ord(incomplete[-1]) - 1)}~"} if incomplete else {}
    nodes = _asked(ctx, "nodes", {"limit": MOST_NAMES, **after})
    return [CompletionItem(one["node"], help=one["health"]) for one in nodes if one["node"].startswith(incomplete)]


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the jobs of the newest gates, with what became of these."""
    return _of_gates(ctx, incomplete, ("job",))


def complete_gates(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The newest gates, by job and by id."""
    return _of_gates(ctx, incomplete, ("job", "id"))


def _of_gates(ctx: click.Context, incomplete: str, members: Sequence[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    gates = _asked(ctx, "gates", {"limit": MOST_NAMES})
    found = {one[name]: one["decision"] for name in members for one in reversed(gates)}  # of a job the newest
    return [CompletionItem(name, help=said) for name, said in found.items() if name.startswith(incomplete)]


def _asked(ctx: click.Context, what: str, query: dict[str, Any]) -> list[dict[str, Any]]:
    """What the aggregator lists; nothing where it cannot be asked: Tab says no error."""
    from healthd.cli.settings.options import load_settings
    from healthd.core import wire
    from healthd.core.errors import HealthdError
    from healthd.core.http.client import Aggregator

    names = ("aggregator", "token_file", "ca_file", "config")
    given = {name: value for name, value in ctx.params.items() if name in names}
    try:
        settings = load_settings(given, section="gate")
        endpoint = settings.endpoint()
        with Aggregator(endpoint, slack_seconds=ASK_SECONDS) as aggregator:
            body = aggregator.call("GET", f"/v1/{what}", query=query, hold_seconds=0.0)
            found: list[dict[str, Any]] = wire.decode(body, dict[str, Any], what="its answer")[what]
    except (HealthdError, OSError):
        return []
    return found


def one_of(*values: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completes these values, of an option whose text the settings judge."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(value) for value in values if value.startswith(incomplete)]

    return complete


def complete_checks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of checks with their tier."""
    from click.shell_completion import CompletionItem

    from checks.discover import builtin_checks

    found = builtin_checks().items()
    return [CompletionItem(name, help=one.tier.value) for name, one in found if name.startswith(incomplete)]
