"""Services and commands of healthd as processes of their own, for `tests.aggregator.cluster`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests import prepared
from tests.patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 30.0


class Service:
    """One process of healthd that can be killed and started again."""

    def __init__(self, name: str, command: list[str], *, folder: Path, env: Mapping[str, str], pattern: str) -> None:
        self.name, self.command, self.folder = name, command, folder
        self.log = folder / f"{name}.log"
        self.env = dict(env)
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._pattern = pattern

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    def start(self, *, ready: bool = True) -> Service:
        """Start it, and wait until it says where it answers."""
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = prepared.Popen(self.command, stdout=log, stderr=log, cwd=ROOT, env=self.env)

        def listening() -> bool:
            assert self.process is not None
            text = self.log.read_bytes()[before:].decode(errors="replace")
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}: {text}"
            found = re.search(self._pattern, text)
            if found and ready:
                self.url = found[1] if "://" in found[1] else f"{self.scheme}://{found[1]}"
            return found is not None

        if ready:
            until(listening, START_SECONDS, lambda: f"{self.name}: {self.said()}")
        return self

    @property
    def scheme(self) -> str:
        return "https" if "--tls-cert" in self.command else "http"

    def said(self) -> str:
        """The log up to now."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def ended(self, seconds: float = 10.0) -> int:
        """The exit code of a process that must end by itself."""
        assert self.process is not None
        return self.process.wait(seconds * PATIENCE)

    def get(self, path: str, **more: Any) -> httpx.Response:
        more = {"timeout": 60.0, "verify": self.scheme == "https", **more}
        return httpx.get(f"{self.url}{path}", trust_env=False, **more)

    def health(self, query: str = "") -> int:
        return self.get(f"/health{query}").status_code


def readiness(service: Service) -> str:
    """What an aggregator says of its readiness, one that hangs too."""
    with contextlib.suppress(httpx.TransportError):
        return service.get("/readyz", timeout=2.0).text
    return "nobody answers"


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """Its one line of error."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


class Command:
    """A command under way."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def said(self, seconds: float = 40.0) -> Said:
        """What it came to."""
        out, err = self.process.communicate(timeout=seconds * PATIENCE)
        return Said(self.process.returncode, out, err)


def until(true: Callable[[], bool], seconds: float = 15.0, why: Callable[[], str] = lambda: "") -> None:
    """Wait for something to become true; AssertionError says what did not. `seconds` are those of a quiet machine."""
    end = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < end, f"it did not happen in {seconds * PATIENCE:.0f} s; {why()}"
        time.sleep(0.05)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, outside the range that outgoing connections take theirs from."""
    low = 20000 + secrets.randbelow(10000)
    for port in range(low, low + 500):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {low} on")
