"""
The `healthd` command: options to settings, settings to work, records to a terminal or to JSON, errors to exit codes.

Each command imports what it needs when it runs: a passive round must not wait for a web framework.
"""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from healthd import __version__
from healthd.cli.terminal.output import guard_streams
from healthd.core.config import record_at
from healthd.core.errors import ConfigError, HealthdError, OutputError
from healthd.core.redaction import redact
from healthd.integrations import INTEGRATIONS

__all__ = [
    "fleet.line",
    "hooks.readiness",
    "main",
    "services",
    "settings.gate",
    "settings.options",
    "settings.tree",
    "support.doctor",
    "terminal.output",
    "terminal.render",
]

OF_INTEGRATIONS = {command.name: command for one in INTEGRATIONS for command in one.commands}

# Command -> where it is: a module in this package with a function of that name, or `module:name` of an integration.
COMMANDS = {
    "check": "check",
    "node": "services",
    "aggregator": "services",
    "gate": "hooks.gate",
    "preflight": "hooks.preflight",
    "run": "run",
    "postmortem": "postmortem",
    **{name: command.place for name, command in OF_INTEGRATIONS.items()},
    "fleet": "fleet.fleet",
    "override": "fleet.fleet",
    "fault": "local",
    "token": "local",
    "tls": "support.tls",
    "checks": "local",
    "warm": "warm",
    "baseline": "fleet.baseline",
    "doctor": "support.doctor",
    "bundle": "support.record",
    "record": "support.record",
    "demo": "demo",
    "completion": "completion",
}

# Command -> what usage, settings or a token without the right, any other error of ours, and an error that was not
# foreseen come to: the table of docs/reference.md. 3: it asks something, and no answer can be given.
EXIT_CODES: Mapping[tuple[str, ...], tuple[int, int, int]] = {
    (): (2, 1, 1),
    ("check",): (2, 3, 3),
    ("gate",): (2, 75, 75),
    ("preflight",): (2, 75, 75),
    ("fleet", "breaker"): (2, 3, 3),
    ("fleet", "stragglers"): (2, 3, 3),
    ("fleet", "digests"): (2, 3, 3),
    ("fleet", "steps"): (2, 3, 3),
    ("fleet", "validate"): (2, 3, 3),
    **{(name,): one.exit_codes for name, one in OF_INTEGRATIONS.items() if one.exit_codes is not None},
}
CANNOT_TELL = 3

# How kubectl calls the program: https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/
KUBECTL_PLUGIN = "kubectl-healthd"
# What people type who know other programs.
OTHER_WORDS = {"version": "healthd --version", "help": "healthd --help"}


class Lazy(click.Group):
    """Finds commands by name without importing the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order in which they are met."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        place = COMMANDS[cmd_name]
        command: click.Command = record_at(place if ":" in place else f"healthd.cli.{place}:{cmd_name}")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """As always; an error of a file that a variable names says which key of the settings file it won over."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            from healthd.cli.settings.options import with_winner

            raise with_winner(error, ctx) from None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As always; an option in front of the command, which has it, is told with its place."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            command = next((word for word in given if word in COMMANDS), None)
            if command is None:
                raise
            given.remove(command)
            right = shlex.join(["healthd", command, *given])
            raise click.UsageError(f"{error.option_name} belongs behind the command: {right}", ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As always; a name that is none of ours is told with the nearest one."""
        if args and args[0] in OTHER_WORDS:
            raise click.UsageError(f"no such command: {args[0]!r}; use: {OTHER_WORDS[args[0]]}", ctx)
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; choose from: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command: {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="healthd")
def healthd() -> None:
    """
    Decide whether a job may start on these nodes now.

    healthd runs real tensor operations on every device and real collectives between devices and nodes, watches the
    hosts, and gates job launches on the health of the fleet.
    """


def exit_codes(arguments: Sequence[str]) -> tuple[int, int, int]:
    """The row of EXIT_CODES for these arguments."""
    words = tuple(word for word in arguments if not word.startswith("-"))[:2]
    usage, known, internal = next(EXIT_CODES[words[:n]] for n in (2, 1, 0) if words[:n] in EXIT_CODES)
    if words[:1] == ("check",) and {"plugin", "--exit-style=plugin"} & set(arguments):
        return CANNOT_TELL, known, internal  # of a monitoring plug-in 2 is a failure of what it looks at
    return usage, known, internal


def called(argv: Sequence[str]) -> list[str]:
    """The arguments; as `kubectl healthd WORD` the program is called by another name, and WORD is one of `fleet`."""
    return ["fleet", *argv[1:]] if os.path.basename(argv[0]) == KUBECTL_PLUGIN else list(argv[1:])


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit; whatever goes wrong is one line on standard error and the right exit code."""
    # The collection at the end of the interpreter frees nothing that the kernel would not, and takes 20 ms.
    atexit.register(gc.freeze)
    arguments = called(sys.argv) if argv is None else argv
    config_code, known_code, internal_code = exit_codes(arguments)
    guard_streams()
    # Where whoever started us ignores it, we do too, and the kernel tells nobody how our programs end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        code = healthd.main(arguments, prog_name="healthd", standalone_mode=False)
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.Abort:
        _say("stopped")
        code = 130
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(f"{error.format_message()}\n")
        code = config_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        _say(f"{error.format_message()}{hint}")
        code = config_code
    except ConfigError as error:
        _say(str(error))
        code = config_code
    except HealthdError as error:
        _say(str(error))
        code = known_code
    except Exception as error:
        if os.environ.get("PYTHONDEVMODE"):
            raise
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else "nowhere"
        _say(
            f"internal error at {where}: {type(error).__name__}: {error}; please report it (PYTHONDEVMODE=1 shows more)"
        )
        code = internal_code
    try:
        sys.stdout.flush()
    except OutputError as error:
        _say(str(error))
        code = code or known_code
    sys.exit(code if isinstance(code, int) else 0)


def _say(message: str) -> None:
    line = " ".join(redact(message).split())
    sys.stderr.write(f"healthd: {line}\n")
