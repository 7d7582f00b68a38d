"""What people see while they wait for a gate. rich is loaded for a terminal alone: most hooks write to a log."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.status import Status

    from healthd.core.model import Decision

TERMINAL_SECONDS = 1.0
LOG_SECONDS = 10.0
MOST_SHOWN = 3


class Progress:
    """A context; `hold` is told every `every_seconds` what the gate waits for. `whole`: all of it, one a line."""

    def __init__(self, *, quiet: bool, whole: bool = False) -> None:
        self._quiet, self._whole = quiet, whole
        self._said: tuple[object, ...] = ()
        self._live = not quiet and sys.stderr.isatty()
        self._stack = contextlib.ExitStack()
        self._status: Status | None = None
        if self._live:
            from healthd.cli.terminal.console import Terminal

            self._status = Terminal(stderr=True).status("asking the aggregator ...")

    @property
    def every_seconds(self) -> float:
        """How often to look: often for eyes, seldom for logs, which get a line for each change."""
        return TERMINAL_SECONDS if self._live or self._whole else LOG_SECONDS

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._stack.enter_context(self._status)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Leave the terminal to what is printed next; what comes after that is a line each."""
        self._stack.close()
        self._status = None

    def hold(self, decision: Decision) -> None:
        """Show what it waits for."""
        reasons = decision.reasons if self._whole else decision.reasons[:MOST_SHOWN]
        text = ("\n  " if self._whole else "; ").join(reason.message for reason in reasons)
        # Not the messages: these hold ages, which grow all the time.
        told = tuple((reason.node, reason.check, reason.code) for reason in reasons) if self._whole else (text,)
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(text))
        elif text and told != self._said and not self._quiet:
            self._said = told
            click.echo(f"healthd: holding: {text}", err=True)
            sys.stderr.flush()
