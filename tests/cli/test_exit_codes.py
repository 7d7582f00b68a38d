"""Every command ends with the codes of one table, `healthd.cli.EXIT_CODES`, which docs/reference.md explains."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from healthd.cli import EXIT_CODES, OF_INTEGRATIONS, exit_codes, healthd
from tests.aggregator.service import free_port
from tests.core.client_kit import answer, server
from tests.hooks.inside import run_inside

USAGE = 2
# What each command needs beside the address of the aggregator to ask it something.
ASKS = {
    "baseline": (),
    "fleet breaker": ("reset",),
    "fleet digests": (),
    "fleet explain": ("g-1",),
    "fleet forget": ("n1",),
    "fleet history": ("n1",),
    "fleet quarantine": ("n1", "--reason", "fan"),
    "fleet recover": (),
    "fleet rekey": ("n1",),
    "fleet release": ("n1",),
    "fleet release-lease": ("n1",),
    "fleet repairs": ("done", "n1", "--reason", "r"),
    "fleet report": (),
    "fleet screening": (),
    "fleet show": ("n1",),
    "fleet status": (),
    "fleet steps": (),
    "fleet stragglers": (),
    "fleet validate": ("n1", "n2"),
    "gate": ("--job", "j", "--node", "n1", "--wait", "0s"),
    "gate outcome": ("ok", "--job", "j"),
    "gate release": ("--job", "j"),
    "override": ("j", "--reason", "r", "--for", "1h"),
}
# Services, which go on asking; and those whose code is that of a job, or an answer about this machine.
OTHERS = {"node", "run", "postmortem"}


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, (*path, name))
    if path and (not isinstance(command, click.Group) or command.invoke_without_command):
        yield " ".join(path), command


COMMANDS = dict(leaves(healthd))


def test_every_command_that_asks_an_aggregator_is_in_the_table_of_this_test() -> None:
    asking = {name for name, one in COMMANDS.items() if any("--aggregator" in option.opts for option in one.params)}
    asking = {name for name in asking if name.split()[0] not in OF_INTEGRATIONS}
    assert asking == ASKS.keys() | OTHERS
    assert all(usage == USAGE for usage, _, _ in EXIT_CODES.values())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_wrong_option_ends_with_the_code_for_usage(name: str) -> None:
    assert run_inside(*name.split(), "--no-such-option").code == USAGE


@pytest.mark.parametrize("name", sorted(ASKS))
def test_token_without_the_right_is_usage_everywhere_and_silence_what_the_table_says(name: str) -> None:
    for status in ("401 Unauthorized", "403 Forbidden"):
        with server(answer(b'{"detail": "no"}', status=status, kind="application/problem+json")) as url:
            said = run_inside(*name.split(), *ASKS[name], "--aggregator", url)
        assert said.code == USAGE, said.err
    if name == "gate outcome":
        return  # it tries again for some seconds: see test_cli_outcome
    away = run_inside(*name.split(), *ASKS[name], "--aggregator", f"http://127.0.0.1:{free_port()}")
    assert away.code == exit_codes(name.split())[1], away.err
