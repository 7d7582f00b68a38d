"""rich's console, which escapes control characters in all that it is given to show."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from checks.printable import printable
from healthd.cli.terminal.output import styled


class Terminal(Console):
    """For markup and tables that hold text of others. `width` None: as wide as the terminal is."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> None:
        stream = styled(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, highlight=False, width=width, soft_wrap=soft_wrap)

    def render_str(self, text: str, **more: Any) -> Text:
        """Before it is laid out, so that columns fit."""
        return super().render_str(printable(text), **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Whatever way a text came here; rich's own control sequences are marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
