"""
One ring of changes for all who watch the page, and a cursor for each.

A watcher that is slow or was away reads on from its cursor; one whose cursor has left the ring (or came from another
process) is told to load the page anew. So nothing here grows with the number or the patience of watchers.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from dataclasses import dataclass

from healthd.aggregator.ui.fleet_grid import Cell

RING = 8192
# Most nodes in one event; what is more comes with the next.
MOST_CELLS = 1000


@dataclass(frozen=True, slots=True)
class Change:
    """Something that pages of `topic` show is another now. `cell` None: read the page anew. `moved`: other groups."""

    seq: int
    topic: str
    cell: Cell | None = None
    node: str | None = None
    moved: bool = False


class Ring:
    """See the module. `seq` is the number of the newest change."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        self.seq = 0
        self._ring: deque[Change] = deque(maxlen=RING)

    @property
    def cursor(self) -> str:
        """Where a page that is rendered now reads on."""
        return f"{self.name}-{self.seq}"

    def __len__(self) -> int:
        return len(self._ring)

    def has_lost(self, cursor: int) -> bool:
        """Whether changes after the cursor have left the ring."""
        return bool(self._ring) and self._ring[0].seq > cursor + 1

    def resume(self, after: str | None) -> int | None:
        """Where a reader goes on; None where that is lost, or of another process."""
        name, _, number = (after or "").partition("-")
        if name != self.name or not number.isdecimal() or len(number) > 15:
            return None
        seq = int(number)
        oldest = self._ring[0].seq if self._ring else self.seq + 1
        return seq if oldest - 1 <= seq <= self.seq else None

    def next(self, topic: str, cursor: int) -> tuple[bytes | None, int]:
        """The next event after a cursor, None when there is none, and the cursor after it."""
        fresh: list[Change] = []
        for change in reversed(self._ring):
            if change.seq <= cursor:
                break
            fresh.append(change)
        fresh.reverse()
        wanted = [change for change in fresh if change.topic == topic][:MOST_CELLS]
        if not wanted:
            return None, self.seq
        cursor = wanted[-1].seq if len(wanted) == MOST_CELLS else self.seq
        cells = {change.node: change for change in wanted if change.node is not None}
        if not cells:
            return self.event("changed", None, cursor), cursor
        regroup = any(change.moved for change in wanted)
        shown = [_shown(change.cell) for change in cells.values() if change.cell is not None]
        return self.event("cells", {"cells": shown, "regroup": regroup}, cursor), cursor

    def event(self, kind: str, value: object, seq: int) -> bytes:
        """An event as the browser reads it."""
        data = json.dumps(value, separators=(",", ":"))  # escapes line ends, which would end the event
        return f"id: {self.name}-{seq}\nevent: {kind}\ndata: {data}\n\n".encode()

    def tell(self, topic: str, *, cell: Cell | None = None, node: str | None = None, moved: bool = False) -> None:
        """Pages of a topic show something else now; see `Change`."""
        self.seq += 1
        self._ring.append(Change(self.seq, topic, cell, node, moved))


def _shown(cell: Cell) -> dict[str, object]:
    """A cell as the script needs it."""
    return {"node": cell.node, "tone": cell.tone, "sign": cell.sign, "label": cell.label}
