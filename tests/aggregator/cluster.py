"""
A fleet as its users have it: an aggregator and node daemons as processes of their own, driven by the command line, HTTP
and signals alone. Leaving the `Cluster` ends them all and fails when anything is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests import prepared
from tests.aggregator.service import ROOT, START_SECONDS, Command, Said, Service, free_port, until
from tests.patience import PATIENCE

HEALTHD = (sys.executable, "-m", "healthd")
TUNED = (sys.executable, "-P", prepared.TUNED)
"""The same, with the keys of `tests.aggregator.tuned`."""
EXECUTED = str(prepared.EXECUTED or sys.executable)
"""The interpreter by a name under which it is executed and not forked: for code of another version."""
# Every process that we start, and whatever it starts, carries this variable: so that none can hide.
MARK = "CLUSTER_OF_A_TEST"

# A check that needs no torch: real processes, real runs, at a tenth of the cost. It says what its file says.
PROOF = '''
"""A check of a test."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from checks.contract import Context, Finding, Limit, NoParams, check
from checks.limits import within


@check(tier="quick", interval_seconds=3600, timeout_seconds=10, scope="node")
def proof(ctx: Context[NoParams]) -> Iterator[Finding]:
    """A number of a file is not below one."""
    value = float((Path(__file__).parent / "number").read_text())
    least = Limit(lower=1.0, upper=None, origin="config")
    yield within(value, name="proof_bytes", target="node", limit=least, reason="SlowDevice", subject="proof")
'''

# How long the gates of `ask` hold: longer than any test waits for one.
GATE_SECONDS = 300.0

AGGREGATOR = """
[policy]
tuning.settle = "3s"
recovery = "30s"
node_grace = "4s"
silent = "6s"
tuning.lease_ack = "10s"
"""


@dataclass
class Cluster:
    """
    See the module. `checks` are enabled on every node; `proof` is the check above. `tree` has the code that runs: of
    another version, see `versions`.
    """

    folder: Path
    checks: tuple[str, ...] = ("memory_free", "proof")
    tree: Path = ROOT
    services: dict[str, Service] = field(default_factory=dict)
    others: list[subprocess.Popen[Any]] = field(default_factory=list)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for service in self.services.values():
                if service.process is not None and service.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        service.signal(signal.SIGCONT)
                        service.signal(signal.SIGTERM)
            slow = [service.name for service in self.services.values() if not _ends(service.process, 6 * PATIENCE)]
            for process in self.others:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        pipe.close()
            end = time.monotonic() + 2 * PATIENCE
            while (left := self.alive()) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if kind is None:
            assert not slow, f"did not end within {6 * PATIENCE:.0f} s of SIGTERM: {slow}"
            assert not left, f"left behind: {left}"

    def alive(self) -> dict[int, str]:
        """All processes that descend from us by their mark, with their command lines."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark, "PYTHONPATH": str(self.tree)}

    @property
    def program(self) -> tuple[str, ...]:
        """What runs `healthd`."""
        return HEALTHD if self.tree == ROOT else (EXECUTED, "-P", "-m", "healthd")

    @property
    def tuned(self) -> tuple[str, ...]:
        """What runs it with the keys of `tests.aggregator.tuned`."""
        return TUNED if self.tree == ROOT else (EXECUTED, "-P", prepared.TUNED)

    # --- services -----------------------------------------------------------------------------------------------------

    def aggregator(
        self, *arguments: str, config: str = AGGREGATOR, name: str = "aggregator", state: Path | None = None
    ) -> Service:
        """The description of an aggregator on a port of its own; `start` it."""
        file = self.folder / f"{name}.toml"
        file.write_text(config)
        if "--listen" not in arguments:
            arguments = ("--listen", f"127.0.0.1:{free_port()}", *arguments)
        command = [*self.tuned, "aggregator", "--config", str(file), "--state-dir", str(state or self.folder / name)]
        service = Service(
            name, [*command, *arguments], folder=self.folder, env=self.env, pattern=r"aggregator listens on (\S+)"
        )
        self.services[name] = service
        return service

    def node(
        self, name: str, *arguments: str, aggregator: str = "", extra: str = "", called: str | None = None
    ) -> Service:
        """The description of a node daemon, `called` so in the fleet; `start` it. `extra` is more of its file."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        self.prove(1.0)
        file = self.folder / f"{name}.toml"
        file.write_text(node_config(self.checks, self.folder / "checks") + extra)
        command = [*self.program, "node", "--config", str(file), "--name", called or name]
        if "--listen" not in arguments:
            arguments = ("--listen", f"127.0.0.1:{free_port()}", *arguments)
        if "--state-dir" not in arguments:
            arguments = ("--state-dir", str(folder / "state"), *arguments)
        command += ["--run-dir", str(folder / "run"), "--label", "pool=a"]
        if aggregator:
            command += ["--aggregator", aggregator]
        service = Service(
            name, [*command, *arguments], folder=self.folder, env=self.env, pattern=r"answers on (http://\S+)"
        )
        self.services[name] = service
        return service

    def fleet(self, *names: str, config: str = AGGREGATOR, extra: str = "") -> Service:
        """An aggregator and these nodes, started side by side; returns when the nodes are healthy."""
        aggregator = self.aggregator(config=config).start()
        for name in names:
            self.node(name, aggregator=aggregator.url, extra=extra).start(ready=False)
        self.healthy(*names)
        return aggregator

    def healthy(self, *names: str, seconds: float = START_SECONDS) -> None:
        """Returns once all of these say 200."""
        for name in names:
            node = self.services[name]
            node.url = f"http://{node.command[node.command.index('--listen') + 1]}"

            def well(node: Service = node) -> bool:
                assert node.process is not None
                assert node.process.poll() is None, f"{node.name} ended: {node.said()}"
                with contextlib.suppress(httpx.TransportError):
                    return node.health() == 200
                return False

            until(well, seconds, lambda node=node: f"{node.name} is not healthy: {node.said()}")  # type: ignore[misc]

    def prove(self, value: float) -> None:
        """What the check `proof` sees from now on."""
        folder = self.folder / "checks"
        folder.mkdir(exist_ok=True)
        if not (folder / "proof.py").exists():
            (folder / "proof.py").write_text(PROOF)
        (folder / "number").write_text(str(value))

    def aged(self, node: str, seconds: int = 1) -> None:
        """Returns once the evidence of a node is older than that, so that a gate has to have it made anew."""
        until(lambda: self.services[node].health(f"?tier=quick&max_age={seconds}") == 503)

    def run_dir(self, node: str) -> Path:
        return self.folder / node / "run"

    # --- commands -----------------------------------------------------------------------------------------------------

    def healthd(self, *arguments: str, seconds: float = 40.0) -> Said:
        """Run a command of healthd as a hook would."""
        return self.start(*arguments).said(seconds)

    def start(self, *arguments: str) -> Command:
        """Start a command and leave it running."""
        process = prepared.Popen(
            [*self.program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self.env,
        )
        self.others.append(process)
        return Command(process)

    def gate(self, url: str, job: str, *arguments: str, wait: str = "60s") -> Said:
        """`healthd gate --json`."""
        return self.healthd("gate", "--aggregator", url, "--job", job, "--wait", wait, "--json", *arguments)

    def job(self, path: Path) -> subprocess.Popen[bytes]:
        """A process that has a file open, as a job has its devices."""
        path.parent.mkdir(parents=True, exist_ok=True)  # nothing made the device's file where no probe had it open yet
        code = "import sys; f = open(sys.argv[1], 'a'); print(1, flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env
        )
        self.others.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        return process


def node_config(checks: tuple[str, ...], directory: Path) -> str:
    """The file of a node that is quick to notice everything."""
    return f"""
[probe]
directories = ["{directory}"]
cpu_devices = 1
[checks.matmul]
sizes = [64, 64]
repeats = 1
[node]
checks = {json.dumps(list(checks))}
passive_floor = "1s"
look = "3s"
[node.allocations]
read = false # other tests of this machine may run a Slurm
[node.active]
retry = "1s"
[node.lease]
settle = "1s"
watch = "0.2s"
[node.sync]
wait = "2s"
backoff_max = "0.3s"
"""


def asked(nodes: tuple[str, ...]) -> tuple[str, ...]:
    """`--node` for each."""
    return tuple(word for node in nodes for word in ("--node", node))


def ask(
    url: str, job: str, nodes: list[str], *, wait: float = 0.0, http: httpx.Client | None = None, **more: Any
) -> dict[str, Any]:
    """
    POST /v1/gates, for tests that need no hook; the decision. `http` is how to ask one that wants TLS and tokens.

    A `wait` of 5 s and more is for what is to be decided: it is patient, and asks again as hooks do. A shorter one
    looks how things are.
    """
    patient = wait * PATIENCE if wait >= 5 else wait
    body = {"job": job, "nodes": nodes, "wait_seconds": GATE_SECONDS, **more}
    end = time.monotonic() + patient
    with contextlib.nullcontext(http) if http else httpx.Client(trust_env=False, verify=False) as client:
        while True:
            left = max(0.0, end - time.monotonic())
            answer = client.post(f"{url}/v1/gates", params={"wait": min(left, 20.0)}, json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            decision: dict[str, Any] = answer.json()
            if decision["decision"] != "hold" or time.monotonic() >= end:
                return decision


def release(url: str, gate: str) -> None:
    """Give the lease of a gate back; asks again as a hook does while nobody leads."""
    end = time.monotonic() + 10 * PATIENCE
    while True:
        answer = httpx.delete(f"{url}/v1/gates/{gate}/lease", trust_env=False, verify=False, timeout=60)
        if answer.status_code != 503 or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert answer.status_code == 200, answer.text


def release_node(url: str, node: str) -> None:
    """End every lease on a node, also where the last one has just ended."""
    answer = httpx.delete(f"{url}/v1/nodes/{node}/leases", trust_env=False, verify=False, timeout=60)
    assert answer.status_code == 200, answer.text


def _ends(process: subprocess.Popen[bytes] | None, seconds: float) -> bool:
    if process is None:
        return True
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


@contextlib.contextmanager
def mounted(kind: str, place: Path, options: str) -> Iterator[Path]:
    """A file system of its own at `place` (needs root), gone afterwards."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, kind, str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def full_disk(place: Path) -> Iterator[Path]:
    """A file system at `place` without a byte left (needs root); remove `ballast` in it to have some."""
    with mounted("tmpfs", place, "size=1m"):
        with (place / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                pass
        yield place
