"""What people see while they wait for a gate: one line that changes on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

import click
from rich.markup import escape

from healthd.cli.terminal.console import Terminal
from healthd.core.model import Decision

TERMINAL_SECONDS = 1.0
LOG_SECONDS = 10.0
MOST_SHOWN = 3


class Progress:
    """A context; `hold` is told every `every_seconds` what the gate waits for. `whole`: all of it, one a line."""

    def __init__(self, *, quiet: bool, whole: bool = False) -> None:
        self._quiet, self._whole = quiet, whole
        self._said: tuple[object, ...] = ()
        self._console = Terminal(stderr=True)
        self._live = not quiet and self._console.is_terminal
        self._stack = contextlib.ExitStack()
        self._status = self._console.status("asking the aggregator ...") if self._live else None

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
            self._status.update(escape(text))
        elif text and told != self._said and not self._quiet:
            self._said = told
            click.echo(f"healthd: holding: {text}", err=True)
            sys.stderr.flush()
