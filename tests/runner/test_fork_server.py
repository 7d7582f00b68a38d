"""Workers of devices are forked from one import, as if executed one by one; and executed where a fork is unsafe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from checks.contract import Status, Tier
from healthd.node.daemon import Preload
from healthd.node.state.store import NodeStore
from healthd.runner.runner import Runner
from healthd.runner.settings import Plan, RunProgress
from healthd.runner.workers import fork_server, workers
from tests import prepared
from tests.node.node_kit import BOOT, MovedClock, eventually, lease, settings, specs, survey
from tests.runner.runner_kit import make_runner, run_checks, servers_left, workers_left


def facts_of(folder: Path) -> Mapping[str, Any]:
    """What two workers of one run have been given, by device."""
    folder.mkdir()
    params = {"surroundings_there": {"folder": str(folder)}}
    env = {"MARK": "of this test", "OMP_NUM_THREADS": "1"}
    results = run_checks("surroundings_there", tier=Tier.QUICK, params=params, env=env, retries=0)
    assert results["surroundings_there"].status is Status.PASS, results
    return {file.name: json.loads(file.read_text()) for file in sorted(folder.iterdir())}


def cannot_start(*_: object, **__: object) -> None:
    raise OSError


def test_a_forked_worker_is_what_an_executed_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked = facts_of(tmp_path / "forked")
    monkeypatch.setattr(fork_server, "ForkLaunch", cannot_start)
    executed = facts_of(tmp_path / "executed")
    commands = [[facts[target].pop("command")[3] for target in facts] for facts in (forked, executed)]
    assert commands[0] == ["fork", "fork"]
    assert all(word.isdecimal() for word in commands[1])
    if os.geteuid() != 0:
        for facts in (*forked.values(), *executed.values()):
            del facts["priorities"][1]  # of the guard: the import gives way to others, and only root may undo that
    assert forked == executed
    assert forked["cpu:0"]["threads"] == 1
    assert forked["cpu:0"]["descriptors of the guard"] == []
    assert forked["cpu:0"]["variables"]["MARK"] == "of this test"


REFUSING = """
import dataclasses, os, subprocess, sys, threading, time
from checks.accelerators import cpu
from checks.worker.fork_server import serve

def threads(): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def processes(): subprocess.Popen(["sleep", "600"])
def orphans(): subprocess.run(["sh", "-c", "setsid sleep 600 & echo"], stdout=subprocess.DEVNULL)
def cores(): os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def devices(): sys.opened = open("/dev/zero")
def raises(): import no_such_module

prepare = None if sys.argv[2] == "none" else globals()[sys.argv[2]]
cpu.DESCRIPTOR = dataclasses.replace(cpu.DESCRIPTOR, prepare_fork=prepare)
serve(int(sys.argv[1]), os.getppid())
"""


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ("threads", "threads: 1"),
        ("processes", "processes"),
        ("orphans", "processes"),
        ("cores", "cores"),
        ("devices", "/dev/zero"),
        ("raises", "no_such_module"),
        ("none", "not forked"),
    ],
)
def test_nothing_is_forked_where_an_import_does_more_than_import(after: str, why: str) -> None:
    if after == "cores" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core: it cannot be bound to fewer")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = prepared.ScriptPopen(
            [sys.executable, "-c", REFUSING, str(theirs.fileno()), after], pass_fds=[theirs.fileno()]
        )
        ours.send(json.dumps({"accelerator": "cpu", "host_root": None}).encode())
        theirs.close()
        assert why in json.loads(ours.recv(4096))["refused"]
        assert process.wait(60) == 0
    assert "sleep" not in " ".join(workers_left())


def test_workers_are_executed_where_the_process_that_forks_is_gone(tmp_path: Path) -> None:
    """Also between two workers: the first is forked, and goes on."""
    killed: list[int] = []

    def kill(progress: RunProgress) -> None:
        if progress.event == "started" and not killed:
            killed.extend(int(line.split()[0]) for line in servers_left())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    folder = tmp_path / "facts"
    folder.mkdir()
    params = {"surroundings_there": {"folder": str(folder)}}
    results = run_checks(
        "surroundings_there", tier=Tier.QUICK, params=params, max_workers_at_once=1, on_progress=kill, retries=0
    )
    assert results["surroundings_there"].status is Status.PASS
    assert len(killed) == 1
    words = [json.loads((folder / f"cpu:{index}").read_text())["command"][3] for index in range(2)]
    assert words[0] == "fork"
    assert words[1].isdecimal()


async def test_a_preloaded_process_forks_for_each_run_and_ends_when_it_is_not_wanted() -> None:
    runner = make_runner()
    runner.preload(True)
    await eventually(lambda: len(workers_left()) == 1, 60)
    (kept,) = workers_left()
    assert servers_left() == [kept]
    for _ in range(2):
        assert await present(runner)
        assert workers_left() == [kept]
    runner.preload(False)
    await eventually(lambda: workers_left() == [], 60)
    assert await present(runner)
    assert workers_left() == []


async def test_a_node_keeps_the_process_while_it_is_free_and_gives_its_memory_to_a_job(tmp_path: Path) -> None:
    store = NodeStore(settings(tmp_path), specs(tmp_path), clock=MovedClock().clock, boot_id=BOOT)
    runner = make_runner()
    Preload(store, runner)
    store.set_faults(())
    assert workers_left() == [], "it is not known yet whether the node is free"
    store.set_survey(survey(()))
    await eventually(lambda: len(servers_left()) == 1, 60)
    store.set_leases(((lease(), 0.0),))
    await eventually(lambda: workers_left() == [], 60)
    store.set_leases(())
    await eventually(lambda: len(servers_left()) == 1, 60)
    store.set_survey(survey(("pid 123 (python)",)))
    await eventually(lambda: workers_left() == [], 60)


async def test_a_preloaded_process_that_was_killed_is_replaced_at_the_next_run() -> None:
    runner = make_runner()
    runner.preload(True)
    await eventually(lambda: len(workers_left()) == 1, 60)
    (kept,) = workers_left()
    os.kill(int(kept.split()[0]), signal.SIGKILL)
    await eventually(lambda: workers_left() == [], 60)
    assert await present(runner)
    assert len(workers_left()) == 1
    await runner.close()
    assert workers_left() == []


async def test_a_daemon_forks_the_worker_of_the_node_from_a_process_that_stays_and_is_replaced_when_killed() -> None:
    runner = make_runner()
    runner.keep_host_server()
    plan = Plan(tier=Tier.PASSIVE, checks=("memory_free",), executor="test")

    async def passes() -> list[str]:
        (result,) = await runner.run(plan)
        assert result.status is not Status.UNKNOWN, result
        return workers_left()

    (kept,) = await passes()
    assert await passes() == [kept]
    os.kill(int(kept.split()[0]), signal.SIGKILL)
    await eventually(lambda: workers_left() == [], 60)
    (other,) = await passes() or await passes()  # the first may find out that it is gone, and executes its worker
    assert other != kept
    await runner.close()
    assert await passes() == []


async def test_a_forking_process_that_does_not_answer_costs_its_time_once_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "FORK_SECONDS", 0.5)
    runner = make_runner()
    runner.keep_host_server()
    plan = Plan(tier=Tier.PASSIVE, checks=("memory_free",), executor="test")

    async def passes() -> bool:
        (result,) = await runner.run(plan)
        return result.status is not Status.UNKNOWN

    assert await passes()
    (kept,) = workers_left()
    os.kill(int(kept.split()[0]), signal.SIGSTOP)
    assert await passes(), "its worker is executed"
    await eventually(lambda: kept not in workers_left(), 60)
    assert await passes()
    (other,) = workers_left()
    assert other != kept
    await runner.close()
    assert workers_left() == []


async def present(runner: Runner) -> bool:
    """Whether a check passes on both devices."""
    (result,) = await runner.run(Plan(tier=Tier.QUICK, checks=("present",), executor="test"))
    return result.status is Status.PASS


async def test_a_run_that_is_cancelled_in_the_middle_of_the_import_leaves_nothing() -> None:
    runner = make_runner(executed=True)
    plan = Plan(tier=Tier.QUICK, checks=("present",), executor="test")
    run = asyncio.create_task(runner.run(plan))
    await eventually(lambda: bool(servers_left()), 60)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert workers_left() == []
