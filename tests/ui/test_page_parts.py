"""The parts of the page that are pure: colours, grouping, charts, words, the picture of a validation, the ring."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import healthd.aggregator.page
from checks.contract import Finding, Measurement, Status
from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.gate.records import Decided, Gate
from healthd.aggregator.page import fleet_grid, gate_view, node_view, rendering, samples
from healthd.aggregator.page.events import FLEET, MOST_STREAMS, RING, Feed, FullError
from healthd.aggregator.page.overview import HeatCell, heat_map
from healthd.aggregator.page.samples import Reading
from healthd.aggregator.page.session import local_path
from healthd.core import text
from healthd.core.model import Health
from tests.aggregator.lab import Lab
from tests.aggregator.parts import result, state
from tests.ui.page_parts_kit import filled, member

CSS = (Path(healthd.aggregator.page.__file__).parent / "static" / "page.css").read_text()
PALETTES = dict(zip(("light", "dark"), re.findall(r":root \{([^}]*)\}", CSS), strict=True))


# --- colours ----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """By WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TEXT = [(f"on-{tone}", tone) for tone in ("healthy", "degraded", "unknown", "unhealthy", "none", "running")]
TEXT += [(ink, ground) for ink in ("ink", "muted", "link") for ground in ("paper", "surface")]
TEXT += [
    (f"{tone}-text", ground)
    for tone in ("healthy", "degraded", "unknown", "unhealthy")
    for ground in ("paper", "surface")
]
TEXT += [("on-accent", "accent"), ("ink", "none")]
TEXT += [(f"on-heat-{step}", f"heat-{step}") for step in range(7)]
SHAPES = [("focus", "paper"), ("focus", "surface"), ("unhealthy-line", "surface"), ("unknown-line", "surface")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_people_need_to_read_it(scheme: str) -> None:
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", PALETTES[scheme]))
    assert {
        (a, b): round(contrast(colours[a], colours[b]), 2) for a, b in TEXT if contrast(colours[a], colours[b]) < 4.5
    } == {}
    assert {(a, b) for a, b in SHAPES if contrast(colours[a], colours[b]) < 3} == set()


def test_both_palettes_name_the_same_colours() -> None:
    names = [set(re.findall(r"--([a-z0-9-]+):", text)) for text in PALETTES.values()]
    assert names[0] == names[1]


# --- grid -------------------------------------------------------------------------------------------------------------


async def test_cells_say_what_the_registry_says_and_follow_it() -> None:
    registry, clock = await filled(n1={}, n2={"status": Status.FAIL}, n10={"status": Status.WARN})
    found = fleet_grid.FleetGrid(registry)
    cells = {cell.node: cell for cell in found.cells(registry.names())}
    assert [cells[n].health for n in ("n1", "n2", "n10")] == [Health.HEALTHY, Health.UNHEALTHY, Health.DEGRADED]
    assert cells["n2"].label == "n2: unhealthy, WrongResult"
    assert found.cell("n1") is cells["n1"], "nothing changed, nothing is made anew"
    clock.now += 61.0
    assert found.cell("n1") != cells["n1"]
    silent = found.cell("n1")
    assert silent is not None
    assert (silent.health, silent.reason) == (Health.UNKNOWN, "Silent")
    assert "last report 61 s ago" in silent.message
    assert found.cell("nobody") is None
    clock.now += 3600.0
    later = found.cell("n1")
    assert later is not None
    assert "last report 3661 s ago" in later.message, "how long it is silent is no word of an hour ago"


async def test_the_heat_map_marks_what_was_measured_before_a_node_became_unknown() -> None:
    registry, clock = await filled(n1={}, n2={})
    clock.now += 61.0
    await member(registry, clock, "n2", seq=10, incarnation="i2").join(state("n2"))
    cells = fleet_grid.FleetGrid(registry).cells(registry.names())
    values = {name: Reading(value=5e9, outside=False) for name in ("n1", "n2")}
    (group,) = heat_map(cells, values, "matmul_flops_per_second", "none").groups
    silent, heard = group.cells
    assert silent.label == "n1: 5 GFLOP/s, measured before the node became unknown"
    assert (silent.old, heard.old, heard.label) == (True, False, "n2: 5 GFLOP/s")


async def heat(values: dict[str, float], **nodes: Any) -> dict[str, HeatCell]:
    registry, _ = await filled(**({name: {} for name in values} | nodes))
    cells = fleet_grid.FleetGrid(registry).cells(registry.names())
    readings = {name: Reading(value=value, outside=False) for name, value in values.items()}
    (group,) = heat_map(cells, readings, "matmul_flops_per_second", "none").groups
    return {cell.node: cell for cell in group.cells}


def test_the_heat_map_shows_noise_in_one_colour_and_what_is_slow_in_another() -> None:
    """Six percent between the fastest and the slowest is how healthy devices differ."""
    noise = {f"n{i}": 1e12 * (0.97 + 0.01 * i) for i in range(7)}
    assert {cell.step for cell in asyncio.run(heat(noise)).values()} == {3}
    found = asyncio.run(heat(noise | {"slow": 0.75e12}))
    assert found["slow"].step == 0
    assert {cell.step for node, cell in found.items() if node != "slow"} <= {2, 3}
    assert {cell.step for cell in asyncio.run(heat({"a": 0.0, "b": 0.0})).values()} == {3}


def test_the_heat_map_marks_a_bad_node_whatever_the_measurement_is() -> None:
    values = dict.fromkeys(("good", "bad", "warned"), 5e9)
    ill: dict[str, Any] = {
        "bad": {"status": Status.FAIL, "faults": ("matmul=corrupt",)},
        "dark": {"status": Status.FAIL},
    }
    found = asyncio.run(heat(values, **ill, warned={"status": Status.WARN}))
    signs = {node: (cell.sign, cell.bad, cell.step) for node, cell in found.items()}
    assert signs == {
        "good": ("", False, 3),
        "bad": ("✕", True, 3),
        "warned": ("!", False, 3),
        "dark": ("✕", True, None),
    }
    assert found["bad"].label == "bad: 5 GFLOP/s, unhealthy (WrongResult), drill"
    assert found["dark"].label == "dark: not measured, unhealthy (WrongResult)"


async def test_a_fleet_that_is_bad_all_at_once_is_read_in_portions() -> None:
    registry, clock = await filled(**{f"n{i}": {"status": Status.FAIL} for i in range(fleet_grid.MOST_OPENED + 20)})
    found = fleet_grid.FleetGrid(registry)
    first = found.cells(registry.names())
    assert sum(bool(cell.reason) for cell in first) == fleet_grid.MOST_OPENED
    assert all(cell.health is Health.UNHEALTHY for cell in first), "the colour never waits"
    assert all(cell.reason for cell in found.cells(registry.names()))
    for name in registry.names():
        await member(registry, clock, name, seq=10).say(state(name, status=Status.FAIL))
    assert all(cell.reason for cell in found.cells(registry.names())), "what was known stays until it is read again"


async def test_groups_are_in_the_order_in_which_people_count_and_without_value_last() -> None:
    racks = {"a": "r10", "b": "r9", "c": "", "d": "r9"}
    registry, _ = await filled(**{n: {"labels": {"rack": r} if r else {}} for n, r in racks.items()})
    cells = fleet_grid.FleetGrid(registry).cells(registry.names())
    assert fleet_grid.default_choice(cells, ("switch", "rack")) == "label:rack"
    assert [group.name for group in fleet_grid.grouped(cells, "label:rack")] == ["r9", "r10", fleet_grid.NO_VALUE]
    assert next(value for value, _ in fleet_grid.choices(cells, ("rack",))) == "label:rack"


async def test_what_is_wrong_is_told_by_reason_the_worst_first() -> None:
    nodes: dict[str, Any] = {f"w{i}": {"status": Status.WARN} for i in range(3)}
    registry, _ = await filled(**nodes, bad={"status": Status.FAIL}, good={})
    (one,) = fleet_grid.troubles(fleet_grid.FleetGrid(registry).cells(registry.names()))
    assert (one.reason, one.health, one.cells[0].node) == ("WrongResult", Health.UNHEALTHY, "bad")
    assert len(one.cells) == 4


@given(st.lists(st.text(max_size=30), max_size=20))
def test_any_names_can_be_sorted_and_none_is_lost(names: list[str]) -> None:
    assert sorted(sorted(names, key=rendering.natural)) == sorted(names)


def test_numbers_in_names_count() -> None:
    assert sorted(["n10", "n2", "n1"], key=rendering.natural) == ["n1", "n2", "n10"]


@given(st.floats())
def test_any_age_and_any_time_can_be_said(value: float) -> None:
    assert text.ago(value)
    assert text.span(value)
    assert text.moment(value)


@given(st.text(max_size=80))
def test_the_log_in_never_leads_elsewhere(text: str) -> None:
    target = local_path(text)
    assert target.startswith("/")
    assert not target.startswith(("//", "/\\"))


# --- charts -----------------------------------------------------------------------------------------------------------

points = st.lists(
    st.builds(
        samples.Point,
        at=st.floats(0, 1e9),
        status=st.sampled_from(Status),
        value=st.none() | st.floats(allow_nan=True, allow_infinity=True),
    ),
    max_size=30,
)


@given(points, st.none() | st.floats())
@example([samples.Point(at=0.0, status=Status.PASS, value=number) for number in (-sys.float_info.max, 0.0)], 1e300)
def test_whatever_was_measured_every_point_of_a_chart_lies_inside_it(
    series: list[samples.Point], limit: float | None
) -> None:
    series.sort(key=lambda point: point.at)
    made = samples.chart(series, limit)
    assert (made is None) == (len(series) < 2)
    if made is not None:
        ys = [dot.y for dot in made.dots] + ([made.limit_y] if made.limit_y is not None else [])
        assert all(0 <= dot.x <= made.width for dot in made.dots)
        assert all(0 <= y <= made.height for y in ys)
        assert "nan" not in made.line


def test_samples_reach_back_for_hours_and_keep_every_change_of_status() -> None:
    kept = samples.Samples()
    for minute in range(300):
        status = Status.FAIL if minute == 250 else Status.PASS
        one = dataclasses.replace(result("matmul", age=0.0, status=status), started_at=60.0 * minute)
        kept.take(state("n1", results=(one,)), now=60.0 * minute)
    series = kept.of("n1", "matmul")
    assert len(series) <= samples.POINTS
    assert series[-1].at == 299 * 60.0
    assert series[-1].at - series[0].at > 3600.0
    assert [point.at for point in series if point.status is Status.FAIL] == [250 * 60.0]
    kept.take(state("n1", results=(one,)), now=99_999.0)
    assert kept.of("n1", "matmul") == series, "the same run is not counted twice"


def test_samples_of_many_nodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_SERIES", 10)
    kept = samples.Samples()
    for i in range(50):
        kept.take(state(f"n{i}"), now=1.0)
    assert kept.of("n49", "matmul")
    assert not kept.of("n0", "matmul")


def test_the_number_drawn_is_that_of_the_device_that_is_worst_for_the_limit() -> None:
    def measured(value: float | None, lower: float | None, upper: float | None) -> Finding:
        one = Measurement(name="x_seconds", value=value, lower=lower, upper=upper, origin="config")
        return Finding(status=Status.PASS, reason=None, message="", target="cpu:0", measurements=(one,))

    both = dataclasses.replace(result("x"), findings=(measured(3.0, 1.0, None), measured(2.0, 1.0, None)))
    lead = samples.leading(both)
    assert lead is not None
    assert lead.value == 2.0
    slow = dataclasses.replace(
        result("x"), findings=(measured(3.0, None, 9.0), measured(None, None, 9.0), measured(4.0, None, 9.0))
    )
    lead = samples.leading(slow)
    assert lead is not None
    assert lead.value == 4.0
    assert samples.leading(dataclasses.replace(result("x"), findings=())) is None


def test_the_largest_size_leads_what_a_collective_measured() -> None:
    def measured(size: int, value: float) -> Finding:
        one = Measurement(
            name="all_reduce_busbw_bytes_per_second", value=value, lower=None, upper=None, origin="none",
            labels={"size_bytes": str(size)},
        )  # fmt: skip
        said = f"{size} bytes"
        return Finding(status=Status.PASS, reason=None, message=said, target="node", measurements=(one,))

    sizes = tuple(measured(size, float(size)) for size in (1024, 1 << 20, 1 << 24))
    ran = dataclasses.replace(result("matmul"), findings=sizes)
    row = next(row for row in node_view.rows(state("n1", results=(ran,)), samples.Samples()) if row.result is ran)
    assert row.lead is not None
    assert (row.lead.value, row.message) == (float(1 << 24), f"{1 << 24} bytes")
    assert [finding.message for finding in row.findings] == [f"{size} bytes" for size in (1 << 24, 1 << 20, 1024)]


def test_a_check_that_has_not_run_and_one_that_is_stale_come_before_what_passed() -> None:
    now = state("n1", results=(result("matmul", age=99_999.0),))
    rows = node_view.rows(now, samples.Samples())
    assert [(row.name, row.result is None, row.stale) for row in rows] == [
        ("memory_free", True, False),
        ("matmul", False, True),
    ]


# --- validations ------------------------------------------------------------------------------------------------------


def run_of(*names: str, **lab: Any) -> Gate:
    made = Lab(names, **lab)
    made.decide(made.ask(nodes=names))
    return made.last


def test_the_picture_of_a_validation_shows_every_group_round_by_round_and_marks_the_culprit() -> None:
    gate = run_of("n1", "n2", "n3", "n4", "n5", "n6", bad={"n3": "corrupt"})
    found = gate_view.pictures(gate)[0]
    assert found.rounds[0].title == "the whole"
    assert found.rounds[0].boxes[0].tone == "unhealthy"
    assert found.rounds[1].title == "pairs"
    assert found.culprits == ("n3",)
    marked = {
        name.node for round_ in found.rounds[1:] for box in round_.boxes for name in box.names if name.mark == "culprit"
    }
    assert marked == {"n3"}
    assert (found.tone, found.outcome) == ("unhealthy", "at fault: n3")
    text = rendered(gate)
    assert text.count('class="round"') == sum(len(one.rounds) for one in gate_view.pictures(gate))
    assert "n3, at fault" in text


@pytest.mark.parametrize(
    ("lab", "tone", "said"),
    [
        ({}, "healthy", "all passed together"),
        ({"cut": [frozenset(("n1", "n2"))]}, "unhealthy", "a fault between nodes"),
        ({"bad": {"n1": "once"}}, "unknown", "failed, then passed: no node at fault"),
    ],
)
def test_what_a_validation_came_to_is_one_word_and_not_knowing_is_no_pass(lab: Any, tone: str, said: str) -> None:
    found = gate_view.pictures(run_of("n1", "n2", "n3", "n4", **lab))[0]
    assert (found.tone, found.outcome) == (tone, said), found.sentences


def test_a_validation_under_way_shows_its_groups_as_running() -> None:
    lab = Lab(("n1", "n2"))
    current = lab.ask(nodes=("n1", "n2"))
    for _ in range(10):
        current = lab.step(current)
        if current.validation is not None and current.validation.groups:
            break
    (found,) = gate_view.pictures(current)
    assert (found.tone, found.rounds[0].boxes[0].tone) == ("running", "running")
    decided = dataclasses.replace(current, ended=current.validations, progress=Decided(decision=lab.decide(current)))
    (left,) = gate_view.pictures(decided)
    assert (left.outcome, left.rounds) == ("not finished when the gate ended", ()), "nothing runs any more"
    assert not decided.validated


def rendered(gate: Gate) -> str:
    visitor = {"caller": {"name": "loopback"}, "admin": False, "word": ""}
    answer = rendering.page(
        "gate.html",
        visitor=visitor,
        after="x-1",
        topic="gate:x",
        gate=gate,
        decision=gate.decision,
        asked_for="n1",
        terms=(),
        steps=gate_view.PHASES,
        pictures=gate_view.pictures(gate),
        left_out=(),
        told_above=frozenset(),
        states=(),
        more_states=0,
        most_nodes=9,
        leases=(),
        died=False,
        outcome=None,
        open_api=True,
    )
    return bytes(answer.body).decode()


# --- the ring ---------------------------------------------------------------------------------------------------------


class Gates:
    """As much of an engine as the feed asks: which gates are open."""

    def __init__(self) -> None:
        self.found: tuple[Gate, ...] = ()

    def open_gates(self) -> tuple[Gate, ...]:
        return self.found


async def first(feed: Feed, topic: str, after: str, kinds: Sequence[str]) -> bytes:
    stream = feed.stream(topic, after, lambda: True)
    async with asyncio.timeout(5):
        async for event in stream:
            if any(f"event: {kind}\n".encode() in event for kind in kinds):
                await stream.aclose()  # type: ignore[attr-defined]
                return event
    raise AssertionError("the stream ended")


async def test_a_watcher_that_fell_behind_the_ring_loads_anew_and_nothing_is_kept_for_it() -> None:
    registry, clock = await filled(n1={})
    feed = Feed(registry, cast("Engine", Gates()), lambda: False)
    feed.begin(FLEET)
    after = feed.all_cells()[1]
    node = member(registry, clock, "n1", incarnation="i2")
    for i in range(RING // 2 + 10):
        await node.join(state("n1", status=Status.FAIL if i % 2 else Status.PASS))
        feed.begin("node:n1")
        feed._heard["n1"] = None
        feed._look()
    assert len(feed.ring) == RING
    assert b"event: reset" in await first(feed, FLEET, after, ["reset", "cells"])
    assert feed.streams == 0


async def test_a_node_that_is_forgotten_leaves_the_grid() -> None:
    registry, _ = await filled(n1={}, n2={})
    feed = Feed(registry, cast("Engine", Gates()), lambda: False)
    after = feed.all_cells()[1]
    registry.forget("n2")
    await asyncio.sleep(0.05)
    assert [cell.node for cell in feed.all_cells()[0]] == ["n1"]
    event = await first(feed, FLEET, after, ["cells"])
    assert b'"regroup":true' in event


async def test_many_who_look_at_once_cost_one_look() -> None:
    registry, clock = await filled(**{f"n{i}": {} for i in range(300)})
    feed = Feed(registry, cast("Engine", Gates()), lambda: False)
    cells, after = feed.all_cells()
    assert feed.all_cells()[0] is cells
    # What is a little old reads on from its own time: nothing between is lost.
    await member(registry, clock, "n1", incarnation="i2").join(state("n1", status=Status.FAIL))
    assert feed.all_cells()[1] == after
    feed.begin(FLEET)
    feed._heard["n1"] = None
    feed._look()
    assert b"n1: unhealthy" in await first(feed, FLEET, after, ["cells"])


async def test_streams_are_bounded_and_those_that_left_count_no_more() -> None:
    registry, _ = await filled(n1={})
    feed = Feed(registry, cast("Engine", Gates()), lambda: False)
    opened = [feed.stream(FLEET, None, lambda: True) for _ in range(MOST_STREAMS)]
    for stream in opened:
        await anext(stream)
    assert feed.streams == MOST_STREAMS
    with pytest.raises(FullError, match="live already"):
        feed.stream(FLEET, None, lambda: True)
    for stream in opened:
        await stream.aclose()  # type: ignore[attr-defined]
    assert feed.streams == 0


async def test_a_visitor_whose_token_is_no_longer_good_is_told_nothing_more() -> None:
    registry, _ = await filled(n1={})
    feed = Feed(registry, cast("Engine", Gates()), lambda: False)
    events = [event async for event in feed.stream(FLEET, feed.ring.cursor, lambda: False)]
    assert events == [b"retry: 2000\n\n"]


async def test_a_gate_that_opens_or_is_decided_is_told_to_those_who_watch_it() -> None:
    registry, _ = await filled(n1={})
    gates = Gates()
    feed = Feed(registry, cast("Engine", gates), lambda: False)
    gate = Lab(("n1",)).ask(nodes=("n1",))
    topic = f"gate:{gate.id}"
    gates.found = (gate,)
    after = feed.begin(topic)
    gates.found = ()
    assert b"event: changed" in await first(feed, topic, after, ["changed"])


async def test_an_aggregator_that_nobody_looks_at_sets_no_timer_once_its_charts_are_fed() -> None:
    registry, _ = await filled(n1={})
    feed = Feed(registry, cast("Engine", Gates()), lambda: False)
    feed._hear("n1")
    assert feed._timer is not None
    feed._tick()
    assert feed._timer is None
    assert feed.samples.of("n1", "matmul")
    assert math.isfinite(feed.samples.of("n1", "matmul")[0].at)
