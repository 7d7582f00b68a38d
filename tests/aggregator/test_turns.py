"""A gate waits for a few syncs at most, however many come or are woken at one moment."""

from __future__ import annotations

import asyncio

from healthd.aggregator.fleet.turns import AT_ONCE, Turns


async def gate_steps(steps: int, done: list[int]) -> list[int]:
    """How many syncs have gone on between one step of something else on the loop and the next."""
    between = []
    for _ in range(steps):
        before = len(done)
        await asyncio.sleep(0)
        between.append(len(done) - before)
    return between


async def test_a_crowd_of_syncs_goes_on_a_few_at_a_time() -> None:
    turns = Turns()
    done: list[int] = []

    async def sync(number: int) -> None:
        await turns.wait()
        done.append(number)

    crowd = [asyncio.create_task(sync(number)) for number in range(1000)]
    between = await gate_steps(1000 // AT_ONCE + 5, done)
    assert max(between) <= AT_ONCE
    await asyncio.gather(*crowd)
    assert done == list(range(1000)), "in the order in which they came"


async def test_syncs_that_come_one_by_one_do_not_wait() -> None:
    turns = Turns()
    for _ in range(3 * AT_ONCE):
        waiting = asyncio.create_task(turns.wait())
        await asyncio.sleep(0)
        assert waiting.done()
        await asyncio.sleep(0)


async def test_one_that_has_gone_away_takes_the_turn_of_no_other() -> None:
    turns = Turns()
    first = [asyncio.create_task(turns.wait()) for _ in range(AT_ONCE)]
    gone = [asyncio.create_task(turns.wait()) for _ in range(AT_ONCE)]
    left = [asyncio.create_task(turns.wait()) for _ in range(AT_ONCE)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.wait([*first, *gone])
    await asyncio.wait_for(asyncio.gather(*left), 10)
