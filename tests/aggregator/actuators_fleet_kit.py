"""What the tests of actuators fleet, and those beside them, are made with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.patience import PATIENCE


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0 * PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
