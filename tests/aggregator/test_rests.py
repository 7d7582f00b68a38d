"""The aggregator rests while nothing is due: of what the rules remember, nothing is due for ever."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from healthd.aggregator.fleet.records import FleetNode
from healthd.core.model import Quarantine
from tests.aggregator.engine_kit import Running, running
from tests.aggregator.rules_engine_kit import kept, measured, slow_results
from tests.aggregator.world import POLICY, World, good_results, with_wrong

OFF = dataclasses.replace(POLICY, rules=False)
WORD = Quarantine(reason="fan", owner="ana", owner_kind="person", since=0.0, until=None)


class Known(World):
    """A registry that has looked at what the rules would read of a state, as a real one does; it counts readings."""

    readings = 0

    def clock(self) -> float:
        self.readings += 1
        return super().clock()

    def node(self, name: str, now: float | None = None) -> FleetNode | None:
        found = super().node(name, now)
        if found is None or found.state is None:
            return found
        failing = any(result.status.value == "fail" for result in found.state.results)
        return dataclasses.replace(found, machine=f"node:{name}", failing=failing)


async def rests(run: Running) -> bool:
    """Whether few passes are made in many turns of the event loop: each pass reads the clock more than once."""
    assert isinstance(run.world, Known)
    before = run.world.readings
    for _ in range(500):
        await asyncio.sleep(0)
    return run.world.readings - before < 50


async def recover(run: Running) -> None:
    """n1 is quarantined by a rule and gets well again: of that only the repeats are remembered."""
    for results in (*[slow_results()] * 3, good_results(1.0), good_results(1.0)):
        measured(run, "n1", results)
        await run.engine.run_once()
    found = kept(run, "n1")
    assert found is not None
    assert found.until is not None
    run.world.now = found.until + 3601.0
    measured(run, "n1", good_results(1.0))
    await run.engine.run_once()
    assert kept(run, "n1") is None
    record = run.engine.remembered("n1")
    assert record is not None
    assert (record.active, record.repeats) == (False, 1)
    assert await rests(run)


async def quarantine(run: Running) -> None:
    await run.engine.quarantine("n1", WORD)


async def release(run: Running) -> None:
    await run.engine.quarantine("n1", None, why="by ana")


@pytest.mark.parametrize("act", [quarantine, release])
async def test_persons_word_on_a_node_that_has_recovered_is_one_look(act: Callable[[Running], Awaitable[None]]) -> None:
    async with running(Known("n1", "n2", "n3")) as run:
        await recover(run)
        await act(run)
        assert await rests(run)
        measured(run, "n1", good_results(1.0))
        await run.engine.run_once()
        assert await rests(run)


@pytest.mark.parametrize("act", [quarantine, release])
async def test_rules_that_are_off_have_nothing_due_for_what_they_remember(
    act: Callable[[Running], Awaitable[None]], tmp_path: Path
) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", Known("n1", "n2", "n3")
    async with running(world, url) as run:
        await recover(run)
    async with running(world, url, OFF) as run:
        await act(run)
        assert await rests(run)


async def test_rules_that_are_off_have_nothing_due_for_a_node_that_they_kept_out(tmp_path: Path) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", Known("n1", "n2", "n3")
    async with running(world, url) as run:
        measured(run, "n1", with_wrong(1.0))
        await run.engine.run_once()
        assert kept(run, "n1") is not None
    world.now += 86400.0
    async with running(world, url, OFF) as run:
        assert await rests(run)
        await release(run)
        assert await rests(run)
