"""
rich's console, which escapes control characters in all that it is given to show, and what people see there while they
wait for a gate.

Apart from `output`, which every command needs: rich takes longer to load than a passive check to run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from checks.printable import printable
from healthd.cli.terminal.output import styled

if TYPE_CHECKING:
    from healthd.core.model import Decision

LEAST_COLUMNS = 20
"""A terminal of fewer wraps the lines itself; in none at all (`COLUMNS=0`) nothing would be shown."""
_ROOM = 6  # columns for a text that is wrapped; in fewer its words are in pieces


class Terminal(Console):
    """For markup and tables that hold text of others. `width` None: as wide as the terminal is."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> None:
        stream = styled(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, highlight=False, width=width, soft_wrap=soft_wrap)
        if self.width < LEAST_COLUMNS:
            self.width = LEAST_COLUMNS

    def render_str(self, text: str, **more: Any) -> Text:
        """Before it is laid out, so that columns fit."""
        return super().render_str(printable(text), **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Whatever way a text came here; rich's own control sequences are marked as such."""
        if isinstance(renderable, Table):
            self._make_fit(renderable)
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def _make_fit(self, table: Table) -> None:
        """Wrap all columns where those that are not leave no room for the others: rich would leave these out."""
        whole = [column for column in table.columns if column.no_wrap]
        width = sum(
            max(self.render_str(str(text)).cell_len for text in (column.header, *column.cells)) for column in whole
        )
        columns = len(table.columns)
        if width + 2 * columns + _ROOM * (columns - len(whole)) > self.width:
            for column in whole:
                column.no_wrap = False


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
