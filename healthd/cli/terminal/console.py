"""
rich's console, which escapes control characters in all that it is given to show.

Apart from `output`, which every command needs: rich takes longer to load than a passive check to run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from checks.printable import printable
from healthd.cli.terminal.output import styled

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
