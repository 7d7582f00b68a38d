"""Work that may wait gives way to what is urgent: in slices, in order, and never for ever. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from healthd.aggregator.backlog import SLICE_SECONDS, URGENT_SECONDS, Backlog, no_longer_urgent

SYNC_SECONDS = 0.0005
GATE_STEPS, STEP_SECONDS = 8, 0.001


class Time:
    """Passes only where work is done."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float, done: Callable[[], None] = lambda: None) -> Callable[[], None]:
        def act() -> None:
            self.now += seconds
            done()

        return act


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def gate(time: Time) -> float:
    """A gate with nothing to wait for but turns of the loop; how long it took."""
    began = time.now
    for _ in range(GATE_STEPS):
        time.now += STEP_SECONDS
        await asyncio.sleep(0)
    return time.now - began


async def test_a_gate_waits_at_most_a_slice_at_each_of_its_steps() -> None:
    time = Time()
    backlog, done = Backlog(clock=time), list[int]()
    for number in range(400):  # what the nodes of six gates of 64 say at one moment: 0.2 s of work
        backlog.do(time.work(SYNC_SECONDS, lambda number=number: done.append(number)))
    took = await gate(time)
    assert took <= GATE_STEPS * (STEP_SECONDS + SLICE_SECONDS + SYNC_SECONDS)
    assert took >= GATE_STEPS * STEP_SECONDS + (GATE_STEPS - 1) * SLICE_SECONDS, (
        "the backlog has its slice of each turn"
    )
    await turns(200)
    assert len(backlog) == 0
    assert done == list(range(400)), "in the order in which they came"


async def test_what_is_urgent_waits_for_nothing_until_it_is_urgent_no_longer() -> None:
    time = Time()
    backlog = Backlog(clock=time)
    with backlog.urgent():
        for _ in range(100):
            backlog.do(time.work(SYNC_SECONDS))
        assert await gate(time) == pytest.approx(GATE_STEPS * STEP_SECONDS)
        assert len(backlog) == 100
        no_longer_urgent()  # it waits for nodes now
        await turns(50)
        assert len(backlog) == 0


async def test_a_stream_of_urgent_work_leaves_the_backlog_half_of_the_time() -> None:
    time = Time()
    backlog = Backlog(clock=time)
    first, second = backlog.urgent(), backlog.urgent()
    first.__enter__()
    for _ in range(100):
        backlog.do(time.work(SYNC_SECONDS))
    second.__enter__()  # one of the two is always under way
    held = [len(backlog)]
    for _ in range(10):
        time.now += URGENT_SECONDS / 2
        backlog.do(time.work(SYNC_SECONDS))
        await turns(100)
        held.append(len(backlog))
    assert held[1] > 100, "nothing is done while it is urgent"
    assert 0 in held, "and all of it later"


async def test_what_a_gate_waits_for_goes_before_the_rest() -> None:
    time = Time()
    backlog, done = Backlog(clock=time), list[str]()
    with backlog.urgent():
        backlog.do(time.work(SYNC_SECONDS, lambda: done.append("a sync")))
        backlog.do(time.work(SYNC_SECONDS, lambda: done.append("a confirmed lease")), prior=True)
    await turns(3)
    assert done == ["a confirmed lease", "a sync"]


async def test_at_rest_it_works_at_once_and_wakes_nobody() -> None:
    time = Time()
    backlog, done = Backlog(clock=time), list[int]()
    backlog.do(time.work(SYNC_SECONDS, lambda: done.append(1)))
    assert done == [1]
    await turns(2)
    assert not asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]


async def test_a_flood_of_what_claims_to_be_prior_leaves_a_third_to_the_rest() -> None:
    time = Time()
    backlog, done = Backlog(clock=time), list[str]()
    with backlog.urgent():
        for _ in range(30):
            backlog.do(time.work(SYNC_SECONDS, lambda: done.append("prior")), prior=True)
        backlog.do(time.work(SYNC_SECONDS, lambda: done.append("a sync")))
    await turns(2)
    assert "a sync" in done[:3]


async def test_work_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    backlog, done = Backlog(clock=time), list[int]()

    def fails() -> None:
        raise RuntimeError("broken")

    with backlog.urgent():
        backlog.do(fails)
        backlog.do(time.work(SYNC_SECONDS, lambda: done.append(1)))
    await turns(3)
    assert done == [1]
    assert "broken" in caplog.text
