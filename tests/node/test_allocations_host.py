"""All schedulers of a host together: found, asked in bounded time, remembered when they fall silent."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from healthd.core.threads import in_thread
from healthd.node.checks.catalogue import unprompted_by
from healthd.node.occupancy.model import JobScheduler, Look, Reading, Scheduled, Workload, read_processes
from healthd.node.occupancy.occupancy import Schedulers, find_schedulers
from healthd.node.settings import AllocationSettings, Unprompted
from tests.node.allocation_kit import process
from tests.node.node_kit import MovedClock
from tests.patience import PATIENCE


def kite(kind: str, **signs: Any) -> JobScheduler:
    """A scheduler whose workloads, or what keeps them out of sight, stand in a file of the host."""

    def read(look: Look) -> Reading:
        words = (look.root / kind).read_text().split(maxsplit=1)
        if words[:1] == ["silent:"]:
            return Reading(scheduler=kind.title(), kind=kind, workloads=None, unseen=words[1])
        found = tuple(Workload(name=f"{kind}:{word}", aliases=(f"{kind}-class:{word[0]}",)) for word in words)
        return Reading(scheduler=kind.title(), kind=kind, workloads=found)

    return JobScheduler(name=kind.title(), kind=kind, read=read, **signs)


def own(_: Path, environ: Mapping[str, str]) -> frozenset[str]:
    return frozenset({f"kite:{environ['KITE_JOB']}"}) if "KITE_JOB" in environ else frozenset()


KITE = kite("kite", processes=("kited",), paths=("run/kite",), variables=("KITE_HOST",), own=own)
OWL = kite("owl", processes=("owld",))


def schedulers(
    root: Path, *, environ: dict[str, str] | None = None, clock: MovedClock | None = None, **more: Any
) -> Schedulers:
    asked = AllocationSettings(**{"pause_seconds": 0.0, "timeout_seconds": 5.0, **more})
    return Schedulers(asked, root, clock=(clock or MovedClock()).clock, environ=environ or {}, known=(KITE, OWL))


def look(root: Path, **more: Any) -> Scheduled:
    return asyncio.run(schedulers(root, **more).look())


def names(found: Scheduled) -> list[str]:
    return [one.name for one in found.workloads]


def host(root: Path, kite: str = "", owl: str | None = None) -> None:
    """A host with one scheduler, or two."""
    process(root, 7, "kited")
    (root / "kite").write_text(kite)
    if owl is not None:
        process(root, 8, "owld")
        (root / "owl").write_text(owl)


def test_scheduler_is_found_by_its_process_or_files_or_variables(tmp_path: Path) -> None:
    def why(environ: dict[str, str]) -> list[str]:
        return [one.why for one in find_schedulers(tmp_path, read_processes(tmp_path / "proc"), environ, (KITE, OWL))]

    process(tmp_path, 9, "bash")
    assert why({}) == []
    assert why({"KITE_HOST": "h"}) == ["Kite is on this host: the variable KITE_HOST"]
    (tmp_path / "run/kite").mkdir(parents=True)
    assert why({"KITE_HOST": "h"}) == ["Kite is on this host: /run/kite"]
    process(tmp_path, 7, "kited")
    process(tmp_path, 8, "owld", state="Z")  # it is dead, and nobody waited for it
    assert why({}) == ["Kite is on this host: process 7 (kited)"]


def test_rule_is_idle_without_a_scheduler_and_where_allocations_are_seen(tmp_path: Path) -> None:
    assert unprompted_by(look(tmp_path)) == (Unprompted.IDLE, "no job scheduler is on this host")
    host(tmp_path)
    assert unprompted_by(look(tmp_path)) == (Unprompted.IDLE, "it can be seen what Kite allocates")


def test_rule_is_boot_as_soon_as_one_of_two_schedulers_is_silent(tmp_path: Path) -> None:
    host(tmp_path, "", "silent: its socket is gone")
    rule, why = unprompted_by(look(tmp_path))
    assert (rule, "its socket is gone" in why) == (Unprompted.BOOT, True)


def test_schedulers_that_are_not_to_be_asked_are_not_seen(tmp_path: Path) -> None:
    host(tmp_path, "1")
    found = look(tmp_path, read=False)
    assert (names(found), "node.allocations.read is false" in found.unseen) == ([], True)
    assert found.of("kite:1") == found.readings[0]


def test_own_job_and_ignored_workloads_do_not_count(tmp_path: Path) -> None:
    host(tmp_path, "1a 2b 5e", "3c 4d")
    found = look(tmp_path, environ={"KITE_JOB": "5e"}, ignore=("kite:2*", "owl-class:3"))
    assert names(found) == ["kite:1a", "owl:4d"]
    assert found.unseen == ""
    assert found.of("owl:4d") == found.readings[1]
    assert found.of("eagle:1") is None


async def test_workloads_of_a_scheduler_that_falls_silent_stay_until_it_speaks_again(tmp_path: Path) -> None:
    host(tmp_path, "1")
    asked = schedulers(tmp_path)
    assert names(await asked.look()) == ["kite:1"]
    (tmp_path / "kite").write_text("silent: it does not respond")
    for _ in range(2):
        silent = await asked.look()
        assert names(silent) == ["kite:1"]
        assert "it does not respond" in silent.unseen
        assert silent.of("kite:1") == silent.readings[0]
    (tmp_path / "kite").write_text("")
    assert (await asked.look()).workloads == ()


async def test_look_of_a_moment_ago_is_used_again(tmp_path: Path) -> None:
    clock = MovedClock()
    asked = schedulers(tmp_path, clock=clock, pause_seconds=2.0)
    first = await asked.look()
    host(tmp_path)
    assert await asked.look() is first
    clock.move(2.0)
    assert [reading.scheduler for reading in (await asked.look()).readings] == ["Kite"]


async def test_work_that_hangs_is_left_and_not_started_twice(tmp_path: Path) -> None:
    started: list[int] = []
    end = threading.Event()

    asked = schedulers(tmp_path)

    def hang() -> int:
        started.append(1)
        end.wait(30 * PATIENCE)
        return 1

    assert await asked._bounded("x", hang, 0.05) is None
    assert await asked._bounded("x", hang, 0.05) is None
    assert len(started) == 1
    end.set()
    async with asyncio.timeout(10 * PATIENCE):
        while (found := await asked._bounded("x", hang, 5.0)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the one that hung is just ending
    assert found == 1


def test_loop_ends_although_a_look_hangs() -> None:
    end = threading.Event()

    async def scenario() -> None:
        in_thread("hanging", lambda: end.wait(30 * PATIENCE))

    began = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - began < 10 * PATIENCE, "the loop waited for the thread"
    end.set()


def test_fault_of_a_reader_is_told_and_counts_as_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> int:
        raise LookupError("no such thing")

    async def scenario() -> None:
        assert await schedulers(tmp_path)._bounded("Kite", broken, 5.0) is None

    asyncio.run(scenario())
    assert "look at Kite: LookupError: no such thing" in caplog.text
