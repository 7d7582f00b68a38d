"""`healthd demo`: the main job before the reader's eyes, with real processes on this machine and nothing acted."""

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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from checks.json_text import parse_json
from healthd.cli.terminal.output import styled
from healthd.core.errors import HealthdError

NODES = ("n1", "n2", "n3")
FAULT = "matmul@cpu:1=corrupt"
BETWEEN = "all_reduce@rank:4=corrupt"  # a rank that n3 has among the three nodes alone
START_SECONDS = 60.0


@click.command(short_help="Three nodes, an aggregator and a gate, on this machine.")
@click.option("--keep", is_flag=True, help="Leave everything running to play with, until Ctrl-C.")
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
    stage.curl("/health", expect=503)
    stage.say("Each runs real tensor operations on its devices and real collectives between them ...")
    stage.wait_for_health(NODES)
    stage.curl("/health", expect=200)

    stage.title(
        "2. May a job start on the three nodes? The gate looks at the evidence and has them run collectives together"
    )
    admitted = stage.gate("train-1", *_nodes(), expect=0)
    stage.say("The lease ends with the job; here by hand:")
    stage.end_job(admitted["id"])

    stage.title(f"3. A fault: one bit of what cpu:1 of n2 computes is flipped ({FAULT})")
    stage.healthd("fault", "set", FAULT, "--run-dir", str(stage.folder / "n2"), expect=0)
    stage.say("A job that wants evidence made now has the checks run again, and is told who is at fault:")
    stage.gate("train-2", *_nodes(), "--max-age", "1s", expect=75)
    stage.curl("/health", node="n2", expect=503)

    stage.title("4. The same job is content with two of the three: it starts with the spare")
    admitted = stage.gate("train-3", *_nodes(), "--min-nodes", "2", expect=0)
    stage.end_job(admitted["id"])

    stage.title("5. The fault is cleared, and what it had latched with it")
    stage.healthd("fault", "clear", "--run-dir", str(stage.folder / "n2"), expect=0)

    stage.title(f"6. A fault that no node can see alone: n3 sends wrong values to others ({BETWEEN})")
    stage.healthd("fault", "set", BETWEEN, "--run-dir", str(stage.folder / "n3"), expect=0)
    stage.say("All three pass their own checks. Together they fail; pairs of them tell who it is:")
    rejected = stage.gate("train-4", *_nodes(), expect=75)
    stage.healthd("fleet", "explain", rejected["id"], "--aggregator", stage.aggregator, expect=0)
    stage.healthd("fault", "clear", "--run-dir", str(stage.folder / "n3"), expect=0)
    stage.gate("train-5", *_nodes(), expect=0)
    stage.healthd("fleet", "status", "--aggregator", stage.aggregator, expect=0)
    stage.title(f"Done in {time.monotonic() - stage.began:.0f} s")


def _nodes() -> tuple[str, ...]:
    return tuple(word for node in NODES for word in ("--node", node))


@dataclass
class Stage:
    """The processes of the demonstration; leaving the context ends them all."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Stage:
        from healthd.cli.terminal.console import Terminal

        self.console = Terminal(soft_wrap=True)
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
            environment = {**os.environ, "HEALTHD_POLICY_RECOVERY": "2s"}
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
                httpx.get(url, timeout=2.0, trust_env=False)
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
        import httpx

        end = time.monotonic() + START_SECONDS
        waiting, last = list(nodes), ""
        with self.console.status("checking"):
            while waiting:
                self.check_alive()
                answer = httpx.get(f"http://127.0.0.1:{self.ports[waiting[0]]}/health", timeout=5.0, trust_env=False)
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
        import httpx

        found = httpx.get(f"http://127.0.0.1:{self.ports[node]}/v1/node", timeout=5.0, trust_env=False).json()
        names = ", ".join(claim["holder"] for claim in found.get("allocated", ()))
        return f"; this machine is in use ({names}), try again when it is free" if names else ""

    def curl(self, path: str, *, expect: int, node: str = "n1") -> None:
        """Show a curl line and the head of its real answer."""
        import httpx

        url = f"http://127.0.0.1:{self.ports[node]}{path}"
        answer = httpx.get(url, timeout=5.0, trust_env=False)
        self.console.print(f"[green]$[/] curl -i {url.removeprefix('http://')}")
        body = answer.json()
        shown = json.dumps({key: body[key] for key in ("status", "health", "output") if key in body})
        self.console.print(f"  HTTP {answer.status_code}  {shown[:-1]}, ...}}", markup=False)
        if answer.status_code != expect:
            raise HealthdError(f"{url} answered {answer.status_code}, not {expect}: {body.get('output')}")

    def gate(self, job: str, *arguments: str, expect: int) -> dict[str, Any]:
        """Ask for a gate as a hook would; the decision."""
        command = ("gate", "--aggregator", self.aggregator, "--job", job, *arguments, "--wait", "45s")
        self.healthd(*command, expect=expect)
        again = self._run(*command, "--json")  # the same job and attempt: the same answer, from the database
        decision: dict[str, Any] = parse_json(again.stdout)
        return decision

    def end_job(self, gate: str) -> None:
        """Give the lease back, and wait until the nodes are free."""
        import httpx

        url = f"{self.aggregator}/v1/gates/{gate}/lease"
        self.console.print(f"[green]$[/] curl -X DELETE {url.removeprefix('http://')}")
        answer = httpx.delete(url, timeout=10.0, trust_env=False)
        if answer.status_code >= 300:
            raise HealthdError(f"DELETE {url} answered {answer.status_code}: {answer.text}")

    def healthd(self, *arguments: str, expect: int) -> None:
        """Run a command of healthd as a person would, and show what it prints; its progress is on the terminal."""
        shown = shlex.join(["healthd", *arguments]).replace(str(self.folder), "$D")
        self.console.print(f"[green]$[/] {shown}")
        done = self._run(*arguments, environment=self._environment(), live=sys.stderr.isatty())
        # Its colours are its own, and all else it has escaped already.
        shown_output = styled(sys.stdout)
        shown_output.write("".join(f"  {line}\n" for line in (*done.stdout.splitlines(), *_lines(done.stderr))))
        shown_output.flush()
        self.console.print(f"  [dim]exit code {done.returncode}[/]")
        if done.returncode != expect:
            raise HealthdError(f"'{shown}' ended with {done.returncode}, not {expect}")

    def _environment(self) -> dict[str, str]:
        """What makes a command write to a pipe as to this terminal, less the two columns that we put before it."""
        if not self.console.is_terminal:
            return dict(os.environ)
        return {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(max(40, self.console.width - 2))}

    def _run(
        self, *arguments: str, environment: dict[str, str] | None = None, live: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """`live`: its standard error is ours. Captured, the spinner would be pages of frames."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "healthd", *arguments],
            stdout=subprocess.PIPE,
            stderr=None if live else subprocess.PIPE,
            text=True,
            timeout=90,
            check=False,
            env=environment,
        )

    def linger(self) -> None:
        """Stay until Ctrl-C."""
        self.console.print("\n[bold]Left running; Ctrl-C ends everything. Try:[/]")
        for line in (
            f"export D={self.folder} PATH={Path(sys.executable).parent}:$PATH",
            f"curl -s 127.0.0.1:{self.ports['n1']}/health | python3 -m json.tool",
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


def _lines(text: str | None) -> list[str]:
    return (text or "").splitlines()


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
