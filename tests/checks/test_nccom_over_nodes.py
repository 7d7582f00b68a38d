"""
nccom-test over several nodes: what is run, and that with the real Open MPI.

The last is a round over network namespaces: nodes that have an address each and a stand-in for sshd, and a stand-in for
nccom-test whose processes add up numbers over the network.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.collective.nccom.launch import (
    OverNodes,
    checks_over_nodes,
    efa_environment,
    plan_over_nodes,
    step_over_nodes,
)
from checks.collective.nccom.run import Abilities, Ran, Step, read_report
from checks.collective.nccom.steps import judge_step
from checks.contract import Status
from tests.every import every
from tests.fakes.remote_shell import ssh_command

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tests/fakes/bin/nccom-test"
FLAGS = ("--non-interactive", "--report-to-json-file", "--data-collector-port", "--data-collector-host", "--slurm-mode")
ABILITIES = Abilities(flags=frozenset(FLAGS), check=("--check", "random"))
HOSTS = ("10.77.0.2", "10.77.0.3")
CHECK = "nccom_nodes_all_reduce"
SERVER = [sys.executable, str(ROOT / "tests/fakes/remote_shell.py"), "serve"]
STEP = Step(op="all_reduce", ranks=4, dtype="fp32", sizes_bytes=(1024, 32768, 1048576), factor=32, whole=True)


def plan(**changes: Any) -> OverNodes:
    values: dict[str, Any] = {
        "mode": "ssh",
        "hosts": HOSTS,
        "main": HOSTS[0],
        "step": STEP,
        "abilities": ABILITIES,
        "report": "/run/report.json",
        "comm_port": 63182,
        "collector_port": 60006,
        "kernel": "6.1.0",
    }
    return plan_over_nodes(**{**values, **changes})


# --- what is run ------------------------------------------------------------------------------------------------------


def test_operation_is_first_and_hosts_follow() -> None:
    found = plan()
    assert found.argv[:5] == ("all_reduce", "-N", "2", "-r", "4")
    assert found.argv[-3:] == ("--hosts", *HOSTS)
    assert found.argv[-5:-3] == ("--data-collector-host", "10.77.0.2")
    assert found.environment["NEURON_RT_ROOT_COMM_ID"] == "10.77.0.2:63182"
    assert found.environment["FI_PROVIDER"] == "efa"


def test_ranks_are_counted_as_the_node_does() -> None:
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
    assert not set(names) & set(plan().environment)  # not known: the runtime's own default
    assert [plan(lnc=1).environment[name] for name in names] == ["1", "1"]


def test_each_mode_has_its_own_way_to_the_nodes() -> None:
    slurm, ssh = plan(mode="slurm", hosts=("a", "b"), slurm_job_id=7), plan()
    assert (slurm.launcher, ssh.launcher) == ("srun", "mpirun")
    assert slurm.argv[-3:] == ("--slurm-mode", "--slurm-job-id", "7")
    assert slurm.environment["NEURON_RT_ROOT_COMM_ID"] == "10.77.0.2:63182"
    assert not any(name.startswith("OMPI_") for name in slurm.environment)
    assert ssh.environment["OMPI_MCA_plm_rsh_agent"].startswith("ssh -o BatchMode=yes")
    assert plan(hosts=("fd00::2", "fd00::3"), main="fd00::2").environment["NEURON_RT_ROOT_COMM_ID"] == "[fd00::2]:63182"


def test_checks_are_those_that_nccom_test_can_run_over_all_ranks() -> None:
    assert checks_over_nodes(("all_reduce", "data_parallel_step")) == ("nccom_nodes_all_reduce",)
    assert step_over_nodes("nccom_nodes_all_reduce", 4) == STEP


@pytest.mark.parametrize(
    ("kernel", "safe"),
    [("5.10.226-214.amzn2", True), ("5.15.0-1", False), ("6.1.0", False), ("4.14", True), ("?", True)],
)
def test_old_kernels_need_fork_safety(kernel: str, safe: bool) -> None:
    assert ("FI_EFA_FORK_SAFE" in efa_environment(kernel)) is safe


@every(
    "changes",
    [
        {"mode": "telnet"},
        {"mode": "off"},
        {"hosts": ("10.77.0.2",)},
        {"hosts": ("10.77.0.2", "10.77.0.2")},
        {"hosts": ("10.77.0.2", "-oProxyCommand=x")},
        {"hosts": ("10.77.0.2", "a b")},
        {"hosts": ("a", "b", "c")},
        {"main": ""},
        {"main": "a b"},
        {"mode": "slurm"},  # without a job: srun would wait for nodes, as if the collective hung
        {"mode": "slurm", "slurm_job_id": 7, "abilities": Abilities(flags=frozenset(), check=())},
    ],
)
def test_round_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        plan(**changes)


@pytest.mark.parametrize(
    "words", ["root@10.77.0.3: Permission denied (publickey,password).", "Host key verification failed."]
)
def test_missing_keys_are_no_fault_of_a_node(words: str) -> None:
    output = f"{words}\nORTE was unable to reliably start one or more daemons.\n1 errors found - test failed\n"
    ran = Ran(
        step=STEP, returncode=1, output=output, report=None, log=None, log_text=None, seconds=1.0, timeout_seconds=20.0
    )
    (found,) = judge_step(CHECK, ran, {}, checked=True, cut_short=False, deep=False)
    assert (found.status, found.reason) == (Status.UNKNOWN, "NoPermission")
    assert words in found.message
    assert "key" in found.message


# --- with the real Open MPI -------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def namespaces(addresses: Sequence[str]) -> Iterator[dict[str, str]]:
    """Address -> the name of a namespace that has it; a bridge in one more joins them."""
    mark = f"hd{os.getpid() % 100000}"
    names = {address: f"{mark}-{nth}" for nth, address in enumerate(addresses)}
    switch = f"{mark}-sw"
    try:
        for name in (switch, *names.values()):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for nth, (address, name) in enumerate(names.items()):
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{nth}", "netns", switch)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", switch, "link", "set", f"p{nth}", "master", "br0", "up")
        yield names
    finally:
        for name in (switch, *names.values()):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)


def inside(namespace: str, host_name: str, argv: Sequence[str]) -> list[str]:
    """In a network and under a host name of its own; all in it ends with the first process."""
    script = 'hostname "$0" && exec "$@"'
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", script,
            host_name, *argv]  # fmt: skip


needs_namespaces = pytest.mark.system("ip", "unshare", "mpirun", "orted", "hostname", root=True)


@contextlib.contextmanager
def ssh_servers(names: dict[str, str]) -> Iterator[None]:
    """One in each namespace."""
    started = [
        subprocess.Popen(inside(name, f"node-{nth}", SERVER), stdout=subprocess.PIPE, text=True)
        for nth, name in enumerate(names.values())
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline().startswith("listens on")
        yield
    finally:
        for one in started:
            one.kill()
            one.communicate()


@needs_namespaces
@pytest.mark.parametrize("reachable", [True, False])
def test_round_by_ssh_over_nodes_that_share_only_a_network(tmp_path: Path, reachable: bool) -> None:
    """The real mpirun and orted. A node that ssh does not reach ends the round, and nobody waits for ever."""
    hosts = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
    told = plan(report=str(tmp_path / "report.json"), hosts=hosts, main=hosts[0], step=step_over_nodes(CHECK, 6))
    own = {
        **told.environment,
        "PATH": f"{ssh_command(tmp_path)}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HEALTHD_HOST_ROOT": str(tmp_path),
    }
    with namespaces(hosts) as names, ssh_servers({hosts[1]: names[hosts[1]], **(names if reachable else {})}):
        done = subprocess.run(
            inside(names[hosts[0]], "main", [sys.executable, "-SE", str(TOOL), *told.argv]),
            env=own, check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    if not reachable:
        assert done.returncode != 0
        assert "Connection refused" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 nodes reported: 10.77.0.1, 10.77.0.2, 10.77.0.3" in done.stdout
    rows = read_report((tmp_path / "report.json").read_text())
    assert rows is not None
    assert [row.size_bytes for row in rows] == list(step_over_nodes(CHECK, 6).sizes_bytes)


def test_slurm_mode_goes_by_srun(tmp_path: Path) -> None:
    """A stand-in for srun as well: it runs the program once a node, as the real one does."""
    srun = tmp_path / "srun"
    srun.write_text(
        """#!/bin/sh
        echo "$@" > "$0.said"
        while [ "${1#-}" != "$1" ]; do [ "$1" = -N ] && { n=$2; shift; }; shift; done
        i=0; while [ $i -lt $n ]; do SLURM_PROCID=$i "$@" & i=$((i+1)); done; wait
        """
    )
    srun.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    told = plan(
        mode="slurm",
        slurm_job_id=7,
        report=str(tmp_path / "report.json"),
        collector_port=port,
        hosts=("slurm-a", "slurm-b"),
        main="127.0.0.1",
    )
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/nccom-test"
    tool.write_text(TOOL.read_text().replace(TOOL.read_text().partition("\n")[0], f"#!{sys.executable} -SE"))
    tool.chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **told.environment, "HEALTHD_HOST_ROOT": str(tmp_path)}
    done = subprocess.run([tool, *told.argv], env=own, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes reported" in done.stdout
    assert "--jobid=7 -N 2" in (tmp_path / "srun.said").read_text()
