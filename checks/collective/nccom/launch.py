"""
nccom-test over several nodes: what the first of them runs, and with which environment. Pure; nothing is started here.

Two ways to get its processes onto the other nodes, as AWS documents them: `ssh` (nccom-test calls mpirun, which calls
ssh) and `slurm` (it calls srun).

Sources: AWS Neuron documentation, nccom-test.rst (modes, EFA variables) and neuron-runtime (NEURON_RT_ROOT_COMM_ID);
Open MPI 4.1, mpirun(1) and ompi_info (parameters). Unverified on hardware: that the real nccom-test hands the variables
of Open MPI on to mpirun. Proved with Open MPI 4.1.4 and stand-ins for nccom-test and ssh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checks.collective.nccom.run import OPERATIONS, Abilities, Step, arguments, lnc_environment, plan_steps
from checks.contract import Tier

PREFIX = "nccom_nodes_"
"""Of the names of checks that run over nodes: those on one node have limits of their own."""

MAX_HOSTS = 4096
# Where AWS's installer puts Open MPI; a service's PATH does not have it.
MPI_PREFIX = "/opt/amazon/openmpi"

_LAUNCHERS = {"ssh": "mpirun", "slurm": "srun"}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?|[0-9a-fA-F:]{2,45}")
# Nobody is there to answer a question, and a host that is gone must not take minutes.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
# mpirun takes any parameter as OMPI_MCA_NAME (Open MPI 5: PRTE_MCA_NAME), so nccom-test need not know them. Each daemon
# is started by mpirun itself: in a tree, nodes would start others, with keys of their own. Services run as root, which
# mpirun refuses otherwise (mpirun(1), --allow-run-as-root).
_MPI_ENVIRONMENT = {
    "OMPI_MCA_plm": "rsh",
    "OMPI_MCA_plm_rsh_agent": _SSH,
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
    "PRTE_MCA_plm_ssh_agent": _SSH,
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclass(frozen=True, kw_only=True)
class OverNodes:
    """One run of nccom-test over several nodes. `argv` is without the program; `launcher` is what that will call."""

    launcher: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def checks_over_nodes(names: Iterable[str]) -> tuple[str, ...]:
    """The checks of the collectives that nccom-test can run: `all_reduce` -> `nccom_nodes_all_reduce`."""
    return tuple(PREFIX + name for name in names if f"nccom_{name}" in OPERATIONS)


def step_over_nodes(check: str, ranks: int) -> Step:
    """What nccom-test does for such a check: the sizes of the quick tier over the `ranks` of all nodes together."""
    (step,) = plan_steps(f"nccom_{check.removeprefix(PREFIX)}", Tier.QUICK, ranks=ranks, counts=())
    return step


def plan_over_nodes(
    *,
    mode: str,
    hosts: Sequence[str],
    main: str,
    step: Step,
    abilities: Abilities,
    report: str,
    comm_port: int,
    collector_port: int,
    kernel: str,
    slurm_job_id: int | None = None,
    lnc: int | None = None,
) -> OverNodes:
    """
    The plan of a step, whose ranks are those of all nodes together.

    `hosts` are the addresses of the nodes (in Slurm their names), and `main` is the address of the first. `kernel` is
    the nodes' release (`5.10.226-...`). `lnc` is the logical core configuration by which ranks were counted; None
    where that is not known. Raises ValueError (one line) for what makes no sense.
    """
    _require(mode in _LAUNCHERS, f"unknown mode {mode!r}; choose one of: {', '.join(_LAUNCHERS)}")
    _require(1 < len(hosts) <= MAX_HOSTS, f"{len(hosts)} hosts; 2 to {MAX_HOSTS} are supported")
    for host in (*hosts, main):
        _require(bool(_HOST.fullmatch(host)), f"not a host address or name: {host!r}")
    _require(len(set(hosts)) == len(hosts), "a host is listed twice")
    _require(step.ranks % len(hosts) == 0, f"{step.ranks} ranks cannot be divided equally among {len(hosts)} hosts")
    first = step.op  # the operation stays first: options that take several values would swallow it
    words = arguments(step, abilities, report=report, port=collector_port)
    _require(words[0] == first, "the operation must come first")
    words[1:1] = ["-N", str(len(hosts))]
    if abilities.knows("--data-collector-host"):
        words += ["--data-collector-host", main]
    if mode == "slurm":
        _require(abilities.knows("--slurm-mode"), "this nccom-test has no --slurm-mode; update aws-neuronx-tools")
        # Without one srun would wait for an allocation of its own, which looks like a collective that hangs.
        _require(slurm_job_id is not None, "the request is not from a Slurm job; use --workload slurm:N")
        words += ["--slurm-mode", "--slurm-job-id", str(slurm_job_id)]
    else:
        words += ["--hosts", *hosts]
    environment = {
        "NEURON_RT_ROOT_COMM_ID": f"{f'[{main}]' if ':' in main else main}:{comm_port}",
        **efa_environment(kernel),
        **lnc_environment(lnc),
        **(_MPI_ENVIRONMENT if mode == "ssh" else {}),
    }
    return OverNodes(launcher=_LAUNCHERS[mode], argv=tuple(words), environment=environment)


def efa_environment(kernel: str) -> dict[str, str]:
    """
    What collectives between nodes need of libfabric.

    Without FI_EFA_FORK_SAFE the runtime gives up between nodes on kernels before 5.15; a release that cannot be read is
    taken for an old one, because on new kernels the variable does no harm.
    """
    found = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    release = re.match(r"(\d+)\.(\d+)", kernel)
    if release is None or (int(release[1]), int(release[2])) < (5, 15):
        found["FI_EFA_FORK_SAFE"] = "1"
    return found


def _require(held: bool, text: str) -> None:
    if not held:
        raise ValueError(text)
