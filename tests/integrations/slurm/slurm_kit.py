"""A real Slurm of this machine: one controller and several slurmd; and one with our hooks in it, beside a fleet."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from healthd.integrations.slurm.scontrol import Scontrol, SlurmNode
from tests.aggregator.service import ROOT, free_port
from tests.patience import PATIENCE

HOOKS = ROOT / "deploy" / "slurm"

# No munge and no control groups: what is not under test needs no service of the machine.
CONFIG = """
ClusterName=t
SlurmctldHost=localhost
SlurmctldPort={controller}
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
KillWait=1
{extra}
{nodes}
PartitionName=p Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
# cred_expire bounds how long a job that went back into the queue must wait.
HOOKED = """AuthInfo=cred_expire=5
Include healthd-slurm.conf"""
# What a site sets, plus switches that keep one hook still while a test looks at another.
SETTINGS = """
export SLURM_CONF={folder}/slurm.conf HEALTHD_CONFIG={folder}/hooks.toml PYTHONPATH={root} HEALTHD_STATE_DIR={folder}
case $0 in
    */health-check.sh) [ ! -e {folder}/still ] || exit 0 ;;
    */prolog-slurmctld.sh) [ ! -e {folder}/ungated ] || exit 0 ;;
esac
case ${{SLURMD_NODENAME-}} in
{urls}
esac
mode=enforce
state_dir={folder}/hooks
healthd="{python} -m healthd"
gate_wait={wait}
gate_options=--no-collective
"""


def until(true: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    """Wait for something to become true; AssertionError says what did not."""
    end = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < end, why()
        time.sleep(0.1)


class Slurm:
    """A controller, and a slurmd for each name; `extra` is what its configuration has beside the least."""

    def __init__(self, folder: Path, names: Iterable[str], *, extra: str) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._names = tuple(names)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 State=UNKNOWN"
            for name in self._names
        )
        self.config.write_text(
            CONFIG.format(folder=folder, controller=free_port(), nodes=nodes, names=",".join(self._names), extra=extra)
        )
        for name in ("state", *(f"spool-{name}" for name in self._names)):
            (folder / name).mkdir()
        # By another name, so that no other healthd of this machine takes it for the machine's own Slurm.
        slurmd = folder / "slurmd-of-test"
        shutil.copy(shutil.which("slurmd") or "", slurmd)
        self._controller = self._start("slurmctld", "-D", "-c")
        self.slurmds = [self._start(str(slurmd), "-D", "-N", name) for name in self._names]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config)}

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)

    def said(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def ready(self) -> None:
        """Returns when every node takes jobs."""
        with contextlib.suppress(AssertionError):
            self.said("sinfo")
        until(lambda: all(self._idle(name) for name in self._names), 20, lambda: f"nodes are not idle: {self.log()}")

    def _idle(self, name: str) -> bool:
        try:
            done = self.said("sinfo", "-h", "-N", "-n", name, "-o", "%T")
        except (AssertionError, subprocess.TimeoutExpired):
            return False
        return done == "idle"

    def submit(self, *arguments: str, script: str = "sleep 0.2") -> str:
        """The id of a batch job."""
        return self.said("sbatch", "--parsable", "-o", "/dev/null", *arguments, "--wrap", script)

    def log(self) -> str:
        file = self.folder / "controller.log"
        return file.read_text(errors="replace")[-1500:] if file.exists() else "no log"

    def stop(self) -> None:
        """End everything of this Slurm, jobs too."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.said("scancel", "--signal=KILL", "--full", "-u", "root")
        for daemon in (*self.slurmds, self._controller):
            daemon.terminate()
        for daemon in (*self.slurmds, self._controller):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        marks = (f"SLURM_CONF={self.config}\0".encode(), str(self.folder).encode())
        for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
            with contextlib.suppress(OSError):
                if any(mark in (Path("/proc") / str(pid) / "environ").read_bytes() for mark in marks):
                    os.kill(pid, signal.SIGKILL)


class SlurmCluster(Slurm):
    """With our hooks. `urls` are the daemons of the nodes by their names; `aggregator` is where gates are asked."""

    def __init__(self, folder: Path, urls: dict[str, str], aggregator: str, *, wait: str = "20s") -> None:
        install(folder, urls, aggregator, wait)
        super().__init__(folder, urls, extra=HOOKED)
        self.scontrol = Scontrol(environ=self.environment)

    def node(self, name: str) -> SlurmNode:
        found = self.scontrol.node(name)
        assert found is not None
        return found

    def node_is(self, name: str, true: Callable[[SlurmNode], bool], seconds: float = 15.0) -> SlurmNode:
        """The node once that is true of it."""
        until(lambda: true(self.node(name)), seconds, lambda: f"{self.node(name)}; {self.log()}")
        return self.node(name)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.said("scontrol", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def job_is(self, number: str, *states: str, seconds: float = 25.0) -> dict[str, str]:
        """The job once it is in one of these states."""
        until(lambda: self.job(number)["JobState"] in states, seconds, lambda: f"{self.job(number)}; {self.log()}")
        return self.job(number)


def install(folder: Path, urls: dict[str, str], aggregator: str, wait: str) -> None:
    """Our files as the docs say, with the settings of a site that are a test's."""
    etc = folder / "healthd"
    shutil.copytree(HOOKS, etc)
    cases = "\n".join(f"    {name}) node_url={url} ;;" for name, url in urls.items())
    site = SETTINGS.format(folder=folder, root=ROOT, urls=cases, python=sys.executable, wait=wait)
    with (etc / "hooks.conf").open("a") as shipped:
        shipped.write(site)
    fragment = (HOOKS / "healthd-slurm.conf").read_text().replace("/etc/slurm/healthd", str(etc))
    fragment = fragment.replace("HealthCheckInterval=60", "HealthCheckInterval=2")
    fragment = fragment.replace("nohold_on_prolog_fail", "nohold_on_prolog_fail,sched_interval=1")
    (folder / "healthd-slurm.conf").write_text(fragment)
    (folder / "hooks.toml").write_text(f'[gate]\naggregator = "{aggregator}"\n')
