"""How a command gets its settings: from options, variables and the file; and the default locations of a user."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click

from healthd.cli.settings.tree import Settings, default_run_dir
from healthd.core.config import load
from healthd.core.errors import ConfigError
from healthd.core.file_trust import check_file

F = TypeVar("F", bound=Callable[..., Any])

WON = "healthd.won"
"""Where the context of a command has the variables that were taken in the place of keys of the file."""

DEFAULT_FILE = Path("/etc/healthd/healthd.toml")

# Option -> key, where they differ.
KEYS = {
    "fault": "node.faults",
    "label": "node.labels",
    "name": "node.name",
    "cpu_devices": "probe.cpu_devices",
}


# The options that every command has, all of them paths, in the order in which help shows them.
COMMON = (
    ("--config", "F", f"TOML file (default {DEFAULT_FILE})."),
    ("--state-dir", "D", "Directory for state that survives restarts."),
    ("--run-dir", "D", "Directory for sockets, locks and CPU device files."),
    ("--token-file", "F", "File with the bearer token."),
    ("--ca-file", "F", "CA that signed the aggregator's certificate (PEM)."),
    ("--host-root", "D", "Read this directory instead of the machine (made by 'healthd record')."),
)


def common_options(command: F) -> F:
    """The options that every command has; a `Command` shows them last."""
    return _with_options(command, COMMON)


def common_options_of_aggregator(command: F) -> F:
    """The same but for `--token-file`: the aggregator sends no token, it has a table of those that it accepts."""
    return _with_options(command, tuple(one for one in COMMON if one[0] != "--token-file"))


def _with_options(command: F, options: Sequence[tuple[str, str, str]]) -> F:
    for name, metavar, text in reversed(options):
        command = click.option(name, type=click.Path(path_type=Path), metavar=metavar, help=text)(command)
    return command


def _joined(_ctx: click.Context, _option: click.Parameter, values: Sequence[str]) -> str | None:
    return ",".join(values) or None


def aggregator_option(command: F) -> F:
    """The option of every command that asks an aggregator; its value is as that of HEALTHD_AGGREGATOR."""
    return click.option(
        "--aggregator",
        metavar="URL",
        multiple=True,
        callback=_joined,
        help="URL of the aggregator; repeatable.",
    )(command)


class _Sections(click.Command):
    """
    Shows its options in sections, each with a title: what the command is about first, what every command has last.

    `sections` maps a title to the names of its parameters; those that it does not name are in a section of their own.
    `examples` are command lines, which come before everything else.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[str]] = MappingProxyType({}),
        examples: Sequence[str] = (),
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.sections = sections
        self.examples = examples

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, after the examples."""
        if self.examples:
            formatter.write_paragraph()
        for line in self.examples:
            formatter.write(f"  $ {line}\n")
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's; commands of a group come after its options."""
        options = (param for param in self.get_params(ctx) if isinstance(param, click.Option))
        found = ((param.name, param.get_help_record(ctx)) for param in options)
        left = {name: record for name, record in found if record is not None}
        everywhere = [name[2:].replace("-", "_") for name, _, _ in COMMON]
        everywhere += [param.name for param in (self.get_help_option(ctx),) if param is not None and param.name]
        own = [name for name in left if name not in everywhere]
        for title, names in {**self.sections, "Options": own, "Options of every command": everywhere}.items():
            records = [left.pop(name) for name in names if name in left]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class Command(_Sections):
    """A command of healthd."""


class Group(_Sections, click.Group):
    """A group of commands of healthd."""

    command_class = Command


def with_winner(error: ConfigError, context: click.Context) -> ConfigError:
    """The error; where it is of a file that a variable names, with the variable and the key that it won over."""
    for one in context.meta.get(WON) or ():
        if isinstance(one.value, Path) and str(error).startswith(f"{one.value}:"):
            return ConfigError(f"{error}; the variable {one.variable} overrides {one.key} in {one.where}")
    return error


def load_settings(options: Mapping[str, Any], *, section: str) -> Settings:
    """The settings of a command: its options over the variables over the file. ConfigError with one line."""
    return _load(options, section)


def load_usable_settings(options: Mapping[str, Any], *, section: str) -> tuple[Settings, ConfigError | None]:
    """
    The settings of a command that is wanted most where they are broken, and what is wrong with them.

    Where they are, they are loaded without the variables, without the file or, at last, by the options alone. `file`
    names the file in any case.
    """
    try:
        return load_settings(options, section=section), None
    except ConfigError as error:
        ways: tuple[tuple[bool, Mapping[str, str] | None], ...] = ((True, {}), (False, None), (False, {}))
        for use_file, environ in ways:
            with contextlib.suppress(ConfigError):
                usable = _load(options, section, use_file=use_file, environ=environ)
                return dataclasses.replace(usable, file=options.get("config") or _file_from_environment()), error
        raise  # it is the options


def _load(
    options: Mapping[str, Any], section: str, *, use_file: bool = True, environ: Mapping[str, str] | None = None
) -> Settings:
    given = dict(options)
    file = given.pop("config", None) or _file_from_environment()
    if file is not None and use_file:
        check_file(file, "settings file")
    arguments = {KEYS.get(name, name): value for name, value in given.items()}
    state_dir = _state_dir()
    settings = load(
        Settings,
        file=file if use_file else None,
        environ=os.environ if environ is None else environ,
        arguments=arguments,
        sections=(section, "node", "probe"),
        defaults={
            "node.name": socket.gethostname(),
            "node.run_dir": default_run_dir(),
            **({} if state_dir is None else {"node.state_dir": state_dir, "aggregator.state_dir": state_dir}),
        },
    )
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[WON] = settings.won
    root = settings.node.host_root if settings.is_given("node") else None
    if root is not None and not os.path.isdir(root):  # also where it may not be looked at
        raise ConfigError(
            f"{root}: no such directory; --host-root needs a directory with proc/, sys/ and etc/ of a machine"
        )
    return settings


def _file_from_environment() -> Path | None:
    named = os.environ.get("HEALTHD_CONFIG")
    if named:
        return Path(named)
    try:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    except PermissionError:
        return DEFAULT_FILE  # who reads it says that it cannot be


def _state_dir() -> Path | None:
    """Root's is the system's; a person's is their own; None for a user without a home, who has to name one."""
    if os.geteuid() == 0:
        return Path("/var/lib/healthd")
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return None if home.startswith("~") else Path(home) / "healthd"
