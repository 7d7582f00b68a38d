"""`healthd demo`: the main use of healthd with real processes on this machine; nothing is mocked."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checks.json_text import parse_json
from healthd.cli.terminal.output import styled
from healthd.core.errors import HealthdError

if TYPE_CHECKING:
    import httpx

NODES = ("n1", "n2", "n3")
START_SECONDS = 180.0
"""Until three daemons answer, and until they are healthy: more than ten times what either takes."""
GATE_WAIT, COMMAND_SECONDS = "4m", 300.0
"""The longest that a gate, and any command, may take on a slow machine; on an idle one each takes seconds."""
TRIES = 3
"""Attempts at a gate whose answer is inconclusive, as it is where a busy machine does not start the ranks in time."""
# Times that a busy machine may need to start ranks. No fault of the demonstration is found by these limits.
PATIENT = {"HEALTHD_POLICY_COLLECTIVE_START": "180s", "HEALTHD_POLICY_COLLECTIVE_JOIN": "90s"}

WARM = {"HEALTHD_PROBE_PRELOAD": "true"}
"""The nodes keep torch imported between the acts."""

FAULT = "matmul@cpu:1=corrupt"
BETWEEN = "all_reduce@rank:4=corrupt"
"""Rank 4 exists, on n3, only where all three nodes run together."""
STEP = "train_step.block1.gelu_grad@cpu:1=corrupt:0.001"
PROBES = ("matmul", "memory", "digest", "transfer", "train_step")
# The last line of a command whose device broke, and of one that lost its peer.
DYING = {
    "n1": "RuntimeError('[pair.cc:553] Connection closed by peer [127.0.0.1]:46264')",
    "n2": "RuntimeError('CUDA error: device-side assert triggered')",
}
ON_NODE = {"HEALTHD_NODE_CHECKS": "memory_free,matmul,digest"}
RETRY_ELSEWHERE = 75


@dataclass
class Stage:
    """The processes of the demonstration; they end with this context."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    environment: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Stage:
        from healthd.cli.terminal.console import Terminal

        self.console = Terminal(soft_wrap=True)
        self.environment = _own_environment(self.folder / "healthd.toml")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=6)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def aggregator(self) -> str:
        """The aggregator's URL."""
        return f"http://127.0.0.1:{self.ports['aggregator']}"

    def title(self, text: str) -> None:
        """Begin an act."""
        self.console.print(f"\n[bold cyan]{text}[/]")

    def say(self, text: str) -> None:
        """Explain what happens next."""
        self.console.print(f"[dim]{text}[/]")

    def leave_out_faults_of_this_host(self) -> None:
        """Find out which checks this host fails by itself, show them, and keep them out of the demonstration."""
        own = str(self.folder / "host")
        line = [sys.executable, "-P", "-m", "healthd", "check", "--tier", "passive", "--json"]
        done = subprocess.run(
            [*line, "--run-dir", own, "--state-dir", own],
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            env=self.environment,
        )
        if done.returncode not in (0, 1, 3):
            raise HealthdError(f"the checks of this host did not run: {done.stderr.strip()}")
        failed = failed_checks(parse_json(done.stdout))
        if failed:
            found = "; ".join(f"{name}: {message}" for name, message in failed.items())
            self.console.print(f"[yellow]This host fails some checks, which the demonstration leaves out:[/] {found}")
            self.environment["HEALTHD_NODE_DISABLED"] = ",".join(failed)

    def start_all(self) -> None:
        """Start the aggregator and the nodes, and wait until they answer."""
        self.ports = dict(zip(("aggregator", *NODES), _free_ports(1 + len(NODES)), strict=True))
        self.start(
            "aggregator",
            "aggregator",
            *("--listen", f"127.0.0.1:{self.ports['aggregator']}"),
            *("--state-dir", str(self.folder / "aggregator")),
        )
        for node in NODES:
            self.start(
                node,
                "node",
                *("--name", node, "--listen", f"127.0.0.1:{self.ports[node]}", "--aggregator", self.aggregator),
                *("--state-dir", str(self.folder / node), "--run-dir", str(self.folder / node), "--label", "pool=demo"),
            )
        with self.console.status("starting"):
            for name, port in self.ports.items():
                self.wait_for(f"http://127.0.0.1:{port}/livez", name)

    def start(self, name: str, *arguments: str) -> None:
        """Start one process of healthd, with its log in the folder; it ends with the demonstration."""
        (self.folder / name).mkdir(exist_ok=True)
        shown = ["healthd", *arguments]
        self.console.print(f"[green]$[/] {shlex.join(shown)} &".replace(str(self.folder), "$D"))
        with (self.folder / f"{name}.log").open("wb") as log:
            environment = {**self.environment, "HEALTHD_POLICY_RECOVERY": "2s", **PATIENT, **WARM}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "healthd", *arguments], stdout=log, stderr=log, env=environment
                )
            )

    def wait_for(self, url: str, name: str) -> None:
        """Until a URL answers at all."""
        import httpx

        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                _get(url)
                return
            time.sleep(0.05)
        raise HealthdError(f"{name} did not respond at {url} within {START_SECONDS:.0f} s: {self.log_tail(name)}")

    def check_alive(self) -> None:
        """HealthdError with the log's end when a process has ended."""
        for name, process in zip(("aggregator", *NODES), self.processes, strict=False):
            if process.poll() is not None:
                raise HealthdError(f"{name} ended with code {process.returncode}: {self.log_tail(name)}")

    def log_tail(self, name: str) -> str:
        """The last line of a process's log."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"

    def wait_for_health(self, nodes: Sequence[str]) -> None:
        """Until all nodes are healthy, with a spinner."""
        end = time.monotonic() + START_SECONDS
        waiting, last = list(nodes), ""
        with self.console.status("checking"):
            while waiting:
                self.check_alive()
                answer = _get(f"http://127.0.0.1:{self.ports[waiting[0]]}/health")
                last = answer.json().get("output", "")
                if answer.status_code == 200:
                    waiting.pop(0)
                elif time.monotonic() > end:
                    why = f"{last}{self.holders(waiting[0])}"
                    raise HealthdError(f"{waiting[0]} is not healthy after {START_SECONDS:.0f} s: {why}")
                else:
                    time.sleep(0.1)

    def holders(self, node: str) -> str:
        """The holders of the devices of this machine, as the end of an error message; empty if there are none."""
        found = _get(f"http://127.0.0.1:{self.ports[node]}/v1/node").json()
        names = ", ".join(claim["holder"] for claim in found.get("allocated", ()))
        return f"; this machine is in use ({names}), try again when it is free" if names else ""

    def curl(self, path: str, *, expect: int, node: str = "n1") -> None:
        """Show a curl line and the head of its real answer; HealthdError for a status other than `expect`."""
        url = f"http://127.0.0.1:{self.ports[node]}{path}"
        answer = _get(url)
        self.console.print(f"[green]$[/] curl -i {url.removeprefix('http://')}")
        body = answer.json()
        shown = json.dumps({key: body[key] for key in ("status", "health", "output") if key in body})
        self.console.print(f"  HTTP {answer.status_code}  {shown[:-1]}, ...}}", markup=False)
        if answer.status_code != expect:
            raise HealthdError(f"{url} returned {answer.status_code}, not {expect}: {body.get('output')}")

    def gate(
        self,
        job: str,
        *arguments: str,
        expect: int,
        names: tuple[str, str] | None = None,
        wait: str = GATE_WAIT,
        first: int = 0,
    ) -> dict[str, Any]:
        """
        Ask for a gate as a hook would; the decision, which has the exit code `expect` and, where `names` is given,
        accuses that node of that reason.

        One that does not is asked again as the next attempt, from the `first` on. HealthdError after TRIES of them.
        """
        decision: dict[str, Any] = {}
        for attempt in range(first, first + TRIES):
            again = ("--attempt", str(attempt)) if attempt else ()
            command = ("gate", "--aggregator", self.aggregator, "--job", job, *again, *arguments, "--wait", wait)
            code = self.healthd(*command, expect=None)
            decision = self._decision(job, attempt)
            self.attempts[job] = attempt
            if code == expect and (names is None or accuses(decision, *names)):
                return decision
            if attempt + 1 < first + TRIES:
                self.say("The answer is inconclusive, which happens on a busy machine. Next attempt:")
        said = "; ".join(reason["message"] for reason in decision.get("reasons", ())) or "none"
        wanted = "admit the nodes" if names is None else f"name {names[1]} for {names[0]}"
        raise HealthdError(
            f"this machine is too slow or too busy for the demonstration: after {TRIES} tries the gate of {job} did "
            f"not {wanted}; its reasons: {said}. Try again when the machine is idle"
        )

    def _decision(self, job: str, attempt: int) -> dict[str, Any]:
        """The decision for this attempt; empty if there is none."""
        gates = _get(f"{self.aggregator}/v1/gates?job={job}").json()["gates"]
        found = [gate["id"] for gate in gates if gate["asked_attempt"] == attempt]
        decision: dict[str, Any] = _get(f"{self.aggregator}/v1/gates/{found[0]}").json() if found else {}
        return decision

    def fault(self, action: str, *faults: str, node: str) -> None:
        """Set faults on a node, or clear them all."""
        self.healthd("fault", action, *faults, "--run-dir", str(self.folder / node), expect=0)

    def end_job(self, job: str) -> None:
        """Release the nodes, as the end of the job would."""
        again = ("--attempt", str(self.attempts[job])) if self.attempts[job] else ()
        self.healthd("gate", "release", "--aggregator", self.aggregator, "--job", job, *again, expect=0)

    def healthd(self, *arguments: str, expect: int | None, more: Mapping[str, str] | None = None) -> int:
        """
        Run a command of healthd as a person would, and show what it prints; its progress is on the terminal.

        `more` is added to its environment. Its exit code; HealthdError where it is not `expect` (None: any may be).
        """
        shown = shlex.join(["healthd", *arguments]).replace(str(self.folder), "$D")
        self.console.print(f"[green]$[/] {shown}")
        code = self._show(arguments, {**self._as_here(), **(more or {})})
        self.console.print(f"  [dim]exit code {code}[/]")
        if expect is not None and code != expect:
            raise HealthdError(f"'{shown}' ended with {code}, not {expect}")
        return code

    def _show(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """
        Run a command and print each of its lines as it comes; its exit code.

        On a terminal its standard error is ours, so that its progress can be redrawn.
        """
        shown = styled(sys.stdout)  # the colours are the command's own, and it has escaped everything else
        live = sys.stderr.isatty()
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "healthd", *arguments],
            stdout=subprocess.PIPE,
            stderr=None if live else subprocess.STDOUT,
            text=True,
            env={**environment, "PYTHONUNBUFFERED": "1"},
        ) as process:
            late = threading.Timer(COMMAND_SECONDS, process.kill)
            late.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    shown.write(f"  {line}")
                    shown.flush()
                return process.wait()
            finally:
                late.cancel()
                process.kill()

    def _as_here(self) -> dict[str, str]:
        """What makes a command write to a pipe as to this terminal, less the two columns that we put before it."""
        if not self.console.is_terminal:
            return self.environment
        return {**self.environment, "FORCE_COLOR": "1", "COLUMNS": str(max(40, self.console.width - 2))}

    def beside(self, *arguments: str, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command of healthd without showing it; it ends with the demonstration."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "healthd", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**self.environment, **more},
        )
        self.processes.append(process)
        return process

    def linger(self) -> None:
        """Stay until Ctrl-C."""
        self.console.print("\n[bold]Left running; Ctrl-C ends everything. Try:[/]")
        for line in (
            f"export D={self.folder} PATH={Path(sys.executable).parent}:$PATH",
            f"curl -s 127.0.0.1:{self.ports['n1']}/health",
            f"curl -s 127.0.0.1:{self.ports['n1']}/metrics",
            f"healthd fleet status --aggregator {self.aggregator}",
            f"healthd fault set digest@cpu:0=corrupt --run-dir {self.folder}/n3",
            f"healthd gate --aggregator {self.aggregator} --job mine --pool demo --count 2 --max-age 1s",
        ):
            self.console.print(f"  {line}", markup=False)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                self.check_alive()
                time.sleep(1)


def _own_environment(file: Path) -> dict[str, str]:
    """Of this machine's settings, which may switch actuators on, the probes' interpreter alone; its faults hit CPUs."""
    from healthd.cli.settings.options import load_settings

    python = load_settings({}, section="node").probe.python
    file.touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHD_")}
    own = {"HEALTHD_CONFIG": str(file), "HEALTHD_PROBE_ACCELERATOR": "cpu"}
    return {**kept, **own, **({} if python is None else {"HEALTHD_PROBE_PYTHON": str(python)})}


def failed_checks(state: Mapping[str, Any]) -> dict[str, str]:
    """The checks of a node's state that failed or could not tell, each with its first message."""
    return {
        result["check"]: next((one["message"] for one in result["findings"] if one["status"] == result["status"]), "")
        for result in state["results"]
        if result["status"] in ("fail", "unknown")
    }


def accuses(decision: Mapping[str, Any], code: str, node: str) -> bool:
    """
    Whether a decision names this node for this reason, at the top or where it is left out.

    A daemon that checks unprompted may find the fault before the gate does: then a rule keeps the node out for it.
    """
    reasons = [*decision.get("reasons", ())]
    reasons += [reason for one in decision.get("excluded", ()) for reason in one["reasons"] if one["node"] == node]
    return any(
        reason.get("node") in (node, None)
        and (reason["code"] == code or (reason["code"] == "Quarantined" and f" {code}: " in reason["message"]))
        for reason in reasons
    )


def _free_ports(count: int) -> list[int]:
    """The usual ports where they are free, others where not."""
    wanted = [8090, *range(8080, 8080 + count - 1)]
    with contextlib.ExitStack() as stack:
        sockets = []
        for port in wanted:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                listener.bind(("127.0.0.1", 0))
            sockets.append(listener)
        return [int(listener.getsockname()[1]) for listener in sockets]


def _get(url: str) -> httpx.Response:
    """The answer of a service of ours, without loading the authorities of the machine each time."""
    import httpx

    from healthd.core.http.trust import verification

    return httpx.get(url, timeout=5.0, trust_env=False, verify=verification(url))


@click.command(short_help="Start three nodes, an aggregator and a gate on this machine.")
@click.option("--more", is_flag=True, help="Run three more acts: a spare, a device that cannot train, a job that dies.")
@click.option("--keep", is_flag=True, help="Keep everything running until Ctrl-C.")
def demo(more: bool, keep: bool) -> int:
    """Run three nodes and an aggregator on this machine: admit a job, name a bad device, localise a bad collective."""
    with tempfile.TemporaryDirectory(prefix="healthd-demo-") as folder, _signals(), Stage(Path(folder)) as stage:
        start(stage)
        (play_more if more else play)(stage)
        stage.title(f"Done in {time.monotonic() - stage.began:.0f} s")
        if keep:
            stage.linger()
    return 0


def start(stage: Stage) -> None:
    """The first act of both demonstrations."""
    stage.title("1. Three node daemons and an aggregator start, each in its own process")
    stage.leave_out_faults_of_this_host()
    stage.start_all()
    stage.say("Each daemon is unhealthy until its checks have passed. It runs tensor operations and collectives:")
    stage.wait_for_health(NODES)
    stage.curl("/health", expect=200)


def play(stage: Stage) -> None:
    """The main use; HealthdError where an act does not end as it must."""
    stage.title(
        "2. May a job start on the three nodes? The gate reads the evidence, then runs collectives between them"
    )
    stage.gate("train-1", *_nodes(), expect=0)
    stage.say("A lease ends with its job. Here it is ended by hand:")
    stage.end_job("train-1")

    stage.title(f"3. A bad device: one bit of each result of cpu:1 on n2 is flipped ({FAULT})")
    stage.fault("set", FAULT, node="n2")
    stage.say("The next job accepts no evidence older than a second. Its gate names the device:")
    stage.gate("train-2", *_nodes(), "--max-age", "1s", expect=75, names=("WrongResult", "n2"))
    stage.curl("/health", node="n2", expect=503)
    stage.fault("clear", node="n2")

    stage.title(f"4. A fault that no node can find alone: n3 sends wrong values to the others ({BETWEEN})")
    stage.fault("set", BETWEEN, node="n3")
    stage.say("Every node passes its own checks. Together they fail, so pairs of them run until n3 is identified.")
    stage.say("The job needs two nodes, and starts with the two that passed:")
    admitted = stage.gate("train-3", *_nodes(), "--min-nodes", "2", expect=0, names=("CollectiveFault", "n3"))
    stage.healthd("fleet", "explain", admitted["id"], "--aggregator", stage.aggregator, expect=0)
    stage.end_job("train-3")
    stage.fault("clear", node="n3")
    stage.say("'make demo-more' shows more: spares, a device that cannot train, and why a job died.")


def play_more(stage: Stage) -> None:
    """Acts for those who want to see more."""
    stage.title(f"2. A bad device, and a job that needs only two of three nodes ({FAULT})")
    stage.fault("set", FAULT, node="n2")
    stage.gate("train-1", *_nodes(), "--min-nodes", "2", "--max-age", "1s", expect=0, names=("WrongResult", "n2"))
    stage.healthd("fleet", "status", "--aggregator", stage.aggregator, expect=0)
    stage.end_job("train-1")
    stage.fault("clear", node="n2")

    stage.title(f"3. A device that passes every single operation but cannot train ({STEP})")
    stage.say("One gradient of one layer is off by a thousandth. Products, memory, digests and copies are correct:")
    own = str(stage.folder / "own")
    stage.healthd("check", *PROBES, "--fault", STEP, "--run-dir", own, "--state-dir", own, expect=1)

    stage.title(f"4. A job dies: a device of n2 breaks while the job runs ({FAULT})")
    stage.gate("train-2", *_nodes()[:4], "--no-collective", expect=0)
    stage.fault("set", FAULT, node="n2")
    stage.say("n1 runs the same command, which ends because it lost n2. Both nodes report to the aggregator, check")
    stage.say("their devices, and print the same verdict:")
    attempt = ("--job", "train-2", "--attempt", str(stage.attempts["train-2"]), "--aggregator", stage.aggregator)
    run = {
        node: ("run", *attempt, "--node", node, "--exit-style", "verdict", "--", "python3", "-c", f"raise {error}")
        for node, error in DYING.items()
    }
    environment = {node: {**ON_NODE, "HEALTHD_NODE_RUN_DIR": str(stage.folder / node)} for node in run}
    environment["n2"]["HEALTHD_NODE_FAULTS"] = FAULT
    other = stage.beside(*run["n1"], more=environment["n1"])
    stage.healthd(*run["n2"], expect=RETRY_ELSEWHERE, more=environment["n2"])
    other.wait(COMMAND_SECONDS)
    stage.say("The next attempt gets the spare node instead of n2:")
    first = stage.attempts["train-2"] + 1
    stage.gate("train-2", *_nodes(), "--min-nodes", "2", "--no-collective", expect=0, first=first)
    stage.end_job("train-2")
    stage.fault("clear", node="n2")


def _nodes() -> tuple[str, ...]:
    return tuple(word for node in NODES for word in ("--node", node))


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends the demonstration as Ctrl-C does, so that nothing is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
