"""
nccom-test over several nodes: what is run, what of mpirun's words is accepted, and both with the real Open MPI.

The last is a round over network namespaces: nodes that have an address each and nothing else in common, no ssh, and a
stand-in for nccom-test whose processes add up numbers over the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks.collective.nccom.launch import Plan, daemon_environment, efa_environment, planned
from checks.collective.nccom.plan import Step
from checks.collective.nccom.report import Abilities, read_report
from checks.collective.nccom.vector import Accepted, Refused, accepts
from healthd.node.nccom.rsh import Request, RshError, ask, main, read_request, write_answer, write_request
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tests/fakes/bin/nccom-test"
FLAGS = ("--non-interactive", "--report-to-json-file", "--data-collector-port", "--data-collector-host", "--slurm-mode")
ABILITIES = Abilities(flags=frozenset(FLAGS), check=("--check", "random"))
HOSTS = ("10.77.0.2", "10.77.0.3")
STEP = Step(op="all_reduce", ranks=4, dtype="fp32", sizes_bytes=(1024, 32768, 1048576), factor=32, whole=True)
JOB = "1084162048"


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "name": "round-1",
        "mode": "carried",
        "hosts": HOSTS,
        "main_addresses": ("10.77.0.1", "fd00::1"),
        "step": STEP,
        "abilities": ABILITIES,
        "report": "/run/report.json",
        "comm_port": 63182,
        "collector_port": 60006,
        "kernel": "6.1.0",
        "socket": "/run/rsh.sock",
    }
    return planned(**{**values, **changes})


def vector(host: str = HOSTS[0], **changes: str | None) -> list[str]:
    """As mpirun 4.1.4 hands it to its agent: values in quotes, the program with a space before it."""
    told: dict[str, str | None] = {
        "ess": '"env"',
        "ess_base_jobid": f'"{JOB}"',
        "ess_base_vpid": "1",
        "ess_base_num_procs": '"3"',
        "orte_node_regex": '"vm,[2:10].77.0.2,[2:10].77.0.3@0(3)"',
        "orte_hnp_uri": f'"{JOB}.0;tcp://192.0.2.2,10.77.0.1:47301;tcp6://[fd00::2]:45853"',
        "plm_rsh_no_tree_spawn": '"1"',
        "plm_rsh_agent": '"healthd-rsh"',
        "plm": '"rsh"',
        "rmaps_ppr_n_pernode": '"2"',
        "pmix": '"^s1,s2,cray,isolated"',
        **changes,
    }
    words = [host, " orted", "--daemonize"]
    for name, value in told.items():
        if value is not None:
            words += ["-mca", name, value]
    return words


def refusal(found: Accepted | Refused) -> str:
    assert isinstance(found, Refused), found
    return found.reason


# --- what is run ------------------------------------------------------------------------------------------------------


def test_operation_is_first_and_hosts_follow() -> None:
    found = plan()
    assert found.argv[:5] == ("all_reduce", "-N", "2", "-r", "4")
    assert found.argv[-3:] == ("--hosts", *HOSTS)
    assert found.argv[-5:-3] == ("--data-collector-host", "10.77.0.1")
    assert found.environment["NEURON_RT_ROOT_COMM_ID"] == "10.77.0.2:63182"
    assert found.environment["FI_PROVIDER"] == "efa"
    assert found.environment["OMPI_MCA_plm_rsh_agent"] == "healthd-rsh"
    assert found.environment["HEALTHD_RSH_ROUND"] == "round-1"


def test_ranks_are_counted_alike_on_all_nodes() -> None:
    names = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
    assert not set(names) & set(plan().environment)  # not known: the runtime's own default
    assert not set(names) & set(daemon_environment(plan(), "6.1.0", {}))
    for environment in (plan(lnc=1).environment, daemon_environment(plan(), "6.1.0", {}, 1)):
        assert [environment[name] for name in names] == ["1", "1"]


def test_each_mode_has_its_own_way_to_the_nodes() -> None:
    slurm, ssh = plan(mode="slurm", slurm_job_id=7), plan(mode="ssh", network="10.77.0.0/24")
    assert slurm.argv[-3:] == ("--slurm-mode", "--slurm-job-id", "7")
    assert not any(name.startswith(("OMPI_", "HEALTHD_")) for name in slurm.environment)
    assert ssh.environment["OMPI_MCA_plm_rsh_agent"].startswith("ssh -o BatchMode=yes")
    assert ssh.environment["OMPI_MCA_oob_tcp_if_include"] == "10.77.0.0/24"
    assert "HEALTHD_RSH_SOCKET" not in ssh.environment
    assert plan(hosts=("fd00::2", "fd00::3")).environment["NEURON_RT_ROOT_COMM_ID"] == "[fd00::2]:63182"


@pytest.mark.parametrize(
    ("kernel", "safe"),
    [("5.10.226-214.amzn2", True), ("5.15.0-1", False), ("6.1.0", False), ("4.14", True), ("?", True)],
)
def test_old_kernels_need_fork_safety(kernel: str, safe: bool) -> None:
    assert ("FI_EFA_FORK_SAFE" in efa_environment(kernel)) is safe
    assert ("FI_EFA_FORK_SAFE" in daemon_environment(plan(), kernel, {"PATH": "/bin"})) is safe


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "telnet"},
        {"hosts": ("10.77.0.2",)},
        {"hosts": ("10.77.0.2", "10.77.0.2")},
        {"hosts": ("10.77.0.2", "-oProxyCommand=x")},
        {"hosts": ("10.77.0.2", "a b")},
        {"hosts": ("a", "b", "c")},
        {"name": "../x"},
        {"main_addresses": ()},
        {"socket": None},
        {"network": "everything"},
        {"mode": "slurm", "abilities": Abilities(flags=frozenset(), check=())},
    ],
)
def test_round_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        plan(**changes)


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_words_of_mpirun_are_accepted_and_written_anew() -> None:
    found = accepts(plan(), vector())
    assert isinstance(found, Accepted), found
    assert (found.host, found.job_id, found.daemon, found.argv[0]) == (HOSTS[0], JOB, 1, "orted")
    assert "--daemonize" not in found.argv  # so that it ends with us
    assert "plm_rsh_agent" not in found.argv
    # The addresses of other networks of the main node are left out.
    assert found.argv[found.argv.index("orte_hnp_uri") + 1] == f"{JOB}.0;tcp://10.77.0.1:47301"


def test_words_of_mpirun_that_was_called_by_its_path_are_accepted() -> None:
    settings_of_shell = (
        "          PATH=/opt/x/bin:$PATH ; export PATH ; LD_LIBRARY_PATH=/opt/x/lib:${LD_LIBRARY_PATH:-} ; "
        "export LD_LIBRARY_PATH ; DYLD_LIBRARY_PATH=/opt/x/lib:${DYLD_LIBRARY_PATH:-} ; export DYLD_LIBRARY_PATH ;   "
        "/opt/x/bin/orted"
    )
    words = vector()
    found = accepts(plan(), [words[0], settings_of_shell, *words[2:]])
    assert isinstance(found, Accepted), found
    assert found.argv[0] == "orted"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"host": "10.77.0.9"}, "no host of round"),
        ({"host": "-oProxyCommand=id"}, "no host of round"),
        ({"ess_base_jobid": '"1"'}, "another job"),
        ({"ess_base_jobid": None}, "not named"),
        ({"ess_base_vpid": "0"}, "daemon 0"),
        ({"ess_base_vpid": "3"}, "daemon 3"),
        ({"ess_base_vpid": "x"}, "ess_base_vpid"),
        ({"ess_base_num_procs": '"9"'}, "9 daemons"),
        ({"orte_hnp_uri": f'"{JOB}.0;tcp://10.9.9.9:1"'}, "not the main node"),
        ({"orte_hnp_uri": f'"{JOB}.0;tcp://10.77.0.10:1"'}, "not the main node"),
        ({"orte_hnp_uri": None}, "nobody back"),
        ({"plm_rsh_no_tree_spawn": None}, "start others"),
        ({"orte_launch_agent": '"/bin/sh"'}, "not accepted"),
        ({"mca_base_component_path": '"/tmp/evil"'}, "not accepted"),
        ({"orte_fork_agent": '"/tmp/evil"'}, "not accepted"),
        ({"ess": '"/tmp/x"'}, "parameter ess"),
        ({"pmix": '"$(id)"'}, "parameter pmix"),
        ({"routed": '"radix" ; id'}, "command of the shell"),
        ({"routed": '"radix" | id'}, "not expected"),
        ({"routed": '"radix'}, "quotes"),
        ({"routed": '"radix"\nid'}, "control characters"),
        ({"routed": '"radix" --tree-spawn'}, "not expected"),
        ({"routed": '"radix" -mca routed direct'}, "comes twice"),
    ],
)
def test_other_words_are_refused_with_a_reason(changes: dict[str, str | None], why: str) -> None:
    words = vector(**{"host": HOSTS[0], **changes})  # type: ignore[arg-type]
    assert why in refusal(accepts(plan(), words))


@pytest.mark.parametrize(
    "program", ["sh", "/bin/sh -c", "orted.sh", "", "env orted", "PATH=/x orted", "id ; orted", "$X ; orted"]
)
def test_no_other_program_is_started(program: str) -> None:
    words = vector()
    refusal(accepts(plan(), [words[0], program, *words[2:]]))


def test_words_of_open_mpi_5_are_taken_by_their_own_names() -> None:
    """From its source: not seen from a real one."""
    job = "prterun-main-17@0"
    shell = "PRTE_PREFIX=/opt/x;export PRTE_PREFIX;LD_LIBRARY_PATH=/opt/x/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH"
    words = [HOSTS[0], f"{shell};/opt/x/bin/prted", "--prtemca", "ess", '"env"']
    words += ["--prtemca", "ess_base_nspace", f'"{job}"']
    words += ["--prtemca", "ess_base_vpid", "2", "--prtemca", "ess_base_num_procs", '"3"', "--prtemca", "prte_hnp_uri"]
    words += [
        f'"{job}.0;tcp4://10.77.0.1:4000"',
        "--prtemca",
        "plm_ssh_agent",
        '"x"',
        "--prtemca",
        "plm_ssh_no_tree_spawn",
        "1",
    ]
    found = accepts(plan(), words)
    assert isinstance(found, Accepted), found
    assert (found.argv[0], found.job_id, found.daemon) == ("prted", job, 2)


def test_second_job_is_refused_once_the_round_has_one() -> None:
    assert "is not job 7" in refusal(accepts(dataclasses.replace(plan(), job_id="7"), vector()))
    assert isinstance(accepts(dataclasses.replace(plan(), job_id=JOB), vector()), Accepted)


def test_node_refuses_what_is_meant_for_another() -> None:
    assert "this is" in refusal(accepts(plan(), vector(), me=HOSTS[1]))
    assert isinstance(accepts(plan(), vector(HOSTS[1]), me=HOSTS[1]), Accepted)


def test_round_without_an_agent_accepts_nothing() -> None:
    assert "by an agent" in refusal(accepts(plan(mode="ssh"), vector()))
    refusal(accepts(plan(), []))
    refusal(accepts(plan(), [HOSTS[0]]))
    refusal(accepts(plan(), [HOSTS[0], *["-mca"] * 5000]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_words_put_in_or_changed_never_start_anything_else(data: st.DataObject) -> None:
    words = vector()
    place = data.draw(st.integers(1, len(words) - 1))
    other = data.draw(
        st.one_of(st.text(max_size=20), st.sampled_from(["-x", ";", "&& id", "`id`", "$(id)", "-mca", "--mca"]))
    )
    if data.draw(st.booleans()):
        words.insert(place, other)
    else:
        words[place] = other
    found = accepts(plan(), words)
    if isinstance(found, Accepted):
        assert found.argv[0] == "orted"
        assert set(found.argv[1::3]) <= {"-mca", "--mca", "-prtemca", "--prtemca", "-pmixmca", "--pmixmca"}
        assert found.argv[found.argv.index("orte_hnp_uri") + 1] == f"{JOB}.0;tcp://10.77.0.1:47301"
        assert not any(set(word) & set("$`;&|<>\"'\n ") for word in found.argv if not word.startswith(JOB))


# --- the agent --------------------------------------------------------------------------------------------------------


def test_agent_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["host", "orted"], {}) == 255
    assert "HEALTHD_RSH_SOCKET" in capsys.readouterr().err
    nobody = {"HEALTHD_RSH_SOCKET": str(tmp_path / "none"), "HEALTHD_RSH_ROUND": "r"}
    assert main(["host", "orted"], nobody) == 255
    assert "still under way" in capsys.readouterr().err


def answering(path: Path, answer: bytes) -> threading.Thread:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        line, _ = server.accept()
        with server, line, line.makefile("rb") as lines:
            lines.readline()
            line.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"{}\n", b"[]\n", b'{"exit": true}\n', b'{"exit": 256}\n', b"x\n", b'{"exit": 0}']
)
def test_answer_that_is_none_is_no_success(answer: bytes, tmp_path: Path) -> None:
    thread = answering(tmp_path / "s", answer)
    with pytest.raises(RshError):
        ask(tmp_path / "s", Request(round="r", argv=("h", "orted")))
    thread.join()


def test_request_and_answer_come_through_whole(tmp_path: Path) -> None:
    thread = answering(tmp_path / "s", write_answer(3, "no"))
    assert ask(tmp_path / "s", Request(round="r", argv=("h", "é\n"))) == (3, "no")
    thread.join()
    assert read_request(write_request(Request(round="r", argv=("h", "é\n")))) == Request(round="r", argv=("h", "é\n"))
    for line in (b'{"round": 1, "argv": []}\n', b'{"round": "r", "argv": [1]}\n', b'{"round": "r"}\n'):
        with pytest.raises(RshError):
            read_request(line)


# --- with the real Open MPI -------------------------------------------------------------------------------------------


class Carrier:
    """What the lines between the nodes will be: from the agent's socket to that of the node, judged on both ends."""

    def __init__(self, folder: Path, told: Plan) -> None:
        self.plan = told
        self.seen: list[tuple[str, ...]] = []
        self.refused: list[str] = []
        self._folder = folder
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(told.environment["HEALTHD_RSH_SOCKET"])
        self._server.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._server.accept()
                with line, line.makefile("rb") as lines:
                    line.sendall(self._carry(read_request(lines.readline())))

    def _carry(self, request: Request) -> bytes:
        self.seen.append(request.argv)
        found = accepts(self.plan, request.argv)
        if isinstance(found, Refused) or request.round != self.plan.round:
            self.refused.append(str(found))
            return write_answer(1, str(found))
        self.plan = dataclasses.replace(self.plan, job_id=found.job_id)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as node:
            node.settimeout(10)
            node.connect(str(self._folder / f"{found.host}.sock"))
            said = {"plan": dataclasses.asdict(self.plan), "argv": request.argv}
            node.sendall(json.dumps(said).encode() + b"\n")
            with node.makefile("rb") as answers:
                return answers.readline()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


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


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Path]:
    """A folder with a short name: those of Unix sockets are bounded, and Open MPI makes its own below it."""
    folder = Path("/tmp") / f"hd{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def nodes(folder: Path, names: dict[str, str], addresses: Sequence[str]) -> Iterator[None]:
    started = [
        subprocess.Popen(
            inside(
                names[address],
                f"node-{nth}",
                [sys.executable, str(ROOT / "tests/checks/launch_node.py"), str(folder), address],
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for nth, address in enumerate(addresses)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "listening\n"
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()


def make_agent(folder: Path) -> str:
    agent = folder / "healthd-rsh"
    agent.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m healthd.node.nccom.rsh "$@"\n')
    agent.chmod(0o755)
    return str(agent)


def environment(folder: Path, told: Plan) -> dict[str, str]:
    (folder / "main").mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder / "main"),
        **told.environment,
        "HEALTHD_HOST_ROOT": str(folder),
    }


@needs_namespaces
def test_round_without_ssh_runs_on_nodes_that_share_only_a_network(short: Path) -> None:
    """The real mpirun and orted; both ends judge the words; the numbers are added up on every node."""
    main_address, *hosts = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
    told = plan(
        report=str(short / "report.json"), socket=str(short / "rsh.sock"), agent=make_agent(short), hosts=hosts,
        main_addresses=(main_address,), network="10.77.0.0/24",
    )  # fmt: skip
    with namespaces((main_address, *hosts)) as names, nodes(short, names, hosts):
        carrier = Carrier(short, told)
        try:
            done = subprocess.run(
                inside(names[main_address], "main", [sys.executable, "-SE", str(TOOL), *told.argv]),
                env=environment(short, told), check=False, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
        finally:
            carrier.close()
    assert carrier.refused == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes reported: 10.77.0.2, 10.77.0.3" in done.stdout
    assert sorted(words[0] for words in carrier.seen) == sorted(hosts)
    rows = read_report((short / "report.json").read_text())
    assert rows is not None
    assert [row.size_bytes for row in rows] == list(STEP.sizes_bytes)


@needs_namespaces
def test_round_that_a_node_refuses_fails_and_ends(short: Path) -> None:
    """Of another round: mpirun hears the refusal, and nobody waits for ever."""
    main_address, *hosts = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
    told = plan(
        report=str(short / "report.json"), socket=str(short / "rsh.sock"), agent=make_agent(short), hosts=hosts,
        main_addresses=(main_address,),
    )  # fmt: skip
    with namespaces((main_address, *hosts)) as names, nodes(short, names, hosts):
        carrier = Carrier(short, dataclasses.replace(told, job_id="1"))
        began = time.monotonic()
        try:
            done = subprocess.run(
                inside(names[main_address], "main", [sys.executable, "-SE", str(TOOL), *told.argv]),
                env=environment(short, told), check=False, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
        finally:
            carrier.close()
    assert done.returncode != 0
    assert "is not job 1" in done.stderr
    assert carrier.refused  # mpirun may end before it has asked for the second
    assert time.monotonic() - began < 10 * PATIENCE


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
        main_addresses=("127.0.0.1",),
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
