"""Slurm's jobs by its processes: as files, and of a real Slurm where one is installed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.integrations.slurm import occupancy as slurm
from healthd.node.occupancy.model import Reading, read_processes
from healthd.node.occupancy.occupancy import find_schedulers
from tests.integrations.slurm.occupancy_kit import slurm_config
from tests.integrations.slurm.slurm_kit import Slurm, until
from tests.node.allocation_kit import is_here, process


def read(root: Path) -> Reading:
    return slurm.read(root, read_processes(root / "proc"))


def names(reading: Reading) -> list[str]:
    return [one.name for one in reading.workloads or ()]


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("proc/7/comm", "bash\n", ""),
        ("proc/7/comm", "slurmdbd\n", ""),
        ("proc/7/comm", "slurmd\n", "Slurm is on this host: process 7 (slurmd)"),
        ("var/run/slurmd.pid", "7\n", "Slurm is on this host: /var/run/slurmd.pid"),
    ],
)
def test_it_is_found_by_its_process_or_files(tmp_path: Path, path: str, content: str, why: str) -> None:
    assert is_here(tmp_path, path, content, slurm.SCHEDULER) == why


def test_the_dead_that_nobody_waited_for_is_no_scheduler(tmp_path: Path) -> None:
    process(tmp_path, 7, "slurmd", state="Z")
    assert find_schedulers(tmp_path, read_processes(tmp_path / "proc"), {}, [slurm.SCHEDULER]) == ()


def test_host_without_jobs_is_free(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 11, "python", parent=1)
    slurm_config(tmp_path)
    assert read(tmp_path) == Reading(scheduler="Slurm", kind="slurm", workloads=())


def test_steps_of_a_job_are_one_workload(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 20, "slurmstepd", "slurmstepd: [123.extern]")
    process(tmp_path, 21, "slurmstepd", "slurmstepd: [123.batch]")
    process(tmp_path, 22, "slurmstepd", "slurmstepd: [123.0]")
    process(tmp_path, 23, "slurmstepd", "slurmstepd: [124+1.interactive]")
    slurm_config(tmp_path)
    assert names(read(tmp_path)) == ["slurm:123", "slurm:124"]


def test_job_in_its_prolog_is_there_already(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 11, "prolog.sh", parent=10, variables={"SLURM_JOB_ID": "9"})
    process(tmp_path, 12, "health.sh", parent=10, variables={"SLURMD_NODENAME": "n1"})  # HealthCheckProgram
    slurm_config(tmp_path)
    found = read(tmp_path)
    assert (names(found), found.unseen) == (["slurm:9"], "")


def test_step_that_does_not_say_its_job_is_a_job(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 20, "slurmstepd", "/usr/sbin/slurmstepd")
    slurm_config(tmp_path)
    assert names(read(tmp_path)) == ["slurm:unknown"]


def test_keeper_of_the_control_group_and_the_dead_are_no_jobs(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 20, "slurmstepd", "/usr/sbin/slurmstepd", "infinity")
    process(tmp_path, 21, "slurmstepd", "slurmstepd: [5.batch]", state="Z")
    slurm_config(tmp_path)
    assert names(read(tmp_path)) == []


def test_jobs_outlive_their_slurmd_but_then_not_all_is_seen(tmp_path: Path) -> None:
    process(tmp_path, 20, "slurmstepd", "slurmstepd: [5.batch]")
    slurm_config(tmp_path)
    found = read(tmp_path)
    assert names(found) == ["slurm:5"]
    assert "the host's process table" in found.unseen


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every process")
def test_prolog_that_cannot_be_read_is_blindness(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 11, "prolog.sh", parent=10)
    (tmp_path / "proc/11/environ").chmod(0)
    slurm_config(tmp_path)
    assert "run healthd as root" in read(tmp_path).unseen


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("PrologFlags=Contain", True),
        ("prologflags = alloc,CONTAIN,X11", True),
        ("PrologFlags=X11", True),
        ("PrologFlags=Alloc", False),
        ("PrologFlags=Contain\nPrologFlags=Alloc", False),
        ("#PrologFlags=Contain", False),
        ("PrologFlags=Alloc,\\\nContain", True),
        ("", False),
    ],
)
def test_empty_list_is_an_answer_only_where_every_job_shows(tmp_path: Path, text: str, whole: bool) -> None:
    process(tmp_path, 10, "slurmd")
    slurm_config(tmp_path, f"WatchedName=c\n{text}\n")
    assert (read(tmp_path).unseen == "") is whole


def test_configuration_is_found_where_slurmd_was_told_and_with_what_it_includes(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd", "/usr/sbin/slurmd", "-f", "/shared/slurm.conf", "-D")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/slurm.conf").write_text("Include more.conf\nInclude slurm.conf\n")  # a ring ends
    (tmp_path / "shared/more.conf").write_text("PrologFlags=Contain\n")
    slurm_config(tmp_path, "PrologFlags=Alloc\n")
    assert read(tmp_path).unseen == ""
    assert slurm.read_config(tmp_path, "/nowhere") == ""


@given(
    st.lists(st.text(max_size=20), max_size=4), st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5))
)
def test_any_slurmstepd_is_a_job_or_known_to_be_none(arguments: list[str], variables: dict[str, str] | None) -> None:
    found = slurm.of_step(arguments, variables)
    if found is None:
        assert not arguments or arguments[1:] == ["infinity"]
    else:
        assert found.name.startswith("slurm:")


# --- the real one -------------------------------------------------------------------------------------------------

PROLOG = "#!/bin/sh\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\n"


class Watched(Slurm):
    """Two nodes, in a folder that is the machine of our reader. A job's prolog ends once there is a file `go`."""

    def __init__(self, folder: Path) -> None:
        (folder / "prolog.sh").write_text(PROLOG.format(folder=folder))
        (folder / "prolog.sh").chmod(0o755)
        super().__init__(folder, ("n1", "n2"), extra=f"Prolog={folder}/prolog.sh\nPrologFlags=Contain")

    def look(self) -> Reading:
        """What our reader finds of the processes of this cluster alone."""
        root = self.folder / f"root-{time.monotonic_ns()}"
        ours = {daemon.pid for daemon in self.slurmds}
        for one in read_processes(Path("/proc")):
            source = Path("/proc") / str(one.pid)
            try:
                environ = (source / "environ").read_bytes()
                if f"SLURM_CONF={self.config}\0".encode() not in environ or one.name == "slurmctld":
                    continue
                copied = root / "proc" / str(one.pid)
                copied.mkdir(parents=True)
                for name in ("stat", "cmdline", "environ"):
                    (copied / name).write_bytes((source / name).read_bytes())
                (copied / "comm").write_text("slurmd\n" if one.pid in ours else f"{one.name}\n")
            except OSError:
                continue  # it has just ended
        config = root / str(self.config).lstrip("/")
        config.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.config, config)
        return slurm.read(root, read_processes(root / "proc"))

    def sees(self, true: Callable[[Reading], bool], seconds: float = 30.0) -> Reading:
        """What our reader finds once that is true of it."""
        seen: list[Reading] = []

        def seen_now() -> bool:
            seen.append(self.look())
            return true(seen[-1])

        until(seen_now, seconds, lambda: f"{seen[-1]}; {self.log()}")
        return seen[-1]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.system("slurmd", "slurmctld", "sbatch", "sinfo", root=True)
def test_real_job_is_seen_from_its_prolog_to_its_end(cluster: Watched) -> None:
    cluster.ready()
    assert cluster.look() == Reading(scheduler="Slurm", kind="slurm", workloads=())
    # Two nodes and no step: without a batch script on the second node nothing but Slurm's own step shows there.
    job = cluster.submit("-N2", script="sleep 60")
    in_prolog = cluster.sees(lambda found: bool(found.workloads))
    assert (names(in_prolog), in_prolog.unseen) == ([f"slurm:{job}"], "")
    assert "prolog.sh" in (in_prolog.workloads or ())[0].uses
    (cluster.folder / "go").touch()
    running = cluster.sees(lambda found: bool(found.workloads) and not (found.workloads or ())[0].uses)
    assert (names(running), running.unseen) == ([f"slurm:{job}"], "")
    cluster.said("scancel", job)
    assert cluster.sees(lambda found: not found.workloads).unseen == ""
