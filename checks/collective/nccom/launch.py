"""
nccom-test over several nodes: what the first of them runs, and with which environment. Pure; nothing is started here.

Three ways to get its processes onto the other nodes: `slurm` (nccom-test calls srun), `ssh` (it calls mpirun, which
calls ssh) and `carried` (mpirun calls an agent of ours in place of ssh, and each node starts Open MPI's daemon by
itself; see `nccom_vector` for what it accepts).

Sources: AWS Neuron documentation, nccom-test.rst (modes, EFA variables) and neuron-runtime (NEURON_RT_ROOT_COMM_ID);
Open MPI 4.1, mpirun(1) and ompi_info (parameters). Unverified on hardware: that the real nccom-test hands the variables
of Open MPI on to mpirun. Proved with Open MPI 4.1.4 and a stand-in for nccom-test.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checks.collective.nccom.plan import Step, arguments, lnc_environment
from checks.collective.nccom.report import Abilities

MODES = ("slurm", "ssh", "carried")
MAX_HOSTS = 4096
SOCKET_VARIABLE = "HEALTHD_RSH_SOCKET"
ROUND_VARIABLE = "HEALTHD_RSH_ROUND"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?|[0-9a-fA-F:]{2,45}")
_ROUND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Nobody is there to answer a question, and a host that is gone must not take minutes.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
# Where AWS's installer puts Open MPI; a service's PATH does not have it.
MPI_PREFIX = "/opt/amazon/openmpi"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """
    One round over several nodes, of plain values alone: every node of it can be told the same.

    `hosts` are the addresses by which the nodes reach each other; `main_addresses` those of the node that runs
    nccom-test, under which its mpirun may be called back. `job_id` is mpirun's own, None until its first daemon was
    accepted: then it is the only one (see `nccom_vector.accepts`). `argv` is without the program.
    """

    round: str
    mode: str
    hosts: tuple[str, ...]
    main_addresses: tuple[str, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    job_id: str | None = None


def planned(
    *,
    name: str,
    mode: str,
    hosts: Sequence[str],
    main_addresses: Sequence[str],
    step: Step,
    abilities: Abilities,
    report: str,
    comm_port: int,
    collector_port: int,
    kernel: str,
    agent: str = "healthd-rsh",
    socket: str | None = None,
    network: str | None = None,
    slurm_job_id: int | None = None,
    lnc: int | None = None,
) -> Plan:
    """
    The plan of the round `name`. `step.ranks` are those of all nodes together.

    `kernel` is the nodes' release (`5.10.226-...`). For `carried`: `agent` is the program that mpirun calls and
    `socket` the Unix socket that it talks to. `network` (`10.1.0.0/16`) is what Open MPI shall use; None: it looks for
    itself. `lnc` is the logical core configuration by which ranks were counted; None where that is not known.
    Raises ValueError (one line) for what cannot be meant.
    """
    _require(mode in MODES, f"no mode {mode!r}; there are {', '.join(MODES)}")
    _require(bool(_ROUND.fullmatch(name)), f"no name of a round: {name!r}")
    _require(1 < len(hosts) <= MAX_HOSTS, f"{len(hosts)} hosts; it takes 2 to {MAX_HOSTS}")
    for host in (*hosts, *main_addresses):
        _require(bool(_HOST.fullmatch(host)), f"no address or name of a host: {host!r}")
    _require(len(set(hosts)) == len(hosts), "a host is named twice")
    _require(step.ranks % len(hosts) == 0, f"{step.ranks} ranks cannot be shared out equally over {len(hosts)} hosts")
    _require(mode == "slurm" or bool(main_addresses), "the address of the main node is not known")
    _require(mode != "carried" or socket is not None, "no socket for the agent")
    first = step.op  # the operation stays first: options that take several values would swallow it
    words = arguments(step, abilities, report=report, port=collector_port)
    _require(words[0] == first, "the operation must come first")
    words[1:1] = ["-N", str(len(hosts))]
    if abilities.knows("--data-collector-host") and main_addresses:
        words += ["--data-collector-host", main_addresses[0]]
    if mode == "slurm":
        _require(abilities.knows("--slurm-mode"), "this nccom-test knows no --slurm-mode; update aws-neuronx-tools")
        words += ["--slurm-mode", *(["--slurm-job-id", str(slurm_job_id)] if slurm_job_id is not None else [])]
    else:
        words += ["--hosts", *hosts]
    environment = {
        "NEURON_RT_ROOT_COMM_ID": f"{_in_brackets(hosts[0])}:{comm_port}",
        **efa_environment(kernel),
        **lnc_environment(lnc),
        **(_mpi_environment(mode, agent, network) if mode != "slurm" else {}),
    }
    if mode == "carried" and socket is not None:
        environment[SOCKET_VARIABLE] = socket
        environment[ROUND_VARIABLE] = name
    return Plan(
        round=name,
        mode=mode,
        hosts=tuple(hosts),
        main_addresses=tuple(main_addresses),
        argv=tuple(words),
        environment=environment,
    )


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


def daemon_environment(plan: Plan, kernel: str, own: Mapping[str, str], lnc: int | None = None) -> dict[str, str]:
    """
    For the daemon of Open MPI that a node starts, and so for the ranks under it.

    `own` is ours, cleaned of a job's (`nccom_environment.environment_of`); `lnc` the logical core configuration of this
    node, by which its ranks were counted. What mpirun adds goes by its own line.
    """
    path = f"{MPI_PREFIX}/bin:/opt/aws/neuron/bin:{own.get('PATH', '/usr/bin:/bin')}"
    comm = {"NEURON_RT_ROOT_COMM_ID": plan.environment["NEURON_RT_ROOT_COMM_ID"]}
    return {**own, "PATH": path, **comm, **efa_environment(kernel), **lnc_environment(lnc), **_ROOT}


# Services run as root, which mpirun refuses otherwise (mpirun(1), --allow-run-as-root).
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _mpi_environment(mode: str, agent: str, network: str | None) -> dict[str, str]:
    """Of mpirun, which takes any parameter as OMPI_MCA_NAME, so nccom-test need not know them."""
    found = {
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": agent if mode == "carried" else _SSH,
        # Each daemon is started by mpirun itself. In a tree, nodes would start others, with agents of their own.
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        # The names of Open MPI 5.
        "PRTE_MCA_plm_ssh_agent": agent if mode == "carried" else _SSH,
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        **_ROOT,
    }
    if network is not None:
        ipaddress.ip_network(network, strict=False)  # ValueError says what it does not like
        found["OMPI_MCA_oob_tcp_if_include"] = network
        found["OMPI_MCA_btl_tcp_if_include"] = network
    return found


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _require(held: bool, text: str) -> None:
    if not held:
        raise ValueError(text)
