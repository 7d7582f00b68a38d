"""Every promise is kept, whatever happens; a simulation is the same each time, and nothing in it escapes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.profile import THOROUGH
from tests.simulation.loop import ForbiddenError, VirtualLoop
from tests.simulation.plan import drawn
from tests.simulation.world import simulate

SECONDS = 10.0 if THOROUGH else 2.0
"""Of processor time, for as many schedules as fit: `make simulate` runs more, and `.ci/run` two thousand."""
FIRST_SEED = 1000


def test_every_promise_is_kept() -> None:
    began, seed, admitted = time.process_time(), FIRST_SEED, 0
    while time.process_time() - began < SECONDS:
        outcome = simulate(drawn(seed))
        assert not outcome.broken, f"{outcome.broken}; again: make simulate SEED={seed} SCHEDULES=1"
        admitted += outcome.admitted
        seed += 1
    assert admitted > seed - FIRST_SEED, "jobs start"


@pytest.mark.thorough
def test_same_seed_is_the_same_run_to_the_byte_whatever_the_order_of_sets() -> None:
    text = "from tests.simulation import plan, world; print(world.simulate(plan.drawn(7)).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert digests == {f"{simulate(drawn(7)).digest}\n"}
    assert digests != {f"{simulate(drawn(8)).digest}\n"}


@pytest.mark.parametrize(
    "escape",
    [
        lambda: socket.socket(),
        lambda: threading.Thread(target=print).start(),
        lambda: subprocess.Popen(["true"]),
        lambda: asyncio.get_running_loop().run_in_executor(None, print),
    ],
    ids=["socket", "thread", "program", "executor"],
)
def test_what_cannot_be_replayed_ends_the_simulation_also_where_it_is_swallowed(escape: Callable[[], object]) -> None:
    async def swallowing() -> None:
        with contextlib.suppress(ForbiddenError):
            escape()
        await asyncio.sleep(1.0)

    with pytest.raises(ForbiddenError):
        VirtualLoop().simulate(swallowing(), seed=1)
