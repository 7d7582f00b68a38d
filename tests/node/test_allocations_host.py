"""All schedulers of a host together: found, asked in bounded time, remembered when they fall silent."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from healthd.core.threads import in_thread
from healthd.node.checks.catalogue import unprompted_by
from healthd.node.occupancy.model import Scheduled, read_processes
from healthd.node.occupancy.occupancy import Schedulers, find_schedulers
from healthd.node.settings import AllocationSettings, Unprompted
from tests.node.allocation_kit import http_server, process, slurm_config
from tests.node.allocations_ecs_kit import ARN, body, task
from tests.node.node_kit import MovedClock
from tests.patience import PATIENCE


def schedulers(
    root: Path, *, environ: dict[str, str] | None = None, clock: MovedClock | None = None, **more: Any
) -> Schedulers:
    asked = AllocationSettings(**{"pause_seconds": 0.0, "timeout_seconds": 5.0, **more})
    return Schedulers(asked, root, clock=(clock or MovedClock()).clock, environ=environ or {})


def look(root: Path, **more: Any) -> Scheduled:
    return asyncio.run(schedulers(root, **more).look())


def names(found: Scheduled) -> list[str]:
    return [one.name for one in found.workloads]


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("proc/7/comm", "bash\n", ""),
        ("proc/7/comm", "slurmdbd\n", ""),
        ("proc/7/comm", "slurmd\n", "Slurm is on this host: process 7 (slurmd)"),
        ("proc/7/comm", "kubelet\n", "Kubernetes is on this host: process 7 (kubelet)"),
        ("proc/7/comm", "amazon-ecs-agen\n", "ECS is on this host: process 7 (amazon-ecs-agen)"),
        ("var/run/slurmd.pid", "7\n", "Slurm is on this host: /var/run/slurmd.pid"),
        ("var/lib/kubelet/config.yaml", "", "Kubernetes is on this host: /var/lib/kubelet/config.yaml"),
        ("var/lib/ecs/data", "", "ECS is on this host: /var/lib/ecs"),
    ],
)
def test_scheduler_is_found_by_its_process_or_files(tmp_path: Path, path: str, content: str, why: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(content)
    found = find_schedulers(tmp_path, read_processes(tmp_path / "proc"), {})
    assert [one.why for one in found] == ([why] if why else [])


def test_container_that_sees_nothing_of_the_host_knows_who_started_it(tmp_path: Path) -> None:
    found = look(tmp_path, environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert [reading.scheduler for reading in found.readings] == ["Kubernetes"]
    assert unprompted_by(found)[0] is Unprompted.BOOT
    assert "mount the host's /var/lib/kubelet/pod-resources" in found.unseen


def test_dead_slurmd_that_nobody_waited_for_is_no_scheduler(tmp_path: Path) -> None:
    process(tmp_path, 7, "slurmd", state="Z")
    assert look(tmp_path).readings == ()


def test_job_whose_slurmd_is_being_restarted_is_still_there(tmp_path: Path) -> None:
    """A job compiles for a long time before it opens a device, and slurmd's file of its process is gone meanwhile."""
    process(tmp_path, 20, "slurmstepd", "slurmstepd: [5.batch]")
    slurm_config(tmp_path)
    found = look(tmp_path)
    assert names(found) == ["slurm:5"]
    assert "slurmd is not running" in found.unseen


def test_rule_is_idle_without_a_scheduler_and_where_allocations_are_seen(tmp_path: Path) -> None:
    assert unprompted_by(look(tmp_path)) == (Unprompted.IDLE, "no job scheduler is on this host")
    process(tmp_path, 7, "slurmd")
    slurm_config(tmp_path)
    assert unprompted_by(look(tmp_path)) == (Unprompted.IDLE, "it can be seen what Slurm allocates")


def test_rule_is_boot_as_soon_as_one_of_two_schedulers_is_silent(tmp_path: Path) -> None:
    process(tmp_path, 7, "slurmd")
    slurm_config(tmp_path)
    process(tmp_path, 8, "kubelet")
    rule, why = unprompted_by(look(tmp_path))
    assert (rule, "pod resources are not at" in why) == (Unprompted.BOOT, True)


def test_schedulers_that_are_not_to_be_asked_are_not_seen(tmp_path: Path) -> None:
    process(tmp_path, 7, "slurmd")
    process(tmp_path, 8, "slurmstepd", "slurmstepd: [1.batch]")
    found = look(tmp_path, read=False)
    assert (names(found), "node.allocations.read is false" in found.unseen) == ([], True)


def test_own_job_and_ignored_workloads_do_not_count(tmp_path: Path) -> None:
    process(tmp_path, 7, "slurmd")
    slurm_config(tmp_path)
    for pid, job in ((20, 1), (21, 2)):
        process(tmp_path, pid, "slurmstepd", f"slurmstepd: [{job}.batch]")
    (tmp_path / "var/lib/ecs").mkdir(parents=True)
    with http_server(body(task(), task(arn="a/2", Family="exporter"))) as url:
        found = look(tmp_path, ecs_url=url, environ={"SLURM_JOB_ID": "1"}, ignore=("ecs-family:export*",))
    assert names(found) == ["slurm:2", f"ecs:{ARN}"]
    assert found.unseen == ""


async def test_workloads_of_an_agent_that_falls_silent_stay_until_it_speaks_again(tmp_path: Path) -> None:
    (tmp_path / "var/lib/ecs").mkdir(parents=True)

    asked = schedulers(tmp_path)
    with http_server(body(task())) as url:
        asked._settings = dataclasses.replace(asked._settings, ecs_url=url)
        assert names(await asked.look()) == [f"ecs:{ARN}"]
    for _ in range(2):
        silent = await asked.look()
        assert names(silent) == [f"ecs:{ARN}"]
        assert "the ECS agent does not respond" in silent.unseen
    with http_server(body()) as url:
        asked._settings = dataclasses.replace(asked._settings, ecs_url=url)
        assert (await asked.look()).workloads == ()


async def test_look_of_a_moment_ago_is_used_again(tmp_path: Path) -> None:
    clock = MovedClock()
    asked = schedulers(tmp_path, clock=clock, pause_seconds=2.0)
    first = await asked.look()
    process(tmp_path, 7, "slurmd")
    assert await asked.look() is first
    clock.move(2.0)
    assert [reading.scheduler for reading in (await asked.look()).readings] == ["Slurm"]


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
        assert await schedulers(tmp_path)._bounded("ECS", broken, 5.0) is None

    asyncio.run(scenario())
    assert "look at ECS: LookupError: no such thing" in caplog.text
