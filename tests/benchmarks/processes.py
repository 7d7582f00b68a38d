"""
Real processes for benchmarks: started with a clean environment, ended whatever happens, looked at through /proc.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEALTHD = (sys.executable, "-m", "healthd")
START_SECONDS = 60.0
PROCESS_SECONDS = 95.0
ANSWER_SECONDS = 90.0

BARE_APP = """
import sys
import uvicorn
from fastapi import FastAPI

app = FastAPI()

@app.get("/livez")
async def livez() -> dict[str, str]:
    return {"status": "pass"}

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without settings of healthd, so that a developer's own do not change what is measured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHD_")}
    return {**kept, **(extra or {})}


SEPARATE: Mapping[str, Any] = {"cwd": ROOT, "env": environment(), "start_new_session": True}
"""How every process is started that is measured."""


def timed(argv: Sequence[str], *, codes: Sequence[int] = (0,), seconds: float = PROCESS_SECONDS) -> tuple[float, str]:
    """
    Wall seconds of a whole process, and its standard output; RuntimeError when it ends with another code.

    Whatever is compared runs in a session of its own, as the workers of healthd do: on a busy machine the kernel shares
    the cores among sessions (autogroup), and one that is shared with a developer's shell gets another part.
    """
    began = time.perf_counter()
    process = subprocess.Popen(argv, **SEPARATE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        took = time.perf_counter() - began
        end(process, grace_seconds=0.0)
    if process.returncode not in codes:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{' '.join(argv[:5])} ended with {process.returncode}: {last[:300]}")
    return took, output


def end(process: subprocess.Popen[Any], *, grace_seconds: float) -> None:
    """End a process that leads its session, politely when it gets a grace, and what it has started there."""
    if grace_seconds and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Service:
    """A process that answers HTTP; `start_seconds` is from its start to its first answer of /livez."""

    pid: int
    port: int
    folder: Path
    start_seconds: float

    def connection(self) -> Keeper:
        """A keep-alive connection to it."""
        return Keeper(self.port)


class Keeper:
    """One kept connection, made by its first request and made anew when the service has closed it while it was idle."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)

    def timed_get(self, path: str) -> tuple[float, int]:
        """Seconds until the whole answer was read, and its status."""
        began = time.perf_counter()
        status, _ = self.exchange("GET", path)
        return time.perf_counter() - began, status

    def json(self, path: str) -> Any:
        """The decoded body at that path."""
        return json.loads(self.exchange("GET", path)[1])

    def exchange(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer."""
        if self._http.sock is not None and select.select([self._http.sock], [], [], 0)[0]:
            self._http.close()  # before a request nothing but its end can be read from a connection
        self._http.request(method, path, body=body, headers={"content-type": "application/json"})
        answer = self._http.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        """Hang up."""
        self._http.close()


@contextlib.contextmanager
def service(
    argv: Sequence[str], port: int, folder: Path, *, extra: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """A service from the moment it answers /livez; ended on leaving."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with (folder / "log").open("wb") as log:
        separate = {**SEPARATE, "env": environment(extra)}
        process = subprocess.Popen(argv, **separate, stdout=log, stderr=log)
    try:
        while not _answers(port):
            if process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                words = (folder / "log").read_text(errors="replace").strip()[-300:]
                raise RuntimeError(f"{' '.join(argv[:5])} does not answer on port {port}: {words}")
            time.sleep(0.002)
        yield Service(process.pid, port, folder, time.perf_counter() - began)
    finally:
        end(process, grace_seconds=10.0)


def daemon(
    folder: Path, *arguments: str, extra: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Service]:
    """`healthd node` with its own directories."""
    port = free_port()
    where = ("--listen", f"127.0.0.1:{port}", "--state-dir", str(folder / "state"), "--run-dir", str(folder))
    return service((*HEALTHD, "node", "--name", folder.name, *where, *arguments), port, folder, extra=extra)


def aggregator(folder: Path) -> contextlib.AbstractContextManager[Service]:
    """`healthd aggregator` with its own database, which does not wait for nodes it has never known."""
    port = free_port()
    where = ("--listen", f"127.0.0.1:{port}", "--state-dir", str(folder / "state"))
    return service((*HEALTHD, "aggregator", *where), port, folder, extra={"HEALTHD_POLICY_RECOVERY": "1s"})


def bare_app(folder: Path) -> contextlib.AbstractContextManager[Service]:
    """The smallest FastAPI application under plain uvicorn: what the daemon is compared with."""
    port = free_port()
    return service((sys.executable, "-c", BARE_APP, str(port)), port, folder)


def _answers(port: int) -> bool:
    try:
        # A refused connection costs microseconds, a whole HTTP client tens of milliseconds.
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"GET /livez HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
            return b" 200 " in sock.recv(4096).split(b"\r\n")[0]
    except OSError:
        return False


def wait_until(question: Any, within_seconds: float, what: str) -> None:
    """Until `question()` is true; RuntimeError after that time."""
    end = time.monotonic() + within_seconds
    while not question():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {within_seconds:g} s")
        time.sleep(0.05)


# --- /proc ------------------------------------------------------------------------------------------------------------


def own_cpu_seconds(pid: int) -> float:
    """Processor time of a process's own threads, in nanosecond steps (schedstat; /proc/PID/stat counts in 10 ms)."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def children_cpu_seconds(pid: int) -> float:
    """Processor time of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, name: str = "Rss") -> int:
    """`Rss` or `Pss` (shared pages divided among those who share them) of a process alone."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no {name}")


def children(pid: int) -> list[str]:
    """Command lines of living children of a process (zombies are not left running)."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == pid and stat[0] != "Z":
                    found.append(Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
