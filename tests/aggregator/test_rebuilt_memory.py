"""What memory that is made anew from disk must still know: when nodes were heard is on disk only now and then."""

from __future__ import annotations

from tests.aggregator.engine_kit import Running, running
from tests.aggregator.ruling import DAY
from tests.aggregator.world import World


async def heard_for(run: Running, days: int) -> None:
    """The aggregator runs for so long, and hears its nodes all the time."""
    for _ in range(days):
        run.world.now += DAY
        await run.settle(rounds=1)


async def test_node_that_was_heard_is_there_when_memory_is_made_anew() -> None:
    async with running(World("n1", "n2")) as run:
        await heard_for(run, 3)
        assert await run.engine._rebuild()
        assert run.engine.present("n1")


async def test_no_node_is_forgotten_because_memory_was_made_anew_right_before_what_is_old_goes() -> None:
    async with running(World("n1", "n2")) as run:
        await heard_for(run, 30)
        run.engine._pruning.expiring = run.engine._stale = True
        await run.engine.run_once()
        assert set(run.world.daemons) == {"n1", "n2"}
