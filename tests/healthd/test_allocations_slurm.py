"""Slurm's jobs by its processes: as files, and of a real Slurm where one is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.node.allocations import slurm
from healthd.node.allocations.processes import read_processes
from healthd.node.allocations.record import Reading
from tests.healthd.allocation_kit import process, slurm_config


def read(root: Path) -> Reading:
    return slurm.read(root, read_processes(root / "proc"))


def names(reading: Reading) -> list[str]:
    return [one.name for one in reading.workloads or ()]


def test_host_without_jobs_is_free(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 11, "python", parent=1)
    slurm_config(tmp_path)
    assert read(tmp_path) == Reading(scheduler="Slurm", workloads=())


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
    assert (names(found), found.blind) == (["slurm:9"], "")


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
    assert "the host's process table" in found.blind


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every process")
def test_prolog_that_cannot_be_read_is_blindness(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd")
    process(tmp_path, 11, "prolog.sh", parent=10)
    (tmp_path / "proc/11/environ").chmod(0)
    slurm_config(tmp_path)
    assert "run healthd as root" in read(tmp_path).blind


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
    slurm_config(tmp_path, f"ClusterName=c\n{text}\n")
    assert (read(tmp_path).blind == "") is whole


def test_configuration_is_found_where_slurmd_was_told_and_with_what_it_includes(tmp_path: Path) -> None:
    process(tmp_path, 10, "slurmd", "/usr/sbin/slurmd", "-f", "/shared/slurm.conf", "-D")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/slurm.conf").write_text("Include more.conf\nInclude slurm.conf\n")  # a ring ends
    (tmp_path / "shared/more.conf").write_text("PrologFlags=Contain\n")
    slurm_config(tmp_path, "PrologFlags=Alloc\n")
    assert read(tmp_path).blind == ""
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

CONFIG = """
ClusterName=t
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/controller.pid
SlurmdLogFile={folder}/%n.log
SlurmctldLogFile={folder}/controller.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/linear
MpiDefault=none
Prolog={folder}/prolog.sh
PrologFlags=Contain
KillWait=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=p Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""
PROLOG = "#!/bin/sh\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\n"


def missing() -> str:
    tools = [tool for tool in ("slurmd", "slurmctld", "sbatch", "sinfo") if shutil.which(tool) is None]
    if tools:
        return f"no Slurm here ({tools[0]}); on Debian: apt-get install slurmd slurmctld slurm-client"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    """One controller and two slurmd of this machine, in a folder that is the machine of our reader."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.config.write_text(CONFIG.format(folder=folder, ports=ports))
        (folder / "prolog.sh").write_text(PROLOG.format(folder=folder))
        (folder / "prolog.sh").chmod(0o755)
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        # By another name, so that no other healthd of this machine takes it for the machine's own Slurm.
        self.slurmd = folder / "slurmd-of-test"
        shutil.copy(shutil.which("slurmd") or "", self.slurmd)
        self.daemons = [
            self.start("slurmctld", "-D", "-c"),
            self.start(str(self.slurmd), "-D", "-N", "n1"),
            self.start(str(self.slurmd), "-D", "-N", "n2"),
        ]

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config)}

    def said(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip()

    def look(self) -> Reading:
        """What our reader finds of the processes of this cluster alone."""
        root = self.folder / f"root-{time.monotonic_ns()}"
        ours = {daemon.pid for daemon in self.daemons[1:]}
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

    def until(self, true: Callable[[Reading], bool], seconds: float = 30.0) -> Reading:
        end = time.monotonic() + seconds
        while not true(found := self.look()):
            assert time.monotonic() < end, (found, (self.folder / "output").read_text()[-2000:])
            time.sleep(0.1)
        return found

    def stop(self) -> None:
        self.said("scancel", "--state=RUNNING", "--signal=KILL", "--full", "-u", "root")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        marker = f"SLURM_CONF={self.config}\0".encode()
        for one in read_processes(Path("/proc")):
            try:
                if marker in (Path("/proc") / str(one.pid) / "environ").read_bytes():
                    os.kill(one.pid, signal.SIGKILL)
            except OSError:
                continue


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    import socket

    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    made = Cluster(tmp_path, ports)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(bool(missing()), reason=missing() or "there")
def test_real_job_is_seen_from_its_prolog_to_its_end(cluster: Cluster) -> None:
    end = time.monotonic() + 30
    while "idle" not in cluster.said("sinfo", "-h", "-N", "-o", "%T %N"):
        assert time.monotonic() < end, (cluster.folder / "output").read_text()[-2000:]
        time.sleep(0.2)
    assert cluster.look() == Reading(scheduler="Slurm", workloads=())
    # Two nodes and no step: without a batch script on the second node nothing but Slurm's own step shows there.
    job = cluster.said("sbatch", "--parsable", "-N2", "-o", "/dev/null", "--wrap", "sleep 60")
    in_prolog = cluster.until(lambda found: bool(found.workloads))
    assert (names(in_prolog), in_prolog.blind) == ([f"slurm:{job}"], "")
    assert "prolog.sh" in (in_prolog.workloads or ())[0].uses
    (cluster.folder / "go").touch()
    running = cluster.until(lambda found: bool(found.workloads) and not (found.workloads or ())[0].uses)
    assert (names(running), running.blind) == ([f"slurm:{job}"], "")
    cluster.said("scancel", job)
    assert cluster.until(lambda found: not found.workloads).blind == ""
