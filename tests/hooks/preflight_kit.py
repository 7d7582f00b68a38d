"""A job of several preflights as real processes on this machine, that leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests import prepared
from tests.aggregator.service import free_port
from tests.patience import PATIENCE

CONFIG = """
[node]
checks = ["matmul", "memory_free"]
[node.allocations]
read = false # other tests of this machine may run a Slurm
[checks.matmul]
sizes = [64, 64]
repeats = 1
[preflight]
gone = "4s"
acknowledge = "15s"
linger = "3s"
"""

# What the job's command tells of itself. It ends once the file JOB_UNTIL is there, if one is named, with the code
# JOB_CODE, or by a signal where that is negative.
COMMAND = """
import os, signal, sys, time
print("started", os.environ["HEALTHD_RANK"], os.environ["HEALTHD_NNODES"], os.environ["HEALTHD_MAIN"])
print("hosts", open(os.environ["HEALTHD_HOSTFILE"]).read().split())
print("files", sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")))
print("ignored", [line.split()[1] for line in open("/proc/self/status") if line.startswith("SigIgn")][0])
print("torchrun", *(os.environ.get(n, "-") for n in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")))
sys.stdout.flush()
while "JOB_UNTIL" in os.environ and not os.path.exists(os.environ["JOB_UNTIL"]):
    time.sleep(0.02)
code = int(os.environ.get("JOB_CODE", "0"))
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@dataclass
class Ended:
    """One rank's end: its exit code, what it said, and when (monotonic) its output was closed."""

    code: int
    out: str
    err: str
    at: float


@dataclass
class Job:
    """The ranks of one job. Leaving the context kills what is left and is no excuse for it: see `left`."""

    folder: Path
    size: int = 3
    port: int = field(default_factory=free_port)
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    ranks: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="preflight-", dir="/tmp"))  # short: it holds sockets
        self.config = self.folder / "healthd.toml"
        self.config.write_text(CONFIG)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.ranks.values():
            process.kill()
            process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHD_")}
        return {**kept, "TMPDIR": str(self.temporary), "PREFLIGHT_TEST": self.marker, **more}

    def start(
        self,
        rank: int,
        *options: str,
        command: Sequence[str] = (sys.executable, "-c", COMMAND),
        env: Mapping[str, str] | None = None,
        place: Sequence[str] | None = None,
        close_stdin: bool = False,
        full_stdout: bool = False,
        folder: Path | None = None,
        key: int | None = None,
        executed: bool = False,
        within: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """`within` is a command that starts the hook by its own last arguments, such as unshare."""
        told = ["--nnodes", str(self.size), "--node-rank", str(rank), "--main", f"127.0.0.1:{self.port}"]
        # -P: as the installed command, which does not look into the working directory either.
        line = [sys.executable, "-P", "-m", "healthd", "preflight", "--config", str(self.config)]
        line += [*(told if place is None else place), *options, "--", *command]
        if close_stdin:
            line = ["sh", "-c", 'exec "$@" <&-', "sh", *line]
        if full_stdout:
            line = ["sh", "-c", 'exec "$@" >/dev/full', "sh", *line]
        process = (subprocess.Popen if executed or within else prepared.Popen)(
            [*within, *line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(**(env or {})),
            cwd=folder,
        )
        self.ranks[rank if key is None else key] = process
        return process

    def end(self, rank: int, *, timeout: float = 40.0) -> Ended:
        """Wait for the end of a rank and of its output: a launcher does just this."""
        process = self.ranks[rank]
        out, err = process.communicate(timeout=timeout * PATIENCE)
        assert "Traceback" not in err, err
        return Ended(process.returncode, out, err, time.monotonic())

    def left(self) -> dict[int, str]:
        """Processes that this job has started and that are still there, by their environment."""
        return {pid: name for pid, name in processes() if f"PREFLIGHT_TEST={self.marker}" in environment_of(pid)}

    def wait_for(self, *words: str, seconds: float = 20.0) -> int:
        """The process id of the first process of this job whose command line has all the words."""
        end = time.monotonic() + seconds * PATIENCE
        while time.monotonic() < end:
            for pid, line in self.left().items():
                if all(word in line for word in words):
                    return pid
            time.sleep(0.05)
        raise AssertionError(f"no process {words}: {self.left()}")

    def reported(self, rank: int, *, seconds: float = 20.0) -> None:
        """Until the main node's aggregator has heard of a rank."""
        end = time.monotonic() + seconds * PATIENCE
        with httpx.Client(trust_env=False, verify=False) as http:
            while time.monotonic() < end:
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(f"http://127.0.0.1:{self.port}/v1/nodes/rank-{rank}").status_code == 200:
                        return
                time.sleep(0.05)
        raise AssertionError(f"rank {rank} has not reported")

    def nothing_left(self, *, seconds: float = 8.0) -> None:
        """No process and no folder of this job, after a while for those that are just ending."""
        end = time.monotonic() + seconds * PATIENCE
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left
        assert [path.name for path in self.temporary.iterdir() if not path.name.startswith("healthd-hosts-")] == []


def processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_text(errors="replace").replace("\0", " ")


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""
