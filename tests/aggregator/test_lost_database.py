"""Quarantines over the loss of the aggregator's database: nodes keep what they were told and tell it again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from healthd.aggregator.engine.engine import Engine
from healthd.aggregator.engine.leases import Recovery
from healthd.aggregator.fleet.registry import Fleet
from healthd.aggregator.policy import Policy
from healthd.aggregator.store.store import Store
from healthd.core.model import Quarantine
from healthd.node.settings import SyncSettings
from healthd.node.state.saving import StateFile
from healthd.node.sync import SyncClient
from tests.aggregator.engine_kit import running
from tests.aggregator.parts import fleet
from tests.aggregator.rules_engine_kit import kept, kinds, measured
from tests.aggregator.ruling import DAY
from tests.aggregator.world import World, good_results, with_wrong
from tests.node import node_kit

PERSON = Quarantine(reason="fan", owner="ada", owner_kind="person", since=1.0, until=None)
SOFT = Quarantine(reason="matmul SlowDevice", owner="rule:soft", owner_kind="rule", since=1.0, until=None)
HARD = Quarantine(reason="matmul WrongResult", owner="rule:hard", owner_kind="rule", since=1.0, until=None)
OWNERS = pytest.mark.parametrize("word", [PERSON, SOFT, HARD], ids=["person", "soft", "hard"])


class Node:
    """The real node's side of the line."""

    def __init__(self, folder: Path) -> None:
        self.machine = node_kit.World(folder)
        self.book = self.machine.book
        self.file = StateFile(self.book, folder / "state.json")
        self.file.restore()
        clock = self.machine.time.clock
        self.client = SyncClient(self.book, self.machine.orders, SyncSettings(), key="k" * 40, clock=clock)

    async def sync(self, to: Aggregator) -> None:
        """One request and its answer."""
        request = self.client.compose()
        answer = await to.registry.sync("n1", "hash", request, 0.0)
        self.client.apply(request, answer, self.machine.time.clock.boot())


@dataclasses.dataclass
class Aggregator:
    """The real registry and engine; a pass of its loop runs only when a test says so."""

    registry: Fleet
    engine: Engine

    def says(self) -> str | None:
        """Who keeps n1 out: "person" or "rule"."""
        found = self.engine.quarantines().get("n1")
        return None if found is None else found.owner_kind


@contextlib.asynccontextmanager
async def aggregator(url: str = "sqlite://") -> AsyncIterator[Aggregator]:
    store = Store.open(url)
    registry = fleet(issuer=store.store_id)
    try:
        yield Aggregator(registry, Engine(store=store, registry=registry, policy=Policy()))
    finally:
        store.close()


async def told(folder: Path, word: Quarantine) -> Node:
    """A node that an aggregator has told its quarantine, whose database is then lost."""
    async with aggregator() as former:
        node = Node(folder)
        await node.sync(former)
        await former.engine.run_once()
        former.registry.set_quarantine("n1", word)
        await node.sync(former)
        assert node.book.quarantine == word
    return node


@OWNERS
@pytest.mark.parametrize("syncs", [1, 2, 3], ids=["one sync a pass", "two", "three"])
async def test_node_tells_its_quarantine_however_many_syncs_come_before_the_first_pass(
    tmp_path: Path, word: Quarantine, syncs: int
) -> None:
    node = await told(tmp_path, word)
    async with aggregator() as empty:
        for _ in range(3):
            for _ in range(syncs):
                await node.sync(empty)
            await empty.engine.run_once()
        assert empty.says() == word.owner_kind
        assert node.book.quarantine is not None
        assert word.reason in node.book.quarantine.reason


@OWNERS
async def test_node_whose_first_sync_brings_no_state_tells_its_quarantine(tmp_path: Path, word: Quarantine) -> None:
    """As behind a proxy, which keeps the node's connection while the aggregator is replaced."""
    node = await told(tmp_path, word)
    async with aggregator() as former:
        await node.sync(former)  # whose answer makes no statement; it knows the state now
    async with aggregator() as empty:
        assert node.client.compose().state is None
        for _ in range(3):
            await node.sync(empty)
            await empty.engine.run_once()
        assert empty.says() == word.owner_kind


@OWNERS
async def test_daemon_that_restarts_before_its_first_sync_tells_its_quarantine(
    tmp_path: Path, word: Quarantine
) -> None:
    """As after a power failure of the whole site."""
    node = await told(tmp_path, word)
    node.file.save()
    async with aggregator() as empty:
        again = Node(tmp_path)
        for _ in range(3):
            await again.sync(empty)
            await empty.engine.run_once()
        assert empty.says() == word.owner_kind


async def keep_out(it: Aggregator, word: Quarantine | None) -> None:
    """A person or a rule decides so."""
    state = it.engine._memory.fleet_state
    decided = it.engine.submit(lambda batch: state.put_quarantine(batch, "n1", word, why="by ada"))
    await asyncio.gather(decided, it.engine.run_once())


@OWNERS
@pytest.mark.parametrize("since", [1.0, time.time() - 1800, time.time() + DAY], ids=["long", "lately", "clock ahead"])
async def test_quarantine_ended_while_the_node_was_away_is_not_taken_from_it(
    tmp_path: Path, word: Quarantine, since: float
) -> None:
    """Whatever the clocks showed when it began and when it ended."""
    url = f"sqlite:///{tmp_path}/a.db"
    async with aggregator(url) as former:
        node = Node(tmp_path)
        await node.sync(former)
        await former.engine.run_once()
        await keep_out(former, dataclasses.replace(word, since=since))
        await node.sync(former)
        assert node.book.quarantine is not None
        await keep_out(former, None)
    node.file.save()
    async with aggregator(url) as same:
        for again in (node, Node(tmp_path)):
            for _ in range(3):
                await again.sync(same)
                await same.engine.run_once()
            assert same.says() is None
            assert again.book.quarantine is None


@OWNERS
async def test_quarantine_that_began_after_an_old_copy_was_made_is_taken_from_the_node(
    tmp_path: Path, word: Quarantine
) -> None:
    url, file, copy = f"sqlite:///{tmp_path}/a.db", tmp_path / "a.db", tmp_path / "copy.db"
    node = Node(tmp_path)
    async with aggregator(url) as former:
        await node.sync(former)
        await former.engine.run_once()
        await keep_out(former, SOFT)
        await keep_out(former, None)
    shutil.copy(file, copy)
    async with aggregator(url) as former:
        await node.sync(former)
        await former.engine.run_once()
        await keep_out(former, word)
        await node.sync(former)
    shutil.copy(copy, file)
    async with aggregator(url) as restored:
        for _ in range(3):
            await node.sync(restored)
            await restored.engine.run_once()
        assert restored.says() == word.owner_kind
        assert node.book.quarantine is not None
        assert word.reason in node.book.quarantine.reason
        # Only once: what a person says afterwards counts.
        said = restored.engine.quarantine("n1", None, why="by ada")
        await asyncio.gather(said, restored.engine.run_once())
        await restored.engine.run_once()
        assert restored.says() is None


async def test_quarantines_that_the_database_should_know_show_that_it_is_an_old_copy(tmp_path: Path) -> None:
    url, world = f"sqlite:///{tmp_path}/a.db", World("n1", "n2", "n3")
    async with running(world, url):
        pass
    for name in ("n1", "n2"):
        world.renew(name, quarantine=dataclasses.replace(PERSON, number=1))
        world.daemons[name].issuer = world.issuer
    async with running(world, url) as run:
        assert "quarantines that this database does not contain" in (run.engine.recovering() or "")


def lost(world: World, name: str, word: Quarantine, *, confirmed: bool = True) -> None:
    """This node was told so by a database that is no more."""
    world.renew(name, quarantine=word)
    world.daemons[name].issuer = "store-lost"
    world.daemons[name].confirmed = confirmed


async def test_rules_quarantines_are_taken_over_whatever_share_of_the_pool_has_come() -> None:
    """They were within the limit of the whole pool, of which the quarantined nodes may be the first to come."""
    world = World()
    async with running(world) as run:
        for i in range(6):
            world.add(f"n{i}")
            lost(world, f"n{i}", SOFT if i % 2 else HARD, confirmed=i > 3)
            await run.engine.run_once()
        assert [name for name in sorted(world.daemons) if kept(run, name)] == sorted(world.daemons)
        assert run.engine.breakers() == {}


async def test_rules_quarantine_that_only_had_time_to_pass_ends_at_that_time() -> None:
    world = World("n1", "n2")
    until = world.now + 300
    lost(world, "n1", dataclasses.replace(HARD, until=until))
    lost(world, "n2", dataclasses.replace(HARD, until=world.now - 1))
    async with running(world) as run:
        found = kept(run, "n1")
        assert found is not None
        assert (found.owner, found.until) == ("rule:hard", until)
        assert kept(run, "n2") is None
        measured(run, "n1", good_results(1.0), after=301)
        await run.engine.run_once()
        assert kept(run, "n1") is None


async def test_rules_quarantine_is_taken_over_once() -> None:
    world = World("n1")
    lost(world, "n1", HARD)
    async with running(world) as run:
        await run.engine.quarantine("n1", None, why="by ada")
        measured(run, "n1", good_results(1.0))
        await run.engine.run_once()
        assert kept(run, "n1") is None
        assert (await kinds(run, "n1")).count("quarantined") == 1


async def test_quarantine_that_a_person_ended_does_not_come_back_when_memory_is_read_anew() -> None:
    """From the last word of a node that has been switched off since."""
    world = World("n1", "n2")
    lost(world, "n1", PERSON)
    async with running(world) as run:
        assert kept(run, "n1") == PERSON
        await run.engine.quarantine("n1", None, why="by ada")
        await run.engine.run_once()
        run.engine._stale = True  # as after a write that failed
        for _ in range(3):
            await run.engine.run_once()
        assert kept(run, "n1") is None


async def test_persons_quarantine_whose_take_over_was_not_written_is_taken_over_again(tmp_path: Path) -> None:
    """Behind a rule's, which is on disk."""
    world = World("n1", "n2")
    async with running(world, f"sqlite:///{tmp_path}/a.db") as run:
        await run.engine.quarantine("n1", dataclasses.replace(HARD, since=world.now))
        moved = (tmp_path / "a.db").rename(tmp_path / "away.db")
        lost(world, "n1", PERSON)
        run.world.tell("n1")
        await run.engine.run_once()
        moved.rename(tmp_path / "a.db")
        assert await run.engine._rebuild()
        assert (found := kept(run, "n1")) is None or found.owner_kind == "rule"
        world.now += 5
        run.world.tell("n1")
        await run.engine.run_once()
        assert kept(run, "n1") == PERSON


async def test_rules_quarantine_is_kept_behind_a_persons_that_came_first(tmp_path: Path) -> None:
    world = World("n1", "n2")
    async with running(world) as run:
        word = dataclasses.replace(PERSON, until=world.now + DAY)
        await run.engine.quarantine("n1", word)
        lost(world, "n1", HARD)
        measured(run, "n1", good_results(1.0))
        await run.engine.run_once()
        assert kept(run, "n1") == word
        measured(run, "n1", good_results(1.0), after=2 * DAY)
        await run.engine.run_once()
        found = kept(run, "n1")
        assert found is not None
        assert found.owner == "rule:hard"


async def test_fault_that_the_first_state_shows_again_is_one_quarantine() -> None:
    world = World("n1", "n2")
    lost(world, "n1", HARD)
    world.renew("n1", results=with_wrong())
    async with running(world) as run:
        await run.settle()
        assert kept(run, "n1") is not None
        record = run.engine.remembered("n1")
        assert record is not None
        assert record.repeats == 1


def test_a_clock_that_was_set_back_does_not_make_the_recovery_longer() -> None:
    began = 1_000_000.0
    kept = {"recovering_until": str(began + 60.0)}
    recovery = Recovery(Policy(recovery_seconds=60.0), kept, started_at=began - DAY)
    assert recovery.why(began - DAY + 59.0) is not None
    assert recovery.why(began - DAY + 60.0) is None
