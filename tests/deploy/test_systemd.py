"""Units are what systemd takes, bounded as far as they can be; the boot check says what the daemon knows, no more."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.aggregator import service
from tests.deploy.systemd_kit import FOLDER, UNITS, Unit

BOOT = FOLDER / "healthd-boot"

systemd = pytest.mark.system("systemd-analyze")


@systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong_with_the_unit(name: str, tmp_path: Path) -> None:
    """Programs are looked for where they are installed, so here they are put in place of themselves."""
    text = (FOLDER / name).read_text(encoding="ascii").replace("/opt/healthd/bin/python", sys.executable)
    (tmp_path / name).write_text(re.sub(r"/opt/healthd/bin/healthd\b", "/bin/true", text), encoding="ascii")
    for other in set(UNITS) - {name}:
        (tmp_path / other).write_text("[Service]\nExecStart=/bin/true\n", encoding="ascii")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    mine = [line for line in (done.stdout + done.stderr).splitlines() if "healthd" in line]
    assert done.returncode == 0, mine
    assert mine == []


@systemd
def test_a_misspelt_setting_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "bad.service").write_text("[Service]\nExecStart=/bin/true\nNoNewPrivilege=yes\n", encoding="ascii")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "bad.service")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "NoNewPrivilege" in done.stderr + done.stdout


@systemd
@pytest.mark.parametrize(("name", "most"), [(UNITS[0], 48), (UNITS[1], 15), (UNITS[2], 15)])
def test_what_systemd_says_of_its_exposure_does_not_rise(name: str, most: int) -> None:
    """Of 100. The node's is what is left to a daemon that must see the whole machine."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={most}", str(FOLDER / name)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_node_sees_the_mounts_logs_and_devices_of_the_host_and_not_of_a_namespace() -> None:
    """Each of these gives a service a view of its own, which the checks would then judge."""
    settings = Unit(UNITS[0])["Service"]
    hiding = re.compile(
        r"Protect(System|Home|Proc|KernelTunables|KernelLogs|KernelModules|ControlGroups|Hostname|Clock)|ProcSubset"
        r"|Private\w+|(ReadOnly|ReadWrite|Inaccessible|Exec|NoExec|Bind)\w*Paths|TemporaryFileSystem|Root\w+|DynamicUser"
        r"|Device(Allow|Policy)|MountFlags|MemoryDenyWriteExecute"
    )
    assert [key for key in settings if hiding.fullmatch(key)] == []


def test_the_node_starts_after_the_mounts_of_fstab() -> None:
    """What is not mounted yet would be judged as missing."""
    assert {"local-fs.target", "remote-fs.target"} <= Unit(UNITS[0]).words("After")


def test_the_node_keeps_the_rights_that_its_checks_need() -> None:
    kept = Unit(UNITS[0]).words("CapabilityBoundingSet", "Service")
    assert {"CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_SYSLOG", "CAP_IPC_LOCK", "CAP_KILL"} <= kept
    assert not {"CAP_SYS_ADMIN", "CAP_SYS_MODULE", "CAP_NET_ADMIN", "CAP_SETUID", "CAP_SYS_TIME", "CAP_SYS_BOOT"} & kept
    assert Unit(UNITS[0])["Service"]["LimitMEMLOCK"] == "infinity"


def test_the_boot_check_is_ordered_before_every_agent_and_after_the_daemon() -> None:
    unit = Unit(UNITS[2])
    assert unit.words("Before") == {"slurmd.service", "ecs.service", "kubelet.service"}
    assert "healthd-node.service" in unit.words("After") & unit.words("Wants")
    assert not unit.has_option("Unit", "RequiredBy"), "that the agent waits for a fit node is for the operator to say"
    # The ECS agent starts after cloud-final, which would wait for itself.
    assert "cloud" not in (FOLDER / UNITS[2]).read_text(encoding="ascii")
    service_of = unit["Service"]
    waits = re.search(r"BOOT_WAIT=(\d+)m", service_of["Environment"])
    assert waits is not None
    assert int(waits[1]) < int(service_of["TimeoutStartSec"].removesuffix("min"))


def test_only_a_machine_that_is_known_to_be_broken_switches_itself_off() -> None:
    text = (FOLDER / "replace.conf").read_text(encoding="ascii")
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStopPost=")]
    script = re.search(r"-c '(.*)'", line)
    assert script is not None
    command = script[1].replace("$$", "$").replace("exec systemctl --no-block", "echo")
    for status, said in (("0", ""), ("1", ""), ("2", "poweroff"), ("3", ""), ("TERM", ""), ("", "")):
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env={"EXIT_STATUS": status},
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        assert done.stdout.strip() == said


# --- healthd-boot -----------------------------------------------------------------------------------------------------


class Daemon:
    """A server that answers as it is told; the last answer stays."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.paths: list[str] = []
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                daemon.paths.append(self.path)
                status, body = daemon.answers[0] if len(daemon.answers) == 1 else daemon.answers.pop(0)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/health"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.stop()


def boot(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(BOOT), "--url", url, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"http_proxy": "http://127.0.0.1:9"},
    )


def said(status: int, health: str, why: str = "") -> tuple[int, bytes]:
    return status, json.dumps({"status": "x", "health": health, "output": why}).encode()


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (said(200, "healthy"), 0, "is healthy"),
        (said(200, "degraded", "clock is off"), 0, "is degraded: clock is off"),
        (said(503, "unhealthy", "matmul neuron:3 is wrong"), 2, "unhealthy: matmul neuron:3 is wrong"),
        (said(503, "unknown", "no evidence"), 3, "no evidence"),
        # An answer that contradicts itself is not health, and nothing to switch a machine off for.
        (said(503, "healthy"), 3, "still not known"),
        (said(200, "unhealthy"), 3, "still not known"),
        (said(200, "unknown"), 3, "still not known"),
        ((200, b""), 3, "not understood"),
        ((200, b'{"status": "pass"}'), 3, "not understood"),
        ((200, b"[]"), 3, "not understood"),
        ((200, b"\xff"), 3, "not understood"),
        ((200, b"[" * 100_000), 3, "not understood"),
        ((500, b"boom"), 3, "HTTP 500"),
        ((404, b"{}"), 3, "HTTP 404"),
    ],
)
def test_only_a_clear_word_of_the_daemon_is_an_answer(
    daemon: Daemon, answer: tuple[int, bytes], code: int, words: str
) -> None:
    daemon.answers = [answer]
    done = boot(daemon.url, "--wait", "0")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert daemon.paths == ["/health?tier=quick&max_age=3600"]


def test_it_waits_until_the_daemon_knows(daemon: Daemon) -> None:
    daemon.answers = [said(503, "unknown", "matmul has not run yet"), said(200, "healthy")]
    done = boot(daemon.url, "--wait", "30s", "--tier", "passive", "--max-age", "10m")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "healthd: not known yet: matmul has not run yet",
        "healthd: this node is healthy",
    ]
    assert daemon.paths == ["/health?tier=passive&max_age=600"] * 2


def test_a_daemon_that_is_not_there_is_not_known(daemon: Daemon) -> None:
    done = boot("http://127.0.0.1:9/health", "--wait", "0")
    assert done.returncode == 3
    assert "does not respond" in done.stderr


def test_a_daemon_that_sends_elsewhere_is_not_known(daemon: Daemon) -> None:
    """What stands there may be anybody's word."""
    daemon.answers = [said(200, "healthy")]

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", daemon.url)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        done = boot(f"http://127.0.0.1:{server.server_port}/health", "--wait", "0s")
        server.shutdown()
    assert (done.returncode, "not known" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("head", [b"HTTP/1.1 503 X\r\nContent-Length: 100\r\n\r\n", b"HTTP/1.1 200 X\r\nA: "])
def test_an_answer_that_comes_by_drops_is_none(head: bytes) -> None:
    ended = threading.Event()

    def drip() -> None:
        held, _ = listener.accept()
        with held, contextlib.suppress(OSError):
            held.sendall(head)
            while not ended.wait(0.2):
                held.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip)
        thread.start()
        done = boot(f"http://127.0.0.1:{listener.getsockname()[1]}/health", "--wait", "0s")
        ended.set()
        thread.join()
    assert (done.returncode, "no whole answer in 10 s" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("arguments", [["--wait", "soon"], ["--tier", "all"], ["--now"], ["--wait", "1d"]])
def test_usage_is_not_known_and_never_the_code_that_switches_machines_off(daemon: Daemon, arguments: list[str]) -> None:
    done = boot(daemon.url, *arguments)
    assert done.returncode == 3
    assert daemon.paths == []


def test_a_real_daemon_is_waited_for_and_its_fault_is_told(tmp_path: Path) -> None:
    for name, fault, code in (("fit", [], 0), ("broken", ["--fault", "load=fail"], 2)):
        folder = tmp_path / name
        folder.mkdir()
        config = folder / "healthd.toml"
        config.write_text('[node]\nchecks = ["load", "disk_space"]\n', encoding="ascii")
        command = [sys.executable, "-m", "healthd", "node", "--name", name, "--listen", "127.0.0.1:0", "--config"]
        command += [str(config), "--state-dir", str(folder), *fault]
        environment = {"PATH": "/usr/bin:/bin", "HEALTHD_RUN_DIR": str(folder / "run"), "HOME": str(folder)}
        node = service.Service(name, command, folder=folder, env=environment, pattern=r"(http://[\d.]+:\d+)")
        try:
            node.start()
            done = boot(f"{node.url}/health", "--tier", "passive", "--wait", "40s")
            assert done.returncode == code, done.stderr + node.said()
        finally:
            node.kill()
