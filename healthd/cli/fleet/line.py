"""What the commands for an aggregator share: options, the connection, names, the final line."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from healthd.cli.settings.options import aggregator_option, common_options, load_settings
from healthd.cli.settings.tree import Settings
from healthd.core.config import parse_duration
from healthd.core.errors import BadInputError, ConfigError

if TYPE_CHECKING:
    from healthd.core.http.client import Aggregator
    from healthd.core.http.gates import GateClient
    from healthd.hooks.stopping import Signals

F = TypeVar("F", bound=Callable[..., Any])


def fleet_options(command: F) -> F:
    """The options of every command that speaks to an aggregator."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print only JSON."),
        aggregator_option,
        common_options,
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def aggregator_of(options: Mapping[str, Any]) -> Iterator[GateClient]:
    """
    The aggregator that the options of a command, the variables or the file name. A question that it does not take, and
    a token without the right, become a ConfigError.
    """
    from healthd.core.http.client import BAD_REQUEST, NO_TOKEN, WRONG_TOKEN, RefusedError
    from healthd.core.http.gates import GateClient

    settings = load_settings(options, section="gate")
    with GateClient(settings.endpoint()) as aggregator:
        try:
            yield aggregator
        except RefusedError as error:
            raise (error.told if error.status in (BAD_REQUEST, NO_TOKEN, WRONG_TOKEN) else error) from None


@contextlib.contextmanager
def gate_client(settings: Settings) -> Iterator[GateClient]:
    """The aggregator that is asked for gates. A refusal that no second try can change becomes a ConfigError."""
    from healthd.core.http.client import RefusedError
    from healthd.core.http.gates import GateClient

    with GateClient(settings.endpoint()) as aggregator:
        try:
            yield aggregator
        except RefusedError as error:
            raise error.told from None


def duration_of(option: str, text: str | None) -> float | None:
    """What an option says, in seconds; None where it is not given. ConfigError names the option."""
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def own_name() -> str:
    """The user who decides, for those who read of it later; by number where the machine has no account of it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def segment(text: str) -> str:
    """A name as one segment of a path."""
    from urllib.parse import quote

    if not text or text in (".", ".."):
        raise BadInputError(f"{text!r} is not a name")
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise BadInputError(f"{text[:80]!r} is not UTF-8 text") from None


@contextlib.contextmanager
def withdrawn_when_stopped(aggregator: Aggregator, gate: str) -> Iterator[Signals]:
    """SIGINT and SIGTERM withdraw the gate, so that its nodes are not kept from others for an answer nobody reads."""
    from healthd.core.http.client import RefusedError
    from healthd.hooks.stopping import Stopped, stoppable

    try:
        with stoppable() as signals:
            yield signals
    except Stopped:
        try:
            aggregator.call("DELETE", f"/v1/gates/{gate}/lease")
        except RefusedError as error:
            if error.status != 404:  # it was decided just before, and has no lease to end
                raise
        click.echo("healthd: withdrawn; its nodes are free again", err=True)
        raise click.Abort from None


def done(as_json: bool, message: str, **more: object) -> None:
    """Say that it is done, and what; programs get `more` beside it."""
    if as_json:
        print_json({"ok": True, "message": message, **more})
    else:
        click.echo(message)


def print_json(value: Any) -> None:
    """A value as one line of JSON on standard output."""
    from healthd.core import wire

    sys.stdout.write(wire.encode(value).decode() + "\n")
