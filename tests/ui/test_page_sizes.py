"""What the page costs in a large fleet: docs/page.md has the figures, here is that they do not run away."""

from __future__ import annotations

import time

from checks.contract import Status
from healthd.aggregator.page import fleet_grid, rendering
from healthd.aggregator.page.events import FLEET
from healthd.core.model import Health
from tests.ui.page_parts_kit import filled


async def test_a_fleet_ten_times_as_large_costs_in_proportion() -> None:
    """Processor time of a first look at 200 and at 2,000 nodes: 8 times as measured; for each pair of nodes 100."""
    seconds = {}
    for count in (200, 2000):
        nodes = {
            f"n{i}": {"labels": {"rack": f"r{i // 64}"}, "status": Status.FAIL if i % 97 == 13 else Status.PASS}
            for i in range(count)
        }
        registry, _ = await filled(**nodes)
        taken = []
        for _ in range(5):
            began = time.thread_time()
            text = grid(fleet_grid.FleetGrid(registry).cells(registry.names()))
            taken.append(time.thread_time() - began)
        assert text.count('id="c-n') == count
        seconds[count] = min(taken)
    assert seconds[2000] < 20 * seconds[200], seconds


def grid(cells: list[fleet_grid.Cell]) -> str:
    """The page of a fleet where nothing else is going on."""
    answer = rendering.page(
        "fleet.html",
        without_limits=0,
        visitor={"caller": {"name": "loopback"}, "admin": False, "word": ""},
        after="x-1",
        topic=FLEET,
        part=None,
        total=len(cells),
        counts=[(one, sum(cell.health is one for cell in cells)) for one in rendering.WORST_FIRST],
        marks={"quarantined": 0, "taken": 0},
        troubles=fleet_grid.troubles(cells),
        more_troubles=0,
        most_named=10,
        not_well=sum(cell.health is not Health.HEALTHY for cell in cells),
        choices=fleet_grid.choices(cells, ("rack",)),
        chosen="label:rack",
        health=None,
        q="",
        groups=fleet_grid.grouped(cells, "label:rack"),
        shown=len(cells),
        page_number=1,
        pages=1,
        gates=(),
        phases={},
        open_gates=0,
        overrides=(),
        accused=(),
        recovering=None,
        breakers={},
        faults=(),
        injected=(),
        mode="enforce",
    )
    return bytes(answer.body).decode()
