"""
Changes as server-sent events: watches what open pages show, and publishes changes through the ring (`ring`).

While no page is open, the only work is to sample new states for the small charts, a few each second.

Also here:

- one ring of changes for all who watch the page, and a cursor for each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import Response, StreamingResponse

from healthd.aggregator.engine import Engine
from healthd.aggregator.fleet import Fleet
from healthd.aggregator.gate.records import Gate
from healthd.aggregator.page.fleet_grid import Cell, FleetGrid
from healthd.aggregator.page.samples import Samples
from healthd.core.errors import HealthdError

log = logging.getLogger(__name__)

RING = 8192
# Most nodes in one event; what is more comes with the next.
MOST_CELLS = 1000

MOST_STREAMS = 200
# A page is in step within this time: quick for people, and a burst of syncs becomes one event.
TICK_SECONDS = 0.25
# While nobody watches, states are still sampled for the charts, more slowly.
IDLE_TICK_SECONDS = 1.0
# Nodes looked at in one tick for what time alone changes (silence, staleness): some 15 us each.
SWEEP = 500
# States opened in one tick for the charts.
SAMPLES_A_TICK = 4
# States opened at once for a page that shows all nodes: some 0.3 ms each, on the loop that answers syncs.
SAMPLES_AT_ONCE = 150
# A page that was just rendered asks for its stream within this time; until then changes are kept for it.
EXPECT_SECONDS = 10.0
MOST_EXPECTED = 500
# Looking at all nodes may take a tenth of the time; 2,000 take some 15 ms, so what a page shows is 0.2 s old at most.
OLD_FOR_TIMES = 10
LONGEST_OLD_SECONDS = 3.0
# Load balancers cut what is silent for 30 or 60 s.
BEAT_SECONDS = 15.0

FLEET, GATES = "fleet", "gates"


def live(stream: AsyncIterator[bytes]) -> Response:
    """A stream of changes as an answer."""
    headers = {"x-accel-buffering": "no", "cache-control": "no-store", "x-content-type-options": "nosniff"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


class Feed:
    """Watches the fleet and tells. On the event loop alone; without tasks: it ticks by timers while there is work."""

    def __init__(self, fleet: Fleet, engine: Engine, stopping: Callable[[], bool]) -> None:
        self.board = FleetGrid(fleet)
        self.samples = Samples()
        self._fleet, self._engine, self._stopping = fleet, engine, stopping
        self.ring = Ring()
        """Cells of `all_cells` as JSON, kept by `views`."""
        self._moved = asyncio.Event()
        self._topics: Counter[str] = Counter()
        self._expected: dict[str, float] = {}
        self._active_until = 0.0
        self._cells: tuple[list[Cell], str] = ([], "")
        self._cells_until = 0.0
        self._heard: dict[str, None] = {}
        self._unsampled: dict[str, None] = {}
        self._versions: dict[str, int] = {}
        self._told: dict[str, Cell] = {}
        self._gates: dict[str, Gate] = {}
        self._swept = 0
        self._timer: asyncio.TimerHandle | None = None
        fleet.listen(self._hear, quiet=self._hear_quiet)

    @property
    def streams(self) -> int:
        """How many watch now."""
        return self._topics.total()

    def begin(self, topic: str) -> str:
        """A page of this topic is about to be rendered: where it reads on. What changes from now on is not missed."""
        now = time.monotonic()
        if len(self._expected) >= MOST_EXPECTED:
            self._expected = {name: at for name, at in self._expected.items() if at > now}
        if len(self._expected) < MOST_EXPECTED:
            self._expected[topic] = now + EXPECT_SECONDS
        self._active_until = now + EXPECT_SECONDS
        self._look_at_gates()
        self._schedule()
        return self.ring.cursor

    def all_cells(self) -> tuple[list[Cell], str]:
        """
        Every node as it is now, and where a page of them reads on; what is different from what was told is told.

        In a large fleet this takes a while, so it is not done anew for each who looks: all of them get what is a little
        old, with the cursor of that time.
        """
        now = time.monotonic()
        if now < self._cells_until:
            return self._cells
        cells = self.board.cells(self._fleet.names())
        if not self._told:
            self._told = {cell.node: cell for cell in cells}
        for cell in cells:
            if self._told.get(cell.node) != cell:
                self._compare(cell.node)
        if len(self._told) > len(cells):
            for name in self._told.keys() - {cell.node for cell in cells}:
                self._compare(name)
        self._cells = (cells, self.ring.cursor)
        done = time.monotonic()
        self._cells_until = done + min(LONGEST_OLD_SECONDS, (done - now) * OLD_FOR_TIMES)
        return self._cells

    def _watched(self, topic: str) -> bool:
        return topic in self._topics or self._expected.get(topic, 0.0) > time.monotonic()

    def _active(self) -> bool:
        """Whether anybody watches, or has just loaded a page and is about to."""
        return bool(self._topics) or self._active_until > time.monotonic()

    def stream(self, topic: str, after: str | None, still: Callable[[], bool]) -> AsyncIterator[bytes]:
        """
        The events of a topic from a cursor on, until the aggregator stops or `still` says no. FullError.

        Events: `cells` (with cells to change), `changed` (read the page anew), `reset` (the cursor is gone), `beat`.
        """
        if self.streams >= MOST_STREAMS:
            raise FullError(f"{MOST_STREAMS} pages are live already; this page is not updated after loading")
        return self._stream(topic, after, still)

    async def _stream(self, topic: str, after: str | None, still: Callable[[], bool]) -> AsyncIterator[bytes]:
        ring = self.ring
        cursor = ring.resume(after)
        missed = not self._watched(topic) and topic != FLEET
        self._topics[topic] += 1
        self._schedule()
        try:
            yield b"retry: 2000\n\n"
            if cursor is None:
                cursor = ring.seq
                yield ring.event("reset", None, cursor)
            elif missed:
                yield ring.event("changed", None, cursor)
            while not self._stopping() and still():
                if ring.has_lost(cursor):
                    cursor = ring.seq
                    yield ring.event("reset", None, cursor)
                moved = self._moved
                event, cursor = ring.next(topic, cursor)
                if event is not None:
                    yield event
                    continue
                try:
                    # Not wait_for: in Python 3.11 it may swallow the cancellation of one who has gone.
                    async with asyncio.timeout(BEAT_SECONDS):
                        await moved.wait()
                except TimeoutError:
                    yield ring.event("beat", None, cursor)
        finally:
            self._topics[topic] -= 1
            self._topics += Counter()  # topics that nobody watches go

    # --- what happens -------------------------------------------------------------------------------------------------

    def _hear(self, node: str) -> None:
        self._unsampled[node] = None
        if self._active():
            self._heard[node] = None
        self._schedule()

    def _hear_quiet(self, node: str) -> None:
        """Nothing is new but when it was heard, which matters to those who watch."""
        if self._active():
            self._heard[node] = None
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and not self._stopping() and (self._unsampled or self._active()):
            pause = TICK_SECONDS if self._active() else IDLE_TICK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(pause, self._tick)

    def _tick(self) -> None:
        self._timer = None
        before = self.ring.seq
        if self._active():
            self._look()
        self._sample()
        if self.ring.seq != before or self._stopping():
            self._moved.set()
            self._moved = asyncio.Event()
        self._schedule()

    def _look(self) -> None:
        self.board.begin()
        heard, self._heard = self._heard, {}
        for name in heard:
            self._compare(name)
            if self._watched(f"node:{name}"):
                self.ring.tell(f"node:{name}")
        names = self._fleet.names()
        part = names[self._swept : self._swept + SWEEP]
        self._swept = self._swept + SWEEP if self._swept + SWEEP < len(names) else 0
        for name in list(part):
            self._compare(name)
        if self._swept == 0 and len(self._told) > len(names):
            for name in self._told.keys() - set(names):
                self._compare(name)
        self._look_at_gates()

    def _compare(self, name: str) -> None:
        cell, before = self.board.cell(name), self._told.get(name)
        if cell == before:
            return
        if cell is None:
            del self._told[name]
            self.ring.tell(FLEET, node=name, moved=True)
        else:
            self._told[name] = cell
            moved = before is None or before.place != cell.place
            self.ring.tell(FLEET, cell=cell, node=name, moved=moved)
        if self._watched(f"node:{name}"):
            self.ring.tell(f"node:{name}")

    def _look_at_gates(self) -> None:
        now = {gate.id: gate for gate in self._engine.open_gates()}
        changed = {i for i, gate in now.items() if self._gates.get(i) is not gate and self._gates.get(i) != gate}
        changed |= self._gates.keys() - now.keys()
        self._gates = now
        if changed:
            self.ring.tell(GATES)
            self.ring.tell(FLEET)
        for gate_id in changed:
            if self._watched(f"gate:{gate_id}"):
                self.ring.tell(f"gate:{gate_id}")

    def catch_up(self) -> int:
        """Sample now what would have waited for its turn, up to a bound, and say how many nodes still wait."""
        self._sample(SAMPLES_AT_ONCE)
        return len(self._unsampled)

    def _sample(self, most: int = SAMPLES_A_TICK) -> None:
        now = time.time()
        for _ in range(most):
            if not self._unsampled:
                return
            name = next(iter(self._unsampled))
            del self._unsampled[name]
            node = self._fleet.node(name)
            if node is None:
                self.samples.forget(name)
                self._versions.pop(name, None)
            elif node.version != self._versions.get(name):
                self._versions[name] = node.version
                state = node.kept()
                if state is not None:
                    self.samples.take(state, now)


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


@dataclass(frozen=True, slots=True)
class Change:
    """Something that pages of `topic` show is another now. `cell` None: read the page anew. `moved`: other groups."""

    seq: int
    topic: str
    cell: Cell | None = None
    node: str | None = None
    moved: bool = False


class FullError(HealthdError):
    """Too many people watch."""


def _shown(cell: Cell) -> dict[str, object]:
    """A cell as the script needs it."""
    return {"node": cell.node, "tone": cell.tone, "sign": cell.sign, "label": cell.label}
