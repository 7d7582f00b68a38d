"""`healthd demo`: the main job before the reader's eyes, with real processes on this machine and nothing acted."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthd.cli.terminal.output import styled
from healthd.core.errors import HealthdError

if TYPE_CHECKING:
    import httpx
import signal
import tempfile
from collections.abc import Iterator

import click

# What `healthd demo` plays on: processes of healthd, commands as a person types them, and what they must come to.


NODES = ("n1", "n2", "n3")
START_SECONDS = 180.0
GATE_WAIT, COMMAND_SECONDS = "4m", 300.0
"""What a gate may take on a slow machine; on an idle one it takes seconds."""
TRIES = 3
"""Of an act that ends in "it cannot be told", as it does where ranks do not get a turn in time."""
# A machine that is busy may take so long to start ranks; none of the demonstration's faults is found by these.
PATIENT = {"HEALTHD_POLICY_COLLECTIVE_START": "180s", "HEALTHD_POLICY_COLLECTIVE_JOIN": "90s"}


@dataclass
class Stage:
    """The processes of the demonstration; leaving the context ends them all."""

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
        """Tell what happens."""
        self.console.print(f"[dim]{text}[/]")

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
        """One process of healthd, its log in the folder; it ends with us whatever happens."""
        (self.folder / name).mkdir(exist_ok=True)
        shown = ["healthd", *arguments]
        self.console.print(f"[green]$[/] {shlex.join(shown)} &".replace(str(self.folder), "$D"))
        with (self.folder / f"{name}.log").open("wb") as log:
            environment = {**self.environment, "HEALTHD_POLICY_RECOVERY": "2s", **PATIENT}
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
        raise HealthdError(f"{name} did not answer {url} within {START_SECONDS:.0f} s: {self.log_tail(name)}")

    def check_alive(self) -> None:
        """HealthdError with the log's end when a process has ended."""
        for name, process in zip(("aggregator", *NODES), self.processes, strict=False):
            if process.poll() is not None:
                raise HealthdError(f"{name} ended with code {process.returncode}: {self.log_tail(name)}")

    def log_tail(self, name: str) -> str:
        """The last words of a process."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def wait_for_health(self, nodes: Sequence[str]) -> None:
        """Until the nodes have checked themselves and are well, with a spinner."""
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
        """Who has the devices of this machine, which is then left alone: words for an error; empty where nobody."""
        found = _get(f"http://127.0.0.1:{self.ports[node]}/v1/node").json()
        names = ", ".join(claim["holder"] for claim in found.get("allocated", ()))
        return f"; this machine is in use ({names}), try again when it is free" if names else ""

    def curl(self, path: str, *, expect: int | None, node: str = "n1") -> None:
        """Show a curl line and the head of its real answer; HealthdError for a status other than `expect`, if given."""
        url = f"http://127.0.0.1:{self.ports[node]}{path}"
        answer = _get(url)
        self.console.print(f"[green]$[/] curl -i {url.removeprefix('http://')}")
        body = answer.json()
        shown = json.dumps({key: body[key] for key in ("status", "health", "output") if key in body})
        self.console.print(f"  HTTP {answer.status_code}  {shown[:-1]}, ...}}", markup=False)
        if expect is not None and answer.status_code != expect:
            raise HealthdError(f"{url} answered {answer.status_code}, not {expect}: {body.get('output')}")

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
                self.say("That is not what it has to say, as on a machine that is too busy. Once more:")
        said = "; ".join(reason["message"] for reason in decision.get("reasons", ())) or "nothing"
        wanted = "admit the nodes" if names is None else f"name {names[1]} for {names[0]}"
        raise HealthdError(
            f"this machine is too slow or too busy for the demonstration: after {TRIES} tries the gate of {job} did "
            f"not {wanted}, and said: {said}. Try again when the machine is idle"
        )

    def _decision(self, job: str, attempt: int) -> dict[str, Any]:
        """What the aggregator has decided for this attempt; empty where it knows of none."""
        gates = _get(f"{self.aggregator}/v1/gates?job={job}").json()["gates"]
        found = [gate["id"] for gate in gates if gate["asked_attempt"] == attempt]
        decision: dict[str, Any] = _get(f"{self.aggregator}/v1/gates/{found[0]}").json() if found else {}
        return decision

    def end_job(self, job: str) -> None:
        """Give the nodes back, as the end of the job would."""
        again = ("--attempt", str(self.attempts[job])) if self.attempts[job] else ()
        self.healthd("gate", "release", "--aggregator", self.aggregator, "--job", job, *again, expect=0)

    def healthd(self, *arguments: str, expect: int | None, more: Mapping[str, str] | None = None) -> int:
        """
        Run a command of healthd as a person would, and show what it prints; its progress is on the terminal.

        `more` is added to its environment. Its exit code; HealthdError where it is not `expect` (None: any may be).
        """
        shown = shlex.join(["healthd", *arguments]).replace(str(self.folder), "$D")
        self.console.print(f"[green]$[/] {shown}")
        done = self._run(*arguments, environment={**self._as_here(), **(more or {})}, live=sys.stderr.isatty())
        # Its colours are its own, and all else it has escaped already.
        shown_output = styled(sys.stdout)
        shown_output.write(
            "".join(f"  {line}\n" for line in (*done.stdout.splitlines(), *(done.stderr or "").splitlines()))
        )
        shown_output.flush()
        self.console.print(f"  [dim]exit code {done.returncode}[/]")
        if expect is not None and done.returncode != expect:
            raise HealthdError(f"'{shown}' ended with {done.returncode}, not {expect}")
        return done.returncode

    def _as_here(self) -> dict[str, str]:
        """What makes a command write to a pipe as to this terminal, less the two columns that we put before it."""
        if not self.console.is_terminal:
            return self.environment
        return {**self.environment, "FORCE_COLOR": "1", "COLUMNS": str(max(40, self.console.width - 2))}

    def _run(
        self, *arguments: str, environment: dict[str, str] | None = None, live: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """`live`: its standard error is ours. Captured, the spinner would be pages of frames."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "healthd", *arguments],
            stdout=subprocess.PIPE,
            stderr=None if live else subprocess.PIPE,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            env=environment or self.environment,
        )

    def beside(self, *arguments: str, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command of healthd that nobody looks at; it ends with us whatever happens."""
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

    from healthd.core.http.client import verification

    return httpx.get(url, timeout=5.0, trust_env=False, verify=verification(url))


FAULT = "matmul@cpu:1=corrupt"
STEP = "train_step.block1.gelu_grad@cpu:1=corrupt:0.001"
# What a job's command says of a broken device, and what one says that has lost its peer.
DYING = {
    "n1": "RuntimeError('[pair.cc:553] Connection closed by peer [127.0.0.1]:46264')",
    "n2": "RuntimeError('CUDA error: device-side assert triggered')",
}
ON_NODE = {"HEALTHD_NODE_CHECKS": "memory_free,matmul,digest"}
RETRY_ELSEWHERE = 75
BETWEEN = "all_reduce@rank:4=corrupt"  # a rank that n3 has among the three nodes alone


@click.command(short_help="Three nodes, an aggregator and a gate, on this machine.")
@click.option("--keep", is_flag=True, help="Keep everything running until Ctrl-C.")
def demo(keep: bool) -> int:
    """Three nodes, an aggregator and a gate on this machine: admit, a fault, reject by name, spare, repair, admit."""
    with tempfile.TemporaryDirectory(prefix="healthd-demo-") as folder, _signals(), Stage(Path(folder)) as stage:
        play(stage)
        if keep:
            stage.linger()
    return 0


def play(stage: Stage) -> None:
    """The acts, in order; HealthdError where one does not go as it must."""
    stage.title("1. Three node daemons and an aggregator start, each a process of its own")
    stage.start_all()
    stage.say("A daemon that has not checked yet is never healthy. What a person would type:")
    stage.curl("/health", expect=None)  # 503, unless it has checked by now, as on a busy machine
    stage.say("Each runs real tensor operations on its devices and real collectives between them ...")
    stage.wait_for_health(NODES)
    stage.curl("/health", expect=200)

    stage.title(
        "2. May a job start on the three nodes? The gate looks at the evidence and has them run collectives together"
    )
    stage.gate("train-1", *_nodes(), expect=0)
    stage.say("The lease ends with the job; here by hand:")
    stage.end_job("train-1")

    stage.title(f"3. A fault: one bit of what cpu:1 of n2 computes is flipped ({FAULT})")
    stage.healthd("fault", "set", FAULT, "--run-dir", str(stage.folder / "n2"), expect=0)
    stage.say("A job that wants evidence made now has the checks run again, and is told who is at fault:")
    stage.gate("train-2", *_nodes(), "--max-age", "1s", expect=75, names=("WrongResult", "n2"))
    stage.curl("/health", node="n2", expect=503)

    stage.title("4. The same job is content with two of the three: it starts with the spare")
    stage.gate("train-3", *_nodes(), "--min-nodes", "2", expect=0)
    stage.end_job("train-3")

    stage.title("5. The fault is cleared, and what it had latched with it")
    stage.healthd("fault", "clear", "--run-dir", str(stage.folder / "n2"), expect=0)

    stage.title(f"6. A fault that no node can see alone: n3 sends wrong values to others ({BETWEEN})")
    stage.healthd("fault", "set", BETWEEN, "--run-dir", str(stage.folder / "n3"), expect=0)
    stage.say("All three pass their own checks. Together they have to fail:")
    rejected = stage.gate("train-4", *_nodes(), expect=75, names=("CollectiveFault", "n3"))
    stage.say("Pairs of them told who it is:")
    stage.healthd("fleet", "explain", rejected["id"], "--aggregator", stage.aggregator, expect=0)
    stage.healthd("fault", "clear", "--run-dir", str(stage.folder / "n3"), expect=0)
    stage.gate("train-5", *_nodes(), expect=0)
    stage.healthd("fleet", "status", "--aggregator", stage.aggregator, expect=0)
    stage.end_job("train-5")

    training(stage)
    died(stage)
    stage.title(f"Done in {time.monotonic() - stage.began:.0f} s")


def training(stage: Stage) -> None:
    """The act of a device that single operations find nothing wrong with."""
    stage.title(f"7. A device that passes every single operation and cannot train ({STEP})")
    stage.say("One gradient of one layer is off by a thousandth, once. Products, memory, digests and copies are right:")
    own = str(stage.folder / "own")
    probes = ("matmul", "memory", "digest", "transfer", "train_step")
    stage.healthd("check", *probes, "--fault", STEP, "--run-dir", own, "--state-dir", own, expect=1)


def died(stage: Stage) -> None:
    """The act of a job that is started, dies of a device, and is started again without it."""
    stage.title(f"8. A job dies: a device of n2 breaks while it runs ({FAULT})")
    stage.gate("train-6", *_nodes()[:4], "--no-collective", expect=0)
    stage.healthd("fault", "set", FAULT, "--run-dir", str(stage.folder / "n2"), expect=0)
    stage.say("On n1 the same command runs, and ends since it has lost n2. What each says goes to the aggregator,")
    stage.say("the devices are checked on both, and both print the one verdict:")
    attempt = ("--job", "train-6", "--attempt", str(stage.attempts["train-6"]), "--aggregator", stage.aggregator)
    run = {
        node: ("run", *attempt, "--node", node, "--exit-style", "verdict", "--", "python3", "-c", f"raise {words}")
        for node, words in DYING.items()
    }
    environment = {node: {**ON_NODE, "HEALTHD_NODE_RUN_DIR": str(stage.folder / node)} for node in run}
    environment["n2"]["HEALTHD_NODE_FAULTS"] = FAULT
    other = stage.beside(*run["n1"], more=environment["n1"])
    stage.healthd(*run["n2"], expect=RETRY_ELSEWHERE, more=environment["n2"])
    other.wait(COMMAND_SECONDS)
    stage.say("The next attempt gets the spare in the place of n2:")
    first = stage.attempts["train-6"] + 1
    stage.gate("train-6", *_nodes(), "--min-nodes", "2", "--no-collective", expect=0, first=first)
    stage.end_job("train-6")
    stage.healthd("fault", "clear", "--run-dir", str(stage.folder / "n2"), expect=0)


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
