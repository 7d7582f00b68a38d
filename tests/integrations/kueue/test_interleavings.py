"""
Everything in any order: Kueue, people, gates, the controller, which is killed at any call.

No Workload is admitted by a gate of another reservation, none is stuck, and nothing is held for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random

import pytest

from healthd.integrations.kueue.workloads import Terms
from tests.integrations.kueue import player
from tests.integrations.kueue.world import World
from tests.profile import THOROUGH

RUNS = int(os.environ.get("TESTS_KUEUE_INTERLEAVINGS", "10000" if THOROUGH else "800"))
PARTS = 10 if THOROUGH else 1
STEPS = 24


async def play(seed: int) -> World:
    """One interleaving, and then a quiet time."""
    rng = random.Random(seed)
    after = rng.choice(("none", "retry"))
    terms = Terms(after_admission="retry" if after == "retry" else "none", impossible=rng.choice(("reject", "retry")))
    world = World(rng, slots=rng.choice((1, 2)), terms=terms)
    world.failing, world.killing = rng.choice((0.0, 0.05)), rng.choice((0.0, 0.05))
    world.moving = rng.choice((0.0, 0.3))
    world.submit("j1", "u1", count=rng.choice((1, 2)))
    world.submit("j2", "u2", count=2)
    for step in range(STEPS):
        what = rng.random()
        if what < 0.35:
            world.kueue()
        elif what < 0.45:
            world.people()
        elif what < 0.55:
            world.turn()
        elif what < 0.85:
            await world.run_pass(fresh=rng.random() < 0.8)
        elif what < 0.9:
            node = rng.choice(world.nodes)
            if world.unfit_nodes.pop(node, None) is None:
                world.unfit_nodes[node] = "it is bad"
        else:
            world.now += rng.choice((0.1, 0.5, 1.0, 5.0, 61.0, 301.0))
        assert not world.wrong, f"seed {seed}, step {step}: {world.wrong}"
    await world.settle()
    return world


@pytest.mark.parametrize("part", range(PARTS))
def test_no_order_admits_on_an_answer_for_another_time_or_leaves_a_workload_stuck(
    part: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "healthd.integrations.kueue.controller")  # a million lines

    async def run() -> None:
        for seed in range(part * RUNS // PARTS, (part + 1) * RUNS // PARTS):
            world = await play(seed)
            assert not world.wrong, f"seed {seed}: {world.wrong}"
            while True:  # those that wait for quota get it when the others have ended
                running = [one for one in world.objects.values() if player.holds(one, "Admitted")]
                ending = [one for one in running if not player.holds(one, "Finished")]
                for found in world.objects.values():
                    waits = found["spec"]["active"] and not player.holds(found, "Finished")
                    assert not waits or ending, f"seed {seed}: stuck: {found}"
                if not ending:
                    break
                for found in ending:
                    after = player.copied(found)
                    player.finished(after, world.now)
                    world.put(after)
                await world.settle()
            await world.settle()
            assert not world.held(), f"seed {seed}: held for nobody: {world.held()}"
            assert not world.labelled, f"seed {seed}: labelled for nobody: {world.labelled}"

    asyncio.run(run())
